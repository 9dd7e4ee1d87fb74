"""The harness: everything of measuring that touches an operand's memory. `harness.harness_for` gives the one of a device.

A harness makes operands for a config, runs and times calls on them, and checks results against a product of its own that shares no code
with any backend. No array library is needed.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.check import CheckCounts, Outcome, Products, Sample, check_outcome_of, draw_sample, host_integers, products_of
from hipgroupgemm.measure.layouts import Layout, layouts_of
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.operands.views import ArrayView, Device, numpy_view, packed_strides

__all__ = ["Harness", "Memory", "OperandSet"]

Array = np.ndarray[Any, Any]


class Memory:
    """Memory of a harness: `ptr` is its address, aligned to 16 bytes at least, 0 once it is free. The last reference frees it as well."""

    def __init__(self, ptr: int, nbytes: int, free: Callable[[], object]) -> None:
        self.ptr, self.nbytes = ptr, nbytes
        self._free = weakref.finalize(self, free)
        self._free.atexit = False

    def free(self) -> None:
        """Frees it. A second call does nothing."""
        self.ptr = 0
        self._free()


@dataclasses.dataclass(eq=False)
class OperandSet:
    """Operands of one config in a harness's memory, by name: layouts, addresses of first elements (0 where there are none) and the memory
    itself, which goes with the last reference, or with `Harness.release` or `Harness.close`."""

    config: GroupedGemmConfig
    layouts: dict[str, Layout]
    pointers: dict[str, int]
    memory: dict[str, Memory] = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layout.nbytes for layout in self.layouts.values())

    @property
    def inputs(self) -> list[str]:
        """The names of all operands but out."""
        return [name for name in self.layouts if name != "out"]

    @property
    def lists(self) -> dict[str, tuple[int, ...]]:
        """By operand that the config has as a list: the addresses of the groups' arrays, which lie in a row here."""
        listed = {"rhs": self.config.rhs_listed, "out": self.config.out_listed, "c": self.config.out_listed}
        return {
            name: tuple(self.pointers[name] + group * layout.byte_strides[0] for group in range(layout.shape[0]))
            for name, layout in self.layouts.items()
            if listed.get(name)
        }


