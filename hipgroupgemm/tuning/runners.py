"""Where candidates run: in this process, or in a worker that is started anew when one of them takes it down."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hipgroupgemm import processes
from hipgroupgemm.backends.base import Backend, MatmulAlgorithm
from hipgroupgemm.measure.check import Outcome
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.processes import Worker, WorkerDied, WorkerTimedOut
from hipgroupgemm.tuning import session
from hipgroupgemm.tuning.session import Session, SessionError, StepResult, Task

__all__ = ["Deadlines", "Runner"]

_RESTARTS = 16
_LINGER_SECONDS = 0.3
_SUSPECTS = 3
_STRIKES = 2
_START_SECONDS = 120.0
_OURS_SECONDS = 600.0  # making operands and checking get at least so many seconds
_SLOW = 10.0  # preparing (compiling), operands and checking may take so many times longer than a run
_LEAST = {"prepare": 60.0, "run": 5.0, "check": 60.0, "close": 5.0}  # seconds that a step gets although the time limit is near
_DOING = {
    "run": "while it ran",
    "prepare": "while it was prepared",
    "check": "while its result was checked",
    "close": "while it was closed",
}

_Key = tuple[str, int, str]
_Request = tuple[Any, ...]  # a step's name, the candidate, what else the session's method takes
_LOST = (WorkerDied, WorkerTimedOut, SessionError)
Blame = Callable[[MatmulAlgorithm, Outcome], object]


class Deadlines:
    """How long steps may take.

    Args:
        step_timeout: seconds of one run of a candidate; its preparation may take ten times that.
        time_limit: seconds of the whole tuning from now, infinite for no limit.
    """

    def __init__(self, step_timeout: float, time_limit: float = float("inf")) -> None:
        slow = _SLOW * step_timeout
        ours = max(slow, _OURS_SECONDS)
        self._full = {"operands": ours, "prepare": slow, "run": step_timeout, "check": ours, "close": step_timeout}
        self.time_limit, self._until = time_limit, time.monotonic() + time_limit
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
        left = self.left() if self.found else self.time_limit  # while the limit waits, one candidate may take all of it
        steps = {step: min(full, max(left, _LEAST.get(step, full))) for step, full in self._full.items()}
        return {"start": _START_SECONDS, **steps}

    def shortened(self, error: Exception) -> bool:
        """Whether the time limit, and not the candidate's own deadline, ended its step."""
        if not isinstance(error, WorkerTimedOut):
            return False
        return error.step in ("prepare", "run", "check") and error.seconds < self._full[error.step]


