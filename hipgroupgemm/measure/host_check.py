"""The check on the host: float64 products by BLAS, compared with out; and a look at all of out's memory."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import numpy as np

from hipgroupgemm.measure.check import CheckCounts, Products, Sample, describe_element, place_of
from hipgroupgemm.measure.layouts import Layout
from hipgroupgemm.measure.tolerance import largest_finite

__all__ = ["check_arrays", "differing", "digest_of", "touched_bytes"]

Array = np.ndarray[Any, Any]
_WIDTH = 4096  # words of 8 bytes


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
    """Compares a sample of out with products, and looks at every element of it.

    Args:
        products, sample: what out must be, and what of it is compared.
        parts: the operands by name, (group, batch, row, column). tail: of the run. fill: the byte that out was full of before the run.
    """
    seen = CheckCounts()
    with np.errstate(all="ignore"):
        _compare(products, sample, parts, seen)
        _inspect(products, parts, tail, fill, seen)
    return seen


def _compare(products: Products, sample: Sample, parts: dict[str, Array], seen: CheckCounts) -> None:
    config, columns, limit = products.config, sample.columns, largest_finite(products.config.type_d)
    rhs_grouped, out_grouped = parts["rhs"].shape[0] > 1, parts["out"].shape[0] > 1
    first_wrong, end = math.inf, 0
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
            if index < first_wrong:
                first_wrong, seen.where = index, describe_element(config, index, got[i, j], wanted[i, j], bound[i, j])


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
        seen.first_nan = place_of(config, int(np.argmax(nan)))
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
        where = int(index[i]) * config.n + j
        seen.where_uncovered = describe_element(config, where, float(left[i, j]), wanted[i, j], bound[i, j])
