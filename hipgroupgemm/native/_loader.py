"""Finds and loads hipBLASLt and the shim in front of it, once a process.

The shim names no libraries that it needs. It takes hipBLASLt and the HIP runtime that are in the process
already (PyTorch's wheels bring their own, under other names), or those found here; so there is never a second
copy beside the first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Any

from . import _rocm
from ._errors import NativeUnavailableError
from ._files import abi_declarations

ABI_VERSION = 1
SHIM = "libhipgroupgemm.so"


@dataclass(frozen=True)
class Library:
    """The loaded shim.

    Attributes:
        ffi: cffi's FFI with the ABI's declarations.
        lib: the functions.
        shim: path of the shim.
        hipblaslt: path of the hipBLASLt that serves it.
        hip: path of the HIP runtime that serves both.
        built_for: hipBLASLt's version at the shim's compilation (major, minor, patch).
    """

    ffi: Any
    lib: Any
    shim: str
    hipblaslt: str
    hip: str
    built_for: tuple[int, int, int]


_lock = threading.Lock()
_library: Library | None = None
_forked = False


def _after_fork_in_child() -> None:
    global _lock, _forked
    _lock = threading.Lock()
    _forked = _library is not None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def load() -> Library:
    """The shim, loaded on the first call. Needs no GPU.

    Raises:
        NativeUnavailableError: something is missing, does not match or is there twice; the text says what to
            do.
    """
    global _library
    if _forked:
        raise NativeUnavailableError(
            "this process was forked from one that uses hipBLASLt, and a HIP device does not survive a fork. "
            "Start it with multiprocessing's spawn or forkserver, or fork before the first use"
        )
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
    return _library


def unavailable_reason() -> str | None:
    """Why :func:`load` would raise, in one line; None if it works."""
    try:
        load()
    except NativeUnavailableError as error:
        return error.text
    return None


def shim_path() -> str:
    """Where the shim is (HIPGROUPGEMM_NATIVE_LIBRARY, else in this package), whether it exists or not."""
    return os.environ.get("HIPGROUPGEMM_NATIVE_LIBRARY") or os.path.join(os.path.dirname(os.path.abspath(__file__)), SHIM)


def _load() -> Library:
    shim = shim_path()
    if not os.path.isfile(shim):
        raise NativeUnavailableError(
            f"{shim} does not exist: this installation was built without hipBLASLt's development files. "
            f"Install them, then run `pip install --force-reinstall --no-deps .` in a checkout of hipgroupgemm. {_rocm.ADVICE}"
        )
    try:
        import cffi
    except ImportError as error:
        raise NativeUnavailableError(f"cffi is missing ({error}); pip install cffi") from error
    names = _rocm.elf_names(shim)
    _one_runtime()
    hipblaslt = _find_hipblaslt(names.runpath if names else ())
    hip = _one_runtime()
    if hip is None:
        raise NativeUnavailableError(
            f"{hipblaslt} is loaded, but no libamdhip64 with it; it was linked in a way that is not known here. {_rocm.ADVICE}"
        )
    for path in (hip, hipblaslt):  # theirs are the only names that the shim can take its own from
        _promote(path)
    ffi = cffi.FFI()
    ffi.cdef(abi_declarations())
    try:
        lib = ffi.dlopen(shim, ffi.RTLD_NOW)
    except OSError as error:
        found = _rocm.file_version(hipblaslt)
        raise NativeUnavailableError(
            f"{shim} does not fit {hipblaslt}{f' (version {found[0]}.{found[1]})' if found else ''}: "
            f"{error}. "
            "Build hipgroupgemm again against this hipBLASLt: pip install --force-reinstall --no-deps . in a checkout"
        ) from error
    abi = lib.hgg_abi_version()
    if abi != ABI_VERSION:
        raise NativeUnavailableError(f"{shim} has ABI version {abi}, this Python package wants {ABI_VERSION}; install hipgroupgemm again")
    version = ffi.new("hgg_version *")
    lib.hgg_built_for(version)
    built_for = (version.major, version.minor, version.patch)
    found = _rocm.file_version(hipblaslt)  # hgg_handle_create asks the library itself; this needs no device
    if found is not None and found != built_for[:2]:
        raise NativeUnavailableError(
            f"{shim} was built for hipBLASLt {built_for[0]}.{built_for[1]}, but {hipblaslt} is version "
            f"{found[0]}.{found[1]}. "
            "Install hipgroupgemm again from source against it, or put the other first on LD_LIBRARY_PATH"
        )
    return Library(ffi, lib, shim, hipblaslt, hip, built_for)


def _one_runtime() -> str | None:
    """The HIP runtime in this process, None if there is none yet.

    Raises:
        NativeUnavailableError: there are two. Memory, streams and errors of one mean nothing to the other.
    """
    runtimes = _rocm.mapped("libamdhip64.so")
    if len(runtimes) > 1:
        raise NativeUnavailableError(
            f"two HIP runtimes are in this process: {' and '.join(runtimes)}. They do not share devices' "
            "memory or streams. "
            "Let all packages use one ROCm (import the one that brings its own first, and match its version)"
        )
    return runtimes[0] if runtimes else None


def _find_hipblaslt(runpath: tuple[str, ...]) -> str:
    """Path of the hipBLASLt in this process, loading it if need be."""
    loaded = _rocm.mapped("libhipblaslt.so")
    if len(loaded) > 1:
        raise NativeUnavailableError(f"hipBLASLt is in this process twice: {' and '.join(loaded)}. Let all packages use one ROCm")
    if loaded:
        return loaded[0]
    tried: list[str] = []
    folders = list(runpath) + [folder for root in _rocm.roots() for folder in root.library_folders]
    # By name first: that is what LD_LIBRARY_PATH and the system's own configuration speak of.
    names = ["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"]
    paths = [os.path.join(folder, name) for folder in dict.fromkeys(folders) for name in names]
    runtime = _one_runtime()
    for candidate in names + [path for path in paths if os.path.exists(path)]:
        if os.path.isabs(candidate):
            _refuse_second_runtime(candidate, runtime)
        try:
            ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as error:
            tried.append(str(error))
            continue
        loaded = _rocm.mapped("libhipblaslt.so")
        if loaded:
            return loaded[0]
    raise NativeUnavailableError(
        f"hipBLASLt's library was not found or cannot be loaded ({'; '.join(dict.fromkeys(tried))}). {_rocm.ADVICE}"
    )


def _refuse_second_runtime(hipblaslt: str, runtime: str | None) -> None:
    """Refuse a hipBLASLt that would bring in another HIP runtime than the one that is here."""
    if runtime is None:
        return
    here, wanted = _rocm.elf_names(runtime), _rocm.elf_names(hipblaslt)
    if here is None or wanted is None:
        return
    for name in wanted.needed:
        if name.startswith("libamdhip64.so") and name != here.soname:
            raise NativeUnavailableError(
                f"{hipblaslt} needs {name}, but {runtime} ({here.soname}) is in this process already: that "
                "would be two HIP "
                "runtimes. Install a hipBLASLt of the same ROCm release as the package that brought it"
            )


def _promote(path: str) -> None:
    """Make a loaded library's names visible to what is loaded after it."""
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL | os.RTLD_NOLOAD)
    except OSError as error:
        raise NativeUnavailableError(f"{path} is mapped into this process but cannot be used: {error}") from error
