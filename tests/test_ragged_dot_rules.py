"""The operation's rules that JAX does not know: alpha, beta, c, bias, tails, offsets and wrong sizes, against a row-by-row oracle."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import oracle
import pytest
from comparison import assert_close
from generators import (
    FLOAT8S,
    FORWARD,
    FORWARD_BATCHED,
    WEIGHT_GRADIENT,
    Layout,
    Mode,
    dtype_of,
    empty_patterns,
    make_problem,
    random_layout,
    random_sizes,
    random_values,
    size_patterns,
)

import hipgroupgemm as hgg

NON_CONTRACTING, CONTRACTING = Mode.NON_CONTRACTING, Mode.CONTRACTING
RAGGED = pytest.mark.parametrize("mode", [NON_CONTRACTING, CONTRACTING], ids=lambda mode: mode.name)
KINDS = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])


def judge(problem, *, count=None):
    """Runs a problem and compares it with the oracle; the reference in float64 must agree with the oracle as well."""
    lhs, rhs = problem.lhs.values, problem.rhs.values
    known = {name: problem.settings[name] for name in ("alpha", "beta", "group_offset", "offs") if name in problem.settings}
    if problem.c is not None:
        known["c"] = problem.c.values
    if problem.numbers is FORWARD:
        bias = None if problem.bias is None else problem.bias.values
        exact = oracle.forward(lhs, rhs, problem.sizes.values, bias=bias, **known)
    else:
        exact = oracle.weight_gradient(lhs, rhs, problem.sizes.values, group_count=count, **known)
    value, magnitude = problem.expected()
    assert_close(value, exact, magnitude, problem.length, (np.dtype(np.float64),))
    result = problem.run()
    assert_close(result, exact, magnitude, problem.length, (problem.lhs.dtype, problem.rhs.dtype))
    return result


@RAGGED
@KINDS
def test_alpha_beta_and_c(mode, dtype, rng):
    for alpha, beta, c in [
        (1, 1, "array"),
        (2, 0.5, "array"),
        (0.5, 1, "out"),
        (-1.5, -2, "out"),
        (0, 3, "array"),
        (0, 0, None),
        (1 / 3, 0, None),
        (0.7, -0.1, "array"),
        (-0.3, 1 / 7, "out"),
    ]:
        sizes = random_sizes(rng, 33, 5)
        out_dtype = "float32" if rng.random() < 0.5 and dtype != "float64" else None
        extents = (33, 7, 9) if mode is NON_CONTRACTING else (7, 9, 33)
        layout = random_layout(rng, 2 if mode is NON_CONTRACTING else 3)
        layouts = {"c": random_layout(rng, 2 if mode is NON_CONTRACTING else 3, may_broadcast=True), "out": layout}
        problem = make_problem(rng, mode, *extents, sizes, dtype, out_dtype=out_dtype, c=c, alpha=alpha, beta=beta, layouts=layouts)
        judge(problem)


@RAGGED
def test_beta_zero_never_reads_c(mode, rng):
    extents = (20, 7, 9) if mode is NON_CONTRACTING else (7, 9, 20)
    problem = make_problem(rng, mode, *extents, random_sizes(rng, 20, 4), c="array", beta=0.0)
    problem.c.array[...] = np.nan
    problem.c.before = problem.c.storage.copy()
    judge(problem)
    judge(make_problem(rng, mode, *extents, random_sizes(rng, 20, 4), c="array", beta=-0.0))


@RAGGED
def test_alpha_zero_reads_no_product(mode, rng):
    """As in BLAS: with alpha = 0 NaN in the operands does not reach out."""
    extents = (20, 7, 9) if mode is NON_CONTRACTING else (7, 9, 20)
    problem = make_problem(rng, mode, *extents, random_sizes(rng, 20, 4), c="array", alpha=0, beta=2)
    problem.lhs.array[...] = np.nan
    problem.lhs.before = problem.lhs.storage.copy()
    np.testing.assert_array_equal(problem.run(), 2 * problem.c.values)


@RAGGED
def test_what_no_group_covers_is_beta_c_exactly(mode, rng):
    """Rows without a group and slabs of empty groups: beta * c rounded once, zeros of any sign without c."""
    extents = (40, 7, 9) if mode is NON_CONTRACTING else (7, 9, 40)
    sizes = np.array([11, 0, 9, 0], np.int32)
    bare = slice(20, None) if mode is NON_CONTRACTING else [1, 3]
    for dtype in ("bfloat16", "float32"):
        result = judge(make_problem(rng, mode, *extents, sizes, dtype))
        assert not result[bare].astype(np.float64).any()
        for c in ("array", "out"):
            problem = make_problem(rng, mode, *extents, sizes, dtype, c=c, alpha=2, beta=0.3)
            start = problem.c.values.copy()
            result = judge(problem)
            wanted = (start[bare].astype(np.float32) * np.float32(0.3)).astype(result.dtype)
            np.testing.assert_array_equal(result[bare], wanted)


def test_the_result_is_rounded_once(rng):
    """alpha P + beta c with a P that bfloat16 cannot hold: rounding it before c is added would give another number."""
    bf16 = dtype_of("bfloat16")
    lhs, rhs = np.full((1, 2), 1, bf16), np.array([[[1.0], [2.0**-8]]], bf16)  # P = 1 + 2^-8, a tie in bfloat16
    c = np.full((1, 1), 2.0**-10, bf16)
    assert hgg.ragged_dot(lhs, rhs, [1], c=c, beta=1).astype(np.float64) == 1 + 2.0**-7
    lhs64, rhs64 = lhs.astype(np.float64), rhs.astype(np.float64)
    assert hgg.ragged_dot(lhs64, rhs64, [1], c=c.astype(np.float64), beta=1) == 1 + 2.0**-8 + 2.0**-10


@KINDS
def test_bias_goes_to_covered_rows_only(dtype, rng):
    for layout in (Layout(), Layout(pad=3, lead=1), Layout(order=(1, 0)), Layout(broadcast=(0,))):
        sizes = random_sizes(rng, 30, 5)
        problem = make_problem(
            rng, NON_CONTRACTING, 30, 7, 9, sizes, dtype, bias=True, alpha=2, beta=0.5, c="array", layouts={"bias": layout}
        )
        judge(problem)
        plain = judge(make_problem(rng, NON_CONTRACTING, 30, 7, 9, sizes, dtype, bias=True))
        assert not plain[sizes.sum() :].astype(np.float64).any()
    judge(make_problem(rng, NON_CONTRACTING, 12, 7, 0, [5, 0, 7], dtype, bias=True))  # P is nothing, the bias is not


def test_bias_of_an_empty_or_another_group_is_not_read(rng):
    problem = make_problem(rng, NON_CONTRACTING, 12, 7, 9, [5, 0, 4], bias=True)
    problem.bias.array[1] = np.nan
    problem.bias.before = problem.bias.storage.copy()
    assert np.isfinite(problem.run()).all()


def test_tail_undefined_leaves_uncovered_rows_alone(rng):
    for settings, covered in [({}, slice(0, 20)), ({"group_offset": 1, "rhs_groups": 1}, slice(11, 20))]:
        problem = make_problem(rng, NON_CONTRACTING, 40, 7, 9, [11, 9, 0], give_out=True, tail="undefined", **settings)
        before = random_values(rng, (40, 7), "float32")
        problem.out.array[...] = before
        lhs, rhs = problem.lhs.values, problem.rhs.values
        exact = oracle.forward(lhs, rhs, [11, 9, 0], group_offset=settings.get("group_offset", 0))
        result = problem.run()
        magnitude = oracle.forward(abs(lhs), abs(rhs), [11, 9, 0], group_offset=settings.get("group_offset", 0))
        assert_close(result[covered], exact[covered], magnitude[covered], 9, (lhs.dtype,))
        rest = np.ones(40, bool)
        rest[covered] = False
        np.testing.assert_array_equal(result[rest], before[rest])


def test_tail_undefined_still_writes_every_slab(rng):
    judge(make_problem(rng, CONTRACTING, 7, 9, 40, [11, 0, 9, 0], tail="undefined"))


# ---- offsets -------------------------------------------------------------------------------------------------------------------


@RAGGED
@pytest.mark.parametrize(
    "form", [int, np.int16, lambda v: np.array([v], np.int32), lambda v: np.array(v, np.uint8)], ids=["int", "np", "(1,)", "()"]
)
def test_group_offset(mode, form, rng):
    for offset, count in itertools.product(range(4), range(3)):
        if offset + count > 4:
            continue
        sizes = random_sizes(rng, 30, 4)
        extents = (30, 7, 9) if mode is NON_CONTRACTING else (7, 9, 30)
        extra = {"rhs_groups": count} if mode is NON_CONTRACTING else {"group_count": count}
        problem = make_problem(rng, mode, *extents, sizes, group_offset=offset, **extra)
        problem.settings["group_offset"] = form(offset)
        lhs, rhs = problem.lhs.values, problem.rhs.values
        if mode is NON_CONTRACTING:
            exact = oracle.forward(lhs, rhs, sizes, group_offset=offset)
        else:
            exact = oracle.weight_gradient(lhs, rhs, sizes, group_offset=offset, group_count=count)
        _, magnitude = problem.expected()
        assert_close(problem.run(), exact, magnitude, problem.length, (lhs.dtype,))


def test_group_count_comes_from_out(rng):
    lhs, rhs, sizes = random_values(rng, (20, 3), "float32"), random_values(rng, (20, 4), "float32"), [5, 5, 5, 5]
    out = np.full((2, 3, 4), np.nan, np.float32)
    hgg.ragged_dot_general(lhs, rhs, sizes, WEIGHT_GRADIENT, group_offset=1, out=out)
    whole = hgg.ragged_dot_general(lhs, rhs, sizes, WEIGHT_GRADIENT)
    np.testing.assert_array_equal(out, whole[1:3])
    np.testing.assert_array_equal(hgg.ragged_dot_general(lhs, rhs, sizes, WEIGHT_GRADIENT, group_offset=0), whole)
    with pytest.raises(TypeError, match="group_count=5"):
        hgg.ragged_dot_general(lhs, rhs, sizes, WEIGHT_GRADIENT, group_offset=0, group_count=5)


@pytest.mark.parametrize("offset", [-1, 3, 100, np.array([3])])
def test_a_group_offset_out_of_range_on_the_host_is_refused_at_once(offset, rng):
    lhs, rhs = random_values(rng, (20, 3), "float32"), random_values(rng, (2, 3, 5), "float32")
    out = np.full((20, 5), 7, np.float32)
    with pytest.raises(ValueError, match=rf"group_offset: got {int(np.ravel(offset)[0])}, wanted 0 to 2"):
        hgg.ragged_dot(lhs, rhs, [5, 5, 5, 5], group_offset=offset, out=out)
    assert (out == 7).all()
    with pytest.raises(ValueError, match="group_offset"):
        hgg.ragged_dot_reference(lhs, rhs, [5, 5, 5, 5], group_offset=offset, check="sync")
    clamped = hgg.ragged_dot_reference(lhs, rhs, [5, 5, 5, 5], group_offset=offset)  # as a device does
    wanted = hgg.ragged_dot(lhs, rhs, [5, 5, 5, 5], group_offset=0 if int(np.ravel(offset)[0]) < 0 else 2)
    np.testing.assert_array_equal(clamped, wanted)


@RAGGED
def test_end_offsets(mode, rng):
    for _ in range(10):
        sizes = random_sizes(rng, 30, 6)
        extents = (30, 7, 9) if mode is NON_CONTRACTING else (7, 9, 30)
        problem = make_problem(rng, mode, *extents, np.cumsum(sizes), offs=True, sizes_dtype=str(rng.choice(["int32", "int64", "uint8"])))
        result = judge(problem)
        by_sizes = {**problem.arguments(), "group_sizes": sizes}
        del by_sizes["offs"]
        np.testing.assert_array_equal(result, hgg.ragged_dot_general(**by_sizes))


# ---- wrong sizes ---------------------------------------------------------------------------------------------------------------

WRONG_SIZES = [
    ([40, 40], False, ("group_sizes", "group 1", "40 rows wanted", "24 left of 64")),
    ([32, -5, 32], False, ("group_sizes", "group 1", "negative", "-5 rows wanted", "32 left")),
    ([-1, -2], False, ("group_sizes", "group 0", "-1 rows wanted", "64 left of 64")),
    ([65], False, ("group_sizes", "group 0", "65 rows wanted", "64 left of 64")),
    ([2**62, 2**62, 2**62], False, ("group_sizes", "group 0", str(2**62), "64 left of 64")),
    ([10, 5, 64], True, ("offs", "group 1", "-5 rows wanted", "54 left of 64")),
    ([10, 65], True, ("offs", "group 1", "55 rows wanted", "54 left of 64")),
    ([-3, 64], True, ("offs", "group 0", "-3 rows wanted", "64 left of 64")),
]


@RAGGED
@pytest.mark.parametrize(("sizes", "offs", "words"), WRONG_SIZES, ids=str)
def test_wrong_sizes_on_the_host_are_refused_at_once(mode, sizes, offs, words, rng):
    extents = (64, 5, 8) if mode is NON_CONTRACTING else (5, 8, 64)
    for check in ("none", "sync"):
        problem = make_problem(rng, mode, *extents, sizes, offs=offs, sizes_dtype="int64", check=check, poison=frozenset())
        with pytest.raises(ValueError) as caught:
            problem.run()
        for word in words:
            assert word in str(caught.value)
        problem.check_memory()
        assert np.isnan(problem.out.read()).all(), "out was written though the call was refused"


@RAGGED
@pytest.mark.parametrize(("sizes", "offs", "words"), WRONG_SIZES, ids=str)
def test_the_reference_clamps_wrong_sizes_as_a_device_does(mode, sizes, offs, words, rng):
    extents = (64, 5, 8) if mode is NON_CONTRACTING else (5, 8, 64)
    problem = make_problem(rng, mode, *extents, sizes, offs=offs, sizes_dtype="int64")
    lhs, rhs = problem.lhs.values, problem.rhs.values
    function = oracle.forward if mode is NON_CONTRACTING else oracle.weight_gradient
    _, magnitude = problem.expected()
    exact = function(lhs, rhs, sizes, offs=offs)
    assert_close(problem.run(hgg.ragged_dot_reference), exact, magnitude, problem.length, (lhs.dtype,))
    with pytest.raises(ValueError) as caught:
        problem.run(hgg.ragged_dot_reference, check="sync")
    for word in words:
        assert word in str(caught.value)


def test_wrong_sizes_name_the_batch_entry(rng):
    problem = make_problem(rng, NON_CONTRACTING, 10, 3, 4, [[5, 5], [5, 6], [20, 0]], batch=3, poison=frozenset())
    with pytest.raises(ValueError, match=r"group 1 of batch entry 1.*6 rows wanted, 5 left of 10"):
        problem.run()


def test_batch_mode_never_reads_the_sizes(rng):
    for sizes in ([3, 1], [-7, 2**31 - 1], []):
        problem = make_problem(rng, Mode.BATCH, 11, 5, 7, np.array(sizes, np.int32), batch=4)
        wanted = problem.lhs.values.astype(np.float64) @ problem.rhs.values.astype(np.float64)
        magnitude = abs(problem.lhs.values.astype(np.float64)) @ abs(problem.rhs.values.astype(np.float64))
        assert_close(problem.run(), wanted, magnitude, 7, (problem.lhs.dtype,))
    with pytest.raises(TypeError, match="group_sizes: got float32"):
        hgg.ragged_dot_general(problem.lhs.array, problem.rhs.array, np.ones(2, np.float32), problem.numbers)
    with pytest.raises(TypeError, match="group_offset"):
        problem.run(group_offset=0)


# ---- every pattern -------------------------------------------------------------------------------------------------------------


@RAGGED
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_patterns_of_empty_groups(mode, dtype, rng):
    """All 2^8 for g = 8, with NaN in every weight of an empty group and in every row behind the last."""
    for pattern in empty_patterns(8):
        sizes = np.array([0 if empty else int(rng.integers(1, 5)) for empty in pattern], np.int32)
        rows = int(sizes.sum()) + int(rng.integers(3))
        extents = (rows, 3, 5) if mode is NON_CONTRACTING else (5, 3, rows)
        result = judge(make_problem(rng, mode, *extents, sizes, dtype))
        if mode is CONTRACTING:
            assert not result[np.array(pattern)].astype(np.float64).any()


@RAGGED
def test_size_patterns(mode, rng):
    for rows, groups in [(96, 8), (131, 3), (257, 32)]:
        for name, sizes in size_patterns(rng, rows, groups).items():
            extents = (rows, 13, 17) if mode is NON_CONTRACTING else (13, 17, rows)
            print(name, sizes)
            judge(make_problem(rng, mode, *extents, sizes, "bfloat16"))


@pytest.mark.parametrize("lhs", FLOAT8S)
def test_float8(lhs, rng):
    for rhs in (lhs, "float8_e5m2" if lhs == "float8_e4m3fn" else lhs, "bfloat16"):
        for out in (None, "float32", "bfloat16"):
            sizes = random_sizes(rng, 24, 4)
            judge(make_problem(rng, NON_CONTRACTING, 24, 7, 20, sizes, lhs, rhs_dtype=rhs, out_dtype=out))
            judge(make_problem(rng, CONTRACTING, 7, 9, 24, sizes, lhs, rhs_dtype=rhs, out_dtype=out))


# ---- settings that are refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"beta": 1}, ValueError, ("beta=1.0", "c")),
        ({"c": np.ones((4, 5), np.float32)}, ValueError, ("beta", "beta=1.0", "c")),
        ({"alpha": float("nan")}, ValueError, ("alpha", "finite")),
        ({"alpha": float("inf")}, ValueError, ("alpha", "finite")),
        ({"alpha": 1j}, NotImplementedError, ("alpha", "real")),
        ({"alpha": "1"}, TypeError, ("alpha", "str", "real")),
        ({"alpha": np.ones(1)}, TypeError, ("alpha", "ndarray", "host")),
        ({"beta": True}, TypeError, ("beta", "bool")),
        ({"tail": "keep"}, ValueError, ("tail", "'keep'", "zero", "undefined")),
        ({"check": "always"}, ValueError, ("check", "'always'", "none", "sync")),
        ({"group_sizes": None}, TypeError, ("group_sizes", "offs", "neither")),
        ({"offs": np.array([2, 4])}, TypeError, ("group_sizes", "offs", "both")),
        ({"group_sizes": [2.0, 2.0]}, TypeError, ("group_sizes", "float64", "integer")),
        ({"group_sizes": [True, False]}, TypeError, ("group_sizes", "bool", "integer")),
        ({"group_sizes": [[2], [2, 3]]}, TypeError, ("group_sizes", "integers")),
        ({"group_sizes": [2, 2**70]}, TypeError, ("group_sizes", "integer")),
        ({"group_sizes": np.array([2, 2], ">i4")}, TypeError, ("group_sizes", "byte order")),
        ({"group_offset": 0.0}, TypeError, ("group_offset", "float", "int")),
        ({"group_offset": True}, TypeError, ("group_offset", "bool", "int")),
        ({"group_offset": np.array([0, 1])}, TypeError, ("group_offset", "(2,)", "(1,)")),
        ({"group_offset": np.array([0.0])}, TypeError, ("group_offset", "float64", "integer")),
        ({"c": np.ones((4, 5), np.float64), "beta": 1}, TypeError, ("c:", "float64", "float32")),
        ({"c": np.ones((5, 4), np.float32), "beta": 1}, TypeError, ("c:", "(5, 4)", "(4, 5)")),
        ({"bias": np.ones(5, np.float32)}, TypeError, ("bias", "(5,)", "(2, 5)")),
        ({"bias": np.ones((2, 5), np.float16)}, TypeError, ("bias", "float16", "float32")),
        ({"out": np.ones((4, 5), np.float64)}, TypeError, ("out", "float64", "float32", "preferred_element_type")),
        ({"out": np.ones((5, 4), np.float32)}, TypeError, ("out", "(5, 4)", "(4, 5)")),
        ({"out": [[0.0] * 5] * 4}, TypeError, ("out", "list", "array")),
        ({"preferred_element_type": np.int32}, NotImplementedError, ("preferred_element_type", "int32", "floating")),
        ({"preferred_element_type": "nope"}, TypeError, ("preferred_element_type", "nope")),
        ({"precision": "exact"}, ValueError, ("precision", "exact", "highest")),
        ({"precision": 2}, TypeError, ("precision",)),
        ({"precision": ("high", "high", "high")}, ValueError, ("precision", "pair")),
        ({"precision": "BF16_BF16_F32"}, NotImplementedError, ("precision", "bfloat16", "float32")),
        ({"backend": "fastest"}, ValueError, ("backend", "fastest", "reference")),
        ({"stream": "0"}, TypeError, ("stream", "str")),
        ({"workspace": 64}, TypeError, ("workspace", "int")),
        ({"lhs": np.ones((4, 3), np.int8)}, NotImplementedError, ("lhs", "int8", "floating")),
        ({"rhs": np.ones((2, 3, 5), bool)}, NotImplementedError, ("rhs", "bool", "floating")),
        ({"rhs": np.ones((2, 3, 5), np.complex64)}, NotImplementedError, ("rhs", "complex64", "floating")),
        ({"lhs": np.ones((4, 3), ">f4")}, NotImplementedError, ("lhs", "byte order")),
        ({"lhs": [[1.0] * 3] * 4}, TypeError, ("lhs", "list", "array")),
        ({"rhs": None}, TypeError, ("rhs", "NoneType", "array")),
    ],
    ids=str,
)
def test_refusals_name_the_argument_and_what_it_wanted(settings, kind, words):
    arguments = {"lhs": np.ones((4, 3), np.float32), "rhs": np.ones((2, 3, 5), np.float32), "group_sizes": np.array([2, 2]), **settings}
    with pytest.raises(kind) as caught:
        hgg.ragged_dot(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_bias_and_uncontracted_only(rng):
    lhs = random_values(rng, (4, 3), "float32")
    with pytest.raises(ValueError, match="bias: only NON_CONTRACTING"):
        hgg.ragged_dot_general(lhs, lhs, [2, 2], WEIGHT_GRADIENT, bias=np.ones((2, 3), np.float32))


def test_the_reference_accumulates_in_what_it_is_asked_for(rng):
    lhs, rhs = np.full((1, 3), 2.0**24, np.float32), np.array([[[1], [2.0**-24], [-1]]], np.float32)  # 2^24 + 1 - 2^24
    assert hgg.ragged_dot_reference(lhs, rhs, [1], accumulate=np.float64) == 1
    assert hgg.ragged_dot_reference(lhs, rhs, [1], accumulate="float32") in (0, 1)  # by the order of the sum
    wide = hgg.ragged_dot_reference(lhs, rhs, [1], accumulate=np.float64, preferred_element_type=np.float64)
    assert wide.dtype == np.float64
    for bad in ("float16", np.int32, "bfloat16"):
        with pytest.raises(TypeError, match=r"accumulate=.*wanted float32 or float64"):
            hgg.ragged_dot_reference(lhs, rhs, [1], accumulate=bad)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_scalars_are_finite_in_the_type_of_the_accumulator(name):
    """A float32 alpha of infinity would make NaN of every zero of P."""
    for dtype, value, fits in [
        ("float32", 3.4028234e38, True),
        ("float32", -3.5e38, False),
        ("bfloat16", 1e39, False),
        ("float64", 1e300, True),
        ("float64", 10**400, False),
    ]:
        lhs, rhs, c = (np.zeros(shape, dtype_of(dtype)) for shape in ((4, 3), (2, 3, 5), (4, 5)))
        if fits:
            assert not np.asarray(hgg.ragged_dot(lhs, rhs, [1, 3], c=c, **{"beta": 0.0, name: value})).astype(float).any()
            continue
        with pytest.raises(ValueError, match=name):
            hgg.ragged_dot(lhs, rhs, [1, 3], c=c, **{"beta": 0.0, name: value})
        config = hgg.config_for_ragged_dot(lhs, rhs, [1, 3], c=c, beta=1)
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(config, **{name: value})


def test_nested_lists_of_no_sizes_are_integers():
    lhs, rhs = np.ones((2, 4, 3), np.float32), np.ones((0, 2, 3, 5), np.float32)
    np.testing.assert_array_equal(hgg.ragged_dot_general(lhs, rhs, [[], []], FORWARD_BATCHED), np.zeros((2, 4, 5), np.float32))


def test_a_config_for_a_group_offset_on_a_device_needs_no_memory():
    """Only whether there is an offset is planned for, and how many groups there are beside those computed."""
    lhs, rhs, sizes = (
        hgg.ArraySpec(shape, dtype, device="rocm") for shape, dtype in (((8, 4), "float16"), ((2, 4, 4), "float16"), ((5,), "int32"))
    )
    offset = hgg.ArraySpec((1,), "int64", device="rocm")
    config = hgg.config_for_ragged_dot(lhs, rhs, sizes, group_offset=offset)
    assert config == hgg.config_for_ragged_dot(lhs, rhs, sizes, group_offset=3)
    assert (config.group_count, config.group_total) == (2, 5)
    with pytest.raises(ValueError, match="has no memory"):
        hgg.config_for_ragged_dot(lhs, rhs, sizes, group_offset=hgg.ArraySpec((1,), "int64"))


def test_alpha_and_beta_that_change_with_every_call_are_the_call_s_own(rng):
    lhs, rhs, c = (random_values(rng, shape, "float64") for shape in ((6, 3), (2, 3, 5), (6, 5)))
    plain = hgg.ragged_dot(lhs, rhs, [2, 4])
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, [2, 4], c=c, beta=1), device="cpu") as plan:
        for alpha, beta in [(2.0, 3.0), (-1.0, 0.5), (1.0, 1.0), (0.0, 2.0), (2.0, 3.0)]:
            for result in (
                hgg.ragged_dot(lhs, rhs, [2, 4], c=c, alpha=alpha, beta=beta),
                plan.execute(lhs, rhs, [2, 4], c=c, alpha=alpha, beta=beta),
            ):
                np.testing.assert_allclose(result, alpha * plain + beta * c, rtol=1e-13, atol=1e-13)
            np.testing.assert_allclose(hgg.ragged_dot(lhs, rhs, [2, 4], c=c, alpha=alpha, beta=0), alpha * plain, rtol=1e-13, atol=1e-13)


def test_float64_results_are_rounded_once():
    """Halfway cases that float32 on the way would tip: 1 + 2^-8 + 2^-40 is nearer to bf16's 1 + 2^-7 than to 1."""
    tips = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, -1 - 2.0**-8 - 2.0**-40, 1e-300, 3.5e38, np.inf])
    lhs, rhs = tips.reshape(-1, 1), np.ones((1, 1, 1))
    out = hgg.ragged_dot(lhs, rhs, [6], preferred_element_type="bfloat16").astype(np.float64).ravel()
    np.testing.assert_array_equal(out, [1.0078125, 1.0, -1.0078125, 0.0, np.inf, np.inf])
    zeros = hgg.ragged_dot(lhs, rhs, [0], preferred_element_type="float8_e5m2")
    assert (zeros.astype(np.float64) == 0).all()


