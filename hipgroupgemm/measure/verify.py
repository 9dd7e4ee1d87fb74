"""Checking and timing executables of one config on its size sets.

Every candidate that is timed has been checked on every size set: on the sizes that are tuned for and on adversarial ones, on outputs full
of NaN and full of numbers, with poison where nothing may be read, by a check that shares no code with any backend. Each set has inputs of
its own at the addresses of the one before, and what a run changes in them is seen. A backend's promise counts for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.base import Harness, OperandSet
from hipgroupgemm.measure.check import CheckResult
from hipgroupgemm.measure.inputs import Inputs, SpoiledGroup, poison_unread, reads_of
from hipgroupgemm.measure.size_sets import SizeSet, size_sets

__all__ = ["Outcome", "SizeSet", "Verifier", "size_sets"]

_COPIES = 8
_NUMBERS = 0x42
"""Elements whose bytes are all this are finite and not small in any type (2.3 to 1.6e11)."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one step with one candidate.

    Attributes:
        verdict: "" where nothing is wrong with it so far, else what it is: "wrong", "failed", "crashed" and so on.
        reason: why. error, error_limit, amount: of the result, where it was checked, and how much of it was. ms: where it was timed.
    """

    verdict: str = ""
    reason: str = ""
    error: float | None = None
    error_limit: float | None = None
    ms: float | None = None
    amount: str = ""

    @classmethod
    def of(cls, result: CheckResult, where: str = "", ms: float | None = None) -> Outcome:
        """A check's."""
        verdict, reason = ("wrong", f"{where}: {result.fault}" if where else result.fault) if result.fault else ("", "")
        return cls(verdict, reason, result.error, result.limit, ms, result.checked)


