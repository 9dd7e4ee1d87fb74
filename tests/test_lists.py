"""Operands as lists of one array per group, on the CPU: as the stacked array bit for bit, and refused by name where they do not fit."""

from __future__ import annotations

import dataclasses
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from generators import FORWARD_BATCHED, WEIGHT_GRADIENT, Layout, ListOperand, Mode, make_problem, random_layout, random_sizes
from hypothesis import given, settings

import hipgroupgemm as hgg
from hipgroupgemm.operands.arrays import ArraySpec

NON_CONTRACTING, CONTRACTING = Mode.NON_CONTRACTING, Mode.CONTRACTING
RAGGED = pytest.mark.parametrize("mode", [NON_CONTRACTING, CONTRACTING], ids=lambda mode: mode.name)


def problem_of(rng, mode, *, rows=23, groups=4, listed=True, **others):
    """A small problem with lists: NaN where nothing may be read, out NaN before the call."""
    m, n, k = (rows, 7, 5) if mode is NON_CONTRACTING else (5, 7, rows)
    return make_problem(rng, mode, m, n, k, random_sizes(rng, rows, groups), listed=listed, **others)


def list_name(mode):
    return "rhs" if mode is NON_CONTRACTING else "out"


def stacked(problem):
    """The same problem with one array for each list."""
    operands = {name: getattr(problem, name) for name in ("rhs", "out", "c")}
    one = {name: operand.stacked() for name, operand in operands.items() if isinstance(operand, ListOperand)}
    changed = dataclasses.replace(problem, **one)
    if problem.c is not None and problem.c is problem.out:
        changed.c = changed.out
    return changed


def by_plan(lhs, rhs, group_sizes=None, ragged_dot_dimension_numbers=None, **others):
    """`plan.execute` with ragged_dot_general's signature."""
    made = {name: others[name] for name in ("offs", "out", "c", "bias", "alpha", "beta", "group_offset") if name in others}
    for config_only in ("group_count", "preferred_element_type"):
        if config_only in others:
            made[config_only] = others.pop(config_only)
    config = hgg.config_for_ragged_dot(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, **made)
    with hgg.GroupedMatmulPlan(config) as plan:
        return plan.execute(lhs, rhs, group_sizes, **others)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([NON_CONTRACTING, CONTRACTING]), st.sampled_from(["float32", "bfloat16", "float64"]))
def test_lists_are_stacked_arrays_bit_for_bit(seed, mode, dtype):
    rng = np.random.default_rng(seed)
    groups, rows = int(rng.integers(1, 7)), int(rng.integers(0, 40))
    m, n, k = (rows, *rng.integers(0, 9, 2)) if mode is NON_CONTRACTING else (*rng.integers(0, 9, 2), rows)
    c = None if rng.random() < 0.4 else str(rng.choice(["array", "out"]))
    batch = int(rng.integers(1, 4)) if rng.random() < 0.3 else None
    layouts = {name: random_layout(rng, 3 if batch is None else 4) for name in ("out", "c") if mode is CONTRACTING}
    if mode is NON_CONTRACTING:
        layouts = {"rhs": random_layout(rng, 3 if batch is None else 4)}
    others = {"alpha": float(rng.choice([1, 0, -1.5]))} if rng.random() < 0.4 else {}
    others |= {} if c is None else {"beta": float(rng.choice([1, 0, -0.5]))}
    if rng.random() < 0.3:
        others |= {"group_offset": int(rng.integers(0, groups)), "rhs_groups" if mode is NON_CONTRACTING else "group_count": 1}
    sizes = random_sizes(rng, rows, groups) if rows else np.zeros(groups, np.int64)
    problem = make_problem(rng, mode, int(m), int(n), int(k), sizes, dtype, c=c, batch=batch, layouts=layouts, listed=True, **others)
    one = stacked(problem)
    for function in (hgg.ragged_dot_general, hgg.ragged_dot_reference, by_plan):
        results = []
        for each in (problem, one):
            results.append(each.run(function))
            if c == "out":  # it has changed
                restore(each.out)
        assert results[0].tobytes() == results[1].tobytes(), function


def restore(operand):
    """What the operand was made with."""
    for part, values in (
        zip(operand.parts, operand.values, strict=True) if isinstance(operand, ListOperand) else [(operand, operand.values)]
    ):
        part.array[...] = values


@RAGGED
def test_against_the_reference_in_float64(mode, rng):
    for c in (None, "array", "out"):
        for dtype in ("bfloat16", "float16", "float32"):
            problem_of(rng, mode, dtype=dtype, c=c, beta=0.0 if c is None else -0.5).check()


