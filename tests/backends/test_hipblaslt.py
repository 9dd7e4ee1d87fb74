"""The hipBLASLt backend on a HIP device, real, emulated, or the stand-in of tests/hip_standin. Shapes are tiny: an emulator runs them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import device_graphs
import ml_dtypes
import numpy as np
import pytest
from devices import DeviceLibrary, HostSizes
from generators import (
    FORWARD,
    UNALIGNED,
    Layout,
    Mode,
    Operand,
    Problem,
    balanced_sizes,
    case_problem,
    load_cases,
    make_problem,
    random_sizes,
    random_values,
    size_patterns,
)
from kernel_files import remove_kernel_files

import hipgroupgemm as hgg
from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.operands.views import Device

pytestmark = pytest.mark.hip
DEVICE = "rocm:0"
HIP = DeviceLibrary(DEVICE)
SIXTEEN = ("float16", "bfloat16")
CASES = load_cases()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def run(problem: Problem, **settings):
    """Checks a problem on hipBLASLt; where it has no kernels for the type, that it says so instead. Without a product none are needed."""
    nothing = 0 in problem.out.shape or (problem.numbers.lhs_ragged_dimensions == (0,) and problem.lhs.shape[0] == 0)
    if problem.lhs.dtype.name not in served_types() and not nothing:
        with pytest.raises(NotImplementedError, match="hipBLASLt has no grouped kernel"):
            problem.run(backend="hipblaslt", **settings)
        return None
    return problem.check(backend="hipblaslt", **settings)


_served: dict[str, bool] = {}


def served_types() -> set[str]:
    """The 16-bit types that this device's hipBLASLt has grouped kernels for: fp16 everywhere, bf16 where the library has them."""
    if not _served:
        for name in SIXTEEN:
            spec = [hgg.ArraySpec(shape, name, device=DEVICE) for shape in ((64, 32), (3, 32, 48))]
            config = hgg.config_for_ragged_dot(*spec, hgg.ArraySpec((3,), "int32", device=DEVICE))
            try:
                hgg.GroupedMatmulPlan(config, "hipblaslt", DEVICE).close()
                _served[name] = True
            except NotImplementedError:
                _served[name] = False
    assert _served["float16"], "hipBLASLt has no fp16 grouped kernels here: every build has, so something is broken"
    return {name for name, served in _served.items() if served}


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("pattern", ["balanced", "random", "one group", "every other empty", "none", "tail"])
def test_forward_and_weight_gradient(rng, dtype, pattern):
    sizes = size_patterns(rng, 61, 5)[pattern]
    run(make_problem(rng, Mode.NON_CONTRACTING, 61, 40, 24, sizes, dtype, library=HIP))
    run(make_problem(rng, Mode.CONTRACTING, 40, 24, 61, sizes, dtype, library=HIP))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_operands_read_as_they_lie(rng, dtype):
    """Transposes of rhs (data gradient) and of both operands of a weight gradient, without a copy."""
    sizes = random_sizes(rng, 50, 4, full=True)
    transposed = Layout(order=(0, 2, 1))
    run(make_problem(rng, Mode.NON_CONTRACTING, 50, 40, 32, sizes, dtype, layouts={"rhs": transposed}, library=HIP))
    run(make_problem(rng, Mode.CONTRACTING, 40, 32, 50, sizes, dtype, layouts={"lhs": Layout(order=(1, 0))}, library=HIP))
    run(make_problem(rng, Mode.CONTRACTING, 40, 32, 50, sizes, dtype, layouts={"rhs": Layout(order=(1, 0))}, library=HIP))
    run(make_problem(rng, Mode.CONTRACTING, 40, 32, 50, sizes, dtype, layouts={"out": Layout(order=(0, 2, 1))}, library=HIP))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_padded_and_unaligned(rng, dtype):
    sizes = random_sizes(rng, 37, 3, full=True)
    padded = dict.fromkeys(("lhs", "rhs", "out", "c"), Layout(pad=8))
    unaligned = dict.fromkeys(("lhs", "rhs", "out", "c", "sizes"), UNALIGNED)
    for layouts in (padded, unaligned):
        run(make_problem(rng, Mode.NON_CONTRACTING, 37, 29, 23, sizes, dtype, layouts=layouts, c="array", beta=0.5, library=HIP))
        run(make_problem(rng, Mode.CONTRACTING, 29, 23, 37, sizes, dtype, layouts=layouts, c="array", beta=-1.0, library=HIP))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_batches(rng, dtype):
    shared, own = np.array([9, 0, 12], np.int32), np.array([[9, 0, 12], [0, 25, 0]], np.int32)
    for sizes in (shared, own):
        run(make_problem(rng, Mode.NON_CONTRACTING, 25, 24, 16, sizes, dtype, batch=2, library=HIP))
        run(make_problem(rng, Mode.CONTRACTING, 24, 16, 25, sizes, dtype, batch=2, library=HIP))
    run(make_problem(rng, Mode.BATCH, 33, 24, 32, [3, 1], dtype, batch=4, library=HIP))


