"""The check on a GPU: `device/judge.cpp` launched on operands that lie there. Only counts, a few kilobytes, come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.measure.check import CheckCounts, Products, Sample, describe_element, place_of
from hipgroupgemm.measure.layouts import Layout

__all__ = ["CHECK_ARGUMENTS", "CHECK_TILE", "COUNTS", "MEMORY_ARGUMENTS", "TENSOR", "TYPES", "DeviceCheck", "blocks_for", "walk_axes"]

Array = np.ndarray[Any, Any]

TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}
"""Element types that the kernels read, and their numbers."""

CHUNK = 4096  # kChunkElements
_ROWS, _COLUMNS = 16, 64  # HGG_JUDGE_ROWS, HGG_JUDGE_COLUMNS
_KEPT, _ROWS_INSIDE = 1, 2  # flags
_NOWHERE = (1 << 64) - 1

# The structs of device/judge_arguments.h; tests compare the compiler's own offsets with these.
COUNTS = np.dtype(
    [
        ("count", "<u8"), ("wrong", "<u8"), ("first", "<u8"), ("got", "<f8"), ("wanted", "<f8"), ("bound", "<f8"),
        ("square_error", "<f8"), ("square_norm", "<f8"), ("unwritten", "<u8"), ("nan", "<u8"), ("first_nan", "<u8"), ("worst", "<f8"),
    ]
)  # fmt: skip
TENSOR = np.dtype(
    [
        ("base", "<u8"), ("group_stride", "<i8"), ("batch_stride", "<i8"), ("row_stride", "<i8"), ("column_stride", "<i8"),
        ("type", "<i4"), ("aligned", "<i4"),
    ]
)  # fmt: skip
CHECK_TILE = np.dtype(
    [
        ("first", "<i8"), ("k_first", "<i8"), ("k_end", "<i8"), ("accumulation", "<f8"),
        ("batch", "<i4"), ("group", "<i4"), ("count", "<i4"), ("zero", "<i4"),
    ]
)  # fmt: skip
CHECK_ARGUMENTS = np.dtype(
    [
        ("lhs", TENSOR), ("rhs", TENSOR), ("out", TENSOR), ("c", TENSOR), ("bias", TENSOR),
        ("groups", "<i8"), ("batches", "<i8"), ("rows", "<i8"), ("columns", "<i8"),
        ("tiles", "<u8"), ("tile_count", "<i8"), ("row_list", "<u8"), ("column_list", "<u8"), ("column_count", "<i8"),
        ("covered", "<u8"), ("findings", "<u8"), ("poison", "<u8"),
        ("alpha", "<f8"), ("beta", "<f8"), ("rounding", "<f8"), ("smallest", "<f8"), ("scaled", "<f8"),
        ("flags", "<u4"), ("zero", "<u4"),
    ]
)  # fmt: skip
MEMORY_ARGUMENTS = np.dtype(
    [
        ("base", "<u8"), ("other", "<u8"), ("extent", "<i8", 4), ("stride", "<i8", 4), ("count", "<i8"), ("first", "<i8"), ("skip", "<i8"),
        ("findings", "<u8"), ("bytes", "<i4"), ("poison", "<u4"),
    ]
)  # fmt: skip

Scratch = Callable[[Sequence[Array], int], tuple[list[int], int]]
"""(host arrays, blocks) -> (their addresses on the device once copied, the address of the counts of so many blocks)."""
Launch = Callable[[str, Array, int], None]
"""(kernel, its arguments, blocks)."""
ReadCounts = Callable[[int, int], Array]
"""(address, blocks) -> the blocks' counts. Waits."""


def walk_axes(layout: Layout) -> tuple[list[int], list[int]]:
    """A layout's elements as four axes (extents, byte strides), the largest stride first, axes that run on into each other merged.

    Axes of stride 0 are left out: their elements are one and the same.
    """
    if 0 in layout.shape:
        return [1, 1, 1, 0], [0, 0, 0, 0]
    axes = [(e, s) for e, s in zip(layout.shape, layout.byte_strides, strict=True) if e > 1 and s > 0]
    merged: list[tuple[int, int]] = []
    for extent, stride in sorted(axes, key=lambda axis: -axis[1]):
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    merged = [(1, 0)] * (4 - len(merged)) + merged
    return [extent for extent, _ in merged], [stride for _, stride in merged]


