"""What the checks on the host and on a device share: which rows belong to which product, what is sampled, how wrong a right element may be.

Starts and ends are made here from the host's sizes, by NumPy alone: neither the device's scan nor `groups.scan` takes part, so that a
fault in those shows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.tolerance import Tolerance, tolerance_for

__all__ = ["CheckCounts", "CheckResult", "Products", "Sample", "check_result_of", "draw_sample", "host_integers", "products_of"]

Array = np.ndarray[Any, Any]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_ENOUGH = 64  # elements from which on the relative error, a mean, is held against its bound
_LEAST_COLUMNS = 64
_PRODUCT = [(name, np.int64) for name in ("batch", "group", "row_first", "row_end", "k_first", "k_end")] + [("accumulation", np.float64)]


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What came out of one check.

    Attributes:
        error: relative Frobenius error over what was compared. limit: its bound.
        fault: "" for a right result, else what is wrong. checked: how much was looked at, in words.
    """

    error: float
    limit: float
    fault: str
    checked: str


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
    """The products that a config's group sizes ask for. Of group `without`, counted from `group_offset` on, nothing is compared; its
    elements are covered nonetheless.

    Raises:
        ValueError: sizes of another shape than the config's, negative, or with a sum past the ragged extent; an offset out of range.
    """
    batches = config.batch_count
    if config.ragged_mode is RaggedDotMode.BATCH:
        starts, ends = np.zeros((batches, 1), np.int64), np.full((batches, 1), config.m)
    else:
        starts, ends = _bounds(config, sizes, group_offset)
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


def _bounds(config: GroupedGemmConfig, sizes: Any, group_offset: int) -> tuple[Integers, Integers]:
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
    """Which elements of the products are compared: some rows of each, and the same columns of all of them.

    Attributes:
        rows: int64, rows of out, in order of product and row. counts: how many of them are each product's, int64 (p,).
        columns: int64, in order. checked: how much that is, in words.
    """

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


@dataclasses.dataclass
class CheckCounts:
    """What a check has seen.

    Attributes:
        compared: elements compared with a product. square_error, square_norm: sums over them.
        wrong, where: how many of them are wrong, and the first in words. worst: the largest error of those in units of its bound.
        unwritten: covered elements that still hold the poison. nan: other NaN among the covered elements. first_nan: the first of either.
        uncovered, where_uncovered: elements that no group covers and that are not what they must be, and the first in words.
        touched: bytes of out's gaps and guards that were written.
    """

    compared: int = 0
    square_error: float = 0.0
    square_norm: float = 0.0
    wrong: int = 0
    where: str = ""
    worst: float = 0.0
    unwritten: int = 0
    nan: int = 0
    first_nan: str = ""
    uncovered: int = 0
    where_uncovered: str = ""
    touched: int = 0


def check_result_of(products: Products, seen: CheckCounts, checked: str) -> CheckResult:
    """The result of what was seen: the fault that says most comes first, all that there are are named."""
    tolerance, limit, error = products.tolerance, products.tolerance.relative, 0.0
    if seen.square_error != 0:
        error = math.sqrt(seen.square_error / seen.square_norm) if seen.square_norm else math.inf
    if not math.isfinite(error):
        error = math.inf
    if seen.square_norm:
        # results below the output type's normal range have an absolute error, whatever their norm
        limit += tolerance.smallest * math.sqrt(seen.compared / seen.square_norm)
    faults = []
    if seen.touched:
        faults.append(f"{seen.touched} bytes between or around out's elements were written")
    if seen.unwritten:
        faults.append(f"{seen.unwritten} elements were not written, the first at {seen.first_nan}")
    elif seen.nan:
        faults.append(f"{seen.nan} elements are NaN, the first at {seen.first_nan}")
    if seen.uncovered:
        faults.append(f"{seen.uncovered} elements that no group covers are wrong, the first {seen.where_uncovered}")
    if seen.wrong:
        worst = f" by up to {seen.worst:.3g} bounds" if math.isfinite(seen.worst) else ""
        faults.append(f"{seen.wrong} of {seen.compared} elements are wrong{worst}, the first {seen.where}")
    elif seen.compared >= _ENOUGH and seen.square_norm and not error <= limit:
        faults.append(f"relative error {error:.2e}, at most {limit:.2e} is right")
    return CheckResult(error, limit, "; ".join(faults), checked)


def describe_element(config: GroupedGemmConfig, index: int, got: float, wanted: float, bound: float) -> str:
    """A wrong element in words; `index` counts (group of out, batch, row, column) in row-major order."""
    text = f"at {place_of(config, index)}: got {got:.6g}, wanted {wanted:.6g}"
    return text + (f" within {bound:.1e}" if bound else " exactly")


def place_of(config: GroupedGemmConfig, index: int) -> str:
    """Where an element lies, in words."""
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
