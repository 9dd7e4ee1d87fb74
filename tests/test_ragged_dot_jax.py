"""JAX's CPU implementation as the outside judge of values: all modes, all dimension numbers, sizes, types and precisions.

DESIGN.md's "where it differs from the rules" is avoided: no NaN, no wrong sizes, 8-bit sizes widened for JAX, no offsets, c or bias.
"""

from __future__ import annotations

import contextlib
import itertools

import jax
import numpy as np
import pytest
from comparison import assert_close
from dimension_cases import random_case
from generators import FLOATS, FORWARD, SIZE_TYPES, WEIGHT_GRADIENT, Mode, dtype_of, random_sizes, random_values
from jax_judge import enable_x64, numbers_for_jax

import hipgroupgemm as hgg


class JudgeFails(Exception):
    """XLA made a program of right operands that its own verifier refuses: seen with some orders of several axes (JAX 0.10, CPU)."""


_failures: list[str] = []


def jax_ragged_dot(lhs, rhs, sizes, numbers):
    """JAX's result, and the sum of its terms' magnitudes, both in float64 from the same operand values."""
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(np.int32)
    with enable_x64():

        def call(*operands):
            return np.asarray(jax.lax.ragged_dot_general(*operands, sizes, ragged_dot_dimension_numbers=numbers_for_jax(numbers)))

        wide = [array.astype(np.float64) for array in (lhs, rhs)]
        try:
            return call(*wide), call(*(abs(array) for array in wide))
        except jax.errors.JaxRuntimeError as error:
            if "hlo verifier" not in str(error):
                raise
            raise JudgeFails(str(error)) from error


def jax_type(lhs, rhs, sizes, numbers, preferred):
    """The shape and type of JAX's result, without computing it."""

    def call(*operands):
        return jax.lax.ragged_dot_general(
            *operands, ragged_dot_dimension_numbers=numbers_for_jax(numbers), preferred_element_type=preferred
        )

    with enable_x64():
        return jax.eval_shape(call, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (lhs, rhs, sizes)))


def length_of(lhs, numbers):
    return int(np.prod([lhs.shape[axis] for axis in numbers.dot_dimension_numbers[0][0]], dtype=np.int64))


def compare(lhs, rhs, sizes, numbers, preferred=None):
    """This package in all its forms against JAX in float64, its type and shape against JAX's for these operands."""
    try:
        exact, magnitude = jax_ragged_dot(lhs, rhs, sizes, numbers)
    except JudgeFails as error:
        _failures.append(str(error))
        assert len(_failures) <= 5, f"JAX judges too little: {_failures}"  # of some hundred cases
        return
    wanted = jax_type(lhs, rhs, sizes, numbers, preferred)
    length, kinds = length_of(lhs, numbers), (lhs.dtype, rhs.dtype)
    ours = hgg.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=preferred)
    assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)
    assert_close(ours, exact, magnitude, length, kinds)
    out = np.full(wanted.shape, np.nan, wanted.dtype)
    assert hgg.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=preferred, out=out) is out
    np.testing.assert_array_equal(out.astype(np.float64), ours.astype(np.float64))
    wide = hgg.ragged_dot_reference(lhs, rhs, sizes, numbers, accumulate=np.float64, preferred_element_type=np.float64)
    assert_close(wide, exact, magnitude, length, (np.dtype(np.float64),))


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_all_dimension_numbers(mode, rng):
    """Several batch, contracting and free axes, the ragged one anywhere, sizes (g,) or with the full prefix."""
    for _ in range(25):
        case = random_case(rng, mode)
        with naming(case):
            compare(random_values(rng, case.lhs_shape, "float32"), random_values(rng, case.rhs_shape, "float32"), case.sizes, case.numbers)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_dimension_numbers_with_empty_axes(mode, rng):
    for _ in range(12):
        case = random_case(rng, mode, empty=True, largest=2)
        with naming(case):
            compare(random_values(rng, case.lhs_shape, "float32"), random_values(rng, case.rhs_shape, "float32"), case.sizes, case.numbers)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_types(mode, rng):
    """Every pair of operand types with every output type; one shape a mode, for JAX compiles each."""
    case = random_case(rng, mode)
    for lhs_type, rhs_type, preferred in itertools.product(FLOATS, FLOATS, (None, *FLOATS)):
        lhs, rhs = random_values(rng, case.lhs_shape, lhs_type), random_values(rng, case.rhs_shape, rhs_type)
        with naming((case, lhs_type, rhs_type, preferred)):
            compare(lhs, rhs, case.sizes, case.numbers, None if preferred is None else dtype_of(preferred))


