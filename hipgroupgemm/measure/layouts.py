"""Where the elements of a config's operands lie, and what lies between them: data only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.dtypes import DTYPES

__all__ = ["GUARD", "Layout", "layouts_of"]

GUARD = 256
"""Bytes before and behind every operand that belong to nobody: poisoned, and those of out looked at after each run."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of one operand lie.

    Attributes:
        shape: extents along (group, batch, row, column), 1 where the operand has no such axis. strides: elements, likewise.
        dtype: element type. alignment: the power of two (1 to 16 bytes) that the address is a multiple of, and of no larger one where that
            decides the operand's alignment.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    alignment: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return tuple(stride * self.dtype.itemsize for stride in self.strides)

    @property
    def reach(self) -> int:
        """Bytes from the first to past the last element; 0 without elements."""
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.byte_strides, strict=True))
        return last + self.dtype.itemsize if self.size else 0

    @property
    def nested(self) -> bool:
        """Whether axes lie inside each other in memory, so that a part of the elements can be written and no other is."""
        reach = self.dtype.itemsize
        for stride, extent in sorted(zip(self.byte_strides, self.shape, strict=True)):
            if extent > 1 and stride < reach:
                return False
            reach += stride * (extent - 1)
        return True

    @property
    def offset(self) -> int:
        """Bytes from the start of the buffer, which is aligned to 16, to the first element."""
        inner = 2 if self.strides[2] < self.strides[3] else 3  # this one does not count
        used = [self.byte_strides[axis] for axis in range(4) if axis != inner and self.shape[axis] > 1]
        return GUARD + (self.alignment if self.alignment < math.gcd(16, *used) else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer: a guard, the elements and what lies between them, a guard."""
        return self.offset + self.reach + GUARD

    @property
    def poison(self) -> int:
        """The byte that makes an element NaN when all its bytes are this."""
        return 0x80 if self.dtype.name.endswith("fnuz") else 0xFF


def layouts_of(config: GroupedGemmConfig) -> dict[str, Layout]:
    """The layouts of a config's operands by name: lhs, rhs, out, and c and bias where the config has them."""
    mode, batch = config.ragged_mode, config.batch_count
    rhs_groups = config.group_count if mode is RaggedDotMode.NON_CONTRACTING else 1
    out_groups = config.group_count if mode is RaggedDotMode.CONTRACTING else 1
    out_shape = (out_groups, batch, config.m, config.n)
    found = {
        "lhs": Layout((1, batch, config.m, config.k), (0, *config.lhs_strides), DTYPES[config.type_a], config.lhs_alignment),
        "rhs": Layout((rhs_groups, batch, config.k, config.n), config.rhs_strides, DTYPES[config.type_b], config.rhs_alignment),
        "out": Layout(out_shape, config.output_strides, DTYPES[config.type_d], config.output_alignment),
    }
    if config.beta:
        found["c"] = Layout(out_shape, config.c_strides, DTYPES[config.type_c], config.c_alignment)
    if config.epilogue.bias:
        strides = (config.bias_group_stride, 0, 0, config.bias_inner_stride)
        dtype = DTYPES[config.type_d]
        found["bias"] = Layout((config.group_count, 1, 1, config.n), strides, dtype, min(dtype.itemsize, 16))
    return found
