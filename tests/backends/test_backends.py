"""The registry of backends, who is asked in which order, what reaches a backend, and the plans that ragged_dot keeps."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from backend_double import DoubleBackend
from generators import FORWARD_BATCHED, WEIGHT_GRADIENT, random_sizes, random_values

import hipgroupgemm as hgg
from hipgroupgemm import GroupedMatmulPlan, backends, register_backend, unregister_backend
from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.caches import PlanCache
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.problem.groups import GroupFault

Spec = hgg.ArraySpec


def config_of(m=12, n=5, k=7, dtype="float32"):
    return hgg.config_for_ragged_dot(Spec((m, k), dtype), Spec((2, k, n), dtype), Spec((2,), "int32"))


@pytest.fixture
def registered():
    """Registers backends for one test."""
    names = []

    def register(backend, kinds=("cpu",), **settings):
        register_backend(backend, kinds, **settings)
        names.append(backend.name)
        return backend

    yield register
    for name in names:
        if name in backend_names():
            unregister_backend(name)
    hgg.clear_plan_cache()


def operands(rng, m=12):
    return random_values(rng, (m, 7), "float32"), random_values(rng, (2, 7, 5), "float32"), random_sizes(rng, m, 2)


# ---- the registry --------------------------------------------------------------------------------------------------------------


def test_register_and_unregister(registered):
    before = backend_names()
    assert "reference" in before
    double = registered(DoubleBackend())
    assert backend_names() == (*before, "double")
    assert get_backend("double") is double
    with pytest.raises(ValueError, match="'double' is registered already"):
        register_backend(DoubleBackend(), ["cpu"])
    with pytest.raises(ValueError, match="'reference' is registered already"):
        register_backend(DoubleBackend("reference"), ["cpu"])
    first = registered(DoubleBackend("first"), first=True)
    assert backend_names() == ("first", *before, "double")
    assert select_backend(config_of(), CPU) is first
    unregister_backend("first")
    unregister_backend("double")
    assert backend_names() == before
    for name in ("double", "reference", "nobody"):
        with pytest.raises(ValueError, match=f"'{name}' was not added"):
            unregister_backend(name)
    with pytest.raises(ValueError, match=r"backend='double': no such backend; there are .*reference"):
        get_backend("double")


def test_what_is_no_backend_is_not_registered():
    before = backend_names()
    nameless = DoubleBackend()
    nameless.name = None
    for backend, kinds, error, text in (
        (DoubleBackend, ("cpu",), TypeError, "wanted an instance of a subclass"),
        (object(), ("cpu",), TypeError, "wanted an instance of a subclass"),
        (nameless, ("cpu",), TypeError, "wanted a name that is a string, got None"),
        (DoubleBackend(), "cpu", TypeError, r"kinds='cpu': wanted a sequence of kinds, such as \('cpu',\)"),
        (DoubleBackend(), ("cpu", "tpu"), ValueError, "'tpu' is no kind of device; wanted some of cpu, cuda, rocm"),
    ):
        with pytest.raises(error, match=text):
            register_backend(backend, kinds)
    assert backend_names() == before


def test_no_thread_sees_a_registry_half_changed():
    """Every line of registering and unregistering is a place where another thread may look."""
    before, seen = backend_names(), []

    def look(frame, event, _):
        if frame.f_code.co_filename == backends.__file__:
            seen.append(backend_names())
            return look
        return None

    outer = sys.gettrace()
    sys.settrace(look)
    try:
        register_backend(DoubleBackend("visitor"), ("cuda",), first=True)
        unregister_backend("visitor")
    finally:
        sys.settrace(outer)
    assert set(seen) == {before, ("visitor", *before)}


def test_the_first_that_can_is_taken(registered):
    able, unable = DoubleBackend("able"), DoubleBackend("unable", "its hands are tied")
    registered(able, first=True)
    registered(unable, first=True)
    assert select_backend(config_of(), CPU) is able
    able.reason = "no time"
    assert select_backend(config_of(), CPU).name == "reference"


def test_a_refusal_carries_every_reason(registered):
    registered(DoubleBackend("first", "has no such kernel"), ["rocm", "cuda"])
    registered(DoubleBackend("second", "needs k > 9"), ["rocm"])
    with pytest.raises(NotImplementedError) as caught:
        GroupedMatmulPlan(config_of(), device="rocm:1")
    for word in ("on rocm:1", "reference: serves cpu", "first: has no such kernel", "second: needs k > 9"):
        assert word in str(caught.value)
    with pytest.raises(NotImplementedError) as caught:
        GroupedMatmulPlan(config_of(), device="cuda")
    for word in ("first: has no such kernel", "second: serves rocm, the operands are on cuda:0"):
        assert word in str(caught.value)


def test_a_named_backend_never_falls_back(registered, rng):
    double = registered(DoubleBackend(reason="it is Sunday"))
    with pytest.raises(NotImplementedError, match="backend 'double' refuses: it is Sunday"):
        hgg.ragged_dot(*operands(rng), backend="double")
    with pytest.raises(NotImplementedError, match="backend 'double' refuses: it is Sunday"):
        GroupedMatmulPlan(config_of(), "double", "cpu")
    assert hgg.ragged_dot(*operands(rng)).shape == (12, 5)
    double.reason = None
    hgg.ragged_dot(*operands(rng), backend="double")
    assert len(double.calls) == 1


def test_a_named_backend_does_not_get_operands_without_a_config(registered, rng):
    double = registered(DoubleBackend())
    numbers = hgg.RaggedDotDimensionNumbers((((3,), (1,)), ((), ())), (1,), (0,))
    arguments = np.ones((2, 3, 4, 5), np.float32), np.ones((2, 5, 3), np.float32), [1, 2], numbers
    with pytest.raises(NotImplementedError, match=r"backend 'double' refuses: .*collapse.*the batch"):
        hgg.ragged_dot_general(*arguments, backend="double")
    with pytest.raises(ValueError, match="backend='nobody'"):
        hgg.ragged_dot_general(*arguments, backend="nobody")
    assert hgg.ragged_dot_general(*arguments, backend="reference").shape == (2, 3, 4, 3)
    assert not double.calls


def test_an_empty_result_is_no_reason_to_take_any_name(registered, rng):
    lhs, rhs, _ = operands(rng)
    with pytest.raises(ValueError, match="backend='nobody': no such backend"):
        hgg.ragged_dot(lhs[:0], rhs, [0, 0], backend="nobody")
    double = registered(DoubleBackend())
    assert hgg.ragged_dot(lhs[:0], rhs, [0, 0], backend="double").shape == (0, 5)
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        assert plan.execute(lhs[:0], rhs, [0, 0]).shape == (0, 5)
    assert not double.calls, "there was nothing to launch"


def test_the_stored_winner_is_asked_first(registered):
    double, config = registered(DoubleBackend()), config_of(m=131)
    asked, winner = [], "double"

    def stored(key, device):
        asked.append((key, device))
        return winner

    for name, wanted in [("double", "double"), ("reference", "reference"), (None, "reference"), ("forgotten", "reference")]:
        winner = name
        assert select_backend(config, CPU, stored=stored).name == wanted
    assert asked == [(config.key(), CPU)] * 4
    winner, double.reason = "double", "it has changed since"
    assert select_backend(config, CPU, stored=stored).name == "reference"
    assert select_backend(config, CPU, "reference", stored=stored).name == "reference"
    assert len(asked) == 5, "a named backend needs no look-up"


# ---- what reaches a backend ----------------------------------------------------------------------------------------------------


def test_a_backend_gets_the_exact_problem_and_addresses(registered, rng):
    double = registered(DoubleBackend())
    lhs, rhs, sizes = operands(rng, m=35)
    out, bias = np.zeros((35, 5), np.float32), random_values(rng, (2, 5), "float32")
    with GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes, bias=bias), "double", "cpu") as plan:
        plan.execute(lhs[:33], rhs, offs=np.cumsum(sizes // 2), out=out[:33], bias=bias, alpha=2, tail="undefined", check="sync", stream=5)
    (call,) = double.calls
    assert isinstance(call, Arguments)
    wanted = {
        "lhs": lhs.ctypes.data,
        "rhs": rhs.ctypes.data,
        "out": out.ctypes.data,
        "bias": bias.ctypes.data,
        "c": 0,
        "group_sizes": call.group_sizes.pointer,
    }
    assert call.pointers == wanted
    assert (call.config.m, call.config.alpha, call.config.beta) == (33, 2.0, 0.0)
    assert call.config.key(36) == plan.key
    assert (call.ends, call.tail, call.check, call.stream, call.group_offset) == (True, "undefined", "sync", 5, 0)
    (executable,) = double.executables
    assert executable.config == plan.key
    assert executable.config.m == 36


@pytest.mark.parametrize("lead", [(), (1,), (2,)])
def test_sizes_reach_a_backend_with_one_axis_or_two(lead, registered, rng):
    double = registered(DoubleBackend())
    batch = lead[0] if lead else 2
    lhs, rhs = random_values(rng, (batch, 12, 7), "float32"), random_values(rng, (3, batch, 7, 5), "float32")
    sizes = np.full((*lead, 3), 4, np.int32)
    hgg.ragged_dot_general(lhs, rhs, sizes, FORWARD_BATCHED, backend="double")
    (call,) = double.calls
    assert call.group_sizes.shape == ((2, 3) if lead == (2,) else (3,))
    assert call.config.sizes_per_batch == (lead == (2,))
    assert call.group_sizes.pointer == sizes.ctypes.data


def test_several_batch_axes_reach_a_backend_as_one(registered, rng):
    double = registered(DoubleBackend())
    numbers = hgg.RaggedDotDimensionNumbers((((3,), (3,)), ((0, 1), (1, 2))), (2,), (0,))
    lhs, rhs = random_values(rng, (2, 3, 8, 7), "float32"), random_values(rng, (4, 2, 3, 7, 5), "float32")
    sizes = np.array([random_sizes(rng, 8, 4) for _ in range(6)]).reshape(2, 3, 4)
    got = hgg.ragged_dot_general(lhs, rhs, sizes, numbers, backend="double")
    np.testing.assert_array_equal(got, hgg.ragged_dot_general(lhs, rhs, sizes, numbers, backend="reference"))
    (call,) = double.calls
    assert call.group_sizes.shape == (6, 4)
    assert call.config.batch_count == 6


def test_a_fault_that_a_backend_finds_is_raised_where_asked_for(registered, rng):
    double = registered(DoubleBackend())
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        arguments = operands(rng)
        double.fault = GroupFault("group_sizes", 0, 1, 40, 7)
        plan.execute(*arguments)  # check="none": not looked at
        with pytest.raises(ValueError, match=r"group_sizes: group 1 .*40 rows wanted, 7 left of 12"):
            plan.execute(*arguments, check="sync")
        plan.execute(*arguments, check="sync")  # cleared
        double.fault = GroupFault("group_offset", 0, 0, 9, 3)
        with pytest.raises(ValueError, match="group_offset: got 9, wanted 0 to 3"):
            plan.check()
        plan.check()


def test_one_executable_a_stream_and_a_new_one_for_another_algorithm(registered, rng):
    double = registered(DoubleBackend())
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        for stream in (None, 0, 3, 3, 4):
            plan.execute(*operands(rng), stream=stream)
        assert [executable.stream for executable in double.executables] == [0, 3, 4]
        plan.prepare(4)
        plan.prepare(9)
        assert [executable.stream for executable in double.executables] == [0, 3, 4, 9]
        plan.set_algorithm(plan.get_algorithms()[0])  # the one that runs already: nothing is thrown away
        assert not any(executable.closed for executable in double.executables)
        plan.set_algorithm("kernel_2", 2)
        assert all(executable.closed for executable in double.executables)
        plan.execute(*operands(rng))
        assert double.executables[-1].algorithm.name == "kernel_2"
        assert plan.workspace_size == 2000
        assert "kernel_2" in plan.explain()
        assert "not deterministic" in plan.explain()
        assert "a double on stream 0" in plan.explain()
    assert all(executable.closed for executable in double.executables)


def test_new_extents_alphas_and_betas_prepare_and_enumerate_nothing(registered, rng):
    double = registered(DoubleBackend())
    rhs = random_values(rng, (2, 7, 5), "float32")
    for m in (33, 34, 36, 35):
        for alpha in (1, 2):
            hgg.ragged_dot(random_values(rng, (m, 7), "float32"), rhs, [m, 0], alpha=alpha, backend="double")
    assert len(double.executables) == 1
    enumerated = len(double.asked)
    hgg.ragged_dot(random_values(rng, (34, 7), "float32"), rhs, [4, 0], alpha=-1, backend="double")
    assert len(double.asked) == enumerated
    hgg.ragged_dot(random_values(rng, (37, 7), "float32"), rhs, [4, 0], backend="double")
    assert len(double.executables) == 2
    for beta in (1, -2.5, 0.25):
        lhs, c = random_values(rng, (36, 7), "float32"), random_values(rng, (36, 5), "float32")
        hgg.ragged_dot(lhs, rhs, [4, 0], c=c, beta=beta, backend="double")
    assert len(double.executables) == 3


def test_workspaces(registered, rng):
    registered(DoubleBackend())
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        assert [a.index for a in plan.get_algorithms(max_workspace_size=1000)] == [0, 1]
        assert [a.index for a in plan.get_algorithms(1, 5000)] == [0]
        plan.set_algorithm("kernel_1", 1)
        plan.execute(*operands(rng), workspace=np.zeros(1000, np.uint8))
        with pytest.raises(ValueError, match="workspace: has 999 bytes, the algorithm needs 1000"):
            plan.execute(*operands(rng), workspace=np.zeros(999, np.uint8))


def test_deterministic_takes_an_algorithm_that_is(registered, rng):
    double = registered(DoubleBackend())
    hgg.ragged_dot(*operands(rng), backend="double")
    hgg.ragged_dot(*operands(rng), backend="double", deterministic=True)
    assert [executable.algorithm.index for executable in double.executables] == [0, 1]
    double.found = [algorithm for algorithm in double.found if not algorithm.deterministic]
    hgg.clear_plan_cache()
    with pytest.raises(NotImplementedError, match="double has no deterministic algorithm"):
        hgg.ragged_dot(*operands(rng), backend="double", deterministic=True)
    double.found = []
    hgg.clear_plan_cache()
    with pytest.raises(NotImplementedError, match="double has no algorithm for this config on cpu"):
        hgg.ragged_dot(*operands(rng), backend="double")


def test_an_error_of_a_backend_comes_through_and_leaves_the_plan_usable(registered, rng):
    double = registered(DoubleBackend())
    double.error = RuntimeError("launch failed: status 700")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="status 700"):
            hgg.ragged_dot(*operands(rng), backend="double")
    double.error = None
    arguments = operands(rng)
    np.testing.assert_array_equal(hgg.ragged_dot(*arguments, backend="double"), hgg.ragged_dot(*arguments))


# ---- the cache of plans --------------------------------------------------------------------------------------------------------


def test_a_backend_that_is_gone_or_new_is_not_served_from_the_cache(registered, rng):
    arguments = operands(rng)
    hgg.ragged_dot(*arguments)
    newer = registered(DoubleBackend("newer"), first=True)
    hgg.ragged_dot(*arguments)
    assert len(newer.calls) == 1, "a plan from before the registration was used"
    unregister_backend("newer")
    hgg.ragged_dot(*arguments)
    with pytest.raises(ValueError, match="no such backend"):
        hgg.ragged_dot(*arguments, backend="newer")
    assert len(newer.calls) == 1, "a backend that is gone was used"
    again = registered(DoubleBackend("newer"))
    hgg.ragged_dot(*arguments, backend="newer")
    assert (len(newer.calls), len(again.calls)) == (1, 1)


def plan_of(cache, config, device, backend, deterministic):
    """The cache's plan for these, as the functions ask for it."""
    key = (config.key(), device, backend, deterministic)
    return cache.get(key, lambda: GroupedMatmulPlan(config, backend, device, deterministic=deterministic))


