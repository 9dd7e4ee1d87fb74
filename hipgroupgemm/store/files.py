"""One file of the tuning store: read once a change, written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import reprlib
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hipgroupgemm.store.identity import DeviceKind
from hipgroupgemm.store.records import BrokenDocument, NewerDocument, check_document, new_document

__all__ = ["StoreFile", "StoreWriteError", "warn_once"]

_log = logging.getLogger("hipgroupgemm.tuning")
_LOCK_SECONDS = 30.0
_SET_ASIDE_SECONDS = 5.0

_parsing = threading.RLock()
_warned: set[tuple[Any, ...]] = set()


def warn_once(key: tuple[Any, ...], text: str, *arguments: object) -> None:
    """A warning of the logger `hipgroupgemm.tuning`, once a process for each key."""
    if key not in _warned:
        _warned.add(key)
        _log.warning(text, *arguments)


class StoreWriteError(RuntimeError):
    """A file of the store can't be written; the text says which, why, and what to do."""


class StoreFile:
    """The results of one kind of device. Any thread and any process may use it at any time.

    Readers take no lock: a file is replaced in one step, so they see the old one or the new one. Writers hold a lock beside the file
    (`.NAME.lock`, which stays), read what is there, change it, and replace it once the new one is on the disk. A writer that is killed
    leaves the file as it was, frees its lock and leaves a temporary file, which the next writer removes.

    A file that can't be understood is renamed to NAME.broken-N. One of a later schema belongs to a newer version of this package: it is
    neither read nor touched, and nothing is stored as long as it is there. A symbolic link stays one: all this is done to what it leads to.

    Args:
        path: of the file; it and its directory need not exist.
        device: the kind of device that it is for.
    """

    def __init__(self, path: Path, device: DeviceKind) -> None:
        self.path = path
        self.device = device
        self.trouble = ""  # why a file that is there can't be used
        self._name = os.fspath(path)
        self._read: tuple[tuple[int, ...] | None, dict[str, Any] | None] = (None, None)  # (what stat said, the document)
        self._memo: tuple[Any, dict[str, Any]] = (None, {})  # (the document, what was made of parts of it)

    def document(self) -> dict[str, Any] | None:
        """The document, None where there is none that can be used. Not to be changed. Costs one stat as long as the file is the same."""
        try:
            seen = _signature(os.stat(self._name))
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            self.trouble = ""
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self._unreadable(error)
            return None
        known = self._read
        if known[0] == seen:
            return known[1]
        with _parsing:
            if self._read[0] != seen:
                self._read = (seen, self._parsed())
            return self._read[1]

    def memo(self, document: dict[str, Any]) -> dict[str, Any]:
        """Where what was made of parts of a document may be kept, as long as it is the one that was read last."""
        known = self._memo
        if known[0] is not document:
            self._memo = known = (document, {})
        return known[1]

    def _parsed(self) -> dict[str, Any] | None:
        self.trouble = ""
        try:
            document = self._load()
        except OSError as error:
            self._unreadable(error)
        except NewerDocument as error:
            warn_once(("newer", self._name), "tuning store: %s %s; it is left alone and not used", self.path, error)
            self.trouble = f"{self.path} {error}"
        except BrokenDocument as error:
            self._set_aside(error)
            self.trouble = f"{self.path} {error}"
        else:
            self.trouble = f"{self.path} is of another device" if document is None and os.path.exists(self.path) else ""
            return document
        return None

    def _unreadable(self, error: OSError | ValueError) -> None:
        why = getattr(error, "strerror", None) or str(error)
        warn_once(("read", self._name), "tuning store: can't read %s (%s); going on without it", self.path, why)
        self.trouble = f"{self.path} can't be read ({why})"

    def _load(self) -> dict[str, Any] | None:
        """The document on the disk, None where there is none."""
        try:
            if not stat.S_ISREG(os.stat(self._name).st_mode):  # a pipe would keep us waiting
                raise OSError(errno.EINVAL, "Is no regular file", self._name)
            text = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data: Any = json.loads(text, parse_float=_finite, parse_constant=str)
        except (ValueError, RecursionError) as error:
            raise BrokenDocument(f"is not JSON ({error})") from None
        kind = check_document(data)
        if kind != self.device:
            warn_once(("device", self._name), "tuning store: %s is of %s, not of %s; it is not used", self.path, kind, self.device)
            return None
        document: dict[str, Any] = data
        return document

    # ---- writing -----------------------------------------------------------------------------------------------------------

    def update(self, change: Callable[[dict[str, Any]], bool]) -> bool:
        """Lets `change` alter the document, under the lock, and writes it if that returns true. Returns whether it was written.

        Raises:
            StoreWriteError: the file is of a newer version or another device, or the directory can't be written.
        """
        advice = "set HIPGROUPGEMM_TUNING_STORE to a directory that can be written, or to off"
        try:
            self._make_directory()
            with self._locked(_LOCK_SECONDS):
                try:
                    document = self._load()
                    if document is None and os.path.exists(self.path):
                        raise StoreWriteError(f"{self.path}: is of another device than {self.device}; move it away")
                except NewerDocument as error:
                    raise StoreWriteError(
                        f"{self.path}: {error}, and is left as it is; upgrade hipgroupgemm, or let HIPGROUPGEMM_TUNING_STORE name another "
                        "directory"
                    ) from None
                except BrokenDocument as error:
                    self._rename_broken(error)
                    document = None
                document = new_document(self.device) if document is None else document
                if not change(document):
                    return False
                text, lost = _text(document)
                if lost and os.path.exists(self.path):
                    self._rename_broken(BrokenDocument(f"has parts that can't be written again ({', '.join(lost)})"))
                self._replace(text)
                return True
        except OSError as error:  # filelock's Timeout is one too
            why = error.strerror or f"{type(error).__name__}: {error}"
            raise StoreWriteError(f"{self.path}: can't be written ({why}); {advice}") from error
        except ValueError as error:
            raise StoreWriteError(f"{self.path}: can't be written ({error}); {advice}") from error
        except NotImplementedError as error:  # no locks on this file system
            raise StoreWriteError(f"{self.path}: can't be locked ({error}); {advice}") from error
        except ImportError as error:
            raise StoreWriteError(f"{self.path}: writing needs filelock ({error}); pip install filelock") from error

    def _make_directory(self) -> None:
        directory = self.path.parent
        if not directory.is_dir():
            directory.parent.mkdir(parents=True, exist_ok=True)
            # for the user alone, as long as nobody gives it to others
            directory.mkdir(mode=0o700, exist_ok=True)

    def _mode(self) -> int:
        """A file may be read and written by those who may read and write its directory."""
        return 0o600 | (os.stat(self.path.parent).st_mode & 0o066)

    @contextlib.contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        from filelock import FileLock

        real = self._real()
        lock = FileLock(real.with_name(f".{real.name}.lock"), timeout=seconds, mode=self._mode())
        with lock:
            yield

    def _real(self) -> Path:
        """The file itself, where the store's is a symbolic link: what is replaced, set aside and locked is what the link leads to."""
        return Path(os.path.realpath(self.path)) if os.path.islink(self.path) else self.path

    def _replace(self, text: str) -> None:
        """Puts a new file in the place of the old one, under the lock."""
        real = self._real()
        directory = real.parent
        prefix = f".{real.name}."
        for name in os.listdir(directory):  # of writers that were killed: none is at work, since the lock is ours
            if name.startswith(prefix) and name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    os.unlink(directory / name)
        descriptor, temporary = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fchmod(file.fileno(), self._mode())
                os.fsync(file.fileno())
            os.replace(temporary, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_directory(directory)

    # ---- what is broken ----------------------------------------------------------------------------------------------------

    def _set_aside(self, reason: BrokenDocument) -> None:
        """Renames a file that a reader found broken, unless somebody has replaced it since."""
        try:
            with self._locked(_SET_ASIDE_SECONDS):
                try:
                    self._load()
                except NewerDocument:
                    pass
                except BrokenDocument as still:
                    self._rename_broken(still)
        except (OSError, NotImplementedError, ImportError):
            warn_once(("broken", self._name), "tuning store: %s %s; it is not used", self.path, reason)

    def _rename_broken(self, reason: BrokenDocument) -> None:
        number, real = 1, self._real()
        while os.path.lexists(aside := real.with_name(f"{real.name}.broken-{number}")):
            number += 1
        os.rename(real, aside)
        _log.warning("tuning store: %s %s; it was set aside as %s", self.path, reason, aside.name)


def _text(document: dict[str, Any]) -> tuple[str, list[str]]:
    """A document as JSON, one config a line: an indented one takes the slow encoder, seconds for thousands of configs.

    With it the names of parts that JSON can be read to but not written from (nested too deeply for the encoder), which are left out.
    """
    lost: list[str] = []

    def line(name: str, part: Any) -> str | None:
        try:
            return f"{json.dumps(name)}: {json.dumps(part, allow_nan=False)}"
        except (ValueError, RecursionError):
            lost.append(reprlib.repr(name))
            return None

    def config(name: str, entry: dict[str, Any]) -> str | None:
        whole = line(name, entry)
        if whole is not None:
            return whole
        results = [result for result in entry["results"] if line("result", result) is not None]
        return line(name, {"config": entry["config"], "results": results})

    lines = [line(name, part) for name, part in document.items() if name != "configs"]
    configs = [config(name, entry) for name, entry in document["configs"].items()]
    head = [f"{text}," for text in lines if text is not None]
    return "\n".join(["{", *head, '"configs": {', ",\n".join(text for text in configs if text is not None), "}", "}", ""]), lost


def _finite(text: str) -> float | str:
    """A number of a document; what is too large to be one stays text, as this package writes infinities, and is refused where it counts."""
    value = float(text)
    return value if math.isfinite(value) else text


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


def _sync_directory(directory: Path) -> None:
    """Makes a rename last through a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _renew_lock() -> None:
    global _parsing
    _parsing = threading.RLock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock)
