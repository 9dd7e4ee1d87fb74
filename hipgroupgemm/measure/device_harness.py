"""The harness of a CUDA or ROCm device, on this package's own runtime: no array library is needed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.device_kernels import THREADS, kernel_headers
from hipgroupgemm.measure.base import Array, Harness, OperandSet
from hipgroupgemm.measure.check import CheckCounts, Products, Sample
from hipgroupgemm.measure.device_check import CHECK_ARGUMENTS, COUNTS, MEMORY_ARGUMENTS, TYPES, DeviceCheck
from hipgroupgemm.measure.host_check import check_arrays
from hipgroupgemm.measure.layouts import Layout
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.memory import default_allocator
from hipgroupgemm.runtime.parameters import Blob, KernelParameters

__all__ = ["CheckKernels", "DeviceHarness"]

_MEBI = 1 << 20
_PROBE = _MEBI // 4  # bytes that are read to see how fast a device reads
_FLUSH_MS = 20.0  # that a flush may take: an emulated device has no cache that would be worth more
_INFINITY_CACHE = 256 * _MEBI  # of MI300; it lies behind L2, and no attribute tells it
_ALIGNMENT = 256
_ON_HOST = 1 << 30  # bytes of operands that are brought to the host at the most, where the device's check does not do
_PRODUCT, _COPY = 8192, 1 << 30  # extents and bytes of what the roofline is measured by


class CheckKernels:
    """`device/judge.cpp` compiled for one device."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        with open(os.path.join(native.device_folder(), "judge.cpp"), encoding="utf-8") as file:
            source = file.read()
        module = runtime.module_from_source(source, "hipgroupgemm_judge.cpp", ("-std=c++17",), device, kernel_headers())
        self._runtime, self._module = runtime, module
        self._parameters = {dtype.itemsize: KernelParameters([Blob(dtype.itemsize)]) for dtype in (CHECK_ARGUMENTS, MEMORY_ARGUMENTS)}

    def launch(self, name: str, arguments: Array, grid: int, stream: int) -> None:
        """Launches a kernel by name; the device must be current."""
        parameters = self._parameters[arguments.nbytes]
        parameters[0] = arguments.tobytes()
        self._runtime.launch(self._module.get_function(name), (grid, 1, 1), (THREADS, 1, 1), 0, stream, parameters)