def test_the_cache_is_bounded_and_drops_the_least_recently_used(registered):
    double = registered(DoubleBackend())
    cache = PlanCache(3)

    def use(n):
        plan = plan_of(cache, config_of(n=n), CPU, "double", False)
        plan.prepare()
        return plan

    plans = {n: use(n) for n in (1, 2, 3)}
    assert use(1) is plans[1]
    assert use(3) is plans[3]
    use(4)  # 2 goes
    assert [executable.closed for executable in double.executables] == [False, True, False, False]
    assert use(1) is plans[1]
    assert use(2) is not plans[2]  # 3 goes
    assert [executable.closed for executable in double.executables] == [False, True, True, False, False]
    cache.clear()
    assert all(executable.closed for executable in double.executables)
    assert use(1) is not plans[1]
    cache.clear()


def test_plans_are_kept_apart_by_key_device_backend_and_determinism(registered):
    registered(DoubleBackend())
    registered(DoubleBackend("elsewhere"), ["rocm"])
    cache = PlanCache(20)
    seen = set()
    config = config_of(m=35)
    for key in [
        (config, CPU, None, False),
        (config, CPU, "double", False),
        (config, CPU, "double", True),
        (config, Device("rocm", 0), None, False),
        (config, Device("rocm", 1), None, False),
        (config_of(m=37), CPU, None, False),
        (config_of(m=35, dtype="bfloat16"), CPU, None, False),
    ]:
        plan = plan_of(cache, *key)
        assert plan not in seen
        seen.add(plan)
        assert plan_of(cache, *key) is plan
    assert plan_of(cache, config_of(m=33), CPU, None, False) in seen  # the capacity of both is 36
    cache.clear()


