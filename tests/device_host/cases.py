"""Random cases for the device kernels, laid out in one arena of bytes.

A case says what a caller of the library means (mode, operands with their strides, group sizes); ``arguments``
maps that to the kernels' struct as a backend would, and ``model.py`` works out, from the case alone, what the
arena must hold afterwards. Since the whole arena is compared, every byte that a kernel should have left alone
is a canary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from . import layout as L

FLOAT_TYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
INTEGER_TYPES = tuple(L.INTEGERS)
ODD_COUNTS = (0, 1, 2, 3, 255, 256, 257, 1025, 2048, 2049, 4103)


@dataclass
class Place:
    """A strided array in the arena: ``offset`` in bytes, ``strides`` in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, arena: np.ndarray) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, arena.data, self.offset, self.strides)


@dataclass
class Operand:
    """An operand that only its address matters of: any 64-bit number, strides in bytes."""

    base: int
    row_stride: int = 0
    group_stride: int = 0
    batch_stride: int = 0
    table: Place | None = None  # the groups' bases, where the operand is a list


@dataclass
class Case:
    mode: str  # "non_contracting", "contracting", "batch"
    swapped: bool
    extent: int  # R
    batches: int
    groups: int
    total: int
    kernel: str  # "hgg_fill", "hgg_scan"
    grid: int
    order: int
    offsets: bool = False
    sizes: Place | None = None
    group_offset: Place | int = 0
    starts: Place | None = None
    ends: Place | None = None
    covered_range: Place | None = None
    fault: Place | None = None
    records: Place | None = None
    template: np.ndarray = field(default_factory=lambda: np.zeros((), L.RECORD))
    operands: dict[str, Operand | None] = field(default_factory=dict)  # lhs, rhs, out, c, bias
    alpha: bytes | None = None
    beta: bytes | None = None
    tiles: Place | None = None
    tile_count: Place | None = None
    block_rows: int = 0
    uncovered_grid: int = 0  # 0: hgg_zero_uncovered is not launched
    uncovered_beta: float = 0.0
    out: Place | None = None  # (batch, rows, columns) or (group, batch, rows, columns)
    c: Place | None = None


