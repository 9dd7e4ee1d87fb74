"""Compiled device code on disk, shared by all processes of a user.

One file an entry, named by a SHA-256 of everything that decides the code. A file is written beside its place
and moved there in one step, so readers see a whole entry or none, whoever else writes; each carries a digest
of its contents, so a damaged one is noticed, dropped and compiled again. A directory that can't be written
costs compile time and a warning, never an error; so does one that another user owns or may write, from which code would be run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import hipgroupgemm
from hipgroupgemm.runtime.directories import CACHE_VARIABLE as ENVIRONMENT_VARIABLE
from hipgroupgemm.runtime.directories import cache_directory as default_directory
from hipgroupgemm.runtime.directories import private_directory, read_trusted, require_trusted
from hipgroupgemm.runtime.forks import new_lock

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

    digest = hashlib.sha256()

    def add(part: str | bytes) -> None:
        data = part.encode() if isinstance(part, str) else part
        # with its length in front, so that no two lists of parts give one stream of bytes
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    add(package_version if package_version is not None else hipgroupgemm.__version__)
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

    def _places(self, path: Path) -> tuple[Path, ...]:
        """The directories that lead to an entry, this cache's own first."""
        return path.parent.parent.parent, path.parent.parent, path.parent

    def path(self, key: str) -> Path | None:
        """File of an entry, whether or not it exists; None without a directory."""
        return self.directory / "code" / key[:2] / f"{key}.bin" if self.directory is not None else None

    def get(self, key: str) -> bytes | None:
        """The code stored under ``key``, or None. A damaged entry is dropped."""
        path = self.path(key)
        if path is None:
            return None
        try:
            for directory in self._places(path):
                require_trusted(directory)
            data = read_trusted(path)
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
            for directory in self._places(path):
                private_directory(directory)
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
            text = "compile cache: can't %s %s (%s); kernels are compiled anew in every process. Set %s to a directory of your own"
            _log.warning(text, what, path, error, ENVIRONMENT_VARIABLE)


_default: CompileCache | None = None
_default_lock = new_lock()


def default_cache() -> CompileCache:
    """The cache in :func:`default_directory`; looked up again when the environment variable has changed."""
    global _default
    directory = default_directory()
    with _default_lock:
        if _default is None or _default.directory != directory:
            _default = CompileCache(directory)
        return _default
