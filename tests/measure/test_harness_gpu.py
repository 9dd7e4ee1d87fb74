"""The GPU's workbench on a device, CUDA or ROCm (real or emulated): what `test_device_judge.py` checks on host memory, on the hardware.

No array library is needed. `pytest -m cuda` or `pytest -m hip`, with `-s` for the figures of the large problems.
"""

from __future__ import annotations

import time

import harness_contract as contract
import numpy as np
import pytest
from generators import FORWARD, WEIGHT_GRADIENT
from harness_contract import CASES, Case, spec

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.measure.distributions import balanced_sizes
from hipgroupgemm.measure.harness import harness_for

KINDS = [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("rocm", marks=pytest.mark.hip)]


@pytest.fixture(scope="module", params=KINDS)
def bench(request):
    with harness_for(request.param) as bench:
        yield bench
    bench.close()


@pytest.fixture(scope="module")
def cuda_bench():
    with harness_for("cuda") as bench:
        yield bench


@pytest.fixture(scope="module")
def hip_bench():
    with harness_for("rocm") as bench:
        yield bench


@pytest.mark.parametrize("name", CASES)
def test_operands_and_right_results(bench, name, rng):
    contract.check_inputs(bench, CASES[name])
    contract.check_right_result_passes(bench, CASES[name])
    contract.check_others_rows_do_not_matter(bench, CASES[name])
    contract.check_same(bench, CASES[name], rng)
    contract.check_digests_and_renewal(bench, CASES[name])
    contract.check_out_full_of_numbers(bench, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_found(bench, name, rng):
    contract.check_planted_faults(bench, CASES[name], rng)


def test_sampling(bench):
    contract.check_sampling_finds_a_wrong_tile(bench)


def test_tails_small_errors_and_refusals(bench):
    contract.check_undefined_tail(bench)
    contract.check_small_errors(bench)
    contract.check_refusals(bench)
    contract.check_scalars_and_offsets(bench)
    contract.check_sizes_in_place(bench)
    contract.check_overflow(bench)


@pytest.mark.parametrize("name", ["forward bfloat16", "c", "weight gradient float16", "forward, a batch of sizes"])
def test_triton_s_results_are_right_and_timed(bench, name):
    check_backend(bench, "triton", CASES[name])


@pytest.mark.hip
@pytest.mark.parametrize("name", ["forward bfloat16", "weight gradient float16"])
def test_hipblaslt_s_results_are_right_and_timed(hip_bench, name):
    check_backend(hip_bench, "hipblaslt", CASES[name])


def check_backend(bench, backend, case):
    """A backend's best guess: right on poisoned memory, cold, timed, and the same again where it says so."""
    candidate = get_backend(backend)
    assert candidate.can_handle(case.config, bench.device) is None
    key = case.config.key()
    algorithm = candidate.algorithms(key, bench.device, AlgorithmLimits(max_algorithm_count=1))[0]
    executable = candidate.prepare(key, bench.device, algorithm, bench.stream)
    operands = bench.operands(case.config, seed=8)
    arguments = bench.arguments(operands, bench.sizes(case.host_sizes))
    snapshot = None
    for _ in range(2):
        bench.poison(operands)
        bench.flush()
        assert bench.time(lambda: executable.execute(arguments)) > 0
        verdict = bench.check(operands, case.host_sizes)
        assert verdict.reason == ""
        if snapshot is not None and algorithm.deterministic:
            assert bench.same(operands, snapshot) == 0
        snapshot = bench.snapshot(operands)
    executable.close()
    bench.release(operands)


@pytest.mark.cuda
def test_weights_past_32_bits(cuda_bench):
    """Groups 5 GiB apart: operands are made there, and read there."""
    stride = 5 << 30
    base = spec((2, 24, 40), "bfloat16")
    rhs = type(base)(0, base.shape, (stride, *base.strides[1:]), base.dtype, base.device, "")
    case = Case("far", contract._config(FORWARD, spec((50, 24), "bfloat16"), rhs, [20, 30]), [20, 30])
    assert case.config.stride_group_dim == stride // 2
    operands = cuda_bench.operands(case.config, seed=2)
    weights = [
        np.ndarray((24, 40), base.dtype, contract.peek(cuda_bench, operands.pointers["rhs"] + group * stride, 24 * 40 * 2).data)
        for group in (0, 1)
    ]
    lhs = cuda_bench.values(operands, "lhs")[0, 0].astype(np.float64)
    assert np.isfinite(weights[1].astype(np.float64)).all() and (weights[0] != weights[1]).any()
    result = np.concatenate([lhs[:20] @ weights[0].astype(np.float64), lhs[20:] @ weights[1].astype(np.float64)])
    contract.put(cuda_bench, operands, result.astype(base.dtype)[None, None])
    assert cuda_bench.check(operands, case.host_sizes).reason == ""
    contract.change(cuda_bench, operands, (0, 0, 49, 39), 1e3)
    assert "row 49 column 39" in cuda_bench.check(operands, case.host_sizes).reason
    cuda_bench.release(operands)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["forward", "decode", "weight gradient"])
