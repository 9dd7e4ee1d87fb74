"""The workbench of a CPU: NumPy arrays, the host's clock, products in float64 by BLAS."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.benchmark.labs import NumPyLab
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.check import Findings, Problem, Sample, describe_element, host_integers, place_of
from hipgroupgemm.measure.harness import (
    GUARD,
    Array,
    Harness,
    Layout,
    OperandSet,
    Snapshot,
    layouts_of,
    operand_set,
    operand_std,
    poison_byte,
)
from hipgroupgemm.measure.roofline import Roofline, measure_ceilings
from hipgroupgemm.measure.tolerance import Tolerance
from hipgroupgemm.operands.dtypes import dtype_of
from hipgroupgemm.operands.views import CPU, ArrayView, numpy_view, packed_strides

__all__ = ["HostHarness", "fill_normal"]

_TABLE = 4_194_301  # random numbers before they repeat: a prime, so that no row or matrix repeats at its own start
_WIDTH = 4096  # words of 8 bytes
_CACHED = 64 << 20  # inputs of fewer bytes than this may stay in a cache between calls


def fill_normal(buffer: Array, base: int, layout: Layout, rng: np.random.Generator, std: float) -> None:
    """Poisons a buffer of bytes and fills the elements of a layout in it, the first `base` bytes into it, with random normal numbers:
    a table of them, over and over where there are more elements, since they are drawn for every size set.
    """
    buffer.fill(poison_byte(layout.dtype))
    if layout.size:
        length = min(layout.size, _TABLE)
        wide = rng.standard_normal(length, dtype=np.float64 if layout.dtype == np.float64 else np.float32)
        if std != 1.0:
            wide *= wide.dtype.type(std)
        elements_of(buffer, base, layout)[...] = np.resize(wide.astype(layout.dtype, copy=False), layout.shape)


def elements_of(buffer: Array, base: int, layout: Layout) -> Array:
    """A layout's elements in a buffer of bytes, (group, batch, row, column)."""
    if not layout.size:
        return np.empty(layout.shape, layout.dtype)
    view: Array = np.ndarray(layout.shape, layout.dtype, buffer.data, base, layout.byte_strides)
    return view


