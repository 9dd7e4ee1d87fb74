"""Where candidates run: in this process, or in a worker that is started anew when one of them takes it down."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any

from hipgroupgemm.backends.base import Backend, MatmulAlgorithm
from hipgroupgemm.tuning import child
from hipgroupgemm.tuning.session import Session, SessionError, Task
from hipgroupgemm.tuning.verify import Outcome

__all__ = ["ChildLane", "Lane", "LocalLane", "Patience", "WorkerUnavailable", "pickled"]

_RESTARTS = 16
_START_SECONDS = 120.0
_SLOW = 10.0  # preparing (compiling), operands and judging may take so many times longer than a run
_LEAST_RUN, _LEAST_SLOW = 5.0, 60.0  # seconds that a step gets although the time limit is near


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
        run, slow = self._step, _SLOW * self._step
        return {
            "start": _START_SECONDS,
            "operands": max(slow, 600.0),
            "prepare": min(slow, max(left, _LEAST_SLOW)),
            "run": min(run, max(left, _LEAST_RUN)),
            "judge": max(slow, 600.0),
        }

    def shortened(self, step: str, seconds: float) -> bool:
        """Whether the time limit, and not the candidate's own allowance, ended a step that was given `seconds`."""
        return seconds < (self._step if step == "run" else _SLOW * self._step)


class Lane:
    """Runs a session's steps; what a candidate does wrong is in the outcome and never raised.

    Attributes:
        ceilings: the device's, or None. notes: what happened that a person should know of.
    """

    ceilings: dict[str, Any] | None
    notes: list[str]

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """Checks a candidate on a size set."""
        raise NotImplementedError

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, judged: bool) -> Outcome:
        """Times one call of a candidate, see `Session.time`."""
        raise NotImplementedError

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """Frees what is kept of a candidate."""
        raise NotImplementedError

    def close(self, *, abruptly: bool = False) -> None:
        """Ends the session; abruptly, where it may be in the midst of a step."""
        raise NotImplementedError


class LocalLane(Lane):
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

    def _step(self, outcome: Outcome) -> Outcome:
        if outcome.verdict == "failed":
            self._broken = self._session.healthy()
            if self._broken:
                self.notes.append(f"the device cannot be used in this process any more: {self._broken}")
        return outcome

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """See `Lane.check`."""
        if self._broken:
            return Outcome("untimed", f"the device was not usable any more: {self._broken}")
        return self._step(self._session.check(algorithm, index))

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, judged: bool) -> Outcome:
        """See `Lane.time`."""
        if self._broken:
            return Outcome("untimed", f"the device was not usable any more: {self._broken}")
        return self._step(self._session.time(algorithm, sample, turn, judged=judged))

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """See `Lane.forget`."""
        self._session.forget(algorithm)

    def close(self, *, abruptly: bool = False) -> None:
        """See `Lane.close`."""
        del abruptly
        self._session.close()


class ChildLane(Lane):
    """In a worker process.

    Args:
        task: what for. backends: pickled backends by name, those that are not found by their names. patience: how long steps may take.

    Raises:
        WorkerUnavailable: no worker starts or opens the session. SessionError: the session cannot be (no memory, say).
    """

    def __init__(self, task: Task, backends: dict[str, bytes], patience: Patience) -> None:
        self.notes = []
        self._task, self._pickled, self._patience = task, backends, patience
        self._child: child.Child | None = None
        self._restarts = 0
        self._given_up = ""
        self.refused: dict[str, str] = {}
        """Backends that the worker cannot take over, by name, and why."""
        self.ceilings = None
        self._open()

    # ---- the worker --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """A worker with the session open."""
        for attempt in (0, 1):
            try:
                found, fresh = child.acquire(self._task.device)
            except OSError as error:
                raise WorkerUnavailable(f"the worker process cannot be started: {error}") from error
            self._child = found
            try:
                self.refused = self._ask(("backends", self._pickled))
                self.ceilings = self._ask(("open", self._task))
                return
            except (child.ChildDied, child.ChildHung) as error:
                self._drop()
                if attempt or fresh:  # an idle one may have ended just then
                    raise WorkerUnavailable(f"the worker process did not get ready: {error}") from error

    def _ask(self, request: tuple[Any, ...]) -> Any:
        """A request's value. Raises SessionError, ChildDied, ChildHung."""
        if self._child is None:
            raise SessionError("there is no worker")
        reply = self._child.ask(request, self._patience.limits())
        if reply[0] == "error":
            raise SessionError(reply[1])
        if reply[0] == "broken":
            self._drop()
            outcome: Outcome = reply[1]
            told = f"{outcome.reason}; " if outcome is not None and outcome.reason else ""
            error = child.ChildDied(f"{told}the device was unusable afterwards: {reply[2]}")
            error.step = "run"
            raise error
        return reply[1]

    def _drop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def _step(self, request: tuple[Any, ...]) -> Outcome:
        if self._child is None:
            self._again()
        if self._given_up:
            return Outcome("untimed", self._given_up)
        try:
            outcome: Outcome = self._ask(request)
            return outcome
        except (child.ChildDied, child.ChildHung) as error:
            self._drop()
            doing = self._doing(request, error.step)
            tail = f"\n{error.tail}" if error.tail else ""
            if isinstance(error, child.ChildDied):
                return Outcome("crashed", f"{doing}: {error.how}{tail}")
            if self._patience.shortened(error.step, error.seconds):
                return Outcome("untimed", f"the time limit came {doing}")
            return Outcome("hung", f"{doing}: not done after {error.seconds:.3g} s, the worker process was killed{tail}")

    def _doing(self, request: tuple[Any, ...], step: str) -> str:
        """What the candidate was doing, in words."""
        what = {"run": "while it ran", "prepare": "while it was prepared", "judge": "while its result was judged"}.get(step, f"in {step!r}")
        return f"{what} on {self._task.sets[request[2]].describe()}"

    def _again(self) -> None:
        """A fresh worker for the candidates that are left, a bounded number of times."""
        if self._given_up:
            return
        self._restarts += 1
        if self._restarts > _RESTARTS:
            self._given_up = f"{_RESTARTS} workers were lost to other candidates; give this one's name in algorithms= to tune it alone"
            self.notes.append(f"tuning stopped after {_RESTARTS} lost worker processes")
            return
        try:
            self._open()
        except (WorkerUnavailable, SessionError) as error:
            self._given_up = f"no worker could be had any more: {error}"
            self.notes.append(self._given_up)

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """See `Lane.check`."""
        return self._step(("check", algorithm, index))

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, judged: bool) -> Outcome:
        """See `Lane.time`."""
        return self._step(("time", algorithm, sample, turn, judged))

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """See `Lane.forget`."""
        if self._child is not None:
            try:
                self._ask(("forget", algorithm))
            except (child.ChildDied, child.ChildHung, SessionError):
                self._drop()

    def close(self, *, abruptly: bool = False) -> None:
        """See `Lane.close`. The worker goes back to the pool, or dies where the end is abrupt."""
        found, self._child = self._child, None
        if found is None:
            return
        if abruptly:
            found.kill()
            return
        with contextlib.suppress(child.ChildDied, child.ChildHung):
            if found.ask(("close",), self._patience.limits())[0] == "done":
                child.release(self._task.device, found)
                return
        found.kill()


def pickled(backends: dict[str, Backend]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Backends pickled by name, and why others cannot be."""
    done, refused = {}, {}
    for name, backend in backends.items():
        try:
            done[name] = pickle.dumps(backend, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return done, refused
