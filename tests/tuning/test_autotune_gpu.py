"""Tuning on a device, CUDA or ROCm (real or emulated): real algorithms, and a backend that does harm on the device.

No array library is needed. `pytest -m cuda` or `pytest -m hip`, with `-s` for the tables.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close
from devices import DeviceLibrary
from generators import FORWARD, WEIGHT_GRADIENT, Mode, make_problem
from harmful_backend import HarmfulBackend
from rich.console import Console

import hipgroupgemm as hgg
from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.operands.views import Device
from hipgroupgemm.tuning import close_workers, tune

KINDS = [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("rocm", marks=pytest.mark.hip)]


@pytest.fixture(scope="module", autouse=True)
def workers():
    yield
    close_workers()


@pytest.fixture(params=KINDS)
def device(request):
    return f"{request.param}:0"


def forward(m, k, n, groups, dtype="bfloat16", **more):
    lhs, rhs = hgg.ArraySpec((m, k), dtype), hgg.ArraySpec((groups, k, n), dtype)
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((groups,), np.int32), FORWARD, **more)


def gradient(m, k, n, groups, dtype="bfloat16"):
    lhs, rhs = hgg.ArraySpec((m, k), dtype), hgg.ArraySpec((m, n), dtype)
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((groups,), np.int32), WEIGHT_GRADIENT)


def show(report):
    Console(width=170).print(report)
    return report


def usable(config, device):
    return [name for name in ("hipblaslt", "triton") if get_backend(name).can_handle(config, Device.of(device)) is None]


def small(device):
    """Extents that an emulated device computes in a fraction of a second, or that a real one needs more than a launch for."""
    return (24, 16, 16, 3) if device.startswith("rocm") else (4096, 512, 768, 8)


def test_algorithms_end_with_verdicts(device):
    """Ten of hipBLASLt's on ROCm, of Triton's on CUDA, or as many as there are."""
    config = forward(*small(device))
    name = "hipblaslt" if device.startswith("rocm") else "triton"
    there = get_backend(name).algorithms(config.key(), Device.of(device), AlgorithmLimits(10))
    events = []
    quick = {"repetitions": 1, "warmup": 0} if name == "hipblaslt" else {}
    report = show(tune(config, device, backends=name, max_algorithms=10, progress=events.append, roofline=name == "triton", **quick))
    assert len(report.rows) == len(there) > 1
    assert {row.algorithm.backend for row in report.rows} == {name}
    assert report.best is not None
    for row in report.rows:
        assert row.verdict in ("ok", "pruned"), (row.algorithm.name, row.verdict, row.reason)
        assert row.checked >= 6
        assert row.ratio >= 1
        assert (row.median_ms is None) == (row.verdict == "pruned")
        assert row.error <= row.error_limit
    assert events[-1].phase == "time"
    assert report.identity["kind"] == device.partition(":")[0]


def test_harm_on_the_device_ends_nothing(device):
    """An illegal access breaks a CUDA context for good, and is a segmentation fault on the emulated device: a fresh worker goes on."""
    config = forward(*small(device), preferred_element_type=np.float32)
    hgg.register_backend(HarmfulBackend(usable(config, device)[0]), ("cuda", "rocm"))
    try:
        report = show(tune(config, device, backends="harmful", step_timeout=15.0, repetitions=2, warmup=0, roofline=False))
    finally:
        hgg.unregister_backend("harmful")
    verdicts = {row.algorithm.name: row.verdict for row in report.rows}
    assert verdicts == {"right": "ok", "zeroes": "wrong", "illegal": "crashed", "spins": "timed out", "drifts": "nondeterministic"}
    assert report.best.algorithm.name == "right"


@pytest.mark.parametrize("mode", ["forward", "gradient", "beta"])
def test_a_plan_takes_the_best_of_all_backends_and_computes_with_it(device, mode, rng):
    m, k, n, groups = small(device)
    more = {"c": hgg.ArraySpec((m, n), "bfloat16"), "beta": 1.0} if mode == "beta" else {}
    config = gradient(m, k, n, groups) if mode == "gradient" else forward(m, k, n, groups, **more)
    emulated = device.startswith("rocm")
    sizes = rng.multinomial(m, rng.dirichlet(np.ones(groups)))
    with hgg.GroupedMatmulPlan(config, device=device) as plan:
        quick = {"repetitions": 1, "warmup": 0, "max_algorithms": 2} if emulated else {"max_algorithms": 6}
        report = show(plan.autotune(sizes, **quick))
        assert {row.algorithm.backend for row in report.rows} == set(usable(config, device))
        assert plan.algorithm == report.best.algorithm
        assert plan.backend == report.best.algorithm.backend
        kind = Mode.CONTRACTING if mode == "gradient" else Mode.NON_CONTRACTING
        extents = (k, n, m) if mode == "gradient" else (m, n, k)
        scalars = {"c": "array", "beta": 1.0} if mode == "beta" else {}
        problem = make_problem(rng, kind, *extents, sizes, "bfloat16", library=DeviceLibrary(device), **scalars)
        value, magnitude = problem.expected()
        operands = (problem.lhs.array, problem.rhs.array, problem.sizes.array)
        c = {"c": problem.c.array, "beta": 1.0} if mode == "beta" else {}
        plan.execute(*operands, out=problem.out.array, check="sync", **c)
        assert_close(problem.out.read(), value, magnitude, problem.length, (problem.lhs.dtype,))
    with hgg.GroupedMatmulPlan(config, device=device) as later:
        if importlib.util.find_spec("msgspec"):
            assert later.algorithm == report.best.algorithm
            assert "from the tuning store" in later.explain()
        else:
            assert "msgspec" in later.explain()


def test_sizes_on_the_device(device):
    sizes = hgg.DeviceArray.from_numpy(np.array([5, 0, 9], np.int64), device)
    config = forward(16, 16, 16, 3)
    report = tune(config, device, sizes, max_algorithms=1, repetitions=1, warmup=0, roofline=False, backends=usable(config, device)[-1])
    assert report.size_samples == [[5, 0, 9]]
    with pytest.raises(ValueError, match="group 2"):
        tune(config, device, hgg.DeviceArray.from_numpy(np.array([5, 0, 99]), device), roofline=False)


def test_the_caller_s_process_stays_clean(device):
    """Candidates run elsewhere: no kernel of theirs was compiled or loaded here, and no operand was allocated."""
    config = forward(32, 16, 16, 2)
    report = tune(config, device, max_algorithms=1, repetitions=1, warmup=0, roofline=False)
    assert report.best is not None
    assert not [note for note in report.notes if "load average" not in note]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert children  # the worker waits for the next
    close_workers()