@pytest.mark.parametrize("mode", [Mode.NON_CONTRACTING, Mode.CONTRACTING])
@pytest.mark.parametrize(("alpha", "beta", "c"), [(2.0, 0.5, "array"), (0.5, 1.0, "out"), (0.0, 2.0, "array"), (-1.5, 0.0, None)])
def test_alpha_beta_c(rng, mode, alpha, beta, c):
    m, k = (40, 24) if mode is Mode.NON_CONTRACTING else (24, 40)
    run(make_problem(rng, mode, m, 32, k, [10, 0, 20], "float16", alpha=alpha, beta=beta, c=c, library=HIP))


def test_alpha_zero_reads_no_operand(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 20, 16, 16, [8, 12], "float16", c="array", alpha=0.0, beta=1.0, library=HIP)
    nan = Operand(np.full((20, 16), np.nan, np.float16), library=HIP)
    problem.lhs = nan
    np.testing.assert_array_equal(problem.run(backend="hipblaslt"), problem.c.values)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_bias_goes_to_covered_rows_only(rng, dtype):
    run(make_problem(rng, Mode.NON_CONTRACTING, 48, 40, 32, [10, 0, 20], dtype, bias=True, library=HIP))
    run(make_problem(rng, Mode.NON_CONTRACTING, 48, 40, 32, [10, 0, 20], dtype, bias=True, c="array", beta=1.0, library=HIP))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_float32_out(rng, dtype):
    """Where the library has kernels for it: they are other kernels than those for 16-bit output."""
    problem = make_problem(rng, Mode.CONTRACTING, 24, 32, 40, [10, 0, 20], dtype, out_dtype="float32", c="out", beta=1.0, library=HIP)
    try:
        problem.check(backend="hipblaslt")
    except NotImplementedError as error:
        assert f"hipBLASLt has no grouped kernel for {dtype} -> float32" in str(error)


@pytest.mark.parametrize("mode", [Mode.NON_CONTRACTING, Mode.CONTRACTING])
def test_few_columns(rng, mode):
    """hipBLASLt's m is our n, and few of its kernels take less than 8: right, or refused with that reason, and another backend serves."""
    for n in (1, 2, 3, 5, 7, 8, 9):
        m, k = (37, 24) if mode is Mode.NON_CONTRACTING else (24, 37)
        problem = make_problem(rng, mode, m, n, k, [10, 0, 27], "float16", library=HIP)
        try:
            problem.check(backend="hipblaslt")
        except NotImplementedError as error:
            assert n < 8
            assert f"its m, which is {n} here; most of its kernels want 8 or more" in str(error)
            if "HIPGROUPGEMM_STANDIN" not in os.environ:  # which runs no kernels of Triton
                problem.check()


def test_tail_undefined_leaves_rows_alone(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 40, 32, 24, [10, 0, 15], "float16", tail="undefined", library=HIP)
    result = problem.run(backend="hipblaslt")
    assert np.isnan(result[25:]).all()
    assert np.isfinite(result[:25]).all()


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_sizes_of_any_integer_type(rng, kind):
    run(make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 0, 15], "float16", sizes_dtype=kind, library=HIP))


def test_end_offsets_and_strided_sizes(rng):
    run(make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 10, 25], "float16", offs=True, library=HIP))
    run(make_problem(rng, Mode.CONTRACTING, 16, 16, 30, [10, 10, 25], "float16", offs=True, layouts={"sizes": Layout(step=2)}, library=HIP))


