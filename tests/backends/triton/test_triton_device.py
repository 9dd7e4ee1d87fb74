"""The Triton backend on a device, CUDA or ROCm (real or emulated), or interpreted: every mode and rule against the float64 reference.

Operands lie in the runtime's own memory, so that no array library is needed. Shapes are small and odd, memory around operands is NaN.
"""

from __future__ import annotations

import contextlib
import threading

import device_graphs
import numpy as np
import pytest
from generators import (
    BATCH,
    UNALIGNED,
    Layout,
    Library,
    Mode,
    Operand,
    case_problem,
    load_cases,
    make_problem,
    random_sizes,
    size_patterns,
)

import hipgroupgemm as hgg
from hipgroupgemm import runtime as runtimes
from hipgroupgemm.operands.views import ArrayView, Device

pytestmark = [pytest.mark.usefixtures("library")]
KINDS = [
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("rocm", marks=pytest.mark.hip),
    pytest.param("interpreter", marks=pytest.mark.interpreter),
]
NON_CONTRACTING, CONTRACTING = Mode.NON_CONTRACTING, Mode.CONTRACTING
RAGGED = pytest.mark.parametrize("mode", [NON_CONTRACTING, CONTRACTING], ids=lambda mode: mode.name)


class DeviceMemory(Library):
    """Operands in a runtime's memory, freed with the test."""

    def __init__(self, kind: str) -> None:
        self.device_kind = "cuda" if kind == "interpreter" else kind
        self.name, self.device, self.kind = kind, f"{self.device_kind}:0", kind
        self.runtime = runtimes.get_runtime(self.device_kind)
        self.blocks: list[int] = []

    def to_device(self, storage):
        with self.runtime.use_device(0):
            address = self.runtime.malloc_plain(max(storage.nbytes, 1), 0)
            self.blocks.append(address)
            self.runtime.memcpy_async(address, storage.ctypes.data, storage.nbytes)
            self.runtime.synchronize_device(0)
        return (address, storage.nbytes)

    def to_host(self, storage):
        address, size = storage
        host = np.empty(size, np.uint8)
        with self.runtime.use_device(0):
            self.runtime.synchronize_device(0)
            self.runtime.memcpy_async(host.ctypes.data, address, size)
            self.runtime.synchronize_device(0)
        return host

    def view(self, storage, offset, shape, strides, dtype):
        return ArrayView(storage[0] + offset, shape, strides, dtype, Device(self.device_kind, 0), "", None, False, self)

    def free(self):
        with self.runtime.use_device(0):
            self.runtime.synchronize_device(0)
            for address in self.blocks:
                self.runtime.free_plain(address, 0)


@pytest.fixture(params=KINDS)
def library(request, monkeypatch):
    with contextlib.ExitStack() as stack:
        if request.param == "interpreter":
            from triton_interpreter import interpreted

            stack.enter_context(interpreted(monkeypatch))
        memory = DeviceMemory(request.param)
        stack.callback(memory.free)
        yield memory


def triton_dot(*args, **kwargs):
    return hgg.ragged_dot_general(*args, backend="triton", **kwargs)


def run_plan(plan):
    """A function with ragged_dot_general's signature that runs a plan."""

    def run(lhs, rhs, group_sizes=None, ragged_dot_dimension_numbers=None, preferred_element_type=None, **kwargs):
        return plan.execute(lhs, rhs, group_sizes, **kwargs)

    return run


def config_of(problem):
    """The config of a problem's operands."""
    p = problem
    return hgg.config_for_ragged_dot(p.lhs.array, p.rhs.array, p.sizes.array, p.numbers, out=p.out.array)


CASES = load_cases()
ELSEWHERE = {"tuning-sees-valid-sizes", "tuning-rejects-wrong", "expert-past-2-to-the-32"}


@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if case["dtype"] in ("bfloat16", "float16", "float32") and n not in ELSEWHERE]
)
def test_case_file(name, library, rng):
    changes = {}
    if name == "many-groups":
        sizes = rng.integers(0, 5, 1025)
        changes = {"sizes": sizes, "m": int(sizes.sum())}
    if name == "accumulate":
        changes = {"c": "out", "alpha": 0.5, "beta": 1}
    if name == "odd-everything":
        changes = {"layouts": dict.fromkeys(("lhs", "rhs", "out"), UNALIGNED)}
    case_problem(rng, CASES[name], library=library, **changes).check(triton_dot)


