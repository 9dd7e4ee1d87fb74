"""Candidates that are right on most calls: each is found wrong, on the CPU and on a GPU's bench, and nobody else is blamed for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from device_host.build import JUDGE_DRIVER, compile_host
from faulty_backend import CHANGES, WRONG, FaultyBackend
from generators import FORWARD, FORWARD_BATCHED, WEIGHT_GRADIENT
from harness_contract import offset_config
from host_gpu import host_bench

import hipgroupgemm as hgg
from hipgroupgemm import processes
from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.sizes import size_samples
from hipgroupgemm.measure.verify import size_sets
from hipgroupgemm.operands.views import Device
from hipgroupgemm.tuning import session
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.session import Session, Task

FAST = {"repetitions": 3, "warmup": 1, "roofline": False, "step_timeout": 30.0}


@pytest.fixture(scope="module", autouse=True)
def workers():
    yield
    processes.close_workers()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_host(tmp_path_factory.mktemp("judge"), driver=JUDGE_DRIVER)


@pytest.fixture(params=["cpu", "cuda:0"])
def verdicts(request, library, monkeypatch):
    """(config, names) -> name: (verdict, reason), from a session on the CPU's bench or on a GPU's over host memory."""
    device = Device.of(request.param)
    benches = []

    def make(where):
        benches.append(harness_for("cpu") if where.kind == "cpu" else host_bench(library))
        return benches[-1]

    monkeypatch.setattr(session, "harness_for", make)

    def run(config, names, **settings):
        backend = FaultyBackend(names, name="faulty", **settings)
        found = {name: ("", "") for name in names}
        task = Task(config, device, size_sets(config, size_samples(None, config), device), 3, roofline=False)
        one = Session(task, {"faulty": backend})
        algorithms = backend.algorithms(config, device, AlgorithmLimits())

        def step(algorithm, call):
            if not found[algorithm.name][0]:
                outcome = call()
                found[algorithm.name] = (outcome.verdict, outcome.reason)

        for index in range(len(task.sets)):
            for algorithm in algorithms:
                step(algorithm, lambda algorithm=algorithm, index=index: one.check(algorithm, index))
        for turn in range(4):
            for algorithm in algorithms:
                step(algorithm, lambda algorithm=algorithm, turn=turn: one.time(algorithm, 0, turn, turn == 3))
        one.close()
        if device.kind != "cpu":
            assert not benches[-1].runtime.blocks, "memory was not freed"
        return found

    run.device = device
    return run


def forward(m=61, k=24, n=20, groups=4, dtype="float32", **more):
    lhs, rhs = hgg.ArraySpec((m, k), dtype), hgg.ArraySpec((groups, k, n), dtype)
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((groups,), np.int32), FORWARD, **more)


def gradient(k=61, dtype="float32"):
    lhs, rhs = hgg.ArraySpec((k, 9), dtype), hgg.ArraySpec((k, 7), dtype)
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((4,), np.int32), WEIGHT_GRADIENT)


def batched():
    lhs, rhs = hgg.ArraySpec((2, 30, 9), "float32"), hgg.ArraySpec((3, 2, 9, 7), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((2, 3), np.int32), FORWARD_BATCHED)


CONFIGS = {
    "forward": forward(),
    "bfloat16": forward(dtype="bfloat16"),
    "few rows": forward(13),
    "weight gradient": gradient(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_is_found_and_the_right_ones_behind_it_are_right(verdicts, name):
    config = CONFIGS[name]
    wrong = [one for one in WRONG if one != "ignores_tail" or config.ragged_mode is hgg.RaggedDotMode.NON_CONTRACTING]
    names = [part for index, one in enumerate(wrong) for part in (one, f"good:{index / 1e9}")]
    found = verdicts(config, names)
    assert {one: found[one][0] for one in wrong} == dict.fromkeys(wrong, "wrong")
    assert {one: found[one] for one in names if one not in wrong} == {one: ("", "") for one in names if one not in wrong}
    for one in CHANGES:
        assert "it changed its inputs" in found[one][1], found[one]
    assert "lhs" in found["spoils_lhs"][1] and "group_sizes" in found["zeroes_sizes"][1]


def test_those_that_promise_no_equal_bits_are_found_as_well(verdicts):
    names = [*WRONG, "good"]
    found = verdicts(forward(), names, nondeterministic=tuple(names))
    assert {name: verdict for name, (verdict, _) in found.items()} == {**dict.fromkeys(WRONG, "wrong"), "good": ""}


def test_every_extent_of_a_key_is_run(verdicts):
    for m, others in ((64, (61,)), (61, (64,)), (62, (61, 64))):
        found = verdicts(forward(m), [f"wants_extent:{m}", "good"])
        assert found[f"wants_extent:{m}"][0] == "wrong", (m, found)
        assert found["good"] == ("", "")
        sets = [one for one in size_sets(forward(m), size_samples(None, forward(m))) if one.config is not None]
        assert tuple(one.config.ragged_extent for one in sets) == others
        assert {one.config.key() for one in sets} == {forward(m).key()}
    found = verdicts(gradient(64), ["wants_extent:64", "good"])
    assert [found[name][0] for name in found] == ["wrong", ""]


def test_c_bias_batches_and_offsets(verdicts):
    c = hgg.ArraySpec((61, 20), "float32")
    found = verdicts(forward(c=c, beta=1.0), ["spoils_c", "wrong_in_place", "wants_nan", "good"])
    assert [found[name][0] for name in found] == ["wrong", "wrong", "wrong", ""]
    assert "it changed its inputs: c" in found["spoils_c"][1]
    found = verdicts(forward(bias=hgg.ArraySpec((4, 20), "float32")), ["spoils_bias", "mixes_groups", "good"])
    assert [found[name][0] for name in found] == ["wrong", "wrong", ""]
    found = verdicts(batched(), ["ignores_ends", "ignores_strides", "spoils_rhs", "good"])
    assert [found[name][0] for name in found] == ["wrong", "wrong", "wrong", ""]
    found = verdicts(offset_config(), ["wrong_offset", "mixes_groups", "good"])
    assert [found[name][0] for name in found] == ["wrong", "wrong", ""]
    found = verdicts(offset_config(WEIGHT_GRADIENT), ["wrong_offset", "mixes_groups", "good"])
    assert [found[name][0] for name in found] == ["wrong", "wrong", ""]


def test_offsets_and_wrong_sizes_on_a_device(verdicts):
    sly = {"ignores_device_offset": offset_config(), "hides_faults": forward(), "trusts_sizes": forward()}
    for name, config in sly.items():
        found = verdicts(config, [name, "good"])
        assert found["good"] == ("", "")
        assert found[name][0] == ("" if verdicts.device.kind == "cpu" else "wrong"), name  # the host's are known and looked at before
        if verdicts.device.kind != "cpu":
            words = {"ignores_device_offset": "on the device", "hides_faults": "does not report"}.get(name, "which are limited")
            assert words in found[name][1]


def test_inputs_that_change_late_or_ahead_of_an_error(verdicts):
    names = ["spoils_and_raises", "good:0.1", "spoils_late:17", "good:0.2"]
    found = verdicts(forward(64), names)
    assert found["spoils_and_raises"][0] == "failed"
    assert found["spoils_late:17"][0] == "wrong" and "timed run" in found["spoils_late:17"][1], found
    assert found["good:0.1"] == found["good:0.2"] == ("", "")


@pytest.mark.parametrize("isolate", [False, True])
def test_tuning_end_to_end(isolate):
    names = [part for index, one in enumerate(WRONG) for part in (one, f"good:{index / 1e6}")]
    hgg.register_backend(FaultyBackend(names, name="faulty"), ("cpu",))
    try:
        report = tune(forward(64), "cpu", backends="faulty", isolate=isolate, **FAST)
    finally:
        hgg.unregister_backend("faulty")
    for row in report.rows:
        if row.algorithm.name.startswith("good"):
            assert row.verdict in ("ok", "pruned"), row
        else:
            assert row.verdict == "wrong", row
    assert report.best.algorithm.name.startswith("good")


def test_a_problem_that_has_no_room_at_its_capacity_is_tuned_nonetheless(monkeypatch):
    config = forward(57)
    bench = harness_for("cpu")
    whole = bench.operands

    def tight(one, *, seed):
        if one.m > 57:
            raise MemoryError("full")
        return whole(one, seed=seed)

    monkeypatch.setattr(bench, "operands", tight)
    monkeypatch.setattr(session, "harness_for", lambda device: bench)
    hgg.register_backend(FaultyBackend(["good"], name="faulty"), ("cpu",))
    try:
        report = tune(config, "cpu", backends="faulty", isolate=False, **FAST)
    finally:
        hgg.unregister_backend("faulty")
    assert [row.verdict for row in report.rows] == ["ok"]


def test_size_sets_are_told_apart_by_name_and_few():
    config = dataclasses.replace(forward(62))
    for device in ("cpu", "cuda:0"):
        sets = size_sets(config, size_samples(None, config), Device.of(device))
        assert len({one.name for one in sets}) == len(sets) <= 10
        assert sum(1 if one.once else 2 for one in sets) <= 16
