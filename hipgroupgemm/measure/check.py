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
from hipgroupgemm.operands.dtypes import dtype_of

__all__ = ["CheckCounts", "CheckResult", "Products", "Sample", "check_result_of", "draw_sample", "products_of"]

Array = np.ndarray[Any, Any]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_ENOUGH = 64  # elements from which on the relative error, a mean, is held against its bound
_LEAST_COLUMNS = 64


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
        config: the problem's. alpha, beta: of the run.
        batch, group: each product's indices, int64 (p,).
        row_first, row_end: rows of out that it fills; none where it is empty.
        k_first, k_end: its part of the contracted dimension.
        covered: int64 (groups of out, batch, 2): first and one-past-last row of each slab of out that some product fills.
        accumulation: float64 (p,): each product's factor on the sum of magnitudes, see `Tolerance`.
        tolerance: of the longest product. scaled: of elements that are beta * c alone.
    """

    config: GroupedGemmConfig
    alpha: float
    beta: float
    batch: Integers
    group: Integers
    row_first: Integers
    row_end: Integers
    k_first: Integers
    k_end: Integers
    covered: Integers
    accumulation: np.ndarray[Any, np.dtype[np.float64]]
    tolerance: Tolerance
    scaled: Tolerance

    @property
    def rows(self) -> Integers:
        """Rows of each product."""
        return self.row_end - self.row_first

    def tolerance_of(self, product: int) -> Tolerance:
        """That of one product."""
        return dataclasses.replace(self.tolerance, accumulation=float(self.accumulation[product]))


def products_of(
    config: GroupedGemmConfig,
    sizes: Any,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    group_offset: int = 0,
    without: int | None = None,
) -> Products:
    """The products that a config's group sizes ask for; None takes the config's alpha or beta. Of group `without`, counted from
    `group_offset` on, nothing is compared; its elements are covered nonetheless.

    Raises:
        ValueError: sizes of another shape than the config's, negative, or with a sum past the ragged extent; an offset out of range.
    """
    mode, batches = config.ragged_mode, config.batch_count
    alpha, beta = (config.alpha if alpha is None else float(alpha)), (config.beta if beta is None else float(beta))
    if bool(beta) != bool(config.beta):
        raise ValueError(
            f"beta={beta}: the config has beta={config.beta}; make operands for a config whose beta is 0 exactly where this is"
        )
    if mode is RaggedDotMode.BATCH:
        starts, ends = np.zeros((batches, 1), np.int64), np.full((batches, 1), config.m, np.int64)
    else:
        starts, ends = _bounds(config, sizes, group_offset)
    groups = starts.shape[1]
    filled, nothing = ends > starts, np.zeros(starts.shape, np.int64)
    if mode is RaggedDotMode.CONTRACTING:
        row_first, row_end, k_first, k_end = nothing.copy(), np.where(filled, config.m, 0), starts, ends
        covered = np.stack([row_first.T, row_end.T], axis=-1)
    else:
        row_first, row_end, k_first, k_end = np.where(filled, starts, 0), np.where(filled, ends, 0), nothing, nothing + config.k
        first, end = (starts[:, 0], ends[:, -1]) if groups else (np.zeros(batches, np.int64),) * 2
        covered = np.stack([first, end], axis=-1)[None]
    if without is not None:
        row_first[:, without] = row_end[:, without] = 0
    if alpha == 0:  # no product is read then
        k_end = k_first
    accumulation, tolerance = _tolerances(config, (k_end - k_first).reshape(-1), alpha, beta)
    batch, group = np.meshgrid(np.arange(batches), np.arange(groups), indexing="ij")
    flat: list[Any] = [part.reshape(-1).astype(np.int64) for part in (batch, group, row_first, row_end, k_first, k_end)]
    scaled = tolerance_for(config.type_d, 2, config.compute_type.replace("tf32", "float32"))
    rest: tuple[Any, ...] = (np.ascontiguousarray(covered, np.int64), accumulation, tolerance, scaled)
    return Products(config, alpha, beta, *flat, *rest)


def _bounds(config: GroupedGemmConfig, sizes: Any, group_offset: int) -> tuple[Integers, Integers]:
    batches, extent = config.batch_count, config.ragged_extent
    host = host_integers(sizes)
    wanted = (batches, config.group_total) if config.sizes_per_batch else (config.group_total,)
    if host.shape != wanted:
        raise ValueError(f"host_sizes: got shape {host.shape}, wanted {wanted}")
    if not 0 <= group_offset <= config.group_total - config.group_count:
        raise ValueError(f"group_offset={group_offset}: wanted 0 to {config.group_total - config.group_count}")
    if host.size and (int(host.min()) < 0 or max(sum(int(x) for x in row) for row in np.atleast_2d(host)) > extent):
        raise ValueError(f"host_sizes: must be at least 0 and sum to at most {extent}, the ragged extent")
    ends = np.cumsum(np.broadcast_to(host.astype(np.int64), (batches, config.group_total)), axis=1)
    part = slice(group_offset, group_offset + config.group_count)
    return (ends - host)[:, part], ends[:, part]


def _tolerances(config: GroupedGemmConfig, lengths: Integers, alpha: float, beta: float) -> tuple[Array, Tolerance]:
    """Each product's accumulation factor, and the tolerance of the longest: multiplying by a scalar and adding count as a term each."""
    extra = (alpha != 1) + 2 * (beta != 0) + config.epilogue.bias
    distinct, which = np.unique(lengths, return_inverse=True)
    found = [tolerance_for(config.type_d, int(length) + extra, config.compute_type) for length in distinct]
    longest = found[-1] if found else tolerance_for(config.type_d, extra, config.compute_type)
    return np.array([t.accumulation for t in found], np.float64)[which.reshape(-1)], longest


