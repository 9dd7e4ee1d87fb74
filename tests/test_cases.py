"""Every case of cases.json that the reference backend meets: inputs of kinds that broke other grouped-GEMM libraries.

Each test is named after its case and checks the float64 reference and what the case's "expect" adds on top.
"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from comparison import assert_close
from generators import UNALIGNED, Layout, Operand, case_problem, dtype_of, load_cases, random_values

import hipgroupgemm as hgg

CASES = load_cases()


def test_every_case_has_a_test_of_its_name():
    tests = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert set(CASES) <= tests


def problem_of(rng, name, **changes):
    return case_problem(rng, CASES[name], **changes)


def test_empty_group_forward(rng):
    assert np.isfinite(problem_of(rng, "empty-group-forward").check().astype(np.float64)).all()


def test_empty_group_weight_gradient(rng):
    result = problem_of(rng, "empty-group-weight-gradient").check().astype(np.float64)
    assert not result[[1, 4]].any()
    assert result[[0, 2, 3, 5]].any(axis=(1, 2)).all()


def test_all_groups_empty(rng):
    assert not problem_of(rng, "all-groups-empty").check().astype(np.float64).any()


def test_no_rows_at_all(rng):
    for give_out in (True, False):
        assert problem_of(rng, "no-rows-at-all", give_out=give_out).check().shape == (0, 32)


def test_no_rows_weight_gradient(rng):
    layouts = [{}, {"lhs": Layout(order=(1, 0), pad=3, step=2)}, {"rhs": Layout(broadcast=(1,))}, {"out": Layout(order=(2, 0, 1), pad=1)}]
    for layout in layouts:
        result = problem_of(rng, "no-rows-weight-gradient", layouts=layout).check()
        assert result.shape == (4, 224, 256)
        assert not result.astype(np.float64).any()


def test_tail_rows(rng):
    result = problem_of(rng, "tail-rows").check().astype(np.float64)
    assert not result[90:].any()
    assert result[:90].any(axis=1).all()


def test_tail_rows_weight_gradient(rng):
    assert np.isfinite(problem_of(rng, "tail-rows-weight-gradient").check().astype(np.float64)).all()


def test_neighbour_nan(rng):
    problem = problem_of(rng, "neighbour-nan")
    lhs = problem.lhs.values.copy()
    lhs[:33] = np.nan
    problem.lhs = Operand(lhs)
    value, magnitude = problem.expected()
    result = problem.run()
    assert np.isnan(result[:33].astype(np.float64)).all()
    assert_close(result[33:], value[33:], magnitude[33:], problem.length, (lhs.dtype,))


def test_odd_everything(rng):
    layouts = dict.fromkeys(("lhs", "rhs", "out"), UNALIGNED)
    problem = problem_of(rng, "odd-everything", layouts=layouts)
    for operand in (problem.lhs, problem.rhs, problem.out):
        assert operand.array.ctypes.data % 16
        assert operand.array.strides[-2] % 16
    problem.check()


def test_one_group(rng):
    problem = problem_of(rng, "one-group")
    product = problem.lhs.values.astype(np.float64) @ problem.rhs.values[0].astype(np.float64)
    magnitude = abs(problem.lhs.values).astype(np.float64) @ abs(problem.rhs.values[0]).astype(np.float64)
    assert_close(problem.check(), product, magnitude, problem.length, (problem.lhs.dtype,))


def test_sizes_int64_on_device(rng):
    problem = problem_of(rng, "sizes-int64-on-device")
    wanted = problem.check()
    assert problem.sizes.dtype == np.int64
    for kind in ("int32", "uint32", "int16"):
        problem.sizes = Operand(problem.sizes.values.astype(kind))
        np.testing.assert_array_equal(problem.run(), wanted)


def test_sizes_too_large(rng):
    refused_and_clamped(problem_of(rng, "sizes-too-large"), ("group 1", "40 rows wanted", "24 left"))


def test_sizes_negative(rng):
    refused_and_clamped(problem_of(rng, "sizes-negative"), ("group 1", "-5", "negative"))


def refused_and_clamped(problem, words):
    """Refused at once on the host; the reference, asked to act as a device, clamps, touches nothing else, and tells when asked."""
    for function, check in ((hgg.ragged_dot_general, "none"), (hgg.ragged_dot_general, "sync"), (hgg.ragged_dot_reference, "sync")):
        with pytest.raises(ValueError) as caught:
            problem.run(function, check=check)
        for word in words:
            assert word in str(caught.value)
        problem.check_memory()
    value, magnitude = problem.expected()
    exact = oracle.forward(problem.lhs.values, problem.rhs.values, problem.sizes.values)
    result = problem.run(hgg.ragged_dot_reference)
    assert_close(result, exact, magnitude, problem.length, (problem.lhs.dtype,))
    assert_close(value, exact, magnitude, problem.length, (np.dtype(np.float64),))
    assert result.astype(np.float64).any()


def test_many_groups(rng):
    sizes = rng.integers(0, 5, 1025)
    problem_of(rng, "many-groups", sizes=sizes, m=int(sizes.sum())).check()


def test_accumulate(rng):
    problem = problem_of(rng, "accumulate", c="out", alpha=0.5, beta=1)
    before = problem.out.values.copy()
    assert problem.out.dtype == np.float32
    result = problem.check()
    np.testing.assert_array_equal(result[1], before[1])


def test_transposed_rhs(rng):
    problem = problem_of(rng, "transposed-rhs", give_out=False)
    wanted = problem.check()
    stored = np.ascontiguousarray(problem.rhs.values.transpose(0, 2, 1))
    numbers = hgg.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    by_numbers = hgg.ragged_dot_general(problem.lhs.array, stored, problem.sizes.array, numbers)
    by_view = hgg.ragged_dot(problem.lhs.array, stored.transpose(0, 2, 1), problem.sizes.array)
    np.testing.assert_array_equal(by_numbers, wanted)
    np.testing.assert_array_equal(by_view, wanted)
    config = hgg.config_for_ragged_dot(problem.lhs.array, stored, problem.sizes.array, numbers)  # exists: no copy is needed
    assert config.trans_b
    assert config.rhs_strides[2:] == (1, problem.rhs.shape[1])


def test_wrong_shapes(rng):
    problem = problem_of(rng, "wrong-shapes")
    lhs, rhs, sizes = problem.lhs.array, problem.rhs.array, problem.sizes.array
    for arguments, words in [
        ((lhs, rhs[:, :63], sizes), ("contracting", "(64,)", "(63,)", "equal")),
        ((lhs, rhs, np.array([32, 16, 16])), ("group_sizes", "3", "2")),
        ((lhs, rhs, sizes.astype(np.float32)), ("group_sizes", "float32", "integer")),
        ((lhs[None], rhs, sizes), ("lhs", "(1, 64, 64)", "(m, k)")),
    ]:
        with pytest.raises(TypeError) as caught:
            hgg.ragged_dot(*arguments)
        for word in words:
            assert word in str(caught.value)


def tuned_config(name):
    case = CASES[name]
    kind, groups = dtype_of(case["dtype"]), 4
    lhs, rhs = hgg.ArraySpec((case["m"], case["k"]), kind), hgg.ArraySpec((groups, case["k"], case["n"]), kind)
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((groups,), np.int32))


@pytest.fixture
def injected():
    """A backend with algorithms that are fast and wrong, and one that is slow and right; it notes the sizes it is run with."""
    from fake_backend import FakeBackend

    backend = FakeBackend(["wrong", "good:5", "wrong_for:one_group"])
    hgg.register_backend(backend, ("cpu",))
    yield backend
    hgg.unregister_backend("double")


def test_tuning_sees_valid_sizes(injected):
    seen = []
    injected.watch = lambda sizes, rows: seen.append((rows, sizes.tolist()))
    with hgg.GroupedMatmulPlan(tuned_config("tuning-sees-valid-sizes"), "double", "cpu") as plan:
        report = plan.autotune(isolate=False, repetitions=2, store=False)
    assert report.size_samples == [[251, 251, 250, 250]]
    assert seen[0] == seen[-1] == (1002, [251, 251, 250, 250])  # checked first and timed last
    assert all(min(sizes) >= 0 and sum(sizes) <= rows for rows, sizes in seen)
    assert {rows for rows, _ in seen} == {961, 1002, 1024}  # and every other extent that the plan serves, the least and the most of them
    again = []
    injected.watch = lambda sizes, rows: again.append((rows, sizes.tolist()))
    with hgg.GroupedMatmulPlan(tuned_config("tuning-sees-valid-sizes"), "double", "cpu") as plan:
        plan.autotune(isolate=False, repetitions=2, store=False, seed=7)
    assert again == seen  # nothing random in them


def test_tuning_rejects_wrong(injected, rng):
    name = "tuning-rejects-wrong"
    with hgg.GroupedMatmulPlan(tuned_config(name), "double", "cpu") as plan:
        assert plan.algorithm.name == "wrong"  # the backend's own best guess
        report = plan.autotune(CASES[name]["group_sizes"], repetitions=2)
        assert plan.algorithm.name == "good:5"
        problem = problem_of(rng, name)
        value, magnitude = problem.expected()
        result = plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array)
        assert_close(result, value, magnitude, problem.length, (problem.lhs.dtype,))
    rows = {row.algorithm.name: row for row in report.rows}
    assert {algorithm: row.verdict for algorithm, row in rows.items()} == {"wrong": "wrong", "good:5": "ok", "wrong_for:one_group": "wrong"}
    assert rows["wrong"].error > 0.1
    assert "elements are wrong" in rows["wrong"].reason


def test_beta_with_tail(rng):
    for c in ("array", "out"):
        problem = problem_of(rng, "beta-with-tail", c=c, alpha=2, beta=0.5)
        before = problem.c.values.copy()
        result = problem.check()
        np.testing.assert_array_equal(result[50:], (before[50:].astype(np.float32) * np.float32(0.5)).astype(before.dtype))


def test_nan_weights_of_empty_group(rng):
    problem = problem_of(rng, "nan-weights-of-empty-group")
    assert np.isnan(problem.rhs.values[1].astype(np.float64)).all()
    assert np.isfinite(problem.check().astype(np.float64)).all()


def test_k_zero(rng):
    assert not problem_of(rng, "k-zero").check().any()


def test_n_zero(rng):
    assert problem_of(rng, "n-zero").check().shape == (24, 0)


def test_sizes_per_batch(rng):
    problem = problem_of(rng, "sizes-per-batch")
    result = problem.check()
    for entry, sizes in enumerate(problem.sizes.values):
        alone = hgg.ragged_dot(problem.lhs.array[entry], problem.rhs.array[:, entry], sizes)
        np.testing.assert_array_equal(result[entry], alone)


def test_batch_mode_ignores_sizes(rng):
    problem = problem_of(rng, "batch-mode-ignores-sizes")
    result = problem.check()
    problem.sizes = Operand(np.array([-9, 2**31 - 1], np.int32))
    np.testing.assert_array_equal(problem.run(), result)


def test_expert_past_2_to_the_32(tmp_path, rng):
    case = CASES["expert-past-2-to-the-32"]
    kind, stride = dtype_of(case["dtype"]), 2**31
    path = tmp_path / "experts"
    with path.open("wb") as file:
        file.truncate((2 * stride + case["k"] * case["n"]) * kind.itemsize)
    flat = np.memmap(path, kind, "r+")
    rhs = np.lib.stride_tricks.as_strided(
        flat, (3, case["k"], case["n"]), (stride * kind.itemsize, case["n"] * kind.itemsize, kind.itemsize)
    )
    weights = random_values(rng, rhs.shape[1:], case["dtype"])
    rhs[2] = weights
    lhs = random_values(rng, (case["m"], case["k"]), case["dtype"])
    got = hgg.ragged_dot(lhs, rhs, [0, 0, case["m"]])
    np.testing.assert_array_equal(got, hgg.ragged_dot(lhs, weights[None], [case["m"]]))
    assert got.astype(np.float64).any()


def test_group_offset(rng):
    problem = problem_of(rng, "group-offset")
    result = problem.check().astype(np.float64)
    assert not result[:10].any()
    assert not result[65:].any()
    lhs, rhs = problem.lhs.values, problem.rhs.values
    exact = oracle.forward(lhs, rhs, problem.sizes.values, group_offset=1)
    assert_close(result.astype(lhs.dtype), exact, problem.expected()[1], problem.length, (lhs.dtype,))


def test_broadcast_rhs(rng):
    problem = problem_of(rng, "broadcast-rhs", layouts={"rhs": Layout(broadcast=(0,))})
    assert problem.rhs.array.strides[0] == 0
    problem.check()


def test_end_offsets(rng):
    problem = problem_of(rng, "end-offsets")
    result = problem.check()
    by_sizes = hgg.ragged_dot(problem.lhs.array, problem.rhs.array, [10, 0, 54])
    np.testing.assert_array_equal(result, by_sizes)
