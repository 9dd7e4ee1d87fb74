"""A tuning session: candidates, operands and workbench in the process where the candidates run. The engine drives it step by step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import Any

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import Backend, Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.harness import Harness, OperandSet, harness_for
from hipgroupgemm.measure.inputs import Inputs
from hipgroupgemm.measure.poison import Reads, Spoiled, poison_unread
from hipgroupgemm.measure.verify import Note, Outcome, SizeSet, Stage, check, judge
from hipgroupgemm.operands.views import Device

__all__ = ["Session", "SessionError", "Task", "error_text"]

_COPIES = 8
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


class Session:
    """Serves one task.

    Args:
        task: what for. backends: those that are not found by their names. note: see `verify.Note`.

    Raises:
        SessionError: there is no workbench, or not the memory for the operands.
    """

    def __init__(self, task: Task, backends: dict[str, Backend], note: Note) -> None:
        self.task, self._backends, self._note = task, backends, note
        self._key = task.config.key()
        self._prepared: collections.OrderedDict[tuple[str, int, str], tuple[Executable, MatmulAlgorithm]] = collections.OrderedDict()
        self._faults: list[tuple[MatmulAlgorithm, str]] = []
        self.closing: MatmulAlgorithm | None = None
        """Whose executable is being closed."""
        self._operands: list[OperandSet] = []
        self._made_for: tuple[GroupedGemmConfig, bool] | None = None
        self._set: SizeSet | None = None  # that the operands are ready for
        self._spoiled: Spoiled | None = None
        self._touched = False  # a candidate has changed inputs
        note("operands")
        try:
            self._bench: Harness = harness_for(task.device)
        except Exception as error:
            raise SessionError(f"there is no workbench for {task.device}: {error_text(error)}") from error
        self._inputs = Inputs(self._bench)
        try:
            self.ceilings = self._measured() if task.ceilings else None
            self._make_operands(task.config, rotate=False)
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
            found = self._bench.ceilings(self.task.config.type_a)
            _measured[key] = None if found is None else dataclasses.asdict(found)
        return _measured[key]

    # ---- operands ----------------------------------------------------------------------------------------------------------

    def _make_operands(self, config: GroupedGemmConfig, *, rotate: bool) -> None:
        for operands in self._operands:
            self._bench.release(operands)
        self._operands, self._made_for, self._set, self._spoiled = [], None, None, None
        try:
            self._operands = self._bench.operands(config, seed=self.task.seed, copies=_COPIES if rotate else 1)
        except MemoryError as error:
            raise SessionError(f"{NO_MEMORY} on {self.task.device}: {error}") from error
        self._made_for, self._touched = (config, rotate), False

    def _turn_to(self, index: int, *, timing: bool) -> SizeSet:
        """Brings operands, sizes and poison of a size set to where the last one's were; the set as it can be had."""
        chosen = self.task.sets[index]
        self._note("operands")
        wanted = (chosen.config or self.task.config, timing)
        fresh = self._made_for != wanted
        if fresh:
            self._make_operands(wanted[0], rotate=timing)
        elif self._set is not None and self._set.name == chosen.name and not self._touched:
            return self._set
        unused = self._set is None
        renewed = not fresh and (self._touched or not (timing or unused))
        if renewed:
            for turn, operands in enumerate(self._operands):
                self._bench.renew(operands, seed=self.task.seed + 7919 * (index + 1) + turn)
        self._touched, self._set, self._spoiled = True, None, None
        if chosen.hostile and not timing:
            chosen = self._poison(chosen)
        self._inputs.turn(chosen)
        if fresh or renewed or unused:
            self._inputs.seal(self._operands)
        self._touched, self._set = False, chosen
        return chosen

    def _poison(self, chosen: SizeSet) -> SizeSet:
        """Poisons what the sizes do not read, and the group that is to be spoiled where that can be done."""
        (operands,) = self._operands
        poison_unread(self._bench, operands, Reads.of(operands.config, chosen.sizes, chosen.group_offset))
        if chosen.spoiled is not None:
            spoiled = Spoiled(self._bench, operands, chosen.sizes, chosen.group_offset, chosen.spoiled)
            if not spoiled.possible:
                return dataclasses.replace(chosen, spoiled=None)
            spoiled.poison()
            self._spoiled = spoiled
        return chosen

    def _stage(self) -> Stage:
        return Stage(self._bench, self._operands[0], self._inputs, self._note, self.task.seed, self._spoiled)

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
            chosen = self._turn_to(index, timing=False)
        except SessionError:
            if self.task.sets[index].config is None:
                raise
            return Outcome()
        return self._guarded(algorithm, lambda: check(self._stage(), chosen, self._executable(algorithm), algorithm))

    def time(self, algorithm: MatmulAlgorithm, sample: int, turn: int, *, judged: bool) -> Outcome:
        """Times one cold call of a candidate on a sample.

        Args:
            algorithm, sample: which.
            turn: of the operands' copies, so that nobody finds his inputs in a cache.
            judged: whether the result is judged as well. Whether inputs were changed is looked at in any case.
        """
        chosen = self._turn_to(sample, timing=True)
        return self._guarded(algorithm, lambda: self._time(algorithm, chosen, turn, judged))

    def _time(self, algorithm: MatmulAlgorithm, chosen: SizeSet, turn: int, judged: bool) -> Outcome:
        bench = self._bench
        warm = algorithm.key in self._prepared
        executable = self._executable(algorithm)
        operands = self._operands[turn % len(self._operands)]
        arguments = bench.arguments(operands, self._inputs.given.sizes, alpha=chosen.alpha, beta=chosen.beta)
        self._note("run")
        if not warm:  # made anew, for others took its room: what a first call costs more was paid before
            executable.execute(arguments)
            bench.synchronize()
        if judged:
            bench.poison(operands)
        bench.flush()
        took = bench.time(lambda: executable.execute(arguments))
        where = f"{chosen.describe()}, timed run {turn}"
        self._note("judge")
        changed = self._inputs.changed([operands])
        if changed:
            return Outcome("wrong", f"{where}: {changed}", ms=took)
        if judged:
            verdict = judge(self._stage(), chosen, operands=operands, seed=self.task.seed + turn)
            if verdict.fault:
                return Outcome("wrong", f"{where}: {verdict.fault}", verdict.error, verdict.limit, took)
            return Outcome(error=verdict.error, error_limit=verdict.limit, ms=took)
        return Outcome(ms=took)

    def _guarded(self, algorithm: MatmulAlgorithm, step: Any) -> Outcome:
        """A step's outcome; what the candidate raises is "failed". Whoever comes next finds inputs as they should be."""
        try:
            outcome: Outcome = step()
        except (Exception, SystemExit) as error:
            outcome = Outcome("failed", error_text(error))
        if outcome.verdict:
            self.forget(algorithm)
            try:
                self._touched = bool(self._inputs.changed())
            except Exception:  # the device's own affair: `healthy` tells
                self._touched = True
        return outcome

    def close(self) -> None:
        """Frees candidates, operands and workbench, as far as the device lets it."""
        for _, algorithm in list(self._prepared.values()):
            self.forget(algorithm)
        self._note("close")
        self._operands, self._made_for, self._set, self._spoiled = [], None, None, None
        self._inputs.clear()
        with contextlib.suppress(Exception):
            self._bench.close()
