"""Profiler ranges: made where a profiler looks on, one around each launch, closed after errors too, and none otherwise."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from backend_double import DoubleBackend

import hipgroupgemm as hgg
from hipgroupgemm.backends import ranges


@pytest.fixture
def marks(monkeypatch):
    """What a stand-in for the nvtx package was told."""
    seen: list[str] = []
    nvtx = types.ModuleType("nvtx")
    nvtx.push_range = lambda text: seen.append(f"push {text}")
    nvtx.pop_range = lambda: seen.append("pop")
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    for name in (ranges.ENVIRONMENT_VARIABLE, *(name for names in ranges._PROFILERS.values() for name in names)):
        monkeypatch.delenv(name, raising=False)
    ranges._nvtx.cache_clear()
    yield seen
    ranges._nvtx.cache_clear()


def plan_and_operands():
    lhs, rhs, sizes = np.ones((6, 4), np.float32), np.ones((2, 4, 3), np.float32), np.array([2, 4])
    return hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), "double", "cpu"), (lhs, rhs, sizes)


@pytest.fixture
def double(monkeypatch):
    from hipgroupgemm import backends

    backend = DoubleBackend()
    backends.register_backend(backend, ("cpu",))
    original = ranges.range_functions
    monkeypatch.setattr(ranges, "range_functions", lambda kind: original("cuda"))
    yield backend
    backends.unregister_backend("double")


def test_a_range_around_every_launch(marks, double, monkeypatch):
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/somewhere/libToolsInjection64.so")
    plan, operands = plan_and_operands()
    with plan:
        plan.execute(*operands)
        push = "push hipgroupgemm NON_CONTRACTING m=6 n=3 k=4 groups=2: double kernel_0"
        assert marks == [push, "pop"]
        double.error = RuntimeError("broken")
        with pytest.raises(RuntimeError, match="broken"):
            plan.execute(*operands)
        assert marks == [push, "pop"] * 2
        assert "a double on stream" in plan.explain()
    assert double.executables[0].closed


def test_no_profiler_no_ranges(marks, double, monkeypatch):
    plan, operands = plan_and_operands()
    with plan:
        plan.execute(*operands)
        assert type(plan._executables[0]).__name__ == "DoubleExecutable"
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/somewhere/libToolsInjection64.so")
    monkeypatch.setenv(ranges.ENVIRONMENT_VARIABLE, "0")
    plan, operands = plan_and_operands()
    with plan:
        plan.execute(*operands)
    assert marks == []


def test_asked_for_without_a_profiler(marks, monkeypatch):
    monkeypatch.setenv(ranges.ENVIRONMENT_VARIABLE, "1")
    assert ranges.range_functions("cuda") is not None
    assert ranges.range_functions("cpu") is None
    monkeypatch.setitem(sys.modules, "nvtx", None)  # not installed
    ranges._nvtx.cache_clear()
    assert ranges.range_functions("cuda") is None
