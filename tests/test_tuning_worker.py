"""The worker process: it never outlives its parent, never harms it, and needs nothing of the parent's main module."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tuning_double import TuningDouble

import hipgroupgemm as hgg
from hipgroupgemm.tuning import child, worker
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.session import Task
from hipgroupgemm.tuning.sizes import size_samples
from hipgroupgemm.tuning.verify import size_sets
from hipgroupgemm.views import CPU

LIMITS = {"start": 60.0, "operands": 60.0, "prepare": 60.0, "run": 60.0, "judge": 60.0}
ROOT = str(Path(hgg.__file__).parents[1])
HERE = str(Path(__file__).parent)

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
import hipgroupgemm as hgg
from hipgroupgemm.tuning.engine import tune
from tuning_double import TuningDouble
lhs, rhs = hgg.ArraySpec((32, 8), "float32"), hgg.ArraySpec((2, 8, 8), "float32")
config = hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((2,), np.int32))
hgg.register_backend(TuningDouble({names!r}, marks={marks!r}), ("cpu",))
report = tune(config, "cpu", backends="double", repetitions=1, ceilings=False)
notes = [note for note in report.notes if "load average" not in note]  # of a busy machine
print(*(row.algorithm.name + "=" + row.verdict for row in report.rows), *notes)
"""


def config(m=32):
    lhs, rhs = hgg.ArraySpec((m, 8), "float32"), hgg.ArraySpec((2, 8, 8), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((2,), np.int32))


def exists(pid):
    """Whether a process is there and no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids, seconds=10.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(exists(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


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
    child.close_workers()
    yield
    child.close_workers()


@pytest.fixture
def double(tmp_path):
    """Registers a double with the given algorithms."""

    def add(*names):
        hgg.register_backend(TuningDouble(list(names), marks=str(tmp_path)), ("cpu",))

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
        tune(config(), "cpu", backends="double", ceilings=False)
    assert not failed
    assert gone(marks_of(tmp_path))
    assert not child._idle.get(CPU)
    hgg.unregister_backend("double")
    double("good")
    assert tune(config(), "cpu", backends="double", ceilings=False, repetitions=1).best is not None


def test_what_progress_raises_ends_it_and_kills_the_worker(tmp_path, double):
    double("good")

    def stop(event):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        tune(config(), "cpu", backends="double", ceilings=False, progress=stop)
    assert gone(marks_of(tmp_path))


def test_hung_candidates_and_their_processes_are_gone_afterwards(tmp_path, double):
    double("hangs_on", "good")
    report = tune(config(), "cpu", backends="double", ceilings=False, repetitions=1, step_timeout=1.5)
    assert {row.algorithm.name: row.verdict for row in report.rows} == {"hangs_on": "hung", "good": "ok"}
    alive = {pid for pid in marks_of(tmp_path) if exists(pid)}
    assert alive == {one.pid for one in child._idle[CPU]}  # the one that went on with the rest


def test_idle_workers_are_kept_and_closed(double, tmp_path):
    double("good")
    tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)
    (kept,) = child._idle[CPU]
    assert exists(kept.pid)
    child.close_workers()
    assert gone([kept.pid], 2)
    tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)
    assert len(marks_of(tmp_path)) == 2


def test_an_idle_worker_that_died_is_replaced(double):
    double("good")
    for _ in range(2):
        assert tune(config(), "cpu", backends="double", ceilings=False, repetitions=1).best is not None
        os.kill(child._idle[CPU][0].pid, signal.SIGKILL)


def test_another_environment_needs_another_worker(double, monkeypatch, tmp_path):
    double("good")
    tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)
    assert len(marks_of(tmp_path)) == 2


def test_a_worker_without_work_ends_by_itself():
    started = subprocess.Popen(
        [sys.executable, "-c", "from hipgroupgemm.tuning import worker; worker.IDLE_SECONDS = 0.2; worker.main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    with started:
        assert started.wait(20) != 0


def test_the_worker_is_a_module_and_ends_with_its_input():
    started = subprocess.Popen(
        [sys.executable, "-m", "hipgroupgemm.tuning.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    with started:
        worker.write_frame(started.stdin, (LIMITS, ("nonsense",)))
        assert b"no such request" in worker.read_frame(started.stdout)
        worker.write_frame(started.stdin, (LIMITS, ("close",)))
        assert b"done" in worker.read_frame(started.stdout)
        started.stdin.close()
        assert started.wait(10) == 1  # not a leader of its group here: it ends alone


def test_a_worker_whose_candidate_holds_the_lock_ends_too(monkeypatch):
    """No thread of it can see then that its input has ended: a timer of faulthandler's ends it."""
    task = Task(config(), CPU, size_sets(config(), size_samples(None, config())), 1, 0, ceilings=False)
    double = TuningDouble(["holds_the_lock"])
    limits = {**LIMITS, "run": 0.1}
    one, _ = child.acquire(CPU)
    assert one.ask(("backends", {"double": pickle.dumps(double)}), limits) == ("done", {})
    assert one.ask(("open", task), limits)[0] == "done"
    one._send((limits, ("check", double.found[0], 0)))
    time.sleep(0.3)
    one._process.stdin.close()
    assert gone([one.pid])
    one.kill()


def test_a_forked_process_leaves_the_worker_to_its_parent(double):
    double("good")
    tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)
    (kept,) = child._idle[CPU]
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the fork
        code = 1
        with contextlib.suppress(BaseException):
            child.close_workers()
            code = 0 if not child._idle else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert exists(kept.pid)
    assert tune(config(), "cpu", backends="double", ceilings=False, repetitions=1).best is not None
    assert child._idle[CPU] == [kept]


def test_a_worker_that_never_gets_ready_is_no_verdict_on_candidates(double, monkeypatch):
    monkeypatch.setattr(child, "_START", "import sys; sys.exit('the loader is broken') # {path!r}")
    double("good")
    report = tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)
    assert report.best is not None
    assert "did not get ready" in report.notes[0]
    assert "the loader is broken" in report.notes[0]
    with pytest.raises(RuntimeError, match="the loader is broken"):
        tune(config(), "cpu", backends="double", ceilings=False, isolate=True)


def test_tuning_from_a_thread(double):
    double("good", "exits:1")
    found = []
    thread = threading.Thread(target=lambda: found.append(tune(config(), "cpu", backends="double", ceilings=False, repetitions=1)))
    thread.start()
    thread.join(60)
    assert sorted(row.verdict for row in found[0].rows) == ["crashed", "ok"]


def test_two_tunings_at_once_have_a_worker_each(double, tmp_path):
    double("good:30")
    found = []

    def one():
        found.append(tune(config(), "cpu", backends="double", ceilings=False, repetitions=2))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [report.best.algorithm.name for report in found] == ["good:30"] * 2
    assert len(marks_of(tmp_path)) == 2