class _DeviceMemory:
    def __init__(self, runtime: Runtime, device: int, nbytes: int) -> None:
        self.runtime, self.device, self.nbytes, self.ptr = runtime, device, nbytes, 0
        try:
            self.ptr = runtime.malloc_plain(nbytes, device)
        except MemoryError:
            if not default_allocator(runtime).trim(device):
                raise
            self.ptr = runtime.malloc_plain(nbytes, device)

    def free(self) -> None:
        """Frees now, waiting for the device."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            with contextlib.suppress(RuntimeError):  # after a fault of the device, which has been said
                self.runtime.free_plain(ptr, self.device)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            with contextlib.suppress(Exception):  # the device may be gone, this a forked process, or the interpreter at its end
                self.free()


class DeviceHarness(Harness):
    """Operands in device memory, times by events, results checked by a kernel; see `Harness`.

    Args:
        device: which.
        runtime, kernels: stand-ins for the device's own, for tests.
    """

    budget = 5e10
    table = 1_048_573

    def __init__(self, device: Device | str, *, runtime: Any = None, kernels: Any = None) -> None:
        super().__init__()
        self.device = Device.of(device)
        self.runtime: Runtime = get_runtime(self.device.kind) if runtime is None else runtime
        self._index = self.device.index
        self._info = self.runtime.device_info(self._index)
        self._kernels: CheckKernels = CheckKernels(self.runtime, self._index) if kernels is None else kernels
        self.stream = self.runtime.create_stream(self._index)
        self._start, self._end = (self.runtime.create_event(self._index, timing=True) for _ in range(2))
        self._checker = DeviceCheck(self._launch, self._bring, self._counts, 8 * self._info.multiprocessors)
        self._last_level = max(self._info.l2_bytes, _INFINITY_CACHE if self.device.kind == "rocm" else 32 * _MEBI)
        self.cache_bytes = 2 * self._last_level
        self._scratch: _DeviceMemory | None = None
        self._trash: tuple[_DeviceMemory, _DeviceMemory] | None = None
        self._closed = False

    # ---- what the kernels need ---------------------------------------------------------------------------------------------

    def _launch(self, name: str, arguments: Array, grid: int) -> None:
        with self.runtime.use_device(self._index):
            self._kernels.launch(name, arguments, grid, self.stream)

    def _bring(self, arrays: Sequence[Array], blocks: int) -> tuple[list[int], int]:
        """Copies host arrays to scratch memory, with room for counts behind them."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        needed = end + blocks * COUNTS.itemsize
        if self._scratch is None or self._scratch.nbytes < needed:
            if self._scratch is not None:
                self._scratch.free()
            self._scratch = self._allocate(max(needed, _MEBI))
        base = self._scratch.ptr
        for array, offset in zip(arrays, offsets, strict=True):
            self._write(base + offset, np.ascontiguousarray(array))
        return [base + offset for offset in offsets], base + end

    def _counts(self, address: int, blocks: int) -> Array:
        found: Array = self._read(address, blocks * COUNTS.itemsize).view(COUNTS)
        return found

    # ---- memory ------------------------------------------------------------------------------------------------------------

    def _allocate(self, nbytes: int) -> _DeviceMemory:
        return _DeviceMemory(self.runtime, self._index, nbytes)

    def _read(self, address: int, nbytes: int) -> Array:
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            self.copy_bytes(host.ctypes.data, address, nbytes)
            self.synchronize()
        return host

    def _write(self, address: int, values: Array) -> None:
        self.copy_bytes(address, values.ctypes.data, values.nbytes)
        self.synchronize()

    def set_bytes(self, address: int, value: int, nbytes: int) -> None:
        """A memset in the stream's order."""
        with self.runtime.use_device(self._index):
            self.runtime.memset_async(address, value, nbytes, self.stream)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """A copy in the stream's order."""
        with self.runtime.use_device(self._index):
            self.runtime.memcpy_async(target, source, nbytes, self.stream)

    def _scatter(self, layout: Layout, address: int, numbers: Array) -> None:
        (source,), _ = self._bring([numbers], 1)
        self._checker.scatter(layout, address, source, numbers.size)
        self.synchronize()  # the scratch memory is used again

    def _digest(self, memory: Any) -> int:
        return self._checker.digest(memory.ptr, memory.nbytes)

    def _differing(self, layout: Layout, address: int, other: int) -> int:
        return self._checker.differences(layout, address, other)

    def free_bytes(self) -> int:
        """Free memory of the device, and what this package's allocator keeps."""
        return self.runtime.memory_info(self._index)[0] + default_allocator(self.runtime).kept_bytes(self._index)

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """By how much the device's free memory falls, caches of allocators emptied before. `call` runs twice: the first loads its code."""
        call()
        self.synchronize()
        default_allocator(self.runtime).trim(self._index)
        if "cupy" in sys.modules:
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
        before = self.runtime.memory_info(self._index)[0]
        call()
        self.synchronize()
        return max(before - self.runtime.memory_info(self._index)[0], 0)

    # ---- results -----------------------------------------------------------------------------------------------------------

    def _check(self, operands: OperandSet, products: Products, sample: Sample, tail: str, fill: int) -> CheckCounts:
        layouts, small = operands.layouts, operands.nbytes <= _ON_HOST
        unread = [layout.dtype.name for layout in layouts.values() if layout.dtype.name not in TYPES]
        if unread and not small:
            raise NotImplementedError(f"{unread[0]} on {self.device}: the check reads {', '.join(TYPES)}, others up to 1 GiB of operands")
        seen = None if unread else self._checker.compare(products, sample, layouts, operands.pointers, tail, fill)
        if seen is None or (self._checker.overflowed and small):  # the kernel knows no sum that is infinite by right
            seen = check_arrays(products, sample, {name: self.values(operands, name) for name in layouts}, tail, fill)
        seen.touched = self._checker.touched(layouts["out"], operands.memory["out"].ptr, fill)
        return seen

    # ---- time --------------------------------------------------------------------------------------------------------------

    def time(self, call: Callable[[], object]) -> float:
        """Milliseconds between two events on the stream."""
        runtime = self.runtime
        with runtime.use_device(self._index):
            runtime.record_event(self._start, self.stream)
            call()
            runtime.record_event(self._end, self.stream)
            runtime.synchronize_event(self._end)
            return runtime.elapsed_ms(self._start, self._end)

    def flush(self) -> None:
        """Reads more than the caches hold."""
        if self._trash is None:
            counts = self._allocate(COUNTS.itemsize * 8 * self._info.multiprocessors)
            self._trash = (self._zeros(_PROBE), counts)
            self.flush()  # the first launch loads the kernel
            took, wanted = self.time(self.flush), 4 * max(self._info.l2_bytes, self._last_level // 2)
            if took * (wanted / _PROBE) <= _FLUSH_MS or took < 1.0:  # a launch alone takes some microseconds of any device
                self._trash[0].free()
                self._trash = (self._zeros(wanted), counts)
        trash, counts = self._trash
        self._checker.touch(trash.ptr, trash.nbytes, counts.ptr)

    def _zeros(self, nbytes: int) -> _DeviceMemory:
        memory = self._allocate(nbytes)
        self.set_bytes(memory.ptr, 0, nbytes)
        return memory

    def synchronize(self) -> None:
        """Waits for the stream."""
        with self.runtime.use_device(self._index):
            self.runtime.synchronize_stream(self.stream)

    def _measure_roofline(self, dtype: np.dtype[Any]) -> Roofline | None:
        """The product by CuPy, None where it does not serve this device; copy and read by this package's own calls."""
        try:
            import cupy

            if ("rocm" if cupy.cuda.runtime.is_hip else "cuda") != self.device.kind:
                return None
            with cupy.cuda.Device(self._index), cupy.cuda.ExternalStream(self.stream, self._index):
                made = [cupy.random.standard_normal((_PRODUCT, _PRODUCT), dtype=np.float32).astype(dtype) for _ in range(3)]
                product = min(self.time(lambda: cupy.matmul(made[0], made[1], out=made[2])) for _ in range(13))
                made.clear()
                cupy.get_default_memory_pool().free_all_blocks()
            source, target = self._zeros(_COPY), self._zeros(_COPY)
            counts = self._allocate(COUNTS.itemsize * self._checker.touch_blocks(_COPY))
        except Exception:  # CuPy's own errors: none here, a type it has no product for, no memory. No roofline is no reason to fail
            return None
        copy = min(self.time(lambda: self.copy_bytes(target.ptr, source.ptr, _COPY)) for _ in range(8))
        read = min(self.time(lambda: self._checker.touch(source.ptr, _COPY, counts.ptr)) for _ in range(8))
        rates = {"copy": 2 * _COPY / copy * 1e3, "read": _COPY / read * 1e3}
        best_by = max(rates, key=lambda name: rates[name])
        words = f"{best_by} of {_COPY // _MEBI} MiB{', read + written' if best_by == 'copy' else ''}"
        for memory in (source, target, counts):
            memory.free()
        return Roofline(2 * _PRODUCT**3 / product * 1e3, rates[best_by], f"product of {_PRODUCT} x {_PRODUCT} {dtype.name} matrices", words)

    def close(self) -> None:
        """Frees everything the harness made, its stream included."""
        if self._closed:
            return
        self._closed = True
        runtime = self.runtime
        with runtime.use_device(self._index):
            with contextlib.suppress(RuntimeError):  # after a fault of the device each of these fails, and it has been said
                runtime.synchronize_stream(self.stream)
            super().close()
            for piece in (self._scratch, *(self._trash or ())):
                if piece is not None:
                    piece.free()
            self._scratch = self._trash = None
            for event in (self._start, self._end):
                with contextlib.suppress(RuntimeError):
                    runtime.destroy_event(event)
            with contextlib.suppress(RuntimeError):
                runtime.destroy_stream(self.stream)
