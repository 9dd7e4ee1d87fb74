"""How wrong a right result may be, from the element types and the length of the sum, and the comparison that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """The largest relative error of rounding to nearest in a type's normal range."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def accumulator_of(operands: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """The type that products of these operand types are summed in."""
    return np.dtype(np.float64 if np.dtype(np.float64) in operands else np.float32)


def error_bound(
    value: np.ndarray[Any, Any], magnitude: np.ndarray[Any, Any], length: int, operands: Sequence[np.dtype[Any]], out: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """How far a right result may be from the exact one, element by element.

    A sum of `length` products in a type of roundoff u is off by at most length * u times the sum of the products' magnitudes
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), whatever the order; scaling by alpha and beta, adding c and bias
    round a few times more; and the result is rounded once to out's type, subnormals included.
    """
    bound = (length + 4) * unit_roundoff(accumulator_of(operands)) * np.abs(magnitude)
    bound = bound + unit_roundoff(out) * (np.abs(value) + bound)
    return bound + float(ml_dtypes.finfo(out).smallest_subnormal) / 2


def assert_close(
    result: np.ndarray[Any, Any],
    value: np.ndarray[Any, Any],
    magnitude: np.ndarray[Any, Any],
    length: int,
    operands: Sequence[np.dtype[Any]],
) -> None:
    """Fails where the result is off by more than `error_bound`, or not finite, or of another shape, or inexact as a whole.

    As a whole: the errors of random operands have random signs, so the norm of all of them is at most about sqrt(length) * u of the
    result's. That finds sums in a narrower type, which the bound of single elements must let pass where sums are long.
    """
    assert result.shape == value.shape, f"shape {result.shape}, wanted {value.shape}"
    got = result.astype(np.float64)
    bound = error_bound(value, magnitude, length, operands, result.dtype)
    wrong = ~(np.abs(got - value) <= bound)  # NaN counts as wrong
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} elements are wrong; the first at {at}: got {got[at]!r}, wanted {value[at]!r} "
            f"within {bound[at]:.3g}"
        )
    if result.size >= 64:
        # the sum of n terms of random signs is about 1 / sqrt(n) of the sum of their magnitudes; where the terms happen to cancel, their
        # errors need not
        norm, typical = np.linalg.norm(value), np.linalg.norm(magnitude) / np.sqrt(max(length, 1))
        allowed = (np.sqrt(length) + 4) * unit_roundoff(accumulator_of(operands)) * max(norm, typical) + unit_roundoff(result.dtype) * norm
        allowed += np.sqrt(result.size) * float(ml_dtypes.finfo(result.dtype).smallest_subnormal) / 2
        error = np.linalg.norm(got - value)
        assert error <= allowed, f"the error's norm is {error:.3g}, at most {allowed:.3g} is right for {result.size} random elements"