def digest_of(buffer: Array) -> int:
    """A number that tells whether any byte of a buffer has changed: of the sums along the rows and columns of its words, as a matrix."""
    words = buffer[: buffer.size // 8 * 8].view(np.uint64)
    matrix = words[: words.size // _WIDTH * _WIDTH].reshape(-1, _WIDTH)
    found = 0
    for part in (matrix.sum(0), matrix.sum(1), words[matrix.size :], buffer[words.nbytes :]):
        found = zlib.crc32(np.ascontiguousarray(part).tobytes(), found)
    return found


def touched_bytes(buffer: Array, base: int, layout: Layout, fill: int) -> int:
    """How many bytes of a buffer that belong to no element are not `fill`."""
    mask = np.ones(buffer.size, bool)
    if layout.size:
        strides = (*layout.byte_strides, 1)
        np.ndarray((*layout.shape, layout.dtype.itemsize), bool, mask.data, base, strides)[...] = False
    return int(np.count_nonzero(buffer[mask] != fill))


class _HostSnapshot(Snapshot):
    def __init__(self, values: Array) -> None:
        self.values: Array | None = values

    def release(self) -> None:
        self.values = None


class HostHarness(Harness):
    """NumPy on the CPU; see `Harness`."""

    device = CPU
    stream = 0
    budget = 2e9

    def __init__(self) -> None:
        self._lab = NumPyLab()
        self._ceilings: dict[str, Roofline] = {}

    def operands(self, config: GroupedGemmConfig, *, seed: int, copies: int = 1) -> list[OperandSet]:
        """Fresh operands; see `Harness.operands`."""
        layouts = layouts_of(config)
        inputs = sum(layout.nbytes for name, layout in layouts.items() if name != "out")
        count = max(copies, 1) if inputs < _CACHED else 1
        needed, free = inputs * count + layouts["out"].nbytes, self.free_bytes()
        if needed > free:
            raise MemoryError(f"the operands take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
        rng = np.random.default_rng(seed)
        out = self._buffer(layouts["out"])
        out[0].fill(poison_byte(layouts["out"].dtype))
        sets = []
        for _ in range(count):
            memory = {name: out if name == "out" else self._buffer(layout) for name, layout in layouts.items()}
            for name, (buffer, base) in memory.items():
                if name != "out":
                    fill_normal(buffer, base, layouts[name], rng, operand_std(config, name))
            where = {name: buffer.ctypes.data + base if layouts[name].size else 0 for name, (buffer, base) in memory.items()}
            sets.append(operand_set(config, layouts, where, memory))
        return sets

    @staticmethod
    def _buffer(layout: Layout) -> tuple[Array, int]:
        """(bytes, how far into them the first element lies)."""
        buffer = np.empty(layout.nbytes + 16, np.uint8)
        return buffer, GUARD + (-buffer.ctypes.data) % 16 + layout.shift

    def _elements(self, operands: OperandSet, name: str) -> Array:
        buffer, base = operands.memory[name]
        return elements_of(buffer, base, operands.layouts[name])

    def sizes(self, values: Any) -> ArrayView:
        """A copy; see `Harness.sizes`."""
        host = np.ascontiguousarray(host_integers(values)).copy()
        return ArrayView(host.ctypes.data, host.shape, packed_strides(host.shape, host.itemsize), host.dtype, CPU, "", owner=host)

    def rewrite(self, view: ArrayView, values: Any) -> None:
        """Copies there; see `Harness.rewrite`."""
        numpy_view(view.pointer, view.shape, view.strides, view.dtype)[...] = host_integers(values)

    def contents(self, view: ArrayView) -> Array:
        """A copy."""
        copied: Array = numpy_view(view.pointer, view.shape, view.strides, view.dtype).copy()
        return copied

    def renew(self, operands: OperandSet, *, seed: int) -> None:
        """Other numbers at the same addresses; see `Harness.renew`."""
        rng = np.random.default_rng(seed)
        for name, (buffer, base) in operands.memory.items():
            if name != "out":
                fill_normal(buffer, base, operands.layouts[name], rng, operand_std(operands.config, name))

    def digest(self, operands: OperandSet) -> dict[str, int]:
        """By sums over each buffer."""
        return {name: digest_of(buffer) for name, (buffer, _) in operands.memory.items() if name != "out"}

    def poison(self, operands: OperandSet, fill: int | None = None) -> None:
        """Fills out, and what lies around its elements."""
        operands.memory["out"][0].fill(poison_byte(operands.layouts["out"].dtype) if fill is None else fill)

    def set_bytes(self, address: int, value: int, nbytes: int) -> None:
        """A memset."""
        ctypes.memset(address, value, nbytes)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """A memmove."""
        ctypes.memmove(target, source, nbytes)

    def _look(self, operands: OperandSet, problem: Problem, sample: Sample, tail: str, held: int) -> Findings:
        """Compares out with float64 products by BLAS."""
        buffer, base = operands.memory["out"]
        found = Findings(touched=touched_bytes(buffer, base, operands.layouts["out"], held))
        parts = {name: self._elements(operands, name) for name in operands.layouts}
        self._compare(problem, parts, sample.rows, sample.counts, sample.columns, found)
        self._inspect(problem, parts, tail, held, found)
        return found

    @staticmethod
    def _compare(problem: Problem, parts: dict[str, Array], rows: Array, counts: Array, columns: Array, found: Findings) -> None:
        config, t = problem.config, problem.tolerance
        rhs_grouped, out_grouped = parts["rhs"].shape[0] > 1, parts["out"].shape[0] > 1
        first_wrong = -1
        for p, (count, before) in enumerate(zip(counts.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True)):
            if not count or not columns.size:
                continue
            batch, group, mine = int(problem.batch[p]), int(problem.group[p]), rows[before : before + count]
            k = slice(int(problem.k_first[p]), int(problem.k_end[p]))
            slab = group if out_grouped else 0
            a = parts["lhs"][0, batch, :, k][mine].astype(np.float64)
            b = parts["rhs"][group if rhs_grouped else 0, batch, k][:, columns].astype(np.float64)
            wanted, magnitude = problem.alpha * (a @ b), abs(problem.alpha) * (np.abs(a) @ np.abs(b))
            if problem.beta:
                c = problem.beta * parts["c"][slab, batch][np.ix_(mine, columns)].astype(np.float64)
                wanted, magnitude = wanted + c, magnitude + np.abs(c)
            if "bias" in parts:
                bias = parts["bias"][group, 0, 0, columns].astype(np.float64)
                wanted, magnitude = wanted + bias, magnitude + np.abs(bias)
            got = parts["out"][slab, batch][np.ix_(mine, columns)].astype(np.float64)
            own = Tolerance(float(problem.accumulation[p]), t.rounding, t.smallest, t.relative)
            with np.errstate(all="ignore"):
                error, bound = np.abs(got - wanted), own.elementwise(wanted, magnitude)
                wrong = ~(error <= bound)
                found.square_error += float(np.sum(error * error))
            found.square_norm += float(np.sum(wanted * wanted))
            found.compared += error.size
            found.wrong += int(np.count_nonzero(wrong))
            if wrong.any():
                with np.errstate(all="ignore"):
                    worst = float(np.max(error[wrong] / bound[wrong]))
                found.worst = math.inf if math.isnan(worst) else max(found.worst, worst)
                i, j = (int(x) for x in np.argwhere(wrong)[0])
                index = ((slab * config.batch_count + batch) * config.m + int(mine[i])) * config.n + int(columns[j])
                if first_wrong < 0 or index < first_wrong:
                    first_wrong = index
                    found.where = describe_element(config, index, float(got[i, j]), float(wanted[i, j]), float(bound[i, j]))

    @staticmethod
    def _inspect(problem: Problem, parts: dict[str, Array], tail: str, fill: int, found: Findings) -> None:
        """Looks at every element: for NaN where a group covers it, for beta * c where none does."""
        config, out = problem.config, parts["out"]
        if not out.size:
            return
        covered = np.zeros(out.shape[:3], bool)
        for at in np.ndindex(out.shape[:2]):
            covered[at][slice(*problem.covered[at].tolist())] = True
        poison = _holds(out, fill)
        nan = np.isnan(out) & covered[..., None]
        if nan.any():
            found.unwritten = int(np.count_nonzero(nan & poison))
            found.nan = int(np.count_nonzero(nan)) - found.unwritten
            found.first_nan = place_of(config, int(np.argmax(nan)))
        index = np.flatnonzero(~covered.reshape(-1))
        if not index.size:
            return
        left = out.reshape(-1, config.n)[index] if out.flags.c_contiguous else out[~covered]
        if tail == "undefined":
            wrong, wanted, bound = ~poison[~covered], np.full(left.shape, np.nan), np.zeros(left.shape)
        else:
            wanted, bound = np.zeros(left.shape), np.zeros(left.shape)
            if problem.beta:
                wanted = problem.beta * parts["c"][~covered].astype(np.float64)
                t = problem.tolerance
                bound = Tolerance(problem.scaled, t.rounding, t.smallest, t.relative).elementwise(wanted, np.abs(wanted))
            with np.errstate(all="ignore"):
                wrong = ~(np.abs(left.astype(np.float64) - wanted) <= bound)
        found.uncovered = int(np.count_nonzero(wrong))
        if found.uncovered:
            i, j = (int(x) for x in np.argwhere(wrong)[0])
            where = int(index[i]) * config.n + j
            found.where_uncovered = describe_element(config, where, float(left[i, j]), float(wanted[i, j]), float(bound[i, j]))

    def snapshot(self, operands: OperandSet) -> Snapshot:
        """A copy of out."""
        return _HostSnapshot(self.values(operands))

    def same(self, operands: OperandSet, snapshot: Any) -> int:
        """Elements that differ bitwise."""
        out = self._elements(operands, "out")
        if not out.size:
            return 0
        bits = np.dtype(f"u{out.dtype.itemsize}")
        return int(np.count_nonzero(np.ascontiguousarray(out).view(bits) != snapshot.values.view(bits)))

    def values(self, operands: OperandSet, name: str = "out") -> Array:
        """A packed copy of an operand's elements."""
        packed: Array = self._elements(operands, name).copy("C")
        return packed

    def time(self, call: Callable[[], object]) -> float:
        """Milliseconds of the host's clock."""
        return self._lab.time(call)

    def flush(self) -> None:
        """Writes more than the last-level cache holds."""
        self._lab.flush()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def ceilings(self, dtype: Any) -> Roofline | None:
        """NumPy's own product and copy, measured."""
        kind = dtype_of(dtype)
        if kind.name not in self._ceilings:
            self._ceilings[kind.name] = measure_ceilings(self._lab, kind)
        return self._ceilings[kind.name]

    def free_bytes(self) -> int:
        """Memory that the system says is available."""
        return self._lab.free_bytes()

    def release(self, operands: OperandSet) -> None:
        """Forgets the arrays."""
        operands.memory.clear()

    def close(self) -> None:
        """Nothing to free: arrays go with their last reference."""


def _holds(out: Array, fill: int) -> Array:
    """Which elements have bytes that are all `fill`."""
    itemsize = out.dtype.itemsize
    bits = np.dtype(f"u{itemsize}")
    pattern = int.from_bytes(bytes([fill]) * itemsize, "little")
    # viewed through an array of its own strides: `view` wants a contiguous last axis
    found: Array = numpy_view(out.ctypes.data, out.shape, out.strides, bits) == pattern
    return found
