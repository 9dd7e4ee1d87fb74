"""Repeated calls: arrays of a stand-in for CuPy on a stand-in for a GPU, whose backend notes what it is asked to run."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm import api, backends, caches, dispatch, plan
from hipgroupgemm.backends.base import Executable, MatmulAlgorithm
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.operands import arrays

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
    monkeypatch.setattr(arrays, "_cupy_kind", lambda: "cuda")
    monkeypatch.setattr(arrays, "_adapter", functools.lru_cache(arrays._adapter.__wrapped__))
    monkeypatch.setattr(dispatch, "_readers", {})
    idle = types.SimpleNamespace(use_device=lambda index: contextlib.nullcontext(), is_capturing=lambda stream: stream in captured)
    captured = set()
    monkeypatch.setattr(plan, "get_runtime", lambda kind: idle)
    backend = NotingBackend()
    backends.register_backend(backend, ("cuda",), first=True)
    yield types.SimpleNamespace(backend=backend, stream=stream, captured=captured)
    hgg.clear_plan_cache()
    backends.unregister_backend("noting")


@pytest.fixture
def looked(monkeypatch):
    """How many calls were parsed."""
    count = []
    parse = dispatch.parse
    monkeypatch.setattr(dispatch, "parse", lambda arguments: (count.append(1), parse(arguments))[1])
    return count


def operands(rows=64):
    return FakeArray((rows, 32), BF16), FakeArray((4, 32, 48), BF16), FakeArray((4,), np.int32)


@pytest.mark.parametrize("through", ["plan", "function"])
def test_only_the_first_of_alike_calls_is_parsed(through, gpu, looked):
    lhs, rhs, sizes = operands()
    out = FakeArray((64, 48), BF16)
    plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), device="cuda:0")
    call = plan.execute if through == "plan" else hgg.ragged_dot
    looked.clear()
    for _ in range(5):
        assert call(lhs, rhs, sizes, out=out) is out
    assert len(looked) == 1 and len(gpu.backend.calls) == 5
    assert len(set(gpu.backend.calls)) == 1 and gpu.backend.calls[0][:2] == (lhs.data.ptr, out.data.ptr)
    # arrays of the same layouts at other addresses: read, not parsed
    for _ in range(5):
        others, other_out = operands(), FakeArray((64, 48), BF16)
        assert call(*others, out=other_out) is other_out
        assert gpu.backend.calls[-1][:2] == (others[0].data.ptr, other_out.data.ptr)
    assert len(looked) == 1
    # everything else that a check or a result may depend on makes another call
    changes = [
        {"alpha": 2.0},
        {"tail": "undefined"},
        {"offs": sizes, "group_sizes": None},
        {"group_sizes": FakeArray((4,), np.int64, sizes.data.ptr)},
        {"out": None},
        {"beta": 1.0, "c": out} if through == "function" else {"beta": 0.0, "c": out},
    ]
    for change in changes:
        before = len(looked)
        arguments = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "out": out, **change}
        for _ in range(2):
            call(**arguments)
        assert len(looked) > before, change
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
    api._plans.clear()  # the plans alone
    hgg.ragged_dot(lhs, rhs, sizes, out=out)
    assert len(looked) == 3 and len(gpu.backend.calls) == 3


def test_there_is_a_bound(gpu, monkeypatch):
    monkeypatch.setattr(caches, "_MOST_CALLS", 8)
    lhs, rhs, sizes = operands()
    for i in range(30):
        hgg.ragged_dot(lhs, rhs, sizes, alpha=float(i))
    assert 0 < len(api._calls) <= 8


def test_what_depends_on_addresses_or_values_is_checked_in_every_call(gpu):
    lhs, rhs, sizes = operands()
    out = FakeArray((64, 48), BF16)
    for _ in range(2):
        hgg.ragged_dot(lhs, rhs, sizes, out=out)
        with pytest.raises(ValueError, match="out: shares memory with rhs"):
            hgg.ragged_dot(lhs, rhs, sizes, out=FakeArray((64, 48), BF16, rhs.data.ptr + 512))
    host = np.array([2, 3], np.int64)
    a, b = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32)
    for _ in range(3):
        host[:] = 2, 3
        assert (hgg.ragged_dot(a, b, host) == 4).all()
        host[:] = 2, 4
        with pytest.raises(ValueError, match="group 1 runs past"):
            hgg.ragged_dot(a, b, host)


def test_a_capture_needs_a_plan_that_has_run_on_any_stream(gpu):
    lhs, rhs, sizes = operands()
    config = hgg.config_for_ragged_dot(lhs, rhs, sizes)
    gpu.captured.add(7)
    gpu.stream.ptr = 7
    with hgg.GroupedMatmulPlan(config, device="cuda:0") as fresh:
        with pytest.raises(RuntimeError, match="has not run yet"):
            fresh.execute(lhs, rhs, sizes)
        gpu.stream.ptr = 0
        fresh.execute(lhs, rhs, sizes)
        gpu.stream.ptr = 7
        fresh.execute(lhs, rhs, sizes)
        assert gpu.backend.calls[-1][3] == 7


def test_plans_that_graphs_use_are_never_evicted(gpu, monkeypatch):
    monkeypatch.setattr(Noting, "in_graph", lambda self: self.captured, raising=False)
    monkeypatch.setattr(Noting, "captured", False, raising=False)
    cache = caches.PlanCache(1)
    configs = [hgg.config_for_ragged_dot(*operands(rows)) for rows in (64, 128, 256)]
    held = cache.get(configs[0].key(), lambda: hgg.GroupedMatmulPlan(configs[0], device="cuda:0"))
    held.execute(*operands(64))
    next(iter(held._executables.values())).captured = True
    for config in configs[1:]:
        cache.get(config.key(), lambda config=config: hgg.GroupedMatmulPlan(config, device="cuda:0"))
    assert not held._closed
    assert cache.clear() == 1 and not held._closed
    held.execute(*operands(64))
    held.close()


def test_a_forked_child_finds_its_locks_open():
    """A thread holds the plan's and the caches' locks at the fork; it does not exist in the child."""
    a, b = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(a, b, [2, 3]), device="cpu") as plan:
        hgg.ragged_dot(a, b, [2, 3])
        taken, done = threading.Event(), threading.Event()

        def hold():
            with plan._lock, api._plans._lock, backends._lock:
                taken.set()
                done.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert taken.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            right = (plan.execute(a, b, [2, 3]) == 4).all() and (hgg.ragged_dot(a, b, [3, 2]) == 4).all()
            hgg.clear_plan_cache()
            os._exit(0 if right and hgg.backend_names() and backends.get_backend("reference") else 1)
        done.set()
        holder.join()
        _, status = os.waitpid(child, 0)
        assert status == 0


def test_plans_can_not_be_copied(gpu):
    config = hgg.config_for_ragged_dot(*operands())
    with hgg.GroupedMatmulPlan(config, device="cuda:0") as plan:
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copying(plan)


def test_cupy_streams_are_those_of_the_operands_device(gpu, monkeypatch):
    """Streams are current per device: the one of device 1 counts, though device 0 is the current one."""
    current = [0]

    @contextlib.contextmanager
    def on(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    cuda = sys.modules["cupy"].cuda
    monkeypatch.setattr(cuda, "Device", on)
    monkeypatch.setattr(cuda.runtime, "getDevice", lambda: current[0])
    monkeypatch.setattr(cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=0x100 * current[0]))
    arrays_of_one = [*operands(), FakeArray((64, 48), BF16)]
    for array in arrays_of_one:
        array.data.device_id = 1
    *inputs, out = arrays_of_one
    for _ in range(2):  # parsed, then recognised
        hgg.ragged_dot(*inputs, out=out)
        assert gpu.backend.calls[-1][3] == 0x100
    assert current == [0]


def test_adding_into_out_is_recognised_and_half_an_overlap_is_not(gpu, looked):
    lhs, rhs, sizes = operands()
    for _ in range(3):
        out = FakeArray((64, 48), BF16)
        assert hgg.ragged_dot(lhs, rhs, sizes, out=out, c=out, beta=1.0) is out
    assert len(looked) == 1
    with pytest.raises(ValueError, match="out: shares memory with c without being exactly c"):
        hgg.ragged_dot(lhs, rhs, sizes, out=out, c=FakeArray((64, 48), BF16, out.data.ptr + 96), beta=1.0)
    a, b = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32)
    total = np.zeros((5, 6), np.float32)
    for turn in range(1, 4):
        hgg.ragged_dot(a, b, np.array([2, 3]), out=total, c=total, beta=1.0)
        assert (total == 4 * turn).all()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_plan_that_is_retired_in_its_own_call_ends_after_it(gpu, monkeypatch, error):
    closed = []

    def execute(self, arguments):
        hgg.clear_plan_cache()
        assert not closed, "closed while it was running"
        if error is not None:
            raise error

    monkeypatch.setattr(Noting, "execute", execute)

    def close(self):
        closed.append(self)

    monkeypatch.setattr(Noting, "close", close)
    with contextlib.suppress(KeyboardInterrupt):
        hgg.ragged_dot(*operands())
    assert len(closed) == 1


def test_settings_that_are_no_strings_are_refused(gpu):
    for name in ("tail", "check"):
        for value in ([], np.array(["zero"]), np.array(["none"])):
            with pytest.raises(ValueError, match=f"{name}="):
                hgg.ragged_dot(*operands(), **{name: value})


def test_a_bool_is_no_int_and_a_text_no_bool_whatever_is_cached():
    lhs, rhs, sizes = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32), np.array([2, 3])
    numbers = hgg.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    wide = {"group_sizes": [3, 2], "ragged_dot_dimension_numbers": numbers, "group_offset": 1}
    left, right = np.ones((5, 4), np.float32), np.ones((5, 6), np.float32)
    for _ in range(3):
        assert hgg.ragged_dot_general(left, right, **wide, group_count=1).shape == (1, 4, 6)
        assert hgg.ragged_dot_general(left, right, **wide, group_count=np.int8(1)).shape == (1, 4, 6)
        for wrong in (True, 1.0, "1", [1]):
            with pytest.raises(TypeError, match="group_count="):
                hgg.ragged_dot_general(left, right, **wide, group_count=wrong)
        hgg.ragged_dot(lhs, rhs, sizes, deterministic=True, use_store=False)
        for name, values in {"deterministic": ("no", 1, 1.0, [], None), "use_store": ("off", 0, 0.0, [], None)}.items():
            for wrong in values:
                with pytest.raises(TypeError, match=f"{name}="):
                    hgg.ragged_dot(lhs, rhs, sizes, **{"deterministic": True, "use_store": False, name: wrong})


def test_settings_of_a_wrong_type_are_named():
    lhs, rhs, sizes = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32), np.array([2, 3])
    config = hgg.config_for_ragged_dot(lhs, rhs, sizes)
    for wrong in ([], {}, 3, True, b"reference"):
        with pytest.raises(TypeError, match="backend: got"):
            hgg.ragged_dot(lhs, rhs, sizes, backend=wrong)
        with pytest.raises(TypeError, match="backend: got"):
            hgg.GroupedMatmulPlan(config, wrong, "cpu")
    for name in ("deterministic", "use_store"):
        with pytest.raises(TypeError, match=f"{name}='no'"):
            hgg.GroupedMatmulPlan(config, device="cpu", **{name: "no"})
    with hgg.GroupedMatmulPlan(config, device="cpu", use_store=False) as plan:
        for name in ("deterministic", "store", "isolate"):
            with pytest.raises(TypeError, match=f"{name}='off'"):
                plan.autotune(**{name: "off"})
        for wrong in ([[]], 3, [None]):
            with pytest.raises(TypeError, match="backends="):
                plan.autotune(backends=wrong)
        for wrong in (True, False, None, 0.0, "0"):
            with pytest.raises(TypeError, match="index: got"):
                plan.set_algorithm(plan.algorithm.name, wrong)
    for shape, strides in (((True, 2), None), ((1, 2), (True, 4))):
        with pytest.raises(TypeError, match="must be ints"):
            hgg.ArraySpec(shape, "float32", strides=strides)


def test_classes_without_end_are_not_all_remembered():
    lhs, rhs, sizes = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32), np.array([2, 3])
    for number in range(700):
        kind = type(f"Rows{number}", (np.ndarray,), {})
        hgg.ragged_dot(lhs.view(kind), rhs, sizes)
    assert len(dispatch._readers) <= 300 and arrays._adapter.cache_info().currsize <= 300
    assert np.ndarray in dispatch._readers or hgg.ragged_dot(lhs, rhs, sizes) is not None
