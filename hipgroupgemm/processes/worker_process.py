"""The parent's side of the tuning worker: starting, asking, supervising and killing it, and the pool that keeps idle ones."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime.process import import_path
from hipgroupgemm.tuning.worker import HEADER

__all__ = ["Child", "WorkerDied", "WorkerTimedOut", "acquire", "close_workers", "release"]

_START = """
import os, pickle, sys
def take(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(1)
        data += part
    return data
sys.path[:] = pickle.loads(take(int.from_bytes(take(8), "little")))
from hipgroupgemm.tuning.worker import main
main()
"""  # the import path comes through the pipe: an argument is 128 KiB at the most
_OWN = re.compile(r"^Extension modules: |^  File (\"<string>\"|\".*/hipgroupgemm/tuning/)|^  <")
_POLL_SECONDS = 0.25
_TAIL = 1 << 14
_STORE = "HIPGROUPGEMM_TUNING_STORE"  # workers have nothing to do with it


class WorkerDied(Exception):
    """The worker ended in the step of that name; `how` says with what exit code or signal, `tail` what it wrote last.

    `closing` is the candidate that was closed just then, be it the one that was asked for or another that made room; else None.
    """

    def __init__(self, how: str, tail: str = "") -> None:
        super().__init__(f"{how}\n{tail}".strip())
        self.how, self.tail, self.step = how, tail, "start"
        self.closing: MatmulAlgorithm | None = None


class WorkerTimedOut(Exception):
    """The step of that name took longer than the seconds it was given; `tail` and `closing` as `WorkerDied` has them."""

    def __init__(self, step: str, seconds: float, tail: str) -> None:
        super().__init__(f"{step}: not done after {seconds:.3g} s")
        self.step, self.seconds, self.tail = step, seconds, tail
        self.closing: MatmulAlgorithm | None = None


class _Tail(threading.Thread):
    """Reads the worker's standard error and keeps its end."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True, name="hipgroupgemm-tuning-stderr")
        self._stream, self._kept = stream, b""
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                data = os.read(self._stream.fileno(), 4096)
                if not data:
                    return
                self._kept = (self._kept + data)[-_TAIL:]

    def text(self, lines: int = 12) -> str:
        """The last lines of a process that has ended, without what tells of this package's own frames; they have a moment to come."""
        self.join(3.0)
        found = self._kept.decode("utf-8", "replace").strip().splitlines()
        return "\n".join([line for line in found if line.strip() and not _OWN.search(line)][-lines:])

    def forget(self) -> None:
        """What was written so far belongs to what is over."""
        self._kept = b""


class _Process(subprocess.Popen[bytes]):
    """A process that ends with its object.

    Popen keeps the object of one that still runs, and so its pipes open: a worker whose object an interrupt drops would never end.
    """

    def __init__(self, command: list[str]) -> None:
        self.parent = os.getpid()
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)

    def end(self, seconds: float) -> None:
        """Kills it and all that it has started. It is the parent's own: a forked process leaves it alone."""
        if os.getpid() != self.parent:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            with contextlib.suppress(OSError):
                self.kill()  # it has no group of its own yet
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)

    def close_pipes(self) -> None:
        """Its input's end ends it too, where a signal could not."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __del__(self) -> None:
        if self._child_created and self.returncode is None:  # type: ignore[attr-defined]
            self.end(1.0)
            self.close_pipes()
            if os.getpid() != self.parent:
                self.returncode = 0
        super().__del__()


class Child:
    """One worker process, in a session (and process group) of its own. Not for several threads at once.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError(f"sys.executable={sys.executable!r} is no Python interpreter that could be started again")
        self.environment = _environment()
        self._unsent = _frame(self.environment[0])
        self._number = 0
        self._buffer = b""
        self._last_words: str | None = None
        self._process = _Process([sys.executable, "-c", _START])
        try:
            if self._process.stdin is None or self._process.stdout is None:
                raise OSError("the worker has no pipes")
            self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
            os.set_blocking(self._requests, False)
            os.set_blocking(self._replies, False)
            self._poll = select.poll()
            self._poll.register(self._replies, select.POLLIN | select.POLLHUP)
            self._room = select.poll()
            self._room.register(self._requests, select.POLLOUT | select.POLLHUP)
            self._tail = _Tail(self._process.stderr)
        except BaseException:
            self._process.end(1.0)
            self._process.close_pipes()
            raise

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's as well."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, request: tuple[Any, ...], limits: dict[str, float]) -> tuple[Any, ...]:
        """Sends a request and waits for its reply.

        Args:
            request: what `worker` understands.
            limits: how many seconds a step of a name may take, from when the worker tells that it begins; "start" comes first.

        Raises:
            WorkerDied, WorkerTimedOut: it ended, or a step took too long. It is killed, as it is when this is interrupted.
        """
        try:
            return self._ask(request, limits)
        except BaseException:
            self.kill()
            raise

    def _ask(self, request: tuple[Any, ...], limits: dict[str, float]) -> tuple[Any, ...]:
        self._number += 1
        self._tail.forget()
        step, closing = "start", None
        self._unsent += _frame((self._number, limits, request))
        try:
            self._send(step, limits[step])
            while True:
                reply = self._receive(time.monotonic() + limits[step])
                if reply is None:
                    raise WorkerTimedOut(step, limits[step], self.kill())
                if reply[:2] != (self._number, self._process.pid):  # a copy of the worker, say: nothing that it says can be relied on
                    raise WorkerDied("what the worker process sent answers another request", self.kill())
                if reply[2] != "at":
                    return reply[2:]
                step, closing = reply[3:]
        except (WorkerDied, WorkerTimedOut) as error:
            error.step, error.closing = step, closing
            raise

    def _send(self, step: str, seconds: float) -> None:
        """Writes what is unsent. A worker that never gets to read it is one that hangs."""
        view, until = memoryview(self._unsent), time.monotonic() + seconds
        try:
            while view:
                if self._room.poll(1000 * _POLL_SECONDS):
                    view = view[os.write(self._requests, view) :]
                elif time.monotonic() > until:
                    raise WorkerTimedOut(step, seconds, self.kill())
        except OSError:  # it has ended
            raise self._died() from None
        self._unsent = b""

    def _receive(self, until: float) -> tuple[Any, ...] | None:
        """The next reply; None when it is not there in time."""
        while True:
            if len(self._buffer) >= HEADER.size:
                (length,) = HEADER.unpack(self._buffer[: HEADER.size])
                if len(self._buffer) >= HEADER.size + length:
                    data = self._buffer[HEADER.size : HEADER.size + length]
                    self._buffer = self._buffer[HEADER.size + length :]
                    try:
                        reply: tuple[Any, ...] = pickle.loads(data)
                    except Exception as error:
                        raise WorkerDied(f"what the worker process sent cannot be read: {type(error).__name__}", self.kill()) from error
                    return reply
            left = until - time.monotonic()
            if left <= 0:
                return None
            if not self._poll.poll(1000 * min(left, _POLL_SECONDS)):
                if self._process.poll() is not None:  # its pipes may live on in what it has started
                    raise self._died()
                continue
            try:
                data = os.read(self._replies, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                raise self._died()
            self._buffer += data

    def _died(self) -> WorkerDied:
        try:
            how = _how(self._process.wait(2))
        except subprocess.TimeoutExpired:
            how = "the worker process closed its pipes without ending"
        return WorkerDied(how, self.kill())

    def kill(self) -> str:
        """Kills the worker and all that it has started, and returns what it wrote last. Doing so twice is fine."""
        if self._last_words is None:
            self._process.end(10.0)
            tail = self._tail.text()
            self._process.close_pipes()
            self._last_words = tail
        return self._last_words

    def abandon(self) -> None:
        """Lets go of it in a process that was forked: it is the parent's."""
        self._process.close_pipes()
        self._process.returncode = 0  # or Popen complains that its child still runs


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


def _how(code: int) -> str:
    if code >= 0:
        return f"the worker process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the worker process was killed by {name}"


# ---- the pool ------------------------------------------------------------------------------------------------------------------

_idle: dict[Device, list[Child]] = {}
_lock = threading.Lock()


def _environment() -> tuple[list[str], list[tuple[str, str]]]:
    """What a worker is started under, its import path and variables: with another one it would run something else."""
    return import_path(), sorted((name, value) for name, value in os.environ.items() if name != _STORE)


def acquire(device: Device, *, fresh: bool = False) -> tuple[Child, bool]:
    """A worker for a device, and whether it has just been started: an idle one where there is one. It is the caller's until `release`.

    Starting takes about a second, and the first use of a GPU as long again, so that a sweep of many problems should find its worker again.
    """
    now = _environment()
    while not fresh:
        child = None
        try:
            with _lock:
                waiting = _idle.get(device)
                child = waiting.pop() if waiting else None
            if child is None:
                break
            if child.environment == now and child.alive():
                return child, False
            child.kill()
        except BaseException:
            if child is not None:
                child.kill()
            raise
    return Child(), True


def release(device: Device, child: Child) -> None:
    """Gives a healthy worker back. It waits for the next `acquire`, and ends by itself when none comes for half a minute.

    It has run built-in backends only: others' code may be another by the next time.
    """
    with _lock:
        _idle.setdefault(device, []).append(child)


def close_workers() -> None:
    """Ends all idle workers at once: they hold a device's context, some hundred MiB of its memory."""
    with _lock:
        children = [child for waiting in _idle.values() for child in waiting]
        _idle.clear()
    for child in children:
        child.kill()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for waiting in _idle.values():
        for child in waiting:
            child.abandon()
    _idle.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_after_fork_in_child)