def test_an_expert_past_2_to_the_32(library, rng):
    if library.kind != "cuda":
        return  # more memory than an emulated device has time for
    problem = case_problem(rng, CASES["expert-past-2-to-the-32"], sizes=[0, 0, 16], library=library)
    stride = 1 << 31
    with library.runtime.use_device(0):
        address = library.runtime.malloc_plain(2 * stride * 2 + 64 * 64 * 2, 0)
        library.blocks.append(address)
        weights = np.ascontiguousarray(problem.rhs.values[2])
        library.runtime.memcpy_async(address + 2 * stride * 2, weights.ctypes.data, weights.nbytes)
        library.runtime.synchronize_device(0)
    far = ArrayView(address, (3, 64, 64), (stride * 2, 128, 2), weights.dtype, Device("cuda", 0), "", None, False, library)
    value, magnitude = problem.expected()
    triton_dot(problem.lhs.array, far, problem.sizes.array, problem.numbers, out=problem.out.array)
    assert_near(problem.out.read(), value, magnitude)


def assert_near(result, value, magnitude, rows=slice(None)):
    """Within bf16's rounding of a result, whose terms have the given sum of magnitudes."""
    bound = float(np.nanmax(magnitude[rows])) * 2.0**-7
    np.testing.assert_allclose(result[rows].astype(float), value[rows], rtol=0, atol=bound)


@RAGGED
@pytest.mark.parametrize("aligned", [True, False])
def test_nan_of_a_neighbour_stays_there(mode, aligned, library, rng):
    m, n, k = (90, 40, 48) if mode is NON_CONTRACTING else (40, 48, 90)
    sizes = np.array([33, 0, 30, 27])
    layouts = {} if aligned else {name: UNALIGNED for name in ("lhs", "rhs", "out")}
    problem = make_problem(rng, mode, m, n, k, sizes, "bfloat16", library=library, layouts=layouts)
    for name in ("lhs",) if mode is NON_CONTRACTING else ("lhs", "rhs"):
        operand = getattr(problem, name)
        values = operand.values.copy()
        values[33:63] = np.nan
        setattr(problem, name, Operand(values, layouts.get(name, Layout()), library))
    value, magnitude = problem.expected()
    result = problem.run(triton_dot)
    for mine in (slice(0, 33), slice(63, 90)) if mode is NON_CONTRACTING else (slice(0, 2), slice(3, 4)):
        assert_near(result, value, magnitude, mine)
    assert np.isnan(result[40 if mode is NON_CONTRACTING else 2].astype(float)).all()