@RAGGED
def test_the_callers_list_is_read_anew_at_every_call(mode, rng):
    problem = problem_of(rng, mode)
    name = list_name(mode)
    for _ in range(3):
        problem.check()
    for replaced in (1, 3):
        fresh = ListOperand(rng.standard_normal(getattr(problem, name).shape).astype(np.float32))
        mine = getattr(problem, name)
        mine.parts[replaced], mine.array[replaced], mine.values[replaced] = (
            fresh.parts[replaced],
            fresh.array[replaced],
            fresh.values[replaced],
        )
        problem.check()
    mine.array = tuple(mine.array)
    problem.check()


def test_the_result_is_the_callers_list(rng):
    problem = problem_of(rng, CONTRACTING)
    arguments = problem.arguments()
    for out in (problem.out.array, tuple(problem.out.array)):
        assert hgg.ragged_dot_general(**arguments, out=out) is out


def test_ragged_dot_takes_a_list(rng):
    lhs, weights = rng.standard_normal((9, 4)).astype(np.float32), rng.standard_normal((3, 4, 6)).astype(np.float32)
    sizes = np.array([4, 0, 5])
    wanted = hgg.ragged_dot(lhs, weights, sizes)
    np.testing.assert_array_equal(hgg.ragged_dot(lhs, [w.copy() for w in weights], sizes), wanted)
    np.testing.assert_array_equal(hgg.ragged_dot(lhs, tuple(weights), offs=np.cumsum(sizes)), wanted)
    with pytest.raises(TypeError, match="wanted"):
        hgg.ragged_dot(lhs, [weights], sizes)


def test_one_array_may_stand_for_several_groups(rng):
    lhs, w = rng.standard_normal((9, 4)).astype(np.float32), rng.standard_normal((4, 6)).astype(np.float32)
    sizes = np.array([4, 0, 5])
    np.testing.assert_array_equal(hgg.ragged_dot(lhs, [w, w, w], sizes), hgg.ragged_dot(lhs, np.stack([w] * 3), sizes))


def test_jax_arrays_as_a_list(rng):
    jnp = pytest.importorskip("jax.numpy")
    lhs, weights = rng.standard_normal((9, 4)).astype(np.float32), rng.standard_normal((3, 4, 6)).astype(np.float32)
    sizes = np.array([4, 0, 5])
    result = hgg.ragged_dot(jnp.asarray(lhs), [jnp.asarray(w) for w in weights], sizes)
    np.testing.assert_array_equal(np.asarray(result), hgg.ragged_dot(lhs, weights, sizes))


# ---- the config --------------------------------------------------------------------------------------------------------------------


def forward_config(entries):
    return hgg.config_for_ragged_dot(ArraySpec((20, 8), "bfloat16"), entries, ArraySpec((3,), "int32"))


def test_the_config_says_so_and_its_key_keeps_it():
    listed, one = forward_config([ArraySpec((8, 16), "bfloat16")] * 3), forward_config(ArraySpec((3, 8, 16), "bfloat16"))
    assert listed.rhs_listed and listed.key().rhs_listed and listed.key() != one.key()
    assert "rhs_listed" in listed.features() and "rhs_listed" not in one.features()
    assert dataclasses.replace(listed, rhs_listed=False) == one
    assert hgg.GroupedGemmConfig.from_json(listed.to_json()) == listed
    assert listed.flops([5, 6, 7]) == one.flops([5, 6, 7]) and listed.min_bytes([5, 0, 7]) == one.min_bytes([5, 0, 7])
    before = json.loads(one.to_json())
    del before["rhs_listed"], before["out_listed"]  # as it was written before there were lists
    assert hgg.GroupedGemmConfig.from_json(json.dumps(before)) == one


def test_the_alignment_is_the_least_of_all(rng):
    memory = np.zeros(4000, np.uint8)
    start = -memory.ctypes.data % 16

    def at(offset):
        return np.ndarray((8, 16), np.float32, memory.data, start + offset)

    assert forward_config_of(rng, [at(0), at(1024), at(2048)]).rhs_alignment == 16
    assert forward_config_of(rng, [at(0), at(1024 + 4), at(2048)]).rhs_alignment == 4


def forward_config_of(rng, entries):
    return hgg.config_for_ragged_dot(np.zeros((20, 8), np.float32), entries, np.array([4, 4, 4]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rhs_listed": 1}, "rhs_listed=1: must be a bool"),
        ({"out_listed": True}, "out_listed=True: only CONTRACTING"),
        ({"group_count": 0, "group_total": 0, "rhs_listed": True}, "at least one array"),
    ],
)
def test_configs_that_make_no_sense(changes, text):
    with pytest.raises((TypeError, ValueError), match=text):
        dataclasses.replace(forward_config(ArraySpec((3, 8, 16), "bfloat16")), **changes)