def test_sizes_on_the_host(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 0, 15], "float16", poison=frozenset(), library=HIP)
    for sizes in ([10, 0, 15], [0, 30, 0], [1, 2, 3], [30, 0, 0], [0, 0, 0], [7, 7, 7]):  # more of them than pinned pieces
        problem.sizes = Operand(np.array(sizes, np.int16), library=HostSizes(DEVICE))
        problem.check(backend="hipblaslt")
    problem.sizes = Operand(np.array([10, 0, 21]), library=HostSizes(DEVICE))
    with pytest.raises(ValueError, match=r"group 2 .*21 rows wanted, 20 left of 30"):
        problem.run(backend="hipblaslt")


@pytest.mark.parametrize("on_device", [False, True])
def test_group_offset(rng, on_device):
    offset = Operand(np.array([1], np.int32), library=HIP).array if on_device else 1
    problem = make_problem(rng, Mode.NON_CONTRACTING, 50, 24, 16, [5, 10, 20, 2, 8], "float16", rhs_groups=3, group_offset=1, library=HIP)
    problem.run(backend="hipblaslt")
    value, _ = problem.expected()
    problem.settings["group_offset"] = offset
    result = problem.run(backend="hipblaslt")
    assert np.abs(result - value).max() <= 0.01 * np.abs(value).max()
    assert (result[:5] == 0).all()
    assert (result[37:] == 0).all()


@pytest.mark.parametrize(
    ("sizes", "offs", "facts"),
    [
        ([40, 40], False, "group 1 .*40 rows wanted, 24 left of 64"),
        ([32, -5, 32], False, "group 1 .*-5 rows wanted, 32 left of 64"),
        ([2**62, 2**62, 2**62], False, "group 0 "),
        ([30, 10, 64], True, "group 1 .*-20 rows wanted, 34 left"),
    ],
)
@pytest.mark.parametrize("mode", [Mode.NON_CONTRACTING, Mode.CONTRACTING])
def test_wrong_sizes_on_the_device(rng, sizes, offs, facts, mode):
    """Clamped as the reference clamps them, nothing outside the operands touched, the fault kept until it is asked for."""
    settings = {"sizes_dtype": "int64", "library": HIP, "poison": frozenset(), **({"offs": True} if offs else {})}
    m, k = (64, 24) if mode is Mode.NON_CONTRACTING else (24, 64)
    problem = make_problem(rng, mode, m, 16, k, sizes, "float16", **settings)
    run(problem)
    with pytest.raises(ValueError, match=facts):
        problem.run(backend="hipblaslt", check="sync")
    hgg.clear_plan_cache()


def test_plan_keeps_the_first_fault(rng):
    good = make_problem(rng, Mode.NON_CONTRACTING, 20, 16, 16, [8, 12], "float16", library=HIP)
    bad = Operand(np.array([8, 13], np.int32), library=HIP).array
    worse = Operand(np.array([-1, 13], np.int32), library=HIP).array
    config = hgg.config_for_ragged_dot(good.lhs.array, good.rhs.array, good.sizes.array)
    with hgg.GroupedMatmulPlan(config, "hipblaslt", DEVICE) as plan:
        plan.execute(good.lhs.array, good.rhs.array, good.sizes.array)
        plan.check()
        for sizes in (bad, worse, good.sizes.array):
            plan.execute(good.lhs.array, good.rhs.array, sizes)
        with pytest.raises(ValueError, match="13 rows wanted, 12 left"):
            plan.check()
        plan.check()


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("case", sorted(CASES))
def test_case_file(rng, case, dtype):
    """Every entry of the case file that this backend can meet, in both types; tuning's have tests of their own."""
    entry = {**CASES[case], "dtype": dtype}
    if case in ("tuning-sees-valid-sizes", "tuning-rejects-wrong", "wrong-shapes"):  # not about a backend
        return
    if case in ("sizes-too-large", "sizes-negative"):  # test_wrong_sizes_on_the_device has them
        return
    changes = {"library": HIP}
    if case == "many-groups":
        sizes = rng.integers(0, 5, 67)  # an emulator takes 40 s for a thousand; test_thousands_of_groups has more
        changes.update(sizes=sizes, m=int(sizes.sum()))
    if case == "expert-past-2-to-the-32":
        changes.update(sizes=[0, 0, 16])
    if case == "accumulate":
        changes.update(alpha=0.5, beta=1.0, c="out")
    if case == "beta-with-tail":
        changes.update(alpha=2.0, beta=0.5, c="array")
    if case == "odd-everything":
        changes["layouts"] = dict.fromkeys(("lhs", "rhs", "out"), UNALIGNED)
    if case == "broadcast-rhs":
        changes["layouts"] = {"rhs": Layout(broadcast=(0,))}
    if case == "transposed-rhs":
        changes["layouts"] = {"rhs": Layout(order=(0, 2, 1))}
    problem = case_problem(rng, entry, **changes)
    run(problem)


