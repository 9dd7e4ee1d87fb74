"""The parent's side of a worker: starting, calling, supervising and killing it, and keeping idle ones."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from typing import Any

from hipgroupgemm.runtime.forks import new_lock
from hipgroupgemm.runtime.process import import_path

__all__ = ["Worker", "WorkerDied", "WorkerTimedOut", "acquire", "close_workers", "release"]

_START = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv.pop()))
sys.path[:] = connection.recv()
from hipgroupgemm.processes.serve import main
main(connection)
"""  # the import path comes through the connection: an argument is 128 KiB at the most
_OWN = re.compile(r"^Extension modules: |^  File (\"<string>\"|\".*/hipgroupgemm/(processes|tuning)/)|^  <")
_POLL_SECONDS = 0.25
_TAIL_BYTES, _TAIL_LINES = 1 << 14, 12
_FOREVER = 1e9  # seconds


@dataclasses.dataclass(eq=False)
class WorkerDied(Exception):
    """The worker ended during a call.

    Attributes:
        how: with which exit code or signal. tail: what it wrote last. step: what it was doing. detail: what `step` was given besides.
    """

    how: str
    tail: str = ""
    step: str = "start"
    detail: Any = None

    def __str__(self) -> str:
        """How, and what it wrote last."""
        return f"{self.how}\n{self.tail}".strip()


@dataclasses.dataclass(eq=False)
class WorkerTimedOut(Exception):
    """The step took longer than the `seconds` of its deadline, and the worker was killed. `tail` and `detail` as in `WorkerDied`."""

    step: str
    seconds: float
    tail: str = ""
    detail: Any = None

    def __str__(self) -> str:
        """The step and its seconds."""
        return f"{self.step}: not done after {self.seconds:.3g} s"


def _environment() -> tuple[list[str], dict[str, str]]:
    """The import path and the variables that a worker is started with: with others it would run something else."""
    return import_path(), {**os.environ, "HIPGROUPGEMM_TUNING_STORE": "off"}  # what a worker finds out goes to its parent


class Worker:
    """One Python process, in a session and process group of its own. Only `kill` may be used while another thread is in a call.

    The process starts while this returns; the first call waits for it. It ends with `kill`, when this object or this process is gone, and
    when it had no call for a minute.

    Args:
        name: what it serves; for `release`, and for people.

    Attributes:
        calls: how many calls were made.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, name: str) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError(f"sys.executable={sys.executable!r} is no Python interpreter that could be started again")
        self.name, self.calls = name, 0
        self.environment, self._parent = _environment(), os.getpid()
        self._ending = new_lock()
        self._last_words: str | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - what it writes in a call
        weakref.finalize(self, self._output.close)
        self._connection, theirs = Pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno())],
                    env=self.environment[1],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:  # an interrupt, say: the worker ends when its connection does
            self._connection.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id, and its process group's."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._last_words is None and self._process.poll() is None

    def call(
        self,
        function: str,
        *arguments: Any,
        deadlines: Mapping[str, float] | None = None,
        on_message: Callable[[Any], object] | None = None,
    ) -> Any:
        """Runs a function in the worker and returns its result.

        Args:
            function: "module:function", imported there. arguments: picklable.
            deadlines: seconds per step, from when the worker says that it begins. "start" comes before the call is taken up, "run" is the
                function's first; a step without a deadline has no limit.
            on_message: gets what the function sends with `send`, in this thread.

        Raises:
            WorkerDied: the worker ended. WorkerTimedOut: a step took too long. The worker is killed, as it is when this is interrupted.
            Exception: what the function raised, RuntimeError with its text where it cannot be pickled. The worker is well then.
        """
        limits = {step: seconds for step, seconds in (deadlines or {}).items() if seconds < _FOREVER}
        request, step, detail = pickle.dumps((function, arguments, limits)), "start", None
        try:
            self._send(request)
            while True:
                kind, *values = self._receive(step, detail, limits.get(step, _FOREVER))
                if kind == "step":
                    step, detail = values
                elif kind != "message":
                    break
                elif on_message is not None:
                    on_message(values[0])
        except BaseException:
            self.kill()
            raise
        if kind == "raised":
            raise values[0]
        return values[0]

    def _send(self, request: bytes) -> None:
        os.ftruncate(self._output.fileno(), 0)  # what was written so far belongs to what is over
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)
        self.calls += 1
        try:
            if self.calls == 1:
                self._connection.send(self.environment[0])
            self._connection.send_bytes(request)
        except OSError:
            raise self._died("start", None) from None

    def _receive(self, step: str, detail: Any, seconds: float) -> tuple[Any, ...]:
        """The next message, which has to come within so many seconds."""
        until = time.monotonic() + seconds
        try:
            while not self._connection.poll(min(max(until - time.monotonic(), 0), _POLL_SECONDS)):
                if time.monotonic() >= until:
                    raise WorkerTimedOut(step, seconds, self.kill(), detail)
                if self._process.poll() is not None and not self._connection.poll(0):  # its copies may hold the connection open
                    raise EOFError
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._died(step, detail) from None
        try:
            message: tuple[Any, ...] = pickle.loads(data)
        except Exception as error:
            how = f"what the worker process sent cannot be read: {type(error).__name__}"
            raise WorkerDied(how, self.kill(), step, detail) from error
        return message

    def _died(self, step: str, detail: Any) -> WorkerDied:
        """What there is to say of a process that has closed its connection."""
        try:
            code = self._process.wait(2)
            name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by {name}"
        except subprocess.TimeoutExpired:
            how = "closed its connection without ending"
        return WorkerDied(f"the worker process {how}", self.kill(), step, detail)

    def kill(self) -> str:
        """Kills the worker and all that it has started, and returns what it wrote last. Twice is fine; in a fork it does nothing."""
        with self._ending:
            if self._last_words is None and os.getpid() == self._parent:
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10.0)
                first = max(0, os.fstat(self._output.fileno()).st_size - _TAIL_BYTES)
                lines = os.pread(self._output.fileno(), _TAIL_BYTES, first).decode("utf-8", "replace").splitlines()
                self._last_words = "\n".join([line for line in lines if line.strip() and not _OWN.search(line)][-_TAIL_LINES:])
        return self._last_words or ""

    def __enter__(self) -> Worker:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kills it."""
        self.kill()


# ---- idle workers ----------------------------------------------------------------------------------------------------------------

_idle: dict[str, list[Worker]] = {}
_lock = new_lock()


def acquire(name: str, *, fresh: bool = False) -> Worker:
    """A worker of that name; it is the caller's until `release` or `kill`. One that has not served anybody yet has `calls` 0.

    Args:
        name: what it serves, "cuda:0" say.
        fresh: whether it must be a new one. One that was started with other variables or another import path is not taken in any case.

    Raises:
        OSError: it cannot be started.
    """
    wanted = _environment()
    while not fresh:
        with _lock:
            if not _idle.get(name):
                break
            worker = _idle[name].pop()
        good = False
        try:
            good = worker.environment == wanted and worker.alive()
        finally:
            if not good:
                worker.kill()
        if good:
            return worker
    return Worker(name)


def release(worker: Worker) -> None:
    """Gives a healthy worker back. It ends by itself when nobody takes it for a while.

    Not one that has run code of the caller's: the caller may edit it, and the worker would not see that.
    """
    with _lock:
        _idle.setdefault(worker.name, []).append(worker)


def close_workers() -> None:
    """Ends all idle workers: each may hold a device's context, some hundred MiB of the device's memory."""
    with _lock:
        workers = [worker for waiting in _idle.values() for worker in waiting]
        _idle.clear()
    for worker in workers:
        worker.kill()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's
