"""Plans and ragged_dot take what is stored: across backends, for a named one, deterministic, until they are told not to."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from generators import random_sizes, random_values
from store_reports import config_of, report, row
from test_imports import BLOCK, CHECK, FRAMEWORKS, ROOT

import hipgroupgemm as hgg
from hipgroupgemm import GroupedMatmulPlan
from hipgroupgemm.caches import PlanCache
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store.identity import device_kind
from hipgroupgemm.store.store import TuningStore, default_store
from hipgroupgemm.tuning.keep import keep


def add(rows, config=None, **settings):
    assert keep(report(config_of() if config is None else config, rows, **settings))


def operands(rng):
    return random_values(rng, (12, 7), "float32"), random_values(rng, (2, 7, 5), "float32"), random_sizes(rng, 12, 2)


def ran(double, call):
    """The algorithm of the double that a call ran, or None where it ran elsewhere."""
    before = {id(one): len(one.calls) for one in double.executables}
    call()
    names = [one.algorithm.name for one in double.executables if len(one.calls) > before.get(id(one), 0)]
    assert len(names) <= 1
    return names[0] if names else None


# ---- plans ---------------------------------------------------------------------------------------------------------------------


def test_a_plan_begins_with_the_stored_winner(double, rng):
    lhs, rhs, sizes = operands(rng)
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.backend == "reference" and "from the tuning store" not in plan.explain()
    add([row("double", 2, 1.0), row("double", 1, 2.0), row("reference", 0, 5.0)], started="2026-02-03T04:05:06+00:00")
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert (plan.backend, plan.algorithm.name, plan.workspace_size) == ("double", "kernel_2", 2000)
        assert plan.algorithm.time == 1.0
        assert "from the tuning store: tuned 2026-02-03 04:05 UTC on balanced sizes" in plan.explain()
        out = plan.execute(lhs, rhs, sizes)
        np.testing.assert_array_equal(out, hgg.ragged_dot(lhs, rhs, sizes, backend="reference"))
        plan.set_algorithm("kernel_1", 1)
        assert "from the tuning store" not in plan.explain()
        plan.set_algorithm("kernel_2", 2)
        assert "pinned by set_algorithm" in plan.explain()
    with GroupedMatmulPlan(config_of(alpha=2.5), device="cpu") as plan:
        assert plan.backend == "double", "one key"
    with GroupedMatmulPlan(config_of(n=6), device="cpu") as plan:
        assert plan.backend == "reference", "another key"


def test_a_named_backend_gets_its_own_best(double):
    add([row("double", 2, 5.0), row("double", 1, 6.0), row("reference", 0, 1.0)])
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        assert plan.algorithm.name == "kernel_2" and "from the tuning store" in plan.explain()
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.backend == "reference"
    with pytest.raises(ValueError, match="no such backend"):
        GroupedMatmulPlan(config_of(), "nobody", "cpu")


def test_argument_and_environment_turn_it_off(double, monkeypatch, tuning_store):
    add([row("double", 2, 1.0)])
    with GroupedMatmulPlan(config_of(), device="cpu", use_store=False) as plan:
        assert plan.backend == "reference" and "from the tuning store" not in plan.explain()
        plan.use_deterministic()
    with GroupedMatmulPlan(config_of(), "double", "cpu", use_store=False) as plan:
        assert plan.algorithm.name == "kernel_0"
        plan.use_deterministic()
        assert plan.algorithm.name == "kernel_1"
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.backend == "reference"
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(tuning_store))
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.backend == "double"


def test_explain_says_why_nothing_stored_is_used(double, monkeypatch, tuning_store):
    def line(backend=None, **settings):
        with GroupedMatmulPlan(config_of(), backend, "cpu", **settings) as plan:
            (found,) = [text for text in plan.explain().splitlines() if "tuning store" in text]
        return found

    here = f"nothing is stored for {device_kind(CPU)} in {tuning_store}"
    assert line() == f"tuning store not used: {here}"
    add([row("double", 2, 1.0)], config_of(n=6))
    assert line() == f"tuning store not used: {here.replace('for ', 'for this config on ', 1)}"
    add([row("double", 2, 1.0)])
    assert line().startswith("from the tuning store: ")
    assert line("reference") == "tuning store not used: nothing is stored for this config of backend reference"
    assert line(use_store=False) == "tuning store not used: use_store=False"
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        plan.use_deterministic()
        assert "tuning store not used: nothing is stored for this config with a deterministic algorithm" in plan.explain()
        plan.set_algorithm("kernel_0", 0)
        assert "pinned by set_algorithm" in plan.explain() and "tuning store" not in plan.explain()
    double.reason = "no time"
    assert line() == "tuning store not used: what is stored for this config is of double, which can't run it here"
    double.reason = None
    double.versions = lambda _: {"library": "2"}
    assert line().startswith("tuning store not used: the stored result of backend double is stale: ")
    assert "library is 2 now and was not known" in line(), "also when it has been warned of"
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "no")
    assert line() == "tuning store not used: it is off (HIPGROUPGEMM_TUNING_STORE=no)"
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(tuning_store))
    path = TuningStore(tuning_store).path(device_kind(CPU))
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 99', 1))
    assert f"tuning store not used: {path} is 'hipgroupgemm tuning store' of schema 99, this version" in line()


def test_explain_tells_real_routing_from_synthetic_sizes(double):
    add([row("double", 2, 1.0)], origin="user", size_class="skewed")
    add([row("double", 0, 0.5)], origin="zipf", size_class="skewed")
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.algorithm.name == "kernel_2" and "on skewed sizes of the user's" in plan.explain()
    default_store().remove(lambda record: record.origin == "user")
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.algorithm.name == "kernel_0" and "on synthetic sizes (zipf, skewed)" in plan.explain()


def test_deterministic_takes_the_best_stored_one_of_any_backend(double):
    add([row("double", 2, 1.0), row("double", 1, 3.0), row("reference", 0, 2.0)])
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert (plan.backend, plan.algorithm.name) == ("double", "kernel_2")
        plan.use_deterministic()
        assert plan.backend == "reference" and "from the tuning store" in plan.explain() and "reference" in plan.explain()
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        plan.use_deterministic()
        assert (plan.backend, plan.algorithm.name) == ("double", "kernel_1")


def test_a_stale_record_leaves_the_order_of_backends(double, caplog):
    add([row("double", 2, 1.0)])
    double.found[2] = dataclasses.replace(double.found[2], name="kernel_2b")
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.backend == "reference"
    with GroupedMatmulPlan(config_of(), "double", "cpu") as plan:
        assert plan.algorithm.name == "kernel_0", "its own best guess"
    assert caplog.text.count("there is no algorithm 'kernel_2' with index 2 now") == 1


def test_a_broken_store_is_no_obstacle(double, rng, tuning_store, caplog):
    add([row("double", 2, 1.0)])
    path = TuningStore(tuning_store).path(device_kind(CPU))
    path.write_text(path.read_text()[:-20])
    lhs, rhs, sizes = operands(rng)
    assert ran(double, lambda: hgg.ragged_dot(lhs, rhs, sizes)) is None
    assert path.exists() and len(caplog.records) == 1
    add([row("double", 1, 1.0)])
    assert path.with_name(path.name + ".broken-1").exists() and ran(double, lambda: hgg.ragged_dot(lhs, rhs, sizes)) == "kernel_1"


# ---- ragged_dot ----------------------------------------------------------------------------------------------------------------


def test_ragged_dot_uses_what_was_stored_once_it_is_added(double, rng):
    lhs, rhs, sizes = operands(rng)
    expected = hgg.ragged_dot_reference(lhs, rhs, sizes)

    def call(**settings):
        np.testing.assert_allclose(hgg.ragged_dot(lhs, rhs, sizes, **settings), expected, rtol=1e-5, atol=1e-5)

    assert ran(double, call) is None
    add([row("double", 2, 1.0)])
    assert ran(double, call) == "kernel_2", "the plan that was kept is made anew"
    assert ran(double, lambda: call(use_store=False)) is None
    assert ran(double, lambda: call(backend="double", use_store=False)) == "kernel_0"
    assert ran(double, lambda: call(backend="reference")) is None
    assert ran(double, lambda: call(deterministic=True)) is None, "the order of backends: nothing deterministic is stored"
    add([row("double", 2, 1.0), row("double", 1, 2.0)])
    assert ran(double, call) == "kernel_2"
    assert ran(double, lambda: call(deterministic=True)) == "kernel_1"
    default_store().remove(lambda record: True)
    assert ran(double, call) is None
    with pytest.raises(TypeError):
        hgg.ragged_dot(lhs, rhs, sizes, None, None, None, False)


def test_ragged_dot_general_too(double, rng):
    left, right, sizes = random_values(rng, (12, 4), "float32"), random_values(rng, (12, 5), "float32"), random_sizes(rng, 12, 3)
    numbers = hgg.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    config = hgg.config_for_ragged_dot(left, right, sizes, numbers)
    add([row("double", 2, 1.0)], config)
    assert ran(double, lambda: hgg.ragged_dot_general(left, right, sizes, numbers)) == "kernel_2"
    assert ran(double, lambda: hgg.ragged_dot_general(left, right, sizes, numbers, use_store=False)) is None


def test_what_another_process_stores_reaches_new_plans_alone(double, rng, tuning_store):
    lhs, rhs, sizes = operands(rng)

    def call():
        return hgg.ragged_dot(lhs, rhs, sizes)

    assert ran(double, call) is None
    code = "import sys; from hipgroupgemm.store.store import TuningStore; TuningStore(sys.argv[1]).merge(sys.stdin.buffer.read())"
    elsewhere = TuningStore(tuning_store.with_name(tuning_store.name + "-elsewhere"))
    selection = hgg.backends.selection
    keep(report(config_of(), [row("double", 2, 1.0)]), elsewhere)
    call()
    before = selection.version
    done = subprocess.run(
        [sys.executable, "-c", code, str(tuning_store)],
        input=elsewhere.export().decode(),
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert selection.version == before and ran(double, call) is None, "the kept plan is not checked again"
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert plan.backend == "double"
    hgg.clear_plan_cache()
    assert ran(double, call) == "kernel_2"


def test_a_plan_that_was_made_while_something_was_stored_is_not_kept(double, monkeypatch):
    """The lookup came before the result, the plan would be kept after it."""
    cache = PlanCache(4)
    made = []
    real = GroupedMatmulPlan.__init__

    def slow(plan, *arguments, **settings):
        real(plan, *arguments, **settings)
        made.append(plan)
        if len(made) == 1:
            add([row("double", 2, 1.0)])

    monkeypatch.setattr(GroupedMatmulPlan, "__init__", slow)

    def make():
        return GroupedMatmulPlan(config_of(), device="cpu")

    plan = cache.get("key", make)
    assert plan.backend == "double" and len(made) == 2 and made[0]._closed
    assert cache.get("key", make) is plan
    cache.clear()


def test_threads_tune_and_call_at_once(double, rng):
    lhs, rhs, sizes = operands(rng)
    expected = hgg.ragged_dot_reference(lhs, rhs, sizes)
    failures = []

    def work(number):
        try:
            for turn in range(10):
                if number == 0:
                    add([row("double", turn % 3, 1.0 + turn)])
                np.testing.assert_allclose(hgg.ragged_dot(lhs, rhs, sizes), expected, rtol=1e-5, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- what a call costs and loads -----------------------------------------------------------------------------------------------


def test_a_repeated_call_does_not_look_at_the_store(double, rng, monkeypatch):
    lhs, rhs, sizes = operands(rng)
    add([row("double", 2, 1.0)])
    hgg.ragged_dot(lhs, rhs, sizes)
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        plan.execute(lhs, rhs, sizes)
        monkeypatch.setattr(TuningStore, "lookup", lambda *_, **__: pytest.fail("looked up again"))
        monkeypatch.setattr("hipgroupgemm.store.store.default_store", lambda: pytest.fail("asked for again"))
        assert ran(double, lambda: hgg.ragged_dot(lhs, rhs, sizes)) == "kernel_2"
        plan.execute(lhs, rhs, sizes)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
def test_a_lookup_loads_nothing_that_a_call_may_not_load(tmp_path, stored, blocked):
    """In the user's own cache directory, with a result there and without; nor does it need any of those packages."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONWARNINGS": "error", "HOME": str(tmp_path)}
    for name in ("HIPGROUPGEMM_TUNING_STORE", "HIPGROUPGEMM_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    directory = tmp_path / ".cache" / "hipgroupgemm" / "tuning"
    config = config_of(m=4, k=3)
    if stored:
        keep(report(config, [row("reference", 0, 1.0)]), TuningStore(directory))
    code = CHECK % (FRAMEWORKS, FRAMEWORKS) if not blocked else BLOCK % (FRAMEWORKS,) + CHECK.replace("%r", "[]")
    code = code.replace("plan.explain()", f"assert ('from the tuning store' in plan.explain()) is {stored}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert directory.exists() is stored
    assert Path.home() != tmp_path
