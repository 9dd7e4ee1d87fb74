"""Settings of a plan: batch_invariant and max_multiprocessors, in plans, functions, tuning and the store; and HIPGROUPGEMM_CHECK."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import Rows, different_rows, numbers

import hipgroupgemm as hgg
from hipgroupgemm import ArraySpec, GroupedMatmulPlan, config_for_ragged_dot, dispatch
from hipgroupgemm.backends import get_backend, select_backend
from hipgroupgemm.backends.base import AlgorithmLimits, MatmulAlgorithm, Multiprocessors, PlanSettings
from hipgroupgemm.backends.choice import best_guess
from hipgroupgemm.backends.triton.compiler import target_of
from hipgroupgemm.backends.triton.kernel_config import DeviceProperties
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers
from hipgroupgemm.store.records import config_id
from hipgroupgemm.store.store import default_store
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.keep import keep, stored_result

ROOT = Path(__file__).resolve().parent.parent
WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
INVARIANT = PlanSettings(batch_invariant=True)


def config_of(m=12, k=7, n=5, groups=2, dtype="float32", numbers=None):
    sizes = ArraySpec((groups,), "int32")
    if numbers is not None:
        return config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((m, n), dtype), sizes, numbers)
    return config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((groups, k, n), dtype), sizes)


# ---- batch invariance ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    k=st.sampled_from([1, 3, 16, 31, 64, 257]),
    n=st.sampled_from([1, 2, 7, 16, 33, 100]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    extras=st.booleans(),
    transposed=st.booleans(),
)
def test_the_reference_keeps_the_bits_of_rows(seed, k, n, dtype, extras, transposed):
    rng = np.random.default_rng(seed)

    def run(lhs, rhs, sizes, **operands):
        held = np.asfortranarray(lhs) if transposed else lhs
        more = {"alpha": 0.7, "beta": 0.3} if operands else {}
        return hgg.ragged_dot(held, rhs, sizes, batch_invariant=True, **operands, **more)

    rows = Rows.random(rng, int(rng.integers(1, 6)), k, n, dtype, extras=extras)
    assert different_rows(run, rows, rng) == []


def test_the_invariant_sums_are_right(rng):
    lhs, rhs, sizes = numbers(rng, (40, 129), "float32"), numbers(rng, (3, 129, 17), "float32"), np.array([9, 0, 25], np.int32)
    out = hgg.ragged_dot(lhs, rhs, sizes, batch_invariant=True)
    exact = hgg.ragged_dot_reference(lhs, rhs, sizes, accumulate="float64", preferred_element_type="float64")
    size = hgg.ragged_dot_reference(np.abs(lhs), np.abs(rhs), sizes, accumulate="float64", preferred_element_type="float64")
    assert (np.abs(out - exact) <= 129 * np.finfo(np.float32).eps * size).all() and (out[34:] == 0).all()


def test_operands_without_a_config_are_invariant_too(rng):
    lhs = numbers(rng, (9, 3, 8), "float32")[:, :, ::2]  # k is two axes that do not merge
    rhs, sizes = numbers(rng, (2, 3, 4, 5), "float32"), np.array([4, 5], np.int32)
    table = RaggedDotDimensionNumbers((((1, 2), (1, 2)), ((), ())), (0,), (0,))
    whole = hgg.ragged_dot_general(lhs, rhs, sizes, table, batch_invariant=True)
    one = hgg.ragged_dot_general(lhs[6:7], rhs[1:], np.array([1], np.int32), table, batch_invariant=True)
    flat = hgg.ragged_dot(lhs.reshape(9, 12), rhs.reshape(2, 12, 5), sizes, batch_invariant=True)
    assert whole[6].tobytes() == one[0].tobytes() and whole.tobytes() == flat.tobytes()
    wgrad = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    with pytest.raises(NotImplementedError, match=r"batch_invariant.*CONTRACTING"):
        hgg.ragged_dot_general(lhs, numbers(rng, (9, 5), "float32"), sizes, wgrad, batch_invariant=True)


def test_the_default_of_the_reference_does_not_claim_it():
    with GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert not plan.algorithm.batch_invariant and [one.index for one in plan.get_algorithms()] == [0]
    with GroupedMatmulPlan(config_of(), device="cpu", batch_invariant=True) as plan:
        assert plan.algorithm.batch_invariant and plan.get_algorithms() == [plan.algorithm]
        assert "asked for: batch-invariant" in plan.explain() and "sums along k in order" in plan.explain()
        with pytest.raises(ValueError, match="no batch-invariant 'numpy_matmul_a_group'"):
            plan.set_algorithm("numpy_matmul_a_group", 0)
        plan.set_algorithm("numpy_sum_along_k", 1)


@pytest.mark.parametrize("mode", ["CONTRACTING", "BATCH"])
def test_other_modes_are_refused(mode, rng):
    config = config_of(numbers=WGRAD)
    if mode == "BATCH":
        table = RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
        specs = ArraySpec((3, 4, 5), "float32"), ArraySpec((3, 5, 6), "float32"), ArraySpec((1,), "int32")
        config = config_for_ragged_dot(*specs, table)
    assert config.ragged_mode.name == mode
    with pytest.raises(NotImplementedError, match=f"batch_invariant is said of rows .* this is {mode}"):
        GroupedMatmulPlan(config, device="cpu", batch_invariant=True)
    if mode == "CONTRACTING":
        operands = numbers(rng, (12, 7), "float32"), numbers(rng, (12, 5), "float32"), np.array([5, 7], np.int32)
        with pytest.raises(NotImplementedError, match="batch_invariant"):
            hgg.ragged_dot_general(*operands, WGRAD, batch_invariant=True)


def test_no_algorithm_of_a_backend(double):
    with pytest.raises(NotImplementedError, match="double has no batch-invariant algorithm"):
        GroupedMatmulPlan(config_of(), "double", "cpu", batch_invariant=True)
    for name in ("batch_invariant", "max_multiprocessors"):
        reason = get_backend("hipblaslt").lacks(config_of(), PlanSettings(**{name: 1}))
        assert reason.startswith(f"it does not have {name}: ")


class Unknown(type(get_backend("reference"))):
    """A backend that says nothing of settings."""

    name, settings = "unknown", frozenset()


def test_settings_that_a_backend_does_not_declare_are_refused():
    backend = Unknown()
    for asked in (INVARIANT, PlanSettings(max_multiprocessors=3)):
        assert "it does not have" in backend.lacks(config_of(), asked)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_triton_guesses_the_same_for_every_m(architecture, dtype, monkeypatch):
    backend, device = get_backend("triton"), Device("rocm" if architecture.startswith("gfx") else "cuda", 0)
    properties = {"sm_90": (132, 232448), "sm_80": (108, 166912), "gfx942": (304, 65536)}[architecture]
    monkeypatch.setattr(backend, "_properties", {device: DeviceProperties(target_of(architecture), *properties)})
    found, usual = set(), set()
    for m in (1, 5, 64, 700, 4096, 100_000):
        key = config_of(m, 512, 768, 16, dtype).key()
        found.add(best_guess(backend, key, device, INVARIANT).key)
        usual.add(best_guess(backend, key, device, PlanSettings()).key)
        assert best_guess(backend, key, device, INVARIANT).batch_invariant
    assert len(found) == 1 and len(usual) > 1
    wgrad = config_of(4096, 512, 768, 16, dtype, WGRAD).key()
    assert not best_guess(backend, wgrad, device, PlanSettings()).batch_invariant


def test_an_m_that_the_algorithm_cannot_run_is_refused(monkeypatch):
    backend, device = get_backend("triton"), Device("cuda", 0)
    monkeypatch.setattr(backend, "_properties", {device: DeviceProperties(target_of("sm_90"), 132, 232448)})
    with pytest.raises(NotImplementedError, match="which has to serve every m, cannot run"):
        best_guess(backend, config_of(1 << 30, 64, 64, 4, "bfloat16").key(), device, INVARIANT)
    assert best_guess(backend, config_of(0, 64, 64, 4, "bfloat16").key(), device, INVARIANT).batch_invariant


# ---- tuning and the store --------------------------------------------------------------------------------------------------


@pytest.fixture
def invariant_double(double):
    """The double, with kernel_2 and kernel_0 batch-invariant."""
    double.found = [dataclasses.replace(one, batch_invariant=one.index != 1) for one in double.found]
    return double


def tuned(config, **wanted):
    return tune(config, "cpu", backends="double", isolate=False, roofline=False, repetitions=2, **wanted)


def test_tuning_asks_for_what_the_settings_want(invariant_double):
    report = tuned(config_of(), batch_invariant=True)
    assert sorted(row.algorithm.index for row in report.rows) == [0, 2]
    assert report.settings == INVARIANT and hgg.TuningReport.from_json(report.to_json()).settings == INVARIANT
    assert hgg.TuningReport.from_json(report.to_json()).rows == report.rows
    invariant_double.found = invariant_double.found[1:2]
    with pytest.raises(NotImplementedError, match="no batch-invariant algorithm"):
        tuned(config_of(), batch_invariant=True)


def test_a_batch_invariant_winner_serves_every_m(invariant_double):
    def chosen(m, **wanted):
        with GroupedMatmulPlan(config_of(m), "double", "cpu", **wanted) as plan:
            return plan.algorithm.index

    assert [chosen(m, batch_invariant=True) for m in (1, 12, 300)] == [0, 0, 0]
    with GroupedMatmulPlan(config_of(12), "double", "cpu", batch_invariant=True) as plan:
        report = plan.autotune(algorithms=["kernel_2"], isolate=False)
        assert report.settings.batch_invariant and plan.algorithm.index == 2
    assert [chosen(m, batch_invariant=True) for m in (1, 12, 300)] == [2, 2, 2]
    assert [chosen(m) for m in (1, 12, 300)] == [0, 0, 0], "it answers only those that ask for it"
    with GroupedMatmulPlan(config_of(12), "double", "cpu") as plan:
        plan.autotune(algorithms=["kernel_1"], isolate=False)
        assert plan.algorithm.index == 1
    assert chosen(12) == 1 and chosen(12, batch_invariant=True) == 2


def test_what_others_store_meanwhile_does_not_part_the_plans(invariant_double, tuning_store):
    def chosen(m):
        with GroupedMatmulPlan(config_of(m), "double", "cpu", batch_invariant=True) as plan:
            return plan.algorithm.index

    assert chosen(12) == 0
    code = "import sys, pickle; from hipgroupgemm.store.store import TuningStore; TuningStore().add(pickle.loads(sys.stdin.buffer.read()))"
    report = tuned(config_of(40), batch_invariant=True, algorithms=["kernel_2"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(stored_result(report)), check=True, env=environment)
    assert len(default_store().results()) == 1
    assert chosen(300) == 0, "as the plan of m = 12, which is at work"
    keep(report)
    assert chosen(12) == chosen(300) == 2


def test_ids_tell_settings_apart_and_m_only_where_it_matters():
    one, other = config_of(12).key(), config_of(300).key()
    assert config_id(one, INVARIANT) == config_id(other, INVARIANT) != config_id(config_of(12, n=6).key(), INVARIANT)
    few = PlanSettings(max_multiprocessors=8)
    names = [config_id(one, asked) for asked in (PlanSettings(), INVARIANT, few, PlanSettings(False, True, 8), PlanSettings(True))]
    assert len(set(names)) == 4 and names[0] == names[4] == config_id(one)
    assert config_id(one, few) != config_id(other, few) and config_id(one) != config_id(other)
    batched = [
        config_for_ragged_dot(
            ArraySpec((2, m, 7), "float32"),
            ArraySpec((3, 2, 7, 5), "float32"),
            ArraySpec((3,), "int32"),
            RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,)),
        ).key()
        for m in (12, 300)
    ]
    assert config_id(batched[0], INVARIANT) == config_id(batched[1], INVARIANT)


def test_results_of_fewer_multiprocessors_are_kept_apart(double):
    few = PlanSettings(max_multiprocessors=8)
    report = dataclasses.replace(tuned(config_of(), algorithms=["kernel_2"]), settings=few)
    keep(report)
    store = default_store()
    assert store.lookup(config_of(), CPU, backend="double") is None
    found = store.lookup(config_of(), CPU, backend="double", settings=few)
    assert found is not None and found.algorithm.index == 2 and found.settings == few


# ---- max_multiprocessors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (True, TypeError), (2.0, TypeError), ("4", TypeError)])
def test_what_is_no_number_of_multiprocessors(value, error, rng):
    with pytest.raises(error, match="max_multiprocessors"):
        GroupedMatmulPlan(config_of(), device="cpu", max_multiprocessors=value)
    lhs, rhs, sizes = numbers(rng, (12, 7), "float32"), numbers(rng, (2, 7, 5), "float32"), np.array([5, 7], np.int32)
    hgg.ragged_dot(lhs, rhs, sizes, max_multiprocessors=1)
    with pytest.raises(error, match="max_multiprocessors"):
        hgg.ragged_dot(lhs, rhs, sizes, max_multiprocessors=value)
    with pytest.raises(error, match="max_multiprocessors"):
        hgg.ragged_dot_general(lhs, rhs, sizes, RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,)), max_multiprocessors=value)


def test_a_cpu_has_none(rng):
    with GroupedMatmulPlan(config_of(), device="cpu", max_multiprocessors=np.int64(4)) as plan:
        assert "max_multiprocessors=4 has no effect on a CPU" in plan.explain()
    lhs, rhs, sizes = numbers(rng, (12, 7), "float32"), numbers(rng, (2, 7, 5), "float32"), np.array([5, 7], np.int32)
    want = hgg.ragged_dot(lhs, rhs, sizes)
    for _ in range(2):
        assert hgg.ragged_dot(lhs.copy(), rhs, sizes, max_multiprocessors=4).tobytes() == want.tobytes()


def test_fewer_multiprocessors_than_the_device_has(monkeypatch):
    limited, device = get_backend("triton").limited(24), Device("cuda", 0)
    info = type("Info", (), {"architecture": "sm_90", "multiprocessors": 132, "shared_memory_optin": 232448})
    runtime = type("Runtime", (), {"device_info": staticmethod(lambda _: info)})
    for module in ("backend", "executable"):
        monkeypatch.setattr(sys.modules[f"hipgroupgemm.backends.triton.{module}"], "get_runtime", lambda _: runtime, raising=False)
    found = limited.properties(device)
    assert (found.multiprocessors, found.limited, found.resident(4)) == (24, True, 1)
    plain = get_backend("triton").limited(500).properties(device)
    assert (plain.multiprocessors, plain.limited, plain.resident(4)) == (132, False, 4)
    key = config_of(512, 512, 768, 16, "bfloat16").key()
    both = limited, get_backend("triton").limited(500)
    names, all_names = ([one.name for one in backend.algorithms(key, device, AlgorithmLimits())] for backend in both)
    assert "_b1_" in names[0] and "_b2_" in all_names[0] + all_names[1] and sorted(names) == sorted(all_names)


def test_a_backend_that_cannot_limit_them_is_passed_over(double):
    double.settings = frozenset()
    few = PlanSettings(max_multiprocessors=2)
    with pytest.raises(NotImplementedError, match="backend 'double' refuses: it does not have max_multiprocessors"):
        select_backend(config_of(), CPU, "double", settings=few)
    assert select_backend(config_of(), CPU, stored=lambda *_: "double", settings=few).name == "reference"
    assert select_backend(config_of(), CPU, stored=lambda *_: "double").name == "double"
    assert Multiprocessors.of(None) is None and hash(Multiprocessors(1)) == hash(True)


def test_algorithms_do_not_claim_what_they_do_not_say():
    assert MatmulAlgorithm("somebody", 0, "some", 0, True).batch_invariant is False


# ---- HIPGROUPGEMM_CHECK ----------------------------------------------------------------------------------------------------

CHECKED = """
import numpy as np
import hipgroupgemm as hgg
from hipgroupgemm import dispatch
from hipgroupgemm.operands.views import Device