class Verifier:
    """Brings operands through a config's size sets, and checks and times executables on them.

    Args:
        harness: where. config: the problem, with its true ragged extent. sets: the size sets.
        seed: of operands and of the check's sample. copies: of the operands at the most, that timed calls take in turns.
        watch: whether it is looked at after each run if inputs are as they were. budget: of a check, see `Harness.check`.
        note: called before each step with what comes: "operands", "prepare", "run" or "check". What it is told decides how long a step
            may take.

    Raises:
        MemoryError: the device has not room for the operands.
    """

    def __init__(
        self,
        harness: Harness,
        config: GroupedGemmConfig,
        sets: Sequence[SizeSet],
        *,
        seed: int = 0,
        copies: int = _COPIES,
        watch: bool = True,
        budget: float | None = None,
        note: Callable[[str], None] = lambda step: None,
    ) -> None:
        self.harness, self.config, self.sets = harness, config, sets
        self._seed, self._copies, self._watch, self._budget, self._note = seed, copies, watch, budget, note
        self.inputs = Inputs(harness)
        self.operands: list[OperandSet] = []
        self._made_for: tuple[GroupedGemmConfig, bool] | None = None
        self._make(config, False)

    def _make(self, config: GroupedGemmConfig, rotate: bool) -> None:
        self._drop()
        self.operands = self.harness.operands(config, seed=self._seed, copies=self._copies if rotate else 1)
        self._made_for = config, rotate

    def _drop(self) -> None:
        for operands in self.operands:
            self.harness.release(operands)
        self.operands = []
        self._made_for = None
        self._index: int | None = None  # of the set that the operands are ready for
        self._current: SizeSet | None = None
        self._spoiled: SpoiledGroup | None = None
        self._touched = False  # a candidate has changed inputs

    def use(self, index: int, *, timing: bool) -> SizeSet:
        """Brings operands, sizes and poison of a size set to where the last one's were; the set as it can be had."""
        chosen = self.sets[index]
        self._note("operands")
        wanted = (chosen.config or self.config, timing and self._copies > 1)
        fresh = self._made_for != wanted
        if fresh:
            self._make(*wanted)
        elif self._current is not None and self._index == index and not self._touched:
            return self._current
        unused = self._index is None
        renewed = not fresh and (self._touched or not (timing or unused))
        if renewed:
            for turn, operands in enumerate(self.operands):
                self.harness.renew(operands, seed=self._seed + 7919 * (index + 1) + turn)
        self._touched, self._index, self._spoiled = True, None, None
        if chosen.adversarial and not timing and self.config.ragged_mode is not RaggedDotMode.BATCH:
            chosen = self._poison(chosen)
        self.inputs.use(chosen)
        if fresh or renewed or unused:
            self.inputs.seal(self.operands if self._watch else [])
        self._touched, self._index, self._current = False, index, chosen
        return chosen

    def _poison(self, chosen: SizeSet) -> SizeSet:
        """Poisons what the sizes do not read, and the group that is to be spoiled where that can be done."""
        (operands,) = self.operands
        reads = reads_of(operands.config, chosen.sizes, chosen.group_offset)
        poison_unread(self.harness, operands, reads)
        if chosen.spoiled is None:
            return chosen
        spoiled = SpoiledGroup(self.harness, operands, reads, chosen.spoiled)
        if not spoiled.possible:
            return dataclasses.replace(chosen, spoiled=None)
        spoiled.poison()
        self._spoiled = spoiled
        return chosen

    # ---- steps -------------------------------------------------------------------------------------------------------------

    def check(self, index: int, prepare: Callable[[], Executable], *, deterministic: bool = False) -> Outcome:
        """Runs a candidate on a poisoned out and checks the result; where it claims to be deterministic, runs it again on an out full of
        numbers and compares bits.

        Args:
            index: of the size set. prepare: gives the executable, once the operands are ready. deterministic: what it claims.

        Returns:
            verdict "", "wrong" or "nondeterministic". What the candidate raises is raised.
        """
        one = self.use(index, timing=False)
        (operands,), where, fill = self.operands, one.describe(), _NUMBERS if one.filled else None
        executable = prepare()
        result = self._run(one, executable, fill)
        if result.fault or not deterministic or one.once:
            return Outcome.of(result, where)
        try:
            first = self.harness.snapshot(operands)
        except MemoryError:  # without room for a copy of out the bits go unseen; values are checked nonetheless
            return Outcome.of(result, where)
        again = _NUMBERS if fill is None else None
        try:
            second = self._run(one, executable, again, checked=False)
            differing = self.harness.same(operands, first)
        finally:
            first.free()
        if second.fault:
            return Outcome.of(second, f"{where}, second run")
        if differing:
            second = self._result(one, operands, again, self._seed)
            if second.fault:
                return Outcome.of(second, f"{where}, second run, on an out full of {'numbers' if again is not None else 'NaN'}")
            reason = f"{where}: {differing} elements differ between two runs on equal inputs, though it claims to be deterministic"
            return Outcome("nondeterministic", reason, result.error, result.limit)
        return Outcome.of(result, where)

    def _run(self, one: SizeSet, executable: Executable, fill: int | None, *, checked: bool = True) -> CheckResult:
        """One run on an out full of NaN or of a byte, waited for: what is wrong with it."""
        harness, (operands,) = self.harness, self.operands
        harness.poison(operands, fill)
        arguments = self._arguments(one, operands)
        if one.in_place and operands.pointers["c"]:
            out = operands.pointers["out"]
            harness.copy_bytes(out, operands.pointers["c"], operands.layouts["c"].reach)
            arguments.pointers["c"] = out
        harness.synchronize()
        self._note("run")
        executable.execute(arguments)
        harness.synchronize()
        fault = executable.check()
        self._note("check")
        changed = self.inputs.changed([operands])
        if changed or not checked:  # what it has computed from changed inputs cannot be checked
            return CheckResult(0.0, 0.0, changed, "")
        result = self._result(one, operands, fill, self._seed)
        if result.fault or (one.wrong_sizes is None) == (fault is None):
            return result
        words = "it does not report that sizes are wrong"
        if fault is not None:
            words = f"it reports wrong sizes where they are right: {fault.describe(operands.config.ragged_extent)}"
        return dataclasses.replace(result, fault=words)

    def _arguments(self, one: SizeSet, operands: OperandSet) -> Arguments:
        how: dict[str, Any] = {"alpha": one.alpha, "beta": one.beta, "tail": one.tail, "ends": one.ends}
        return self.harness.arguments(operands, self.inputs.sizes, group_offset=self.inputs.group_offset, **how)

    def _result(self, one: SizeSet, operands: OperandSet, fill: int | None, seed: int) -> CheckResult:
        """What lies in out, which was full of NaN or of a byte before the run."""
        self._note("check")
        if self._spoiled is not None:
            self._spoiled.overwrite(_NUMBERS)
        run: dict[str, Any] = {"alpha": one.alpha, "beta": one.beta, "tail": one.tail, "group_offset": one.group_offset}
        return self.harness.check(operands, one.sizes, seed=seed, budget=self._budget, fill=fill, without=one.spoiled, **run)

    def time(
        self,
        index: int,
        turn: int,
        prepare: Callable[[], Executable],
        *,
        checked: bool | Callable[[float], bool] = False,
        cold: bool = False,
    ) -> Outcome:
        """Times one call of a candidate, on cold caches.

        Args:
            index, prepare: as in `check`.
            turn: of the operands' copies, so that nobody finds his inputs in a cache.
            checked: whether the result is checked as well, or what decides that once the milliseconds are known.
            cold: whether the executable was made anew, so that a call comes first that pays for what only a first call does.
        """
        one, harness = self.use(index, timing=True), self.harness
        executable = prepare()
        operands = self.operands[turn % len(self.operands)]
        arguments = self._arguments(one, operands)
        self._note("run")
        if cold:
            executable.execute(arguments)
            harness.synchronize()
        if checked:
            harness.poison(operands)
        harness.flush()
        took = harness.time(lambda: executable.execute(arguments))
        where = f"{one.describe()}, timed run {turn}"
        self._note("check")
        changed = self.inputs.changed([operands])
        if changed:
            return Outcome("wrong", f"{where}: {changed}", ms=took)
        if not (checked(took) if callable(checked) else checked):
            return Outcome(ms=took)
        return Outcome.of(self._result(one, operands, None, self._seed + turn), where, took)

    def distrust(self) -> None:
        """A candidate has failed: whoever comes next finds inputs as they should be."""
        try:
            self._touched = bool(self.inputs.changed())
        except Exception:  # the device's own affair
            self._touched = True

    def close(self) -> None:
        """Frees operands and sizes; the harness is its caller's."""
        self._drop()
        self.inputs = Inputs(self.harness)
