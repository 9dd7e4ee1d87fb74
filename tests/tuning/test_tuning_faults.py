"""Whose fault it is: what ends a worker, takes its memory or cannot be closed is held against its candidate, and against no other."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from fake_backend import FakeBackend
from generators import FORWARD

import hipgroupgemm as hgg
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.session import NO_MEMORY

FAST = {"repetitions": 3, "warmup": 1, "roofline": False, "step_timeout": 30.0}


@pytest.fixture
def register():
    """Registers a double for the CPU."""

    def add(double):
        hgg.register_backend(double, ("cpu",))

    yield add
    hgg.unregister_backend("double")


def forward():
    lhs, rhs = hgg.ArraySpec((64, 24), "float32"), hgg.ArraySpec((4, 24, 20), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((4,), np.int32), FORWARD)


def verdicts(report):
    return {row.algorithm.name: row.verdict for row in report.rows}


def row_of(report, name):
    return next(row for row in report.rows if row.algorithm.name == name)


# ---- what ends or hangs the process --------------------------------------------------------------------------------------------

ENDS = {
    "aborts": ("crashed", "SIGABRT"),
    "segfaults": ("crashed", "SIGSEGV"),
    "exits:0": ("crashed", "exit code 0"),
    "exits:3": ("crashed", "exit code 3"),
    "leaves": ("failed", "it has had enough"),
    "raises": ("failed", "no kernel image is available"),
    "unprepared": ("failed", "cannot be prepared"),
    "hangs": ("timed out", "not done after 1.5 s"),
    "hangs_on": ("timed out", "not done after 1.5 s"),
    "holds_the_lock": ("timed out", "not done after 1.5 s"),
}


def test_nothing_ends_the_sweep(register):
    names = [name for pair in zip(ENDS, [f"good:{i}" for i in range(len(ENDS))], strict=True) for name in pair]
    register(FakeBackend(names, broken=("unprepared",)))
    report = tune(forward(), "cpu", backends="double", **{**FAST, "step_timeout": 1.5})
    for name, (verdict, words) in ENDS.items():
        row = row_of(report, name)
        assert row.verdict == verdict, (name, row)
        assert words in row.reason, (name, row.reason)
    good = [row.verdict for row in report.rows if row.algorithm.name.startswith("good")]
    assert len(good) == len(ENDS)
    assert set(good) <= {"ok", "pruned"}
    assert report.best.algorithm.name.startswith("good")


def test_a_crash_brings_what_was_written_last_and_where(register):
    register(FakeBackend(["aborts", "good"]))
    reason = row_of(tune(forward(), "cpu", backends="double", **FAST), "aborts").reason
    for words in ("while it ran on tuning sizes", "killed by SIGABRT", "about to abort", "run_aborts"):
        assert words in reason


def test_noise_on_the_standard_streams_harms_nothing(register):
    register(FakeBackend(["prints", "good:40"]))
    assert tune(forward(), "cpu", backends="double", **FAST).best.algorithm.name == "prints"


def test_a_crash_while_it_is_timed(register):
    """Right on all size sets, and gone once it is called often."""
    register(FakeBackend(["dies_after:14", "good:1"]))
    report = tune(forward(), "cpu", backends="double", **{**FAST, "repetitions": 5})
    assert verdicts(report) == {"dies_after:14": "crashed", "good:1": "ok"}
    assert row_of(report, "good:1").samples == 5


def test_a_device_error_that_stays_is_a_crash_and_a_fresh_worker_goes_on(register, tmp_path):
    register(FakeBackend(["breaks_the_device", "good"], marks=str(tmp_path)))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert verdicts(report) == {"breaks_the_device": "crashed", "good": "ok"}
    reason = row_of(report, "breaks_the_device").reason
    assert "an illegal memory access was encountered" in reason
    assert "unusable" in reason
    assert len({line.split()[0] for line in (tmp_path / "marks").read_text().splitlines()}) == 2


def test_a_device_error_that_stays_in_this_process_ends_what_it_can(register, monkeypatch):
    monkeypatch.setattr(HostHarness, "synchronize", HostHarness.synchronize)  # put back behind the test
    register(FakeBackend(["breaks_the_device", "good"]))
    report = tune(forward(), "cpu", backends="double", isolate=False, **FAST)
    assert verdicts(report) == {"breaks_the_device": "failed", "good": "untimed"}
    assert report.best is None
    assert "cannot be used in this process any more" in report.notes[0]


def test_a_backend_that_kills_every_worker_is_given_up(register, monkeypatch):
    monkeypatch.setattr("hipgroupgemm.tuning.runners._RESTARTS", 2)
    register(FakeBackend(["good", *["exits:1"] * 6]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    found = [row.verdict for row in report.rows]
    assert found.count("crashed") == 3
    assert found.count("untimed") == 4
    assert report.best is None
    assert any("2 workers were lost to other candidates" in note for note in report.notes)


# ---- whose fault it is ----------------------------------------------------------------------------------------------------------


def test_a_crash_is_the_fault_of_who_caused_it(register):
    """The neighbours that it comes to are right when they run alone; it is not."""
    register(FakeBackend(["aborts_later:50", "good:60", "good:61", "wrong"]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert verdicts(report) == {"aborts_later:50": "crashed", "good:60": "ok", "good:61": "ok", "wrong": "wrong"}
    assert "SIGABRT" in row_of(report, "aborts_later:50").reason


def test_who_crashes_among_others_only_is_neither_right_nor_wrong(register):
    register(FakeBackend(["good", "dies_in_company", "wrong"]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    assert verdicts(report) == {"good": "ok", "dies_in_company": "untimed", "wrong": "wrong"}
    assert "not when it ran alone, but 2 times among others" in row_of(report, "dies_in_company").reason


def test_a_harness_that_fails_here_ends_no_tuning(register, monkeypatch):
    register(FakeBackend(["good", "wrong"]))
    plain, calls = HostHarness.rewrite, []

    def rewrite(harness, view, given):  # the first size set's memory serves the others
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("the device is lost")
        return plain(harness, view, given)

    monkeypatch.setattr(HostHarness, "rewrite", rewrite)
    report = tune(forward(), "cpu", backends="double", isolate=False, **FAST)
    assert verdicts(report) == {"good": "untimed", "wrong": "wrong"}
    assert "the device is lost" in row_of(report, "good").reason


@pytest.mark.parametrize("name", ["limits_memory", "takes_the_memory"])
def test_what_one_takes_is_not_missing_for_the_next(register, name):
    register(FakeBackend([name, "good", "good:1"]))
    report = tune(forward(), "cpu", backends="double", **FAST)
    found = verdicts(report)
    assert found.pop(name) == "failed"
    assert set(found.values()) <= {"ok", "pruned"}
    assert report.best is not None


def test_without_memory_in_this_process_there_is_a_report_nonetheless(register, monkeypatch):
    monkeypatch.setattr(HostHarness, "free_bytes", HostHarness.free_bytes)  # put back behind the test
    register(FakeBackend(["wrong", "takes_the_memory", "good"]))
    report = tune(forward(), "cpu", backends="double", isolate=False, **FAST)
    assert verdicts(report)["wrong"] == "wrong"
    assert NO_MEMORY in row_of(report, "good").reason


@pytest.mark.parametrize("isolate", [False, True])
def test_an_error_without_words(register, isolate):
    register(FakeBackend(["says_nothing", "good"]))
    report = tune(forward(), "cpu", backends="double", isolate=isolate, **FAST)
    assert verdicts(report) == {"says_nothing": "failed", "good": "ok"}
    assert "_Unspeakable, whose text raises ValueError" in row_of(report, "says_nothing").reason


@pytest.mark.parametrize("isolate", [False, True])
def test_who_cannot_be_closed_is_not_chosen(register, isolate):
    """Nor is the next one to blame that takes its room."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # more than a quarter of the free memory
    names = ["close_raises", "good:3", "close_raises:1", "good:4"]
    register(FakeBackend(names, workspaces=dict.fromkeys(names, size)))
    report = tune(forward(), "cpu", backends="double", isolate=isolate, **FAST)
    assert verdicts(report) == {"close_raises": "failed", "close_raises:1": "failed", "good:3": "ok", "good:4": "ok"}
    assert "while it was closed: ValueError: close is broken" in row_of(report, "close_raises").reason


@pytest.mark.parametrize("evicted", [False, True])
def test_who_hangs_when_it_is_closed_is_hung(register, evicted):
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ["close_hangs", "good:3"]
    register(FakeBackend(names, workspaces=dict.fromkeys(names, size) if evicted else None))
    started = time.monotonic()
    report = tune(forward(), "cpu", backends="double", **{**FAST, "step_timeout": 1.0})
    assert time.monotonic() - started < 20
    assert verdicts(report) == {"close_hangs": "timed out", "good:3": "ok"}
    assert "while it was closed: not done after 1 s" in row_of(report, "close_hangs").reason


def test_what_was_evicted_is_timed_warm(register, monkeypatch):
    monkeypatch.setattr(HostHarness, "free_bytes", lambda harness: 1 << 30)
    names = ["cold:40", "good:8"]
    register(FakeBackend(names, workspaces=dict.fromkeys(names, 200 << 20)))
    report = tune(forward(), "cpu", backends="double", isolate=False, **FAST)
    assert report.best.algorithm.name == "cold:40"
    assert row_of(report, "cold:40").median_ms < 8