def blocks_for(units: int, most: int) -> int:
    """A grid for so many units of work."""
    return max(1, min(units, most))


def walk_blocks(extents: Sequence[int], most: int) -> int:
    """A grid for a walk over axes, see `walk_axes`."""
    return blocks_for(int(np.prod(extents[:3], dtype=np.int64)) * -(-extents[3] // CHUNK), most)


def tensor_of(layout: Layout, address: int) -> Array:
    """An operand as the kernels' struct."""
    tensor = np.zeros((), TENSOR)
    strides = [stride if extent > 1 else 0 for extent, stride in zip(layout.shape, layout.byte_strides, strict=True)]
    tensor["base"] = address
    for field, stride in zip(("group_stride", "batch_stride", "row_stride", "column_stride"), strides, strict=True):
        tensor[field] = stride
    tensor["type"], tensor["aligned"] = TYPES[layout.dtype.name], address % layout.dtype.itemsize == 0
    return tensor


def tiles_of(products: Products, sample: Sample) -> Array:
    """The sample's rows, cut into pieces of one product each."""
    pieces = -(-sample.counts // _ROWS)
    product = np.repeat(np.arange(pieces.size), pieces)
    nth = np.arange(product.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    tiles = np.zeros(product.size, CHECK_TILE)
    tiles["first"] = (np.cumsum(sample.counts) - sample.counts)[product] + _ROWS * nth
    tiles["count"] = np.minimum(sample.counts[product] - _ROWS * nth, _ROWS)
    for name in ("k_first", "k_end", "accumulation", "batch", "group"):
        tiles[name] = getattr(products, name)[product]
    return tiles


class DeviceCheck:
    """Runs the kernels for a harness.

    Args:
        launch, scratch, read: how kernels are launched, host arrays are brought to the device and counts come back.
        most: blocks of a grid at the most.
    """

    def __init__(self, launch: Launch, scratch: Scratch, read: ReadCounts, most: int) -> None:
        self._launch, self._scratch, self._read, self._most = launch, scratch, read, most
        self.overflowed = False
        """Whether the first wrong element of the last comparison was infinite."""

    def compare(
        self, products: Products, sample: Sample, layouts: dict[str, Layout], pointers: dict[str, int], tail: str, fill: int
    ) -> CheckCounts:
        """Compares the sample, and looks at all of out but its gaps; every byte of out was `fill` before the run."""
        config, layout = products.config, layouts["out"]
        seen = CheckCounts()
        if not layout.size:
            return seen
        tiles = tiles_of(products, sample)
        units = tiles.size * -(-sample.columns.size // _COLUMNS)
        rows_inside = layout.strides[2] < layout.strides[3]
        groups, batches, m, n = layout.shape
        lines, length = (n, m) if rows_inside else (m, n)
        inspect_grid = walk_blocks((groups, batches, lines, length), self._most)
        compare_grid = blocks_for(units, self._most)
        addresses, counts = self._scratch([tiles, sample.rows, sample.columns, products.covered], max(inspect_grid, compare_grid))
        arguments = np.zeros((), CHECK_ARGUMENTS)
        values: dict[str, Any] = {name: tensor_of(one, pointers[name]) for name, one in layouts.items()}
        values |= {"groups": groups, "batches": batches, "rows": m, "columns": n, "findings": counts}
        values |= dict(zip(("tiles", "row_list", "column_list", "covered"), addresses, strict=True))
        values |= {"tile_count": tiles.size, "column_count": sample.columns.size, "alpha": products.alpha, "beta": products.beta}
        values |= {"rounding": products.tolerance.rounding, "smallest": products.tolerance.smallest, "scaled": products.scaled.accumulation}
        values["poison"] = int.from_bytes(bytes([fill]) * layout.dtype.itemsize, "little")
        values["flags"] = (_KEPT if tail == "undefined" else 0) | (_ROWS_INSIDE if rows_inside else 0)
        for name, value in values.items():
            arguments[name] = value
        self.overflowed = False
        if units:
            self._launch("hgg_judge", arguments, compare_grid)
            parts = self._read(counts, compare_grid)
            seen.compared, seen.wrong = int(parts["count"].sum()), int(parts["wrong"].sum())
            seen.square_error, seen.square_norm = float(parts["square_error"].sum()), float(parts["square_norm"].sum())
            seen.where, seen.worst = _first_wrong(products, parts), float(parts["worst"].max())
            self.overflowed = bool(seen.wrong and np.isinf(parts["got"]).any())
        self._launch("hgg_inspect", arguments, inspect_grid)
        parts = self._read(counts, inspect_grid)
        seen.uncovered, seen.where_uncovered = int(parts["wrong"].sum()), _first_wrong(products, parts)
        seen.unwritten, seen.nan = int(parts["unwritten"].sum()), int(parts["nan"].sum())
        first = int(parts["first_nan"].min())
        seen.first_nan = place_of(config, first) if first != _NOWHERE else ""
        return seen

    def _memory_arguments(self, layout: Layout, address: int) -> Array:
        arguments = np.zeros((), MEMORY_ARGUMENTS)
        arguments["base"], arguments["bytes"] = address, layout.dtype.itemsize
        arguments["extent"], arguments["stride"] = walk_axes(layout)
        return arguments

    def _count(self, kernel: str, arguments: Array, grid: int) -> int:
        _, arguments["findings"] = self._scratch([], grid)
        self._launch(kernel, arguments, grid)
        return int(self._read(int(arguments["findings"]), grid)["count"].sum())

    def touched(self, layout: Layout, buffer: int, fill: int) -> int:
        """How many bytes of a layout's whole buffer belong to no element and are not `fill`."""
        skip = layout.reach if layout.reach == layout.size * layout.dtype.itemsize else 0  # where nothing lies between elements
        arguments = self._memory_arguments(layout, buffer + layout.offset)
        arguments["count"], arguments["first"], arguments["skip"], arguments["poison"] = layout.nbytes, layout.offset, skip, fill
        return self._count("hgg_gaps", arguments, blocks_for(-(-(layout.nbytes - skip) // CHUNK), self._most))

    def differences(self, layout: Layout, address: int, other: int) -> int:
        """How many elements at `address` differ bitwise from those at `other`, laid out alike."""
        if not layout.size:
            return 0
        arguments = self._memory_arguments(layout, address)
        arguments["other"] = other
        return self._count("hgg_same", arguments, walk_blocks(arguments["extent"].tolist(), self._most))

    def scatter(self, layout: Layout, address: int, table: int, length: int, first: int = 0) -> None:
        """Fills a layout's elements from a table of `length` elements, over and over, beginning with number `first` of it."""
        arguments = self._memory_arguments(layout, address)
        arguments["other"], arguments["count"], arguments["first"] = table, length, first
        self._launch("hgg_scatter", arguments, walk_blocks(arguments["extent"].tolist(), self._most))

    def digest(self, address: int, nbytes: int) -> int:
        """A number that tells whether any of `nbytes` (of the last 15, which are guards, some are left out) has changed."""
        arguments = np.zeros((), MEMORY_ARGUMENTS)
        arguments["base"], arguments["count"] = address, nbytes // 16
        return self._count("hgg_digest", arguments, self.touch_blocks(nbytes))

    def touch(self, address: int, nbytes: int, counts: int) -> None:
        """Reads memory. Does not wait; at `counts` there is room for those of `touch_blocks` blocks."""
        arguments = np.zeros((), MEMORY_ARGUMENTS)
        arguments["base"], arguments["count"], arguments["findings"] = address, nbytes // 16, counts
        self._launch("hgg_touch", arguments, self.touch_blocks(nbytes))

    def touch_blocks(self, nbytes: int) -> int:
        """Blocks that `touch` launches."""
        return blocks_for(nbytes // (16 * CHUNK), self._most)


def _first_wrong(products: Products, parts: Array) -> str:
    first = int(parts["first"].min())
    if first == _NOWHERE:
        return ""
    part = parts[int(parts["first"].argmin())]
    return describe_element(products.config, first, float(part["got"]), float(part["wanted"]), float(part["bound"]))
