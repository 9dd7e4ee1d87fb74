"""Where candidates run: in this process, or in a worker that is started anew when one of them takes it down."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any

from hipgroupgemm import processes
from hipgroupgemm.backends.base import Backend, MatmulAlgorithm
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.verify import Outcome
from hipgroupgemm.processes import Worker, WorkerDied, WorkerTimedOut, error_text
from hipgroupgemm.tuning import session
from hipgroupgemm.tuning.session import Session, SessionError, StepResult, Task

__all__ = ["Deadlines", "Runner", "WorkerRunner", "WorkerUnavailable", "pickled"]

_RESTARTS = 16
_START_SECONDS = 120.0
_OURS_SECONDS = 600.0  # making operands and checking get at least so many seconds
_LINGER_SECONDS = 0.3
_SUSPECTS = 3
_STRIKES = 2
_SLOW = 10.0  # preparing (compiling), operands and checking may take so many times longer than a run
_LEAST_RUN, _LEAST_SLOW = 5.0, 60.0  # seconds that a step gets although the time limit is near

_Request = tuple[Any, ...]
_LOST = (WorkerDied, WorkerTimedOut, SessionError)
_MODULE = session.__name__


class WorkerUnavailable(RuntimeError):
    """No worker can be started, or none opens the session."""


class Deadlines:
    """How long steps may take.

    Args:
        step_timeout: seconds of one run of a candidate; its preparation may take ten times that.
        time_limit: seconds of the whole tuning from now, None for no limit.
    """

    def __init__(self, step_timeout: float, time_limit: float | None) -> None:
        self._step, self._whole = step_timeout, float("inf") if time_limit is None else time_limit
        self._until = time.monotonic() + self._whole
        self.found = False
        """Whether there is what the time limit waits for: first a right candidate, then one with a time."""

    def over(self) -> bool:
        """Whether the time limit has come, and there is what it waits for."""
        return self.found and self.left() <= 0

    def left(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return self._until - time.monotonic()

    def of_steps(self) -> dict[str, float]:
        """Seconds that a step of each name may take from now on."""
        left = self.left() if self.found else self._whole  # while the limit waits, one candidate may take all of it
        run, slow = max(left, _LEAST_RUN), max(left, _LEAST_SLOW)
        return {
            "start": _START_SECONDS,
            "operands": self._full("operands"),
            "prepare": min(self._full("prepare"), slow),
            "run": min(self._full("run"), run),
            "check": min(self._full("check"), slow),
            "close": min(self._full("close"), run),
        }

    def _full(self, step: str) -> float:
        """Seconds that a step may take without a time limit."""
        if step in ("run", "close"):
            return self._step
        return _SLOW * self._step if step == "prepare" else max(_SLOW * self._step, _OURS_SECONDS)

    def shortened(self, step: str, seconds: float) -> bool:
        """Whether the time limit, and not the candidate's own deadline, ended a step that was given `seconds`."""
        return step in ("prepare", "run", "check") and seconds < self._full(step)


class Runner:
    """Runs a session's steps, here in this process, where a candidate that crashes or hangs takes it along.

    What a candidate does wrong is in the outcome and never raised.

    Args:
        task: what for. backends: those of candidates, by name.

    Attributes:
        roofline: the device's, or None. remark: what is to be known of times that are taken here, or "".
        notes: what happened that a person should know of.
        record_failure: is told what a candidate does wrong out of its turn: while it is closed, or behind its own back.

    Raises:
        SessionError: no harness, or no memory.
    """

    roofline: Roofline | None = None
    remark: str = ""
    record_failure: Callable[[MatmulAlgorithm, Outcome], object] = staticmethod(lambda algorithm, outcome: None)

    def __init__(self, task: Task, backends: dict[str, Backend]) -> None:
        self.notes: list[str] = []
        self._session = Session(task, backends)
        self.roofline, self.remark = self._session.roofline, self._session.remark
        self._broken = ""

    def _step(self, kind: str, algorithm: MatmulAlgorithm, *arguments: Any) -> Outcome:
        """The outcome of a step with a candidate."""
        if self._broken:
            return Outcome("untimed", f"the device was not usable any more: {self._broken}")
        try:
            result = self._session.step(kind, algorithm, *arguments)
        except SessionError as error:  # whoever has caused it: in this process there is no telling
            self._broken = self._session.broken()
            return Outcome("untimed", str(error))
        self._broken = result.broken
        if self._broken:
            self.notes.append(f"the device cannot be used in this process any more: {self._broken}")
        return self._taken(result)

    def _taken(self, result: StepResult) -> Outcome:
        for algorithm, reason in result.faults:
            self.record_failure(algorithm, Outcome("failed", reason))
        return result.outcome

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """Checks a candidate on a size set."""
        return self._step("check", algorithm, index)

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, checked: bool) -> Outcome:
        """Times one call of a candidate, see `Session.time`."""
        return self._step("time", algorithm, sample, turn, checked)

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """Frees what is kept of a candidate; what it does wrong then goes to `record_failure`."""
        outcome = self._step("forget", algorithm)
        if outcome.verdict not in ("", "untimed"):
            self.record_failure(algorithm, outcome)

    def close(self, *, abruptly: bool = False) -> None:
        """Ends the session; abruptly, where it may be in the midst of a step."""
        del abruptly
        self._session.close()


