"""Finds and loads hipBLASLt and the shim in front of it, once a process.

The shim names no libraries that it needs. It takes hipBLASLt and the HIP runtime that are in the process already (PyTorch's wheels bring
their own, under other names), or those found here; so there is never a second copy beside the first.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import threading
from dataclasses import dataclass
from typing import Any

from hipgroupgemm.native import _rocm
from hipgroupgemm.native._errors import NativeUnavailableError
from hipgroupgemm.native._files import abi_declarations

ABI_VERSION = 1
SHIM = "libhipgroupgemm.so"


@dataclass(frozen=True)
class Library:
    """The loaded shim.

    Attributes:
        ffi: cffi's FFI with the ABI's declarations. lib: the functions.
        shim, hipblaslt, hip: paths of the shim, and of the hipBLASLt and the HIP runtime that serve it.
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
        NativeUnavailableError: something is missing, does not match or is there twice; the text says what to do.
    """
    global _library
    if _forked:
        raise NativeUnavailableError(
            "this process was forked from one that uses hipBLASLt, and a HIP device does not survive a fork. "
            "Start it with multiprocessing's spawn or forkserver, or fork before the first use"
        )
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


def missing_kernel_files(folder: str | None = None, target: str = "*") -> list[str]:
    """Paths of the kernel files that hipBLASLt's catalogues list and that are not there.

    Algorithms whose code is in such a file are offered, and fail when they are run.

    Args:
        folder: where the catalogues are; None is that of the hipBLASLt that this process uses, and [] if there is none.
        target: an architecture, "gfx942" say; "*" is all.
    """
    if folder is None:
        try:
            library = os.path.dirname(os.path.realpath(load().hipblaslt))
        except NativeUnavailableError:
            return []
        folder = os.environ.get("HIPBLASLT_TENSILE_LIBPATH") or os.path.join(library, "hipblaslt", "library")
    missing = []
    for catalogue in sorted(glob.glob(os.path.join(glob.escape(folder), "**", f"TensileLibrary_lazy_{target}.dat"), recursive=True)):
        beside = set(os.listdir(os.path.dirname(catalogue)))
        for stem in sorted(name.decode() for name in _in_file(catalogue, rb"TensileLibrary_[A-Za-z0-9_]+")):
            lacking = [] if f"{stem}.dat" in beside else [f"{stem}.dat"]
            lacking += [] if beside & {f"{stem}.co", f"{stem}.hsaco"} else [f"{stem}.co"]
            missing += [os.path.join(os.path.dirname(catalogue), name) for name in lacking]
    return missing


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
    _one("libamdhip64.so")
    hipblaslt = _find_hipblaslt(shim)
    hip = _one("libamdhip64.so")
    if hip is None:
        raise NativeUnavailableError(
            f"{hipblaslt} is loaded, but no libamdhip64 with it; it was linked in a way that is not known here. {_rocm.ADVICE}"
        )
    for path in (hip, hipblaslt):  # the shim takes its names from these two, so they must be visible to it
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL | os.RTLD_NOLOAD)
        except OSError as error:
            raise NativeUnavailableError(f"{path} is mapped into this process but cannot be used: {error}") from error
    found = _rocm.file_version(hipblaslt)  # hgg_handle_create asks the library itself; this needs no device
    version_text = f"version {found[0]}.{found[1]}" if found else "of a version that its name does not tell"
    ffi = cffi.FFI()
    ffi.cdef(abi_declarations())
    try:
        lib = ffi.dlopen(shim, ffi.RTLD_NOW)
    except OSError as error:
        raise NativeUnavailableError(
            f"{shim} does not fit {hipblaslt} ({version_text}): {error}. "
            "Build hipgroupgemm again against this hipBLASLt: pip install --force-reinstall --no-deps . in a checkout"
        ) from error
    abi = lib.hgg_abi_version()
    if abi != ABI_VERSION:
        raise NativeUnavailableError(f"{shim} has ABI version {abi}, this Python package wants {ABI_VERSION}; install hipgroupgemm again")
    version = lib.hgg_built_for()
    built_for = (version.major, version.minor, version.patch)
    if found is not None and found != built_for[:2]:
        raise NativeUnavailableError(
            f"{shim} was built for hipBLASLt {built_for[0]}.{built_for[1]}, but {hipblaslt} is {version_text}. "
            "Install hipgroupgemm again from source against it, or put the other first on LD_LIBRARY_PATH"
        )
    return Library(ffi, lib, shim, hipblaslt, hip, built_for)


def _one(prefix: str) -> str | None:
    """The library of that name in this process, None if there is none yet; two raise NativeUnavailableError.

    Memory, streams and errors of one HIP runtime mean nothing to another.
    """
    found = _rocm.mapped(prefix)
    if len(found) > 1:
        what = "two HIP runtimes are" if prefix == "libamdhip64.so" else "hipBLASLt is twice"
        raise NativeUnavailableError(
            f"{what} in this process: {' and '.join(found)}. They do not share devices' memory or streams. "
            "Let all packages use one ROCm (import the one that brings its own first, and match its version)"
        )
    return found[0] if found else None


def _in_file(path: str, pattern: bytes) -> set[bytes]:
    """What a pattern finds in a file, each once: its first group, where it has one."""
    with open(path, "rb") as file:
        return set(re.findall(pattern, file.read()))


def _find_hipblaslt(shim: str) -> str:
    """Path of the hipBLASLt in this process, loading it if need be."""
    loaded = _one("libhipblaslt.so")
    if loaded:
        return loaded
    folders = [folder for folder in b":".join(_in_file(shim, rb"HGG_ROCM_FOLDERS=([^\0]*)")).decode().split(":") if folder]
    folders += [folder for root in _rocm.roots() for folder in root.library_folders]
    # By name first: that is what LD_LIBRARY_PATH and the system's own configuration speak of.
    names = ["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"]
    paths = [os.path.join(folder, name) for folder in dict.fromkeys(folders) for name in names]
    tried: list[str] = []
    for candidate in names + [path for path in paths if os.path.exists(path)]:
        if os.path.isabs(candidate):
            _refuse_second_runtime(candidate)
        try:
            ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as error:
            tried.append(str(error))
            continue
        loaded = _one("libhipblaslt.so")
        if loaded:
            return loaded
    raise NativeUnavailableError(
        f"hipBLASLt's library was not found or cannot be loaded ({'; '.join(dict.fromkeys(tried))}). {_rocm.ADVICE}"
    )


def _refuse_second_runtime(hipblaslt: str) -> None:
    """Refuses a hipBLASLt that would bring in another HIP runtime than the one that is here, by the names that stand in both files."""
    runtime = _one("libamdhip64.so")
    if runtime is None:
        return
    here, wanted = (_in_file(path, rb"libamdhip64\.so\.\d+") for path in (runtime, hipblaslt))
    if wanted and not wanted & here:
        raise NativeUnavailableError(
            f"{hipblaslt} needs {b', '.join(sorted(wanted)).decode()}, but {runtime} is in this process already: that would be two HIP "
            "runtimes. Install a hipBLASLt of the same ROCm release as the package that brought it"
        )
