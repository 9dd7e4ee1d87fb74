"""The workbench of a CUDA or ROCm device, on this package's own runtime: no array library is needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.device_kernels import THREADS, kernel_headers
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.check import Findings, Problem, Sample, host_integers
from hipgroupgemm.measure.device_check import FINDINGS, JUDGE_ARGUMENTS, MEMORY_ARGUMENTS, TYPES, DeviceJudge
from hipgroupgemm.measure.harness import (
    GUARD,
    Array,
    Harness,
    Layout,
    OperandSet,
    Snapshot,
    layouts_of,
    operand_set,
    operand_std,
    poison_byte,
)
from hipgroupgemm.measure.roofline import Roofline, measure_ceilings
from hipgroupgemm.operands.dtypes import dtype_of
from hipgroupgemm.operands.views import ArrayView, Device, packed_strides
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.memory import default_allocator
from hipgroupgemm.runtime.parameters import Blob, KernelParameters

__all__ = ["DeviceHarness", "JudgeKernels"]

_MEBI = 1 << 20
_TABLE = 1_048_573  # random numbers before they repeat: a prime, so that no row or matrix repeats at its own start
_PROBE = _MEBI // 4  # bytes that are read to see how fast a device reads
_FLUSH_MS = 20.0  # that a flush may take: an emulated device has no cache that would be worth more
_INFINITY_CACHE = 256 * _MEBI  # of MI300; it lies behind L2, and no attribute tells it
_ALIGNMENT = 256


class JudgeKernels:
    """`device/judge.cpp` compiled for one device."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        with open(os.path.join(native.device_folder(), "judge.cpp"), encoding="utf-8") as file:
            source = file.read()
        module = runtime.module_from_source(source, "hipgroupgemm_judge.cpp", ("-std=c++17",), device, kernel_headers())
        self._runtime, self._module = runtime, module
        self._parameters = {dtype.itemsize: KernelParameters([Blob(dtype.itemsize)]) for dtype in (JUDGE_ARGUMENTS, MEMORY_ARGUMENTS)}

    def launch(self, name: str, arguments: Array, grid: int, stream: int) -> None:
        """Launches a kernel by name; the device must be current."""
        parameters = self._parameters[arguments.nbytes]
        parameters[0] = arguments.tobytes()
        self._runtime.launch(self._module.get_function(name), (grid, 1, 1), (THREADS, 1, 1), 0, stream, parameters)