def test_large_problems_are_made_and_judged_quickly(cuda_bench, kind):
    """Sizes of real layers: more random numbers than the table has, a sampled judgement, and what each step takes."""
    bench, groups, (m, k, n) = cuda_bench, 64, (512, 7168, 4096) if kind == "decode" else (16384, 4096, 7168)
    sizes = balanced_sizes(m, groups)
    if kind == "weight gradient":
        config = contract._config(WEIGHT_GRADIENT, spec((m, 4096), "bfloat16"), spec((m, 2048), "bfloat16"), sizes)
    else:
        config = contract._config(FORWARD, spec((m, k), "bfloat16"), spec((groups, k, n), "bfloat16"), sizes)
    started = time.perf_counter()
    operands = bench.operands(config, seed=1)
    bench.synchronize()
    made = time.perf_counter() - started
    backend = get_backend("triton")
    algorithm = backend.algorithms(config.key(), bench.device, AlgorithmLimits(max_algorithm_count=1))[0]
    executable = backend.prepare(config.key(), bench.device, algorithm, bench.stream)
    arguments = bench.arguments(operands, bench.sizes(sizes))
    times = []
    for _ in range(5):
        bench.poison(operands)
        bench.flush()
        times.append(bench.time(lambda: executable.execute(arguments)))
    flush = min(bench.time(bench.flush) for _ in range(3))
    spent = []
    for _ in range(3):
        started = time.perf_counter()
        verdict = bench.check(operands, sizes, seed=3)
        spent.append(time.perf_counter() - started)
    print(
        f"\n{kind}: operands {operands.nbytes / 2**30:.2f} GiB in {made:.2f} s, run {sorted(times)[2]:.3f} ms, flush {flush:.3f} ms, "
        f"judge {min(spent):.3f} s ({verdict.amount}), error {verdict.error:.2e} of {verdict.error_limit:.2e}"
    )
    assert verdict.reason == ""
    snapshot = bench.snapshot(operands)
    assert bench.same(operands, snapshot) == 0
    shape = operands.layouts["out"].shape
    contract.change(bench, operands, (shape[0] - 1, 0, shape[2] - 2, shape[3] - 3), np.nan)
    assert "1 elements are NaN" in bench.check(operands, sizes).reason
    assert bench.same(operands, snapshot) == 1
    executable.close()
    bench.release(operands)


@pytest.mark.cuda
def test_a_flush_makes_a_call_as_cold_as_operands_that_were_long_not_read(cuda_bench):
    """A problem that fits the cache and is bound by memory: on the same operands again and again it is no faster than on eight in turns."""
    bench, sizes = cuda_bench, balanced_sizes(64, 8)
    config = contract._config(FORWARD, spec((64, 2048), "bfloat16"), spec((8, 2048, 1024), "bfloat16"), sizes)
    backend = get_backend("triton")
    algorithm = backend.algorithms(config.key(), bench.device, AlgorithmLimits(max_algorithm_count=1))[0]
    executable = backend.prepare(config.key(), bench.device, algorithm, bench.stream)
    sets = [bench.operands(config, seed=seed) for seed in range(8)]
    arguments = [bench.arguments(operands, bench.sizes(sizes)) for operands in sets]

    def median(turn, flush=True):
        times = []
        for number in range(24):
            if flush:
                bench.flush()
            one = arguments[turn(number)]
            times.append(bench.time(lambda one=one: executable.execute(one)))
        return float(np.median(times[8:]))

    again, in_turns, warm = median(lambda number: 0), median(lambda number: number % 8), median(lambda number: 0, flush=False)
    print(f"\n{sets[0].nbytes / 2**20:.0f} MiB: flushed {again:.4f} ms, flushed and in turns {in_turns:.4f} ms, warm {warm:.4f} ms")
    assert again >= 0.9 * in_turns
    executable.close()
    for operands in sets:
        bench.release(operands)