def test_a_plan_evicted_while_in_use_is_closed_only_afterwards(registered, rng):
    double = registered(DoubleBackend())
    double.entered = threading.Event()
    cache, arguments, results = PlanCache(1), operands(rng), []

    def work():
        results.append(plan_of(cache, config_of(), CPU, "double", False).execute(*arguments))

    thread = threading.Thread(target=work)
    thread.start()
    assert double.entered.wait(60)
    double.entered = None
    busy = double.executables[0]
    plan_of(cache, config_of(n=9), CPU, "double", False)
    assert not busy.closed
    cache.clear()
    assert not busy.closed
    double.go_on.set()
    thread.join()
    assert busy.closed
    np.testing.assert_array_equal(results[0], hgg.ragged_dot(*arguments))


def test_many_threads_share_one_plan(registered, rng):
    double = registered(DoubleBackend())
    arguments = operands(rng)
    wanted = hgg.ragged_dot(*arguments)
    failures = []

    def work():
        try:
            for _ in range(20):
                np.testing.assert_array_equal(hgg.ragged_dot(*arguments, backend="double"), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(double.calls) == 160
    assert sum(not executable.closed for executable in double.executables) == 1


def test_plans_are_found_again_for_the_weight_gradient_too(registered, rng):
    double = registered(DoubleBackend())
    for rows in (33, 36, 34):
        lhs, rhs = random_values(rng, (rows, 7), "float32"), random_values(rng, (rows, 5), "float32")
        hgg.ragged_dot_general(lhs, rhs, [rows, 0], WEIGHT_GRADIENT, backend="double")
    assert len(double.executables) == 1
