"""The error bounds: right results of every type and length are within them, and what people get wrong is not."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipgroupgemm.measure.tolerance import Tolerance, accumulation_bound, largest_finite, tolerance_for, unit_roundoff
from hipgroupgemm.operands.dtypes import DTYPES

NARROW = ("bfloat16", "float16", "float32")


def _sequential(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
    """A @ B summed term by term in `dtype`, each product and each sum rounded: the worst order that anybody uses."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        total = (total + a[:, k : k + 1].astype(dtype) * b[k : k + 1].astype(dtype)).astype(dtype)
    return total


def _operands(rng: np.random.Generator, n: int, dtype: str, positive: bool = False) -> tuple[np.ndarray, np.ndarray]:
    a, b = rng.standard_normal((12, n)), rng.standard_normal((n, 11))
    if positive:
        a, b = abs(a) + 0.1, abs(b) + 0.1
    return a.astype(DTYPES[dtype]), b.astype(DTYPES[dtype])


def _exact(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    return wide_a @ wide_b, abs(wide_a) @ abs(wide_b)


def errors(result: np.ndarray, expected: np.ndarray, magnitude: np.ndarray, tolerance: Tolerance) -> tuple[float, float]:
    """(the largest error of an element in units of its bound, the error of the whole in units of its own): at most 1 is right."""
    with np.errstate(all="ignore"):
        error = np.abs(result.astype(np.float64) - expected)
        worst = float(np.max(np.where(error == 0, 0.0, error / tolerance.elementwise(expected, magnitude))))
        whole = float(np.linalg.norm(error) / np.linalg.norm(expected)) / tolerance.relative
    return (math.inf if math.isnan(worst) else worst), (math.inf if math.isnan(whole) else whole)


@pytest.mark.parametrize("name", DTYPES)
def test_unit_roundoff_is_where_rounding_turns(name: str) -> None:
    u, dtype = unit_roundoff(name), DTYPES[name]
    assert np.float64(1 + 2 * u).astype(dtype).astype(np.float64) == 1 + 2 * u
    if name != "float64":
        assert np.float64(1 + 0.99 * u).astype(dtype).astype(np.float64) == 1
        assert np.float64(1 + 1.01 * u).astype(dtype).astype(np.float64) == 1 + 2 * u


def test_accumulation_bound_is_the_smaller_of_two() -> None:
    u = 2.0**-24
    assert accumulation_bound(0) == 0
    assert accumulation_bound(1) == pytest.approx(u, rel=1e-6)
    assert accumulation_bound(50) == pytest.approx(50 * u / (1 - 50 * u))
    assert accumulation_bound(10_000) == pytest.approx(math.expm1(10 * 100 * u + 10_000 * u * u / (1 - u)))
    assert accumulation_bound(10_000) < 10_000 * u / (1 - 10_000 * u)
    assert accumulation_bound(10_000, "float64") < 1e-12
    with pytest.raises(ValueError, match="length=-1"):
        accumulation_bound(-1)


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_accumulation_bound_grows_with_the_length(one: int, two: int) -> None:
    assert (one <= two) == (accumulation_bound(one) <= accumulation_bound(two)) or one == two


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("n", [1, 2, 33, 700, 5000])
@pytest.mark.parametrize("name", [*NARROW, "float64"])
def test_right_results_pass(name: str, n: int, positive: bool) -> None:
    """Positive entries add rounding errors of one sign; the relative bound is for zero means, so only elements are judged there."""
    a, b = _operands(np.random.default_rng(), n, name, positive)
    wide = np.float64 if name == "float64" else np.float32
    expected, magnitude = _exact(a, b)
    for result in (_sequential(a, b, wide), a.astype(wide) @ b.astype(wide)):
        worst, whole = errors(result.astype(DTYPES[name]), expected, magnitude, tolerance_for(name, n, np.dtype(wide).name))
        assert worst <= 1
        assert positive or whole <= 1


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_right_8_bit_results_pass_down_to_subnormals(name: str) -> None:
    rng = np.random.default_rng()
    for size in (1.0, 1e-3):
        a, b = _operands(rng, 200, name)
        b = (b.astype(np.float32) * np.float32(size / 14)).astype(DTYPES[name])
        expected, magnitude = _exact(a, b)
        result = (a.astype(np.float32) @ b.astype(np.float32)).astype(DTYPES[name])
        assert errors(result, expected, magnitude, tolerance_for(name, 200))[0] <= 1


@pytest.mark.parametrize("name", NARROW)
def test_one_wrong_element_is_found(name: str) -> None:
    a, b = _operands(np.random.default_rng(), 1000, name)
    expected, magnitude = _exact(a, b)
    tolerance = tolerance_for(name, 1000)
    result = (a.astype(np.float32) @ b.astype(np.float32)).astype(DTYPES[name])
    for wrong in (0.0, math.nan, math.inf, float(expected[4, 7]) + 3 * float(tolerance.elementwise(expected, magnitude)[4, 7])):
        spoilt = result.copy()
        spoilt[4, 7] = wrong
        assert errors(spoilt, expected, magnitude, tolerance)[0] > 1


@pytest.mark.parametrize("n", [64, 512, 2048])
def test_bfloat16_accumulation_is_found(n: int) -> None:
    a, b = _operands(np.random.default_rng(), n, "bfloat16")
    expected, magnitude = _exact(a, b)
    assert max(errors(_sequential(a, b, ml_dtypes.bfloat16), expected, magnitude, tolerance_for("bfloat16", n))) > 1


def test_float32_accumulation_of_float64_is_found() -> None:
    a, b = _operands(np.random.default_rng(), 300, "float64")
    expected, magnitude = _exact(a, b)
    result = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float64)
    assert max(errors(result, expected, magnitude, tolerance_for("float64", 300, "float64"))) > 1