def test_a_float64_output_is_accumulated_in_float64(rng):
    lhs, rhs = random_values(rng, (33, 257), "float32"), random_values(rng, (3, 257, 19), "float32")
    sizes = [10, 0, 20]
    wanted = hgg.ragged_dot_reference(lhs.astype(np.float64), rhs.astype(np.float64), sizes)
    config = hgg.config_for_ragged_dot(lhs, rhs, sizes, preferred_element_type="float64")
    with hgg.GroupedMatmulPlan(config, device="cpu") as plan:
        for got in (
            hgg.ragged_dot(lhs, rhs, sizes, preferred_element_type="float64"),
            hgg.ragged_dot_reference(lhs, rhs, sizes, preferred_element_type="float64"),
            plan.execute(lhs, rhs, sizes),
        ):
            bound = 257 * np.finfo(np.float64).eps * np.abs(lhs).max() * np.abs(rhs).max() * 257
            np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


def test_an_array_that_lands_in_precision_is_told_so_without_its_contents(rng):
    lhs, rhs = random_values(rng, (6, 3), "float32"), random_values(rng, (2, 3, 5), "float32")
    with pytest.raises(TypeError, match=r"precision: got ndarray, wanted .*out= is given by name") as caught:
        hgg.ragged_dot(lhs, rhs, [2, 4], np.full((600, 5), 7.0, np.float32))
    assert "7." not in str(caught.value)


def test_types_go_by_the_names_that_commands_take(rng):
    lhs, rhs = random_values(rng, (6, 3), "float32"), random_values(rng, (2, 3, 5), "float32")
    for name, meant in (("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("double", "float64")):
        assert hgg.ragged_dot(lhs, rhs, [2, 4], preferred_element_type=name).dtype.name == meant