class WorkerRunner(Runner):
    """In a worker process, which is there from `open` to `close`.

    What ends a worker is held against the candidate that ran just then only if it ends one in which it runs alone as well: another may
    have left a timer, a thread or spoilt memory behind.

    Args:
        task: what for. backends: pickled backends by name, those that are not found by their names. deadlines: of the steps.
    """

    def __init__(self, task: Task, backends: dict[str, bytes], deadlines: Deadlines) -> None:
        self.notes = []
        self._task, self._pickled, self._deadlines = task, backends, deadlines
        self._worker: Worker | None = None
        self._fresh = False
        self._losses = 0
        self._given_up = ""
        self._ran: dict[tuple[str, int, str], list[_Request]] = {}
        """What candidates have done in this worker, who ran last in the end."""
        self._strikes: collections.Counter[tuple[str, int, str]] = collections.Counter()
        self.refused: dict[str, str] = {}
        """Backends that the worker cannot take over, by name, and why."""

    # ---- the worker --------------------------------------------------------------------------------------------------------

    def open(self, *, fresh: bool = False) -> None:
        """A worker with the session open; a fresh one, or one that may have served other sessions.

        Raises:
            WorkerUnavailable: no worker starts or opens the session. SessionError: the session cannot be (no memory, say).
        """
        try:
            for attempt in (0, 1):
                self._drop()
                try:
                    self._worker = processes.acquire(str(self._task.device), fresh=fresh or bool(self._pickled))
                except OSError as error:
                    raise WorkerUnavailable(f"the worker process cannot be started: {error}") from error
                self._fresh = self._worker.calls == 0
                try:
                    self.refused, self.roofline, self.remark = self._call("open_session", self._task, self._pickled)
                    return
                except (WorkerDied, WorkerTimedOut) as error:
                    if attempt or self._fresh:  # an idle one may have ended just then
                        raise WorkerUnavailable(f"the worker process did not get ready: {error}") from error
        except BaseException:
            self._drop()
            raise

    def _call(self, function: str, *arguments: Any) -> Any:
        """What a function of `session` returns in the worker. Raises SessionError, WorkerDied, WorkerTimedOut."""
        if self._worker is None:
            raise SessionError("there is no worker")
        return self._worker.call(f"{_MODULE}:{function}", *arguments, deadlines=self._deadlines.of_steps())

    def _do(self, request: _Request) -> Outcome:
        """A step in the worker. Raises as `_call`; a device that is unusable afterwards is an end of the worker."""
        result: StepResult = self._call("session_step", *request)
        outcome = self._taken(result)
        if result.broken:
            self._drop()
            reason = f"{outcome.reason}; " if outcome.reason else ""
            raise WorkerDied(f"{reason}the device was unusable afterwards: {result.broken}", step="run")
        return outcome

    def _drop(self) -> None:
        self._ran = {}
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def _step(self, kind: str, algorithm: MatmulAlgorithm, *arguments: Any) -> Outcome:
        request = (kind, algorithm, *arguments)
        if kind == "forget" and (self._worker is None or algorithm.key not in self._ran):
            return Outcome()
        while True:
            if self._worker is None:
                self._again()
            if self._given_up:
                return Outcome("untimed", self._given_up)
            alone = self._fresh and self._ran.keys() <= {algorithm.key}
            past = self._ran.pop(algorithm.key, [])
            others = [requests[-1] for requests in self._ran.values()]
            self._ran[algorithm.key] = past
            try:
                outcome = self._do(request)
            except _LOST as error:
                self._drop()
                self._losses += 1
                closed = getattr(error, "detail", None)
                if closed is not None and closed.key != algorithm.key:  # it had to make room: the step itself is still to come
                    self.record_failure(closed, self._verdict(request, error))
                    continue
                if alone or (isinstance(error, WorkerTimedOut) and self._deadlines.shortened(error.step, error.seconds)):
                    return self._verdict(request, error)
                return self._alone(request, past, others, error)
            past.append(request)
            if outcome.verdict == "failed" and algorithm.backend in self._pickled:
                self._drop()  # built-in backends clean up behind themselves; of others nobody knows
            return outcome

    def _alone(self, request: _Request, past: list[_Request], others: list[_Request], error: Exception) -> Outcome:
        """What comes of a step that a worker was lost in when all that its candidate did is done again in a fresh worker."""
        key = request[1].key
        try:
            self.open(fresh=True)
        except (WorkerUnavailable, SessionError) as lost:
            self._give_up(f"no worker could be had any more: {lost}")
            return Outcome("untimed", self._given_up)
        done = self._ran[key] = []
        try:
            for one in (*past, request):
                outcome = self._do(one)
                done.append(one)
                if outcome.verdict:
                    return outcome
        except _LOST as again:
            self._drop()
            return self._verdict(request, again)
        self._strikes[key] += getattr(error, "step", "start") != "start"  # else it was lost before
        found = isinstance(error, SessionError) or any(self._suspect(other) for other in reversed(others[-_SUSPECTS:]))
        if self._strikes[key] >= _STRIKES and not found:
            reason = self._verdict(request, error).reason
            return Outcome("untimed", f"not when it ran alone, but {self._strikes[key]} times among others, workers were lost: {reason}")
        return outcome

    def _suspect(self, request: _Request) -> bool:
        """Whether a candidate that ran before ends its worker after it has returned."""
        with contextlib.suppress(WorkerUnavailable, SessionError):
            self.open(fresh=True)
            self._ran[request[1].key] = [request]
            try:
                self._do(request)
                self._call("linger", _LINGER_SECONDS)
            except (WorkerDied, WorkerTimedOut) as error:
                self._drop()
                outcome = self._verdict(request, error)
                self.record_failure(request[1], dataclasses.replace(outcome, reason=f"some time after it had returned: {outcome.reason}"))
                return True
        return False

    def _verdict(self, request: _Request, error: Exception) -> Outcome:
        """What a lost worker says of the candidate that is to blame."""
        if not isinstance(error, (WorkerDied, WorkerTimedOut)):
            return Outcome("failed", str(error))
        doing = self._doing(request, error.step)
        tail = f"\n{error.tail}" if error.tail else ""
        if isinstance(error, WorkerDied):
            return Outcome("crashed", f"{doing}: {error.how}{tail}")
        if self._deadlines.shortened(error.step, error.seconds):
            return Outcome("untimed", f"the time limit came {doing}")
        return Outcome("timed out", f"{doing}: not done after {error.seconds:.3g} s, the worker process was killed{tail}")

    def _doing(self, request: _Request, step: str) -> str:
        """What the candidate was doing, in words."""
        if step == "close":
            return "while it was closed"
        what = {"run": "while it ran", "prepare": "while it was prepared", "check": "while its result was checked"}.get(
            step, f"in {step!r}"
        )
        return f"{what} on {self._task.sets[request[2]].describe()}" if len(request) > 2 else what

    def _again(self) -> None:
        """A fresh worker for the candidates that are left, a bounded number of times."""
        if self._losses > _RESTARTS and not self._given_up:
            self._give_up(f"{_RESTARTS} workers were lost to other candidates; give this one's name in algorithms= to tune it alone")
        if not self._given_up:
            try:
                self.open(fresh=True)
            except (WorkerUnavailable, SessionError) as error:
                self._give_up(f"no worker could be had any more: {error}")

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self.notes.append(f"tuning stopped: {reason}")

    def close(self, *, abruptly: bool = False) -> None:
        """See `Runner.close`. A worker goes back to the pool, but where the end is abrupt or it has run others' code, which may change."""
        try:
            if self._worker is not None and not abruptly and not self._pickled:
                with contextlib.suppress(*_LOST):
                    self._call("close_session")
                    processes.release(self._worker)
                    self._worker = None  # not before: an interrupt between the two had better kill it
        finally:
            self._drop()


def pickled(backends: dict[str, Backend]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Backends pickled by name, and why others cannot be."""
    done, refused = {}, {}
    for name, backend in backends.items():
        try:
            done[name] = pickle.dumps(backend, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            refused[name] = error_text(error)
    return done, refused
