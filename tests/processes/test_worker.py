"""A worker may crash, hang or be interrupted: its parent gets an exception, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import worker_functions
from process_table import gone

import hipgroupgemm
from hipgroupgemm import processes
from hipgroupgemm.processes import Worker, WorkerDied, WorkerTimedOut, acquire, close_workers, release, serve
from hipgroupgemm.processes import worker as worker_module

ROOT = str(Path(hipgroupgemm.__file__).parents[1])
HERE = str(Path(__file__).parent)
FUNCTIONS = "worker_functions"


def marks_of(path, count, seconds=20.0):
    """Process ids that were marked, once there are so many."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            found = [int(line) for line in (path / "marks").read_text().splitlines()]
            if len(found) == count:
                return found
        time.sleep(0.02)
    raise AssertionError(f"no {count} marks in time")


@pytest.fixture
def worker():
    with Worker("test") as made:
        yield made
    assert gone([made.pid], 3)


@pytest.fixture
def idle():
    """No idle workers before and after."""
    close_workers()
    yield
    close_workers()


def call(worker, name, *arguments, **settings):
    return worker.call(f"{FUNCTIONS}:{name}", *arguments, **settings)  # the settings are `Worker.call`'s


# ---- calls ----------------------------------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring(capsys):
    example = re.search(r"::\n\n((    .*\n|\n)+)", processes.__doc__).group(1)
    exec(textwrap.dedent(example), {})
    assert capsys.readouterr().out.splitlines() == ["3.0", "the worker process ended with exit code 3", "run 0.2"]


def test_state_lives_between_calls(worker):
    first, pid = call(worker, "count", "a")
    assert (first, pid) == (1, worker.pid)
    assert call(worker, "count", "a") == (2, worker.pid)
    assert worker.calls == 2
    assert worker_functions.counts == {}
    assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid


def test_large_values_both_ways(worker):
    data = os.urandom(3 << 20)
    assert call(worker, "double", data) == 2 * data


def test_what_the_function_raises_is_raised_here_and_the_worker_lives(worker):
    with pytest.raises(LookupError, match="not here"):
        call(worker, "raises", LookupError("not here"))
    with pytest.raises(SystemExit, match="enough"):
        call(worker, "raises", SystemExit("enough"))
    with pytest.raises(RuntimeError, match="Unpicklable: has a lambda"):
        call(worker, "raises_unpicklable", "lambda")
    with pytest.raises(RuntimeError, match="Wordless, whose text raises ValueError"):
        call(worker, "raises_unpicklable", "wordless")
    with pytest.raises(Exception, match="pickle"):
        call(worker, "returns_unpicklable")
    with pytest.raises(ImportError, match="not there"):
        call(worker, "double", worker_functions.Unreadable())
    with pytest.raises(ModuleNotFoundError):
        worker.call("there_is_no_such_module:f")
    with pytest.raises(AttributeError):
        call(worker, "no_such_function")
    with pytest.raises(Exception, match="pickle"):
        call(worker, "double", lambda: None)
    assert call(worker, "count", "b")[1] == worker.pid


def test_what_cannot_be_read_ends_it(worker):
    with pytest.raises(WorkerDied, match="cannot be read: ImportError"):
        call(worker, "returns_unreadable")
    assert not worker.alive()
    with pytest.raises(WorkerDied):
        call(worker, "count", "c")


def test_noise_on_the_standard_streams_harms_nothing(worker):
    assert call(worker, "prints") == "done"
    assert call(worker, "double", 4) == 8


def test_messages_come_in_order_and_to_the_caller(worker):
    found = []
    thread = threading.get_ident()
    call(worker, "steps", list("abc"), on_message=lambda name: found.append((name, threading.get_ident())))
    assert found == [(name, thread) for name in "abc"]
    assert call(worker, "steps", ["unheard"], 0.0, "well") == "well"


def test_what_on_message_raises_ends_the_call_and_the_worker(worker):
    def refuse(message):
        raise OSError("the disk is full")  # not taken for the worker's end

    with pytest.raises(OSError, match="the disk is full"):
        call(worker, "steps", ["a"], 60.0, on_message=refuse)
    assert gone([worker.pid], 3)


