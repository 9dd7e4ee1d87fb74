"""The native door: an XLA FFI handler (`handler.cpp`) that makes prepared launches, and the recipes that it has.

The handler is compiled on first use with the headers of the jaxlib that is here, into this package's cache of compiled code;
`python -m hipgroupgemm.integrations.jax build` does so ahead of time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.backends.scan_arguments import FAULT_BYTES, fault_from_bytes
from hipgroupgemm.native import include_folder
from hipgroupgemm.operands.views import Device
from hipgroupgemm.plan import GroupedMatmulPlan
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.host_code import HostCodeError, compile_host_code, load_host_code
from hipgroupgemm.runtime.memory import ALIGNMENT
from hipgroupgemm.runtime.pinned import PinnedRing
from hipgroupgemm.runtime.replay import LaunchList
from hipgroupgemm.version import __version__

__all__ = ["TARGET", "NativeDoorError", "add_recipe", "build", "check", "load"]

TARGET = "hipgroupgemm_ragged_dot"
_ORDERED = "_ordered"
_PLATFORMS = {"cuda": "CUDA", "rocm": "ROCM"}
_FAULTS = 4096
"""Places for faults on a device; recipes past that share the last."""


class NativeDoorError(RuntimeError):
    """Calls cannot go through the native handler; the text says why."""


def build(extra: str = "") -> bytes:
    """The handler's shared library, compiled or from the cache; `extra` is C++ behind its source, for tests.

    Raises:
        NativeDoorError: no compiler, no headers, or they do not fit.
    """
    source = (Path(__file__).parent / "handler.cpp").read_text(encoding="utf-8")
    launches = (Path(include_folder()) / "launches.h").read_text(encoding="utf-8")
    headers = jax.ffi.include_dir()
    if not (Path(headers) / "xla" / "ffi" / "api" / "ffi.h").is_file():
        raise NativeDoorError(f"jaxlib {jaxlib.__version__} has no FFI headers in {headers}")
    try:
        version = f"jaxlib {jaxlib.__version__}\n{launches}"
        return compile_host_code(source + extra, "c++", (include_folder(), headers), ("-std=c++17",), version)
    except HostCodeError as error:
        raise NativeDoorError(str(error)) from None


@functools.lru_cache(1)
def _library() -> ctypes.CDLL | str:
    """The loaded handler, registered with XLA, or why there is none."""
    try:
        library = load_host_code(build(), "hipgroupgemm-jax")
    except (NativeDoorError, HostCodeError) as error:
        return str(error)
    for platform in _PLATFORMS.values():
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.hgg_ragged_dot), platform=platform)
        jax.ffi.register_ffi_target(TARGET + _ORDERED, jax.ffi.pycapsule(library.hgg_ragged_dot_ordered), platform=platform)
    return _typed(library)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.hgg_add_recipe.argtypes = [ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64]
    library.hgg_add_recipe.restype, library.hgg_call_count.restype = ctypes.c_int32, ctypes.c_uint64
    return library


def load() -> ctypes.CDLL:
    """The handler, registered for CUDA and ROCm; NativeDoorError where it cannot be had. `hgg_call_count()` says how often it has run."""
    found = _library()
    if isinstance(found, str):
        raise NativeDoorError(found)
    return found


# ---- recipes -----------------------------------------------------------------------------------------------------------------


class _Faults:
    """32 bytes of device memory for each recipe of a device, zeroed: the first wrong sizes that it saw."""

    def __init__(self, device: Device) -> None:
        self.runtime, self.device = get_runtime(device.kind), device.index
        self.extents: list[int] = []  # the ragged extent of each, for its error
        nbytes = FAULT_BYTES * _FAULTS
        self.base = self.runtime.malloc_plain(nbytes, self.device)
        with self.runtime.use_device(self.device):
            self.runtime.memset_async(self.base, 0, nbytes)
            self.runtime.synchronize_stream()
        self._ring = PinnedRing(self.runtime, self.device, nbytes, 1)

    def take(self, ragged_extent: int) -> int:
        place = min(len(self.extents), _FAULTS - 1)
        self.extents.append(ragged_extent)
        return self.base + FAULT_BYTES * place

    def check(self) -> None:
        used = FAULT_BYTES * min(len(self.extents), _FAULTS)
        with self.runtime.use_device(self.device):
            self.runtime.synchronize_device(self.device)
            raw = self._ring.read(self.base, used, 0) if used else b""
            faults = [fault_from_bytes(raw[at : at + FAULT_BYTES]) for at in range(0, used, FAULT_BYTES)]
            if any(faults):
                self.runtime.memset_async(self.base, 0, used)
                self.runtime.synchronize_stream()
        for fault, extent in zip(faults, self.extents, strict=False):
            if fault is not None:
                fault.throw(extent)


@dataclasses.dataclass
class _Kept:
    """What a recipe stands on. It is never let go: any compiled program of this process may run it."""

    executable: Executable
    launches: LaunchList
    scratch_size: int
    ordered: bool


_kept: dict[tuple[int, int], _Kept] = {}
_faults: dict[Device, _Faults] = {}
_lock = threading.Lock()


def check() -> None:
    """Waits for every device that ran a ragged dot under jit here; raises a ValueError if one was given wrong sizes since the last check.

    The text names the first group at fault, what it wanted and what was left. On a CPU wrong sizes are not kept.
    """
    with _lock:
        for faults in _faults.values():
            faults.check()


def add_recipe(devices: Sequence[Device], arguments: Arguments, slots: Sequence[str], settings: dict[str, Any]) -> tuple[str, int, int]:
    """Prepares a call's launches on devices of one kind and gives them to the handler.

    Args:
        devices: where the program may run.
        arguments: the call; its pointers are not looked at.
        slots: what the handler's buffers are, in order: roles, and "scratch" last.
        settings: of the plan, but for config and device.

    Returns:
        The handler's name; the recipe's number, the same in every process with the same algorithms; and the bytes of scratch that it needs.

    Raises:
        NativeDoorError: the handler cannot be had, or the backend's launches are no list.
        NotImplementedError: no backend runs this.
    """
    library = load()
    plans = {device: GroupedMatmulPlan(arguments.config, device=device, **settings) for device in devices}
    view, offset = arguments.group_sizes, arguments.group_offset
    algorithms = sorted({plan.algorithm.key for plan in plans.values()})
    call = arguments.ends, arguments.tail, view.shape, view.dtype.str, offset if isinstance(offset, int) else offset.dtype.str
    text = repr((__version__, arguments.config.to_json(), call, tuple(slots), algorithms, settings["max_multiprocessors"]))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    with _lock:
        for device, plan in plans.items():
            if (number, device.index) not in _kept:
                _add(library, number, device, plan, arguments, slots)
        kept = [_kept[number, device.index] for device in devices]
        return TARGET + _ORDERED * any(one.ordered for one in kept), number, max(one.scratch_size for one in kept)


def _add(library: ctypes.CDLL, number: int, device: Device, plan: GroupedMatmulPlan, arguments: Arguments, slots: Sequence[str]) -> None:
    runtime = get_runtime(device.kind)
    if device not in _faults:
        _faults[device] = _Faults(device)
    fault = _faults[device].take(arguments.config.ragged_extent)
    backend, most = get_backend(plan.backend), plan.settings.max_multiprocessors
    backend = backend.limited(most) if most else backend
    executable = backend.prepare(plan.key, device, plan.algorithm, 0)  # of its own: its parameters are written in place
    recipe = executable.recipe(arguments, slots, fault)
    if recipe is None:
        executable.close()
        raise NativeDoorError(f"the launches of backend {plan.backend!r} are no list of kernels")
    try:
        launches = LaunchList(runtime, device.index, 0, recipe.moves, (), recipe.launches)
    except (NotImplementedError, AttributeError) as error:
        raise NativeDoorError(str(error)) from None
    with runtime.use_device(device.index):
        runtime.synchronize_stream()  # what it was prepared with is there, whatever stream XLA has
    _kept[number, device.index] = _Kept(executable, launches, max(recipe.scratch_size, ALIGNMENT), recipe.ordered)
    if library.hgg_add_recipe(number, device.index, launches.address, len(slots)) < 0:
        raise NativeDoorError(f"{len(slots)} operands are too many")
