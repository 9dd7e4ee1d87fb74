"""Poison where nothing may be read: NaN in rows that no group covers and in the weights of empty groups.

A kernel that reads them and multiplies by zero is right on clean operands and wrong on recycled memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.groups import scan, select_groups
from hipgroupgemm.tuning.workbench import Layout, OperandSet, Workbench, poison_byte

__all__ = ["Reads", "Unread", "copy_bytes"]

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

    def within(self, other: Reads) -> bool:
        """Whether all that this reads is read by `other` as well."""
        rows = all(a[0] >= b[0] and a[1] <= b[1] for a, b in zip(self.rows, other.rows, strict=True) if a[0] < a[1])
        return rows and all(
            b or not a for mine, its in zip(self.weights, other.weights, strict=True) for a, b in zip(mine, its, strict=True)
        )


class Unread:
    """Keeps what the sizes in use do not read poisoned, in one operand set that is made anew where something has to be read again.

    Args:
        bench: whose operands they are. operands: the set.
    """

    def __init__(self, bench: Workbench, operands: OperandSet) -> None:
        self._bench, self._operands = bench, operands
        config = operands.config
        self._clean: Reads | None = None  # None: nothing is poisoned yet
        self._ragged = {"lhs": 2, "rhs": None} if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else {"lhs": 3, "rhs": 2}

    def readable(self, reads: Reads) -> bool:
        """Whether nothing that `reads` wants is poisoned."""
        return self._clean is None or reads.within(self._clean)

    def poison(self, reads: Reads) -> None:
        """Poisons all that `reads` leaves out. Layouts whose elements are interleaved or repeated are left alone."""
        config = self._operands.config
        if config.ragged_mode is RaggedDotMode.BATCH or self._clean == reads:
            return
        for name, axis in self._ragged.items():
            layout = self._operands.layouts[name]
            if axis is None or self._shared(layout, axis):
                continue
            for entry, (first, last) in enumerate(reads.rows):
                for part in ((0, first), (last, layout.shape[axis])):
                    self._fill(name, {1: (entry, entry + 1), axis: part})
        rhs = self._operands.layouts["rhs"]
        if config.ragged_mode is RaggedDotMode.NON_CONTRACTING and not self._shared(rhs, 0):
            for entry, groups in enumerate(reads.weights):
                for group, read in enumerate(groups):
                    if not read:
                        self._fill("rhs", {0: (group, group + 1), 1: (entry, entry + 1)})
        self._clean = reads

    @staticmethod
    def _shared(layout: Layout, axis: int) -> bool:
        """Whether an axis that the poison tells apart repeats its elements."""
        return any(layout.shape[i] > 1 and layout.strides[i] == 0 for i in (1, axis))

    def _fill(self, name: str, chosen: dict[int, tuple[int, int]]) -> None:
        layout = self._operands.layouts[name]
        found = spans(layout, chosen)
        address = getattr(self._operands, name)
        for offset, nbytes in found:
            _set_bytes(self._bench, address + offset, poison_byte(layout.dtype), nbytes)


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


def _set_bytes(bench: Workbench, address: int, value: int, nbytes: int) -> None:
    if bench.device.kind == "cpu":
        import ctypes

        ctypes.memset(address, value, nbytes)
        return
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime(bench.device.kind)
    with runtime.use_device(bench.device.index):
        runtime.memset_async(address, value, nbytes, bench.stream)


def copy_bytes(bench: Workbench, target: int, source: int, nbytes: int) -> None:
    """Copies within a bench's memory, in its stream's order."""
    if bench.device.kind == "cpu":
        import ctypes

        ctypes.memmove(target, source, nbytes)
        return
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime(bench.device.kind)
    with runtime.use_device(bench.device.index):
        runtime.memcpy_async(target, source, nbytes, bench.stream)
