"""Tuning end to end on the CPU, with a backend whose algorithms misbehave in every way: each verdict, and what never happens."""

from __future__ import annotations

import math
import os
import re
import time

import numpy as np
import pytest
from fake_backend import FakeBackend, Unaskable, Unloadable, Unpicklable, Wordless
from generators import BATCH, FORWARD, FORWARD_BATCHED, WEIGHT_GRADIENT
from harness_contract import offset_config
from test_tuning_faults import ENDS

import hipgroupgemm as hgg
from hipgroupgemm import processes
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.processes import worker
from hipgroupgemm.tuning import runners
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.report import VERDICTS, TuningReport
from hipgroupgemm.tuning.session import NO_MEMORY, SessionError

FAST = {"repetitions": 3, "warmup": 1, "roofline": False, "step_timeout": 30.0}


@pytest.fixture(scope="module", autouse=True)
def workers():
    yield
    processes.close_workers()


@pytest.fixture
def register():
    """Registers backends for the CPU, and unregisters them."""
    added = []

    def add(backend):
        hgg.register_backend(backend, ("cpu",))
        added.append(backend.name)
        return backend

    yield add
    for name in added:
        hgg.unregister_backend(name)


def forward(m=64, k=24, n=20, groups=4, dtype="float32", **more):
    lhs, rhs = hgg.ArraySpec((m, k), dtype), hgg.ArraySpec((groups, k, n), dtype)
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((groups,), np.int32), FORWARD, **more)


def with_beta(config_of=forward, **more):
    m, n = more.get("m", 64), more.get("n", 20)
    return config_of(c=hgg.ArraySpec((m, n), more.get("dtype", "float32")), beta=1.0, **more)


def verdicts(report):
    return {row.algorithm.name: row.verdict for row in report.rows}


def row_of(report, name):
    return next(row for row in report.rows if row.algorithm.name == name)


# ---- what is wrong -------------------------------------------------------------------------------------------------------------

WRONG = {  # algorithm -> words of its reason
    "wrong": "elements are wrong",
    "wrong_element": "1 of",
    "wrong_for:one_group": "one_group",
    "wrong_for:all_empty": "all_empty",
    "wrong_for:tail": "short",
    "wrong_for:many_empty": "many_empty",
    "wrong_alpha": "alpha=-1.5",
    "leaves_nan": "not written",
    "touches_uncovered": "no group covers",
    "touches_gaps": "bytes between or around",
    "multiplies_by_zero": "many_empty",
    "cries_wolf": "reports wrong sizes",
}


@pytest.mark.parametrize("isolate", [False, True])
def test_every_kind_of_wrong_is_seen_told_and_never_chosen(register, isolate):
    register(FakeBackend([*WRONG, "good:3"]))
    report = tune(forward(), "cpu", backends="double", isolate=isolate, **FAST)
    assert verdicts(report) == {**dict.fromkeys(WRONG, "wrong"), "good:3": "ok"}
    assert report.best.algorithm.name == "good:3"
    for name, words in WRONG.items():
        row = row_of(report, name)
        assert words in row.reason, (name, row.reason)
        assert row.error is not None
        assert (row.median_ms, row.samples) == (None, 0)  # what a wrong result costs is no news
    assert row_of(report, "wrong").error > 0.1
    assert math.isinf(row_of(report, "leaves_nan").error)


def test_right_rows_tell_how_right_and_how_fast(register):
    register(FakeBackend(["good:2"]))
    report = tune(forward(), "cpu", **FAST)
    row = row_of(report, "good:2")
    assert (row.verdict, row.reason, row.samples) == ("ok", "", 6)  # three rounds, and three more against the runner-up
    assert 0 < row.error <= row.error_limit
    assert row.checked >= 6  # the tuning sizes, five adversarial sets, and the last timed run
    assert 2 <= row.p10_ms <= row.median_ms <= row.p90_ms
    assert row.tflops == pytest.approx(2 * 64 * 24 * 20 / row.median_ms / 1e9)
    assert (row.algorithm.time, row.algorithm.verdict) == (row.median_ms, "ok")


def test_beta_is_checked_where_the_config_has_it(register):
    register(FakeBackend(["wrong_beta", "good"]))
    assert verdicts(tune(with_beta(), "cpu", backends="double", **FAST)) == {"wrong_beta": "wrong", "good": "ok"}
    # without beta there is no c to read: the same algorithm is right then
    assert verdicts(tune(forward(), "cpu", backends="double", **FAST))["wrong_beta"] in ("ok", "pruned")


