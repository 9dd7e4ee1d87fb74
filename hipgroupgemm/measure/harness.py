"""The workbench: everything of tuning that touches an operand's memory. NumPy on a CPU, this package's runtime on a GPU; no array library.

A bench makes operands for a config, runs and times calls on them, and judges results by a product of its own that shares no code with
any backend. `harness_for` gives the one of a device.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.benchmark.judge import CheckResult
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.check import Findings, Problem, Sample, check_result_of, draw_sample, problem_of
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import ArrayView, Device

__all__ = ["GUARD", "Layout", "OperandSet", "Snapshot", "CheckResult", "Harness", "layouts_of", "poison_byte", "harness_for"]

GUARD = 256
"""Bytes before and behind every operand that belong to nobody: poisoned, and those of out looked at after each run."""

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of one operand lie.

    Attributes:
        shape: extents along (group, batch, row, column), 1 where the operand has no such axis. strides: elements, likewise.
        dtype: element type. alignment: the power of two (1 to 16 bytes) that the address is to be a multiple of, and of no larger one
            where that decides the operand's alignment.
    """

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    alignment: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def byte_strides(self) -> tuple[int, int, int, int]:
        """Strides in bytes."""
        a, b, c, d = (stride * self.dtype.itemsize for stride in self.strides)
        return (a, b, c, d)

    @property
    def reach(self) -> int:
        """Bytes from the first to past the last element; 0 without elements."""
        if 0 in self.shape:
            return 0
        return sum((extent - 1) * stride for extent, stride in zip(self.shape, self.byte_strides, strict=True)) + self.dtype.itemsize

    @property
    def shift(self) -> int:
        """Bytes that the first element lies past a multiple of 16."""
        inner = 2 if self.strides[2] < self.strides[3] else 3  # this one does not count
        used = [self.byte_strides[axis] for axis in range(4) if axis != inner and self.shape[axis] > 1]
        by_strides = math.gcd(16, *used)
        return self.alignment if self.alignment < min(by_strides, 16) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer: a guard, the elements and what lies between them, a guard."""
        return GUARD + self.shift + self.reach + GUARD


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


def poison_byte(dtype: np.dtype[Any]) -> int:
    """The byte that makes an element NaN when all its bytes are this."""
    return 0x80 if dtype.name.endswith("fnuz") else 0xFF


def operand_std(config: GroupedGemmConfig, name: str) -> float:
    """Standard deviation of an operand's random numbers: 1, but rhs's is less where results go into 8 bits, so that they fit."""
    if name == "rhs" and DTYPES[config.type_d].itemsize == 1:
        return max(1 / math.sqrt(max(config.k, 1)), 2.0**-6)
    return 1.0


class Snapshot(abc.ABC):
    """A copy of an out. Held until `release`, or until its bench is closed."""

    @abc.abstractmethod
    def release(self) -> None:
        """Frees the copy. A second call does nothing."""


@dataclasses.dataclass(eq=False)
class OperandSet:
    """Operands of one config in a bench's memory. They are the bench's: `Harness.release` or `Harness.close` frees them.

    Attributes:
        config: what they are laid out for. layouts: by name, see `layouts_of`.
        lhs, rhs, out, c, bias: addresses of first elements; 0 for what the config has not, or has no elements of.
        memory: the bench's own.
    """

    config: GroupedGemmConfig
    layouts: dict[str, Layout]
    lhs: int
    rhs: int
    out: int
    c: int
    bias: int
    memory: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layout.nbytes for layout in self.layouts.values())


def operand_set(config: GroupedGemmConfig, layouts: dict[str, Layout], where: dict[str, int], memory: dict[str, Any]) -> OperandSet:
    """A set from addresses by name."""
    lhs, rhs, out, c, bias = (where.get(name, 0) for name in ("lhs", "rhs", "out", "c", "bias"))
    return OperandSet(config, layouts, lhs, rhs, out, c, bias, memory)


class Harness(abc.ABC):
    """Operands, runs, times and verdicts on one device. A context manager; serves one thread at a time.

    Attributes:
        device: whose memory it is. stream: handle of the stream that everything is done on, and that calls under test are to use.
        budget: floating-point operations of a judge's comparison, where none are given.
    """

    device: Device
    stream: int
    budget: float

    @abc.abstractmethod
    def operands(self, config: GroupedGemmConfig, *, seed: int, copies: int = 1) -> list[OperandSet]:
        """Fresh operands for a config: its own ragged extent, strides, alignments and types, normal random numbers, out poisoned.

        What the strides skip, and guards before and behind each operand, is NaN.

        Args:
            config: the problem. seed: of the numbers.
            copies: sets wanted at the most, so that calls in turn find none of their inputs in a cache. Only one is made where the inputs
                do not fit the caches anyway. All sets share one out.

        Raises:
            MemoryError: the device has not room for them.
            NotImplementedError: element types that the bench's judge cannot read.
        """

    @abc.abstractmethod
    def sizes(self, values: Any) -> ArrayView:
        """A copy of host integers (`(group_total,)`, or `(batch, group_total)`) in the device's memory, freed with its view."""

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
        """What an executable is given to run on the operands; None takes the config's alpha or beta.

        Raises:
            ValueError: beta is 0 where the config's is not, or the other way round: c would be missing.
        """
        o, config = operands, operands.config
        config = config.with_scalars(config.alpha if alpha is None else float(alpha), config.beta if beta is None else float(beta))
        pointers = {"lhs": o.lhs, "rhs": o.rhs, "out": o.out, "c": o.c, "bias": o.bias}
        return Arguments(config, pointers, sizes, ends, group_offset, tail, "none", self.stream)

    @abc.abstractmethod
    def rewrite(self, view: ArrayView, values: Any) -> None:
        """Puts other host integers, of the same shape and type, where a view of `sizes` lies."""

    @abc.abstractmethod
    def contents(self, view: ArrayView) -> Array:
        """A copy on the host of what lies in a view of `sizes`. Waits."""

    @abc.abstractmethod
    def renew(self, operands: OperandSet, *, seed: int) -> None:
        """Draws all inputs anew where they lie, NaN around them; out stays as it is."""

    @abc.abstractmethod
    def digest(self, operands: OperandSet) -> dict[str, int]:
        """By input a number that changes when any of its bytes, or of those around its elements, does. Waits."""

    @abc.abstractmethod
    def poison(self, operands: OperandSet, fill: int | None = None) -> None:
        """Fills out, its gaps and guards included, with NaN, or with a byte."""

    @abc.abstractmethod
    def set_bytes(self, address: int, value: int, nbytes: int) -> None:
        """Fills a part of the bench's memory, in the stream's order."""

    @abc.abstractmethod
    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Copies within the bench's memory, in the stream's order."""

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
    ) -> CheckResult:
        """Compares out, poisoned before the run, with a product accumulated in float64 straight from the operation's definition.

        Where a full comparison takes more floating-point operations than `budget` (None: the bench's own), rows and columns are sampled,
        the first and the last row of every group among them. Elements left unwritten, NaN, rows that no group covers, slabs of empty
        groups and the bytes between out's elements are always looked at in full.

        Args:
            operands: what was run on. host_sizes: the group sizes of that run. alpha, beta, tail, group_offset: of that run.
            seed: of the sample.
            fill: the byte that `poison` filled out with, None for NaN.
            without: a group, counted from `group_offset` on, of which nothing is compared; its elements must not be NaN, though.

        Returns:
            A CheckResult. Its error is infinite where NaN or infinities were computed.

        Raises:
            ValueError: sizes that are negative, sum past the ragged extent, or have another shape than the config says.
        """
        config, layout = operands.config, operands.layouts["out"]
        problem = problem_of(config, host_sizes, alpha=alpha, beta=beta, group_offset=group_offset, without=without)
        sample = draw_sample(problem, seed, self.budget if budget is None else budget)
        found = self._look(operands, problem, sample, tail, poison_byte(layout.dtype) if fill is None else fill)
        return check_result_of(problem, found, sample.checked)

    @abc.abstractmethod
    def _look(self, operands: OperandSet, problem: Problem, sample: Sample, tail: str, held: int) -> Findings:
        """Compares the sample of out and looks at all of it and around it; `held` is the byte that it was full of."""

    @abc.abstractmethod
    def snapshot(self, operands: OperandSet) -> Snapshot:
        """A copy of out as it is when the stream comes to it."""

    @abc.abstractmethod
    def same(self, operands: OperandSet, snapshot: Any) -> int:
        """How many elements of out differ bitwise from a snapshot of the same operands' out."""

    @abc.abstractmethod
    def values(self, operands: OperandSet, name: str = "out") -> Array:
        """A copy of an operand's elements on the host, (group, batch, row, column), as the layout of that name has them. Waits."""

    @abc.abstractmethod
    def time(self, call: Callable[[], object]) -> float:
        """Runs `call` once and waits for it; milliseconds between two events around it, or of the host's clock on a CPU.

        On a GPU call `flush` before, without waiting: its work hides the host's own time for launching.
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Drives the operands out of the caches, so that every timed call starts as cold as the others. On a GPU returns at once."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for the stream; raises what failed on it."""

    @abc.abstractmethod
    def ceilings(self, dtype: Any) -> Roofline | None:
        """The device's measured ceilings for an element type, measured once; None where there is nothing to measure them with."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that can still be allocated, bytes."""

    @abc.abstractmethod
    def release(self, operands: OperandSet) -> None:
        """Frees a set's memory; a shared out goes with the last of its sets. A second call does nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything. Closing twice is fine."""

    def __enter__(self) -> Harness:
        """The bench itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def harness_for(device: Device | str) -> Harness:
    """The bench of a device.

    Raises:
        RuntimeError: no driver or no such runtime; the text says what to install.
        ValueError: no such device.
    """
    where = Device.of(device)
    if where.kind == "cpu":
        from hipgroupgemm.measure.host_harness import HostHarness

        return HostHarness()
    from hipgroupgemm.measure.device_harness import DeviceHarness

    return DeviceHarness(where)