# ---- the sample ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which elements of the products are compared: some rows of each, and the same columns of all of them.

    Attributes:
        rows: int64, rows of out, in order of product and row. counts: how many of them are each product's, int64 (p,).
        columns: int64, in order.
        checked: how much that is, in words.
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
    n, counts = products.config.n, products.rows
    total, ends = int(counts.sum()), np.cumsum(counts)
    flops = 2.0 * n * float(np.sum(counts.astype(np.float64) * (products.k_end - products.k_first)))

    def rows_at(places: Integers) -> Integers:
        """Rows of out at places in the list of all products' rows."""
        product = np.searchsorted(ends, places, side="right")
        rows: Integers = products.row_first[product] + places - (ends - counts)[product]
        return rows

    if flops <= budget:
        return Sample(rows_at(np.arange(total)), counts, np.arange(n, dtype=np.int64), f"all {total} rows of products")
    rng, share = np.random.default_rng(seed), budget / flops
    width = min(n, max(_LEAST_COLUMNS, math.ceil(n * math.sqrt(share))))
    columns = np.unique(np.concatenate([_one_per_stretch(rng, n, width), [0, n - 1]]))
    filled = counts > 0
    edges = np.concatenate([(ends - counts)[filled], ends[filled] - 1])
    wanted = int(total * share * n / columns.size) - edges.size
    picked = np.unique(np.concatenate([edges, _one_per_stretch(rng, total, min(wanted, total))]))
    counts_picked = np.bincount(np.searchsorted(ends, picked, side="right"), minlength=counts.size)
    text = f"{picked.size} of {total} rows x {columns.size} of {n} columns; all for NaN"
    return Sample(rows_at(picked), counts_picked.astype(np.int64), columns, text)


def _one_per_stretch(rng: np.random.Generator, extent: int, count: int) -> Integers:
    picked = np.floor((np.arange(max(count, 0)) + rng.random(max(count, 0))) * (extent / max(count, 1))).astype(np.int64)
    limited: Integers = np.minimum(picked, extent - 1)
    return limited


# ---- the result ----------------------------------------------------------------------------------------------------------------


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
    tolerance, limit = products.tolerance, products.tolerance.relative
    error = 0.0
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
    shape = (max(config.group_count, 1), max(config.batch_count, 1), max(config.m, 1), max(config.n, 1))
    group, batch, row, column = (int(i) for i in np.unravel_index(index, shape))
    text = f"row {row} column {column}"
    if config.batch_count > 1:
        text = f"batch {batch} {text}"
    return f"group {group} {text}" if config.ragged_mode is RaggedDotMode.CONTRACTING else text


def host_integers(values: Any) -> Array:
    """Group sizes from the host as an array of integers; TypeError for anything else."""
    array = np.asarray(values)
    if array.size == 0 and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"group_sizes: got {dtype_of(array.dtype)!s}, wanted integers on the host")
    return array
