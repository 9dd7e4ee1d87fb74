"""A tuning session: prepared candidates and their operands, where candidates run. In a worker it is a global of this module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import Backend, Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.check import Outcome
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.verify import SizeSet, Verifier
from hipgroupgemm.operands.views import Device
from hipgroupgemm.processes import error_text, step

__all__ = ["NO_MEMORY", "Session", "SessionError", "StepResult", "Task"]

_WORKSPACE_SHARE = 4  # prepared candidates may hold a quarter of the free memory
_MOST_PREPARED = 256
_rooflines: dict[tuple[Device, str], Roofline | None] = {}  # measured once per process

NO_MEMORY = "no memory for the operands"
"""How the text of a `SessionError` begins where the device has not room."""


class SessionError(RuntimeError):
    """The session itself failed, or there is no worker for it; no candidate did."""


class StepResult(NamedTuple):
    """What came of a step: of the candidate, of the device ("" where it can still be used), and of candidates that could not be closed."""

    outcome: Outcome
    broken: str
    faults: list[tuple[MatmulAlgorithm, str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a session is opened for: picklable, without backends, which go by name.

    Attributes:
        config: the problem, with its true ragged extent. device: where.
        sets: size sets that candidates are checked on; the first ones are timed as well.
        seed: of operands and of the check's sample. roofline: whether to measure the device's.
        max_multiprocessors: that a candidate may occupy; None for all.
    """

    config: GroupedGemmConfig
    device: Device
    sets: list[SizeSet]
    seed: int
    roofline: bool
    max_multiprocessors: int | None = None


class Session:
    """Serves one task.

    Args:
        task: what for. backends: those that are not found by their names.
        note: called with each step's name before it begins, and with the candidate that is closed in a "close".

    Raises:
        SessionError: there is no harness, or not the memory for the operands.
    """

    def __init__(self, task: Task, backends: Mapping[str, Backend], note: Callable[..., None] = lambda *_: None) -> None:
        self.task, self._backends, self._note = task, backends, note
        self._prepared: dict[tuple[str, int, str], tuple[Executable, MatmulAlgorithm]] = {}  # who was used last is last
        self._faults: list[tuple[MatmulAlgorithm, str]] = []
        note("operands")
        with self._nobodys_fault():
            self._harness = harness_for(task.device)
            try:
                key = (task.device, task.config.type_a)
                if task.roofline and key not in _rooflines:
                    _rooflines[key] = self._harness.roofline(task.config.type_a)
                self.roofline, self.remark = _rooflines[key] if task.roofline else None, self._harness.note
                self._verifier = Verifier(self._harness, task.config, task.sets, seed=task.seed, note=note)
                self._most_workspace = self._harness.free_bytes() // _WORKSPACE_SHARE
            except Exception:
                self.close()
                raise

    @contextlib.contextmanager
    def _nobodys_fault(self) -> Iterator[None]:
        """What is raised here is no candidate's fault."""
        try:
            yield
        except MemoryError as error:
            raise SessionError(f"{NO_MEMORY} on {self.task.device}: {error}") from error
        except Exception as error:
            raise SessionError(error_text(error)) from error

    def step(self, kind: str, algorithm: MatmulAlgorithm, *arguments: Any) -> StepResult:
        """Calls `check`, `time` or `forget`. Raises SessionError for what is no candidate's fault."""
        with self._nobodys_fault():
            outcome = getattr(self, kind)(algorithm, *arguments)
        faults, self._faults = self._faults, []
        return StepResult(outcome or Outcome(), self.broken(), faults)

    def broken(self) -> str:
        """ "" while the device can be used, else what it says: some device errors never go away in a process."""
        try:
            self._harness.synchronize()
        except Exception as error:
            return error_text(error)
        return ""

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """Checks a candidate on a size set. One that is larger than the problem goes unchecked where the device has not room for it."""
        try:
            self._verifier.use(index, timing=False)
        except MemoryError:
            if self.task.sets[index].config is None:
                raise
            return Outcome()
        return self._guarded(self._verifier.check, algorithm, index, deterministic=algorithm.deterministic)

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, checked: bool) -> Outcome:
        """Times one cold call of a candidate on a sample; see `Verifier.time`."""
        self._verifier.use(sample, timing=True)
        cold = algorithm.key not in self._prepared  # others took its room
        return self._guarded(self._verifier.time, algorithm, sample, turn, checked=checked, cold=cold)

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """Closes what is prepared of a candidate: it is not needed any more, or others need its room."""
        entry = self._prepared.pop(algorithm.key, None)
        if entry is not None:
            self._note("close", algorithm)
            try:
                entry[0].close()
            except (Exception, SystemExit) as error:  # nobody's affair but its own
                self._faults.append((algorithm, f"while it was closed: {error_text(error)}"))

    def _guarded(self, run: Callable[..., Outcome], algorithm: MatmulAlgorithm, *arguments: Any, **settings: Any) -> Outcome:
        """A verifier's step with a candidate; what that raises is "failed". Whoever comes next finds inputs as they should be."""
        try:
            outcome = run(*arguments, lambda: self._executable(algorithm), **settings)
        except (Exception, SystemExit) as error:
            outcome = Outcome("failed", error_text(error))
        if outcome.verdict:
            self.forget(algorithm)
            self._verifier.distrust()
        return outcome

    def _executable(self, algorithm: MatmulAlgorithm) -> Executable:
        entry = self._prepared.pop(algorithm.key, None)
        if entry is None:
            others = self._prepared.values()
            while others and (
                sum(one.workspace_size for _, one in others) + algorithm.workspace_size > self._most_workspace
                or len(others) >= _MOST_PREPARED
            ):
                self.forget(next(iter(others))[1])
            self._note("prepare")
            backend, most = self._backends.get(algorithm.backend) or get_backend(algorithm.backend), self.task.max_multiprocessors
            backend = backend if most is None else backend.limited(most)
            entry = backend.prepare(self.task.config.key(), self.task.device, algorithm, self._harness.stream), algorithm
        self._prepared[algorithm.key] = entry
        return entry[0]

    def close(self) -> None:
        """Frees candidates, operands and harness, as far as the device lets it."""
        for _, algorithm in list(self._prepared.values()):
            self.forget(algorithm)
        self._note("close", None)
        for part in ("_verifier", "_harness"):
            with contextlib.suppress(Exception):
                getattr(self, part).close()


# ---- in a worker -----------------------------------------------------------------------------------------------------------------

_session: Session | None = None


def open_session(task: Task, backends: Mapping[str, Backend]) -> tuple[Roofline | None, str]:
    """Opens this process's session; its roofline and remark."""
    global _session
    _session = Session(task, backends, step)
    return _session.roofline, _session.remark


def session_step(kind: str, algorithm: MatmulAlgorithm, *arguments: Any) -> StepResult:
    """A step of this process's session."""
    assert _session is not None
    return _session.step(kind, algorithm, *arguments)


def close_session() -> None:
    """Closes this process's session."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.close()