def test_a_plan_takes_lists_exactly_where_its_config_has_them(rng):
    problem = problem_of(rng, NON_CONTRACTING)
    one = stacked(problem)
    for mine, other in ((problem, one), (one, problem)):
        config = hgg.config_for_ragged_dot(mine.lhs.array, mine.rhs.array, mine.sizes.array, mine.numbers)
        with hgg.GroupedMatmulPlan(config) as plan:
            plan.execute(mine.lhs.array, mine.rhs.array, mine.sizes.array)
            with pytest.raises((TypeError, ValueError), match="whether rhs is a list"):
                plan.execute(other.lhs.array, other.rhs.array, other.sizes.array)


@RAGGED
def test_tuning_knows_lists(mode, rng):
    problem = problem_of(rng, mode)
    config = hgg.config_for_ragged_dot(problem.lhs.array, problem.rhs.array, problem.sizes.array, problem.numbers, out=problem.out.array)
    with hgg.GroupedMatmulPlan(config) as plan:
        report = plan.autotune([5, 0, 9, 9], repetitions=2, store=False, isolate=False)
    assert report.best.verdict == "ok"


# ---- what does not fit -------------------------------------------------------------------------------------------------------------


def test_lists_that_do_not_fit_together(rng):
    lhs, sizes = np.ones((9, 4), np.float32), np.array([4, 0, 5])
    w = [np.ones((4, 6), np.float32) for _ in range(3)]
    cases = [
        (TypeError, r"rhs\[1\]: has shape \(4, 5\), but rhs\[0\] has \(4, 6\)", [w[0], np.ones((4, 5), np.float32), w[2]]),
        (TypeError, r"rhs\[2\]: has type float64, but rhs\[0\] has float32", [w[0], w[1], np.ones((4, 6))]),
        (ValueError, r"rhs\[2\]: has strides \(4, 16\) .* rhs\[0\] has \(24, 4\)", [w[0], w[1], np.ones((6, 4), np.float32).T]),
        (TypeError, r"rhs\[1\]: got list, wanted an array", [w[0], [1, 2], w[2]]),
        (TypeError, r"rhs\[0\]: got float", [1.0, 2.0, 3.0]),
        (TypeError, "rhs: got an empty list", []),
        (TypeError, "rhs: got an empty tuple", ()),
        (TypeError, r"got 3 groups, but rhs \(2, 4, 6\) has 2", w[:2]),
        (ValueError, r"rhs\[2\]: has shape \(4, 6\) but no memory", [w[0], w[1], ArraySpec((4, 6), "float32")]),
        (ValueError, r"rhs\[0\]: the stride of axis 0 \(-24 bytes\) is negative", [x[::-1] for x in w]),
        (NotImplementedError, r"rhs.*int32", [x.astype(np.int32) for x in w]),
    ]
    for kind, text, rhs in cases:
        for function in (hgg.ragged_dot, hgg.ragged_dot_reference):
            with pytest.raises(kind, match=text):
                function(lhs, rhs, sizes)
    with pytest.raises(ValueError, match=r"rhs\[1\] is on cuda:0, but other arrays of the list are on cpu"):
        hgg.config_for_ragged_dot(lhs, [w[0], ArraySpec((4, 6), "float32", device="cuda:0"), w[2]], sizes)
    with pytest.raises(TypeError, match="lhs: got list"):
        hgg.ragged_dot([lhs], w, sizes)


def test_lists_where_there_are_no_groups(rng):
    lhs, rhs, sizes = np.ones((9, 4), np.float32), np.ones((3, 4, 6), np.float32), np.array([4, 0, 5])
    rows = [np.ones((3, 6), np.float32) for _ in range(3)]
    with pytest.raises(TypeError, match="out: lists go with a contracted ragged axis"):
        hgg.ragged_dot(lhs, rhs, sizes, out=rows)
    with pytest.raises(TypeError, match="rhs: is a list"):
        hgg.ragged_dot_general(lhs, [np.ones(6, np.float32) for _ in range(9)], sizes, WEIGHT_GRADIENT)
    turned = hgg.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (0,), (1,))
    with pytest.raises(TypeError, match="groups are axis 0"):
        hgg.ragged_dot_general(np.ones((9, 3), np.float32), [x.copy() for x in rhs.transpose(1, 0, 2)[:3]], sizes, turned)
    batched = make_problem(rng, NON_CONTRACTING, 9, 6, 4, sizes, batch=2, listed=True)
    assert batched.numbers is FORWARD_BATCHED
    batched.check()


