"""What runs are given and must leave as it is: group sizes in the device's memory, digests of all inputs, and poison where nothing may be
read.

The poison is NaN in rows that no group covers, in the weights of empty groups, and in all of one group's. A kernel that reads them and
multiplies by zero is right on clean operands and wrong on recycled memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.base import Harness, OperandSet
from hipgroupgemm.measure.layouts import poison_byte, spans
from hipgroupgemm.measure.size_sets import SizeSet
from hipgroupgemm.operands.views import ArrayView
from hipgroupgemm.problem.groups import GroupBounds, scan, select_groups

__all__ = ["Inputs", "SpoiledGroup", "poison_unread", "reads_of"]

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


def poison_unread(harness: Harness, operands: OperandSet, reads: GroupBounds) -> None:
    """Poisons all that `reads` leaves out. Layouts whose elements are interleaved or repeated are left alone."""
    for entry, (starts, ends) in enumerate(zip(reads.starts, reads.ends, strict=True)):
        first, last = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
        for name, axis in _ragged_axes(operands.config).items():
            for part in ((0, first), (last, operands.layouts[name].shape[axis])):
                _poison(harness, operands, name, axis, {1: (entry, entry + 1), axis: part})
        if operands.config.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            for group in np.flatnonzero(starts >= ends).tolist():
                _poison(harness, operands, "rhs", 0, {0: (group, group + 1), 1: (entry, entry + 1)})


class SpoiledGroup:
    """One group whose rows and weights are NaN, while those of all others are not.

    Args:
        operands: whose. reads: of the run. group: which, counted from the first that is computed.

    Attributes:
        possible: whether the group's part of out can be told apart.
    """

    def __init__(self, harness: Harness, operands: OperandSet, reads: GroupBounds, group: int) -> None:
        self._harness, self._operands, self._group = harness, operands, (group, group + 1)
        self._rows = list(zip(reads.starts[:, group].tolist(), reads.ends[:, group].tolist(), strict=True))
        layout, slab = operands.layouts["out"], operands.config.ragged_mode is RaggedDotMode.CONTRACTING
        filled = [(entry, rows) for entry, rows in enumerate(self._rows) if rows[0] < rows[1] and layout.size]
        own = [spans(layout, {1: (entry, entry + 1), **({0: self._group} if slab else {2: rows})}) for entry, rows in filled]
        self.possible = all(own)
        self._own = [span for found in own for span in found]

    def poison(self) -> None:
        """Makes the group's rows and weights NaN."""
        for name, axis in _ragged_axes(self._operands.config).items():
            for entry, rows in enumerate(self._rows):
                _poison(self._harness, self._operands, name, axis, {1: (entry, entry + 1), axis: rows})
        if self._operands.config.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            _poison(self._harness, self._operands, "rhs", 0, {0: self._group})

    def overwrite(self, byte: int) -> None:
        """Fills the group's own part of out, whose values are NaN by right, with a byte."""
        for offset, nbytes in self._own:
            self._harness.set_bytes(self._operands.pointers["out"] + offset, byte, nbytes)


def _ragged_axes(config: GroupedGemmConfig) -> dict[str, int]:
    """The ragged axis of each operand that has one."""
    return {"lhs": 2} if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else {"lhs": 3, "rhs": 2}


def _poison(harness: Harness, operands: OperandSet, name: str, axis: int, chosen: Mapping[int, tuple[int, int]]) -> None:
    layout = operands.layouts[name]
    if any(layout.shape[i] > 1 and layout.strides[i] == 0 for i in (1, axis)):  # what the poison tells apart repeats its elements
        return
    for offset, nbytes in spans(layout, chosen):
        harness.set_bytes(operands.pointers[name] + offset, poison_byte(layout.dtype), nbytes)
