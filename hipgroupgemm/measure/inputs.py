"""What runs are given and must leave as it is: group sizes in the device's memory, digests of all inputs, and poison where nothing may be
read.

The poison is NaN in rows that no group covers, in the weights of empty groups, and in all of one group's. A kernel that reads them and
multiplies by zero is right on clean operands and wrong on recycled memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.base import Harness, OperandSet
from hipgroupgemm.measure.layouts import poison_byte, spans
from hipgroupgemm.measure.size_sets import SizeSet
from hipgroupgemm.operands.views import ArrayView
from hipgroupgemm.problem.groups import GroupBounds, scan, select_groups

__all__ = ["Inputs", "Part", "fill_parts", "group_parts", "reads_of", "unread_parts"]

Array = np.ndarray[Any, Any]


class Inputs:
    """The inputs of runs on some operand sets. What they hold is changed in place between size sets: a candidate that remembers by
    address what it has read, or made of it, is wrong from the second set on.

    Attributes:
        sizes: sizes or end offsets of the size set in use. group_offset: on the host or on the device.
    """

    sizes: ArrayView
    group_offset: int | ArrayView

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._memory: dict[tuple[str, str, tuple[int, ...]], ArrayView] = {}
        self._held: dict[str, tuple[ArrayView, Array]] = {}
        self._digests: list[tuple[OperandSet, dict[str, int]]] = []

    def use(self, one: SizeSet) -> None:
        """Takes up a size set: its integers come to the device."""
        self._held, values = {}, one.integers()
        wide = values
        if one.spaced:
            wide = np.full((*values.shape, 2), np.iinfo(values.dtype).min, values.dtype)  # what lies between is no size
            wide[..., 0] = values
        memory = self._place("group_sizes", wide)
        self.sizes = dataclasses.replace(memory, shape=values.shape, strides=memory.strides[: values.ndim])
        self.group_offset = one.group_offset
        if one.device_offset:
            self.group_offset = self._place("group_offset", np.array([one.group_offset], np.int32))

    def _place(self, name: str, values: Array) -> ArrayView:
        key = (name, values.dtype.str, values.shape)
        if key in self._memory:
            self._harness.rewrite(self._memory[key], values)
        else:
            self._memory[key] = self._harness.sizes(values)
        self._held[name] = (self._memory[key], values)
        return self._memory[key]

    def seal(self, sets: Sequence[OperandSet]) -> None:
        """Remembers what all inputs hold."""
        self._digests = [(operands, self._harness.digest(operands)) for operands in sets]

    def changed(self, sets: Sequence[OperandSet] | None = None) -> str:
        """Which inputs are no longer as they were, in words; "" where all are. None looks at all that were sealed."""
        found: dict[str, None] = {}
        for operands, before in self._digests:
            if sets is None or any(operands is one for one in sets):
                found |= dict.fromkeys(name for name, digest in self._harness.digest(operands).items() if digest != before[name])
        for name, (view, values) in self._held.items():
            if not np.array_equal(self._harness.contents(view), values):
                found[name] = None
        return f"it changed its inputs: {', '.join(found)}" if found else ""


def reads_of(config: GroupedGemmConfig, sizes: Any, group_offset: int = 0) -> GroupBounds:
    """Which rows a run with these host sizes reads, (batch, group_count): those of each group from `group_offset` on."""
    each = np.broadcast_to(np.asarray(sizes), (config.batch_count, config.group_total))
    return select_groups(scan(each, config.ragged_extent), group_offset, config.group_count)


Part = tuple[str, dict[int, tuple[int, int]]]
"""Of an operand, by name: first and one-past-last index along some axes."""


def unread_parts(operands: OperandSet, reads: GroupBounds) -> list[Part]:
    """All that `reads` leaves out."""
    parts: list[Part] = []
    for entry, (starts, ends) in enumerate(zip(reads.starts.tolist(), reads.ends.tolist(), strict=True)):
        first, last = (starts[0], ends[-1]) if starts else (0, 0)
        for name, axis in _ragged_axes(operands.config).items():
            parts += [(name, {1: (entry, entry + 1), axis: part}) for part in ((0, first), (last, operands.layouts[name].shape[axis]))]
        if operands.config.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            empty = [group for group, (start, end) in enumerate(zip(starts, ends, strict=True)) if start >= end]
            parts += [("rhs", {0: (group, group + 1), 1: (entry, entry + 1)}) for group in empty]
    return parts


def group_parts(operands: OperandSet, reads: GroupBounds, group: int) -> tuple[list[Part], list[Part]]:
    """What one group, counted from the first that is computed, alone reads; and what of out it alone fills."""
    read: list[Part] = []
    filled: list[Part] = []
    contracting = operands.config.ragged_mode is RaggedDotMode.CONTRACTING
    for entry, (start, end) in enumerate(zip(reads.starts[:, group].tolist(), reads.ends[:, group].tolist(), strict=True)):
        mine = {1: (entry, entry + 1)}
        read += [(name, mine | {axis: (start, end)}) for name, axis in _ragged_axes(operands.config).items()]
        read += [] if contracting else [("rhs", mine | {0: (group, group + 1)})]
        if start < end:
            filled.append(("out", mine | ({0: (group, group + 1)} if contracting else {2: (start, end)})))
    return read, filled


def fill_parts(harness: Harness, operands: OperandSet, parts: Sequence[Part], byte: int | None = None) -> None:
    """Fills parts with NaN, or with a byte. Layouts whose elements are interleaved or repeated are left alone."""
    for name, chosen in parts:
        layout = operands.layouts[name]
        if any(layout.shape[i] > 1 and layout.strides[i] == 0 for i in chosen):  # what the part tells apart repeats its elements
            continue
        for offset, nbytes in spans(layout, chosen):
            harness.set_bytes(operands.pointers[name] + offset, poison_byte(layout.dtype) if byte is None else byte, nbytes)


def _ragged_axes(config: GroupedGemmConfig) -> dict[str, int]:
    """The ragged axis of each operand that has one."""
    return {"lhs": 2} if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else {"lhs": 3, "rhs": 2}
