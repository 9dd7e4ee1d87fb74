"""Settings of a plan in the Triton backend, on a device or interpreted: every algorithm keeps the bits of rows; grids keep to a limit."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariance import Rows, different_rows, numbers

import hipgroupgemm as hgg
from hipgroupgemm import ArraySpec, DeviceArray, GroupedMatmulPlan, config_for_ragged_dot
from hipgroupgemm import runtime as runtimes
from hipgroupgemm.backends import get_backend
from hipgroupgemm.operands.views import ArrayView, Device
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers

KINDS = [
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("rocm", marks=pytest.mark.hip),
    pytest.param("interpreter", marks=pytest.mark.interpreter),
]
WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """The kind of device, "interpreter" included."""
    with contextlib.ExitStack() as stack:
        if request.param == "interpreter":
            from triton_interpreter import interpreted, sum_in_order

            stack.enter_context(interpreted(monkeypatch))
            sum_in_order(monkeypatch)
        yield request.param


def device_of(kind):
    return "rocm:0" if kind == "rocm" else "cuda:0"


class Plans:
    """Runs host operands on a device with one algorithm, by name and index; a plan per layout."""

    def __init__(self, kind, name, index, *, k_major=False, out=None):
        self.device, self.name, self.index, self.k_major, self.out = device_of(kind), name, index, k_major, out
        self.plans = {}

    def __call__(self, lhs, rhs, sizes, c=None, bias=None):
        if self.k_major:
            stored = DeviceArray.from_numpy(np.ascontiguousarray(rhs.transpose(0, 2, 1)), self.device)
            rhs_view = transposed(stored)
        else:
            rhs_view = DeviceArray.from_numpy(rhs, self.device)
        operands = {"lhs": DeviceArray.from_numpy(lhs, self.device), "rhs": rhs_view}
        operands["group_sizes"] = DeviceArray.from_numpy(sizes, self.device)
        more = {}
        if c is not None:
            more = {
                "c": DeviceArray.from_numpy(c, self.device),
                "bias": DeviceArray.from_numpy(bias, self.device),
                "alpha": 0.7,
                "beta": 0.3,
            }
        config = config_for_ragged_dot(**operands, **more, preferred_element_type=self.out)
        plan = self.plans.get(config.key())
        if plan is None:
            plan = self.plans[config.key()] = GroupedMatmulPlan(config, "triton", self.device, use_store=False)
            plan.set_algorithm(self.name, self.index)
            assert plan.algorithm.batch_invariant
        return plan.execute(**operands, **more).to_numpy()

    def close(self):
        for plan in self.plans.values():
            plan.close()


def transposed(array):
    """The last two axes of a DeviceArray exchanged, without a copy."""
    g, n, k = array.shape
    size = array.dtype.itemsize
    strides = (n * k * size, size, k * size)
    device = Device(array.device.kind, array.device.index)
    return ArrayView(array.ptr, (g, k, n), strides, array.dtype, device, "", array.stream, False, array)


CASES = {
    # k, n, type, whether rhs is k-major, out's type, whether c and bias are there
    "aligned": (200, 136, "bfloat16", False, None, False),
    "k-major": (136, 264, "float16", True, None, False),
    "wide output": (64, 128, "bfloat16", False, "float32", False),
    "odd": (77, 45, "float16", False, None, True),
    "float32": (75, 130, "float32", False, None, True),
}


def config_of(case):
    k, n, dtype, k_major, out, extras = CASES[case]
    rhs = ArraySpec((4, k, n), dtype) if not k_major else transposed_spec(4, k, n, dtype)
    more = {"c": ArraySpec((256, n), dtype), "bias": ArraySpec((4, n), dtype), "alpha": 0.7, "beta": 0.3} if extras else {}
    return config_for_ragged_dot(ArraySpec((256, k), dtype), rhs, ArraySpec((4,), "int32"), preferred_element_type=out, **more)


def algorithms_of(kind, case):
    with GroupedMatmulPlan(config_of(case), "triton", device_of(kind), use_store=False) as plan:
        return plan.get_algorithms()


def transposed_spec(g, k, n, dtype):
    size = np.dtype(dtype).itemsize if dtype != "bfloat16" else 2
    return ArraySpec((g, k, n), dtype, strides=(n * k * size, size, k * size))


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_keeps_the_bits_of_rows(kind, case, rng):
    k, n, dtype, k_major, out, extras = CASES[case]
    found = algorithms_of(kind, case)
    assert found and all(one.batch_invariant for one in found)
    few = kind != "cuda"  # interpreted or emulated, where a schedule changes nothing and each takes a while
    if not few:  # on all cores, since each takes seconds
        get_backend("triton").compile_ahead(config_of(case).key(), Device("cuda", 0), found)
    if few:
        found = [next(group) for _, group in itertools.groupby(sorted(found, key=lambda a: a.name), lambda a: a.name.rpartition("_z")[0])]
        found = list(rng.permutation(np.array(found, object))[:4])
    wrong = {}
    for algorithm in found:
        rows = Rows.random(rng, 6, k, n, dtype, extras=extras)
        plans = Plans(kind, algorithm.name, algorithm.index, k_major=k_major, out=out)
        try:
            different = different_rows(plans, rows, rng, times=1 if few else 3, most=40 if few else 400)
        finally:
            plans.close()
        if different:
            wrong[algorithm.name] = different
    assert not wrong


@pytest.mark.parametrize("kind", KINDS[-1:], indirect=True)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), k=st.sampled_from([1, 16, 33, 70]), n=st.sampled_from([1, 17, 64]), extras=st.booleans(), data=st.data())
def test_interpreted_kernels_keep_the_bits_of_rows(kind, seed, k, n, extras, data):
    rng = np.random.default_rng(seed)
    algorithm = data.draw(st.sampled_from(sorted(algorithms_of(kind, "odd"), key=lambda one: one.index)))
    plans = Plans(kind, algorithm.name, algorithm.index)
    try:
        assert different_rows(plans, Rows.random(rng, 3, k, n, "float16", extras=extras), rng, times=1, most=20) == []
    finally:
        plans.close()


def test_split_k_does_not_claim_it(kind):
    config = config_for_ragged_dot(ArraySpec((4096, 64), "bfloat16"), ArraySpec((4096, 64), "bfloat16"), ArraySpec((4,), "int32"), WGRAD)
    with GroupedMatmulPlan(config, "triton", device_of(kind), use_store=False) as plan:
        found = plan.get_algorithms()
    assert any("split" in one.name for one in found) and not any(one.batch_invariant for one in found)


def test_one_call_of_the_function_for_every_m(kind, rng):
    """ragged_dot(batch_invariant=True) takes one algorithm for every m, so its rows keep their bits, too."""
    device = device_of(kind)

    def run(lhs, rhs, sizes):
        operands = [DeviceArray.from_numpy(one, device) for one in (lhs, rhs, sizes)]
        return hgg.ragged_dot(*operands, batch_invariant=True).to_numpy()

    most = 30 if kind == "interpreter" else 3000
    assert different_rows(run, Rows.random(rng, 4, 72, 48, "bfloat16"), rng, times=2, most=most) == []


# ---- max_multiprocessors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["rows", "k", "split"])
def test_results_on_few_multiprocessors(kind, mode, rng):
    device, sizes = device_of(kind), np.array([30, 0, 41, 9], np.int32)
    lhs = numbers(rng, (90, 40), "float32")
    rhs = numbers(rng, (4, 40, 72) if mode == "rows" else (90, 72), "float32")
    table = () if mode == "rows" else (WGRAD,)
    exact = hgg.ragged_dot_reference(lhs, rhs, sizes, *table, accumulate="float64", preferred_element_type="float64")
    size = hgg.ragged_dot_reference(abs(lhs), abs(rhs), sizes, *table, accumulate="float64", preferred_element_type="float64")
    operands = [DeviceArray.from_numpy(one, device) for one in (lhs, rhs, sizes)]
    config = config_for_ragged_dot(*operands, *table)
    for most in (1, 2):
        with GroupedMatmulPlan(config, "triton", device, max_multiprocessors=most, use_store=False) as plan:
            if mode == "split":
                split = next(one for one in plan.get_algorithms() if "split4" in one.name)
                plan.set_algorithm(split)
            assert f"on {most} SMs or CUs at the most" in plan.explain() and f"max_multiprocessors={most}" in plan.explain()
            out = DeviceArray.from_numpy(np.full(exact.shape, np.nan, np.float32), device)
            plan.execute(*operands, out=out)
            assert (np.abs(out.to_numpy() - exact) <= 4 * 90 * np.finfo(np.float32).eps * size).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("mode", ["rows", "k", "split"])
def test_grids_keep_to_the_limit(mode, monkeypatch, rng):
    from triton_interpreter import interpreted

    with interpreted(monkeypatch) as runtime:
        grids = []
        run = runtime.run_kernel
        monkeypatch.setattr(runtime, "run_kernel", lambda module, grid, *rest: (grids.append(grid[0]), run(module, grid, *rest))[1])
        sizes = rng.multinomial(3000, [1 / 100] * 100).astype(np.int32)
        lhs = numbers(rng, (3000, 8), "float32")
        rhs = numbers(rng, (100, 8, 24) if mode == "rows" else (3000, 24), "float32")
        operands = [DeviceArray.from_numpy(one, "cuda:0") for one in (lhs, rhs, sizes)]
        config = config_for_ragged_dot(*operands, *(() if mode == "rows" else (WGRAD,)))
        seen = {}
        for most in (None, 2, 1):
            with GroupedMatmulPlan(config, "triton", "cuda:0", max_multiprocessors=most, use_store=False) as plan:
                wanted = "split4" if mode == "split" else "ptr_64x64x32"
                plan.set_algorithm(next(one for one in plan.get_algorithms() if wanted in one.name))
                grids.clear()
                seen[most] = plan.execute(*operands).to_numpy()
                assert len(grids) == (3 if mode == "split" else 2)
                assert max(grids) <= most if most else max(grids) > 2
        assert seen[1].tobytes() == seen[2].tobytes() == seen[None].tobytes(), "the schedule is no part of the sums"


# a kernel that can finish only while all its blocks are at work, each on an SM of its own: they wait for each other, for a second at most
_MEETING = """
extern "C" __global__ void meeting(unsigned* arrived, unsigned blocks, unsigned* met) {
  extern __shared__ char whole[];
  if (threadIdx.x) return;
  whole[0] = 0;
  atomicAdd(arrived, 1);
  const long long begin = clock64();
  while (atomicAdd(arrived, 0) < blocks)
    if (clock64() - begin > 1500000000LL) return;
  atomicAdd(met, 1);
}
"""


@pytest.mark.cuda
@pytest.mark.parametrize("groups", [16, 2000])
def test_the_other_multiprocessors_stay_free(groups):
    """While a call with max_multiprocessors is at work, a kernel that needs all the others whole runs and ends."""
    cupy = pytest.importorskip("cupy")
    count = cupy.cuda.Device(0).attributes["MultiProcessorCount"]
    most = 20
    shared = cupy.cuda.Device(0).attributes["MaxSharedMemoryPerBlockOptin"]
    meeting = cupy.RawKernel(_MEETING, "meeting")
    meeting.max_dynamic_shared_size_bytes = shared - 1024
    lhs = cupy.zeros((65536, 4096), cupy.float16)
    rhs = cupy.zeros((groups, 4096, 64 if groups > 100 else 4096), cupy.float16)
    sizes = cupy.full(groups, 65536 // groups, cupy.int32)
    arrived, met = cupy.zeros(1, cupy.uint32), cupy.zeros(1, cupy.uint32)
    beside = cupy.cuda.Stream(non_blocking=True)
    config = config_for_ragged_dot(lhs, rhs, sizes)
    with GroupedMatmulPlan(config, device="cuda:0", max_multiprocessors=most) as plan:
        out = plan.execute(lhs, rhs, sizes)
        cupy.cuda.Device(0).synchronize()
        with beside:  # loaded, so that it is launched at once
            meeting((1,), (32,), (arrived, np.uint32(1), met), shared_mem=shared - 1024)
        beside.synchronize()
        arrived.fill(0), met.fill(0)
        cupy.cuda.Device(0).synchronize()
        done = cupy.cuda.Event(disable_timing=True)
        for _ in range(100 if groups > 100 else 20):
            plan.execute(lhs, rhs, sizes, out=out)
        done.record()
        with beside:
            meeting((count - most,), (32,), (arrived, np.uint32(count - most), met), shared_mem=shared - 1024)
        beside.synchronize()
        still = not done.done
        cupy.cuda.Device(0).synchronize()
    assert still, "the calls ended before the kernel beside them: make them longer"
    assert int(met[0]) == count - most


def test_settings_are_told(kind):
    runtime = runtimes.get_runtime("rocm" if kind == "rocm" else "cuda")
    count = runtime.device_info(0).multiprocessors
    config = config_for_ragged_dot(ArraySpec((64, 32), "bfloat16"), ArraySpec((4, 32, 48), "bfloat16"), ArraySpec((4,), "int32"))
    with GroupedMatmulPlan(config, "triton", device_of(kind), max_multiprocessors=count + 5, use_store=False) as plan:
        assert f"max_multiprocessors={count + 5} is all" in plan.explain() and "at the most, one block" not in plan.explain()
