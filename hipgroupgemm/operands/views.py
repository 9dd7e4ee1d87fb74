"""What the package knows of an array: where it lies and how. Data only; `arrays` makes these from the caller's arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["CPU", "ArrayView", "Device", "ListView", "host_array", "near_pairs", "numpy_view", "packed_strides"]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """Where memory lies: kind "cpu", "cuda" or "rocm", and the index of the device among its kind."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @classmethod
    def of(cls, value: Device | str) -> Device:
        """A device from "cpu", "cuda", "cuda:1", "rocm:0" or a Device; raises ValueError for anything else."""
        if isinstance(value, Device):
            return value
        kind, _, index = str(value).partition(":")
        if kind not in ("cpu", "cuda", "rocm") or not (index or "0").isdecimal() or (kind == "cpu" and int(index or 0)):
            raise ValueError(f'device={value!r}: must be "cpu", "cuda", "cuda:<index>", "rocm" or "rocm:<index>"')
        return cls(kind, int(index or 0))


CPU = Device("cpu")


@dataclasses.dataclass(slots=True, eq=False)
class ArrayView:
    """One array as a pointer, a shape and strides.

    Attributes:
        pointer: address of the first element, on `device`; 0 only where there are no elements or no memory (`ArraySpec`).
        shape: extents. strides: bytes a step along each axis, none negative.
        dtype: NumPy dtype, ml_dtypes' types included.
        device: where the memory lies.
        framework: "numpy", "cupy", "torch", "jax", or "" for a producer known only by its interface.
        stream: the producer's stream (a device handle), when the consumer has to order itself behind it; else None.
        readonly: whether the producer forbids writing.
        owner: the caller's object, kept alive as long as this view.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: Device
    framework: str
    stream: int | None = None
    readonly: bool = False
    owner: Any = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def reach(self) -> int:
        """Bytes from the first to past the last element; 0 without elements."""
        if 0 in self.shape:
            return 0
        steps = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return steps + self.dtype.itemsize

    @property
    def address_bits(self) -> int:
        """A number that has a bit wherever the address, or that of an array of a list, has one: for its alignment."""
        return self.pointer

    def parts(self, name: str) -> Sequence[tuple[str, ArrayView]]:
        """The one array that this is, or those of a list, and what each of them is called where this is called `name`."""
        return ((name, self),)

    def signature(self) -> tuple[Any, ...]:
        """What the layout depends on, hashable: everything but the address, of which only its alignment (up to 16 bytes)."""
        return (type(self), self.shape, self.strides, self.dtype, self.address_bits & 15, self.device)

    def overlaps(self, other: ArrayView) -> bool:
        """Whether two views share an element's byte; undecided after a bounded search counts as yes."""
        if self.device != other.device:
            return False
        if not (self.pointer < other.pointer + other.reach and other.pointer < self.pointer + self.reach):
            return False
        shares_memory: Any = np.shares_memory  # its stubs know no bound of work
        try:
            return bool(shares_memory(np.asarray(_Addresses(self)), np.asarray(_Addresses(other)), max_work=100_000))
        except RuntimeError:  # TooHardError is one
            return True

    def same_elements(self, other: ArrayView) -> bool:
        """Whether two views are one array: address, shape, type and all strides that say anything."""
        strides = zip(self.shape, self.strides, other.strides, strict=True) if self.shape == other.shape else ()
        return (self.pointer, self.shape, self.dtype) == (other.pointer, other.shape, other.dtype) and all(
            extent <= 1 or a == b for extent, a, b in strides
        )

    def describe(self) -> str:
        """Type and shape for an error text."""
        return f"{self.dtype.name} {self.shape} on {self.device}"


@dataclasses.dataclass(slots=True, eq=False)
class ListView(ArrayView):
    """Arrays of one shape, one per group, as if they were stacked along axis 0. `pointer`, `strides` and `reach` are the first array's.

    The stride of axis 0 says nothing and is 0.
    """

    entries: tuple[ArrayView, ...] = ()

    @property
    def reach(self) -> int:
        """Bytes from the first to past the last element of each array."""
        return self.entries[0].reach

    @property
    def pointers(self) -> tuple[int, ...]:
        """The arrays' addresses."""
        return tuple([entry.pointer for entry in self.entries])

    @property
    def address_bits(self) -> int:
        """All addresses' bits."""
        return functools.reduce(operator.or_, self.pointers)

    def parts(self, name: str) -> Sequence[tuple[str, ArrayView]]:
        """The arrays."""
        return [(f"{name}[{number}]", entry) for number, entry in enumerate(self.entries)]


def near_pairs(
    ones: Sequence[tuple[str, ArrayView]], others: Sequence[tuple[str, ArrayView]] | None = None
) -> Iterator[tuple[tuple[str, ArrayView], tuple[str, ArrayView]]]:
    """Pairs of named views, one of each sequence or both of the only one, whose ranges of addresses meet."""
    both = [
        (view.pointer, view.pointer + view.reach, side, (name, view))
        for side, views in ((0, ones), (1, others or ()))
        for name, view in views
    ]
    open_ones: list[tuple[int, int, int, tuple[str, ArrayView]]] = []
    for one in sorted(both, key=operator.itemgetter(0)):
        open_ones = [other for other in open_ones if one[0] < other[1]]
        for other in open_ones:
            if others is None or one[2] != other[2]:
                yield (one[3], other[3]) if one[2] < other[2] else (other[3], one[3])
        open_ones.append(one)


class _Addresses:
    """Lets NumPy reason about addresses without touching the memory there."""

    def __init__(self, view: ArrayView) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer, True),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{view.dtype.itemsize}",
        }


def numpy_view(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A NumPy array over host memory that somebody else keeps alive; strides in bytes, none negative.

    Works for every dtype (NumPy's own DLPack import takes neither bf16 nor fp8). An array of no elements has memory of its own.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = sum([(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]) + dtype.itemsize
    memory: Any = (ctypes.c_char * reach).from_address(pointer)
    view: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, 0, strides)
    return view


def host_array(view: ArrayView) -> np.ndarray[Any, Any]:
    """A view of host memory as a NumPy array."""
    return numpy_view(view.pointer, view.shape, view.strides, view.dtype)


@functools.lru_cache(256)
def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Row-major strides (bytes) of a shape."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
