"""Poison where nothing may be read: NaN in rows that no group covers, in the weights of empty groups, and in all of another group's.

A kernel that reads them and multiplies by zero is right on clean operands and wrong on recycled memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.harness import Harness, Layout, OperandSet, poison_byte
from hipgroupgemm.problem.groups import scan, select_groups

__all__ = ["Reads", "Spoiled", "poison_unread"]

_MOST_SPANS = 1 << 14


@dataclasses.dataclass(frozen=True)
class Reads:
    """What a run with some sizes reads: by batch entry which rows, and which groups' weights.

    Attributes:
        rows: first and one-past-last covered row a batch entry (`(batch,)`).
        weights: `(batch, group_count)`, whether a group has rows.
    """

    rows: tuple[tuple[int, int], ...]
    weights: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, config: GroupedGemmConfig, sizes: Any, group_offset: int = 0) -> Reads:
        """What `config` with these host sizes reads, from group `group_offset` on."""
        batch, groups = config.batch_count, config.group_count
        if config.ragged_mode is RaggedDotMode.BATCH:
            return cls(((0, 0),) * batch, ((True,) * groups,) * batch)
        bounds = select_groups(scan(np.asarray(sizes), config.ragged_extent), group_offset, groups)
        starts, ends = (np.broadcast_to(bound, (batch, groups)) for bound in (bounds.starts, bounds.ends))
        rows = tuple((int(first[0]), int(last[-1])) if groups else (0, 0) for first, last in zip(starts, ends, strict=True))
        return cls(rows, tuple(tuple((a < b).tolist()) for a, b in zip(starts, ends, strict=True)))


def poison_unread(bench: Harness, operands: OperandSet, reads: Reads) -> None:
    """Poisons all that `reads` leaves out. Layouts whose elements are interleaved or repeated are left alone."""
    config = operands.config
    if config.ragged_mode is RaggedDotMode.BATCH:
        return
    for name, axis in _ragged_axes(config).items():
        if _shared(operands.layouts[name], axis):
            continue
        for entry, (first, last) in enumerate(reads.rows):
            for part in ((0, first), (last, operands.layouts[name].shape[axis])):
                _fill(bench, operands, name, {1: (entry, entry + 1), axis: part})
    if config.ragged_mode is RaggedDotMode.NON_CONTRACTING and not _shared(operands.layouts["rhs"], 0):
        for entry, groups in enumerate(reads.weights):
            for group, read in enumerate(groups):
                if not read:
                    _fill(bench, operands, "rhs", {0: (group, group + 1), 1: (entry, entry + 1)})


class Spoiled:
    """One group whose rows and weights are NaN, while those of all others are not.

    Args:
        operands: whose. sizes: on the host. group_offset: the first group computed. group: which, counted from there.
    """

    def __init__(self, bench: Harness, operands: OperandSet, sizes: Any, group_offset: int, group: int) -> None:
        self._bench, self._operands, self._group = bench, operands, group
        config = operands.config
        bounds = select_groups(scan(np.asarray(sizes), config.ragged_extent), group_offset, config.group_count)
        starts, ends = (np.broadcast_to(part, (config.batch_count, config.group_count))[:, group] for part in (bounds.starts, bounds.ends))
        self._rows = [(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
        self._own: list[tuple[int, int]] = []  # of out
        self.possible = self._find_own()
        """Whether the group's part of out can be told apart."""

    def _find_own(self) -> bool:
        layout = self._operands.layouts["out"]
        for entry, rows in enumerate(self._rows):
            if rows[0] >= rows[1] or not layout.size:
                continue
            slab = self._operands.config.ragged_mode is RaggedDotMode.CONTRACTING
            found = spans(layout, {1: (entry, entry + 1), **({0: (self._group, self._group + 1)} if slab else {2: rows})})
            if not found:
                return False
            self._own += found
        return True

    def poison(self) -> None:
        """Makes the group's rows and weights NaN."""
        operands = self._operands
        for name, axis in _ragged_axes(operands.config).items():
            if not _shared(operands.layouts[name], axis):
                for entry, rows in enumerate(self._rows):
                    _fill(self._bench, operands, name, {1: (entry, entry + 1), axis: rows})
        if operands.config.ragged_mode is RaggedDotMode.NON_CONTRACTING and not _shared(operands.layouts["rhs"], 0):
            _fill(self._bench, operands, "rhs", {0: (self._group, self._group + 1)})

    def cover(self, byte: int) -> None:
        """Fills the group's own part of out, whose values are NaN of right, with a byte."""
        for offset, nbytes in self._own:
            self._bench.set_bytes(self._operands.out + offset, byte, nbytes)


def _ragged_axes(config: GroupedGemmConfig) -> dict[str, int]:
    """The ragged axis of each operand that has one."""
    return {"lhs": 2} if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else {"lhs": 3, "rhs": 2}


def _shared(layout: Layout, axis: int) -> bool:
    """Whether an axis that the poison tells apart repeats its elements."""
    return any(layout.shape[i] > 1 and layout.strides[i] == 0 for i in (1, axis))


def _fill(bench: Harness, operands: OperandSet, name: str, chosen: dict[int, tuple[int, int]]) -> None:
    layout = operands.layouts[name]
    for offset, nbytes in spans(layout, chosen):
        bench.set_bytes(getattr(operands, name) + offset, poison_byte(layout.dtype), nbytes)


def spans(layout: Layout, chosen: dict[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs of bytes, (offset from the first element, length), that hold a part of an operand and no other element of it.

    Args:
        layout: of the operand. chosen: first and one-past-last index along some axes; the others are taken whole.

    Returns:
        The runs; none where the axes do not lie inside each other in memory, or where there would be too many.
    """
    axes = [
        (stride, extent, *chosen.get(i, (0, extent)))
        for i, (stride, extent) in enumerate(zip(layout.byte_strides, layout.shape, strict=True))
    ]
    if any(stop <= start for _, _, start, stop in axes):
        return []
    axes = sorted((axis for axis in axes if axis[1] > 1), reverse=True)
    reaches = [layout.dtype.itemsize]  # of the axes from each one inwards, whole
    for stride, extent, _, _ in reversed(axes):
        if stride < reaches[0]:
            return []
        reaches.insert(0, stride * (extent - 1) + reaches[0])
    whole = len(axes)
    while whole and axes[whole - 1][2:] == (0, axes[whole - 1][1]):
        whole -= 1
    # axes[:whole] are walked, but the innermost of them, whose chosen part is one run
    outer, offset, length = axes[: max(whole - 1, 0)], 0, reaches[whole]
    if whole:
        stride, _, start, stop = axes[whole - 1]
        offset, length = start * stride, (stop - start - 1) * stride + reaches[whole]
    offsets = np.array([offset], np.int64)
    for stride, _, start, stop in reversed(outer):
        if offsets.size * (stop - start) > _MOST_SPANS:
            return []
        offsets = (np.arange(start, stop, dtype=np.int64)[:, None] * stride + offsets[None, :]).reshape(-1)
    return [(int(at), length) for at in offsets]