def test_out_and_c_are_lists_together(rng):
    problem = problem_of(rng, CONTRACTING, c="array", beta=1.0)
    one = stacked(problem)
    arguments = problem.arguments()
    with pytest.raises(TypeError, match="out and c: c alone is a list"):
        hgg.ragged_dot_general(**arguments, out=one.out.array)
    with pytest.raises(TypeError, match="out and c: c alone is a list"):
        hgg.ragged_dot_general(**arguments)
    with pytest.raises(TypeError, match="out and c: out alone is a list"):
        hgg.ragged_dot_general(**one.arguments(), out=problem.out.array)
    with pytest.raises(TypeError, match=r"out: got shape \(3, 5, 7\), wanted \(4, 5, 7\)"):
        hgg.ragged_dot_general(**one.arguments() | {"c": None, "beta": None}, out=problem.out.array[:3])
    with pytest.raises(TypeError, match=r"out\[2\]: is read-only"):
        problem.out.array[2].flags.writeable = False
        problem.run()


@pytest.mark.parametrize("warm", [False, True])
def test_overlaps(warm, rng):
    """Neither a cold nor a warm call writes where another array lies."""

    def call(out, c=None, **changes):
        numbers, sizes = WEIGHT_GRADIENT, np.array([4, 0, 5])
        arguments = {"lhs": lhs, "rhs": rhs} | changes
        return hgg.ragged_dot_general(arguments["lhs"], arguments["rhs"], sizes, numbers, out=out, c=c, beta=None if c is None else 1.0)

    lhs, rhs = rng.standard_normal((9, 4)).astype(np.float32), rng.standard_normal((9, 6)).astype(np.float32)
    one, two = ([np.ones((4, 6), np.float32) for _ in range(3)] for _ in range(2))
    if warm:
        for _ in range(3):
            call(one)
            call(one, two)
            call(one, one)
    cases = [
        (r"out\[0\]: shares memory with out\[2\]", [one[0], one[1], one[0]], None, {}),
        (r"out\[0\]: shares memory with c\[0\] without being exactly c\[0\]", shifted(), shifted(1), {}),
        (r"out\[.\]: shares memory with c\[.\]", one, [one[1], one[0], one[2]], {}),
        (r"out\[2\]: shares memory with rhs", [one[0], one[1], rhs[2:6]], None, {}),
        (r"out\[1\]: shares memory with lhs", one, None, {"lhs": one[1].reshape(-1)[:8].reshape(2, 4), "rhs": rhs[:2]}),
    ]
    for text, out, c, changes in cases:
        with pytest.raises(ValueError, match=text):
            if "lhs" in changes:
                hgg.ragged_dot_general(changes["lhs"], changes["rhs"], np.array([1, 0, 1]), WEIGHT_GRADIENT, out=out)
            else:
                call(out, c)
    wanted = np.stack(two) + hgg.ragged_dot_general(lhs, rhs, np.array([4, 0, 5]), WEIGHT_GRADIENT)
    call(two, [two[0], *[x.copy() for x in two[1:]]])  # exactly out where they meet
    np.testing.assert_allclose(np.stack(two), wanted, rtol=1e-5)


def shifted(by=0):
    """Three arrays side by side in one piece of memory, which is the same for every call."""
    return [np.ndarray((4, 6), np.float32, _memory.data, 4 * (24 * 2 * group + 3 * by)) for group in range(3)]


_memory = np.zeros(1000, np.uint8)


def test_arrays_of_out_may_lie_in_between_each_other(rng):
    whole = np.zeros((4, 18), np.float32)
    out = [whole[:, group::3] for group in range(3)]
    lhs, rhs = rng.standard_normal((9, 4)).astype(np.float32), rng.standard_normal((9, 6)).astype(np.float32)
    sizes = np.array([4, 0, 5])
    wanted = hgg.ragged_dot_general(lhs, rhs, sizes, WEIGHT_GRADIENT)
    for _ in range(2):
        hgg.ragged_dot_general(lhs, rhs, sizes, WEIGHT_GRADIENT, out=out)
        np.testing.assert_allclose(np.stack(out), wanted, rtol=1e-6)
        whole[...] = np.nan


def test_padded_layout_of_a_list(rng):
    problem = problem_of(rng, NON_CONTRACTING, layouts={"rhs": Layout(order=(0, 2, 1), pad=3)})
    config = hgg.config_for_ragged_dot(problem.lhs.array, problem.rhs.array, problem.sizes.array)
    assert config.trans_b and config.rhs_leading_dim_stride == 5 + 3
    problem.check()
