"""Tuning in a worker: it never outlives its parent, never harms it, and needs nothing of the parent's main module."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_backend import FakeBackend
from process_table import exists, gone

import hipgroupgemm as hgg
from hipgroupgemm import processes
from hipgroupgemm.processes import Worker, worker
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.session import SessionError

LIMITS = dict.fromkeys(("start", "operands", "prepare", "run", "check", "close"), 60.0)
ROOT = str(Path(hgg.__file__).parents[1])
HERE = str(Path(__file__).parent)

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
import hipgroupgemm as hgg
from hipgroupgemm.tuning.engine import tune
from fake_backend import FakeBackend
lhs, rhs = hgg.ArraySpec((32, 8), "float32"), hgg.ArraySpec((2, 8, 8), "float32")
config = hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((2,), np.int32))
hgg.register_backend(FakeBackend({names!r}, marks={marks!r}), ("cpu",))
report = tune(config, "cpu", backends="double", repetitions=1, roofline=False)
notes = [note for note in report.notes if "load average" not in note]
print(*(row.algorithm.name + "=" + row.verdict for row in report.rows), *notes)
"""


def config(m=32):
    lhs, rhs = hgg.ArraySpec((m, 8), "float32"), hgg.ArraySpec((2, 8, 8), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((2,), np.int32))


def marks_of(path, wanted="", seconds=20.0):
    """Process ids in the double's marks, once `wanted` is among them."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            lines = [line.split() for line in (path / "marks").read_text().splitlines()]
            if any(wanted in line[1:] for line in lines) or not wanted:
                return {int(line[0]) for line in lines}
        time.sleep(0.02)
    raise AssertionError(f"no {wanted!r} in time")


@pytest.fixture(autouse=True)
def workers():
    processes.close_workers()
    yield
    processes.close_workers()


@pytest.fixture
def double(tmp_path):
    """Registers a double with the given algorithms."""

    def add(*names):
        hgg.register_backend(FakeBackend(list(names), marks=str(tmp_path)), ("cpu",))

    yield add
    with contextlib.suppress(ValueError):
        hgg.unregister_backend("double")


def script(tmp_path, *names):
    """A script without an if-main guard, started."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(here=HERE, names=list(names), marks=str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_script_without_a_guard(tmp_path):
    process = script(tmp_path, "good", "exits:1", "wrong")
    out, error = process.communicate(timeout=60)
    assert out.split() == ["good=ok", "wrong=wrong", "exits:1=crashed"], error
    assert error == ""
    assert gone(marks_of(tmp_path))


def test_a_parent_that_is_killed_takes_its_worker_along(tmp_path):
    """Even one that is in the midst of a candidate that ignores signals and has a process of its own."""
    process = script(tmp_path, "good", "hangs_on")
    pids = marks_of(tmp_path, "grandchild")
    assert len(pids) == 2
    process.kill()
    process.communicate()
    assert gone(pids)


def test_ctrl_c_kills_the_worker_and_is_raised(tmp_path, double):
    double("good", "hangs_on")
    failed = []

    def interrupt():
        try:
            marks_of(tmp_path, "grandchild")
        except AssertionError as error:
            failed.append(error)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        tune(config(), "cpu", backends="double", roofline=False)
    assert not failed
    assert gone(marks_of(tmp_path))
    assert not worker._idle.get("cpu")
    hgg.unregister_backend("double")
    double("good")
    assert tune(config(), "cpu", backends="double", roofline=False, repetitions=1).best is not None


def test_what_progress_raises_ends_it_and_kills_the_worker(tmp_path, double):
    double("good")

    def stop(event):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        tune(config(), "cpu", backends="double", roofline=False, progress=stop)
    assert gone(marks_of(tmp_path))


def test_hung_candidates_and_their_processes_are_gone_afterwards(tmp_path, double):
    double("hangs_on", "good")
    report = tune(config(), "cpu", backends="double", roofline=False, repetitions=1, step_timeout=1.5)
    assert {row.algorithm.name: row.verdict for row in report.rows} == {"hangs_on": "timed out", "good": "ok"}
    assert gone(marks_of(tmp_path), 2)


def built_in():
    """Tunes a built-in backend in a worker, and returns the worker, which is kept then."""
    report = tune(config(), "cpu", backends="reference", isolate=True, roofline=False, repetitions=1)
    assert report.best is not None
    (kept,) = worker._idle["cpu"]
    assert exists(kept.pid)
    return kept


def test_idle_workers_are_kept_and_closed():
    kept = built_in()
    assert built_in() is kept
    processes.close_workers()
    assert gone([kept.pid], 2)
    assert built_in() is not kept


def test_an_idle_worker_that_died_is_replaced():
    kept = built_in()
    os.kill(kept.pid, signal.SIGKILL)
    assert built_in() is not kept


MODULE = """
from fake_backend import FakeBackend
from process_table import exists, gone

class Edited(FakeBackend):
    def prepare(self, config, device, algorithm, stream):
        return super().prepare(config, device, dataclasses.replace(algorithm, name={name!r}), stream)

import dataclasses
"""


def test_code_that_was_edited_is_run_as_it_is_now(tmp_path, monkeypatch):
    """As a notebook does it: edit, reload, tune again."""
    path = tmp_path / "edited_backend.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name, verdict in (("good", "ok"), ("wrong", "wrong")):
        path.write_text(MODULE.format(name=name))
        sys.modules.pop("edited_backend", None)
        importlib.invalidate_caches()
        backend = importlib.import_module("edited_backend").Edited(["kernel"])
        hgg.register_backend(backend, ("cpu",))
        try:
            report = tune(config(), "cpu", backends="double", roofline=False, repetitions=1)
        finally:
            hgg.unregister_backend("double")
            sys.modules.pop("edited_backend", None)
        assert [row.verdict for row in report.rows] == [verdict]


