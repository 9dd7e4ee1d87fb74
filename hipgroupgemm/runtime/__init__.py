"""Device runtimes: streams, events, memory, modules and launches on CUDA and ROCm.

Nothing heavy is imported here; a runtime's bindings are imported when it is first asked for. Handles (streams, events, device pointers)
are ints everywhere, and stream 0 is the default stream.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from hipgroupgemm.runtime.errors import CompileError, DeviceError, DeviceMemoryError, ForkedProcessError, RuntimeUnavailable
from hipgroupgemm.runtime.forks import new_rlock
from hipgroupgemm.runtime.process import has_open, mapped_libraries

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime

__all__ = [
    "CompileError", "DeviceError", "DeviceMemoryError", "ForkedProcessError", "KINDS", "RuntimeUnavailable", "default_device",
    "device_of_pointer", "find_devices", "get_runtime",
]  # fmt: skip

KINDS = ("rocm", "cuda")
"""The kinds of runtime there are, in the order in which they are asked."""

_CLASSES = {"cuda": ("hipgroupgemm.runtime.cuda.runtime", "CudaRuntime"), "rocm": ("hipgroupgemm.runtime.hip.runtime", "HipRuntime")}
_HIP_DEVICE_FILE = "/dev/kfd"  # open in a process that has initialised HIP
_DRIVER_LIBRARIES = {"cuda": "libcuda.so", "rocm": "libamdhip64.so"}

_runtimes: dict[str, Runtime] = {}
_forked_with: set[str] = set()  # kinds that a parent process had initialised before it forked this one
_lock = new_rlock()  # re-entrant: bindings may fork helpers while they initialise under it


def get_runtime(kind: str) -> Runtime:
    """The runtime of one kind, "cuda" or "rocm"; one object a process. Any thread may call this.

    Raises:
        ValueError: another kind.
        RuntimeUnavailable: no driver, no device, or no bindings; the text says what to install.
        ForkedProcessError: the driver was initialised before this process was forked.
    """
    runtime = _runtimes.get(kind)
    if runtime is not None:
        return runtime
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; want one of {', '.join(KINDS)}")
    with _lock:
        if kind not in _runtimes:
            if kind in _forked_with:
                raise ForkedProcessError(kind)
            module, name = _CLASSES[kind]
            _runtimes[kind] = getattr(importlib.import_module(module), name)()
        return _runtimes[kind]


def find_devices() -> list[tuple[str, int]]:
    """Every device that a runtime sees: [("cuda", 0), ("cuda", 1)], say. No array library is asked."""
    found: list[tuple[str, int]] = []
    for kind in KINDS:
        try:
            found += [(kind, index) for index in range(get_runtime(kind).device_count())]
        except RuntimeUnavailable:
            continue
    return found


def default_device() -> tuple[str, int] | None:
    """The current device of the first runtime that there is, ("cuda", 0) say; None on a machine without one.

    Raises:
        ForkedProcessError: the driver was initialised before this process was forked.
    """
    for kind in KINDS:
        try:
            return kind, get_runtime(kind).current_device()
        except RuntimeUnavailable:
            continue
    return None


def device_of_pointer(ptr: int) -> tuple[str, int]:
    """Which device a device pointer belongs to: ("cuda", 0) or ("rocm", 1), say.

    A CUDA array interface names no device, so the runtimes are asked: first those in use, then those whose libraries some other package
    has loaded into this process, then any that is installed.

    Raises:
        ValueError: no runtime knows the pointer (host memory, or freed), or it is 0.
        RuntimeUnavailable: there is no runtime to ask.
        ForkedProcessError: the only runtime was initialised before this process was forked.
    """
    for kind, runtime in tuple(_runtimes.items()):
        device = runtime.pointer_device(ptr)
        if device is not None:
            return kind, device
    return _search_pointer(ptr)


def _search_pointer(ptr: int) -> tuple[str, int]:
    """The slow half of :func:`device_of_pointer`: ask runtimes that are not in use yet."""
    if ptr == 0:
        raise ValueError("ptr: got 0; want a device pointer (an array of size zero has none: take its device by name)")
    missing: list[RuntimeUnavailable] = []
    forked: ForkedProcessError | None = None
    others = [kind for kind in KINDS if kind not in _runtimes]
    for kind in sorted(others, key=lambda kind: not mapped_libraries(_DRIVER_LIBRARIES[kind])):
        try:
            device = get_runtime(kind).pointer_device(ptr)
        except RuntimeUnavailable as error:
            missing.append(error)
        except ForkedProcessError as error:
            forked = error
        else:
            if device is not None:
                return kind, device
    if forked is not None:
        raise forked
    if not _runtimes:
        looked_for = "; ".join(f"{part.kind}: {part.looked_for}" for part in missing)
        raise RuntimeUnavailable("cuda or rocm", looked_for, " ".join(part.install for part in missing))
    for runtime in _runtimes.values():
        runtime.check_library()
    where = f"which no device of {' or '.join(_runtimes)} has allocated"
    raise ValueError(f"ptr: got {ptr:#x}, {where}; want a pointer to device memory (is the array on the host, or already freed?)")


def _after_fork_in_child() -> None:
    """Disable the runtimes of the parent: their drivers hold threads and mappings that the child lacks."""
    _forked_with.update(_runtimes)
    # other packages may have initialised HIP without us; CUDA's driver tells us itself when it is first called
    if os.path.exists(_HIP_DEVICE_FILE) and has_open(_HIP_DEVICE_FILE):
        _forked_with.add("rocm")
    for runtime in _runtimes.values():
        runtime.disable_after_fork()
    _runtimes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