class _Memory:
    """Device memory that goes when its last user lets go of it."""

    def __init__(self, runtime: Runtime, device: int, nbytes: int) -> None:
        self.runtime, self.device, self.nbytes, self.users = runtime, device, nbytes, 1
        self.ptr = 0
        try:
            self.ptr = runtime.malloc_plain(nbytes, device)
        except MemoryError:
            if not default_allocator(runtime).trim(device):
                raise
            self.ptr = runtime.malloc_plain(nbytes, device)

    def release(self) -> None:
        """One user fewer; frees with the last."""
        self.users -= 1
        if self.users <= 0:
            self.free()

    def free(self) -> None:
        """Frees now, waiting for the device. A second call does nothing."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            self.runtime.free_plain(ptr, self.device)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            with contextlib.suppress(Exception):  # the device may be gone, this a forked process, or the interpreter at its end
                self.free()


class _DeviceSnapshot(Snapshot):
    def __init__(self, memory: _Memory) -> None:
        self.memory = memory

    def release(self) -> None:
        self.memory.free()


class DeviceHarness(Harness):
    """Operands in device memory, times by events, results judged by a kernel; see `Harness`.

    Args:
        device: which.
        runtime, kernels: stand-ins for the device's own, for tests.
    """

    budget = 5e10

    def __init__(self, device: Device | str, *, runtime: Any = None, kernels: Any = None) -> None:
        self.device = Device.of(device)
        self.runtime: Runtime = get_runtime(self.device.kind) if runtime is None else runtime
        self._index = self.device.index
        self._info = self.runtime.device_info(self._index)
        self._kernels: JudgeKernels = JudgeKernels(self.runtime, self._index) if kernels is None else kernels
        self.stream = self.runtime.create_stream(self._index)
        self._start, self._end = (self.runtime.create_event(self._index, timing=True) for _ in range(2))
        self._judge = DeviceJudge(self._launch, self._bring, self._findings, 8 * self._info.multiprocessors)
        self._scratch: _Memory | None = None
        self._trash: tuple[_Memory, _Memory] | None = None
        self._live: list[Any] = []  # sets and snapshots that are not released yet
        self._ceilings: dict[str, Roofline | None] = {}
        self._closed = False

    # ---- the kernels' needs ------------------------------------------------------------------------------------------------

    def _launch(self, name: str, arguments: Array, grid: int) -> None:
        self._kernels.launch(name, arguments, grid, self.stream)

    def _bring(self, arrays: Sequence[Array], blocks: int) -> tuple[list[int], int]:
        """Copies host arrays to scratch memory, with room for findings behind them."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        needed = end + blocks * FINDINGS.itemsize
        if self._scratch is None or self._scratch.nbytes < needed:
            if self._scratch is not None:
                self._scratch.free()
            self._scratch = _Memory(self.runtime, self._index, max(needed, _MEBI))
        base = self._scratch.ptr
        for array, offset in zip(arrays, offsets, strict=True):
            self._upload(base + offset, array)
        return [base + offset for offset in offsets], base + end

    def _upload(self, address: int, values: Array) -> None:
        host = np.ascontiguousarray(values)
        self.runtime.memcpy_async(address, host.ctypes.data, host.nbytes, self.stream)
        self.runtime.synchronize_stream(self.stream)

    def _download(self, address: int, nbytes: int) -> Array:
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            self.runtime.memcpy_async(host.ctypes.data, address, nbytes, self.stream)
            self.runtime.synchronize_stream(self.stream)
        return host

    def _findings(self, address: int, blocks: int) -> Array:
        found: Array = self._download(address, blocks * FINDINGS.itemsize).view(FINDINGS)
        return found

    # ---- operands ----------------------------------------------------------------------------------------------------------

    def operands(self, config: GroupedGemmConfig, *, seed: int, copies: int = 1) -> list[OperandSet]:
        """Fresh operands; see `Harness.operands`."""
        layouts = layouts_of(config)
        for name, layout in layouts.items():
            if layout.dtype.name not in TYPES:
                raise NotImplementedError(f"{name}: {layout.dtype.name} on {self.device}: the judge reads {', '.join(TYPES)}")
        inputs = sum(layout.nbytes for name, layout in layouts.items() if name != "out")
        count = max(copies, 1) if inputs < 2 * self._cache_bytes() else 1
        table = max(min(max(layout.size for layout in layouts.values()), _TABLE), 1) * 8
        needed, free = inputs * count + layouts["out"].nbytes + table, self.free_bytes()
        if needed > free:
            raise MemoryError(f"the operands take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {self.device}")
        rng = np.random.default_rng(seed)
        made: list[_Memory] = []
        sets = []
        with self.runtime.use_device(self._index):
            try:
                out = self._buffer(layouts["out"], made)
                out.users = count
                for _ in range(count):
                    memory = {name: out if name == "out" else self._buffer(layout, made) for name, layout in layouts.items()}
                    where = {name: memory[name].ptr + _base(layout) if layout.size else 0 for name, layout in layouts.items()}
                    for name, layout in layouts.items():
                        if name != "out":
                            self._fill_normal(layout, where[name], rng, operand_std(config, name))
                    sets.append(operand_set(config, layouts, where, memory))
            except BaseException:
                for piece in made:
                    piece.free()
                raise
        self._live += sets
        return sets

    def _cache_bytes(self) -> int:
        return max(self._info.l2_bytes, _INFINITY_CACHE if self.device.kind == "rocm" else 32 * _MEBI)

    def _buffer(self, layout: Layout, made: list[_Memory]) -> _Memory:
        """Memory of a layout, poisoned."""
        memory = _Memory(self.runtime, self._index, layout.nbytes)
        made.append(memory)
        self.runtime.memset_async(memory.ptr, poison_byte(layout.dtype), layout.nbytes, self.stream)
        return memory

    def _fill_normal(self, layout: Layout, address: int, rng: np.random.Generator, std: float) -> None:
        """Random normal numbers: a table of them is brought from the host, and repeated on the device where it is too short."""
        if not layout.size:
            return
        length = min(layout.size, _TABLE)
        wide = rng.standard_normal(length, dtype=np.float64 if layout.dtype == np.float64 else np.float32)
        if std != 1.0:
            wide *= wide.dtype.type(std)
        table = wide.astype(layout.dtype, copy=False)
        (source,), _ = self._bring([table], 1)
        self._judge.scatter(layout, address, source, length)
        self.runtime.synchronize_stream(self.stream)  # the scratch memory is used again

    def sizes(self, values: Any) -> ArrayView:
        """A copy on the device; see `Harness.sizes`."""
        host = np.ascontiguousarray(host_integers(values))
        with self.runtime.use_device(self._index):
            memory = _Memory(self.runtime, self._index, max(host.nbytes, 16))
            self._upload(memory.ptr, host)
        strides = packed_strides(host.shape, host.itemsize)
        return ArrayView(memory.ptr, host.shape, strides, host.dtype, self.device, "", owner=memory)

    def rewrite(self, view: ArrayView, values: Any) -> None:
        """Copies there; see `Harness.rewrite`."""
        with self.runtime.use_device(self._index):
            self._upload(view.pointer, host_integers(values))

    def contents(self, view: ArrayView) -> Array:
        """A copy on the host."""
        with self.runtime.use_device(self._index):
            return self._download(view.pointer, view.reach).view(view.dtype).reshape(view.shape)

    def renew(self, operands: OperandSet, *, seed: int) -> None:
        """Other numbers at the same addresses; see `Harness.renew`."""
        rng = np.random.default_rng(seed)
        with self.runtime.use_device(self._index):
            for name, layout in operands.layouts.items():
                if name != "out":
                    memory = operands.memory[name]
                    self.runtime.memset_async(memory.ptr, poison_byte(layout.dtype), memory.nbytes, self.stream)
                    self._fill_normal(layout, getattr(operands, name), rng, operand_std(operands.config, name))

    def digest(self, operands: OperandSet) -> dict[str, int]:
        """By a kernel that reads all of each buffer."""
        with self.runtime.use_device(self._index):
            return {name: self._judge.digest(memory.ptr, memory.nbytes) for name, memory in operands.memory.items() if name != "out"}

    def poison(self, operands: OperandSet, fill: int | None = None) -> None:
        """Fills out, its gaps and guards included."""
        memory, dtype = operands.memory["out"], operands.layouts["out"].dtype
        self.set_bytes(memory.ptr, poison_byte(dtype) if fill is None else fill, memory.nbytes)

    def set_bytes(self, address: int, value: int, nbytes: int) -> None:
        """A memset in the stream's order."""
        with self.runtime.use_device(self._index):
            self.runtime.memset_async(address, value, nbytes, self.stream)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """A copy in the stream's order."""
        with self.runtime.use_device(self._index):
            self.runtime.memcpy_async(target, source, nbytes, self.stream)

    def release(self, operands: OperandSet) -> None:
        """Frees a set; see `Harness.release`."""
        memory = dict(operands.memory)
        operands.memory.clear()
        self._live = [one for one in self._live if one is not operands]
        for piece in memory.values():
            piece.release()

    def values(self, operands: OperandSet, name: str = "out") -> Array:
        """A packed copy on the host."""
        layout = operands.layouts[name]
        if not layout.size:
            return np.empty(layout.shape, layout.dtype)
        with self.runtime.use_device(self._index):
            host = self._download(getattr(operands, name), layout.reach)
        packed: Array = np.ndarray(layout.shape, layout.dtype, host.data, 0, layout.byte_strides).copy("C")
        return packed

    # ---- results -----------------------------------------------------------------------------------------------------------

    def _look(self, operands: OperandSet, problem: Problem, sample: Sample, tail: str, held: int) -> Findings:
        """Compares out with a kernel's float64 products."""
        memory, layout = operands.memory["out"], operands.layouts["out"]
        with self.runtime.use_device(self._index):
            found = self._judge.look(operands, problem, sample, tail, held)
            found.touched = self._judge.touched(layout, memory.ptr, memory.ptr + _base(layout), layout.nbytes, held)
        return found

    def snapshot(self, operands: OperandSet) -> Snapshot:
        """A copy of out's whole buffer on the device."""
        source = operands.memory["out"]
        with self.runtime.use_device(self._index):
            copy = _DeviceSnapshot(_Memory(self.runtime, self._index, source.nbytes))
            self.runtime.memcpy_async(copy.memory.ptr, source.ptr, source.nbytes, self.stream)
        self._live = [one for one in self._live if not isinstance(one, _DeviceSnapshot) or one.memory.ptr]
        self._live.append(copy)
        return copy

    def same(self, operands: OperandSet, snapshot: Any) -> int:
        """Elements that differ bitwise."""
        layout = operands.layouts["out"]
        if not snapshot.memory.ptr:
            raise ValueError("snapshot: was released; take another")
        with self.runtime.use_device(self._index):
            return self._judge.differences(layout, operands.memory["out"].ptr + _base(layout), snapshot.memory.ptr + _base(layout))

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
        with self.runtime.use_device(self._index):
            if self._trash is None:
                self._trash = self._make_trash()
            trash, findings = self._trash
            self._judge.touch(trash.ptr, trash.nbytes, findings.ptr)

    def _make_trash(self) -> tuple[_Memory, _Memory]:
        findings = _Memory(self.runtime, self._index, FINDINGS.itemsize * 8 * self._info.multiprocessors)
        trash = self._zeros(_PROBE)
        self._judge.touch(trash.ptr, trash.nbytes, findings.ptr)  # the first launch loads the kernel
        took = self.time(lambda: self._judge.touch(trash.ptr, trash.nbytes, findings.ptr))
        wanted = 2 * max(2 * self._info.l2_bytes, self._cache_bytes())
        if took * (wanted / _PROBE) <= _FLUSH_MS or took < 1.0:  # a launch alone takes some microseconds of any device
            trash.free()
            trash = self._zeros(wanted)
        return trash, findings

    def _zeros(self, nbytes: int) -> _Memory:
        memory = _Memory(self.runtime, self._index, nbytes)
        self.runtime.memset_async(memory.ptr, 0, nbytes, self.stream)
        return memory

    def synchronize(self) -> None:
        """Waits for the stream."""
        with self.runtime.use_device(self._index):
            self.runtime.synchronize_stream(self.stream)

    def ceilings(self, dtype: Any) -> Roofline | None:
        """Measured with CuPy where it serves this device, else None."""
        from hipgroupgemm.benchmark.labs import gpu_refusal, lab_for

        kind = dtype_of(dtype)
        if kind.name not in self._ceilings:
            measured = None
            if not gpu_refusal(str(self.device)):
                try:
                    with lab_for(str(self.device)) as lab:
                        measured = measure_ceilings(lab, kind)
                except Exception:  # CuPy's own errors: a type it has no product for, no memory. No ceiling is no reason to fail
                    measured = None
            self._ceilings[kind.name] = measured
        return self._ceilings[kind.name]

    def free_bytes(self) -> int:
        """Free memory of the device, and what this package's allocator keeps."""
        return self.runtime.memory_info(self._index)[0] + default_allocator(self.runtime).kept_bytes(self._index)

    def close(self) -> None:
        """Frees everything the bench made, its stream included."""
        if self._closed:
            return
        self._closed = True
        held: list[_Memory | None] = [self._scratch, *(self._trash or ())]
        for one in self._live:
            held += [one.memory] if isinstance(one, _DeviceSnapshot) else one.memory.values()
            if isinstance(one, OperandSet):
                one.memory.clear()
        self._live.clear()
        self._scratch = self._trash = None
        runtime = self.runtime
        with runtime.use_device(self._index):
            steps: list[Callable[[], object]] = [lambda: runtime.synchronize_stream(self.stream)]
            steps += [piece.free for piece in held if piece is not None]
            steps += [lambda: runtime.destroy_event(self._start), lambda: runtime.destroy_event(self._end)]
            steps += [lambda: runtime.destroy_stream(self.stream)]
            for step in steps:
                with contextlib.suppress(RuntimeError):  # after a fault of the device each of them fails, and it has been said
                    step()


def _base(layout: Layout) -> int:
    """How far into its buffer a layout's first element lies: allocations are aligned to 256 bytes."""
    return GUARD + layout.shift
