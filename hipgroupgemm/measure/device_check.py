"""What the kernels of `device/judge.cpp` are given: the structs of `device/judge_arguments.h`, and how operands and samples become them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hipgroupgemm.measure.check import Products, Sample, Wrong
from hipgroupgemm.measure.layouts import Layout

__all__ = [
    "CHECK_ARGUMENTS", "CHECK_TILE", "COUNTS", "MEMORY_ARGUMENTS", "TENSOR", "TYPES", "first_wrong", "tensor_of", "tiles_of", "walk_axes",
    "walk_units",
]  # fmt: skip

Array = np.ndarray[Any, Any]

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
