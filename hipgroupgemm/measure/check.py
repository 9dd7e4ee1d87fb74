"""The check: which rows belong to which product, what is sampled, how wrong a right element may be; and the check in NumPy.

Starts and ends are made here from the host's sizes, by NumPy alone: neither the device's scan nor `groups.scan` takes part, so that a
fault in those shows.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.layouts import Layout
from hipgroupgemm.measure.tolerance import Tolerance, largest_finite, tolerance_for

__all__ = [
    "CheckCounts", "Outcome", "Products", "Sample", "Wrong", "bounds_of", "check_arrays", "check_outcome_of", "differing", "digest_of",
    "draw_sample", "host_integers", "products_of", "touched_bytes",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_ENOUGH = 64  # elements from which on the relative error, a mean, is held against its bound
_LEAST_COLUMNS = 64
_WIDTH = 4096  # words of 8 bytes
_PRODUCT = [(name, np.int64) for name in ("batch", "group", "row_first", "row_end", "k_first", "k_end")] + [("accumulation", np.float64)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check, or of a step with a candidate.

    Attributes:
        verdict: "" where nothing is wrong so far, else "wrong", "failed" and so on. reason: why.
        error, error_limit: the relative Frobenius error over what was compared, and its bound, where something was checked.
        ms: milliseconds, where it was timed. amount: how much was checked, in words.
    """

    verdict: str = ""
    reason: str = ""
    error: float | None = None
    error_limit: float | None = None
    ms: float | None = None
    amount: str = ""


@dataclasses.dataclass(frozen=True)
class Products:
    """A grouped GEMM as a list of products, one for each batch entry and group (one per batch entry in BATCH), in that order.

    Attributes:
        config: the problem's, with alpha and beta of the run.
        each: structured, (p,): batch entry and group, rows of out that it fills, its part of the contracted dimension, and its factor on
            the sum of magnitudes, see `Tolerance`.
        covered: int64 (groups of out, batch, 2): first and one-past-last row of each slab of out that some product fills.
        tolerance: of the longest product. scaled: of elements that are beta * c alone.
    """

    config: GroupedGemmConfig
    each: Array
    covered: Integers
    tolerance: Tolerance
    scaled: Tolerance


def products_of(config: GroupedGemmConfig, sizes: Any, group_offset: int = 0, without: int | None = None) -> Products:
    """The products that a config's group sizes ask for; ValueError for sizes or an offset that do not fit. Of group `without`, counted from
    `group_offset` on, nothing is compared; its elements are covered nonetheless."""
    batches = config.batch_count
    if config.ragged_mode is RaggedDotMode.BATCH:
        starts, ends = np.zeros((batches, 1), np.int64), np.full((batches, 1), config.m)
    else:
        starts, ends = bounds_of(config, sizes, group_offset)
    each, filled = np.zeros(starts.shape, _PRODUCT), ends > starts
    each["batch"], each["group"] = np.indices(starts.shape)
    if config.ragged_mode is RaggedDotMode.CONTRACTING:
        each["row_end"], each["k_first"], each["k_end"] = config.m * filled, starts, ends
        covered = np.stack([each["row_first"].T, each["row_end"].T], axis=-1)
    else:
        each["row_first"], each["row_end"], each["k_end"] = starts * filled, ends * filled, config.k
        covered = np.zeros((1, batches, 2), np.int64)
        if starts.shape[1]:
            covered[0] = np.stack([starts[:, 0], ends[:, -1]], axis=-1)
    if without is not None:
        each["row_end"][:, without] = each["row_first"][:, without]
    if config.alpha == 0:  # no product is read then
        each["k_end"] = each["k_first"]
    extra = (config.alpha != 1) + 2 * (config.beta != 0) + config.epilogue.bias  # scalars and addends count as a term each
    lengths, which = np.unique(each["k_end"] - each["k_first"], return_inverse=True)
    found = [tolerance_for(config.type_d, int(length) + extra, config.compute_type) for length in lengths]
    each["accumulation"] = np.array([one.accumulation for one in found])[which.reshape(each.shape)] if found else 0
    scaled = tolerance_for(config.type_d, 2, config.compute_type.replace("tf32", "float32"))
    return Products(config, each.reshape(-1), np.ascontiguousarray(covered), found[-1] if found else scaled, scaled)