class Start:
    """Keeps the ids of all processes that are started, and interrupts where it is told to."""

    def __init__(self, monkeypatch):
        self.pids, self.at = [], ""
        begin, receive = subprocess.Popen, Worker._receive

        def start(*arguments, **settings):
            made = begin(*arguments, **settings)
            self.pids.append(made.pid)
            return made

        def receives(one, *arguments):
            message = receive(one, *arguments)
            if self.at and self.at in map(str, message[:2]):
                raise KeyboardInterrupt
            return message

        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(Worker, "_receive", receives)


@pytest.mark.parametrize("at", ["done", "operands", "prepare", "run", "check", "close"])
def test_an_interrupt_never_leaves_a_worker_behind(double, monkeypatch, at):
    """Wherever it comes, and while the error, which holds all frames, is still there."""
    started = Start(monkeypatch)
    started.at = at
    double("good")
    with pytest.raises(KeyboardInterrupt) as caught:
        tune(config(), "cpu", backends="double", roofline=False, repetitions=1)
    assert started.pids
    assert gone(started.pids, 3)
    assert caught.traceback


def test_an_interrupt_as_an_idle_worker_is_taken_or_given_back(monkeypatch):
    kept = built_in()
    started = Start(monkeypatch)
    monkeypatch.setattr(kept, "alive", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        built_in()
    assert gone([kept.pid], 3)
    monkeypatch.setattr(processes, "release", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        built_in()
    assert started.pids
    processes.close_workers()
    assert gone(started.pids, 3)


def test_no_worker_stays_where_the_session_cannot_be(double, monkeypatch):
    started = Start(monkeypatch)
    double("good")
    monkeypatch.setattr(worker, "_START", BROKEN + worker._START)
    with pytest.raises(SessionError, match="no memory for the operands"):
        tune(config(), "cpu", backends="double", roofline=False)
    assert started.pids
    assert gone(started.pids, 3)


BROKEN = """
import os, sys
class Later:
    def find_spec(self, name, path=None, target=None):
        if name == "hipgroupgemm.tuning.session":
            sys.meta_path.remove(self)
            from hipgroupgemm.measure.harness import HostHarness
            HostHarness.free_bytes = lambda bench: 0
sys.meta_path.insert(0, Later())
"""


def test_a_worker_that_its_parent_forgot_ends_with_a_session_open_too(double, monkeypatch):
    """And a parent that was only slow goes on with another one."""
    started = Start(monkeypatch)
    monkeypatch.setattr(
        worker, "_START", worker._START.replace("main(conn", "import hipgroupgemm.processes.serve as s; s.IDLE_SECONDS = 0.4; main(conn")
    )
    double("good", "good:1")
    slept = []

    def sleepy(event):
        if not slept:
            slept.append(gone(started.pids))

    report = tune(config(), "cpu", backends="double", roofline=False, repetitions=1, progress=sleepy)
    assert slept == [True]
    assert len(started.pids) >= 2
    assert {row.verdict for row in report.rows} <= {"ok", "pruned"}


def test_a_candidate_that_forks_answers_once(double, tmp_path):
    double("forks", "wrong", "good", "leaves_nan")
    report = tune(config(), "cpu", backends="double", roofline=False, repetitions=2)
    found = {row.algorithm.name: row.verdict for row in report.rows}
    assert found["forks"] in ("ok", "pruned")
    assert (found["wrong"], found["leaves_nan"]) == ("wrong", "wrong")
    assert found["good"] in ("ok", "pruned")
    assert gone(marks_of(tmp_path))


def test_a_long_import_path(monkeypatch, double):
    """The path goes through the pipe, since arguments are bounded."""
    monkeypatch.setattr(sys, "path", [*(entry for entry in sys.path if entry), "", "/" + 300_000 * "x"])
    double("good", "exits:1")
    report = tune(config(), "cpu", backends="double", roofline=False, repetitions=1)
    assert sorted(row.verdict for row in report.rows) == ["crashed", "ok"]
    assert not any("ran in this process" in note for note in report.notes)


def test_a_worker_that_never_gets_ready_is_no_verdict_on_candidates(double, monkeypatch):
    monkeypatch.setattr(worker, "_START", "import sys; sys.exit('the loader is broken')")
    double("good")
    report = tune(config(), "cpu", backends="double", roofline=False, repetitions=1)
    assert report.best is not None
    assert "did not get ready" in report.notes[0]
    assert "the loader is broken" in report.notes[0]
    with pytest.raises(RuntimeError, match="the loader is broken"):
        tune(config(), "cpu", backends="double", roofline=False, isolate=True)


def test_tuning_from_a_thread(double):
    double("good", "exits:1")
    found = []
    thread = threading.Thread(target=lambda: found.append(tune(config(), "cpu", backends="double", roofline=False, repetitions=1)))
    thread.start()
    thread.join(60)
    assert sorted(row.verdict for row in found[0].rows) == ["crashed", "ok"]


def test_two_tunings_at_once_have_a_worker_each(double, tmp_path):
    double("good:30")
    found = []

    def one():
        found.append(tune(config(), "cpu", backends="double", roofline=False, repetitions=2))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [report.best.algorithm.name for report in found] == ["good:30"] * 2
    assert len(marks_of(tmp_path)) == 2