class Harness(abc.ABC):
    """Operands, runs, times and checks on one device. A context manager; serves one thread at a time.

    Attributes:
        device: whose memory it is. stream: handle of the stream that everything is done on, and that calls under test are to use.
        budget: floating-point operations of a check, where none are given.
        table: random numbers before they repeat: a prime, so that no row or matrix repeats at its own start.
        note: what a person should know of times that were taken here, "" for nothing.
    """

    device: Device
    stream: int = 0
    budget: float
    table: int
    note: str = ""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Memory] = weakref.WeakSet()

    @abc.abstractmethod
    def _allocate(self, nbytes: int) -> Memory:
        """Memory, not initialised."""

    @abc.abstractmethod
    def set_bytes(self, address: int, value: int, nbytes: int) -> None:
        """Fills a part of the harness's memory, in the stream's order."""

    @abc.abstractmethod
    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Copies to, from or within the harness's memory, in the stream's order."""

    @abc.abstractmethod
    def _scatter(self, layout: Layout, address: int, numbers: Array) -> None:
        """Fills a layout's elements from a table, over and over."""

    @abc.abstractmethod
    def _digest(self, address: int, nbytes: int) -> int:
        """A number that changes when any byte does."""

    @abc.abstractmethod
    def _differing(self, layout: Layout, address: int, other: int) -> int:
        """How many elements at one address differ bitwise from those at another."""

    @abc.abstractmethod
    def _check(self, operands: OperandSet, products: Products, sample: Sample, tail: str, fill: int) -> CheckCounts:
        """Compares the sample of out and looks at all of it and around it; it was full of the byte `fill`."""

    @abc.abstractmethod
    def roofline(self, dtype: Any) -> Roofline | None:
        """Measures the device's roofline for an element type; None where there is nothing to measure it with."""

    @abc.abstractmethod
    def time(self, call: Callable[[], object]) -> float:
        """Runs `call` once and waits for it; milliseconds between two events around it, or of the host's clock on a CPU. On a GPU call
        `flush` before, without waiting: its work hides the host's own time for launching."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Drives the operands out of the caches, so that every timed call starts as cold as the others. On a GPU returns at once."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits for the stream; raises what failed on it. Nothing on a CPU."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that can still be allocated, bytes."""

    @abc.abstractmethod
    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Runs `call` and waits for it; the most bytes that it held beyond what was allocated before."""

    def _read(self, address: int, nbytes: int) -> Array:
        """A copy of bytes on the host. Waits."""
        host = np.empty(nbytes, np.uint8)
        if nbytes:
            self.copy_bytes(host.ctypes.data, address, nbytes)
            self.synchronize()
        return host

    def _write(self, address: int, values: Array) -> None:
        """Copies a packed host array there. Waits."""
        self.copy_bytes(address, values.ctypes.data, values.nbytes)
        self.synchronize()

    def _make(self, nbytes: int) -> Memory:
        """Memory that `close` frees at the latest."""
        memory = self._allocate(nbytes)
        self._live.add(memory)
        return memory

    def operands(self, config: GroupedGemmConfig, *, seed: int) -> OperandSet:
        """Fresh operands for a config: its own ragged extent, strides, alignments and types, normal random numbers, out poisoned; what the
        strides skip, and guards before and behind each operand, is NaN. Raises MemoryError where there is no room.

        Args:
            config: the problem. seed: of the numbers.
        """
        layouts = layouts_of(config)
        table = max(min(max(layout.size for layout in layouts.values()), self.table), 1) * 8
        needed, free = sum(layout.nbytes for layout in layouts.values()) + table, self.free_bytes()
        if needed > free:
            raise MemoryError(f"the operands take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {self.device}")
        memory = {name: self._make(layout.nbytes) for name, layout in layouts.items()}
        pointers = {name: memory[name].ptr + layout.offset if layout.size else 0 for name, layout in layouts.items()}
        operands = OperandSet(config, layouts, pointers, memory)
        self.renew(operands, seed=seed)
        self.poison(operands)
        return operands

    def renew(self, operands: OperandSet, *, seed: int) -> None:
        """Draws all inputs anew where they lie, NaN around them; out stays as it is."""
        rng = np.random.default_rng(seed)
        for name in operands.inputs:
            layout, memory = operands.layouts[name], operands.memory[name]
            self.set_bytes(memory.ptr, layout.poison, memory.nbytes)
            if layout.size:
                wide = rng.standard_normal(min(layout.size, self.table), np.float64 if layout.dtype == np.float64 else np.float32)
                if name == "rhs" and operands.layouts["out"].dtype.itemsize == 1:  # so that results fit into 8 bits
                    wide *= max(1 / math.sqrt(max(operands.config.k, 1)), 2.0**-6)
                self._scatter(layout, operands.pointers[name], wide.astype(layout.dtype, copy=False))

    def release(self, operands: OperandSet) -> None:
        """Frees a set's memory. A second call does nothing."""
        operands.memory.clear()

    def sizes(self, values: Any) -> ArrayView:
        """A copy of host integers (`(group_total,)`, or `(batch, group_total)`) in the device's memory, freed with its view."""
        host = np.ascontiguousarray(host_integers(values))
        memory = self._make(max(host.nbytes, 16))
        self._write(memory.ptr, host)
        return ArrayView(memory.ptr, host.shape, packed_strides(host.shape, host.itemsize), host.dtype, self.device, "", owner=memory)

    def rewrite(self, view: ArrayView, values: Any) -> None:
        """Puts other host integers, of the same shape and type, where a view of `sizes` lies."""
        self._write(view.pointer, np.ascontiguousarray(host_integers(values)))

    def contents(self, view: ArrayView) -> Array:
        """A copy on the host of what lies in a view of `sizes`. Waits."""
        held: Array = self._read(view.pointer, view.reach).view(view.dtype).reshape(view.shape)
        return held

    def arguments(
        self,
        operands: OperandSet,
        sizes: ArrayView,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        tail: str = "zero",
        group_offset: int | ArrayView = 0,
        ends: bool = False,
    ) -> Arguments:
        """What an executable is given to run on the operands; None takes the config's alpha or beta, which may not come or go."""
        config = _with_scalars(operands.config, alpha, beta)
        pointers = {**operands.pointers, "group_sizes": sizes.pointer}
        return Arguments(config, pointers, sizes, ends, group_offset, tail, "none", self.stream, lists=operands.lists)

    def view(self, operands: OperandSet, name: str) -> ArrayView:
        """An operand as the package's own view, (group, batch, row, column)."""
        layout = operands.layouts[name]
        return ArrayView(operands.pointers[name], layout.shape, layout.byte_strides, layout.dtype, self.device, "", owner=operands)

    def digest(self, operands: OperandSet) -> dict[str, int]:
        """By input a number that changes when any of its bytes, or of those around its elements, does. Waits."""
        return {name: self._digest(operands.memory[name].ptr, operands.memory[name].nbytes) for name in operands.inputs}

    def poison(self, operands: OperandSet, fill: int | None = None) -> None:
        """Fills out, its gaps and guards included, with NaN, or with a byte."""
        memory, nan = operands.memory["out"], operands.layouts["out"].poison
        self.set_bytes(memory.ptr, nan if fill is None else fill, memory.nbytes)

    def fill(self, operands: OperandSet, name: str, part: Mapping[int, tuple[int, int]], byte: int | None = None) -> None:
        """Fills the elements of a part of an operand with NaN, or with a byte; none where the layout is not nested.

        Args:
            operands, name: which. part: first and one-past-last index along some axes.
        """
        layout, shape, address = operands.layouts[name], list(operands.layouts[name].shape), operands.pointers[name]
        for axis, (first, end) in part.items():
            shape[axis] = end - first
            address += first * layout.byte_strides[axis]
        if layout.nested and min(shape) > 0:
            value = np.full(layout.dtype.itemsize, layout.poison if byte is None else byte, np.uint8).view(layout.dtype)
            self._scatter(dataclasses.replace(layout, shape=tuple(shape)), address, value)

    def values(self, operands: OperandSet, name: str = "out") -> Array:
        """A packed copy of an operand's elements on the host, (group, batch, row, column). Waits."""
        layout = operands.layouts[name]
        held = self._read(operands.pointers[name], layout.reach)
        packed: Array = numpy_view(held.ctypes.data, layout.shape, layout.byte_strides, layout.dtype).copy("C")
        return packed

    def check(
        self,
        operands: OperandSet,
        host_sizes: Any,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        seed: int = 0,
        budget: float | None = None,
        tail: str = "zero",
        group_offset: int = 0,
        fill: int | None = None,
        without: int | None = None,
    ) -> Outcome:
        """Compares out, poisoned before the run, with a product accumulated in float64 straight from the operation's definition.

        Where a full comparison takes more floating-point operations than `budget` (None: the harness's own), rows and columns are sampled,
        the first and the last row of every group among them. Elements left unwritten, NaN, rows that no group covers, slabs of empty
        groups and the bytes between out's elements are always looked at in full.

        Args:
            operands: what was run on. host_sizes: the group sizes of that run. alpha, beta, tail, group_offset: of that run.
            seed: of the sample.
            fill: the byte that `poison` filled out with, None for NaN.
            without: a group, counted from `group_offset` on, of which nothing is compared; its elements must not be NaN, though.

        The error is infinite where NaN or infinities were computed that are not right. Raises ValueError for sizes that do not fit.
        """
        products = products_of(_with_scalars(operands.config, alpha, beta), host_sizes, group_offset, without)
        sample = draw_sample(products, seed, self.budget if budget is None else budget)
        seen = self._check(operands, products, sample, tail, operands.layouts["out"].poison if fill is None else fill)
        return check_outcome_of(products, seen, sample.checked)

    def snapshot(self, operands: OperandSet) -> Memory:
        """A copy of out as it is when the stream comes to it; `free` it."""
        source = operands.memory["out"]
        copy = self._make(source.nbytes)
        self.copy_bytes(copy.ptr, source.ptr, source.nbytes)
        return copy

    def same(self, operands: OperandSet, snapshot: Memory) -> int:
        """How many elements of out differ bitwise from a snapshot of the same operands' out."""
        layout = operands.layouts["out"]
        return self._differing(layout, operands.memory["out"].ptr + layout.offset, snapshot.ptr + layout.offset)

    def close(self) -> None:
        """Frees everything. Closing twice is fine."""
        for memory in list(self._live):
            memory.free()

    def __enter__(self) -> Harness:
        """The harness itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_scalars(config: GroupedGemmConfig, alpha: float | None, beta: float | None) -> GroupedGemmConfig:
    return config.with_scalars(config.alpha if alpha is None else float(alpha), config.beta if beta is None else float(beta))
