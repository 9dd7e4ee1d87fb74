"""How wrong a right result may be: error bounds from the element types and the length of the sum, never from what happens to pass.

An element of P = A B is a sum of `length` products. With u the unit roundoff of the accumulator, every order of summation obeys

    |fl(P) - P| <= gamma_length * (|A| |B|),    gamma_n = n u / (1 - n u)

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1). For rounding errors that are independent and of mean zero,

    |fl(P) - P| <= gamma~_n * (|A| |B|),    gamma~_n = exp(lambda sqrt(n) u + n u^2 / (1 - u)) - 1

holds with probability at least 1 - 2 n exp(-lambda^2 (1 - u)^2 / 2) an element (Higham and Mary, SIAM J. Sci. Comput. 41 (2019), theorem
3.1). With lambda = 10 that is wrong for less than one element in 10^16 even for sums of 10^5 products, so the smaller of the two is taken.
The result is rounded once more to the output type, which adds u_out * |P|, or half the smallest subnormal number.

The relative Frobenius norm of the error is far smaller, since signs mix. For operands with independent entries of mean zero the partial sum
of j products has variance proportional to j, so n rounding errors of at most u each add up to at most u sqrt(n / 2) of the result's norm in
the mean square; a bound of sqrt(n) u leaves room for the products' own roundings. `Tolerance.relative` is that, plus u_out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from hipgroupgemm.operands.dtypes import dtype_of

__all__ = ["Tolerance", "accumulation_bound", "largest_finite", "tolerance_for", "unit_roundoff"]

LAMBDA = 10.0
_TF32_INPUT = 2.0**-10  # tf32 keeps 10 bits after the leading one; hardware may cut the rest off instead of rounding

Array = np.ndarray[Any, Any]


@functools.lru_cache(64)
def _info(name: str) -> tuple[float, float]:
    info: Any = ml_dtypes.finfo(dtype_of(name))  # type: ignore[no-untyped-call]
    return float(info.eps) / 2, float(info.smallest_subnormal) / 2


def unit_roundoff(dtype: Any) -> float:
    """u: the largest relative error of rounding a number to nearest in the type's normal range, half the distance from 1 to the next."""
    return _info(dtype_of(dtype).name)[0]


def largest_finite(dtype: Any) -> float:
    """The type's largest finite number."""
    return float(ml_dtypes.finfo(dtype_of(dtype)).max)  # type: ignore[no-untyped-call]


def accumulation_bound(length: int, accumulate: Any = "float32") -> float:
    """The factor on (|A| |B|) that bounds the error of a sum of `length` products, the smaller of gamma_n and gamma~_n above; infinite
    where neither says anything."""
    if length < 0:
        raise ValueError(f"length={length}: wanted at least 0")
    u = unit_roundoff(accumulate)
    certain = length * u / (1 - length * u) if length * u < 1 else math.inf
    exponent = LAMBDA * math.sqrt(length) * u + length * u * u / (1 - u)
    return min(certain, math.expm1(exponent) if exponent < 700 else math.inf)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What a right result may differ from the exact one.

    Attributes:
        accumulation: the factor on (|A| |B|)_ij.
        rounding: the factor on |P_ij|: u of the output type.
        smallest: the absolute error of a result below the output type's normal range.
        relative: the bound of ||error||_F / ||P||_F for operands with independent entries of mean zero.
    """

    accumulation: float
    rounding: float
    smallest: float
    relative: float

    def elementwise(self, expected: Array, magnitude: Array) -> Array:
        """The bound of every element's error, given P and a bound of (|A| |B|) as float64."""
        rounded = self.rounding * (np.abs(expected) + self.accumulation * magnitude)
        bound: Array = self.accumulation * magnitude + rounded + self.smallest
        return bound


def tolerance_for(output: Any, length: int, compute_type: str = "float32") -> Tolerance:
    """The tolerance of products that sum `length` terms, further addends (beta * c, a bias) included, and are rounded once to the output
    type. The check's own float64 accumulation is allowed for, so that float64 results are checked fairly too."""
    dtype = dtype_of(output, "output")
    accumulator = "float64" if compute_type == "float64" else "float32"
    u, smallest = _info(dtype.name)
    accumulation = accumulation_bound(length, accumulator) + accumulation_bound(length, "float64")
    relative = math.sqrt(length) * (unit_roundoff(accumulator) + unit_roundoff("float64")) + u
    if compute_type == "tf32":
        inputs = 2 * _TF32_INPUT + _TF32_INPUT**2
        accumulation += inputs * (1 + accumulation)
        relative += inputs
    elif compute_type not in ("float32", "float64"):
        raise ValueError(f"compute_type={compute_type!r}: wanted float32, float64 or tf32")
    return Tolerance(accumulation, u, smallest, relative)
