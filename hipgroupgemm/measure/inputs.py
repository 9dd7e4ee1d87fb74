"""What runs are given, and must leave as it is: group sizes in the device's memory, and digests of all inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hipgroupgemm.measure.harness import Harness, OperandSet
from hipgroupgemm.operands.views import ArrayView

if TYPE_CHECKING:
    from hipgroupgemm.measure.verify import SizeSet

__all__ = ["Given", "Inputs"]

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Given:
    """Where the integers of a size set lie.

    Attributes:
        sizes: sizes or end offsets. group_offset: on the host or on the device. held: what lies there, as memory and as host integers.
    """

    sizes: ArrayView
    group_offset: int | ArrayView
    held: list[tuple[ArrayView, Array]]


class Inputs:
    """The inputs of runs on some operand sets. What they hold is changed in place between size sets: a candidate that remembers by
    address what it has read, or made of it, is wrong from the second set on.

    Args:
        bench: whose memory it is.
    """

    def __init__(self, bench: Harness) -> None:
        self._bench = bench
        self._memory: dict[tuple[str, str, tuple[int, ...]], ArrayView] = {}
        self._given: Given | None = None
        self._digests: list[tuple[OperandSet, dict[str, int]]] = []

    @property
    def given(self) -> Given:
        """Of the size set in use; RuntimeError without one."""
        if self._given is None:
            raise RuntimeError("no size set is in use")
        return self._given

    def turn(self, one: SizeSet) -> None:
        """Takes up a size set: its integers come to the device."""
        values = one.integers()
        if one.spaced:
            wide = np.full((*values.shape, 2), np.iinfo(values.dtype).min, values.dtype)  # what lies between is no size
            wide[..., 0] = values
            memory = self._place("sizes", wide)
            sizes = ArrayView(memory.pointer, values.shape, memory.strides[:-1], memory.dtype, memory.device, "", owner=memory)
            held = [(memory, wide)]
        else:
            sizes = self._place("sizes", values)
            held = [(sizes, values)]
        offset: int | ArrayView = one.group_offset
        if one.device_offset:
            number = np.array([one.group_offset], np.int32)
            offset = self._place("offset", number)
            held.append((offset, number))
        self._given = Given(sizes, offset, held)

    def _place(self, name: str, values: Array) -> ArrayView:
        key = (name, values.dtype.str, values.shape)
        view = self._memory.get(key)
        if view is None:
            view = self._memory[key] = self._bench.sizes(values)
        else:
            self._bench.rewrite(view, values)
        return view

    def seal(self, sets: Sequence[OperandSet]) -> None:
        """Remembers what all inputs hold."""
        self._digests = [(operands, self._bench.digest(operands)) for operands in sets]

    def changed(self, sets: Sequence[OperandSet] | None = None) -> str:
        """Which inputs are no longer as they were, in words; "" where all are. None looks at all that were sealed."""
        found: dict[str, None] = {}
        for operands, before in self._digests:
            if sets is None or any(operands is one for one in sets):
                found |= dict.fromkeys(name for name, digest in self._bench.digest(operands).items() if digest != before[name])
        for name, (view, values) in zip(("group_sizes", "group_offset"), self.given.held, strict=False):
            if not np.array_equal(self._bench.contents(view), values):
                found[name] = None
        return f"it changed its inputs: {', '.join(found)}" if found else ""

    def clear(self) -> None:
        """Forgets all, and lets go of the memory."""
        self._memory.clear()
        self._given, self._digests = None, []