def test_thousands_of_groups(rng):
    """More groups than one block has threads. Two rows in all: what costs time on an emulator is groups that are not empty."""
    sizes = np.zeros(2000, np.int32)
    sizes[[700, 1999]] = 1
    run(make_problem(rng, Mode.NON_CONTRACTING, 2, 16, 8, sizes, "float16", library=HIP))


@pytest.mark.parametrize("extents", [(0, 16, 16), (24, 0, 16), (24, 16, 0)])
@pytest.mark.parametrize("mode", [Mode.NON_CONTRACTING, Mode.CONTRACTING])
def test_extents_of_zero(rng, mode, extents):
    m, n, k = extents
    rows = m if mode is Mode.NON_CONTRACTING else k
    sizes = balanced_sizes(rows, 3)
    run(make_problem(rng, mode, m, n, k, sizes, "float16", library=HIP))
    run(make_problem(rng, mode, m, n, k, sizes, "float16", c="array", beta=2.0, library=HIP))
    run(make_problem(rng, mode, m, n, k, np.zeros(0, np.int32), "float16", library=HIP))


def test_every_ragged_extent_of_a_plan(rng):
    """One plan serves every R up to its capacity, and no call enumerates or initialises anew."""
    problem = make_problem(rng, Mode.NON_CONTRACTING, 40, 16, 16, [10, 30], "float16", library=HIP)
    config = hgg.config_for_ragged_dot(problem.lhs.array, problem.rhs.array, problem.sizes.array)
    with hgg.GroupedMatmulPlan(config, "hipblaslt", DEVICE) as plan:
        for rows in (40, 1, 39, 17, 0):
            smaller = make_problem(rng, Mode.NON_CONTRACTING, rows, 16, 16, random_sizes(rng, rows, 2), "float16", library=HIP)
            value, magnitude = smaller.expected()
            out = plan.execute(smaller.lhs.array, smaller.rhs.array, smaller.sizes.array).to_numpy()
            assert np.abs(out - value).max(initial=0) <= 1e-2 * (1 + magnitude.max(initial=0))


def test_algorithms_are_found_by_index_and_name_together(rng):
    """One that hipBLASLt's ranking has not, with the workspace that it has in the whole list."""
    device, backend = Device.of(DEVICE), get_backend("hipblaslt")
    problem = make_problem(rng, Mode.NON_CONTRACTING, 45, 40, 32, [20, 0, 17], "float16", library=HIP)
    key = hgg.config_for_ragged_dot(problem.lhs.array, problem.rhs.array, problem.sizes.array).key()
    every = backend.algorithms(key, device, AlgorithmLimits())
    for algorithm in (every[0], every[-1]):
        assert backend.find_algorithm(key, device, algorithm.name, algorithm.index) == algorithm
    assert backend.find_algorithm(key, device, every[0].name, every[-1].index) is None
    assert backend.find_algorithm(key, device, every[-1].name, 1 << 30) is None
    assert backend.find_algorithm(key, device, "nobody", -1) is None
    assert backend.versions(device)["hipblaslt"][0].isdigit()