class Runner:
    """Runs a session's steps, in a worker or in this process, where a candidate that crashes or hangs takes it along.

    What a candidate does wrong is in the outcome and never raised. What ends a worker is held against the candidate that ran just then only
    if it ends one in which it runs alone as well: another may have left a timer, a thread or spoilt memory behind.

    Args:
        task: what for. backends: those of candidates that are not found by their names.
        blame: is told what a candidate does wrong out of its turn: while it is closed, or behind its own back.
        deadlines: of steps in a worker. isolate: whether there is one.

    Attributes:
        roofline: the device's, or None. remark: what is to be known of times that are taken here, or "".
        notes: what happened that a person should know of.

    Raises:
        SessionError: no harness, no memory, or no worker.
    """

    def __init__(self, task: Task, backends: Mapping[str, Backend], blame: Blame, deadlines: Deadlines, *, isolate: bool) -> None:
        self.roofline: Roofline | None = None
        self.remark, self.notes = "", list[str]()
        self._task, self._backends, self._blame, self._deadlines = task, backends, blame, deadlines
        self._worker: Worker | None = None
        self._session = None if isolate else Session(task, backends)
        self._fresh = False  # the worker has served nobody else
        self._given_up, self._losses = "", 0
        self._ran: dict[_Key, list[_Request]] = {}  # what candidates have done in this worker, who ran last in the end
        self._strikes: collections.Counter[_Key] = collections.Counter()
        if self._session is None:
            self._open(fresh=False)
        else:
            self.roofline, self.remark = self._session.roofline, self._session.remark

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """Checks a candidate on a size set."""
        return self._step("check", algorithm, index)

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, checked: bool) -> Outcome:
        """Times one call of a candidate, see `Session.time`."""
        return self._step("time", algorithm, sample, turn, checked)

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """Frees what is kept of a candidate; `blame` is told what it does wrong then."""
        if algorithm.key in self._ran:
            outcome = self._step("forget", algorithm)
            if outcome.verdict not in ("", "untimed"):
                self._blame(algorithm, outcome)

    def close(self, *, abruptly: bool = False) -> None:
        """Ends the session; abruptly, where it may be in the midst of a step. A worker goes back to the pool, but where the end is abrupt
        or it has run others' code, which may change."""
        try:
            if self._session is not None:
                self._session.close()
            elif self._worker is not None and not abruptly and not self._backends:
                with contextlib.suppress(*_LOST):
                    self._call("close_session")
                    processes.release(self._worker)
                    self._worker = None  # not before: an interrupt between the two had better kill it
        finally:
            self._drop()

    # ---- the worker --------------------------------------------------------------------------------------------------------

    def _open(self, *, fresh: bool) -> None:
        """A worker with the session open: a fresh one, or one that may have served other sessions."""
        self._drop()
        try:
            self._worker = processes.acquire(str(self._task.device), fresh=fresh or bool(self._backends))
            self._fresh = self._worker.calls == 0
            self.roofline, self.remark = self._call("open_session", self._task, self._backends)
        except BaseException as error:
            self._drop()
            if isinstance(error, SessionError) or not isinstance(error, Exception):
                raise
            if isinstance(error, OSError):
                raise SessionError(f"the worker process cannot be started: {error}") from error
            if self._fresh:
                raise SessionError(f"the worker process did not get ready: {error}") from error
            self._open(fresh=True)  # an idle one may have ended just then

    def _call(self, function: str, *arguments: Any) -> Any:
        """What a function of `session` returns in the worker. Raises SessionError, WorkerDied, WorkerTimedOut."""
        assert self._worker is not None
        return self._worker.call(f"{session.__name__}:{function}", *arguments, deadlines=self._deadlines.of_steps())

    def _drop(self) -> None:
        self._ran = {}
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _ready(self) -> bool:
        """Whether there is a session, after a lost worker in a fresh one, a bounded number of times."""
        if self._session is None and self._worker is None and not self._given_up:
            try:
                if self._losses > _RESTARTS:
                    raise SessionError(f"{_RESTARTS} workers were lost to other candidates; name this one in algorithms= to tune it alone")
                self._open(fresh=True)
            except SessionError as error:
                self._give_up(str(error))
        return not self._given_up

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self.notes.append(f"tuning stopped: {reason}")

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def _do(self, request: _Request) -> Outcome:
        """A step's outcome. Raises one of `_LOST` where a worker is lost in it, or cannot use the device afterwards."""
        if not self._ready():
            return Outcome("untimed", self._given_up)
        algorithm = request[1]
        self._ran[algorithm.key] = past = self._ran.pop(algorithm.key, [])
        result: StepResult = self._here(request) if self._session is not None else self._call("session_step", *request)
        outcome = result.outcome
        for one, reason in result.faults:
            self._blame(one, Outcome("failed", reason))
        if result.broken and self._session is not None:
            self._give_up(f"the device cannot be used in this process any more: {result.broken}")
        elif result.broken:
            reason = f"{outcome.reason}; " if outcome.reason else ""
            raise WorkerDied(f"{reason}the device was unusable afterwards: {result.broken}", step="run")
        past.append(request)
        if outcome.verdict == "failed" and algorithm.backend in self._backends:
            self._drop()  # built-in backends clean up behind themselves; of others nobody knows
        return outcome

    def _here(self, request: _Request) -> StepResult:
        assert self._session is not None
        try:
            return self._session.step(*request)
        except SessionError as error:  # whoever has caused it: in this process there is no telling
            return StepResult(Outcome("untimed", str(error)), self._session.broken(), [])

    def _step(self, *request: Any) -> Outcome:
        """What is to be held against the candidate of a step."""
        key = request[1].key
        while True:
            past = [*self._ran.get(key, ()), request]
            others = [requests[-1] for one, requests in self._ran.items() if one != key and requests]
            alone = not others and (self._fresh or self._worker is None)
            try:
                return self._do(request)
            except _LOST as error:
                self._drop()
                self._losses += 1
                closed = getattr(error, "detail", None)
                if closed is not None and closed.key != key:  # it had to make room: the step itself is still to come
                    self._blame(closed, self._verdict(request, error))
                    continue
                first = self._verdict(request, error)
                if alone or first.verdict == "untimed":
                    return first
                outcome, lost = self._alone(past)
                if lost or self._given_up or isinstance(error, SessionError) or any(map(self._is_late, others[: -_SUSPECTS - 1 : -1])):
                    return outcome
                self._strikes[key] += error.step != "start"  # else it was lost before
                if self._strikes[key] < _STRIKES:
                    return outcome
                words = f"not when it ran alone, but {self._strikes[key]} times among others, workers were lost"
                return Outcome("untimed", f"{words}: {first.reason}")

    def _alone(self, requests: Sequence[_Request], linger: float = 0.0) -> tuple[Outcome, bool]:
        """What comes of steps in a fresh worker: of the last one, or of the first that is not right; and whether the worker was lost."""
        self._drop()
        request, outcome = requests[0], Outcome()
        try:
            for request in requests:
                outcome = self._do(request)
                if outcome.verdict:
                    break
            if self._worker is not None and linger:
                self._worker.call("time:sleep", linger, deadlines=self._deadlines.of_steps())
        except _LOST as error:
            self._drop()
            return self._verdict(request, error), True
        return outcome, False

    def _is_late(self, request: _Request) -> bool:
        """Whether a candidate ends its worker after it has returned from a step."""
        outcome, lost = self._alone([request], _LINGER_SECONDS)
        if not lost or outcome.verdict not in ("crashed", "timed out"):
            return False
        self._blame(request[1], dataclasses.replace(outcome, reason=f"some time after it had returned: {outcome.reason}"))
        return True

    def _verdict(self, request: _Request, error: Exception) -> Outcome:
        """What a lost worker says of the candidate that is to blame."""
        if not isinstance(error, (WorkerDied, WorkerTimedOut)):
            return Outcome("failed", str(error))
        doing = _DOING.get(error.step, f"in {error.step!r}")
        if len(request) > 2 and error.step != "close":
            doing += f" on {self._task.sets[request[2]].describe()}"
        if isinstance(error, WorkerDied):
            return Outcome("crashed", f"{doing}: {error}")
        if self._deadlines.shortened(error):
            return Outcome("untimed", f"the time limit came {doing}")
        return Outcome("timed out", f"{doing}: not done after {error.seconds:.3g} s, the worker process was killed\n{error.tail}".strip())
