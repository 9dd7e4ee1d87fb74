"""GroupedMatmulPlan on the reference backend: algorithms, execution at every extent, wrong operands, memo, threads and life."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import oracle
import pytest
from comparison import assert_close
from generators import (
    FORWARD,
    WEIGHT_GRADIENT,
    Mode,
    dtype_of,
    make_problem,
    random_sizes,
    random_values,
)

import hipgroupgemm as hgg
from hipgroupgemm import GroupedMatmulPlan, MatmulAlgorithm

Spec = hgg.ArraySpec
NON_CONTRACTING, CONTRACTING = Mode.NON_CONTRACTING, Mode.CONTRACTING


def forward_config(m=40, n=24, k=16, groups=3, dtype="float32", **changes):
    return hgg.config_for_ragged_dot(Spec((m, k), dtype), Spec((groups, k, n), dtype), Spec((groups,), "int32"), FORWARD, **changes)


def gradient_config(rows=40, m=16, n=24, groups=3, dtype="float32", **changes):
    return hgg.config_for_ragged_dot(Spec((rows, m), dtype), Spec((rows, n), dtype), Spec((groups,), "int32"), WEIGHT_GRADIENT, **changes)


@pytest.fixture
def plan():
    with GroupedMatmulPlan(forward_config(), device="cpu") as made:
        yield made


def operands(rng, m=40, dtype="float32"):
    return random_values(rng, (m, 16), dtype), random_values(rng, (3, 16, 24), dtype), random_sizes(rng, m, 3)


def check(plan, rng, lhs, rhs, sizes, **settings):
    if plan.config.ragged_mode is NON_CONTRACTING:
        exact = oracle.forward(lhs, rhs, sizes, **settings)
        magnitude = oracle.forward(abs(lhs), abs(rhs), sizes)
        length = lhs.shape[1]
    else:
        exact, magnitude = oracle.weight_gradient(lhs, rhs, sizes), oracle.weight_gradient(abs(lhs), abs(rhs), sizes)
        length = lhs.shape[0]
    assert_close(plan.execute(lhs, rhs, sizes, **settings), exact, magnitude, length, (lhs.dtype, rhs.dtype))


# ---- making ----------------------------------------------------------------------------------------------------------------------


def test_what_is_no_plan():
    with pytest.raises(TypeError, match="config: got dict, wanted a GroupedGemmConfig"):
        GroupedMatmulPlan({})
    with pytest.raises(ValueError, match=r"backend='fast': no such backend; there are .*reference"):
        GroupedMatmulPlan(forward_config(), "fast", "cpu")
    for device in ("gpu", "cuda:x", "cpu:1", "rocm:-1", 3):
        with pytest.raises(ValueError, match="device="):
            GroupedMatmulPlan(forward_config(), device=device)
    assert str(hgg.Device.of("rocm:1")) == "rocm:1"
    assert hgg.Device.of("cpu:0") == hgg.Device("cpu")
    assert hgg.Device.of("cuda") == hgg.Device("cuda", 0)
    assert hgg.Device.of(hgg.Device("cpu")) == hgg.Device("cpu")


def test_a_device_that_no_backend_serves_is_refused_with_every_reason():
    with pytest.raises(NotImplementedError, match=r"on rocm:0: hipblaslt: .*; triton: .*; reference: "):
        GroupedMatmulPlan(forward_config(), device="rocm:0")
    with pytest.raises(NotImplementedError, match="backend 'reference' refuses: it computes on the CPU, the operands are on cuda:1"):
        GroupedMatmulPlan(forward_config(), "reference", "cuda:1")


@pytest.mark.parametrize(("kind", "index", "wanted"), [(None, 0, "cpu"), ("rocm", 1, "rocm:1"), ("cuda", 0, "cuda:0")])
def test_the_default_device_is_the_current_gpu_else_the_cpu(kind, index, wanted, monkeypatch):
    from hipgroupgemm import plan as plan_module
    from hipgroupgemm import runtime

    class Current:
        def current_device(self):
            return index

    def get_runtime(asked):
        if asked != kind:
            raise runtime.RuntimeUnavailable(asked, "nothing", "nothing")
        return Current()

    monkeypatch.setattr(runtime, "get_runtime", get_runtime)
    assert str(plan_module._default_device()) == wanted
    if kind is None:
        assert str(GroupedMatmulPlan(forward_config()).device) == "cpu"


def test_repr_and_explain(plan):
    assert repr(plan) == "<GroupedMatmulPlan NON_CONTRACTING m=40 n=24 k=16 groups=3, reference on cpu>"
    text = plan.explain()
    for word in (
        "NON_CONTRACTING",
        "m=40",
        "float32",
        "cpu",
        "reference",
        "numpy_matmul_a_group",
        "up to 40",
        "workspace 0",
        "deterministic",
    ):
        assert word in text
    assert "up to 144" in GroupedMatmulPlan(forward_config(m=131), device="cpu").explain()
    assert "tf32" in GroupedMatmulPlan(forward_config(precision="tf32"), device="cpu").explain()


# ---- algorithms ----------------------------------------------------------------------------------------------------------------


def test_get_algorithms_and_its_limits(plan):
    (algorithm,) = plan.get_algorithms()
    assert algorithm == MatmulAlgorithm("reference", 0, "numpy_matmul_a_group", 0, True)
    assert plan.get_algorithms(1) == plan.get_algorithms(5) == plan.get_algorithms(None, 0) == [algorithm]
    for limits, kind, word in [
        ((-1,), ValueError, "max_algorithm_count=-1: wanted at least 1"),
        ((0,), ValueError, "max_algorithm_count=0: wanted at least 1"),
        ((1.5,), TypeError, "max_algorithm_count=1.5"),
        ((True,), TypeError, "max_algorithm_count=True"),
        ((None, -1), ValueError, "max_workspace_size=-1"),
        ((None, "1"), TypeError, "max_workspace_size='1'"),
    ]:
        with pytest.raises(kind, match=word):
            plan.get_algorithms(*limits)
    assert plan.algorithm == algorithm
    assert plan.workspace_size == 0


def test_set_algorithm_by_object_and_by_name_with_index(plan):
    (algorithm,) = plan.get_algorithms()
    plan.set_algorithm(algorithm)
    plan.set_algorithm(dataclasses.replace(algorithm, time=3.5, verdict="ok"))  # as a tuning run hands it over
    plan.set_algorithm("numpy_matmul_a_group", 0)
    assert plan.algorithm == algorithm
    for arguments, kind, words in [
        (("numpy_matmul_a_group",), TypeError, ("index",)),
        (("numpy_matmul_a_group", 1), ValueError, ("numpy_matmul_a_group", "index 1", "index 0 here")),
        (("other", 0), ValueError, ("'other'", "index 0", "get_algorithms")),
        ((dataclasses.replace(algorithm, index=7),), ValueError, ("index 7",)),
        ((dataclasses.replace(algorithm, name="renamed"),), ValueError, ("renamed",)),
        ((dataclasses.replace(algorithm, backend="triton"),), ValueError, ("'triton'", "'reference'")),
        ((0,), TypeError, ("int", "MatmulAlgorithm")),
    ]:
        with pytest.raises(kind) as caught:
            plan.set_algorithm(*arguments)
        for word in words:
            assert word in str(caught.value)
    assert plan.algorithm == algorithm


# ---- executing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [forward_config, gradient_config])
def test_every_extent_up_to_the_capacity(make, dtype, rng):
    for made_with in (33, 36):  # the capacity of both is 36
        with GroupedMatmulPlan(make(made_with, dtype=dtype), device="cpu") as plan:
            for rows in (*range(37), 36, 0):
                sizes = random_sizes(rng, rows, 3)
                lhs = random_values(rng, (rows, 16), dtype)
                rhs = random_values(rng, (3, 16, 24) if make is forward_config else (rows, 24), dtype)
                check(plan, rng, lhs, rhs, sizes)
            lhs = random_values(rng, (37, 16), dtype)
            rhs = random_values(rng, (3, 16, 24) if make is forward_config else (37, 24), dtype)
            with pytest.raises(TypeError, match="37 ragged rows, this plan serves up to 36"):
                plan.execute(lhs, rhs, [1, 1, 1])


@pytest.mark.parametrize("mode", [NON_CONTRACTING, CONTRACTING])
@pytest.mark.parametrize("other", [1, 3])
@pytest.mark.parametrize("ragged_is_inner", [False, True])
def test_extents_up_to_the_capacity_where_axes_are_short(mode, other, ragged_is_inner, rng):
    """Strides along an axis of at most one element say nothing, be it the ragged one of a call or one beside it."""
    numbers = FORWARD if mode is NON_CONTRACTING else WEIGHT_GRADIENT

    def ragged(rows, columns):
        values = random_values(rng, (rows, columns), "float64")
        return np.asfortranarray(values) if ragged_is_inner else values

    def operands_of(rows):
        second = random_values(rng, (3, other, 1), "float64") if mode is NON_CONTRACTING else ragged(rows, other)
        return ragged(rows, other), second, random_sizes(rng, rows, 3)

    with GroupedMatmulPlan(hgg.config_for_ragged_dot(*operands_of(17), numbers), device="cpu") as plan:
        for rows in (*range(19), 0):
            lhs, rhs, sizes = operands_of(rows)
            np.testing.assert_array_equal(plan.execute(lhs, rhs, sizes), hgg.ragged_dot_reference(lhs, rhs, sizes, numbers))


def test_alpha_and_beta_are_per_call(rng):
    lhs, rhs, sizes = operands(rng)
    c = random_values(rng, (40, 24), "float32")
    product = oracle.forward(lhs, rhs, sizes)
    with GroupedMatmulPlan(forward_config(alpha=3), device="cpu") as plan:
        for alpha, wanted in [(None, 3), (1, 1), (-0.5, -0.5), (0, 0)]:
            got = plan.execute(lhs, rhs, sizes, alpha=alpha)
            np.testing.assert_allclose(got, wanted * product, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"beta is 1\.0, the plan's is 0\.0"):
            plan.execute(lhs, rhs, sizes, c=c, beta=2)
    config = forward_config(beta=0.5, c=Spec((40, 24), "float32"))
    with GroupedMatmulPlan(config, device="cpu") as plan:
        for beta, wanted in [(None, 0.5), (1, 1), (-3, -3)]:
            got = plan.execute(lhs, rhs, sizes, c=c, beta=beta)
            np.testing.assert_allclose(got, product + wanted * c, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"beta is 0\.0, the plan's is 1\.0"):
            plan.execute(lhs, rhs, sizes, c=c, beta=0)
        with pytest.raises(ValueError, match="there is no c"):
            plan.execute(lhs, rhs, sizes)


def test_operands_in_stored_order(rng):
    """Axes in another order with the config's strides: the same memory, whichever way the caller's array names it."""
    rows, tokens = random_values(rng, (40, 16), "float32"), random_values(rng, (40, 24), "float32")
    sizes = random_sizes(rng, 40, 3)
    with GroupedMatmulPlan(gradient_config(), device="cpu") as plan:
        stored = plan.execute(rows, tokens, sizes)  # (k, m) and (k, n), as a layer has them
        named = plan.execute(rows.T, tokens, sizes)  # (m, k), as the config has them
        np.testing.assert_array_equal(stored, named)
        check(plan, rng, rows, tokens, sizes)
    back = hgg.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    weights = random_values(rng, (3, 24, 16), "float32")  # (g, n, k)
    config = hgg.config_for_ragged_dot(rows, weights, sizes, back)
    with GroupedMatmulPlan(config, device="cpu") as plan:
        np.testing.assert_array_equal(plan.execute(rows, weights, sizes), plan.execute(rows, weights.transpose(0, 2, 1), sizes))
        np.testing.assert_array_equal(plan.execute(rows, weights, sizes), hgg.ragged_dot_general(rows, weights, sizes, back))


def test_square_operands_are_read_by_their_strides(rng):
    """m = k = n = g: only the strides tell the axes apart."""
    lhs, rhs, sizes = random_values(rng, (4, 4), "float32"), random_values(rng, (4, 4, 4), "float32"), np.array([1, 1, 1, 1])
    for left, right in [(lhs, rhs), (lhs.T, rhs), (lhs, rhs.transpose(0, 2, 1)), (lhs.T, rhs.transpose(0, 2, 1))]:
        with GroupedMatmulPlan(hgg.config_for_ragged_dot(left, right, sizes), device="cpu") as plan:
            check(plan, rng, left, right, sizes)


def test_a_batch_axis_of_length_one_may_come_or_go(plan, rng):
    lhs, rhs, sizes = operands(rng)
    wanted = plan.execute(lhs, rhs, sizes)
    got = plan.execute(lhs[None], rhs[:, None], sizes)
    assert got.shape == (1, 40, 24)
    np.testing.assert_array_equal(got[0], wanted)
    np.testing.assert_array_equal(plan.execute(lhs[None], rhs[:, None], sizes[None])[0], wanted)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_everything_that_ragged_dot_does_a_plan_does(mode, rng):
    """out, c = out, bias, offs, group_offset, tails, batches with sizes of their own; run twice, the second time from the memo."""
    variants = [{}, {"c": "out", "alpha": 2.0, "beta": 0.5}, {"give_out": False}, {"out_dtype": "float64"}]
    if mode is not Mode.BATCH:
        variants += [{"offs": True}, {"batch": 2}, {"batch": 3, "own": True}]
    if mode is NON_CONTRACTING:
        variants += [{"bias": True}, {"group_offset": 1, "rhs_groups": 2}]
    if mode is CONTRACTING:
        variants += [{"group_offset": 1, "group_count": 2}]
    for changes in variants:
        variant = {"batch": 2 if mode is Mode.BATCH else None, **changes}
        own = variant.pop("own", False)
        sizes = np.array([random_sizes(rng, 20, 4) for _ in range(variant["batch"])]) if own else random_sizes(rng, 20, 4)
        if variant.get("offs"):
            sizes = np.cumsum(sizes)
        extents = (5, 6, 20) if mode is CONTRACTING else (20, 5, 6)
        problem = make_problem(rng, mode, *extents, sizes, "bfloat16", **variant)
        arguments = problem.arguments()
        config = hgg.config_for_ragged_dot(**arguments, out=None if problem.out is None else problem.out.array)
        with GroupedMatmulPlan(config, device="cpu") as plan:

            def run(plan=plan, **given):
                for name in ("ragged_dot_dimension_numbers", "preferred_element_type", "group_count"):
                    given.pop(name, None)
                return plan.execute(**given)

            first = problem.check(run)
            if variant.get("c") is None:
                np.testing.assert_array_equal(problem.run(run), first)


def test_device_rules_of_execute(plan, rng):
    lhs, rhs, sizes = operands(rng)
    for arguments, kind, words in [
        ((lhs[:, :15], rhs, sizes), TypeError, ("contracting", "(15,)", "(16,)")),
        ((lhs, rhs[:, :, :23], sizes), TypeError, ("n is 23, the plan's is 24",)),
        ((lhs, rhs[:2], sizes[:2]), TypeError, ("group_count is 2, the plan's is 3",)),
        ((lhs, rhs, sizes[:2]), TypeError, ("group_sizes: got 2 groups", "3")),
        ((lhs, rhs, sizes.astype(np.float32)), TypeError, ("group_sizes: got float32",)),
        ((lhs.astype(np.float64), rhs.astype(np.float64), sizes), TypeError, ("lhs's type is float64, the plan's is float32",)),
        ((lhs[0], rhs, sizes), TypeError, ("lhs of shape (16,)", "('m', 'k')")),
        ((lhs[None, None], rhs, sizes), TypeError, ("lhs of shape (1, 1, 40, 16)",)),
        ((np.asfortranarray(lhs), rhs, sizes), ValueError, ("lhs's inner axis is m, the plan's is k",)),
        ((np.repeat(lhs, 2, 1)[:, ::2], rhs, sizes), ValueError, ("lhs's inner stride is 2, the plan's is 1",)),
        ((lhs, np.broadcast_to(rhs[:1], rhs.shape), sizes), ValueError, ("rhs's group stride is 0",)),
    ]:
        with pytest.raises(kind) as caught:
            plan.execute(*arguments)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    for settings, kind, word in [
        ({"out": np.zeros((40, 24))}, TypeError, "out: got float64, wanted float32"),
        ({"out": np.zeros((24, 40), np.float32)}, TypeError, "out: got shape"),
        ({"out": np.zeros((40, 24), np.float32, "F")}, ValueError, "out's inner axis is m, the plan's is n"),
        ({"out": np.zeros((40, 48), np.float32)[:, ::2]}, ValueError, "out's inner stride is 2"),
        ({"bias": np.zeros((3, 24), np.float32)}, ValueError, "bias is given, and the plan has none; give bias= to config_for_ragged_dot"),
        ({"c": np.zeros((40, 24), np.float32)}, ValueError, "beta: left out beside c"),
        ({"tail": "x"}, ValueError, "tail"),
        ({"workspace": np.zeros(4, np.uint8), "stream": "x"}, TypeError, "stream"),
        ({"group_offset": 1}, ValueError, "group_offset: got 1, wanted 0 to 0"),
    ]:
        with pytest.raises(kind, match=word):
            plan.execute(lhs, rhs, sizes, **settings)


def test_misaligned_operands_are_another_plan_and_better_aligned_ones_are_not(rng):
    lhs, rhs, sizes = operands(rng)
    memory = np.zeros(lhs.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    odd = np.ndarray(lhs.shape, lhs.dtype, memory, start)
    odd[...] = lhs
    even = np.ndarray(lhs.shape, lhs.dtype, np.zeros(lhs.nbytes + 16, np.uint8), 0)
    even = np.ndarray(lhs.shape, lhs.dtype, even.base, -even.ctypes.data % 16)
    even[...] = lhs
    with (
        GroupedMatmulPlan(forward_config(), device="cpu") as plan,
        pytest.raises(ValueError, match="lhs's alignment is 4, the plan's is 16"),
    ):
        plan.execute(odd, rhs, sizes)
    with GroupedMatmulPlan(dataclasses.replace(forward_config(), lhs_alignment=4), device="cpu") as plan:
        np.testing.assert_array_equal(plan.execute(odd, rhs, sizes), plan.execute(even, rhs, sizes))


def test_wrong_sizes_are_refused_at_once_and_check_finds_nothing(plan, rng):
    lhs, rhs, _ = operands(rng)
    out = np.full((40, 24), 7, np.float32)
    with pytest.raises(ValueError, match=r"group 1.*30 rows wanted, 10 left of 40"):
        plan.execute(lhs, rhs, [30, 30, 0], out=out)
    assert (out == 7).all()
    plan.check()
    plan.execute(lhs, rhs, [30, 10, 0], out=out, check="sync")
    plan.check(0)


def test_results_come_back_as_given(plan, rng):
    lhs, rhs, sizes = operands(rng)
    out = np.full((40, 24), np.nan, np.float32)
    assert plan.execute(lhs, rhs, sizes, out=out) is out
    fresh = plan.execute(lhs, rhs, group_sizes=sizes)
    assert type(fresh) is np.ndarray
    assert fresh is not out
    np.testing.assert_array_equal(fresh, out)


# ---- the memo ------------------------------------------------------------------------------------------------------------------


def test_the_memo_never_mistakes_one_call_for_another(rng):
    """Same shapes, other types, strides, settings or dimension numbers, interleaved many times."""

    def forms():
        square = random_values(rng, (6, 6), "float32")
        weights = random_values(rng, (6, 6, 6), "float32")
        for kind in ("float32", "float16", "bfloat16", "float64"):
            lhs, rhs = square.astype(dtype_of(kind)), weights.astype(dtype_of(kind))
            for left in (lhs, lhs.T):
                for right in (rhs, rhs.transpose(0, 2, 1), np.broadcast_to(rhs[:1], rhs.shape)):
                    for sizes in (np.full(6, 1), np.array([0, 6, 0, 0, 0, 0]), np.full(6, 1, np.uint8)):
                        yield left, right, sizes

    for _ in range(2):
        for lhs, rhs, sizes in forms():
            exact, magnitude = oracle.forward(lhs, rhs, sizes), oracle.forward(abs(lhs), abs(rhs), sizes)
            assert_close(hgg.ragged_dot(lhs, rhs, sizes), exact, magnitude, 6, (lhs.dtype,))
            ends = np.cumsum(sizes)
            assert_close(hgg.ragged_dot(lhs, rhs, offs=ends), exact, magnitude, 6, (lhs.dtype,))
            assert hgg.ragged_dot(lhs, rhs, sizes).dtype == lhs.dtype
            assert hgg.ragged_dot(lhs, rhs, sizes, preferred_element_type=np.float64).dtype == np.float64
            assert_close(hgg.ragged_dot(lhs, rhs, sizes, alpha=2), 2 * exact, 2 * magnitude, 6, (lhs.dtype,))
            with pytest.raises(TypeError, match="give group_offset"):
                hgg.ragged_dot(lhs, rhs[:5], sizes)
            hgg.ragged_dot(lhs, rhs[:5], sizes, group_offset=0)


def test_the_memo_is_bounded(plan, rng):
    rhs = random_values(rng, (3, 16, 24), "float32")
    for index in range(600):
        m = index % 41
        lhs = random_values(rng, (m, 16), "float32")
        plan.execute(lhs, rhs, random_sizes(rng, m, 3), alpha=index + 1)
    assert len(plan._calls) <= 512


# ---- threads and life ----------------------------------------------------------------------------------------------------------


def test_threads_take_turns(plan, rng):
    problems = [operands(rng, m) for m in range(20, 28)]
    wanted = [plan.execute(*problem) for problem in problems]
    failures = []

    def work(lead):
        try:
            for turn in range(40):
                at = (lead + turn) % len(problems)
                np.testing.assert_array_equal(plan.execute(*problems[at]), wanted[at])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(lead,)) for lead in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_closed_plan_says_so(plan, rng):
    arguments = operands(rng)
    plan.prepare()
    plan.prepare(7)
    plan.execute(*arguments)
    plan.close()
    plan.close()
    assert "closed" in repr(plan)
    for call in (
        lambda: plan.execute(*arguments),
        plan.prepare,
        plan.check,
        plan.explain,
        plan.get_algorithms,
        lambda: plan.set_algorithm("numpy_matmul_a_group", 0),
        lambda: plan.algorithm,
        lambda: plan.workspace_size,
        plan.__enter__,
    ):
        with pytest.raises(RuntimeError, match="closed; make a new"):
            call()


def test_the_context_manager_closes_even_after_an_error():
    with pytest.raises(KeyError), GroupedMatmulPlan(forward_config(), device="cpu") as plan:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        plan.explain()


def test_beta_beside_c_takes_the_config_s_value_or_has_to_be_given(rng):
    lhs, rhs, sizes = operands(rng)
    c = rng.standard_normal((40, 24)).astype(np.float32)
    product = hgg.ragged_dot(lhs, rhs, sizes)
    with GroupedMatmulPlan(forward_config(), device="cpu") as plan:
        with pytest.raises(ValueError, match="beta: left out beside c"):
            plan.execute(lhs, rhs, sizes, c=c)
        for out in (None, np.full((40, 24), np.nan, np.float32)):
            np.testing.assert_array_equal(plan.execute(lhs, rhs, sizes, c=np.full_like(c, np.nan), beta=0.0, out=out), product)
    with GroupedMatmulPlan(forward_config(c=Spec((40, 24), "float32"), beta=2.0), device="cpu") as plan:
        np.testing.assert_allclose(plan.execute(lhs, rhs, sizes, c=c), product + 2 * c, rtol=1e-5, atol=1e-4)


def test_what_explain_says_of_c_beta_and_bias():
    specs = {"c": Spec((40, 24), "float32", strides=(192, 4)), "beta": 0.5, "bias": Spec((3, 24), "float32"), "alpha": 2.0}
    with GroupedMatmulPlan(forward_config(**specs), device="cpu") as plan:
        for words in ("alpha=2, beta=0.5 with c, a bias", "c (0, 0, 48, 1)", "bias (group, n) (24, 1)"):
            assert words in plan.explain()
    with GroupedMatmulPlan(forward_config(), device="cpu") as plan:
        assert "alpha=1, no c (beta=0), no bias" in plan.explain()


def test_a_mismatch_names_operands_and_hints_once(rng):
    lhs, rhs, sizes = operands(rng)
    other = forward_config(bias=Spec((3, 24), "float32"))
    with GroupedMatmulPlan(other, device="cpu") as plan, pytest.raises(ValueError, match="bias is left out") as caught:
        plan.execute(lhs, rhs, sizes)
    assert "Epilogue" not in str(caught.value) and str(caught.value).count("config_for_ragged_dot") == 1
    with GroupedMatmulPlan(forward_config(), device="cpu") as plan:
        with pytest.raises(ValueError) as caught:
            plan.execute(lhs, rhs, sizes, c=np.zeros((40, 24), np.float32), beta=1.0)
        assert str(caught.value).count("config_for_ragged_dot") == 1
        with pytest.raises(TypeError) as caught:
            plan.execute(lhs.astype(np.float64), rhs, sizes)
        assert str(caught.value).count("config_for_ragged_dot") == 1 and "type_" not in str(caught.value)
