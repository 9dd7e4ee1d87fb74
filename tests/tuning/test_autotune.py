"""`plan.autotune`: the plan runs the best afterwards, of whatever backend, and later plans do."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from comparison import assert_close
from fake_backend import FakeBackend
from generators import FORWARD, Mode, make_problem

import hipgroupgemm as hgg
from hipgroupgemm.backends import backend_kinds
from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.tuning import close_workers
from hipgroupgemm.tuning.keep import NoRightCandidate

FAST = {"repetitions": 2, "warmup": 0}


@pytest.fixture(scope="module", autouse=True)
def workers():
    yield
    close_workers()


@pytest.fixture
def register():
    """Registers backends for the CPU, and unregisters them."""
    added = []

    def add(names, **settings):
        backend = FakeBackend(names, **settings)
        hgg.register_backend(backend, ("cpu",))
        added.append(backend.name)
        return backend

    yield add
    for name in added:
        if name in backend_kinds():  # a test may have done so itself
            hgg.unregister_backend(name)
    hgg.clear_plan_cache()


def config(m=48, **more):
    lhs, rhs = hgg.ArraySpec((m, 24), "float32"), hgg.ArraySpec((3, 24, 20), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((3,), np.int32), FORWARD, **more)


def check(plan, rng, sizes=(20, 0, 21)):
    """The plan computes what it should."""
    problem = make_problem(rng, Mode.NON_CONTRACTING, 48, 20, 24, sizes)
    value, magnitude = problem.expected()
    out = np.full((48, 20), np.nan, np.float32)
    result = plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=out)
    assert result is out
    assert_close(out, value, magnitude, problem.length, (problem.lhs.dtype,))


def slow_reference(monkeypatch):
    """The reference takes 50 ms a call, here and in workers' reports alike: it only ever runs here in these tests."""
    from hipgroupgemm.backends import reference

    plain = reference.run_config

    def slow(*arguments, **options):
        import time

        time.sleep(0.05)
        plain(*arguments, **options)

    monkeypatch.setattr(reference, "run_config", slow)


def test_a_plan_changes_its_backend_for_the_best(register, rng, monkeypatch):
    slow_reference(monkeypatch)
    double = register(["wrong", "good:1", "good:60"])
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        assert plan.backend == "reference"
        check(plan, rng)
        report = plan.autotune(isolate=False, **FAST)
        assert (plan.backend, plan.algorithm.name) == ("double", "good:1")
        assert {row.algorithm.backend for row in report.rows} == {"double", "reference"}
        assert plan.algorithm == report.best.algorithm
        assert plan.algorithm.time == report.best.median_ms
        check(plan, rng)
        assert not double.executables[-1].closed
        assert "backend double" in plan.explain()
        said = f"tuned in this process at {report.started} on {report.device_name} (cpu) for balanced sizes, balanced, ragged extent 48: ok"
        assert said in plan.explain()
        plan.set_algorithm("good:60", 2)  # pins another by hand
        check(plan, rng)
        assert plan.algorithm.name == "good:60"
    assert all(one.closed for one in double.executables)


def test_a_named_backend_stays(register, rng):
    register(["good:40"])
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        report = plan.autotune(**FAST)
        assert {row.algorithm.backend for row in report.rows} == {"double"}
        assert plan.backend == "double"
        other = plan.autotune(backends=["reference", "double"], **FAST)
        assert other.best.algorithm.backend == plan.backend == "reference"  # asked for by name, too
        check(plan, rng)


def test_what_ran_before_is_closed_and_what_stays_is_not_made_anew(register, rng):
    double = register(["good:40", "good:1"])
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        check(plan, rng)
        (first,) = double.executables
        plan.autotune(store=False, **FAST)
        assert first.closed
        check(plan, rng)
        second = double.executables[-1]
        assert second.name == "good:1"
        plan.autotune(store=False, **FAST)  # the same one wins again
        check(plan, rng)
        assert double.executables[-1] is second
        assert not second.closed
    assert second.closed


def test_what_a_graph_holds_lives_until_the_plan_is_closed(register, rng):
    double = register(["good:40", "good:1", "good:60"])
    double.captured = {"good:40"}
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        check(plan, rng)
        (held,) = double.executables
        plan.autotune(store=False, **FAST)
        assert plan.algorithm.name == "good:1"
        check(plan, rng)
        plan.set_algorithm("good:60", 2)
        assert not held.closed
    assert held.closed


def test_repeated_calls_are_forgotten_with_the_backend(register, rng, monkeypatch):
    slow_reference(monkeypatch)
    register(["good:1"])
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        plan._calls.put("a call", None)
        plan.autotune(isolate=False, store=False, **FAST)
        assert plan.backend == "double"
        assert not len(plan._calls)


def test_where_nothing_is_right_the_plan_stays_and_says_why(register, rng):
    register(["wrong", "raises", "exits:3"])
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        with pytest.raises(RuntimeError, match="no candidate is right") as caught:
            plan.autotune(**FAST)
        for words in ("'wrong' wrong: ", "'raises' failed: RuntimeError: no kernel image", "'exits:3' crashed: ", "exit code 3"):
            assert words in str(caught.value)
        assert [row.verdict for row in caught.value.report.rows] == ["wrong", "crashed", "failed"]
        assert plan.algorithm.name == "wrong"  # as before
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, NoRightCandidate)
    assert again.report == caught.value.report


