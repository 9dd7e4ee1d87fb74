"""Where candidates run: in this process, or in a worker that is started anew when one of them takes it down."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any

from hipgroupgemm.backends.base import Backend, MatmulAlgorithm
from hipgroupgemm.measure.verify import Outcome
from hipgroupgemm.processes import worker_process as child
from hipgroupgemm.tuning.session import Session, SessionError, Task, error_text

__all__ = ["WorkerRunner", "Runner", "LocalRunner", "Patience", "WorkerUnavailable", "pickled"]

_RESTARTS = 16
_START_SECONDS = 120.0
_OURS_SECONDS = 600.0  # making operands and judging take at least so many seconds to hang
_LINGER_SECONDS = 0.3
_SUSPECTS = 3
_STRIKES = 2
_SLOW = 10.0  # preparing (compiling), operands and judging may take so many times longer than a run
_LEAST_RUN, _LEAST_SLOW = 5.0, 60.0  # seconds that a step gets although the time limit is near


_Request = tuple[Any, ...]
_LOST = (child.WorkerDied, child.WorkerTimedOut, SessionError)


class WorkerUnavailable(RuntimeError):
    """No worker can be started, or none opens the session."""


class Patience:
    """How long steps may take.

    Args:
        step_timeout: seconds of one run of a candidate; its preparation may take ten times that.
        time_limit: seconds of the whole tuning from now, None for no limit.
    """

    def __init__(self, step_timeout: float, time_limit: float | None) -> None:
        self._step, self._whole = step_timeout, float("inf") if time_limit is None else time_limit
        self._until = None if time_limit is None else time.monotonic() + time_limit
        self.found = False
        """Whether there is what the time limit waits for: first a right candidate, then one with a time."""

    def over(self) -> bool:
        """Whether the time limit has come, and there is what it waits for."""
        return self.found and self.left() <= 0

    def left(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return float("inf") if self._until is None else self._until - time.monotonic()

    def limits(self) -> dict[str, float]:
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
        """Whether the time limit, and not the candidate's own allowance, ended a step that was given `seconds`."""
        return step in ("prepare", "run", "check") and seconds < self._full(step)


class Runner:
    """Runs a session's steps; what a candidate does wrong is in the outcome and never raised.

    Attributes:
        ceilings: the device's, or None. notes: what happened that a person should know of.
    """

    ceilings: dict[str, Any] | None
    notes: list[str]
    blame: Callable[[MatmulAlgorithm, Outcome], object] = staticmethod(lambda algorithm, outcome: None)
    """Is told what a candidate does wrong out of its turn: while it is closed, or behind its own back."""

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """Checks a candidate on a size set."""
        raise NotImplementedError

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, judged: bool) -> Outcome:
        """Times one call of a candidate, see `Session.time`."""
        raise NotImplementedError

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """Frees what is kept of a candidate; what it does wrong then goes to `blame`."""
        raise NotImplementedError

    def close(self, *, abruptly: bool = False) -> None:
        """Ends the session; abruptly, where it may be in the midst of a step."""
        raise NotImplementedError


class LocalRunner(Runner):
    """In this process. A candidate that crashes or hangs takes it along.

    Args:
        task: what for. backends: those of candidates, by name.

    Raises:
        SessionError: no workbench, or no memory.
    """

    def __init__(self, task: Task, backends: dict[str, Backend]) -> None:
        self.notes = []
        self._session = Session(task, backends, lambda step: None)
        self.ceilings = self._session.ceilings
        self._broken = ""

    def _step(self, step: Callable[[], Outcome]) -> Outcome:
        if self._broken:
            return Outcome("untimed", f"the device was not usable any more: {self._broken}")
        try:
            outcome = step()
        except SessionError as error:  # whoever has taken the memory: in this process there is no telling
            return Outcome("untimed", str(error))
        except Exception as error:  # the workbench could not do its part
            self._broken = self._session.healthy()
            return Outcome("untimed", error_text(error))
        self._tell()
        if outcome.verdict == "failed":
            self._broken = self._session.healthy()
            if self._broken:
                self.notes.append(f"the device cannot be used in this process any more: {self._broken}")
        return outcome

    def _tell(self) -> None:
        for algorithm, reason in self._session.take_faults():
            self.blame(algorithm, Outcome("failed", reason))

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """See `Runner.check`."""
        return self._step(lambda: self._session.check(algorithm, index))

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, judged: bool) -> Outcome:
        """See `Runner.time`."""
        return self._step(lambda: self._session.time(algorithm, sample, turn, judged=judged))

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """See `Runner.forget`."""
        self._session.forget(algorithm)
        self._tell()

    def close(self, *, abruptly: bool = False) -> None:
        """See `Runner.close`."""
        del abruptly
        self._session.close()


