"""The parent's side of a worker: starting, calling, supervising and killing it, and keeping idle ones."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from typing import Any

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
_TAIL = 1 << 14  # bytes
_ALWAYS = {"HIPGROUPGEMM_TUNING_STORE": "off"}  # what a worker finds out goes to its parent
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


class _Tail(threading.Thread):
    """Reads what the worker writes and keeps its end."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True, name="hipgroupgemm-worker-output")
        self._stream, self._kept = stream, b""
        self.start()

    def run(self) -> None:
        with self._stream, contextlib.suppress(OSError):
            while data := os.read(self._stream.fileno(), 4096):
                self._kept = (self._kept + data)[-_TAIL:]

    def text(self, lines: int = 12) -> str:
        """The last lines of a process that has ended, without what tells of this package's own frames; they have a moment to come."""
        self.join(3.0)
        found = self._kept.decode("utf-8", "replace").strip().splitlines()
        return "\n".join([line for line in found if line.strip() and not _OWN.search(line)][-lines:])

    def forget(self) -> None:
        """What was written so far belongs to what is over."""
        self._kept = b""


def _environment(environment: Mapping[str, str] | None) -> tuple[list[str], dict[str, str]]:
    """The import path and the variables that a worker is started with: with others it would run something else."""
    return import_path(), {**os.environ, **_ALWAYS, **(environment or {})}


def _directory() -> str | None:
    """Where a worker starts: here, but an interpreter with relative paths in PYTHONPATH does not start in a directory that was deleted."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


class Worker:
    """One Python process, in a session and process group of its own. Only `kill` may be used while another thread is in a call.

    The process starts while this returns; the first call waits for it. It ends with `kill`, when this object or this process is gone, and
    when it had no call for a minute.

    Args:
        name: what it serves; for `release`, and for people.
        environment: variables that it gets beside this process's.

    Attributes:
        calls: how many calls were made.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, name: str, *, environment: Mapping[str, str] | None = None) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError(f"sys.executable={sys.executable!r} is no Python interpreter that could be started again")
        self.name, self.calls = name, 0
        self.environment = _environment(environment)
        self._parent, self._ending = os.getpid(), threading.Lock()
        self._last_words: str | None = None
        self._connection, theirs = Pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno())],
                    cwd=_directory(),
                    env=self.environment[1],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            self._tail = _Tail(self._process.stdout)
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
        request = pickle.dumps((function, arguments, limits := {k: v for k, v in (deadlines or {}).items() if v < _FOREVER}))
        try:
            kind, value = self._exchange(request, limits, on_message)
        except BaseException:
            self.kill()
            raise
        if kind == "raised":
            raise value
        return value

    def _exchange(self, request: bytes, limits: dict[str, float], on_message: Callable[[Any], object] | None) -> tuple[str, Any]:
        """Sends a request; what the last message says."""
        self._tail.forget()
        step, detail = "start", None
        with self._watched(step, detail, limits):
            with self._same_socket() as here:  # sending a part, and then nothing, takes no longer than the deadline; 0 is none
                seconds = struct.pack("ll", math.ceil(limits.get("start", 0)), 0)
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            if not self.calls:
                self._connection.send(self.environment[0])
            self.calls += 1
            self._connection.send_bytes(request)
        while True:
            with self._watched(step, detail, limits):
                kind, *values = self._receive(time.monotonic() + limits.get(step, _FOREVER))
            if kind == "step":
                step, detail = values
            elif kind != "message":
                return kind, values[0]
            elif on_message is not None:
                on_message(values[0])

    @contextlib.contextmanager
    def _watched(self, step: str, detail: Any, limits: dict[str, float]) -> Iterator[None]:
        """What goes wrong with the connection says what happened to the worker."""
        try:
            yield
        except (BlockingIOError, TimeoutError):
            raise WorkerTimedOut(step, limits.get(step, _FOREVER), self.kill(), detail) from None
        except pickle.UnpicklingError as error:
            raise WorkerDied(f"what the worker process sent cannot be read: {error}", self.kill(), step, detail) from error
        except (EOFError, OSError):
            try:
                how = _how(self._process.wait(2))
            except subprocess.TimeoutExpired:
                how = "the worker process closed its connection without ending"
            raise WorkerDied(how, self.kill(), step, detail) from None

    def _same_socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))

    def _receive(self, until: float) -> tuple[Any, ...]:
        """The next message. TimeoutError when it is not there in time, EOFError when the process ended."""
        while not self._connection.poll(min(max(until - time.monotonic(), 0), _POLL_SECONDS)):
            if time.monotonic() >= until:
                raise TimeoutError
            if self._process.poll() is not None and not self._connection.poll(0):  # its copies may hold the connection open
                raise EOFError
        data = self._connection.recv_bytes()
        try:
            message: tuple[Any, ...] = pickle.loads(data)
        except Exception as error:
            raise pickle.UnpicklingError(type(error).__name__) from error
        return message

    def kill(self) -> str:
        """Kills the worker and all that it has started, and returns what it wrote last. Twice is fine.

        A forked process only lets go of it: it is the parent's.
        """
        if os.getpid() != self._parent:
            self._connection.close()
            self._process.returncode = 0  # or Popen complains that its child still runs
            return ""
        with self._ending:
            if self._last_words is None:
                try:
                    os.killpg(self.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    with contextlib.suppress(OSError):
                        self._process.kill()  # it has no group of its own yet
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10.0)
                self._last_words = self._tail.text()
                with contextlib.suppress(OSError), self._same_socket() as here:
                    here.shutdown(socket.SHUT_RDWR)  # ends it where a signal could not, and the call that another thread is in
        return self._last_words

    close = kill

    def __enter__(self) -> Worker:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kills it."""
        self.kill()


def _how(code: int) -> str:
    if code >= 0:
        return f"the worker process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the worker process was killed by {name}"


# ---- idle workers ----------------------------------------------------------------------------------------------------------------

_idle: dict[str, list[Worker]] = {}
_lock = threading.Lock()


def acquire(name: str, *, fresh: bool = False, environment: Mapping[str, str] | None = None) -> Worker:
    """A worker of that name; it is the caller's until `release` or `kill`. One that has not served anybody yet has `calls` 0.

    Args:
        name: what it serves, "cuda:0" say. fresh: whether it must be a new one.
        environment: as `Worker` takes it. A worker that was started with other variables or another import path is not taken.

    Raises:
        OSError: it cannot be started.
    """
    wanted = _environment(environment)
    while not fresh:
        with _lock:
            worker = _idle[name].pop() if _idle.get(name) else None
        if worker is None:
            break
        try:
            if worker.environment == wanted and worker.alive():
                return worker
        except BaseException:
            worker.kill()
            raise
        worker.kill()
    return Worker(name, environment=environment)


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


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for waiting in _idle.values():
        for worker in waiting:
            worker.kill()  # lets go of it: it is the parent's
    _idle.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_after_fork_in_child)