def test_a_small_loss_everywhere_is_found_by_the_norm() -> None:
    """Each element may be a little off; all of them by a tenth of their bounds may not."""
    a, b = _operands(np.random.default_rng(), 3000, "float32")
    expected, magnitude = _exact(a, b)
    tolerance = tolerance_for("float32", 3000)
    result = expected + 0.1 * tolerance.elementwise(expected, magnitude)
    worst, whole = errors(result, expected, magnitude, tolerance)
    assert worst <= 1 < whole


def test_a_published_fault_is_found() -> None:
    """A relative error of 6e-2 where 2e-3 is right, as a known bf16 weight gradient has it."""
    rng = np.random.default_rng()
    a, b = _operands(rng, 160, "bfloat16")
    expected, magnitude = _exact(a, b)
    good = expected.astype(ml_dtypes.bfloat16)
    bad = (expected * (1 + 0.06 * rng.choice([-1, 1], expected.shape))).astype(ml_dtypes.bfloat16)
    tolerance = tolerance_for("bfloat16", 160)
    assert max(errors(good, expected, magnitude, tolerance)) <= 1
    assert errors(good, expected, magnitude, tolerance)[1] * tolerance.relative == pytest.approx(1.65e-3, rel=0.2)
    assert max(errors(bad, expected, magnitude, tolerance)) > 1


def test_tf32_is_allowed_only_where_it_was_asked_for() -> None:
    a, b = _operands(np.random.default_rng(), 500, "float32")
    expected, magnitude = _exact(a, b)
    cut_a, cut_b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    result = cut_a @ cut_b
    assert max(errors(result, expected, magnitude, tolerance_for("float32", 500, "tf32"))) <= 1
    assert max(errors(result, expected, magnitude, tolerance_for("float32", 500))) > 1
    with pytest.raises(ValueError, match="compute_type='int8'"):
        tolerance_for("float32", 5, "int8")


@pytest.mark.parametrize("name", DTYPES)
def test_the_largest_finite_number_is_the_last(name: str) -> None:
    largest = largest_finite(name)
    assert np.float64(largest).astype(DTYPES[name]).astype(np.float64) == largest
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.nextafter(DTYPES[name].type(largest), DTYPES[name].type(np.inf)))
