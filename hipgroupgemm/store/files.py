"""One file of the tuning store: read once a change, written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hipgroupgemm.runtime.directories import private_directory, read_trusted, replace_file, require_trusted
from hipgroupgemm.store.records import StoredResult

try:
    import msgspec
except ImportError:  # then the store is off, see `store.why_off`
    msgspec = None  # type: ignore[assignment]

__all__ = ["SCHEMA", "VARIABLE", "StoreFile", "StoreWriteError", "decode", "msgspec", "parse", "render", "warn_once"]

VARIABLE = "HIPGROUPGEMM_TUNING_STORE"
FORMAT = "hipgroupgemm tuning store"
SCHEMA = 2

_log = logging.getLogger("hipgroupgemm.tuning")
_LOCK_SECONDS = 30.0
_warned: set[tuple[Any, ...]] = set()


@dataclasses.dataclass
class _Document:
    """A file or an export: results by their config's id, in the order in which they were stored, each understood when it is asked for."""

    format: str
    schema: int
    results: dict[str, list[msgspec.Raw]]


class StoreWriteError(RuntimeError):
    """A file of the store can't be written; the text says which, why, and what to do."""


def warn_once(key: tuple[Any, ...], text: str, *arguments: object) -> None:
    """A warning of the logger `hipgroupgemm.tuning`, once a process for each key."""
    if key not in _warned:
        _warned.add(key)
        _log.warning(text, *arguments)


def parse(data: bytes) -> dict[str, list[Any]]:
    """The results of a file or an export; raises ValueError for anything else."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no tuning store ({error})") from None
    if document.format != FORMAT or document.schema != SCHEMA:
        raise ValueError(f"is {document.format!r} of schema {document.schema}, this version of hipgroupgemm knows {FORMAT!r} of {SCHEMA}")
    return document.results


def render(results: Iterable[StoredResult], others: dict[str, list[Any]]) -> bytes:
    """The text of a file or an export: `others` as they are, and `results` behind them."""
    for result in results:
        others.setdefault(result.id, []).append(msgspec.Raw(msgspec.json.encode(result)))
    return msgspec.json.format(msgspec.json.encode(_Document(FORMAT, SCHEMA, others)), indent=1) + b"\n"


def decode(name: str, raws: Iterable[Any], where: object) -> tuple[list[StoredResult], list[Any]]:
    """The results of a config's id, and those that are not understood, which cost one warning a file."""
    found, others = [], []
    for raw in raws:
        try:
            result = msgspec.json.decode(raw, type=StoredResult)
            if result.id != name or result.config != result.config.key():
                raise ValueError("its config is not the one that its name says")
            found.append(result)
        except (ValueError, RecursionError) as error:
            others.append(raw)
            warn_once(("result", where), "tuning store: %s has a result that is not understood (%s); it is skipped", where, error)
    return found, others


class StoreFile:
    """The results for one kind of device. Any thread and any process may use it at any time.

    Readers take no lock: a file is replaced in one step. Writers hold a lock beside it (`.NAME.lock`, which stays), read what is there,
    change it, and replace it once the new one is on the disk. A file that can't be understood is passed over, and set aside as
    NAME.broken-N by the next writer. A symbolic link stays one: all this is done to what it leads to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""  # why a file that is there can't be used
        self._name = os.fspath(path)
        self._read: tuple[Any, dict[str, list[Any]], dict[str, list[StoredResult]]] = (None, {}, {})  # (of stat, raw, understood)

    def results(self, name: str | None = None) -> list[StoredResult]:
        """The results of a config's id, or all. Raises nothing; costs one stat as long as the file is the same."""
        raws, known = self._current()
        found = []
        for one in list(raws) if name is None else [name]:
            if one not in known:
                known[one] = decode(one, raws.get(one, ()), self.path)[0]
            found += known[one]
        return found

    def _current(self) -> tuple[dict[str, list[Any]], dict[str, list[StoredResult]]]:
        seen = None
        try:
            found = os.stat(self._name)
            seen = (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)
            if self._read[0] != seen:
                self.trouble, self._read = "", (seen, self._load(), {})
        except (FileNotFoundError, NotADirectoryError):
            self.trouble, self._read = "", (None, {}, {})
        except (OSError, ValueError) as error:  # ValueError: no document, or a null character in the name
            self.trouble, self._read = f"{self.path} {getattr(error, 'strerror', None) or error}", (seen, {}, {})
            warn_once(("read", self.trouble), "tuning store: %s; going on without it", self.trouble)
        return self._read[1:]

    @property
    def empty(self) -> bool:
        """Whether the file that was read last holds nothing."""
        return not self._read[1]

    def _load(self) -> dict[str, list[Any]]:
        """What is on the disk; raises OSError and ValueError."""
        if not stat.S_ISREG(os.stat(self._name).st_mode):  # a pipe would keep us waiting
            raise OSError("is no regular file")
        require_trusted(self.path.parent)
        return parse(read_trusted(self.path))

    def update(self, change: Callable[[list[StoredResult]], list[StoredResult]], name: str | None = None) -> bool:
        """Puts what `change` makes of the results of a config's id, or of all, in their place, under the lock. Whether that was another.

        Raises:
            StoreWriteError: the directory or the file can't be written, or is not ours alone.
        """
        try:
            from filelock import FileLock

            private_directory(self.path.parent)
            real = Path(os.path.realpath(self.path))
            with FileLock(real.with_name(f".{real.name}.lock"), timeout=_LOCK_SECONDS, mode=0o600):
                try:
                    raws = self._load()
                except FileNotFoundError:
                    raws = {}
                except ValueError as error:
                    names = (real.with_name(f"{real.name}.broken-{number}") for number in itertools.count(1))
                    aside = next(name for name in names if not os.path.lexists(name))
                    os.rename(real, aside)
                    _log.warning("tuning store: %s %s; it was set aside as %s", real, error, aside.name)
                    raws = {}
                held: list[StoredResult] = []
                for one in list(raws) if name is None else [name]:
                    found, raws[one] = decode(one, raws.get(one, ()), self.path)
                    held += found
                results = change(held)
                if [*map(id, results)] == [*map(id, held)]:  # equal ones may differ in their times
                    return False
                _replace(real, render(results, raws))
                return True
        except (OSError, ValueError, NotImplementedError, ImportError) as error:  # filelock's Timeout is an OSError
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            remedy = "pip install filelock" if isinstance(error, ImportError) else f"set {VARIABLE} to another directory, or off"
            raise StoreWriteError(f"{self.path}: can't be written ({why}); {remedy}") from error


def _replace(path: Path, data: bytes) -> None:
    """Puts a new file in the place of the old one, under the lock."""
    prefix = f".{path.name}."
    for name in os.listdir(path.parent):  # of writers that were killed: none is at work, since the lock is ours
        if name.startswith(prefix) and name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                os.unlink(path.parent / name)
    replace_file(path, data, durable=True)
