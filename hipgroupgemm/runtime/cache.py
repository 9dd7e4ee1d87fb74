"""Compiled device code on disk, shared by all processes of a user.

One file an entry, named by a SHA-256 of everything that decides the code. A file is written beside its place
and moved there in one step, so readers see a whole entry or none, whoever else writes; each carries a digest
of its contents, so a damaged one is noticed, dropped and compiled again. A directory that can't be written
costs compile time and a warning, never an error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .directories import CACHE_VARIABLE as ENVIRONMENT_VARIABLE
from .directories import cache_directory as default_directory

__all__ = ["ENVIRONMENT_VARIABLE", "CompileCache", "cache_key", "default_cache", "default_directory"]

_log = logging.getLogger("hipgroupgemm.cache")

_MAGIC = b"hipgroupgemm code 1\n"
_DIGEST_BYTES = 32


def cache_key(
    source: str | bytes,
    options: Sequence[str],
    architecture: str,
    compiler: str,
    headers: Mapping[str, str] | None = None,
    package_version: str | None = None,
) -> str:
    """The name of an entry: 64 hexadecimal digits.

    Args:
        source: what is compiled.
        options: compiler options, in order.
        architecture: target, features included.
        compiler: name and version of the compiler.
        headers: text of the headers by name.
        package_version: of this package; its own version when left out.
    """
    from hipgroupgemm.version import __version__

    digest = hashlib.sha256()

    def add(part: str | bytes) -> None:
        data = part.encode() if isinstance(part, str) else part
        # with its length in front, so that no two lists of parts give one stream of bytes
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    add(package_version if package_version is not None else __version__)
    add(compiler)
    add(architecture)
    add(str(len(options)))
    for option in options:
        add(option)
    for name, text in sorted((headers or {}).items()):
        add(name)
        add(text)
    add(source)
    return digest.hexdigest()


class CompileCache:
    """A directory of compiled code.

    Args:
        directory: created when the first entry is stored; None keeps nothing.
    """

    def __init__(self, directory: Path | str | None) -> None:
        self.directory = Path(directory) if directory is not None else None
        self._warned = False

    def path(self, key: str) -> Path | None:
        """File of an entry, whether or not it exists; None without a directory."""
        return self.directory / "code" / key[:2] / f"{key}.bin" if self.directory is not None else None

    def get(self, key: str) -> bytes | None:
        """The code stored under ``key``, or None. A damaged entry is dropped."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", path, error)
            return None
        head = len(_MAGIC) + _DIGEST_BYTES
        code = data[head:]
        if not data.startswith(_MAGIC) or data[len(_MAGIC) : head] != self._digest(key, code):
            _log.warning("compile cache: %s is damaged and is compiled again", path)
            self.discard(key)
            return None
        return code

    def put(self, key: str, code: bytes) -> bool:
        """Store code under ``key``; whether that worked. A directory that can't be written is no error."""
        path = self.path(key)
        if path is None:
            return False
        temporary = None
        try:
            for directory in (path.parent.parent.parent, path.parent.parent, path.parent):
                # for the user alone: who can write here can run code in the user's processes
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + self._digest(key, code))
                file.write(code)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
            self._warn("write", path, error)
            return False
        return True

    def discard(self, key: str) -> None:
        """Drop an entry, if it is there and can be dropped."""
        path = self.path(key)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def get_or_build(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The code stored under ``key``, or what ``build`` returns, which is then stored.

        Processes that need one entry at the same time may each build it; the results are the same.
        """
        code = self.get(key)
        if code is None:
            code = build()
            self.put(key, code)
        return code

    def clear(self) -> int:
        """Remove all entries; how many there were."""
        count = 0
        if self.directory is not None:
            for path in (self.directory / "code").glob("*/*.bin"):
                with suppress(OSError):
                    path.unlink()
                    count += 1
        return count

    @staticmethod
    def _digest(key: str, code: bytes) -> bytes:
        # of the key too, so that a file under another entry's name is refused
        return hashlib.sha256(key.encode() + code).digest()

    def _warn(self, what: str, path: Path, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "compile cache: can't %s %s (%s); kernels are compiled anew in every process. Set %s to a directory that can be written",
                what,
                path,
                error,
                ENVIRONMENT_VARIABLE,
            )


_default: CompileCache | None = None
_default_lock = threading.Lock()


def default_cache() -> CompileCache:
    """The cache in :func:`default_directory`; looked up again when the environment variable has changed."""
    global _default
    directory = default_directory()
    with _default_lock:
        if _default is None or _default.directory != directory:
            _default = CompileCache(directory)
        return _default


def _renew_lock() -> None:
    global _default_lock
    _default_lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock)