@pytest.mark.parametrize("when", ["closed", "unregistered"])
def test_a_report_is_never_lost(register, when):
    """What happens to the plan or its backend while it is tuned comes up once that is done."""
    plan = hgg.GroupedMatmulPlan(config(), "reference", "cpu")
    double = register(["good"])

    def meanwhile(event):
        if when == "closed":
            plan.close()
        elif when == "unregistered" and double.name in backend_kinds():
            hgg.unregister_backend(double.name)

    with plan, pytest.raises((RuntimeError, ValueError)) as caught:
        plan.autotune(backends="double", isolate=False, progress=meanwhile, **FAST)
    assert [row.verdict for row in caught.value.report.rows] == ["ok"]


def test_an_interrupt_while_the_report_is_stored_loses_neither_winner_nor_report(register, monkeypatch):
    register(["good:40", "good:1"])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hipgroupgemm.tuning.keep.keep", interrupted)
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        with pytest.raises(KeyboardInterrupt) as caught:
            plan.autotune(**FAST)
        assert plan.algorithm == caught.value.report.best.algorithm


def test_later_plans_and_ragged_dot_take_what_was_stored(register, rng, monkeypatch):
    slow_reference(monkeypatch)
    double = register(["wrong", "good:1"])
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        plan.autotune(isolate=False, **FAST)
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        assert (plan.backend, plan.algorithm.name) == ("double", "good:1")
        assert "from the tuning store" in plan.explain()
        check(plan, rng)
    with hgg.GroupedMatmulPlan(config(), device="cpu", use_store=False) as plan:
        assert plan.backend == "reference"
    before = len(double.executables)
    problem = make_problem(rng, Mode.NON_CONTRACTING, 48, 20, 24, (20, 7, 21))
    problem.check()  # hgg.ragged_dot
    assert [one.name for one in double.executables[before:]] == ["good:1"]


def test_of_two_tunings_within_a_second_the_later_counts(register, monkeypatch):
    slow_reference(monkeypatch)
    register(["good:3", "good:1"])
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        first = plan.autotune([30, 9, 9], algorithms=["good:3"], isolate=False, **FAST)
        again = plan.autotune([9, 9, 30], algorithms=["good:1"], isolate=False, **FAST)
    assert first.started < again.started
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        assert plan.algorithm.name == "good:1" and "from the tuning store" in plan.explain()


def test_nothing_is_stored_where_that_is_not_wanted(register, tuning_store):
    register(["good"])
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        plan.autotune(store=False, **FAST)
    assert not tuning_store.exists()


def test_only_deterministic_candidates(register):
    register(["flips_bits", "good:40"], nondeterministic=("flips_bits",))
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        assert [row.algorithm.name for row in plan.autotune(deterministic=True, store=False, **FAST).rows] == ["good:40"]
        assert plan.algorithm.name == "good:40"
        assert plan.autotune(store=False, **FAST).best.algorithm.name == "flips_bits"


def test_settings_reach_the_engine(register):
    register([f"good:{i}" for i in range(5)], workspaces={"good:0": 10**6})
    events = []
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        report = plan.autotune(
            [[48, 0, 0], [16, 16, 16]], max_algorithms=2, max_workspace_size=1000, time_limit=30, seed=4, progress=events.append, **FAST
        )
    assert sorted(row.algorithm.name for row in report.rows) == ["good:1", "good:2"]
    assert report.size_samples == [[48, 0, 0], [16, 16, 16]]
    assert (report.seed, report.origin) == (4, "user")
    assert events


def test_the_extent_is_the_config_s_own():
    """A plan serves more rows than its config has; tuning is for what the config has."""
    with hgg.GroupedMatmulPlan(config(100), device="cpu") as plan:
        assert plan.key.m == 104
        report = plan.autotune(**FAST)
    assert (report.ragged_extent, report.config.m, report.size_samples) == (100, 104, [[34, 33, 33]])


def test_refusals():
    plan = hgg.GroupedMatmulPlan(config(), device="cpu")
    with pytest.raises(TypeError, match=r"got shape \(2,\)"):
        plan.autotune(np.array([1, 2]))
    with pytest.raises(TypeError, match=r"^seed: got ndarray, wanted an int$"):
        plan.autotune(seed=np.arange(3))
    with pytest.raises(TypeError, match="offs"):
        plan.autotune(offs=[1, 2, 3])
    with pytest.raises(NotImplementedError, match=r"triton.*refuses"):
        plan.autotune(backends="triton")
    plan.close()
    with pytest.raises(RuntimeError, match="closed"):
        plan.autotune()


def test_a_store_that_fails_takes_nothing_from_the_tuning(register, monkeypatch, caplog):
    from hipgroupgemm.store import files

    monkeypatch.setattr(files, "_warned", set())
    register(["good:1"])

    def fails(*_):
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(TuningStore, "add", fails)
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        for _ in range(2):
            plan.set_algorithm(plan.get_algorithms()[0])
            report = plan.autotune(backends="double", isolate=False, **FAST)
            assert report.best.algorithm.name == plan.algorithm.name == "good:1" and plan.backend == "double"
    (text,) = [entry.getMessage() for entry in caplog.records if "store" in entry.getMessage()]
    assert "what was tuned is not stored: ZeroDivisionError: nobody thought of this" in text


def test_a_backend_tuned_alone_is_the_plans_own_and_no_other_calls(register, rng):
    register(["good:1"])
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        plan.autotune(backends="double", isolate=False, **FAST)
        assert plan.backend == "double"
        check(plan, rng)
    with hgg.GroupedMatmulPlan(config(), device="cpu") as plan:
        assert plan.backend == "reference" and "was not compared to reference" in plan.explain()
    with hgg.GroupedMatmulPlan(config(), "double", "cpu") as plan:
        assert "from the tuning store" in plan.explain()
