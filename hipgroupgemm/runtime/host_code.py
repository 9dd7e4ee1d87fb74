"""Small C and C++ sources of this package, compiled on first use for this machine's CPU and loaded.

The code is kept where device code is, under the same rules: see `cache.py`. It is loaded from memory, so a disk that cannot be written
costs compile time only. Where there is no compiler, whoever asks has another, slower way.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from hipgroupgemm.runtime.cache import cache_key, default_cache

__all__ = ["HostCodeError", "compile_host_code", "load_host_code"]

_COMPILERS = {"c": ("CC", ("cc", "gcc", "clang")), "c++": ("CXX", ("c++", "g++", "clang++"))}
_FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


class HostCodeError(RuntimeError):
    """Host code cannot be compiled or loaded here; the text says why."""


def _compiler(language: str) -> list[str]:
    import shlex  # here and below, so that importing the package stays quick
    import shutil

    variable, names = _COMPILERS[language]
    named = shlex.split(os.environ.get(variable, ""))
    if named:
        return named
    for name in names:
        found = shutil.which(name)
        if found:
            return [found]
    raise HostCodeError(f"no compiler ({', '.join(names)}; or set {variable})")


def compile_host_code(source: str, language: str, folders: Sequence[str] = (), options: Sequence[str] = (), version: str = "") -> bytes:
    """A shared library from one source text, from the cache where it was compiled before.

    Args:
        source: the text. Names that are to be found in the library have default visibility.
        language: "c" or "c++".
        folders: where headers are. options: the compiler's, beside those that all have.
        version: of the headers, and whatever else decides the code; part of the cache's key.

    Raises:
        HostCodeError: no compiler, or it fails.
    """
    cache, flags = default_cache(), (*_FLAGS, *options)
    key = cache_key(source, flags, platform.machine(), language, {"version": version})
    code = cache.get(key)
    if code is None:
        code = _compile(source, language, [*flags, *(f"-I{folder}" for folder in folders)])
        cache.put(key, code)
    return code


def _compile(source: str, language: str, flags: list[str]) -> bytes:
    import subprocess
    import tempfile

    compiler = _compiler(language)
    try:
        with tempfile.TemporaryDirectory(prefix="hipgroupgemm-") as work:
            made = Path(work) / "code.so"
            command = [*compiler, "-x", language, "-", *flags, "-o", str(made)]
            result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
            if result.returncode:
                errors = [line for line in result.stderr.splitlines() if "error" in line] or [f"status {result.returncode}"]
                raise HostCodeError(f"{compiler[0]} failed: {errors[0].strip()}")
            return made.read_bytes()
    except OSError as error:
        raise HostCodeError(f"{compiler[0]} cannot be run: {error}") from None


def load_host_code(code: bytes, name: str, loader: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Loads a shared library from memory; `name` is what debuggers show. HostCodeError where that cannot be done.

    With `ctypes.PyDLL` as the loader its functions are called with Python's lock held. It stays loaded as long as the process lives.
    """
    try:
        descriptor = os.memfd_create(name)  # stays open: the loader knows libraries by their paths, and this number is a path's
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        return loader(f"/proc/self/fd/{descriptor}")
    except (AttributeError, OSError) as error:
        raise HostCodeError(f"{name} cannot be loaded: {error}") from None
