"""Makes ragged-dot problems for tests and benchmarks alike: operands of any mode, type, layout and poison, and what they must give.

Everything is made on the host by NumPy and then handed over through a `Library`, so that the same problems run on the CPU, as CuPy
arrays on a GPU, or through any other producer. Memory that no operand owns is filled with bytes that read as NaN: a read outside an
operand poisons the result, a write outside changes a byte, and `Operand.check_surroundings` finds it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from comparison import assert_close

import hipgroupgemm as hgg
from hipgroupgemm.problem.dimension_numbers import BASIC

CASE_FILE = pathlib.Path(__file__).with_name("cases.json")
FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT8S = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
SIZE_TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

Numbers = hgg.RaggedDotDimensionNumbers
Mode = hgg.RaggedDotMode

FORWARD = BASIC
WEIGHT_GRADIENT = Numbers((((0,), (0,)), ((), ())), (0,), ())
"""lhs (R, m), rhs (R, n), both contracted on the token rows: out (g, m, n)."""
FORWARD_BATCHED = Numbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
"""lhs (b, m, k), rhs (g, b, k, n), out (b, m, n)."""
WEIGHT_GRADIENT_BATCHED = Numbers((((1,), (1,)), ((0,), (0,))), (1,), ())
"""lhs (b, R, m), rhs (b, R, n), out (g, b, m, n)."""
BATCH = Numbers((((2,), (1,)), ((0,), (0,))), (0,), ())
"""lhs (b, m, k), rhs (b, k, n), out (b, m, n); group sizes are not read."""


def dtype_of(name: str) -> np.dtype[Any]:
    """A NumPy dtype by name, ml_dtypes' types included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def nan_byte(dtype: np.dtype[Any]) -> int:
    """The byte whose repetition reads as NaN in a floating type (integers read it as -1 or their largest value)."""
    return 0x80 if dtype.name.endswith("fnuz") else 0xFF


# ---- where operands go ---------------------------------------------------------------------------------------------------------