seen = []
class Spy(type(hgg.backends.get_backend("reference"))):
    name = "spy"
    def prepare(self, *arguments):
        made = super().prepare(*arguments)
        execute, made.execute = made.execute, lambda a: (seen.append(a.check), execute(a))
        return made
    def can_handle(self, config, device):
        return None
hgg.register_backend(Spy(), ["cpu"], first=True)
x, w, s = np.ones((5, 3), np.float32), np.ones((2, 3, 4), np.float32), np.array([2, 3])
for check in ({}, {}, {"check": "none"}):
    hgg.ragged_dot(x.copy(), w, s, **check)
with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(x, w, s), "spy", "cpu") as plan:
    plan.execute(x, w, s)
print(seen)
"""


def checked(word):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HIPGROUPGEMM_CHECK": word}
    return subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_the_environment_makes_every_call_check():
    for word, wanted in (("sync", "sync"), ("none", "none"), ("", "none")):
        done = checked(word)
        assert done.stdout.strip() == str([wanted] * 4), done.stderr
    done = checked("yes")
    assert done.returncode and 'ValueError: HIPGROUPGEMM_CHECK=yes: must be "sync" or "none"' in done.stderr


def test_unset_it_costs_nothing():
    assert dispatch.run.__name__ == "run" and dispatch.run.__code__.co_filename == dispatch.__file__