def test_a_stored_algorithm_is_found_again(rng):
    pytest.importorskip("msgspec", reason="NOT RUN: the store needs msgspec")
    from store_reports import report, row

    from hipgroupgemm.store.identity import identity
    from hipgroupgemm.tuning.keep import keep

    device = Device.of(DEVICE)
    problem = make_problem(rng, Mode.NON_CONTRACTING, 45, 40, 32, [20, 0, 17], "float16", library=HIP)
    config = hgg.config_for_ragged_dot(problem.lhs.array, problem.rhs.array, problem.sizes.array)
    every = get_backend("hipblaslt").algorithms(config.key(), device, AlgorithmLimits())
    about = identity(device)
    assert about["versions"]["hipblaslt"][0].isdigit() and about["backends"]["hipblaslt"] == ["hipgroupgemm", "hipblaslt"]
    assert about["target"].startswith("gfx") and about["compute_units"] > 0
    best = dataclasses.replace(row("hipblaslt", 0, 0.5), algorithm=every[-1])
    assert keep(dataclasses.replace(report(config, [best]), identity=about))
    with hgg.GroupedMatmulPlan(config, device=DEVICE) as plan:
        assert plan.algorithm == every[-1] and "from the tuning store" in plan.explain()
    problem.check()
    problem.check(use_store=False)
    hgg.clear_plan_cache()


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_algorithms_pinned_by_name_and_index(rng, dtype):
    if dtype not in served_types():
        return
    problem = make_problem(rng, Mode.NON_CONTRACTING, 45, 40, 32, [20, 0, 17], dtype, library=HIP)
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), "hipblaslt", DEVICE) as plan:
        algorithms = plan.get_algorithms()
        assert len(algorithms) > 3
        assert len({(a.index, a.name) for a in algorithms}) == len(algorithms)
        assert all(a.workspace_size >= 168 * 3 for a in algorithms)
        least = min(a.workspace_size for a in algorithms)
        assert all(a.workspace_size <= least for a in plan.get_algorithms(max_workspace_size=least))
        assert plan.get_algorithms(max_workspace_size=least - 1) == []
        assert plan.get_algorithms(max_algorithm_count=2) == algorithms[:2]
        value, magnitude = problem.expected()
        for algorithm in (algorithms[0], algorithms[len(algorithms) // 2], algorithms[-1]):
            plan.set_algorithm(algorithm.name, algorithm.index)
            plan.execute(*arrays, out=problem.out.array)
            assert (np.abs(problem.out.read().astype(float) - value) <= 1e-2 * (1 + magnitude)).all()
        first, last = algorithms[0], algorithms[-1]
        with pytest.raises(ValueError, match="get_algorithms"):
            plan.set_algorithm(first.name, last.index)
        with pytest.raises(ValueError, match="get_algorithms"):
            plan.set_algorithm("Cijk_no_such_kernel", first.index)


def test_a_workspace_of_the_callers(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 45, 40, 32, [20, 0, 17], "float16", library=HIP)
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), "hipblaslt", DEVICE) as plan:
        workspace = hgg.DeviceArray.empty((plan.workspace_size,), "uint8", DEVICE)
        for given in (workspace, None, workspace):
            problem.out = Operand(np.full((45, 40), np.nan, np.float16), library=HIP)
            plan.execute(*arrays, out=problem.out.array, workspace=given)
            value, magnitude = problem.expected()
            assert (np.abs(problem.out.read().astype(float) - value) <= 1e-2 * (1 + magnitude)).all()
        short = hgg.DeviceArray.empty((plan.workspace_size - 1,), "uint8", DEVICE)
        with pytest.raises(ValueError, match="workspace"):
            plan.execute(*arrays, workspace=short)