@RAGGED
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_algorithm(mode, dtype, aligned, library, rng):
    m, n, k = (150, 136, 72) if aligned else (77, 45, 37)
    sizes = random_sizes(rng, m if mode is NON_CONTRACTING else k, 5)
    layouts = {} if aligned else {name: UNALIGNED for name in ("lhs", "rhs", "out")}
    problem = make_problem(rng, mode, m, n, k, sizes, dtype, library=library, layouts=layouts)
    config = config_of(problem)
    with hgg.GroupedMatmulPlan(config, "triton", library.device) as plan:
        algorithms = plan.get_algorithms()
        assert len({algorithm.name for algorithm in algorithms}) == len({algorithm.index for algorithm in algorithms}) == len(algorithms)
        few = algorithms if library.kind == "cuda" else algorithms[:: max(1, len(algorithms) // 3)]
        for algorithm in few:
            plan.set_algorithm(algorithm)
            print(algorithm.name)
            problem.check(run_plan(plan))


@RAGGED
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_alpha_beta_and_c(mode, dtype, library, rng):
    for alpha, beta, c in [(1, 1, "array"), (-1.5, 0.5, "out"), (0, 3, "array"), (0, 0, None), (2, 0, "array")]:
        m, n, k = 40, 24, 33
        sizes = random_sizes(rng, m if mode is NON_CONTRACTING else k, 4)
        make_problem(rng, mode, m, n, k, sizes, dtype, library=library, c=c, alpha=alpha, beta=beta).check(triton_dot)


def test_bias(library, rng):
    for beta, c in ((0, None), (0.5, "array")):
        sizes = random_sizes(rng, 50, 6)
        make_problem(
            rng, NON_CONTRACTING, 50, 40, 24, sizes, "bfloat16", library=library, bias=True, beta=beta, c=c
        ).check(triton_dot)  # fmt: skip


@RAGGED
def test_patterns_of_sizes(mode, library, rng):
    m, n, k = (64, 24, 40) if mode is NON_CONTRACTING else (24, 40, 64)
    for name, sizes in size_patterns(rng, 64, 7).items():
        print(name)
        make_problem(rng, mode, m, n, k, sizes, "bfloat16", library=library).check(triton_dot)


@RAGGED
@pytest.mark.parametrize("sizes_dtype", ["int8", "uint16", "int32", "int64", "uint64"])
def test_types_of_sizes_and_offs(mode, sizes_dtype, library, rng):
    m, n, k = (100, 24, 40) if mode is NON_CONTRACTING else (24, 40, 100)
    sizes = random_sizes(rng, 100, 5)
    make_problem(rng, mode, m, n, k, sizes, "float16", library=library, sizes_dtype=sizes_dtype).check(triton_dot)
    ends = np.cumsum(sizes)
    make_problem(rng, mode, m, n, k, ends, "float16", library=library, sizes_dtype=sizes_dtype, offs=True).check(triton_dot)


@RAGGED
def test_sizes_on_the_host(mode, library, rng):
    m, n, k = (90, 24, 40) if mode is NON_CONTRACTING else (24, 40, 90)
    for _ in range(6):  # more often than there are pinned copies
        problem = make_problem(rng, mode, m, n, k, random_sizes(rng, 90, 5), "bfloat16", library=library)
        problem.sizes = Operand(problem.sizes.values)
        problem.check(triton_dot)


def test_group_offset_and_group_count(library, rng):
    sizes = random_sizes(rng, 80, 9, full=True)
    for offset in (0, 3, 6):
        problem = make_problem(rng, NON_CONTRACTING, 80, 24, 40, sizes, "bfloat16", library=library, rhs_groups=3, group_offset=offset)
        problem.check(triton_dot)
        on_device = Operand(np.array([offset], np.int32), library=library)
        value, magnitude = problem.expected()
        del problem.settings["group_offset"]
        result = problem.run(triton_dot, group_offset=on_device.array)
        assert_near(result, value, magnitude)
        make_problem(
            rng, CONTRACTING, 24, 40, 80, sizes, "bfloat16", library=library, group_offset=offset, group_count=3
        ).check(triton_dot)  # fmt: skip


@RAGGED
@pytest.mark.parametrize("shared", [False, True])
def test_batches(mode, shared, library, rng):
    m, n, k = (70, 24, 40) if mode is NON_CONTRACTING else (24, 40, 70)
    rows = [random_sizes(rng, 70, 4) for _ in range(3)]
    make_problem(rng, mode, m, n, k, rows[0] if shared else np.stack(rows), "bfloat16", library=library, batch=3).check(triton_dot)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plain_batch(dtype, library, rng):
    for m, n, k in ((70, 24, 40), (33, 17, 5), (4, 3, 0)):
        problem = make_problem(rng, Mode.BATCH, m, n, k, np.array([9, -4, 2]), dtype, library=library, batch=3)
        assert problem.numbers is BATCH
        problem.check(triton_dot)


@RAGGED
def test_float32_out_and_mixed_types(mode, library, rng):
    m, n, k = (64, 40, 48) if mode is NON_CONTRACTING else (48, 40, 64)
    sizes = random_sizes(rng, 64, 4)
    make_problem(rng, mode, m, n, k, sizes, "bfloat16", library=library, out_dtype="float32").check(triton_dot)
    make_problem(rng, mode, m, n, k, sizes, "bfloat16", rhs_dtype="float32", library=library).check(triton_dot)


@RAGGED
def test_tf32_is_coarser_than_float32(mode, library, rng):
    if library.kind == "rocm" or not library.runtime.device_info(0).architecture.startswith("sm_9"):
        return  # elsewhere TF32 is allowed to be float32
    m, n, k = 64, 64, 200
    sizes = random_sizes(rng, m if mode is NON_CONTRACTING else k, 3)
    problem = make_problem(rng, mode, m, n, k, sizes, "float32", library=library)
    value, magnitude = problem.expected()
    exact = np.abs(problem.run(triton_dot) - value) / np.maximum(magnitude, 1)
    coarse = np.abs(problem.run(triton_dot, precision="tensorfloat32") - value) / np.maximum(magnitude, 1)
    assert exact.max() < 1e-6 < coarse.max() < 2e-3


@RAGGED
@pytest.mark.parametrize("extents", [(0, 24, 40), (24, 0, 40), (24, 40, 0)])
def test_extents_of_zero(mode, extents, library, rng):
    m, n, k = extents
    rows = m if mode is NON_CONTRACTING else k
    for groups in (3, 0):
        sizes = np.zeros(groups, np.int64) if rows == 0 else random_sizes(rng, rows, groups) if groups else np.zeros(0, np.int64)
        make_problem(rng, mode, m, n, k, sizes, "bfloat16", library=library).check(triton_dot)


@RAGGED
def test_layouts(mode, library, rng):
    m, n, k = (60, 32, 48) if mode is NON_CONTRACTING else (32, 48, 60)
    for layouts in (
        {"rhs": Layout(order=(0, 2, 1))} if mode is NON_CONTRACTING else {"rhs": Layout(order=(1, 0))},
        {"lhs": Layout(order=(1, 0))},
        {"out": Layout(order=(0, 2, 1)) if mode is CONTRACTING else Layout(order=(1, 0))},
        {"lhs": Layout(pad=8, lead=8), "rhs": Layout(pad=16), "out": Layout(pad=8)},
        {"lhs": Layout(step=2), "out": Layout(step=3, lead=1)},
        {"sizes": Layout(step=2, lead=1)},
    ):
        sizes = random_sizes(rng, 60, 5)
        make_problem(rng, mode, m, n, k, sizes, "bfloat16", library=library, layouts=layouts).check(triton_dot)


def test_tail_undefined_leaves_rows(library, rng):
    sizes = np.array([20, 0, 13])
    problem = make_problem(rng, NON_CONTRACTING, 50, 24, 40, sizes, "bfloat16", library=library, tail="undefined")
    value, magnitude = problem.expected()
    result = problem.run(triton_dot)
    assert np.isnan(result[33:].astype(np.float32)).all()
    assert_near(result, value, magnitude, slice(0, 33))


@RAGGED
def test_wrong_sizes_are_clamped_and_flagged(mode, library, rng):
    m, n, k = (50, 24, 40) if mode is NON_CONTRACTING else (24, 40, 50)
    for sizes, group in (([20, 40, 7], 1), ([-3, 20, 20], 0), ([10, 10, 2**31 - 1], 2)):
        problem = make_problem(rng, mode, m, n, k, np.array(sizes), "bfloat16", library=library)
        config = hgg.config_for_ragged_dot(
            problem.lhs.array, problem.rhs.array, problem.sizes.array, problem.numbers, out=problem.out.array
        )
        with hgg.GroupedMatmulPlan(config, "triton", library.device) as plan:
            problem.check(run_plan(plan))
            with pytest.raises(ValueError, match=f"group {group} .*{sizes[group]} rows wanted"):
                plan.check()
            plan.check()  # it was cleared
            with pytest.raises(ValueError, match=f"group {group} "):
                problem.run(run_plan(plan), check="sync")


@RAGGED
def test_one_plan_for_many_extents_and_scalars(mode, library, rng):
    m, n, k = (64, 40, 48) if mode is NON_CONTRACTING else (40, 48, 64)
    key = None
    plan = None
    for rows, alpha in ((64, 1.0), (63, 2.0), (61, -0.5)):
        m, k = (rows, k) if mode is NON_CONTRACTING else (m, rows)
        problem = make_problem(rng, mode, m, n, k, random_sizes(rng, rows, 4), "bfloat16", library=library, alpha=alpha)
        config = hgg.config_for_ragged_dot(
            problem.lhs.array, problem.rhs.array, problem.sizes.array, problem.numbers, out=problem.out.array
        )
        if plan is None:
            plan, key = hgg.GroupedMatmulPlan(config, "triton", library.device), config.key()
        assert config.key() == key
        problem.check(run_plan(plan))
    plan.close()


@RAGGED
def test_capture_in_a_graph(mode, library, rng):
    runtime = library.runtime
    m, n, k = (72, 40, 48) if mode is NON_CONTRACTING else (40, 48, 72)
    problem = make_problem(rng, mode, m, n, k, random_sizes(rng, 72, 4), "bfloat16", poison=frozenset(), library=library)
    config = config_of(problem)
    with runtime.use_device(0), hgg.GroupedMatmulPlan(config, "triton", library.device) as plan:
        stream = runtime.create_stream(0)
        with pytest.raises(RuntimeError, match="prepare"), device_graphs.capture(runtime, stream):
            plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array, stream=stream)
        plan.prepare()  # on any stream: a capture's own may be one that was never used
        with device_graphs.capture(runtime, stream) as graph:
            plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array, stream=stream)
        assert np.isnan(problem.out.read().astype(np.float32)).all(), "captured, not run"
        # other sizes by the time of the replay: they are read on the device
        sizes = random_sizes(rng, 72, 4)
        raw = sizes.astype(np.int32)
        runtime.memcpy_async(problem.sizes.array.pointer, raw.ctypes.data, raw.nbytes, stream)
        runtime.synchronize_stream(stream)
        again = make_problem(rng, mode, m, n, k, sizes, "bfloat16", poison=frozenset())
        again.lhs.values[...], again.rhs.values[...] = problem.lhs.values, problem.rhs.values
        value, magnitude = again.expected()
        for _ in range(3):
            device_graphs.launch_graph(runtime, graph[0], stream)
        runtime.synchronize_stream(stream)
        assert_near(problem.out.read(), value, magnitude)
        device_graphs.destroy_graph(runtime, graph[0])
        runtime.destroy_stream(stream)