def bounds_of(config: GroupedGemmConfig, sizes: Any, group_offset: int = 0) -> tuple[Integers, Integers]:
    """First and one-past-last row of each group from `group_offset` on, each (batch, group_count); ValueError for what does not fit."""
    batches, extent, host = config.batch_count, config.ragged_extent, host_integers(sizes)
    wanted = (batches, config.group_total) if config.sizes_per_batch else (config.group_total,)
    if host.shape != wanted:
        raise ValueError(f"host_sizes: got shape {host.shape}, wanted {wanted}")
    if not 0 <= group_offset <= config.group_total - config.group_count:
        raise ValueError(f"group_offset={group_offset}: wanted 0 to {config.group_total - config.group_count}")
    if host.size and (host.min() < 0 or max(map(sum, np.atleast_2d(host).tolist())) > extent):
        raise ValueError(f"host_sizes: must be at least 0 and sum to at most {extent}, the ragged extent")
    host = np.broadcast_to(host.astype(np.int64), (batches, config.group_total))
    ends, part = np.cumsum(host, axis=1), slice(group_offset, group_offset + config.group_count)
    return (ends - host)[:, part], ends[:, part]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which elements are compared: rows of out, in order of product and row, and how many of them are each product's; the same columns of
    all; and how much that is, in words."""

    rows: Integers
    counts: Integers
    columns: Integers
    checked: str


def draw_sample(products: Products, seed: int, budget: float) -> Sample:
    """Everything, where that takes at most `budget` floating-point operations; else rows and columns at random.

    Rows and columns are cut into as many equal stretches as may be looked at, and one of each is taken, so that no tile of a kernel's
    escapes; the first and the last column, and the first and the last row of every product, are always among them.
    """
    n, each = products.config.n, products.each
    counts = each["row_end"] - each["row_first"]
    total, ends = int(counts.sum()), np.cumsum(counts)
    firsts = ends - counts  # of each product in the list of all rows
    flops = 2.0 * n * float(np.sum(counts.astype(np.float64) * (each["k_end"] - each["k_first"])))
    if flops <= budget:
        picked, columns, checked = np.arange(total), np.arange(n), f"all {total} rows of products"
    else:
        rng, share = np.random.default_rng(seed), budget / flops
        columns = _one_per_stretch(rng, n, min(n, max(_LEAST_COLUMNS, math.ceil(n * math.sqrt(share)))), np.array([0, n - 1]))
        filled = counts > 0
        edges = np.concatenate([firsts[filled], ends[filled] - 1])
        wanted = int(total * share * n / columns.size) - edges.size
        picked = _one_per_stretch(rng, total, min(wanted, total), edges)
        checked = f"{picked.size} of {total} rows x {columns.size} of {n} columns; all for NaN"
    product = np.searchsorted(ends, picked, side="right")
    rows = each["row_first"][product] + picked - firsts[product]
    return Sample(rows, np.bincount(product, minlength=counts.size), columns, checked)


def _one_per_stretch(rng: np.random.Generator, extent: int, count: int, also: Integers) -> Integers:
    count = max(count, 0)
    places = np.floor((np.arange(count) + rng.random(count)) * (extent / max(count, 1))).astype(np.int64)
    return np.unique(np.concatenate([np.minimum(places, extent - 1), also]))


class Wrong(NamedTuple):
    """A wrong element: `place` counts (group of out, batch, row, column) in row-major order."""

    place: int
    got: float
    wanted: float
    bound: float

    def describe(self, config: GroupedGemmConfig) -> str:
        """It in words."""
        within = f"within {self.bound:.1e}" if self.bound else "exactly"
        return f"at {_place_of(config, self.place)}: got {self.got:.6g}, wanted {self.wanted:.6g} {within}"


@dataclasses.dataclass
class CheckCounts:
    """What a check has seen.

    Attributes:
        compared: elements compared with a product. square_error, square_norm: sums over them.
        wrong, first: how many of them are wrong, and the first. worst: the largest error of those in units of its bound.
        unwritten: covered elements that still hold the poison. nan: other NaN among the covered elements. first_nan: the first of either.
        uncovered, first_uncovered: elements that no group covers and that are not what they must be, and the first.
        touched: bytes of out's gaps and guards that were written.
    """

    compared: int = 0
    square_error: float = 0.0
    square_norm: float = 0.0
    wrong: int = 0
    first: Wrong | None = None
    worst: float = 0.0
    unwritten: int = 0
    nan: int = 0
    first_nan: int = 0
    uncovered: int = 0
    first_uncovered: Wrong | None = None
    touched: int = 0


def check_outcome_of(products: Products, seen: CheckCounts, checked: str) -> Outcome:
    """What comes of what was seen: the fault that says most comes first, all that there are are named."""
    config, limit, error, faults = products.config, products.tolerance.relative, 0.0, []
    if seen.square_error != 0:
        error = math.sqrt(seen.square_error / seen.square_norm) if seen.square_norm else math.inf
        error = error if math.isfinite(error) else math.inf
    if seen.square_norm:
        # results below the output type's normal range have an absolute error, whatever their norm
        limit += products.tolerance.smallest * math.sqrt(seen.compared / seen.square_norm)
    if seen.touched:
        faults.append(f"{seen.touched} bytes between or around out's elements were written")
    if seen.unwritten or seen.nan:
        what = f"{seen.unwritten} elements were not written" if seen.unwritten else f"{seen.nan} elements are NaN"
        faults.append(f"{what}, the first at {_place_of(config, seen.first_nan)}")
    if seen.first_uncovered is not None:
        faults.append(f"{seen.uncovered} elements that no group covers are wrong, the first {seen.first_uncovered.describe(config)}")
    if seen.first is not None:
        worst = f" by up to {seen.worst:.3g} bounds" if math.isfinite(seen.worst) else ""
        faults.append(f"{seen.wrong} of {seen.compared} elements are wrong{worst}, the first {seen.first.describe(config)}")
    elif seen.compared >= _ENOUGH and seen.square_norm and not error <= limit:
        faults.append(f"relative error {error:.2e}, at most {limit:.2e} is right")
    return Outcome("wrong" if faults else "", "; ".join(faults), error, limit, amount=checked)


def _place_of(config: GroupedGemmConfig, index: int) -> str:
    group, batch, row, column = np.unravel_index(index, (config.group_count or 1, config.batch_count, config.m, config.n))
    text = f"{f'batch {batch} ' if config.batch_count > 1 else ''}row {row} column {column}"
    return f"group {group} {text}" if config.ragged_mode is RaggedDotMode.CONTRACTING else text


def host_integers(values: Any, name: str = "group_sizes") -> Array:
    """Group sizes from the host as an array of integers; TypeError for anything else."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of different lengths
        raise TypeError(f"{name}: is no array ({error}); wanted one integer a group") from None
    if array.size == 0 and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {array.dtype.name}, wanted integers: one size a group")
    return array