def test_refusals_carry_the_reason():
    def config(shape, dtype="float16", strides=None, out=None):
        lhs = hgg.ArraySpec(shape, dtype, strides=strides, device=DEVICE)
        rhs = hgg.ArraySpec((3, shape[1], 48), dtype, device=DEVICE)
        return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((3,), "int32", device=DEVICE), out=out)

    for made, reason in (
        (config((64, 32), strides=(256, 4)), "lhs_inner_stride = 2"),
        (config((64, 32), strides=(0, 2)), "rows overlap"),
        (config((2, 32), strides=(2**34, 2)), "32 bits"),
        (config((64, 32), "float8_e4m3fn"), "lhs of type float8_e4m3fn: not offered"),
        (config((64, 32), out=hgg.ArraySpec((64, 48), "float16", strides=(2, 128), device=DEVICE)), "column-major"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            hgg.GroupedMatmulPlan(made, "hipblaslt", DEVICE)


def test_several_streams_and_threads(rng):
    """One plan from four threads on two streams: calls take turns, each stream has scratch and a handle of its own."""
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime("rocm")
    streams = [0, runtime.create_stream(0)]
    problems = [
        make_problem(
            rng,
            Mode.NON_CONTRACTING,
            30,
            16,
            16,
            random_sizes(rng, 30, 3, full=True),
            "float16",
            library=DeviceLibrary(DEVICE, streams[number % 2]),
        )
        for number in range(4)
    ]
    first = problems[0]
    config = hgg.config_for_ragged_dot(first.lhs.array, first.rhs.array, first.sizes.array)
    errors: list[BaseException] = []

    def work(plan, number):
        try:
            problem = problems[number]
            for _ in range(3):
                plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array, stream=streams[number % 2])
        except BaseException as error:
            errors.append(error)

    with hgg.GroupedMatmulPlan(config, "hipblaslt", DEVICE) as plan:
        threads = [threading.Thread(target=work, args=(plan, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        runtime.synchronize_device(0)
    assert not errors
    for problem in problems:
        value, magnitude = problem.expected()
        assert (np.abs(problem.out.read().astype(float) - value) <= 1e-2 * (1 + magnitude)).all()


def test_graph_capture(rng):
    """Captured once, replayed with other sizes: the graph reads the sizes that are on the device then."""
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime("rocm")
    stream = runtime.create_stream(0)
    library = DeviceLibrary(DEVICE, stream)
    problem = make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 5, 15], "float16", library=library, poison=frozenset())
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), "hipblaslt", DEVICE) as plan:
        plan.execute(*arrays, stream=0)  # on any stream: the captured one was never used
        try:
            graphs = [capture(runtime, stream, lambda: plan.execute(*arrays, out=problem.out.array, stream=stream))]
        except RuntimeError as error:
            if "hipStreamBeginCapture" not in str(error):
                raise
            pytest.skip(f"NOT RUN: this device cannot capture ({error})")

        def misuse():
            plan.execute(*arrays, out=problem.out.array, stream=stream)
            with pytest.raises(RuntimeError, match="sync"):
                plan.execute(*arrays, out=problem.out.array, stream=stream, check="sync")
            with pytest.raises(RuntimeError, match="host"):
                plan.execute(*arrays[:2], [10, 5, 15], out=problem.out.array, stream=stream)

        graphs.append(capture(runtime, stream, misuse))
        for sizes in ([10, 5, 15], [0, 30, 0], [7, 0, 3]):
            for graph in graphs:
                values = np.array(sizes, np.int32)
                problem.sizes.values = values
                runtime.memcpy_async(problem.sizes.array.pointer, values.ctypes.data, values.nbytes, stream)
                runtime.memset_async(problem.out.array.pointer, 0xFF, 30 * 16 * 2, stream)
                device_graphs.launch_graph(runtime, graph, stream)
                runtime.synchronize_stream(stream)
                value, magnitude = problem.expected()
                assert (np.abs(problem.out.read().astype(float) - value) <= 1e-2 * (1 + magnitude)).all(), sizes
        plan.execute(*arrays, out=problem.out.array, stream=stream)  # outside the capture again
        runtime.synchronize_stream(stream)
        for graph in graphs:
            device_graphs.destroy_graph(runtime, graph)
    runtime.destroy_stream(stream)


def capture(runtime, stream, work):
    with device_graphs.capture(runtime, stream) as graph:
        work()
    return graph[0]


@pytest.mark.parametrize("mode", [Mode.NON_CONTRACTING, Mode.CONTRACTING])
def test_lists(rng, mode):
    """One array per group anywhere in memory, rhs or out and c: the records and the kernel of uncovered slabs take their addresses."""
    m, n, k = (37, 24, 16) if mode is Mode.NON_CONTRACTING else (16, 24, 37)
    name = "rhs" if mode is Mode.NON_CONTRACTING else "out"
    own = np.array([[9, 0, 28], [0, 25, 0]], np.int32)
    for settings in (
        {},
        {"layouts": {name: Layout(order=(0, 2, 1))}},
        {"layouts": dict.fromkeys((name, "c"), UNALIGNED), "c": "array", "beta": 0.5},
        {"c": "out", "beta": -1.0, "alpha": 2.0},
        {"c": "array", "beta": 2.0, "alpha": 0.0},
        {"batch": 2},
        {"batch": 2, "sizes": own, "c": "array", "beta": 0.5},
        {"group_offset": 1, **({"rhs_groups": 2} if mode is Mode.NON_CONTRACTING else {"group_count": 2})},
        {"sizes": [0, 0, 0, 0]},
    ):
        run(make_problem(rng, mode, m, n, k, dtype="float16", listed=True, library=HIP, **{"sizes": [9, 0, 12, 16], **settings}))


