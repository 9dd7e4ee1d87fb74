"""The harness of a CUDA or ROCm device, on this package's own runtime: no array library is needed.

The structs are those of `device/judge_arguments.h`, which the kernels of `device/judge.cpp` are given.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.device_kernels import THREADS, kernel_headers
from hipgroupgemm.measure.base import Array, Harness, Memory, OperandSet
from hipgroupgemm.measure.check import CheckCounts, Products, Sample, Wrong, check_arrays
from hipgroupgemm.measure.layouts import Layout
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.operands.dtypes import dtype_of
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


TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}
"""Element types that the kernels read, and their numbers."""

CHUNK = 4096  # kChunkElements
_ROWS, _COLUMNS = 16, 64  # HGG_JUDGE_ROWS, HGG_JUDGE_COLUMNS
_KEPT, _ROWS_INSIDE = 1, 2  # flags
_NOWHERE = (1 << 64) - 1


def _struct(fields: str, **kinds: Any) -> np.dtype[Any]:
    """A struct of the fields "names:type, names:type"."""
    parts = [part.split(":") for part in fields.split(",")]
    return np.dtype([(name, kinds.get(kind, kind)) for names, kind in parts for name in names.split()])


# Tests compare the compiler's own offsets with these.
COUNTS = _struct("count wrong first:u8, got wanted bound square_error square_norm:f8, unwritten nan first_nan:u8, worst:f8")
TENSOR = _struct("base:u8, group_stride batch_stride row_stride column_stride:i8, type aligned:i4")
CHECK_TILE = _struct("first k_first k_end:i8, accumulation:f8, batch group count zero:i4")
CHECK_ARGUMENTS = _struct(
    "lhs rhs out c bias:tensor, groups batches rows columns:i8, tiles:u8, tile_count:i8, row_list column_list:u8, column_count:i8,"
    "covered findings poison:u8, alpha beta rounding smallest scaled:f8, flags zero:u4",
    tensor=TENSOR,
)
MEMORY_ARGUMENTS = _struct("base other:u8, extent stride:4i8, count first skip:i8, findings:u8, bytes:i4, poison:u4")


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


class _Handle:
    """A stream's handle for those that ask for the protocol of cuda.core."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def cupy_stream(cupy: Any, handle: int, index: int) -> Any:
    """CuPy's stream over a handle; CuPy 14 has another way to make it and warns of the old one."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, index)


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
        info = self.runtime.device_info(self._index)
        self._kernels: CheckKernels = CheckKernels(self.runtime, self._index) if kernels is None else kernels
        self._blocks = 8 * info.multiprocessors  # of a grid at the most
        last_level = max(info.l2_bytes, _INFINITY_CACHE if self.device.kind == "rocm" else 32 * _MEBI)
        self._flushed = 4 * max(info.l2_bytes, last_level // 2)
        self.stream = self.runtime.create_stream(self._index)
        self._start, self._end = (self.runtime.create_event(self._index, timing=True) for _ in range(2))
        self._scratch: Memory | None = None
        self._trash: Memory | None = None
        self._trash_counts: Memory | None = None
        self._closed = False

    def _launch(self, name: str, arguments: Array, grid: int) -> None:
        with self.runtime.use_device(self._index):
            self._kernels.launch(name, arguments, grid, self.stream)

    def _bring(self, arrays: Sequence[Array], blocks: int) -> tuple[list[int], int]:
        """Copies host arrays to scratch memory, with room for counts behind them: (the arrays' addresses, the counts' address)."""
        offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
        needed = offsets[-1] + blocks * COUNTS.itemsize
        if self._scratch is None or self._scratch.nbytes < needed:
            if self._scratch is not None:
                self._scratch.free()
            self._scratch = self._make(max(needed, _MEBI))
        addresses = [self._scratch.ptr + offset for offset in offsets]
        for array, address in zip(arrays, addresses, strict=False):
            self._write(address, np.ascontiguousarray(array))
        return addresses[:-1], addresses[-1]

    def _counts(self, name: str, arguments: Array, grid: int) -> Array:
        """Launches a kernel and returns its blocks' counts. Waits."""
        self._launch(name, arguments, grid)
        found: Array = self._read(int(arguments["findings"]), grid * COUNTS.itemsize).view(COUNTS)
        return found

    def _grid(self, units: int) -> int:
        return max(1, min(units, self._blocks))

    def _walk(self, layout: Layout, address: int, **values: int) -> tuple[Array, int]:
        """The arguments of a kernel that walks over a layout's elements, and its grid."""
        arguments = _filled(MEMORY_ARGUMENTS, base=address, bytes=layout.dtype.itemsize, **values)
        arguments["extent"], arguments["stride"] = walk_axes(layout)
        return arguments, self._grid(walk_units(arguments["extent"].tolist()))

    def _sum(self, name: str, arguments: Array, grid: int) -> int:
        _, arguments["findings"] = self._bring([], grid)
        return int(self._counts(name, arguments, grid)["count"].sum())

    def _allocate(self, nbytes: int) -> Memory:
        runtime, index = self.runtime, self._index
        try:
            ptr = runtime.malloc_plain(nbytes, index)
        except MemoryError:
            if not default_allocator(runtime).trim(index):
                raise
            ptr = runtime.malloc_plain(nbytes, index)

        def free() -> None:
            with contextlib.suppress(RuntimeError):  # after a fault of the device, which has been said
                runtime.free_plain(ptr, index)

        return Memory(ptr, nbytes, free)

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
        self._launch("hgg_scatter", *self._walk(layout, address, other=source, count=numbers.size))
        self.synchronize()  # the scratch memory is used again

    def _digest(self, address: int, nbytes: int) -> int:
        """Of the last 15 bytes, which are guards, some are left out."""
        return self._sum("hgg_digest", _filled(MEMORY_ARGUMENTS, base=address, count=nbytes // 16), self._touch_grid(nbytes))

    def _differing(self, layout: Layout, address: int, other: int) -> int:
        return self._sum("hgg_same", *self._walk(layout, address, other=other)) if layout.size else 0

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

    def _check(self, operands: OperandSet, products: Products, sample: Sample, tail: str, fill: int) -> CheckCounts:
        layouts, small = operands.layouts, operands.nbytes <= _ON_HOST
        unread = [layout.dtype.name for layout in layouts.values() if layout.dtype.name not in TYPES]
        if unread and not small:
            raise NotImplementedError(f"{unread[0]} on {self.device}: the check reads {', '.join(TYPES)}, others up to 1 GiB of operands")
        seen, overflowed = (None, False) if unread else self._compare(operands, products, sample, tail, fill)
        if seen is None or (overflowed and small):  # the kernel knows no sum that is infinite by right
            seen = check_arrays(products, sample, {name: self.values(operands, name) for name in layouts}, tail, fill)
        out, buffer = layouts["out"], operands.memory["out"].ptr
        skip = out.reach if out.reach == out.size * out.dtype.itemsize else 0  # where nothing lies between elements
        guards = {"count": out.nbytes, "first": out.offset, "skip": skip, "poison": fill}
        arguments, _ = self._walk(out, buffer + out.offset, **guards)
        seen.touched = self._sum("hgg_gaps", arguments, self._grid(-(-(out.nbytes - skip) // CHUNK)))
        return seen

    def _compare(self, operands: OperandSet, products: Products, sample: Sample, tail: str, fill: int) -> tuple[CheckCounts, bool]:
        """Compares the sample, and looks at all of out but its gaps; and whether a wrong element is infinite."""
        config, layout, seen, overflowed = products.config, operands.layouts["out"], CheckCounts(), False
        if not layout.size:
            return seen, overflowed
        tiles, (groups, batches, m, n) = tiles_of(products, sample), layout.shape
        rows_inside = layout.strides[2] < layout.strides[3]
        units = tiles.size * -(-sample.columns.size // _COLUMNS)
        grid, inspect_grid = self._grid(units), self._grid(walk_units((groups, batches, *((n, m) if rows_inside else (m, n)))))
        addresses, counts = self._bring([tiles, sample.rows, sample.columns, products.covered], max(grid, inspect_grid))
        arguments = _filled(
            CHECK_ARGUMENTS,
            **{name: tensor_of(one, operands.pointers[name]) for name, one in operands.layouts.items()},
            **{"groups": groups, "batches": batches, "rows": m, "columns": n, "findings": counts},
            **dict(zip(("tiles", "row_list", "column_list", "covered"), addresses, strict=True)),
            **{"tile_count": tiles.size, "column_count": sample.columns.size, "alpha": config.alpha, "beta": config.beta},
            **{"rounding": products.tolerance.rounding, "smallest": products.tolerance.smallest, "scaled": products.scaled.accumulation},
            poison=int.from_bytes(bytes([fill]) * layout.dtype.itemsize, "little"),
            flags=(_KEPT if tail == "undefined" else 0) | (_ROWS_INSIDE if rows_inside else 0),
        )
        if units:
            found = self._counts("hgg_judge", arguments, grid)
            seen.compared, seen.wrong = int(found["count"].sum()), int(found["wrong"].sum())
            seen.square_error, seen.square_norm = float(found["square_error"].sum()), float(found["square_norm"].sum())
            seen.first, seen.worst = first_wrong(found), float(found["worst"].max())
            overflowed = bool(seen.wrong and np.isinf(found["got"]).any())
        found = self._counts("hgg_inspect", arguments, inspect_grid)
        seen.uncovered, seen.first_uncovered = int(found["wrong"].sum()), first_wrong(found)
        seen.unwritten, seen.nan, seen.first_nan = (
            int(x) for x in (found["unwritten"].sum(), found["nan"].sum(), found["first_nan"].min())
        )
        return seen, overflowed

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
            self._trash = self._zeros(_PROBE)
            self.flush()  # the first launch loads the kernel
            took = self.time(self.flush)
            if took * (self._flushed / _PROBE) <= _FLUSH_MS or took < 1.0:  # a launch alone takes some microseconds of any device
                self._trash.free()
                self._trash = self._zeros(self._flushed)
        self._touch(self._trash)

    def _touch(self, memory: Memory) -> None:
        """Reads memory. Does not wait."""
        if self._trash_counts is None:
            self._trash_counts = self._make(COUNTS.itemsize * self._blocks)
        arguments = _filled(MEMORY_ARGUMENTS, base=memory.ptr, count=memory.nbytes // 16, findings=self._trash_counts.ptr)
        self._launch("hgg_touch", arguments, self._touch_grid(memory.nbytes))

    def _touch_grid(self, nbytes: int) -> int:
        return self._grid(nbytes // (16 * CHUNK))

    def _zeros(self, nbytes: int) -> Memory:
        memory = self._make(nbytes)
        self.set_bytes(memory.ptr, 0, nbytes)
        return memory

    def synchronize(self) -> None:
        """Waits for the stream."""
        with self.runtime.use_device(self._index):
            self.runtime.synchronize_stream(self.stream)

    def roofline(self, dtype: Any) -> Roofline | None:
        """The product by CuPy, None where it does not serve this device; copy and read by this package's own calls."""
        kind = dtype_of(dtype)
        try:
            import cupy

            if ("rocm" if cupy.cuda.runtime.is_hip else "cuda") != self.device.kind:
                return None
            with cupy.cuda.Device(self._index), cupy_stream(cupy, self.stream, self._index):
                made = [cupy.random.standard_normal((_PRODUCT, _PRODUCT), dtype=np.float32).astype(kind) for _ in range(3)]
                product = min(self.time(lambda: cupy.matmul(made[0], made[1], out=made[2])) for _ in range(13))
                made.clear()
                cupy.get_default_memory_pool().free_all_blocks()
            source, target = self._zeros(_COPY), self._zeros(_COPY)
        except Exception:  # CuPy's own errors: none here, a type it has no product for, no memory. No roofline is no reason to fail
            return None
        copy = min(self.time(lambda: self.copy_bytes(target.ptr, source.ptr, _COPY)) for _ in range(8))
        read = min(self.time(lambda: self._touch(source)) for _ in range(8))
        return Roofline.of(_PRODUCT, kind.name, product, _COPY, copy, read)

    def close(self) -> None:
        """Frees everything the harness made, its stream included."""
        if self._closed:
            return
        self._closed, runtime = True, self.runtime
        with runtime.use_device(self._index):
            with contextlib.suppress(RuntimeError):  # after a fault of the device each of these fails, and it has been said
                runtime.synchronize_stream(self.stream)
            super().close()
            for destroy, handle in (
                (runtime.destroy_event, self._start),
                (runtime.destroy_event, self._end),
                (runtime.destroy_stream, self.stream),
            ):
                with contextlib.suppress(RuntimeError):
                    destroy(handle)


def _filled(struct: np.dtype[Any], **values: Any) -> Array:
    """A struct with values, all else 0."""
    made = np.zeros((), struct)
    for name, value in values.items():
        made[name] = value
    return made


def walk_axes(layout: Layout) -> tuple[list[int], list[int]]:
    """A layout's elements as four axes (extents, byte strides), the largest stride first, axes that run on into each other merged.

    Axes of stride 0 are left out: their elements are one and the same.
    """
    if not layout.size:
        return [1, 1, 1, 0], [0, 0, 0, 0]
    axes = sorted((s, e) for s, e in zip(layout.byte_strides, layout.shape, strict=True) if e > 1 and s > 0)
    merged: list[tuple[int, int]] = []
    for stride, extent in reversed(axes):
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    merged = [(1, 0)] * (4 - len(merged)) + merged
    return [extent for extent, _ in merged], [stride for _, stride in merged]


def walk_units(extents: Sequence[int]) -> int:
    """Pieces of work of a walk over axes, see `walk_axes`."""
    return int(np.prod(extents[:3], dtype=np.int64)) * -(-extents[3] // CHUNK)


def tensor_of(layout: Layout, address: int) -> tuple[int, ...]:
    """An operand as the kernels' struct."""
    strides = [stride if extent > 1 else 0 for extent, stride in zip(layout.shape, layout.byte_strides, strict=True)]
    return (address, *strides, TYPES[layout.dtype.name], address % layout.dtype.itemsize == 0)


def tiles_of(products: Products, sample: Sample) -> Array:
    """The sample's rows, cut into pieces of one product each."""
    pieces = -(-sample.counts // _ROWS)
    product = np.repeat(np.arange(pieces.size), pieces)
    nth = np.arange(product.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    tiles = np.zeros(product.size, CHECK_TILE)
    tiles["first"] = (np.cumsum(sample.counts) - sample.counts)[product] + _ROWS * nth
    tiles["count"] = np.minimum(sample.counts[product] - _ROWS * nth, _ROWS)
    for name in ("k_first", "k_end", "accumulation", "batch", "group"):
        tiles[name] = products.each[name][product]
    return tiles


def first_wrong(counts: Array) -> Wrong | None:
    """The first wrong element of all blocks' counts."""
    part = counts[int(counts["first"].argmin())]
    found = Wrong(int(part["first"]), float(part["got"]), float(part["wanted"]), float(part["bound"]))
    return None if found.place == _NOWHERE else found
