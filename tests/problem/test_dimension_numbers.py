"""Dimension numbers: what JAX refuses is refused with a TypeError, what JAX takes gives JAX's shapes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from dimension_cases import WRONG, random_case
from generators import FLOAT8S, FLOATS, FORWARD, Mode, Numbers, dtype_of
from jax_judge import enable_x64, numbers_for_jax

import hipgroupgemm as hgg


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_what_jax_refuses_is_a_type_error_that_says_what_is_wanted(case):
    lhs, rhs = np.ones(case.lhs, np.float32), np.ones(case.rhs, np.float32)
    sizes = np.ones(case.sizes, case.sizes_dtype)
    theirs = jax.lax.RaggedDotDimensionNumbers(case.dims, case.ragged, case.group)
    with pytest.raises(TypeError):
        jax.lax.ragged_dot_general(lhs, rhs, sizes, ragged_dot_dimension_numbers=theirs)
    ours = Numbers(case.dims, case.ragged, case.group)
    for function in (hgg.ragged_dot_general, hgg.ragged_dot_reference, hgg.config_for_ragged_dot):
        for numbers in (ours, theirs):
            with pytest.raises(TypeError) as caught:
                function(lhs, rhs, sizes, numbers)
            for word in case.words:
                assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_out_shapes_are_those_of_jax_eval_shape(mode, rng):
    for _ in range(60):
        case = random_case(rng, mode, empty=True)
        wanted = jax.eval_shape(
            lambda lhs, rhs, sizes, numbers=case.numbers: jax.lax.ragged_dot_general(
                lhs, rhs, sizes, ragged_dot_dimension_numbers=numbers_for_jax(numbers)
            ),
            jax.ShapeDtypeStruct(case.lhs_shape, np.float32),
            jax.ShapeDtypeStruct(case.rhs_shape, np.float32),
            jax.ShapeDtypeStruct(case.sizes.shape, np.int32),
        )
        lhs, rhs = np.ones(case.lhs_shape, np.float32), np.ones(case.rhs_shape, np.float32)
        for function in (hgg.ragged_dot_general, hgg.ragged_dot_reference):
            got = function(lhs, rhs, case.sizes, case.numbers)
            assert got.shape == wanted.shape, case
            assert got.dtype == wanted.dtype


@pytest.mark.parametrize("lhs", [*FLOATS, *FLOAT8S])
def test_out_types_are_those_of_jax_for_every_pair(lhs):
    with enable_x64():
        for rhs in (*FLOATS, *FLOAT8S):
            for preferred in (None, "float32", "bfloat16", "float64", "float16"):
                arguments = (np.ones((3, 2), dtype_of(lhs)), np.ones((2, 2, 4), dtype_of(rhs)), np.array([1, 2], np.int32))
                kind = None if preferred is None else dtype_of(preferred)

                def theirs(*arrays, kind=kind):
                    return jax.lax.ragged_dot(*arrays, preferred_element_type=kind)

                specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments]
                try:
                    wanted = jax.eval_shape(theirs, *specs).dtype
                except TypeError:
                    with pytest.raises(TypeError, match="lhs") as caught:
                        hgg.ragged_dot(*arguments, preferred_element_type=kind)
                    assert lhs in str(caught.value)
                    assert rhs in str(caught.value)
                    continue
                assert hgg.ragged_dot(*arguments, preferred_element_type=kind).dtype == wanted, (lhs, rhs, preferred)


def test_ranks_that_ragged_dot_does_not_take():
    for shapes in [((2, 4, 3), (2, 3, 5), (2,)), ((4, 3), (3, 5), (2,)), ((4, 3), (2, 3, 5), (1, 2)), ((3,), (2, 3, 5), (2,))]:
        lhs, rhs, sizes = (np.ones(shape, kind) for shape, kind in zip(shapes, ("f4", "f4", "i4"), strict=True))
        with pytest.raises(TypeError, match=r"ragged_dot: got lhs .*wanted \(m, k\), \(g, k, n\) and \(g,\)") as caught:
            hgg.ragged_dot(lhs, rhs, sizes)
        assert str(shapes[0]) in str(caught.value)


def test_dimension_numbers_are_values():
    lists = Numbers([[[1], [1]], [[], []]], [0], [0])
    assert lists == FORWARD
    assert hash(lists) == hash(FORWARD)
    assert Numbers((((np.int64(1),), (np.int32(1),)), ((), ())), (np.uint8(0),), (0,)) == FORWARD
    assert Numbers.of(numbers_for_jax(FORWARD)) == FORWARD
    assert Numbers.of(FORWARD) is FORWARD
    assert Numbers((((2,), (2,)), ((0,), (1,))), (1,), (0,)) != FORWARD
    with pytest.raises(AttributeError):
        FORWARD.lhs_ragged_dimensions = (1,)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (((1,), (0,), (0,)), "dot_dimension_numbers"),
        ((None, (0,), (0,)), "dot_dimension_numbers"),
        (((((1,), (1,)),), (0,), (0,)), "dot_dimension_numbers"),
        (((((1.5,), (1,)), ((), ())), (0,), (0,)), "lhs_contracting"),
        (((((True,), (1,)), ((), ())), (0,), (0,)), "lhs_contracting"),
        (((((1,), "a"), ((), ())), (0,), (0,)), "rhs_contracting"),
        (((((1,), (1,)), ((), ())), 0, (0,)), "lhs_ragged_dimensions"),
        (((((1,), (1,)), ((), ())), (0,), None), "rhs_group_dimensions"),
    ],
)
def test_what_is_no_sequence_of_axes(arguments, word):
    with pytest.raises(TypeError, match=word):
        Numbers(*arguments)


@pytest.mark.parametrize("numbers", [None, 3, "forward", (((1,), (1,)), ((), ()))])
def test_what_is_no_dimension_numbers(numbers):
    with pytest.raises(TypeError, match="ragged_dot_dimension_numbers"):
        hgg.ragged_dot_general(np.ones((4, 3), "f4"), np.ones((2, 3, 5), "f4"), np.array([2, 2]), numbers)


def test_group_offset_needs_no_equal_counts_but_never_fewer_sizes():
    lhs, rhs = np.ones((4, 3), "f4"), np.ones((3, 3, 5), "f4")
    with pytest.raises(TypeError, match=r"group_sizes: got 2 groups, but rhs \(3, 3, 5\) has 3"):
        hgg.ragged_dot(lhs, rhs, np.array([1, 1]), group_offset=0)
    with pytest.raises(TypeError, match="give group_offset"):
        hgg.ragged_dot(lhs, rhs, np.array([1, 1, 1, 1]))
    assert hgg.ragged_dot(lhs, rhs, np.array([1, 1, 1, 1]), group_offset=1).shape == (4, 5)