@pytest.mark.parametrize("kind", SIZE_TYPES)
@pytest.mark.parametrize("numbers", [FORWARD, WEIGHT_GRADIENT], ids=["forward", "weight gradient"])
def test_size_types(kind, numbers, rng):
    """Rows past what the size type could sum up to itself: 300 rows in groups of 8-bit sizes."""
    sizes = random_sizes(rng, 300, 9, full=True)
    sizes = np.minimum(sizes, min(np.iinfo(kind).max, 300)).astype(kind)
    lhs = random_values(rng, (300, 17), "float32")
    rhs = random_values(rng, (9, 17, 11) if numbers is FORWARD else (300, 11), "float32")
    compare(lhs, rhs, sizes, numbers)


@pytest.mark.parametrize("kind", FLOATS)
def test_larger_products(kind, rng):
    """Long sums of odd lengths, where the accumulation type shows."""
    sizes = random_sizes(rng, 509, 7)
    compare(random_values(rng, (509, 1021), kind), random_values(rng, (7, 1021, 67), kind), sizes, FORWARD)
    compare(random_values(rng, (509, 65), kind), random_values(rng, (509, 67), kind), sizes, WEIGHT_GRADIENT)


def test_16_bit_types_accumulate_in_float32(rng):
    """4096 ones and more: a 16-bit accumulator would stop at 2048 (float16) or 256 (bfloat16)."""
    for kind in ("float16", "bfloat16"):
        lhs, rhs = np.ones((2, 4096), dtype_of(kind)), np.full((1, 4096, 3), 0.5, dtype_of(kind))
        np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, np.array([2])).astype(np.float64), 2048.0)
        tokens = np.ones((4096, 3), dtype_of(kind))
        got = hgg.ragged_dot_general(tokens, tokens, np.array([4096]), WEIGHT_GRADIENT)
        np.testing.assert_array_equal(got.astype(np.float64), 4096.0)


def test_the_basic_function_is_jax_s_too(rng):
    lhs, rhs, sizes = random_values(rng, (37, 19), "float32"), random_values(rng, (4, 19, 23), "float32"), random_sizes(rng, 37, 4)
    exact, magnitude = jax_ragged_dot(lhs, rhs, sizes, FORWARD)
    assert_close(hgg.ragged_dot(lhs, rhs, sizes), exact, magnitude, 19, (lhs.dtype,))
    assert_close(hgg.ragged_dot(lhs, rhs, group_sizes=sizes.tolist()), exact, magnitude, 19, (lhs.dtype,))


PRECISIONS = [None, "default", "high", "highest", jax.lax.Precision.HIGHEST, ("high", "default"), jax.lax.DotAlgorithmPreset.F32_F32_F32]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_jax_s_precisions_are_taken(precision, rng):
    lhs, rhs, sizes = random_values(rng, (11, 19), "float32"), random_values(rng, (3, 19, 5), "float32"), random_sizes(rng, 11, 3)
    exact, magnitude = jax_ragged_dot(lhs, rhs, sizes, FORWARD)
    assert_close(hgg.ragged_dot(lhs, rhs, sizes, precision), exact, magnitude, 19, (lhs.dtype,))


@contextlib.contextmanager
def naming(what):
    """Says which of many random cases failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(str(what)) if hasattr(error, "add_note") else print(what)
        raise


def test_results_are_of_the_callers_framework_whoever_called_before(rng):
    """Calls of one layout share what is remembered, but for the kind of their result."""
    import jax

    lhs, rhs = rng.standard_normal((5, 4)).astype(np.float32), rng.standard_normal((2, 4, 6)).astype(np.float32)
    sizes = np.array([2, 3], np.int32)
    theirs = [jax.numpy.asarray(array) for array in (lhs, rhs, sizes)]
    for first, second in ((theirs, (lhs, rhs, sizes)), ((lhs, rhs, sizes), theirs)):
        hgg.clear_plan_cache()
        for _ in range(3):
            for operands in (first, second, second):
                result = hgg.ragged_dot(*operands)
                assert isinstance(result, jax.Array if operands is theirs else np.ndarray)
                np.testing.assert_allclose(np.asarray(result)[:2], lhs[:2] @ rhs[0], rtol=1e-5, atol=1e-5)
