"""The ragged dot by its definition, row by row in plain Python and float64: an oracle that shares no line with the package.

JAX judges what JAX can (test_ragged_dot_jax.py); this one covers what it lacks: alpha, beta, c, bias, offsets and wrong sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def group_rows(sizes: Any, rows: int, *, offs: bool = False) -> list[tuple[int, int]]:
    """First and one-past-last row of every group, clamped as a device must clamp them, in unbounded Python integers."""
    bounds, start = [], 0
    for value in [int(value) for value in sizes]:
        if offs:
            end = max(start, min(max(value, 0), rows))
        else:
            end = min(start + min(max(value, 0), rows + 1), rows)
        bounds.append((start, end))
        start = end
    return bounds


def first_fault(sizes: Any, rows: int, *, offs: bool = False) -> tuple[int, int, int] | None:
    """(group, rows wanted, rows left) of the first group with a negative size or one past the end."""
    start = 0
    for group, value in enumerate(int(value) for value in sizes):
        wanted = value - start if offs else value
        if wanted < 0 or wanted > rows - start:
            return group, wanted, rows - start
        start += wanted
    return None


def forward(
    lhs: Array,
    rhs: Array,
    sizes: Any,
    *,
    offs: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    bias: Array | None = None,
    group_offset: int = 0,
) -> Array:
    """NON_CONTRACTING: lhs (m, k), rhs (g, k, n) -> (m, n)."""
    m, n = lhs.shape[0], rhs.shape[2]
    group_of = {}
    for group, (start, end) in enumerate(group_rows(sizes, m, offs=offs)):
        if group_offset <= group < group_offset + rhs.shape[0]:
            group_of.update(dict.fromkeys(range(start, end), group - group_offset))
    out = np.zeros((m, n))
    for row in range(m):
        if beta:
            out[row] = beta * np.asarray(c, np.float64)[row]
        if row in group_of:
            group = group_of[row]
            if alpha:
                out[row] += alpha * (lhs[row].astype(np.float64) @ rhs[group].astype(np.float64))
            if bias is not None:
                out[row] += bias[group].astype(np.float64)
    return out


def weight_gradient(
    lhs: Array,
    rhs: Array,
    sizes: Any,
    *,
    offs: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array | None = None,
    group_offset: int = 0,
    group_count: int | None = None,
) -> Array:
    """CONTRACTING: lhs (R, m), rhs (R, n) -> (g, m, n)."""
    bounds = group_rows(sizes, lhs.shape[0], offs=offs)
    count = len(bounds) if group_count is None else group_count
    out = np.zeros((count, lhs.shape[1], rhs.shape[1]))
    for slab in range(count):
        if beta:
            out[slab] = beta * np.asarray(c, np.float64)[slab]
        start, end = bounds[slab + group_offset]
        for row in range(start, end):
            if alpha:
                out[slab] += alpha * np.outer(lhs[row].astype(np.float64), rhs[row].astype(np.float64))
    return out