def test_steps_and_messages_outside_a_worker_do_nothing():
    processes.step("run")
    processes.send("nothing")


# ---- ends and deadlines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "how"),
    [
        ("aborts", (), "killed by SIGABRT"),
        ("ends_by", (signal.SIGSEGV,), "killed by SIGSEGV"),
        ("ends_by", (signal.SIGKILL,), "killed by SIGKILL"),
        ("forks_and_dies", (), "exit code 4"),
    ],
)
def test_a_crash(worker, name, arguments, how):
    with pytest.raises(WorkerDied, match=how) as caught:
        call(worker, name, *arguments)
    assert caught.value.step == "run"
    if name == "aborts":
        assert "about to abort" in caught.value.tail
        assert "worker_functions.py" in caught.value.tail  # where, from faulthandler
        assert "serve.py" not in caught.value.tail
    assert not worker.alive()


def test_a_crash_names_its_step(worker):
    with pytest.raises(WorkerDied) as caught:
        call(worker, "steps", ["prepare", "close"], 0.0, "", 3)
    assert (caught.value.step, caught.value.detail) == ("close", "about close")


def test_each_step_has_a_deadline_of_its_own(worker):
    deadlines = {"start": 60.0, "run": 60.0, "prepare": 60.0, "close": 0.3}
    assert call(worker, "steps", ["close", "prepare"], 0.6, "done", deadlines=deadlines) == "done"
    began = time.monotonic()
    with pytest.raises(WorkerTimedOut) as caught:
        call(worker, "steps", ["prepare", "close"], 60.0, deadlines=deadlines)
    assert time.monotonic() - began < 5
    assert (caught.value.step, caught.value.seconds, caught.value.detail) == ("close", 0.3, "about close")
    assert gone([worker.pid], 3)


@pytest.mark.parametrize("name", ["hangs_on", "holds_the_lock"])
def test_a_hang_is_killed_with_what_it_started(worker, tmp_path, name):
    with pytest.raises(WorkerTimedOut):
        call(worker, name, str(tmp_path), deadlines={"run": 1.5})
    assert gone(marks_of(tmp_path, 2 if name == "hangs_on" else 1), 3)


def test_a_worker_that_takes_up_nothing_times_out_at_its_start(worker):
    call(worker, "holds_the_lock_later", 0.1)
    time.sleep(0.4)
    with pytest.raises(WorkerTimedOut) as caught:
        call(worker, "double", 1, deadlines={"start": 1.0})
    assert caught.value.step == "start"


def test_one_that_never_gets_ready(monkeypatch):
    monkeypatch.setattr(worker_module, "_START", "import sys; sys.exit('the loader is broken')")
    with Worker("broken") as made, pytest.raises(WorkerDied, match="the loader is broken") as caught:
        made.call("math:sqrt", 9.0)
    assert caught.value.step == "start"


def test_a_function_that_forks_answers_once(worker):
    assert call(worker, "forks") == "done"
    assert call(worker, "double", 1) == 2
    assert call(worker, "double", 2) == 4


def test_kill_from_another_thread_ends_a_call(worker):
    threading.Timer(0.5, worker.kill).start()
    began = time.monotonic()
    with pytest.raises(WorkerDied):
        call(worker, "steps", [], 60.0)
    assert time.monotonic() - began < 10


# ---- what is inherited ----------------------------------------------------------------------------------------------------------


def test_what_a_worker_inherits(monkeypatch):
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "/somewhere")
    monkeypatch.setenv("MINE", "1")
    with Worker("test") as worker:
        assert [call(worker, "variable", name) for name in ("HIPGROUPGEMM_TUNING_STORE", "MINE")] == ["off", "1"]
    assert os.environ["HIPGROUPGEMM_TUNING_STORE"] == "/somewhere"


def test_a_long_import_path(monkeypatch):
    """The path goes through the connection, since arguments are bounded."""
    monkeypatch.setattr(sys, "path", [*(entry for entry in sys.path if entry), "", "/" + 300_000 * "x"])
    with Worker("test") as worker:
        assert call(worker, "directory") == []
        assert call(worker, "double", 2) == 4


