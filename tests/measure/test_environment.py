"""What measuring says of the machine, and how it protects times on one that is busy."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.measure import environment
from hipgroupgemm.measure.environment import THREADS, blas_threads, describe, device_named
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.operands.views import CPU, Device


@pytest.fixture
def threads(monkeypatch):
    """Says how many threads BLAS has; skips where this BLAS does not tell."""
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    calls = environment._thread_calls()
    if calls is None:
        pytest.skip("nobody knows how to ask this BLAS for its threads")
    before = calls[0]()
    calls[1](2)
    yield calls[0]
    calls[1](before)


def test_the_host_s_memory_and_time_are_measured() -> None:
    with harness_for("cpu") as harness:
        assert 8e6 <= harness.peak_bytes(lambda: np.ones(10**6)) < 8.1e6
        assert harness.peak_bytes(lambda: None) < 10_000
        assert 19 < harness.time(lambda: time.sleep(0.02)) < 2000
        assert harness.free_bytes() > 2**20


def test_the_roofline_is_measured(monkeypatch) -> None:
    monkeypatch.setattr("hipgroupgemm.measure.harness._PRODUCT", 64)
    monkeypatch.setattr("hipgroupgemm.measure.harness._COPY", 1 << 20)
    with harness_for("cpu") as harness:
        found = harness.roofline("float32")
        assert found.flops > 0 and found.bandwidth > 1e6
        assert found.product == "product of 64 x 64 float32 matrices" and " of 1 MiB" in found.copy
        assert harness.roofline("bfloat16").product == found.product, "16-bit products are computed in float32"


def test_describe_names_machine_and_versions() -> None:
    facts = describe(CPU)
    assert facts["device"].startswith("cpu: ")
    assert facts["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__
    assert {"hipgroupgemm", "python"} <= set(facts["versions"])
    assert isinstance(facts["blas"], str)


def test_devices_by_name(monkeypatch) -> None:
    """One way to find a device, for all commands: this package's own runtime, not an array library."""
    monkeypatch.setattr(environment, "default_device", lambda: None)
    monkeypatch.setattr(environment, "find_devices", list)
    assert device_named("auto") == device_named("cpu") == CPU
    for name, words in (("gpu", "no GPU was found"), ("cuda:1", "there is no cuda:1 here, only the CPU")):
        with pytest.raises(RuntimeError, match=words):
            device_named(name)
    with pytest.raises(ValueError, match="device='tpu'"):
        device_named("tpu")
    monkeypatch.setattr(environment, "default_device", lambda: ("rocm", 1))
    monkeypatch.setattr(environment, "find_devices", lambda: [("rocm", 0), ("rocm", 1)])
    assert device_named("auto") == device_named("gpu") == Device("rocm", 1)
    assert device_named("rocm") == Device("rocm", 0)
    with pytest.raises(RuntimeError, match="there is no cuda:0 here, only rocm:0, rocm:1"):
        device_named("cuda")


@pytest.mark.parametrize("busy", [False, True])
def test_blas_has_one_thread_while_a_busy_machine_is_measured(busy, threads, monkeypatch) -> None:
    """In every harness of a CPU, so for tuning, sweep, bench and whoever tunes a plan."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0 if busy else 0.0, 0.0, 0.0))
    assert threads() == 2
    with harness_for("cpu") as harness:
        assert threads() == (1 if busy else 2)
        assert ("BLAS was given one thread" in harness.note) == busy
        harness.close()
        assert threads() == 2
    config = hgg.config_for_ragged_dot(hgg.ArraySpec((40, 9), "float32"), hgg.ArraySpec((2, 9, 7), "float32"), hgg.ArraySpec((2,), "int32"))
    seen = []
    from hipgroupgemm.measure.harness import HostHarness

    plain = HostHarness.time
    monkeypatch.setattr(HostHarness, "time", lambda harness, call: (seen.append(threads()), plain(harness, call))[1])
    with hgg.GroupedMatmulPlan(config, device="cpu") as plan:
        plan.autotune(store=False, repetitions=2)
    assert set(seen) == {1 if busy else 2}
    assert threads() == 2


def test_who_has_settled_the_threads_has_his_way(threads, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with blas_threads(1) as done:
        assert not done and threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    with blas_threads(1) as done:
        assert done and threads() == 1
    assert threads() == 2