def test_c_that_is_out_and_group_offsets_are_checked(register):
    register(FakeBackend(["wrong_in_place", "good"]))
    report = tune(with_beta(), "cpu", backends="double", isolate=False, **FAST)
    assert verdicts(report) == {"wrong_in_place": "wrong", "good": "ok"}
    assert "c is out" in row_of(report, "wrong_in_place").reason
    hgg.unregister_backend("double")
    hgg.register_backend(FakeBackend(["wrong_offset", "good"]), ("cpu",))
    report = tune(offset_config(), "cpu", backends="double", isolate=False, **FAST)
    assert verdicts(report) == {"wrong_offset": "wrong", "good": "ok"}
    assert "group_offset=4" in row_of(report, "wrong_offset").reason


def test_wrong_only_when_called_often(register):
    """Two runs on each of six size sets are right, a warm-up is the 13th; what fails from the 15th on is found in the last timed round."""
    register(FakeBackend(["wrong_after:14", "good:2"]))
    report = tune(forward(), "cpu", backends="double", isolate=False, **{**FAST, "repetitions": 5})
    assert verdicts(report) == {"wrong_after:14": "wrong", "good:2": "ok"}
    assert "timed run" in row_of(report, "wrong_after:14").reason


def test_bits_that_differ(register):
    register(FakeBackend(["flips_bits", "good:1"]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert verdicts(report) == {"flips_bits": "nondeterministic", "good:1": "ok"}
    assert "1 elements differ" in row_of(report, "flips_bits").reason


def test_bits_may_differ_where_none_are_promised(register):
    register(FakeBackend(["flips_bits", "good:40"], nondeterministic=("flips_bits",)))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert report.best.algorithm.name == "flips_bits"


# ---- the process ---------------------------------------------------------------------------------------------------------------


def test_the_reference_alone_needs_no_worker(monkeypatch):
    monkeypatch.setattr(processes, "acquire", lambda *_, **__: pytest.fail("a worker was started"))
    report = tune(forward(), "cpu", **FAST)
    assert verdicts(report) == {"numpy_matmul_a_group": "ok"}


def test_one_worker_serves_one_tuning_after_another(register, tmp_path):
    kept = set()
    for _ in range(3):
        assert tune(forward(), "cpu", backends="reference", isolate=True, **FAST).best is not None
        kept |= {one.pid for one in worker._idle["cpu"]}
    assert len(kept) == 1
    register(FakeBackend(["good", "wrong"], marks=str(tmp_path)))
    assert tune(forward(), "cpu", backends="double", **FAST).best is not None
    pids = {line.split()[0] for line in (tmp_path / "marks").read_text().splitlines()}
    assert len(pids) == 1
    assert not pids & {str(os.getpid()), *map(str, kept)}  # others' code may change: it has workers of its own


@pytest.mark.parametrize(
    ("kind", "words"), [(Unpicklable, "lambda"), (Wordless, "whose text raises"), (Unloadable, "this module is not there")]
)
def test_a_backend_that_cannot_be_sent_runs_here_and_is_told_of(register, kind, words):
    register(kind(["good:1", "wrong"], name="stays"))
    register(FakeBackend(["good:2", "exits:1"]))
    report = tune(forward(), "cpu", **FAST)
    assert verdicts(report)["good:1"] in ("ok", "pruned")
    assert (verdicts(report)["wrong"], verdicts(report)["exits:1"]) == ("wrong", "crashed")
    assert any("stays ran in this process" in note and words in note for note in report.notes), report.notes
    with pytest.raises(RuntimeError, match="isolate=True: backends that cannot be pickled: stays"):
        tune(forward(), "cpu", isolate=True, **FAST)


def test_without_an_interpreter_to_start_candidates_run_here(register, monkeypatch):
    monkeypatch.setattr("sys.executable", "")
    processes.close_workers()
    register(FakeBackend(["good"]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert report.best is not None
    assert "cannot be started" in report.notes[0]
    with pytest.raises(RuntimeError, match=r"isolate=True.*cannot be started"):
        tune(forward(), "cpu", backends="double", isolate=True, **FAST)


# ---- choosing candidates -------------------------------------------------------------------------------------------------------


def test_all_backends_that_can_are_asked(register):
    register(FakeBackend(["good:1"], name="one"))
    register(FakeBackend(["good:2"], name="two"))
    report = tune(forward(), "cpu", **FAST)
    assert {row.algorithm.backend for row in report.rows} == {"one", "two", "reference"}
    assert {row.algorithm.backend for row in tune(forward(), "cpu", backends=["two"], **FAST).rows} == {"two"}


@pytest.mark.parametrize("asked", ["can_handle", "algorithms"])
def test_a_backend_that_raises_when_it_is_asked_is_left_out(register, asked):
    register(Unaskable(["good"], name=asked))
    report = tune(forward(), "cpu", **FAST)
    assert {row.algorithm.backend for row in report.rows} == {"reference"}
    assert report.notes[:1] == [f"{asked} was left out, since its {asked}() raised OSError: the library is not there"]
    with pytest.raises(OSError, match="the library is not there"):
        tune(forward(), "cpu", backends=asked, **FAST)


def test_what_cannot_be_compiled_ahead_is_tried_nonetheless(register):
    register(Unaskable(["good"], name="cannot_compile"))
    report = tune(forward(), "cpu", backends="cannot_compile", isolate=False, **FAST)
    assert report.best is not None
    assert "the compiler is not there" in report.notes[0]


def test_selection_of_algorithms(register):
    register(FakeBackend([f"good:{i}" for i in range(12)], workspaces={"good:0": 100, "good:3": 50}))
    register(FakeBackend(["good:1"], name="large", workspaces={"good:1": 100}))
    one = {**FAST, "repetitions": 1, "warmup": 0, "backends": "double", "isolate": False}

    def names(**settings):
        return sorted((row.algorithm.name for row in tune(forward(8, 4, 4), "cpu", **one, **settings).rows), key=lambda n: int(n[5:]))

    assert len(names(algorithms="all")) == 12
    assert names(algorithms="heuristic") == [f"good:{i}" for i in range(8)]
    assert names(algorithms="heuristic", max_algorithms=2) == ["good:0", "good:1"]
    assert names(max_algorithms=2, max_workspace_size=60) == ["good:1", "good:2"]
    assert names(algorithms=["good:7", "good:3"]) == ["good:3", "good:7"]
    assert names(algorithms="good:7") == ["good:7"]
    with pytest.raises(ValueError, match="'splendid'"):
        names(algorithms=["good:7", "splendid"])
    with pytest.raises(ValueError, match="max_algorithms=0: wanted at least 1"):
        names(max_algorithms=0)
    with pytest.raises(NotImplementedError, match="no algorithm within 60 bytes"):
        tune(forward(8, 4, 4), "cpu", backends="large", max_workspace_size=60, **FAST)


def test_refusals(register):
    with pytest.raises(NotImplementedError, match=r"triton.*refuses"):
        tune(forward(), "cpu", backends="triton", **FAST)
    with pytest.raises(ValueError, match="no such backend"):
        tune(forward(), "cpu", backends=["absent"], **FAST)
    with pytest.raises(ValueError, match="backends: got none"):
        tune(forward(), "cpu", backends=[], **FAST)
    for settings, kind in (
        ({"repetitions": 0}, ValueError),
        ({"max_algorithms": 0}, ValueError),
        ({"max_algorithms": "2"}, TypeError),
        ({"origin": "zipf"}, ValueError),
        ({"repetitions": 1.5}, TypeError),
        ({"warmup": -1}, ValueError),
        ({"time_limit": 0}, ValueError),
        ({"time_limit": "1"}, TypeError),
        ({"step_timeout": None}, TypeError),
        ({"step_timeout": 1e300}, ValueError),
        ({"step_timeout": math.inf}, ValueError),
        ({"seed": -1}, ValueError),
        ({"seed": 1 << 70}, ValueError),
        ({"seed": "x"}, TypeError),
        ({"seed": None}, TypeError),
        ({"repetitions": True}, TypeError),
        ({"step_timeout": True}, TypeError),
        ({"seed": np.arange(4)}, TypeError),
        ({"seed": np.ones(1)}, TypeError),
        ({"repetitions": np.arange(9)}, TypeError),
        ({"time_limit": np.ones(3)}, TypeError),
        ({"step_timeout": math.nan}, ValueError),
    ):
        with pytest.raises(kind, match=next(iter(settings))):
            tune(forward(), "cpu", **settings)
    with pytest.raises(TypeError, match="config"):
        tune("a config", "cpu")
    with pytest.raises(TypeError, match=r"^seed: got ndarray, wanted an int$"):  # and no thousand numbers of it
        tune(forward(), "cpu", seed=np.arange(1000))
    assert tune(forward(8, 4, 4), "cpu", seed=np.int64(7), **FAST).seed == 7


# ---- sizes ---------------------------------------------------------------------------------------------------------------------


def test_given_sizes_are_tuned_for(register):
    register(FakeBackend(["good"]))
    report = tune(forward(), "cpu", [60, 0, 0, 4], **FAST)
    assert report.size_samples == [[60, 0, 0, 4]]
    assert (report.origin, report.seeded, report.size_class) == ("user", False, "skewed")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", report.started), "two tunings a second are told apart"
    drawn = tune(forward(), "cpu", [60, 0, 0, 4], origin="zipf", **FAST)
    assert (drawn.origin, drawn.seeded) == ("zipf", False) and TuningReport.from_dict(drawn.to_dict()).origin == "zipf"
    assert tune(forward(), "cpu", **FAST).origin == "seed"
    with pytest.raises(ValueError, match="nothing to time"):
        tune(forward(), "cpu", [0, 0, 0, 0], **FAST)
    several = tune(forward(), "cpu", np.array([[16, 16, 16, 16], [64, 0, 0, 0]]), **FAST)
    assert several.size_samples == [[16, 16, 16, 16], [64, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"group_sizes: group 1 .*past"):
        tune(forward(), "cpu", [60, 9, 0, 4], **FAST)


def batched(batch, groups):
    lhs, rhs = hgg.ArraySpec((batch, 30, 9), "float32"), hgg.ArraySpec((groups, batch, 9, 7), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((batch, groups), np.int32), FORWARD_BATCHED)


def configs():
    bf16 = "bfloat16"
    sizes = hgg.ArraySpec((3,), np.int32)
    gradient = hgg.config_for_ragged_dot(hgg.ArraySpec((30, 9), bf16), hgg.ArraySpec((30, 7), bf16), sizes, WEIGHT_GRADIENT)
    per_batch = hgg.config_for_ragged_dot(
        hgg.ArraySpec((2, 30, 9), bf16), hgg.ArraySpec((3, 2, 9, 7), bf16), hgg.ArraySpec((2, 3), np.int32), FORWARD_BATCHED
    )
    batch = hgg.config_for_ragged_dot(hgg.ArraySpec((3, 30, 9), bf16), hgg.ArraySpec((3, 9, 7), bf16), sizes, BATCH)
    bias = forward(30, 9, 7, 3, bias=hgg.ArraySpec((3, 7), "float32"))
    beta = hgg.config_for_ragged_dot(
        hgg.ArraySpec((30, 9), bf16),
        hgg.ArraySpec((30, 7), bf16),
        sizes,
        WEIGHT_GRADIENT,
        c=hgg.ArraySpec((3, 9, 7), bf16),
        beta=0.5,
        alpha=3.0,
    )
    return {
        "weight gradient": gradient,
        "sizes a batch entry": per_batch,
        "batch": batch,
        "bias": bias,
        "weight gradient with beta": beta,
        "one group": forward(groups=1),
        "no groups": forward(groups=0),
        "no groups, sizes a batch entry": batched(3, 0),
        "no batch entries": batched(0, 3),
        "no rows": forward(m=0),
        "no columns": forward(n=0),
        "k = 0": forward(k=0),
        "fewer rows than groups": forward(m=3, groups=9),
        "float64": forward(dtype="float64"),
        "group offset": offset_config(),
        "group offset, weight gradient": offset_config(WEIGHT_GRADIENT),
    }


@pytest.mark.parametrize("name", configs())
def test_every_kind_of_config(name):
    config = configs()[name]
    report = tune(config, "cpu", **FAST)
    assert [(row.verdict, row.reason) for row in report.rows] == [("ok", "")]
    assert report.config == config.key()
    assert hgg.GroupedGemmConfig.from_json(report.config.to_json()) == config.key()


def test_the_report_says_on_what(register):
    report = tune(forward(70), "cpu", backends="reference", seed=5, **{**FAST, "roofline": True})
    assert (report.device, report.ragged_extent, report.seed) == ("cpu", 70, 5)
    assert report.device_name
    assert report.identity["kind"] == "cpu"
    assert report.floor_ms > 0
    assert report.roofline["flops"] > 1e8
    assert report.best.fraction == pytest.approx(report.floor_ms / report.best.median_ms)
    assert report.started.endswith("+00:00")
    again = type(report).from_json(report.to_json())
    assert again.to_dict() == report.to_dict()


# ---- time ----------------------------------------------------------------------------------------------------------------------


def test_a_time_limit_times_the_best_guesses_first(register):
    register(FakeBackend([f"good:{40 + i}" for i in range(12)]))
    started = time.monotonic()
    report = tune(forward(8, 4, 4), "cpu", backends="double", isolate=False, roofline=False, time_limit=2.5)
    assert time.monotonic() - started < 20
    timed = {row.algorithm.index for row in report.rows if row.verdict in ("ok", "pruned")}
    untimed = {row.algorithm.index: row for row in report.rows if row.verdict == "untimed"}
    assert timed
    assert untimed
    assert max(timed) < min(untimed)
    assert all("time limit" in row.reason for row in untimed.values())
    assert report.best is not None


def test_the_shortest_limit_leaves_one_right_candidate(register):
    register(FakeBackend(["raises", "wrong", "good:5", "good:1"]))
    report = tune(forward(8, 4, 4), "cpu", backends="double", isolate=False, roofline=False, time_limit=1e-3)
    assert report.best.algorithm.name in ("good:5", "good:1")


def test_a_hang_that_the_time_limit_ends_is_no_verdict(register, monkeypatch):
    monkeypatch.setitem(runners._LEAST, "run", 1.5)
    register(FakeBackend(["good:1", "hangs"]))
    report = tune(forward(8, 4, 4), "cpu", backends="double", roofline=False, time_limit=1.0)
    assert verdicts(report) == {"good:1": "ok", "hangs": "untimed"}


def test_a_hang_ahead_of_all_others_takes_the_time_limit_at_most(register):
    register(FakeBackend(["hangs", "good:1"]))
    started = time.monotonic()
    report = tune(forward(8, 4, 4), "cpu", backends="double", roofline=False, time_limit=5.0)
    assert time.monotonic() - started < 40  # step_timeout is 60
    assert verdicts(report) == {"hangs": "untimed", "good:1": "ok"}


def test_without_memory_nothing_is_tried_here(register, monkeypatch):
    monkeypatch.setattr(HostHarness, "free_bytes", lambda bench: 10)
    register(FakeBackend(["good"]))
    with pytest.raises(RuntimeError, match="no memory for the operands on cpu"):
        tune(forward(), "cpu", backends="reference", **FAST)
    sent = []
    monkeypatch.setattr(processes, "acquire", lambda *_, **__: sent.append(1) or (_ for _ in ()).throw(SessionError(NO_MEMORY)))
    with pytest.raises(SessionError, match="no memory"):
        tune(forward(), "cpu", backends="double", **FAST)
    assert sent


def test_a_session_that_cannot_be_in_a_worker_is_held_here(register, monkeypatch):
    """As on a GPU that serves one process only."""

    def refuse(*_, **__):
        raise SessionError("there is no harness for cuda:0: all devices are busy or unavailable")

    monkeypatch.setattr(processes, "acquire", refuse)
    register(FakeBackend(["good"]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert report.best is not None
    assert "busy or unavailable" in report.notes[0]


def test_progress(register):
    register(FakeBackend(["wrong", "good"]))
    events = []
    tune(forward(), "cpu", backends="double", progress=events.append, **FAST)
    phases = [event.phase for event in events]
    assert phases == sorted(phases)  # all of "check" before all of "time"
    assert [event.row.verdict for event in events if event.row is not None] == ["wrong"]
    for phase in ("check", "time"):
        done = [event.done for event in events if event.phase == phase]
        assert done == sorted(done)
        last = next(event for event in reversed(events) if event.phase == phase)
        assert last.done == last.total > 0


def test_verdicts_are_all_shown_somewhere():
    """The tests above and test_race ("pruned") leave no verdict out."""
    shown = {"ok", "wrong", "nondeterministic", "untimed", "pruned", *(verdict for verdict, _ in ENDS.values())}
    assert shown == set(VERDICTS)


def test_a_busy_machine_is_noted(monkeypatch, register):
    register(FakeBackend(["good:0"]))
    for load, noted in ((99.5, True), (0.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        report = tune(forward(), "cpu", backends="double", isolate=False, **FAST)
        assert any("load average was 99.5" in note for note in report.notes) == noted
        assert ("load average" in str(report)) == noted