@RAGGED
def test_captures_give_back_all_that_they_held(mode, library, rng):
    runtime = library.runtime
    m, n, k = (72, 40, 48) if mode is NON_CONTRACTING else (40, 48, 72)
    problem = make_problem(rng, mode, m, n, k, random_sizes(rng, 72, 4), "bfloat16", library=library)
    taken = []
    with runtime.use_device(0), pytest.MonkeyPatch.context() as patch:
        malloc, free = runtime.malloc_plain, runtime.free_plain
        patch.setattr(runtime, "malloc_plain", lambda *a: taken.append(malloc(*a)) or taken[-1])
        patch.setattr(runtime, "free_plain", lambda address, device: (address in taken and taken.remove(address), free(address, device)))
        plan = hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device)
        problem.run(run_plan(plan))
        before = len(taken)
        streams = [runtime.create_stream(0) for _ in range(2)]
        for stream in streams * 3:  # neither was used before
            with device_graphs.capture(runtime, stream) as graph:
                plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array, stream=stream)
            device_graphs.destroy_graph(runtime, graph[0])
        assert len(taken) >= before + 6 and plan.captured
        plan.close()
        assert not taken
        for stream in streams:
            runtime.destroy_stream(stream)


def test_threads_and_streams(library, rng):
    runtime = library.runtime
    problems = [
        make_problem(rng, NON_CONTRACTING, 60 + i, 40, 48, random_sizes(rng, 60 + i, 4), "bfloat16", library=library) for i in range(6)
    ]
    expected = [problem.expected() for problem in problems]
    with runtime.use_device(0):
        streams = [runtime.create_stream(0) for _ in problems]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            p = problems[i]
            for _ in range(4):
                triton_dot(p.lhs.array, p.rhs.array, p.sizes.array, p.numbers, out=p.out.array, stream=streams[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for problem, (value, magnitude) in zip(problems, expected, strict=True):
        assert_near(problem.out.read(), value, magnitude)
    with runtime.use_device(0):
        for stream in streams:
            runtime.synchronize_stream(stream)
            runtime.destroy_stream(stream)


@pytest.mark.parametrize("framework", ["cupy", "torch", "jax"])
def test_arrays_of_frameworks(framework, library, rng):
    if library.kind != "cuda":
        return
    import ml_dtypes

    m, n, k = 50, 40, 48
    sizes = random_sizes(rng, m, 4).astype(np.int32)
    lhs = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    rhs = rng.standard_normal((4, k, n)).astype(ml_dtypes.bfloat16)
    value = hgg.ragged_dot_reference(lhs, rhs, sizes, preferred_element_type=np.float64, accumulate=np.float64)
    if framework == "cupy":
        import cupy

        arrays = [cupy.asarray(lhs), cupy.asarray(rhs), cupy.asarray(sizes)]
        result = hgg.ragged_dot(*arrays, backend="triton").get().astype(float)
    elif framework == "torch":
        import torch

        arrays = [torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16) for x in (lhs, rhs)]
        result = hgg.ragged_dot(*arrays, torch.from_numpy(sizes).cuda(), backend="triton").float().cpu().numpy()
    else:
        import jax

        device = jax.devices("cuda")[0]
        arrays = [jax.device_put(x, device) for x in (lhs, rhs, sizes)]
        result = np.asarray(hgg.ragged_dot(*arrays, backend="triton")).astype(float)
    np.testing.assert_allclose(result, value, rtol=0, atol=0.4)
