"""Where this package keeps files of its own, compiled code and tuning results, and whether what lies there can be believed.

Compiled code is run, so it is taken only from directories and files that no other user can write. Root counts as this user.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from pathlib import Path

__all__ = [
    "CACHE_VARIABLE", "cache_directory", "private_directory", "read_trusted", "replace_file", "require_trusted",
    "temporary_directory",
]  # fmt: skip

CACHE_VARIABLE = "HIPGROUPGEMM_CACHE_DIR"


def cache_directory() -> Path | None:
    """HIPGROUPGEMM_CACHE_DIR, or a place in the user's cache directory; None when there is no home."""
    named, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return Path(named).expanduser() if named else (Path(base) if base else Path.home() / ".cache") / "hipgroupgemm"
    except RuntimeError:
        return None  # no home directory


def require_trusted(path: Path, found: os.stat_result | None = None) -> None:
    """Raises PermissionError where another user owns a file or directory or may write it; FileNotFoundError where there is none.

    ``found`` is its status, where the caller has that.
    """
    found = path.stat() if found is None else found
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {found.st_uid}, who could have put anything there")
    if found.st_mode & 0o022:
        mode = f"mode {found.st_mode & 0o7777:o}, want 700"
        raise PermissionError(f"{path} can be written by other users ({mode}), who could have put anything there")


def private_directory(path: Path) -> Path:
    """The directory, made for this user alone (mode 700) where it is not there yet; raises as :func:`require_trusted`, or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_trusted(path)
    return path


def read_trusted(path: Path) -> bytes:
    """The contents of a file that nobody but this user can have written; raises as :func:`require_trusted`, or OSError."""
    with path.open("rb") as file:
        require_trusted(path, os.fstat(file.fileno()))  # of the file that is open, whatever takes its place meanwhile
        return file.read()


def replace_file(path: Path, data: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Puts a file in its place whole or not at all: a reader never sees half of it, and a failure, an OSError, leaves what was there.

    `mode` is without what the umask takes away. `durable`: it is on the disk first, whatever happens to the machine then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(8).hex()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is not None:  # nobody knows the temporary one
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


@functools.lru_cache(1)
def temporary_directory() -> Path:
    """A directory for this process alone, for programs that must write somewhere where the user's caches can't be written.

    It is removed when the process ends. Raises OSError where not even a temporary directory can be had.
    """
    import shutil
    import tempfile

    path, owner = tempfile.mkdtemp(prefix="hipgroupgemm-"), os.getpid()
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None)
    return Path(path)