@pytest.mark.parametrize("mode", [Mode.NON_CONTRACTING, Mode.CONTRACTING])
def test_lists_move_and_graphs_keep_theirs(rng, mode):
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime("rocm")
    stream = runtime.create_stream(0)
    library = DeviceLibrary(DEVICE, stream)
    m, n, k = (30, 16, 24) if mode is Mode.NON_CONTRACTING else (16, 24, 30)
    problems = [make_problem(rng, mode, m, n, k, [10, 0, 5, 15], "float16", listed=True, library=library) for _ in range(3)]
    arrays = [(p.lhs.array, p.rhs.array, p.sizes.array) for p in problems]
    config = hgg.config_for_ragged_dot(*arrays[0], problems[0].numbers, out=problems[0].out.array)

    def right(problem):
        value, magnitude = problem.expected()
        assert (np.abs(problem.out.read().astype(float) - value) <= 1e-2 * (1 + magnitude)).all()

    def clear(problem):
        for part in problem.out.parts if mode is Mode.CONTRACTING else [problem.out]:
            runtime.memset_async(part.storage.ptr, 0xFF, part.before.nbytes, stream)

    with hgg.GroupedMatmulPlan(config, "hipblaslt", DEVICE) as plan:
        for at in (0, 1, 1, 0, 2):
            clear(problems[at])
            plan.execute(*arrays[at], out=problems[at].out.array, stream=stream)
            runtime.synchronize_stream(stream)
            right(problems[at])
        try:
            graph = capture(
                runtime, stream, lambda: [plan.execute(*arrays[at], out=problems[at].out.array, stream=stream) for at in (0, 1)]
            )
        except RuntimeError as error:
            if "hipStreamBeginCapture" not in str(error):
                raise
            pytest.skip(f"NOT RUN: this device cannot capture ({error})")
        plan.execute(*arrays[2], out=problems[2].out.array, stream=stream)
        for _ in range(2):
            clear(problems[0]), clear(problems[1])
            device_graphs.launch_graph(runtime, graph, stream)
            runtime.synchronize_stream(stream)
            right(problems[0]), right(problems[1])
        device_graphs.destroy_graph(runtime, graph)
    runtime.destroy_stream(stream)


def test_close_gives_back_what_captures_used(rng):
    """The memory of many captures, each with scratch and a GroupedGemm of its own. Handles stay, for other plans."""
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime("rocm")
    stream = runtime.create_stream(0)
    library = DeviceLibrary(DEVICE, stream)
    problem = make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 5, 15], "float16", library=library, poison=frozenset())
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    config = hgg.config_for_ragged_dot(*arrays)
    left = []
    for captures in (1, 1, 12):  # the first makes what stays: the handle, modules
        with hgg.GroupedMatmulPlan(config, "hipblaslt", DEVICE) as plan:
            plan.execute(*arrays, stream=0)
            try:
                graphs = [
                    capture(runtime, stream, lambda plan=plan: plan.execute(*arrays, out=problem.out.array, stream=stream))
                    for _ in range(captures)
                ]
            except RuntimeError as error:
                if "hipStreamBeginCapture" not in str(error):
                    raise
                pytest.skip(f"NOT RUN: this device cannot capture ({error})")
            for graph in graphs:
                device_graphs.destroy_graph(runtime, graph)
        runtime.synchronize_device(0)
        left.append(runtime.memory_info(0)[0])
    assert left[2] == left[1]
    runtime.destroy_stream(stream)


def test_handles_are_bounded(rng):
    """Plans on more streams than there may be handles (26 MB each): streams share, and the results are right."""
    from hipgroupgemm.backends.hipblaslt.executable import handles
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime("rocm")
    streams = [runtime.create_stream(0) for _ in range(12)]
    problem = make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 5, 15], "float16", library=HIP, poison=frozenset())
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    value, magnitude = problem.expected()
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), "hipblaslt", DEVICE) as plan:
        results = [plan.execute(*arrays, stream=stream) for stream in streams]
        runtime.synchronize_device(0)
        assert len(handles._entries) <= 8
    for result in results:
        assert (np.abs(result.to_numpy().astype(float) - value) <= 1e-2 * (1 + magnitude)).all()
    for stream in streams:
        runtime.destroy_stream(stream)