def digest_of(buffer: Array) -> int:
    """A number that tells whether any byte of a buffer has changed: of the sums along the rows and columns of its words, as a matrix."""
    words = buffer[: buffer.size // 8 * 8].view(np.uint64)
    matrix = words[: words.size // _WIDTH * _WIDTH].reshape(-1, _WIDTH)
    found = 0
    for part in (matrix.sum(0), matrix.sum(1), words[matrix.size :], buffer[words.nbytes :]):
        found = zlib.crc32(np.ascontiguousarray(part).tobytes(), found)
    return found


def touched_bytes(buffer: Array, layout: Layout, fill: int) -> int:
    """How many bytes of a layout's whole buffer that belong to no element are not `fill`."""
    mask = np.ones(buffer.size, bool)
    if layout.size:
        strides = (*layout.byte_strides, 1)
        np.ndarray((*layout.shape, layout.dtype.itemsize), bool, mask.data, layout.offset, strides)[...] = False
    return int(np.count_nonzero(buffer[mask] != fill))


def differing(one: Array, other: Array) -> int:
    """How many elements of two arrays differ bitwise."""
    kind = np.dtype(f"u{one.dtype.itemsize}")
    return int(np.count_nonzero(np.ascontiguousarray(one).view(kind) != np.ascontiguousarray(other).view(kind)))


def check_arrays(products: Products, sample: Sample, parts: dict[str, Array], tail: str, fill: int) -> CheckCounts:
    """Compares a sample of out with products of BLAS in float64, and looks at every element of it; `parts`: the operands by name, (group,
    batch, row, column). `fill`: the byte that out was full of before the run."""
    seen = CheckCounts()
    with np.errstate(all="ignore"):
        _compare(products, sample, parts, seen)
        _inspect(products, parts, tail, fill, seen)
    return seen


def _compare(products: Products, sample: Sample, parts: dict[str, Array], seen: CheckCounts) -> None:
    config, columns, limit = products.config, sample.columns, largest_finite(products.config.type_d)
    rhs_grouped, out_grouped = parts["rhs"].shape[0] > 1, parts["out"].shape[0] > 1
    end = 0
    for product, count in zip(products.each.tolist(), sample.counts.tolist(), strict=True):
        batch, group, _, _, k_first, k_end, accumulation = product
        mine, end = sample.rows[end : end + count], end + count
        if not count or not columns.size:
            continue
        k, slab = slice(k_first, k_end), group if out_grouped else 0
        cells = (slab, batch, mine[:, None], columns)
        a = parts["lhs"][0, batch, :, k][mine].astype(np.float64)
        b = parts["rhs"][group if rhs_grouped else 0, batch, k][:, columns].astype(np.float64)
        wanted, magnitude = config.alpha * (a @ b), abs(config.alpha) * (np.abs(a) @ np.abs(b))
        addends = [config.beta * parts["c"][cells].astype(np.float64)] if config.beta else []
        addends += [parts["bias"][group, 0, 0, columns].astype(np.float64)] if "bias" in parts else []
        for addend in addends:
            wanted, magnitude = wanted + addend, magnitude + np.abs(addend)
        got = parts["out"][cells].astype(np.float64)
        tolerance = dataclasses.replace(products.tolerance, accumulation=accumulation)
        error, bound = np.abs(got - wanted), tolerance.elementwise(wanted, magnitude)
        # a sum that may lie past the type's largest number may be stored as infinity, and counts in no mean then
        overflow = np.isinf(got) & (np.sign(got) == np.sign(wanted)) & (np.abs(wanted) + bound > limit)
        wrong = ~((error <= bound) | overflow)
        seen.square_error += float(np.sum(np.where(overflow, 0, error) ** 2))
        seen.square_norm += float(np.sum(np.where(overflow, 0, wanted) ** 2))
        seen.compared += error.size
        seen.wrong += int(np.count_nonzero(wrong))
        if wrong.any():
            worst = float(np.max(error[wrong] / bound[wrong]))
            seen.worst = math.inf if math.isnan(worst) else max(seen.worst, worst)
            i, j = np.argwhere(wrong)[0].tolist()
            index = ((slab * config.batch_count + batch) * config.m + int(mine[i])) * config.n + int(columns[j])
            if seen.first is None or index < seen.first.place:
                seen.first = Wrong(index, got[i, j], wanted[i, j], bound[i, j])


def _inspect(products: Products, parts: dict[str, Array], tail: str, fill: int, seen: CheckCounts) -> None:
    """Looks at every element: for NaN where a group covers it, for beta * c where none does."""
    config, out = products.config, parts["out"]
    if not out.size:
        return
    rows, (first, end) = np.arange(config.m), np.moveaxis(products.covered, -1, 0)[..., None]
    covered = (rows >= first) & (rows < end)
    poison = np.ascontiguousarray(out).view(f"u{out.dtype.itemsize}") == int.from_bytes(bytes([fill]) * out.dtype.itemsize, "little")
    nan = np.isnan(out) & covered[..., None]
    if nan.any():
        seen.unwritten = int(np.count_nonzero(nan & poison))
        seen.nan = int(np.count_nonzero(nan)) - seen.unwritten
        seen.first_nan = int(np.argmax(nan))
    index, left = np.flatnonzero(~covered), out[~covered]
    wanted, bound = np.zeros(left.shape), np.zeros(left.shape)
    if tail == "undefined":
        wrong, wanted = ~poison[~covered], np.full(left.shape, np.nan)
    else:
        if config.beta:
            wanted = config.beta * parts["c"][~covered].astype(np.float64)
            bound = products.scaled.elementwise(wanted, np.abs(wanted))
        wrong = ~(np.abs(left.astype(np.float64) - wanted) <= bound)
    seen.uncovered = int(np.count_nonzero(wrong))
    if seen.uncovered:
        i, j = np.argwhere(wrong)[0].tolist()
        seen.first_uncovered = Wrong(int(index[i]) * config.n + j, float(left[i, j]), wanted[i, j], bound[i, j])