class Arena:
    """Bytes with gaps between what is placed; everything not placed is random."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.rng = rng
        self.bytes = rng.integers(0, 256, size, dtype=np.uint8)
        self.used = 64

    def take(self, count: int, align: int, shift: int = 0) -> int:
        """``count`` bytes at a multiple of ``align`` plus ``shift``."""
        start = -(-(self.used + int(self.rng.integers(32, 80))) // align) * align + shift
        self.used = start + count
        if self.used + 64 > len(self.bytes):
            raise MemoryError("the arena is full")
        return start

    def place(self, shape: tuple[int, ...], dtype: Any, align: int) -> Place:
        dtype = np.dtype(dtype)
        strides, step = [], dtype.itemsize
        for extent in reversed(shape):
            strides.append(step)
            step *= max(extent, 1)
        return Place(self.take(step, align), shape, tuple(reversed(strides)), dtype)


def pick(rng: np.random.Generator, values: Any, weights: Any = None) -> Any:
    """One of ``values`` as it is, not as a NumPy scalar."""
    p = None if weights is None else np.asarray(weights, float) / np.sum(weights)
    return values[int(rng.choice(len(values), p=p))]


def split(rng: np.random.Generator, extent: int, parts: int) -> list[int]:
    """``extent`` cut at random into ``parts`` sizes, some of them 0."""
    if parts == 0:
        return []
    cuts = sorted(int(x) for x in rng.integers(0, extent + 1, parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True)]


def draw_sizes(rng: np.random.Generator, kind: str, extent: int, total: int, offsets: bool) -> list[int]:
    """Sizes or end offsets of one batch: right ones, or wrong in the way that ``kind`` names."""
    target = {"tail": extent // 2, "past": extent + extent // 3 + 5, "zeros": 0}.get(kind, extent)
    sizes = split(rng, target, total)
    if kind == "one" and total:
        sizes = [0] * total
        sizes[int(rng.integers(total))] = extent
    values = [int(x) for x in np.cumsum(np.array(sizes, object))] if offsets else sizes
    if kind == "wrong" and total:
        extremes = (
            -1,
            -5,
            -(2**63),
            2**31 - 1,
            2**31,
            2**32 - 1,
            2**63 - 1,
            2**64 - 1,
            extent + 1,
            extent + 2,
        )
        for _ in range(int(rng.integers(1, 4))):
            values[int(rng.integers(total))] = pick(rng, extremes)
    return values


def place_sizes(rng: np.random.Generator, arena: Arena, batches: int, total: int, dtype: np.dtype[Any]) -> Place:
    size = dtype.itemsize
    how = pick(rng, ("packed", "spread", "transposed", "same", "shared", "unaligned"), (10, 3, 2, 1, 2, 1))
    step = size * (int(rng.integers(2, 5)) if how == "spread" else 1)
    strides = (step * total + (step if how == "spread" else 0), step)
    if how == "transposed":
        strides = (size, size * batches)
    elif how == "same":
        strides = (size, 0)
    elif how == "shared":
        strides = (0, size)
    shift = 1 if how == "unaligned" and size > 1 else 0
    extent = sum(max(n - 1, 0) * s for n, s in zip((batches, total), strides, strict=True)) + size
    return Place(arena.take(extent, 8, shift), (batches, total), strides, dtype)


def add_sizes(rng: np.random.Generator, arena: Arena, case: Case, dtype_name: str | None, wanted: str | None) -> None:
    dtype = np.dtype("<" + (dtype_name or pick(rng, INTEGER_TYPES)))
    case.offsets = bool(rng.integers(2))
    case.sizes = place_sizes(rng, arena, case.batches, case.total, dtype)
    bounds = np.iinfo(dtype)
    view = case.sizes.view(arena.bytes)
    kinds = ("exact", "tail", "past", "zeros", "one", "wrong", "noise")
    for batch in range(case.batches):
        kind = wanted or pick(rng, kinds, (8, 5, 2, 1, 2, 3, 1))
        if kind == "noise":
            view[batch] = rng.integers(bounds.min, bounds.max, case.total, dtype=dtype, endpoint=True)
            continue
        values = draw_sizes(rng, kind, case.extent, case.total, case.offsets)
        view[batch] = np.array([min(max(v, bounds.min), bounds.max) for v in values], dtype)


def add_group_offset(rng: np.random.Generator, arena: Arena, case: Case) -> None:
    room = case.total - case.groups
    value = int(rng.integers(0, room + 1))
    if rng.random() < 0.15:
        value = pick(rng, (-1, room + 1, -(2**63), 2**63 - 1, 127, -128))
    if rng.random() < 0.5:
        case.group_offset = value
        return
    dtype = np.dtype("<" + pick(rng, INTEGER_TYPES))
    bounds = np.iinfo(dtype)
    shift = 1 if rng.random() < 0.1 else 0
    case.group_offset = Place(arena.take(8, 8, shift), (1,), (dtype.itemsize,), dtype)
    case.group_offset.view(arena.bytes)[0] = min(max(value, bounds.min), bounds.max)


def draw_operands(rng: np.random.Generator, arena: Arena, case: Case) -> None:
    """lhs, rhs, out, c and bias somewhere in the 64-bit space, steps between groups past 2^32 included."""

    def address() -> int:
        return int(rng.integers(1, 2**47))

    def stride(most: int = 2**35) -> int:
        return int(rng.integers(0, most)) if rng.random() < 0.9 else 0

    # A batch stride counts only where every batch has records of its own; else it is in the template.
    batch = case.batches > 1
    names = ("lhs", "rhs", "out", "c", "bias")
    ops: dict[str, Operand | None] = {name: Operand(address(), 0, 0, stride() if batch else 0) for name in names}
    if case.mode != "batch":
        ragged = ("lhs", "rhs") if case.mode == "contracting" else ("lhs", "out", "c")
        per_group = ("out", "c") if case.mode == "contracting" else ("rhs", "bias")
        for name, op in ops.items():
            assert op is not None
            op.row_stride = stride(2**20) if name in ragged else 0
            op.group_stride = stride() if name in per_group else 0
            if name in per_group and case.groups and rng.random() < 0.25:
                op.table = arena.place((case.groups,), "<u8", 8)
                op.table.view(arena.bytes)[...] = rng.integers(1, 2**47, case.groups)
    for name in ("c", "bias"):
        if rng.random() < 0.3:
            ops[name] = None
    case.operands = ops


def add_records(rng: np.random.Generator, arena: Arena, case: Case) -> None:
    count = case.batches * case.groups
    count = max(count, 2) if rng.random() < 0.7 else count + int(rng.integers(0, 70))
    if count == 0:
        return
    case.records = arena.place((count,), L.RECORD, pick(rng, (16, 256)))
    case.template = np.frombuffer(rng.bytes(L.RECORD.itemsize), L.RECORD)[0]
    draw_operands(rng, arena, case)
    case.alpha = rng.bytes(16) if rng.random() < 0.7 else None
    case.beta = rng.bytes(16) if rng.random() < 0.7 else None


def add_tiles(rng: np.random.Generator, arena: Arena, case: Case) -> None:
    fitting = [b for b in (1, 7, 16, 64, 128, 4096, 2**20, 2**31 - 1) if case.extent // b <= 700]
    case.block_rows = pick(rng, fitting)
    capacity = case.batches * (case.extent // case.block_rows + case.groups)
    if rng.random() < 0.1:
        capacity //= 2
    case.tiles = arena.place((capacity,), L.TILE, 16)
    case.tile_count = arena.place((1,), "<i4", 4)


def dense_strides(rng: np.random.Generator, shape: tuple[int, ...], size: int, order: list[int]) -> tuple[int, ...]:
    """Strides of an array without overlaps whose axes lie in ``order``, outermost first; some padded."""
    strides = [0] * len(shape)
    step = size * pick(rng, (1, 2, 3), (8, 1, 1))
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
        if rng.random() < 0.3:
            step += size * int(rng.integers(1, 9))
    return tuple(strides)


def place_matrix(rng: np.random.Generator, arena: Arena, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Place:
    order = list(range(len(shape)))
    if rng.random() < 0.3:
        order[-1], order[-2] = order[-2], order[-1]
    if rng.random() < 0.2:
        order = [int(i) for i in rng.permutation(len(shape))]
    strides = dense_strides(rng, shape, dtype.itemsize, order)
    extent = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    shift = pick(rng, (0, dtype.itemsize, 3 * dtype.itemsize, 1), (12, 4, 3, 1))
    return Place(arena.take(extent, 16, shift), shape, strides, dtype)


def fill_numbers(rng: np.random.Generator, arena: Arena, place: Place) -> None:
    view = place.view(arena.bytes)
    if rng.random() < 0.3:  # any bits: subnormal numbers, infinities, NaN
        words = rng.integers(0, 256, (*view.shape, place.dtype.itemsize), dtype=np.uint8)
        view[...] = words.view(place.dtype)[..., 0]
    else:
        view[...] = rng.standard_normal(view.shape).astype(place.dtype)


def add_uncovered(rng: np.random.Generator, arena: Arena, case: Case) -> None:
    out_batches = case.batches if case.batches > 1 else pick(rng, (1, 2, 3), (6, 1, 1))
    columns = pick(rng, (0, 1, 2, 7, 8, 16, 33, 64, 300), (1, 2, 2, 3, 3, 4, 4, 3, 1))
    if case.mode == "contracting":
        shape: tuple[int, ...] = (case.groups, out_batches, pick(rng, (0, 1, 3, 8, 17)), columns)
    else:
        shape = (out_batches, case.extent, columns)
    if int(np.prod(shape)) > 60000:
        return
    name = pick(rng, list(FLOAT_TYPES))
    case.out = place_matrix(rng, arena, shape, FLOAT_TYPES[name])
    case.out.view(arena.bytes)[...] = np.nan
    case.uncovered_grid = pick(rng, (1, 2, 5, 33))
    case.uncovered_beta = pick(rng, (0.0, -0.0, 1.0, 0.5, -1.75, float(rng.standard_normal()), np.inf), (6, 1, 2, 2, 2, 4, 1))
    raw = np.float64(case.uncovered_beta) if name == "float64" else np.float32(case.uncovered_beta)
    case.beta = raw.tobytes().ljust(16, b"\xee")
    if case.uncovered_beta == 0:
        return  # c stays an address that cannot be read
    how = pick(rng, ("same", "alike", "any", "broadcast", "other type"), (3, 3, 3, 2, 2))
    if how == "same":
        case.c = case.out
    elif how == "alike":
        extent = sum(max(n - 1, 0) * s for n, s in zip(shape, case.out.strides, strict=True)) + case.out.dtype.itemsize
        case.c = Place(arena.take(extent, 16, case.out.offset % 16), shape, case.out.strides, case.out.dtype)
    else:
        dtype = FLOAT_TYPES[pick(rng, list(FLOAT_TYPES))] if how == "other type" else case.out.dtype
        case.c = place_matrix(rng, arena, shape, dtype)
        if how == "broadcast":
            kept = tuple(s if rng.random() < 0.5 else 0 for s in case.c.strides)
            case.c = Place(case.c.offset, shape, kept, dtype)
    fill_numbers(rng, arena, case.c)


def draw_case(
    rng: np.random.Generator,
    arena: Arena,
    count: int | None = None,
    dtype_name: str | None = None,
    kind: str | None = None,
) -> Case:
    """A random case; ``count`` groups, sizes of a dtype and of one kind (draw_sizes) where they are given."""
    mode = pick(rng, ("non_contracting", "contracting", "batch"), (6, 4, 1 if count is None else 0))
    kernel = "hgg_fill" if mode == "batch" or rng.random() < 0.6 else "hgg_scan"
    zeroes = mode != "batch" and rng.random() < 0.6
    batches = pick(rng, (1, 2, 3, 5), (7, 1, 1, 1)) if mode != "batch" else 1
    groups = 1 if mode == "batch" else pick(rng, (int(rng.integers(0, 20)), int(rng.integers(0, 150)), 0), (6, 3, 1))
    if mode != "batch" and rng.random() < 0.03:
        groups = pick(rng, ODD_COUNTS)
    groups = groups if count is None else count
    total = groups + (int(rng.integers(0, 40)) if mode != "batch" and rng.random() < 0.4 else 0)
    extent = int(rng.integers(0, 120)) if zeroes else pick(rng, (0, 1, 777, 2**20, 2**31 - 1, 2**31 + 5, 2**32 - 1))
    if kernel == "hgg_scan" and not zeroes and rng.random() < 0.3:
        extent = 2**40 + 3
    case = Case(
        mode,
        bool(rng.integers(2)),
        extent,
        batches,
        groups,
        total,
        kernel,
        pick(rng, (1, 2, 3, 7, 16, 64)),
        0,
    )
    case.order = int(rng.integers(6))
    if mode != "batch":
        add_sizes(rng, arena, case, dtype_name, kind)
        add_group_offset(rng, arena, case)
    shape = (batches, groups)
    wanted = rng.random(3) < 0.8
    if wanted[0] or zeroes:
        case.starts = arena.place(shape, "<i8", 8)
    if wanted[1] or zeroes:
        case.ends = arena.place(shape, "<i8", 8)
    if wanted[2] or zeroes:
        case.covered_range = arena.place((batches, 2), "<i8", 8)
    if rng.random() < 0.95:
        case.fault = arena.place((1,), L.FAULT, 8)
        if rng.random() < 0.9:
            case.fault.view(arena.bytes)[...] = 0
        else:
            case.fault.view(arena.bytes)["kind"] = int(rng.integers(1, 5))
    if kernel == "hgg_fill":
        add_records(rng, arena, case)
    elif rng.random() < 0.6:
        add_tiles(rng, arena, case)
    if zeroes:
        add_uncovered(rng, arena, case)
    return case


def _matrix(row: Any, place: Place) -> None:
    row["base"] = place.offset
    strides = place.strides
    row["batch_stride"], row["row_stride"], row["column_stride"] = strides[-3:]
    row["group_stride"] = strides[0] if len(strides) == 4 else 0


def arguments(case: Case, arena_address: int) -> np.ndarray:
    """The kernels' struct for a case whose arena lies at ``arena_address``: what a backend has to do."""
    a = np.zeros((), L.ARGUMENTS)
    if case.sizes is not None:
        a["sizes"] = case.sizes.offset + arena_address
        a["sizes_batch_stride"], a["sizes_stride"] = case.sizes.strides
        a["sizes_kind"] = L.SIZES_OFFSETS if case.offsets else L.SIZES_COUNTS
        a["sizes_type"] = L.INTEGERS[case.sizes.dtype.str[1:]]
    if isinstance(case.group_offset, Place):
        a["group_offset"] = case.group_offset.offset + arena_address
        a["group_offset_type"] = L.INTEGERS[case.group_offset.dtype.str[1:]]
    else:
        a["group_offset_value"] = case.group_offset
    a["ragged_extent"] = case.extent
    a["batch_count"], a["group_count"], a["group_total"] = case.batches, case.groups, case.total
    for name in ("starts", "ends", "covered_range", "fault", "records", "tiles", "tile_count"):
        place = getattr(case, name)
        if place is not None:
            a[name] = place.offset + arena_address
    if case.records is not None:
        a["record_count"] = case.records.shape[0]
    if case.tiles is not None:
        a["tile_capacity"], a["block_rows"] = case.tiles.shape[0], case.block_rows
    contracting = case.mode == "contracting"
    non_contracting = L.RAGGED_N if case.swapped or case.mode == "batch" else L.RAGGED_M
    a["mode"] = L.RAGGED_K if contracting else non_contracting
    if case.alpha is not None:
        a["alpha"] = np.void(case.alpha)
        a["flags"] |= L.OVERRIDE_ALPHA
    if case.beta is not None:
        a["beta"] = np.void(case.beta)
        a["flags"] |= L.OVERRIDE_BETA
    a["record"] = case.template
    matrices = {"out": "d", "c": "c", "bias": "bias"}
    matrices |= {"rhs": "a", "lhs": "b"} if case.swapped else {"lhs": "a", "rhs": "b"}
    for name, op in case.operands.items():
        if op is not None and op.table is not None:
            a[matrices[name]] = (op.table.offset + arena_address, op.row_stride, L.LISTED, op.batch_stride)
        elif op is not None:
            a[matrices[name]] = (op.base, op.row_stride, op.group_stride, op.batch_stride)
    if case.out is not None:
        _matrix(a["out"], case.out)
        a["out"]["base"] += np.uint64(arena_address)
        a["c_matrix"]["base"] = 8  # not readable
        a["out_batch_count"], a["out_rows"], a["out_columns"] = case.out.shape[-3:]
        a["out_type"] = a["c_type"] = L.FLOATS[case.out.dtype.name]
    if case.c is not None:
        _matrix(a["c_matrix"], case.c)
        a["c_matrix"]["base"] += np.uint64(arena_address)
        a["c_type"] = L.FLOATS[case.c.dtype.name]
    return a
