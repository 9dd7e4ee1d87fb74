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

from hipgroupgemm.tuning.worker import HEADER
from hipgroupgemm.views import Device

__all__ = ["Child", "ChildDied", "ChildHung", "acquire", "close_workers", "release"]

_START = "import sys; sys.path[:] = {path!r}; from hipgroupgemm.tuning.worker import main; main()"
_OWN = re.compile(r"^Extension modules: |^  File (\"<string>\"|\".*/hipgroupgemm/tuning/)|^  <")
_POLL_SECONDS = 0.25
_TAIL = 1 << 14
_WATCH = ("HIP", "CUDA", "ROCR", "HSA", "AMD", "TRITON", "LD_", "NVIDIA", "GPU_", "OMP_", "OPENBLAS_", "MKL_")
"""Beginnings of environment variables that a worker started under others must not be used with."""
_STORE = "HIPGROUPGEMM_TUNING_STORE"  # workers have nothing to do with it


class ChildDied(Exception):
    """The worker ended in the step of that name; `how` says with what exit code or signal, `tail` what it wrote last."""

    def __init__(self, how: str, tail: str = "") -> None:
        super().__init__(f"{how}\n{tail}".strip())
        self.how, self.tail, self.step = how, tail, "start"


class ChildHung(Exception):
    """The step of that name took longer than the seconds it was given; `tail` is what the worker wrote last."""

    def __init__(self, step: str, seconds: float, tail: str) -> None:
        super().__init__(f"{step}: not done after {seconds:.3g} s")
        self.step, self.seconds, self.tail = step, seconds, tail


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


class Child:
    """One worker process, in a session (and process group) of its own. Not for several threads at once.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError(f"sys.executable={sys.executable!r} is no Python interpreter that could be started again")
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("the worker has no pipes")
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._replies, False)
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN | select.POLLHUP)
        self._buffer = b""
        self._tail = _Tail(self._process.stderr)
        self.environment = _environment()

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
            ChildDied, ChildHung: it ended, or a step took too long. It is killed.
        """
        self._tail.forget()
        step = "start"
        try:
            self._send((limits, request))
        except OSError:  # it has ended
            raise self._died() from None
        while True:
            try:
                reply = self._receive(time.monotonic() + limits[step])
            except ChildDied as error:
                error.step = step
                raise
            if reply is None:
                raise ChildHung(step, limits[step], self.kill())
            if reply[0] != "at":
                return reply
            step = reply[1]

    def _send(self, value: Any) -> None:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(HEADER.pack(len(data)) + data)
        while view:
            view = view[os.write(self._requests, view) :]

    def _receive(self, until: float) -> tuple[Any, ...] | None:
        """The next reply; None when it is not there in time."""
        while True:
            if len(self._buffer) >= HEADER.size:
                (length,) = HEADER.unpack(self._buffer[: HEADER.size])
                if len(self._buffer) >= HEADER.size + length:
                    data = self._buffer[HEADER.size : HEADER.size + length]
                    self._buffer = self._buffer[HEADER.size + length :]
                    reply: tuple[Any, ...] = pickle.loads(data)
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

    def _died(self) -> ChildDied:
        try:
            how = _how(self._process.wait(2))
        except subprocess.TimeoutExpired:
            how = "the worker process closed its pipes without ending"
        return ChildDied(how, self.kill())

    def kill(self) -> str:
        """Kills the worker and all that it has started, and returns what it wrote last. Doing so twice is fine."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        tail = self._tail.text()
        self._close_pipes()
        return tail

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def abandon(self) -> None:
        """Lets go of it in a process that was forked: it is the parent's."""
        self._close_pipes()
        self._process.returncode = 0  # or Popen complains that its child still runs


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
    """What a worker was started under: another import path or other devices need another worker."""
    watched = [(name, value) for name, value in os.environ.items() if name.startswith(_WATCH) and name != _STORE]
    return list(sys.path), sorted(watched)


def acquire(device: Device) -> tuple[Child, bool]:
    """A worker for a device, and whether it has just been started: an idle one where there is one. It is the caller's until `release`.

    Starting takes about a second, and the first use of a GPU as long again, so that a sweep of many problems should find its worker again.
    """
    now = _environment()
    while True:
        with _lock:
            waiting = _idle.get(device)
            child = waiting.pop() if waiting else None
        if child is None:
            return Child(), True
        if child.alive() and child.environment == now:
            return child, False
        child.kill()


def release(device: Device, child: Child) -> None:
    """Gives a healthy worker back. It waits for the next `acquire`, and ends by itself when none comes for half a minute."""
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
