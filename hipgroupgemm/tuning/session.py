"""A tuning session: candidates, operands and workbench in the process where the candidates run. The engine drives it step by step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import Backend, Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.harness import Harness, harness_for
from hipgroupgemm.measure.verify import Outcome, SizeSet, Verifier
from hipgroupgemm.operands.views import Device

__all__ = ["Session", "SessionError", "Task", "error_text"]

_WORKSPACE_SHARE = 4  # prepared candidates may hold a quarter of the free memory
_MOST_PREPARED = 256
_TEXT = 4000
_measured: dict[tuple[Device, str], dict[str, Any] | None] = {}


NO_MEMORY = "no memory for the operands"
"""How the text of a `SessionError` begins where the device has not room; the text alone comes through from a worker."""


class SessionError(RuntimeError):
    """The session itself failed, not a candidate."""


def error_text(error: BaseException) -> str:
    """An exception in words, bounded."""
    try:
        text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    except (Exception, SystemExit) as again:  # its text is a candidate's code as well
        text = f"{type(error).__name__}, whose text raises {type(again).__name__}"
    return text if len(text) <= _TEXT else text[:_TEXT] + " ..."


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a session is opened for: picklable, without backends, which go by name.

    Attributes:
        config: the problem, with its true ragged extent. device: where.
        sets: size sets that candidates are checked on; the first `samples` of them are timed as well.
        seed: of operands and of the judge's sample. ceilings: whether to measure the device's.
    """

    config: GroupedGemmConfig
    device: Device
    sets: list[SizeSet]
    samples: int
    seed: int
    ceilings: bool


@contextlib.contextmanager
def _no_memory(device: Device) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise SessionError(f"{NO_MEMORY} on {device}: {error}") from error


class Session:
    """Serves one task.

    Args:
        task: what for. backends: those that are not found by their names. note: see `Verifier`.

    Raises:
        SessionError: there is no workbench, or not the memory for the operands.
    """

    def __init__(self, task: Task, backends: dict[str, Backend], note: Callable[[str], None]) -> None:
        self.task, self._backends, self._note = task, backends, note
        self._key = task.config.key()
        self._prepared: collections.OrderedDict[tuple[str, int, str], tuple[Executable, MatmulAlgorithm]] = collections.OrderedDict()
        self._faults: list[tuple[MatmulAlgorithm, str]] = []
        self.closing: MatmulAlgorithm | None = None
        """Whose executable is being closed."""
        self._opened: Verifier | None = None
        note("operands")
        try:
            self._bench: Harness = harness_for(task.device)
        except Exception as error:
            raise SessionError(f"there is no workbench for {task.device}: {error_text(error)}") from error
        try:
            self.ceilings = self._measured() if task.ceilings else None
            with _no_memory(task.device):
                self._verifier = self._opened = Verifier(self._bench, task.config, task.sets, seed=task.seed, note=note)
            self._most_workspace = self._bench.free_bytes() // _WORKSPACE_SHARE
        except Exception as error:
            self.close()
            if isinstance(error, SessionError):
                raise
            raise SessionError(error_text(error)) from error

    def _measured(self) -> dict[str, Any] | None:
        """The device's ceilings, measured once a process."""
        key = (self.task.device, self.task.config.type_a)
        if key not in _measured:
            found = self._bench.roofline(self.task.config.type_a)
            _measured[key] = None if found is None else dataclasses.asdict(found)
        return _measured[key]

    # ---- candidates --------------------------------------------------------------------------------------------------------

    def _executable(self, algorithm: MatmulAlgorithm) -> Executable:
        key = algorithm.key
        found = self._prepared.get(key)
        if found is not None:
            self._prepared.move_to_end(key)
            return found[0]
        held = sum(one.workspace_size for _, one in self._prepared.values())
        while self._prepared and (held + algorithm.workspace_size > self._most_workspace or len(self._prepared) >= _MOST_PREPARED):
            oldest = next(iter(self._prepared.values()))[1]
            self.forget(oldest)
            held -= oldest.workspace_size
        self._note("prepare")
        backend = self._backends.get(algorithm.backend) or get_backend(algorithm.backend)
        executable = backend.prepare(self._key, self.task.device, algorithm, self._bench.stream)
        self._prepared[key] = (executable, algorithm)
        return executable

    def forget(self, algorithm: MatmulAlgorithm) -> None:
        """Closes what is prepared of a candidate: it is not needed any more, or others need its room."""
        found = self._prepared.pop(algorithm.key, None)
        if found is None:
            return
        self.closing = algorithm
        self._note("close")
        try:
            found[0].close()
        except (Exception, SystemExit) as error:  # nobody's affair but its own
            self._faults.append((algorithm, f"while it was closed: {error_text(error)}"))
        finally:
            self.closing = None

    def take_faults(self) -> list[tuple[MatmulAlgorithm, str]]:
        """Candidates that could not be closed since this was last asked, and why."""
        found, self._faults = self._faults, []
        return found

    def healthy(self) -> str:
        """ "" while the device can be used, else what it says: some device errors never go away in a process."""
        try:
            self._bench.synchronize()
        except Exception as error:
            return error_text(error)
        return ""

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def check(self, algorithm: MatmulAlgorithm, index: int) -> Outcome:
        """Checks a candidate on a size set. One that is larger than the problem goes unchecked where the device has not room for it."""
        try:
            with _no_memory(self.task.device):
                self._verifier.use(index, timing=False)
        except SessionError:
            if self.task.sets[index].config is None:
                raise
            return Outcome()
        claims = algorithm.deterministic
        return self._guarded(algorithm, lambda: self._verifier.check(index, lambda: self._executable(algorithm), deterministic=claims))

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, *, judged: bool) -> Outcome:
        """Times one cold call of a candidate on a sample.

        Args:
            algorithm, sample: which.
            turn: of the operands' copies, so that nobody finds his inputs in a cache.
            judged: whether the result is judged as well. Whether inputs were changed is looked at in any case.
        """
        with _no_memory(self.task.device):
            self._verifier.use(sample, timing=True)
        cold = algorithm.key not in self._prepared  # others took its room: what a first call costs more was paid before
        return self._guarded(
            algorithm, lambda: self._verifier.time(sample, turn, lambda: self._executable(algorithm), checked=judged, cold=cold)
        )

    def _guarded(self, algorithm: MatmulAlgorithm, step: Any) -> Outcome:
        """A step's outcome; what the candidate raises is "failed". Whoever comes next finds inputs as they should be."""
        try:
            outcome: Outcome = step()
        except (Exception, SystemExit) as error:
            outcome = Outcome("failed", error_text(error))
        if outcome.verdict:
            self.forget(algorithm)
            self._verifier.distrust()
        return outcome

    def close(self) -> None:
        """Frees candidates, operands and workbench, as far as the device lets it."""
        for _, algorithm in list(self._prepared.values()):
            self.forget(algorithm)
        self._note("close")
        with contextlib.suppress(Exception):
            if self._opened is not None:
                self._opened.close()
        with contextlib.suppress(Exception):
            self._bench.close()
