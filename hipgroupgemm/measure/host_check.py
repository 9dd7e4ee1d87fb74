"""The check on the host: float64 products by BLAS, compared with out; and a look at all of out's memory."""

from __future__ import annotations

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
    _compare(products, sample, parts, seen)
    _inspect(products, parts, tail, fill, seen)
    return seen


def _compare(products: Products, sample: Sample, parts: dict[str, Array], seen: CheckCounts) -> None:
    config, columns, limit = products.config, sample.columns, largest_finite(products.config.type_d)
    rhs_grouped, out_grouped = parts["rhs"].shape[0] > 1, parts["out"].shape[0] > 1
    first_wrong, end = -1, 0
    for p, count in enumerate(sample.counts.tolist()):
        mine, end = sample.rows[end : end + count], end + count
        if not count or not columns.size:
            continue
        batch, group = int(products.batch[p]), int(products.group[p])
        k, slab = slice(int(products.k_first[p]), int(products.k_end[p])), group if out_grouped else 0
        a = parts["lhs"][0, batch, :, k][mine].astype(np.float64)
        b = parts["rhs"][group if rhs_grouped else 0, batch, k][:, columns].astype(np.float64)
        wanted, magnitude = products.alpha * (a @ b), abs(products.alpha) * (np.abs(a) @ np.abs(b))
        if products.beta:
            c = products.beta * parts["c"][slab, batch][np.ix_(mine, columns)].astype(np.float64)
            wanted, magnitude = wanted + c, magnitude + np.abs(c)
        if "bias" in parts:
            bias = parts["bias"][group, 0, 0, columns].astype(np.float64)
            wanted, magnitude = wanted + bias, magnitude + np.abs(bias)
        got = parts["out"][slab, batch][np.ix_(mine, columns)].astype(np.float64)
        with np.errstate(all="ignore"):
            error, bound = np.abs(got - wanted), products.tolerance_of(p).elementwise(wanted, magnitude)
            right = error <= bound
            # a sum that may lie past the type's largest number may be stored as infinity, and counts in no mean then
            overflow = np.isinf(got) & (np.sign(got) == np.sign(wanted)) & (np.abs(wanted) + bound > limit)
            wrong = ~(right | overflow)
            seen.square_error += float(np.sum(np.where(overflow, 0, error) ** 2))
            seen.square_norm += float(np.sum(np.where(overflow, 0, wanted) ** 2))
        seen.compared += error.size
        seen.wrong += int(np.count_nonzero(wrong))
        if wrong.any():
            with np.errstate(all="ignore"):
                worst = float(np.max(error[wrong] / bound[wrong]))
            seen.worst = math.inf if math.isnan(worst) else max(seen.worst, worst)
            i, j = (int(x) for x in np.argwhere(wrong)[0])
            index = ((slab * config.batch_count + batch) * config.m + int(mine[i])) * config.n + int(columns[j])
            if first_wrong < 0 or index < first_wrong:
                first_wrong = index
                seen.where = describe_element(config, index, float(got[i, j]), float(wanted[i, j]), float(bound[i, j]))


def _inspect(products: Products, parts: dict[str, Array], tail: str, fill: int, seen: CheckCounts) -> None:
    """Looks at every element: for NaN where a group covers it, for beta * c where none does."""
    config, out = products.config, parts["out"]
    if not out.size:
        return
    covered = np.zeros(out.shape[:3], bool)
    for at in np.ndindex(out.shape[:2]):
        covered[at][slice(*products.covered[at].tolist())] = True
    poison = _holds(out, fill)
    nan = np.isnan(out) & covered[..., None]
    if nan.any():
        seen.unwritten = int(np.count_nonzero(nan & poison))
        seen.nan = int(np.count_nonzero(nan)) - seen.unwritten
        seen.first_nan = place_of(config, int(np.argmax(nan)))
    index = np.flatnonzero(~covered.reshape(-1))
    if not index.size:
        return
    left = out.reshape(-1, config.n)[index] if out.flags.c_contiguous else out[~covered]
    wanted, bound = np.zeros(left.shape), np.zeros(left.shape)
    if tail == "undefined":
        wrong, wanted = ~poison[~covered], np.full(left.shape, np.nan)
    else:
        if products.beta:
            wanted = products.beta * parts["c"][~covered].astype(np.float64)
            bound = products.scaled.elementwise(wanted, np.abs(wanted))
        with np.errstate(all="ignore"):
            wrong = ~(np.abs(left.astype(np.float64) - wanted) <= bound)
    seen.uncovered = int(np.count_nonzero(wrong))
    if seen.uncovered:
        i, j = (int(x) for x in np.argwhere(wrong)[0])
        where = int(index[i]) * config.n + j
        seen.where_uncovered = describe_element(config, where, float(left[i, j]), float(wanted[i, j]), float(bound[i, j]))


def _holds(out: Array, fill: int) -> Array:
    """Which elements have bytes that are all `fill`."""
    pattern = np.frombuffer(bytes([fill]) * out.dtype.itemsize, np.dtype(f"u{out.dtype.itemsize}"))[0]
    found: Array = np.ascontiguousarray(out).view(pattern.dtype) == pattern
    return found
