"""The judge of benchmark results: products in float64 straight from a class's definition, group by group, on the host.

It shares no code with any backend. Of large problems it checks a sample: the largest group, the smallest that is not empty and a random
one, and of a very large group some rows; that nothing is left unwritten, and that uncovered rows and empty slabs are exact zeros, it
always checks in full.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hipgroupgemm.benchmark.baselines import Operands
from hipgroupgemm.benchmark.labs import Lab
from hipgroupgemm.measure.tolerance import Comparison, Tolerance, magnitude_bound, tolerance_for

__all__ = ["Judge", "CheckResult"]

_ALL_GROUPS_FLOPS = 2 * 10**9
_GROUP_FLOPS = 4 * 10**9

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What came out of one check.

    Attributes:
        error: relative Frobenius error over what was checked. limit: its bound.
        fault: "" for a right result, else what is wrong. checked: how much was looked at, in words.
    """

    error: float
    limit: float
    fault: str
    checked: str


class Judge:
    """Checks results of one problem; the exact result is computed once.

    Args:
        lab, operands: the problem.
        seed: which random group is looked at, of problems that are too large to check in full.
        limit: the floating-point operations up to which all groups are checked.
    """

    def __init__(self, lab: Lab, operands: Operands, seed: int = 0, limit: int = _ALL_GROUPS_FLOPS) -> None:
        self._lab, self._operands = lab, operands
        sizes = operands.host_sizes
        self._ends = np.cumsum(sizes, dtype=np.int64)
        rng = np.random.default_rng(seed)
        filled = np.flatnonzero(sizes)
        _, columns = (operands.lhs.shape[1], operands.out.shape[-1])
        total = 2 * int(self._ends[-1]) * operands.lhs.shape[1] * columns
        groups = filled
        if total > limit and filled.size > 3:
            picks = {int(np.argmax(sizes)), int(filled[np.argmin(sizes[filled])]), int(rng.choice(filled))}
            groups = np.array(sorted(picks))
        self.checked = f"{'all' if groups.size == filled.size else groups.size} of {filled.size} groups"
        length = operands.kind.contraction_length(operands.shape, sizes)
        double = np.dtype(np.float64) in (operands.lhs.dtype, operands.rhs.dtype)
        self.tolerance: Tolerance = tolerance_for(operands.out.dtype, length, "float64" if double else "float32")
        self._expected = [(int(group), *self._exact(int(group), rng)) for group in groups]

    def _exact(self, group: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """(rows of the group's result that are checked, their exact values, the bound of |A| |B|)."""
        o = self._operands
        rows = slice(int(self._ends[group] - o.host_sizes[group]), int(self._ends[group]))
        lhs = self._lab.to_host(o.lhs[rows])
        rhs = self._lab.to_host(o.rhs[rows] if o.contracting else o.weights[group])
        lhs = lhs.T if o.contracting else lhs
        picked = np.arange(lhs.shape[0])
        most = max(_GROUP_FLOPS // (2 * rhs.size), 16)
        if picked.size > most:
            picked = np.sort(rng.choice(picked, most, replace=False))
        a, b = lhs[picked].astype(np.float64), rhs.astype(np.float64)
        return picked, a @ b, magnitude_bound(a, b)

    def check(self, out: Any) -> CheckResult:
        """The verdict on a result that lies on the lab's device."""
        o, result = self._operands, self._lab.to_host(out)
        comparison = Comparison(self.tolerance)
        for group, picked, expected, magnitude in self._expected:
            where = f"group {group}"
            if o.contracting:
                part = result[group]
            else:
                part = result[int(self._ends[group] - o.host_sizes[group]) : int(self._ends[group])]
            comparison.add(part[picked], expected, magnitude, where)
        if o.contracting:
            for group in np.flatnonzero(o.host_sizes == 0).tolist():
                comparison.add(result[group], np.zeros(result[group].shape), 0.0, f"the slab of empty group {group}")
        else:
            tail = result[int(self._ends[-1]) :]
            comparison.add(tail, np.zeros(tail.shape), 0.0, "rows that no group covers")
        fault = comparison.verdict()
        if not fault and np.isnan(result).any():
            at = tuple(int(i) for i in np.argwhere(np.isnan(result))[0])
            fault = f"NaN at {at}: not written, or computed from what is not in its group"
        return CheckResult(comparison.relative_error, self.tolerance.relative, fault, self.checked)