def test_no_interpreter_to_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(OSError, match="no Python interpreter"):
        Worker("test")


# ---- nothing is left behind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count", "seconds"), [("hangs_on", 2, 60.0), ("holds_the_lock", 1, 2.0), ("starts_a_worker", 3, 60.0)])
def test_a_parent_that_is_killed_takes_its_worker_along(tmp_path, name, count, seconds):
    """Even one that ignores signals, has processes or a worker of its own, or lets no Python run: that one within its deadline's double."""
    script = tmp_path / "script.py"  # without an if-main guard
    script.write_text(
        f"import sys\nsys.path.insert(0, {HERE!r})\nfrom hipgroupgemm.processes import Worker\n"
        f"Worker('test').call('worker_functions:{name}', {str(tmp_path)!r}, deadlines={{'run': {seconds}}})\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": ROOT}, stderr=subprocess.DEVNULL)
    pids = marks_of(tmp_path, count)
    parent.kill()
    parent.wait()
    assert gone(pids)


def test_an_interrupt_kills_the_worker(worker, tmp_path):
    threading.Timer(0.0, lambda: marks_of(tmp_path, 2) and os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call(worker, "hangs_on", str(tmp_path))
    assert gone(marks_of(tmp_path, 2), 3)


def test_an_interrupt_as_it_starts(monkeypatch):
    """While the error, which holds all frames, is still there."""
    started, begin = [], subprocess.Popen

    def popen(*arguments, **settings):
        started.append(begin(*arguments, **settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt) as caught:
        Worker("test")
    assert gone([started[0].pid], 5)
    assert caught.traceback
    started[0].wait()


def test_a_worker_that_is_dropped_ends():
    made = Worker("test")
    call(made, "double", 1)
    pid, process = made.pid, made._process
    del made
    assert gone([pid], 3)
    process.wait()


def test_a_worker_without_calls_ends_by_itself(monkeypatch):
    start = worker_module._START.replace("main(conn", "import hipgroupgemm.processes.serve as s; s.IDLE_SECONDS = 0.2; main(conn")
    monkeypatch.setattr(worker_module, "_START", start)
    with Worker("test") as made:
        call(made, "double", 1)
        made._process.wait(10)
        assert not made.alive()
        with pytest.raises(WorkerDied):
            call(made, "double", 1)
    assert serve.IDLE_SECONDS > 10


# ---- the pool -------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("idle")
def test_idle_workers_are_kept_and_closed(monkeypatch):
    first = acquire("a")
    assert first.calls == 0
    call(first, "double", 1)
    release(first)
    other = acquire("b")
    assert other is not first
    fresh = acquire("a", fresh=True)
    assert fresh is not first
    fresh.kill()
    other.kill()
    assert acquire("a") is first
    assert first.calls == 1
    release(first)
    monkeypatch.setenv("MYKERNEL_FAST", "1")  # another one would run something else
    second = acquire("a")
    assert second is not first
    assert gone([first.pid], 3)
    release(second)
    close_workers()
    assert gone([second.pid], 3)


@pytest.mark.usefixtures("idle")
def test_an_idle_worker_that_died_is_replaced():
    first = acquire("a")
    call(first, "double", 1)
    release(first)
    os.kill(first.pid, signal.SIGKILL)
    first._process.wait()
    second = acquire("a")
    assert second is not first
    second.kill()


@pytest.mark.usefixtures("idle")
def test_an_interrupt_as_an_idle_worker_is_taken(monkeypatch):
    first = acquire("a")
    release(first)
    monkeypatch.setattr(first, "alive", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        acquire("a")
    assert gone([first.pid], 3)


@pytest.mark.usefixtures("idle")
def test_a_forked_process_leaves_the_worker_to_its_parent():
    first, busy = acquire("a"), acquire("b")
    call(first, "double", 1)
    release(first)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the fork
        code = 1
        with contextlib.suppress(BaseException):
            close_workers()
            busy.kill()
            code = 0 if not worker_module._idle else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert acquire("a") is first
    assert call(first, "double", 2) == call(busy, "double", 2) == 4
    first.kill()
    busy.kill()
