"""Batch invariance as a property: some rows keep their bits at other places, beside other rows, with other group counts and another m."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Run = Callable[..., Array]
"""(lhs, rhs, sizes, **operands of `Rows.extras`) -> out, on the host."""


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Values whose sums round: of all signs, over eight octaves."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-4, 4, shape))).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@dataclasses.dataclass
class Rows:
    """Rows (p, k) that keep company with others, the weights (w, k, n) they are of, and which; c (p, n) and bias (w, n), or None."""

    lhs: Array
    weights: Array
    which: Array
    c: Array | None = None
    bias: Array | None = None

    @classmethod
    def random(cls, rng: np.random.Generator, count: int, k: int, n: int, dtype: str, *, extras: bool = False) -> Rows:
        weights = int(rng.integers(1, 4))
        added = (numbers(rng, (count, n), dtype), numbers(rng, (weights, n), dtype)) if extras else (None, None)
        return cls(numbers(rng, (count, k), dtype), numbers(rng, (weights, k, n), dtype), rng.integers(0, weights, count), *added)

    def alone(self, run: Run, row: int) -> Array:
        """A row's result in a call of its own."""
        one, of = slice(row, row + 1), int(self.which[row])
        extras = {} if self.c is None or self.bias is None else {"c": self.c[one], "bias": self.bias[of : of + 1]}
        return run(self.lhs[one], self.weights[of : of + 1], np.array([1], np.int32), **extras)[0]

    def in_company(self, run: Run, rng: np.random.Generator, most: int) -> Array:
        """All rows' results in one call: groups and rows in another order, beside up to `most` other rows per group, NaN among them."""
        dtype, (k, n) = self.lhs.dtype.name, self.weights.shape[1:]
        groups = len(self.weights) + int(rng.integers(0, 5))
        place_of = rng.permutation(groups)[: len(self.weights)]
        rhs = numbers(rng, (groups, k, n), dtype)
        rhs[place_of] = self.weights
        sizes, sources = np.zeros(groups, np.int32), []
        for group in range(groups):
            own = [row for row in range(len(self.lhs)) if place_of[self.which[row]] == group]
            mixed = rng.permutation([*own, *[-1] * int(rng.integers(0, most + 1))]).astype(int)
            sizes[group] = len(mixed)
            sources += mixed.tolist()
        sources += [-1] * int(rng.integers(0, 4))  # uncovered
        source = np.array(sources, int)
        places = np.array([int(np.flatnonzero(source == row)[0]) for row in range(len(self.lhs))])
        lhs = numbers(rng, (len(source), k), dtype)
        lhs[rng.random(len(source)) < 0.1] = np.nan
        lhs[places] = self.lhs
        extras = {}
        if self.c is not None and self.bias is not None:
            extras = {"c": numbers(rng, (len(source), n), dtype), "bias": numbers(rng, (groups, n), dtype)}
            extras["c"][places], extras["bias"][place_of] = self.c, self.bias
        return run(lhs, rhs, sizes, **extras)[places]


def different_rows(run: Run, rows: Rows, rng: np.random.Generator, *, times: int = 3, most: int = 40) -> list[tuple[int, int]]:
    """(time, row) of rows whose bits in company are not those that they have alone."""
    alone = np.stack([rows.alone(run, row) for row in range(len(rows.lhs))])
    assert np.isfinite(alone.astype(np.float64)).all()
    found = []
    for time in range(times):
        together = rows.in_company(run, rng, most)
        equal = (together.view(np.uint8) == alone.view(np.uint8)).reshape(len(alone), -1).all(axis=1)
        found += [(time, int(row)) for row in np.flatnonzero(~equal)]
    return found