class Library:
    """How operands reach the code under test: NumPy arrays on the host. Subclasses move them elsewhere, a GPU say."""

    name = "numpy"
    device = "cpu"

    def to_device(self, storage: np.ndarray[Any, Any]) -> Any:
        """One-dimensional bytes, copied to where the computation runs."""
        return storage.copy()

    def to_host(self, storage: Any) -> np.ndarray[Any, Any]:
        """The bytes of what `to_device` made, copied back."""
        return storage.copy()

    def view(self, storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array in `storage`, starting at byte `offset`, strides in bytes: what the package is given."""
        return np.ndarray(shape, dtype, storage, offset, strides)

    def result(self, array: Any) -> np.ndarray[Any, Any]:
        """An array that the package returned, on the host."""
        return np.asarray(array)


NUMPY = Library()


# ---- layouts -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an operand lies in memory.

    Attributes:
        order: its axes from the outermost to the innermost in memory; None is row-major.
        pad: unused elements behind each run of the innermost axis (a leading dimension longer than the row).
        step: elements from one to the next along the innermost axis.
        lead: unused elements ahead of the first, which sets the address's alignment.
        broadcast: axes of stride 0 (inputs only).
    """

    order: tuple[int, ...] | None = None
    pad: int = 0
    step: int = 1
    lead: int = 8
    broadcast: tuple[int, ...] = ()

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Strides in elements."""
        order = range(len(shape)) if self.order is None else self.order
        strides, reach = [0] * len(shape), self.step
        for position, axis in enumerate(reversed(tuple(order))):
            if axis in self.broadcast:
                continue
            strides[axis] = reach
            reach *= max(shape[axis], 1)
            if position == 0:
                reach += self.pad
        return tuple(strides)


PACKED = Layout()
UNALIGNED = Layout(pad=2, lead=1)
"""Like a [1:, 1:] of a bigger array: neither the address nor the rows are multiples of 16 bytes."""


def random_layout(rng: np.random.Generator, ndim: int, *, may_broadcast: bool = False) -> Layout:
    """Any order of the axes, padded and stepped and shifted at random; half of the layouts are packed row-major."""
    if rng.random() < 0.5:
        return Layout(lead=int(rng.choice([0, 8, 1])))
    broadcast = (int(rng.integers(ndim)),) if may_broadcast and ndim and rng.random() < 0.2 else ()
    return Layout(
        tuple(int(axis) for axis in rng.permutation(ndim)), int(rng.integers(4)), int(rng.integers(1, 3)), int(rng.integers(5)), broadcast
    )


class Operand:
    """One operand: its values on the host, and the array in NaN-filled storage that the code under test gets.

    Attributes:
        array: what to pass.
        values: the values it was made with, a host array of its own.
    """

    def __init__(self, values: np.ndarray[Any, Any], layout: Layout = PACKED, library: Library = NUMPY) -> None:
        self.library, self.shape, self.dtype = library, values.shape, values.dtype
        size = values.dtype.itemsize
        self.strides = tuple(stride * size for stride in layout.strides(values.shape))
        self.offset = layout.lead * size
        reach = 0 if 0 in values.shape else sum((n - 1) * s for n, s in zip(values.shape, self.strides, strict=True)) + size
        self.before = np.full(self.offset + reach + 64, nan_byte(values.dtype), np.uint8)
        self._host(self.before)[...] = values
        self.values = self._host(self.before).copy()
        self.storage = library.to_device(self.before)
        self.array = library.view(self.storage, self.offset, self.shape, self.strides, self.dtype)

    def __repr__(self) -> str:
        return f"<{self.dtype.name} {self.shape} strides {self.strides} at {self.offset}>"

    def _host(self, storage: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.ndarray(self.shape, self.dtype, storage, self.offset, self.strides)

    def read(self) -> np.ndarray[Any, Any]:
        """The values that are there now, on the host."""
        return self._host(self.library.to_host(self.storage)).copy()

    def check_surroundings(self, name: str) -> None:
        """Fails when a byte of the storage changed that is no part of an element."""
        mine = np.zeros(self.before.shape, bool)
        elements = np.ndarray((*self.shape, self.dtype.itemsize), bool, mine, self.offset, (*self.strides, 1))
        elements[...] = True
        changed = np.flatnonzero((self.library.to_host(self.storage) != self.before) & ~mine)
        assert changed.size == 0, f"{name}: bytes {changed[:8]} outside of its elements were written (it starts at {self.offset})"

    def check_unchanged(self, name: str) -> None:
        """Fails when any byte of the storage changed."""
        changed = np.flatnonzero(self.library.to_host(self.storage) != self.before)
        assert changed.size == 0, f"{name}: an input, yet bytes {changed[:8]} were written"


class ListOperand:
    """An operand as one array per group, each in storage of its own; in other respects an `Operand`. The addresses do not rise."""

    def __init__(self, values: np.ndarray[Any, Any], layout: Layout = PACKED, library: Library = NUMPY) -> None:
        order = layout.order and tuple(axis - 1 for axis in layout.order if axis)
        one = dataclasses.replace(layout, order=order, broadcast=tuple(axis - 1 for axis in layout.broadcast if axis))
        made = {group: Operand(values[group], one, library) for group in reversed(range(len(values)))}
        self.library, self.shape, self.dtype, self.parts = library, values.shape, values.dtype, [made[group] for group in sorted(made)]
        self.values, self.layout = values.copy(), one
        self.array = [part.array for part in self.parts]

    def stacked(self) -> Operand:
        """The same values as one array, whose slabs lie as the arrays of the list do."""
        order = self.layout.order and (0, *(axis + 1 for axis in self.layout.order))
        return Operand(self.values, dataclasses.replace(self.layout, order=order), self.library)

    def read(self) -> np.ndarray[Any, Any]:
        """The values that are there now, on the host, stacked."""
        return np.stack([part.read() for part in self.parts])

    def check_surroundings(self, name: str) -> None:
        """As of an operand, of each array."""
        for group, part in enumerate(self.parts):
            part.check_surroundings(f"{name}[{group}]")

    def check_unchanged(self, name: str) -> None:
        """As of an operand, of each array."""
        for group, part in enumerate(self.parts):
            part.check_unchanged(f"{name}[{group}]")


def random_values(rng: np.random.Generator, shape: Sequence[int], dtype: str | np.dtype[Any], scale: float = 1.0) -> np.ndarray[Any, Any]:
    """Normal random numbers, rounded to the type."""
    values: np.ndarray[Any, Any] = (rng.standard_normal(tuple(shape)) * scale).astype(np.float32 if str(dtype) != "float64" else np.float64)
    return values.astype(dtype_of(str(dtype)))


# ---- group sizes ---------------------------------------------------------------------------------------------------------------


def balanced_sizes(rows: int, groups: int) -> np.ndarray[Any, Any]:
    """rows // groups each, one more for the first rows % groups."""
    return np.array([rows // groups + (i < rows % groups) for i in range(groups)], np.int32)


def random_sizes(rng: np.random.Generator, rows: int, groups: int, *, full: bool = False) -> np.ndarray[Any, Any]:
    """Random sizes summing to at most `rows` (to exactly that many where `full`), empty groups among them."""
    if groups == 0:
        return np.zeros(0, np.int32)
    cuts = np.sort(rng.integers(0, rows + 1, groups))
    if full:
        cuts[-1] = rows
    sizes = np.diff(cuts, prepend=0)
    sizes[rng.random(groups) < 0.2] = 0
    if full:
        sizes[-1] += rows - sizes.sum()
    return sizes.astype(np.int32)


def size_patterns(rng: np.random.Generator, rows: int, groups: int) -> dict[str, np.ndarray[Any, Any]]:
    """Named group sizes as routers make them: balanced, one group takes all, alternately empty, none at all, a tail, ones."""
    one = np.zeros(groups, np.int32)
    one[int(rng.integers(groups))] = rows
    last = np.zeros(groups, np.int32)
    last[-1] = rows
    alternate = balanced_sizes(rows, groups)
    alternate[::2] = 0
    return {
        "balanced": balanced_sizes(rows, groups),
        "random": random_sizes(rng, rows, groups, full=True),
        "one group": one,
        "last group": last,
        "every other empty": alternate,
        "none": np.zeros(groups, np.int32),
        "tail": random_sizes(rng, rows - rows // 3, groups),
        "ones": np.minimum(1, balanced_sizes(rows, groups)).astype(np.int32),
    }


def empty_patterns(groups: int = 8) -> Iterator[tuple[bool, ...]]:
    """All 2^groups choices of which groups are empty."""
    return itertools.product((False, True), repeat=groups)


def covered_rows(sizes: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Which of `rows` rows belong to a group; sizes (g,), clamped as the operation clamps them."""
    end = min(sum(min(max(int(size), 0), rows + 1) for size in sizes), rows)
    return np.arange(rows) < end


# ---- problems ------------------------------------------------------------------------------------------------------------------

POISONS = frozenset({"uncovered", "empty"})


@dataclasses.dataclass
class Problem:
    """One ragged dot with its operands; `run` it through any function with `ragged_dot_general`'s signature."""

    numbers: hgg.RaggedDotDimensionNumbers
    lhs: Operand
    rhs: Operand
    sizes: Operand
    out: Operand | None = None
    c: Operand | None = None
    bias: Operand | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self, *, hosts: bool = False) -> dict[str, Any]:
        """Keyword arguments for `ragged_dot_general`: the arrays, or the values they were made with where `hosts`."""

        def of(operand: Operand | None) -> Any:
            return None if operand is None else (operand.values if hosts else operand.array)

        name = "offs" if self.settings.get("offs") else "group_sizes"
        rest = {key: value for key, value in self.settings.items() if key != "offs"}
        return {
            "lhs": of(self.lhs),
            "rhs": of(self.rhs),
            name: of(self.sizes),
            "ragged_dot_dimension_numbers": self.numbers,
            "c": of(self.c),
            "bias": of(self.bias),
            **rest,
        }

    def run(self, function: Callable[..., Any] = hgg.ragged_dot_general, **changes: Any) -> np.ndarray[Any, Any]:
        """The result on the host; inputs and all surroundings are checked to be untouched."""
        if self.out is not None:
            result = function(**self.arguments(), out=self.out.array, **changes)
            assert result is self.out.array, "out= was given, so it is what must come back"
            host = self.out.read()
        else:
            host = self.lhs.library.result(function(**self.arguments(), **changes))
        self.check_memory()
        return host

    def check_memory(self) -> None:
        """Fails when an input or a byte outside the operands was written."""
        for name in ("lhs", "rhs", "sizes", "c", "bias"):
            operand = getattr(self, name)
            if operand is not None and operand is not self.out:
                operand.check_unchanged(name)
        if self.out is not None:
            self.out.check_surroundings("out")

    def expected(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The float64 result, and the sum of magnitudes of all its terms, which errors are measured against."""
        with np.errstate(all="ignore"):
            arguments = self.arguments(hosts=True)
            arguments["preferred_element_type"] = np.float64
            for name in ("c", "bias"):  # they have out's type, and out is float64 here
                if arguments[name] is not None:
                    arguments[name] = arguments[name].astype(np.float64)
            value = hgg.ragged_dot_reference(**arguments, accumulate=np.float64)
            for name in ("lhs", "rhs", "c", "bias", "alpha", "beta"):
                if arguments.get(name) is not None:
                    arguments[name] = abs(arguments[name])
            magnitude = hgg.ragged_dot_reference(**arguments, accumulate=np.float64)
        return value, magnitude

    @property
    def length(self) -> int:
        """How many products one output element sums at the most."""
        (contracting, _), _ = self.numbers.dot_dimension_numbers
        length = 1
        for axis in contracting:
            length *= self.lhs.shape[axis]
        return length

    def check(self, function: Callable[..., Any] = hgg.ragged_dot_general, **changes: Any) -> np.ndarray[Any, Any]:
        """Runs the problem and compares it with the float64 reference; returns the result."""
        value, magnitude = self.expected()
        result = self.run(function, **changes)
        assert_close(result, value, magnitude, self.length, (self.lhs.dtype, self.rhs.dtype))
        return result


def make_problem(
    rng: np.random.Generator,
    mode: Mode,
    m: int,
    n: int,
    k: int,
    sizes: Any,
    dtype: str = "float32",
    *,
    rhs_dtype: str | None = None,
    out_dtype: str | None = None,
    sizes_dtype: str = "int32",
    batch: int | None = None,
    layouts: dict[str, Layout] | None = None,
    poison: frozenset[str] = POISONS,
    give_out: bool = True,
    c: str | None = None,
    bias: bool = False,
    rhs_groups: int | None = None,
    listed: bool = False,
    library: Library = NUMPY,
    **settings: Any,
) -> Problem:
    """A problem in one of the five common forms (see the dimension numbers above), random and poisoned.

    Args:
        rng: where the values come from.
        mode, m, n, k: as the config's: out is m x n a group and k is contracted (R is m in NON_CONTRACTING, k in CONTRACTING).
        sizes: group sizes, (g,) or (batch, g), or end offsets where `offs=True` is among the settings.
        dtype, rhs_dtype, out_dtype, sizes_dtype: element types by name; lhs's is rhs's default, JAX's rule is out's.
        batch: length of the batch axis; None for operands without one.
        layouts: by operand ("lhs", "rhs", "sizes", "out", "c", "bias"); packed where it says nothing.
        poison: "uncovered" puts NaN where no group reads, "empty" NaN into the weights of empty groups; out is NaN always.
        give_out: whether the problem has an out array of its own.
        c: None, "array" for a c of its own, "out" for c = out.
        bias: whether there is one.
        rhs_groups: NON_CONTRACTING with a group_offset: how many weights rhs has.
        listed: whether rhs (NON_CONTRACTING), or out and c (CONTRACTING), are lists of one array per group.
        library: where the arrays go.
        settings: further arguments of the call: alpha, beta, tail, check, group_offset, preferred_element_type, ...
    """
    layouts = layouts or {}
    sizes = np.asarray(sizes)
    groups = sizes.shape[-1] if rhs_groups is None else rhs_groups
    b = () if batch is None else (batch,)
    if mode is Mode.NON_CONTRACTING:
        numbers = FORWARD if batch is None else FORWARD_BATCHED
        shapes = {"lhs": (*b, m, k), "rhs": (groups, *b, k, n), "out": (*b, m, n)}
    elif mode is Mode.CONTRACTING:
        numbers = WEIGHT_GRADIENT if batch is None else WEIGHT_GRADIENT_BATCHED
        slabs = settings.get("group_count", sizes.shape[-1])
        shapes = {"lhs": (*b, k, m), "rhs": (*b, k, n), "out": (slabs, *b, m, n)}
    else:
        numbers, shapes = BATCH, {"lhs": (*b, m, k), "rhs": (*b, k, n), "out": (*b, m, n)}
    values = {"lhs": random_values(rng, shapes["lhs"], dtype), "rhs": random_values(rng, shapes["rhs"], rhs_dtype or dtype)}
    offs, offset = settings.get("offs", False), settings.get("group_offset", 0)
    shared = {name for name in ("lhs", "rhs") if layouts.get(name, PACKED).broadcast}  # NaN there would be everybody's NaN
    if poison and not shared and mode is not Mode.BATCH:
        computed = range(int(offset), int(offset) + (groups if mode is Mode.NON_CONTRACTING else shapes["out"][0]))
        _poison(values, mode, sizes if not offs else np.diff(sizes, prepend=0, axis=-1), computed, batch, poison)
    if out_dtype is None:
        out_dtype = "float32" if "preferred_element_type" in settings else _wider(dtype, rhs_dtype or dtype)
    else:
        settings["preferred_element_type"] = dtype_of(out_dtype)

    def made(name: str, array: np.ndarray[Any, Any]) -> Operand:
        lists = {Mode.NON_CONTRACTING: ("rhs",), Mode.CONTRACTING: ("out", "c")}.get(mode, ())
        kind: Any = ListOperand if listed and name in lists else Operand
        return kind(array, layouts.get(name, PACKED), library)

    out = c_operand = None
    if give_out:
        start = random_values(rng, shapes["out"], out_dtype) if c == "out" else np.full(shapes["out"], np.nan, dtype_of(out_dtype))
        out = made("out", start)
    if c is not None:
        c_operand = out if c == "out" else made("c", random_values(rng, shapes["out"], out_dtype))
    bias_operand = made("bias", random_values(rng, (groups, n), out_dtype)) if bias else None
    sizes_operand = made("sizes", sizes.astype(dtype_of(sizes_dtype)))
    return Problem(numbers, made("lhs", values["lhs"]), made("rhs", values["rhs"]), sizes_operand, out, c_operand, bias_operand, settings)


def _wider(lhs: str, rhs: str) -> str:
    def rank(name: str) -> tuple[int, int]:
        info = ml_dtypes.finfo(dtype_of(name))
        return int(info.maxexp), int(info.nmant)

    return lhs if rank(lhs) >= rank(rhs) else rhs


def _poison(
    values: dict[str, np.ndarray[Any, Any]],
    mode: Mode,
    sizes: np.ndarray[Any, Any],
    computed: range,
    batch: int | None,
    poison: frozenset[str],
) -> None:
    """Writes NaN where nothing may be read."""
    lhs, rhs = values["lhs"], values["rhs"]
    rows = lhs.shape[0 if batch is None else 1]
    for entry in range(1 if batch is None else batch):
        own = sizes if sizes.ndim == 1 else sizes[entry]
        read = np.zeros(rows, bool)
        start = 0
        for group, size in enumerate(own):
            end = min(start + min(max(int(size), 0), rows + 1), rows)
            if group in computed:
                read[start:end] = True
            if "empty" in poison and mode is Mode.NON_CONTRACTING and group in computed and start == end:
                weights = group - computed.start
                rhs[(weights,) if batch is None else (weights, entry)] = np.nan
            start = end
        if "uncovered" in poison:
            at: Any = ~read if batch is None else (entry, ~read)
            lhs[at] = np.nan
            if mode is Mode.CONTRACTING:
                rhs[at] = np.nan


# ---- the case file -------------------------------------------------------------------------------------------------------------


def load_cases() -> dict[str, dict[str, Any]]:
    """The case file's cases by id: inputs of kinds that broke other grouped-GEMM libraries."""
    cases = json.loads(CASE_FILE.read_text(encoding="utf-8"))["cases"]
    return {case["id"]: case for case in cases}


def case_problem(rng: np.random.Generator, case: dict[str, Any], **changes: Any) -> Problem:
    """A case as a problem: its shapes, types and sizes, poisoned in every way that it may be.

    In the file's CONTRACTING cases m counts the contracted token rows; here that is k, as in a config.
    """
    mode, sizes = Mode[case["mode"]], changes.pop("sizes", case.get("group_sizes", case.get("offs")))
    m, n, k = changes.pop("m", case["m"]), case["n"], case["k"]
    if mode is Mode.CONTRACTING:
        m, k = k, m
    settings = {name: case[name] for name in ("batch", "out_dtype", "rhs_groups", "group_offset", "sizes_dtype") if name in case}
    if "offs" in case:
        settings["offs"] = True
    return make_problem(rng, mode, m, n, k, sizes, case["dtype"], **{**settings, **changes})
