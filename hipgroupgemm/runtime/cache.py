"""Compiled device code on disk, shared by all processes of a user.

One file for each entry, named by a SHA-256 of everything that decides the code. A file is written beside its place and moved there in one
step, so readers see a whole entry or none, whoever else writes; each carries a digest of its contents, so a damaged one is noticed, dropped
and compiled again. A directory that can't be written costs compile time and a warning, never an error; so does one that another user owns
or may write, from which code would be run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hipgroupgemm.runtime.directories import CACHE_VARIABLE, cache_directory, private_directory, read_trusted, replace_file, require_trusted
from hipgroupgemm.runtime.forks import new_lock
from hipgroupgemm.version import __version__

__all__ = ["CompileCache", "cache_key", "default_cache"]

_MAGIC = b"hipgroupgemm code 1\n"
_HEAD = len(_MAGIC) + 32  # and the digest


def cache_key(
    source: str | bytes, options: Sequence[str], architecture: str, compiler: str, headers: Mapping[str, str] | None = None
) -> str:
    """The name of an entry: 64 hexadecimal digits, others for each version of this package.

    Of the source, the compiler's options in order, the target with its features, the compiler's name and version, and headers by name.
    """
    parts = [__version__, compiler, architecture, str(len(options)), *options]
    for name, text in sorted((headers or {}).items()):
        parts += [name, text]
    import hashlib  # here, so that importing the package stays quick

    digest = hashlib.sha256()
    for part in (*parts, source):
        data = part.encode() if isinstance(part, str) else part
        # with its length in front, so that no two lists of parts give one stream of bytes
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _log_warning(text: str, *arguments: object) -> None:
    import logging

    logging.getLogger("hipgroupgemm.cache").warning(text, *arguments)


class CompileCache:
    """A directory of compiled code, created when the first entry is stored; None keeps nothing."""

    def __init__(self, directory: Path | str | None) -> None:
        self.directory = Path(directory) if directory is not None else None
        self._warned = False

    def path(self, key: str) -> Path | None:
        """File of an entry, whether or not it exists; None without a directory."""
        return self.directory / "code" / key[:2] / f"{key}.bin" if self.directory is not None else None

    @staticmethod
    def _directories(path: Path) -> tuple[Path, ...]:
        """Those that lead to an entry, this cache's own first."""
        return path.parent.parent.parent, path.parent.parent, path.parent

    def get(self, key: str) -> bytes | None:
        """The code stored under ``key``, or None. A damaged entry is dropped."""
        path = self.path(key)
        if path is None:
            return None
        try:
            for directory in self._directories(path):
                require_trusted(directory)
            data = read_trusted(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", path, error)
            return None
        code = data[_HEAD:]
        if data[:_HEAD] != _MAGIC + self._digest(key, code):
            _log_warning("compile cache: %s is damaged and is compiled again", path)
            self.discard(key)
            return None
        return code

    def put(self, key: str, code: bytes) -> bool:
        """Store code under ``key``; whether that worked. A directory that can't be written is no error."""
        path = self.path(key)
        if path is None:
            return False
        try:
            for directory in self._directories(path):
                private_directory(directory)
            replace_file(path, _MAGIC + self._digest(key, code) + code)
        except OSError as error:
            self._warn("write", path, error)
            return False
        return True

    def discard(self, key: str) -> None:
        """Drop an entry, if it is there and can be dropped."""
        path = self.path(key)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    @staticmethod
    def _digest(key: str, code: bytes) -> bytes:
        import hashlib

        # of the key too, so that a file under another entry's name is refused
        return hashlib.sha256(key.encode() + code).digest()

    def _warn(self, what: str, path: Path, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = "compile cache: can't %s %s (%s); kernels are compiled anew in every process. Set %s to a directory of your own"
            _log_warning(text, what, path, error, CACHE_VARIABLE)


_default: CompileCache | None = None
_default_lock = new_lock()


def default_cache() -> CompileCache:
    """The cache in :func:`.cache_directory`; looked up again when the environment variable has changed."""
    global _default
    directory = cache_directory()
    with _default_lock:
        if _default is None or _default.directory != directory:
            _default = CompileCache(directory)
        return _default