MISSING = """
import logging, sys
import numpy as np
import hipgroupgemm as hgg
from hipgroupgemm.backends import get_backend
logging.basicConfig(level=logging.WARNING)
rng, (name, index) = np.random.default_rng(), sys.argv[1:]
lhs, rhs = (rng.standard_normal(shape).astype(np.float16) for shape in ((45, 32), (3, 32, 40)))
sizes = np.array([20, 0, 17], np.int32)
arrays = [hgg.DeviceArray.from_numpy(array, "rocm:0") for array in (lhs, rhs, sizes)]
try:
    out = hgg.ragged_dot(*arrays, backend="hipblaslt").to_numpy().astype(float)
    wanted = hgg.ragged_dot_reference(lhs, rhs, sizes, accumulate=np.float64).astype(float)
    print("ran", bool((np.abs(out - wanted) < 0.1).all()))
except NotImplementedError as error:
    print("refused", "missing" in str(error), "none of the" in str(error))
    sys.exit()
with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), "hipblaslt", "rocm:0") as plan:
    try:
        plan.set_algorithm(name, int(index))
        print("pinned", plan.algorithm.name == name)
    except ValueError as error:
        print("unpinned", name in str(error), plan.algorithm.name != name)
    print("listed", name in [a.name for a in plan.get_algorithms()])
"""


def test_missing_kernel_files(tmp_path):
    """Algorithms whose code file is gone are struck out by name, and the next one runs; where none runs, that is the refusal."""
    config = hgg.config_for_ragged_dot(
        hgg.ArraySpec((45, 32), "float16", device=DEVICE),
        hgg.ArraySpec((3, 32, 40), "float16", device=DEVICE),
        hgg.ArraySpec((3,), "int32", device=DEVICE),
    )
    first = get_backend("hipblaslt").algorithms(config.key(), Device.of(DEVICE), AlgorithmLimits(1))[0]
    from hipgroupgemm.runtime import get_runtime

    target = get_runtime("rocm").device_info(0).architecture.partition(":")[0]
    files = remove_kernel_files(tmp_path, f"_HH_HH*_GG_*_Ailk_Bljk_*_{target}.co")
    struck = 0
    for number, gone in enumerate(files):  # one of them has the algorithm that is ranked first
        folder = tmp_path / str(number)
        folder.mkdir()
        remove_kernel_files(folder, gone.name)
        environment = os.environ | {"HIPBLASLT_TENSILE_LIBPATH": str(folder), "HIPGROUPGEMM_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", MISSING, first.name, str(first.index)]
        root = Path(__file__).resolve().parents[2]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=root)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        if first.name in result.stderr:
            struck += 1
            assert "struck out" in result.stderr
            assert lines in (["ran True", "unpinned True True", "listed False"], ["refused True True"]), result.stderr
        else:
            assert lines == ["ran True", "pinned True", "listed True"], result.stderr
    assert struck == 1


def test_closed_plan(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 5, 15], "float16", library=HIP)
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), "hipblaslt", DEVICE)
    plan.execute(*arrays)
    plan.close()
    plan.close()
    with pytest.raises(RuntimeError, match="closed"):
        plan.execute(*arrays)


def test_rocm_takes_hipblaslt_first(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 30, 16, 16, [10, 5, 15], "float16", library=HIP)
    arrays = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays), device=DEVICE) as plan:
        assert plan.backend == "hipblaslt"
        assert "rhs" in plan.explain()
    result = hgg.ragged_dot_general(*arrays, FORWARD)
    assert isinstance(result, hgg.DeviceArray)
    assert result.dtype == np.float16


def test_dlpack_producers(rng):
    """Anything with DLPack on a ROCm device is taken, and the result goes back the same way."""

    class Producer:
        def __init__(self, values):
            self.array = hgg.DeviceArray.from_numpy(values, DEVICE)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **settings):
            return self.array.__dlpack__(**settings)

    lhs, rhs = random_values(rng, (20, 16), "float16"), random_values(rng, (2, 16, 24), "float16")
    sizes = np.array([13, 7], np.int64)
    result = hgg.ragged_dot(Producer(lhs), Producer(rhs), Producer(sizes))
    wanted = hgg.ragged_dot_reference(lhs, rhs, sizes, accumulate=np.float64)
    assert np.abs(result.to_numpy().astype(float) - wanted.astype(float)).max() < 0.05
    assert ml_dtypes.finfo(result.dtype).bits == 16
