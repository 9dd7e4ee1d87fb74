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
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.verify import Outcome
from hipgroupgemm.processes import Worker, WorkerDied, WorkerTimedOut
from hipgroupgemm.tuning import session
from hipgroupgemm.tuning.session import Session, SessionError, StepResult, Task

__all__ = ["Deadlines", "Runner", "WorkerRunner"]

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

_Request = tuple[Any, ...]
_LOST = (WorkerDied, WorkerTimedOut, SessionError)


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
    _given_up: str = ""

    def __init__(self, task: Task, backends: Mapping[str, Backend]) -> None:
        self.notes: list[str] = []
        self._session = Session(task, backends)
        self.roofline, self.remark = self._session.roofline, self._session.remark

    def _step(self, kind: str, algorithm: MatmulAlgorithm, *arguments: Any) -> Outcome:
        """The outcome of a step with a candidate."""
        if self._given_up:
            return Outcome("untimed", self._given_up)
        try:
            result = self._session.step(kind, algorithm, *arguments)
        except SessionError as error:  # whoever has caused it: in this process there is no telling
            result = StepResult(Outcome("untimed", str(error)), self._session.broken(), [])
        if result.broken:
            self._give_up(f"the device cannot be used in this process any more: {result.broken}")
        return self._taken(result)

    def _taken(self, result: StepResult) -> Outcome:
        for algorithm, reason in result.faults:
            self.record_failure(algorithm, Outcome("failed", reason))
        return result.outcome

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self.notes.append(f"tuning stopped: {reason}")

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
        task: what for. backends: those that a worker does not find by their names. deadlines: of the steps.
    """

    def __init__(self, task: Task, backends: Mapping[str, Backend], deadlines: Deadlines) -> None:
        self.notes = []
        self._task, self._backends, self._deadlines = task, backends, deadlines
        self._worker: Worker | None = None
        self._fresh = False
        self._losses = 0
        self._ran: dict[tuple[str, int, str], list[_Request]] = {}  # what candidates have done in this worker, who ran last in the end
        self._strikes: collections.Counter[tuple[str, int, str]] = collections.Counter()

    # ---- the worker --------------------------------------------------------------------------------------------------------

    def open(self, *, fresh: bool = False) -> None:
        """A worker with the session open; a fresh one, or one that may have served other sessions.

        Raises:
            SessionError: no worker starts, or none can open the session (no memory, say).
        """
        self._drop()
        try:
            self._worker = processes.acquire(str(self._task.device), fresh=fresh or bool(self._backends))
            self._fresh = self._worker.calls == 0
            self.roofline, self.remark = self._call("open_session", self._task, self._backends)
        except Exception as error:
            self._drop()
            if isinstance(error, SessionError):
                raise
            if isinstance(error, OSError):
                raise SessionError(f"the worker process cannot be started: {error}") from error
            if not self._fresh:  # an idle one may have ended just then
                return self.open(fresh=True)
            raise SessionError(f"the worker process did not get ready: {error}") from error

    def _call(self, function: str, *arguments: Any) -> Any:
        """What a function of `session` returns in the worker. Raises SessionError, WorkerDied, WorkerTimedOut."""
        assert self._worker is not None
        return self._worker.call(f"{session.__name__}:{function}", *arguments, deadlines=self._deadlines.of_steps())

    def _drop(self) -> None:
        self._ran = {}
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _reopen(self) -> None:
        """A fresh worker, a bounded number of times."""
        try:
            if self._losses > _RESTARTS:
                raise SessionError(f"{_RESTARTS} workers were lost to other candidates; name this one in algorithms= to tune it alone")
            self.open(fresh=True)
        except SessionError as error:
            self._give_up(str(error))

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def _do(self, request: _Request) -> Outcome:
        """A step in the worker. Raises as `_call`; a device that is unusable afterwards is an end of the worker."""
        algorithm = request[1]
        past = self._ran.pop(algorithm.key, [])
        self._ran[algorithm.key] = past
        result: StepResult = self._call("session_step", *request)
        outcome = self._taken(result)
        if result.broken:
            reason = f"{outcome.reason}; " if outcome.reason else ""
            raise WorkerDied(f"{reason}the device was unusable afterwards: {result.broken}", step="run")
        past.append(request)
        if outcome.verdict == "failed" and algorithm.backend in self._backends:
            self._drop()  # built-in backends clean up behind themselves; of others nobody knows
        return outcome

    def _step(self, kind: str, algorithm: MatmulAlgorithm, *arguments: Any) -> Outcome:
        request = (kind, algorithm, *arguments)
        if kind == "forget" and (self._worker is None or algorithm.key not in self._ran):
            return Outcome()
        while True:
            if self._worker is None and not self._given_up:
                self._reopen()
            if self._given_up:
                return Outcome("untimed", self._given_up)
            past = list(self._ran.get(algorithm.key, ()))
            others = [requests[-1] for key, requests in self._ran.items() if key != algorithm.key]
            alone = self._fresh and not others
            try:
                return self._do(request)
            except _LOST as error:
                self._drop()
                self._losses += 1
                closed = getattr(error, "detail", None)
                if closed is not None and closed.key != algorithm.key:  # it had to make room: the step itself is still to come
                    self.record_failure(closed, self._verdict(request, error))
                    continue
                if alone or self._deadlines.shortened(error):
                    return self._verdict(request, error)
                return self._alone([*past, request], others, error)

    def _replay(self, requests: Sequence[_Request]) -> Outcome:
        """What comes of steps in a fresh worker: of the last one, or of the first that is not right. Raises as `_do`."""
        self._drop()
        self._reopen()
        if self._given_up:
            raise SessionError(self._given_up)
        for request in requests:
            outcome = self._do(request)
            if outcome.verdict:
                break
        return outcome

    def _alone(self, requests: Sequence[_Request], others: Sequence[_Request], error: Exception) -> Outcome:
        """What comes of a step that a worker was lost in when all that its candidate did is done again in a fresh worker."""
        key = requests[-1][1].key
        try:
            outcome = self._replay(requests)
        except _LOST as again:
            self._drop()
            return Outcome("untimed", self._given_up) if self._given_up else self._verdict(requests[-1], again)
        if isinstance(error, SessionError) or any(self._suspect(other) for other in reversed(others[-_SUSPECTS:])):
            return outcome
        self._strikes[key] += getattr(error, "step", "") != "start"  # else it was lost before
        if self._strikes[key] >= _STRIKES:
            reason = self._verdict(requests[-1], error).reason
            return Outcome("untimed", f"not when it ran alone, but {self._strikes[key]} times among others, workers were lost: {reason}")
        return outcome

    def _suspect(self, request: _Request) -> bool:
        """Whether a candidate that ran before ends its worker after it has returned."""
        try:
            self._replay([request])
            if self._worker is not None:
                self._worker.call("time:sleep", _LINGER_SECONDS, deadlines=self._deadlines.of_steps())
        except SessionError:
            return False
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
        doing = f"while {_DOING[error.step]}" if error.step in _DOING else f"in {error.step!r}"
        if len(request) > 2 and error.step != "close":
            doing += f" on {self._task.sets[request[2]].describe()}"
        if isinstance(error, WorkerDied):
            return Outcome("crashed", f"{doing}: {error}")
        if self._deadlines.shortened(error):
            return Outcome("untimed", f"the time limit came {doing}")
        return Outcome("timed out", f"{doing}: not done after {error.seconds:.3g} s, the worker process was killed\n{error.tail}".strip())

    def close(self, *, abruptly: bool = False) -> None:
        """See `Runner.close`. A worker goes back to the pool, but where the end is abrupt or it has run others' code, which may change."""
        try:
            if self._worker is not None and not abruptly and not self._backends:
                with contextlib.suppress(*_LOST):
                    self._call("close_session")
                    processes.release(self._worker)
                    self._worker = None  # not before: an interrupt between the two had better kill it
        finally:
            self._drop()