class WorkerRunner(Runner):
    """In a worker process, which is there from `open` to `close`.

    What ends a worker is held against the candidate that ran just then only if it ends one in which it runs alone as well: another may
    have left a timer, a thread or spoilt memory behind.

    Args:
        task: what for. backends: pickled backends by name, those that are not found by their names. patience: how long steps may take.
    """

    def __init__(self, task: Task, backends: dict[str, bytes], patience: Patience) -> None:
        self.notes = []
        self._task, self._pickled, self._patience = task, backends, patience
        self._child: child.Child | None = None
        self._losses = 0
        self._given_up = ""
        self._ran: dict[tuple[str, int, str], list[_Request]] = {}
        """What candidates have done in this worker, who ran last in the end."""
        self._fresh = False
        self._strikes: collections.Counter[tuple[str, int, str]] = collections.Counter()
        self.refused: dict[str, str] = {}
        """Backends that the worker cannot take over, by name, and why."""
        self.ceilings = None

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
                    self._child, self._fresh = child.acquire(self._task.device, fresh=fresh or bool(self._pickled))
                except OSError as error:
                    raise WorkerUnavailable(f"the worker process cannot be started: {error}") from error
                try:
                    self.refused = self._ask(("backends", self._pickled))
                    self.ceilings = self._ask(("open", self._task))
                    return
                except (child.WorkerDied, child.WorkerTimedOut) as error:
                    if attempt or self._fresh:  # an idle one may have ended just then
                        raise WorkerUnavailable(f"the worker process did not get ready: {error}") from error
        except BaseException:
            self._drop()
            raise

    def _ask(self, request: _Request) -> Any:
        """A request's value. Raises SessionError, WorkerDied, WorkerTimedOut."""
        if self._child is None:
            raise SessionError("there is no worker")
        reply = self._child.ask(request, self._patience.limits())
        if reply[0] == "error":
            raise SessionError(reply[1])
        for algorithm, reason in reply[3] if len(reply) > 3 else ():
            self.blame(algorithm, Outcome("failed", reason))
        if reply[0] == "broken":
            self._drop()
            outcome: Outcome = reply[1]
            told = f"{outcome.reason}; " if outcome is not None and outcome.reason else ""
            error = child.WorkerDied(f"{told}the device was unusable afterwards: {reply[2]}")
            error.step = "run"
            raise error
        return reply[1]

    def _drop(self) -> None:
        self._ran = {}
        if self._child is not None:
            self._child.kill()
            self._child = None

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def _step(self, request: _Request) -> Outcome:
        """The outcome of a step with a candidate."""
        algorithm: MatmulAlgorithm = request[1]
        while True:
            if self._child is None:
                self._again()
            if self._given_up:
                return Outcome("untimed", self._given_up)
            alone = self._fresh and self._ran.keys() <= {algorithm.key}
            past = self._ran.pop(algorithm.key, [])
            others = [requests[-1] for requests in self._ran.values()]
            self._ran[algorithm.key] = past
            try:
                outcome: Outcome = self._ask(request)
            except _LOST as error:
                self._drop()
                self._losses += 1
                closed = getattr(error, "closing", None)
                if closed is not None and closed.key != algorithm.key:  # it had to make room: the step itself is still to come
                    self.blame(closed, self._verdict(request, error))
                    continue
                shortened = isinstance(error, child.WorkerTimedOut) and self._patience.shortened(error.step, error.seconds)
                if alone or shortened:
                    return self._verdict(request, error)
                return self._alone(request, past, others, error)
            past.append(request)
            if outcome is not None and outcome.verdict == "failed" and algorithm.backend in self._pickled:
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
        self._ran[key] = []
        try:
            for one in (*past, request):
                outcome: Outcome = self._ask(one)
                self._ran[key].append(one)
                if outcome is not None and outcome.verdict:
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
                self._ask(request)
                self._ask(("linger", _LINGER_SECONDS))
            except (child.WorkerDied, child.WorkerTimedOut) as error:
                self._drop()
                outcome = self._verdict(request, error)
                self.blame(request[1], dataclasses.replace(outcome, reason=f"some time after it had returned: {outcome.reason}"))
                return True
        return False

    def _verdict(self, request: _Request, error: Exception) -> Outcome:
        """What a lost worker says of the candidate that is to blame."""
        if not isinstance(error, (child.WorkerDied, child.WorkerTimedOut)):
            return Outcome("failed", str(error))
        doing = self._doing(request, error.step)
        tail = f"\n{error.tail}" if error.tail else ""
        if isinstance(error, child.WorkerDied):
            return Outcome("crashed", f"{doing}: {error.how}{tail}")
        if self._patience.shortened(error.step, error.seconds):
            return Outcome("untimed", f"the time limit came {doing}")
        return Outcome("hung", f"{doing}: not done after {error.seconds:.3g} s, the worker process was killed{tail}")

    def _doing(self, request: _Request, step: str) -> str:
        """What the candidate was doing, in words."""
        if step == "close":
            return "while it was closed"
        what = {"run": "while it ran", "prepare": "while it was prepared", "check": "while its result was judged"}.get(step, f"in {step!r}")
        return f"{what} on {self._task.sets[request[2]].describe()}" if len(request) > 2 else what

    def _again(self) -> None:
        """A fresh worker for the candidates that are left, a bounded number of times."""
        if self._given_up:
            return
        if self._losses > _RESTARTS:
            self._given_up = f"{_RESTARTS} workers were lost to other candidates; give this one's name in algorithms= to tune it alone"
            self.notes.append(f"tuning stopped after {_RESTARTS} lost worker processes")
            return
        try:
            self.open(fresh=True)
        except (WorkerUnavailable, SessionError) as error:
            self._give_up(f"no worker could be had any more: {error}")

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self.notes.append(reason)

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """See `Runner.check`."""
        return self._step(("check", algorithm, index))

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, judged: bool) -> Outcome:
        """See `Runner.time`."""
        return self._step(("time", algorithm, sample, turn, judged))

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """See `Runner.forget`."""
        if self._child is not None and algorithm.key in self._ran:
            outcome = self._step(("forget", algorithm))
            if outcome is not None and outcome.verdict not in ("", "untimed"):
                self.blame(algorithm, outcome)

    def close(self, *, abruptly: bool = False) -> None:
        """See `Runner.close`. A worker goes back to the pool, but where the end is abrupt or it has run others' code, which may change."""
        try:
            if self._child is not None and not abruptly and not self._pickled:
                with contextlib.suppress(child.WorkerDied, child.WorkerTimedOut):
                    if self._child.ask(("close",), self._patience.limits())[0] == "done":
                        child.release(self._task.device, self._child)
                        self._child = None  # not before: an interrupt between the two had better kill it
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
