"""Draws cases, runs them through any build of the kernels, and compares the whole arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import layout as L
from .cases import Arena, Case, arguments, draw_case
from .model import describe, expect, same_nans

ARENA_BYTES = 48 << 20


@dataclass
class Drawn:
    """Cases in an arena: its bytes before any launch and as they must be afterwards."""

    cases: list[Case]
    starts: list[int]  # where each case's bytes start
    before: np.ndarray
    expected: np.ndarray


def draw(seed: int, count: int, makers: Sequence[Callable[[np.random.Generator, Arena], Case]] = (draw_case,)) -> Drawn:
    """``count`` random cases, made by the makers in turn; the same seed gives the same cases."""
    rng = np.random.default_rng(seed)
    arena = Arena(rng, ARENA_BYTES)
    cases, starts = [], []
    for number in range(count):
        starts.append(arena.used)
        cases.append(makers[number % len(makers)](rng, arena))
    before = arena.bytes[: arena.used + 64]
    expected = before.copy()
    for case in cases:
        expect(case, before, expected)
    return Drawn(cases, starts, before, expected)


def launches(drawn: Drawn, arena_address: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments, kernels, grids and orders of all launches of the cases, for an arena at an address."""
    rows, kernels, grids, orders = [], [], [], []
    for case in drawn.cases:
        own = arguments(case, arena_address)
        rows.append(own)
        kernels.append(L.KERNELS.index(case.kernel))
        grids.append(case.grid)
        orders.append(case.order)
        if case.uncovered_grid:
            rows.append(own)
            kernels.append(L.KERNELS.index("hgg_zero_uncovered"))
            grids.append(case.uncovered_grid)
            orders.append(case.order)
    return (
        np.array(rows, L.ARGUMENTS),
        np.array(kernels, np.int32),
        np.array(grids, np.uint32),
        np.array(orders, np.int32),
    )


def differences(drawn: Drawn, got: np.ndarray, most: int = 5) -> list[str]:
    """Where the arena ``got`` is not what it must be; empty when all is right.

    NaN bits in ``got`` may be changed.
    """
    for case in drawn.cases:
        same_nans(case, drawn.expected, got)
    wrong = np.flatnonzero(got != drawn.expected)
    said: list[str] = []
    seen: set[int] = set()
    for offset in wrong.tolist():
        number = int(np.searchsorted(drawn.starts, offset, side="right")) - 1
        if number in seen or len(said) == most:
            continue
        seen.add(number)
        case = drawn.cases[max(number, 0)]
        said.append(
            f"case {number} ({case.mode}, {case.kernel}, {case.batches} x {case.groups} of {case.total} "
            f"groups, R {case.extent}, order {case.order}): {describe(case, offset)}: "
            f"got {got[offset]:#04x}, expected {drawn.expected[offset]:#04x}, was {drawn.before[offset]:#04x}"
        )
    return said
