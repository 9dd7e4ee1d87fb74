"""Repeated calls: arrays of a stand-in for CuPy on a stand-in for a GPU, whose backend notes what it is asked to run."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm import backends, repeats
from hipgroupgemm.backends.base import Executable, MatmulAlgorithm
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.operands import arrays

ragged_dot = sys.modules["hipgroupgemm.api"]  # the package's attribute of this name is the function
BF16 = np.dtype(ml_dtypes.bfloat16)


class Memory:
    def __init__(self, ptr):
        self.ptr, self.device_id = ptr, 0


class FakeArray:
    """What is looked at of a cupy.ndarray."""

    top = 0x7F0000000000

    def __init__(self, shape, dtype, ptr=None):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.strides = tuple(np.empty(shape, dtype).strides)
        size = max(int(np.prod(shape)) * self.dtype.itemsize, 1)
        if ptr is None:
            ptr, FakeArray.top = FakeArray.top, FakeArray.top + -(-size // 512) * 512
        self.data = Memory(ptr)


class Noting(Executable):
    def __init__(self, calls):
        self.calls = calls

    def execute(self, arguments):
        self.calls.append(
            (
                arguments.pointers["lhs"],
                arguments.pointers["out"],
                arguments.config,
                arguments.stream,
                arguments.tail,
                arguments.config.alpha,
            )
        )

    def explain(self):
        return "notes"


class NotingBackend(ReferenceBackend):
    name = "noting"

    def __init__(self):
        self.calls = []

    def can_handle(self, config, device):
        return None

    def algorithms(self, config, device, limits):
        return [MatmulAlgorithm(self.name, 0, "one", 0, True)]

    def prepare(self, config, device, algorithm, stream):
        return Noting(self.calls)


@pytest.fixture
def gpu(monkeypatch):
    cupy = types.ModuleType("cupy")
    stream = types.SimpleNamespace(ptr=0)
    runtime = types.SimpleNamespace(is_hip=False, getDevice=lambda: 0)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: stream, runtime=runtime, Device=lambda index: contextlib.nullcontext())
    cupy.ndarray, cupy.empty = FakeArray, FakeArray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "_cupy_is_hip", None)
    monkeypatch.setattr(arrays, "_adapters", {})
    monkeypatch.setattr(repeats, "_readers", {})
    backend = NotingBackend()
    backends.register_backend(backend, ("cuda",), first=True)
    yield types.SimpleNamespace(backend=backend, stream=stream)
    hgg.clear_plan_cache()
    backends.unregister_backend("noting")


@pytest.fixture
def looked(monkeypatch):
    """How many calls were looked at in full."""
    count = []
    for module in (ragged_dot, sys.modules["hipgroupgemm.plan"]):
        gather = module.gather
        monkeypatch.setattr(module, "gather", lambda *args, gather=gather, **kwargs: (count.append(1), gather(*args, **kwargs))[1])
    return count


def operands(rows=64):
    return FakeArray((rows, 32), BF16), FakeArray((4, 32, 48), BF16), FakeArray((4,), np.int32)


@pytest.mark.parametrize("through", ["plan", "function"])
def test_only_the_first_of_equal_calls_is_looked_at(through, gpu, looked):
    lhs, rhs, sizes = operands()
    out = FakeArray((64, 48), BF16)
    plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), device="cuda:0")
    call = plan.execute if through == "plan" else hgg.ragged_dot
    looked.clear()
    for _ in range(5):
        assert call(lhs, rhs, sizes, out=out) is out
    assert len(looked) == 1 and len(gpu.backend.calls) == 5
    assert len(set(gpu.backend.calls)) == 1 and gpu.backend.calls[0][:2] == (lhs.data.ptr, out.data.ptr)
    # everything that a check or a result may depend on makes another call
    changes = [
        {"alpha": 2.0},
        {"tail": "undefined"},
        {"out": FakeArray((64, 48), BF16)},
        {"offs": sizes, "group_sizes": None},
        {"group_sizes": FakeArray((4,), np.int32)},
        {"group_sizes": FakeArray((4,), np.int64, sizes.data.ptr)},
        {"lhs": FakeArray((64, 32), BF16)},
    ]
    for change in changes:
        before = len(looked)
        arguments = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "out": out, **change}
        for _ in range(2):
            call(**arguments)
        assert len(looked) == before + 1, change
    gpu.stream.ptr = 0x5000
    call(lhs, rhs, sizes, out=out)
    assert gpu.backend.calls[-1][3] == 0x5000
    plan.close()


@pytest.mark.parametrize("through", ["plan", "function"])
def test_outputs_are_made_anew(through, gpu, looked):
    lhs, rhs, sizes = operands()
    plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), device="cuda:0")
    call = plan.execute if through == "plan" else hgg.ragged_dot
    results = [call(lhs, rhs, sizes) for _ in range(4)]
    assert len({id(result) for result in results}) == 4
    assert [result.data.ptr for result in results] == [noted[1] for noted in gpu.backend.calls]
    assert all(result.shape == (64, 48) and result.dtype == BF16 for result in results)


def test_wrong_calls_stay_wrong(gpu):
    lhs, rhs, sizes = operands()
    out = FakeArray((64, 48), BF16)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), device="cuda:0") as plan:
        plan.execute(lhs, rhs, sizes, out=out)
        for _ in range(2):
            with pytest.raises(ValueError, match="out: shares memory with lhs"):
                plan.execute(lhs, rhs, sizes, out=FakeArray((64, 48), BF16, lhs.data.ptr))
            with pytest.raises(TypeError, match="alpha"):
                plan.execute(lhs, rhs, sizes, out=out, alpha=True)
            with pytest.raises(TypeError, match="both"):
                plan.execute(lhs, rhs, sizes, offs=sizes, out=out)
            with pytest.raises(TypeError, match="out: got shape"):
                plan.execute(lhs, rhs, sizes, out=FakeArray((64, 47), BF16))
    with pytest.raises(RuntimeError, match="closed"):
        plan.execute(lhs, rhs, sizes, out=out)


def test_nothing_keeps_arrays_alive(gpu):
    lhs, rhs, sizes = operands()
    hgg.ragged_dot(lhs, rhs, sizes)
    watched = [weakref.ref(array) for array in (lhs, rhs, sizes)]
    del lhs, rhs, sizes
    gpu.backend.calls.clear()
    gc.collect()
    assert [watch() for watch in watched] == [None] * 3


def test_evicted_plans_are_made_again(gpu, looked):
    lhs, rhs, sizes = operands()
    out = FakeArray((64, 48), BF16)
    hgg.ragged_dot(lhs, rhs, sizes, out=out)
    hgg.clear_plan_cache()
    hgg.ragged_dot(lhs, rhs, sizes, out=out)
    assert len(looked) == 2
    ragged_dot._plans.clear()  # the plans alone
    hgg.ragged_dot(lhs, rhs, sizes, out=out)
    assert len(looked) == 3 and len(gpu.backend.calls) == 3


def test_there_is_a_bound(gpu, monkeypatch):
    monkeypatch.setattr(repeats, "_LIMIT", 8)
    lhs, rhs, sizes = operands()
    for i in range(30):
        hgg.ragged_dot(lhs, rhs, sizes, alpha=float(i))
    assert 0 < len(ragged_dot._repeats) <= 8
