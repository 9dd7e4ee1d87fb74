"""Checking and timing executables of one config on its size sets.

Every candidate that is timed has been checked on every size set: on the sizes that are tuned for and on adversarial ones, on outputs full
of NaN and full of numbers, with poison where nothing may be read, by a check that shares no code with any backend. Each set has inputs of
its own at the addresses of the one before, and what a run changes in them is seen. A backend's promise counts for nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.base import Harness, OperandSet
from hipgroupgemm.measure.check import CheckResult
from hipgroupgemm.measure.layouts import spans
from hipgroupgemm.measure.sizes import SizeSet, size_sets
from hipgroupgemm.operands.views import ArrayView
from hipgroupgemm.problem.groups import GroupBounds, scan, select_groups

__all__ = ["Inputs", "Outcome", "Part", "SizeSet", "Verifier", "fill_parts", "group_parts", "reads_of", "size_sets", "unread_parts"]

Array = np.ndarray[Any, Any]

_COPIES = 8
_NUMBERS = 0x42
"""Elements whose bytes are all this are finite and not small in any type (2.3 to 1.6e11)."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one step with one candidate: its verdict ("" where nothing is wrong so far, else "wrong", "failed" and so on) and why;
    the error, its limit and how much was checked, where it was; and milliseconds, where it was timed."""

    verdict: str = ""
    reason: str = ""
    error: float | None = None
    error_limit: float | None = None
    ms: float | None = None
    amount: str = ""

    @classmethod
    def of(cls, result: CheckResult, where: str = "", ms: float | None = None) -> Outcome:
        """A check's."""
        reason = f"{where}: {result.fault}" if where and result.fault else result.fault
        return cls("wrong" if reason else "", reason, result.error, result.limit, ms, result.checked)


class Inputs:
    """The inputs of runs on some operand sets: sizes or end offsets, the group offset, and digests of all the rest. They are changed in
    place between size sets: a candidate that remembers by address what it has read is wrong from the second set on."""

    sizes: ArrayView
    group_offset: int | ArrayView

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._memory: dict[tuple[str, str, tuple[int, ...]], ArrayView] = {}
        self._held: dict[str, tuple[ArrayView, Array]] = {}
        self._digests: list[tuple[OperandSet, dict[str, int]]] = []

    def use(self, one: SizeSet) -> None:
        """Takes up a size set: its integers come to the device."""
        self._held, values = {}, one.integers()
        wide = values
        if one.spaced:
            wide = np.full((*values.shape, 2), np.iinfo(values.dtype).min, values.dtype)  # what lies between is no size
            wide[..., 0] = values
        memory = self._place("group_sizes", wide)
        self.sizes = dataclasses.replace(memory, shape=values.shape, strides=memory.strides[: values.ndim])
        self.group_offset = one.group_offset
        if one.device_offset:
            self.group_offset = self._place("group_offset", np.array([one.group_offset], np.int32))

    def _place(self, name: str, values: Array) -> ArrayView:
        key = (name, values.dtype.str, values.shape)
        if key in self._memory:
            self._harness.rewrite(self._memory[key], values)
        else:
            self._memory[key] = self._harness.sizes(values)
        self._held[name] = (self._memory[key], values)
        return self._memory[key]

    def seal(self, sets: Sequence[OperandSet]) -> None:
        """Remembers what all inputs hold."""
        self._digests = [(operands, self._harness.digest(operands)) for operands in sets]

    def changed(self, sets: Sequence[OperandSet] | None = None) -> str:
        """Which inputs are no longer as they were, in words; "" where all are. None looks at all that were sealed."""
        found: dict[str, None] = {}
        for operands, before in self._digests:
            if sets is None or operands in sets:
                found |= dict.fromkeys(name for name, digest in self._harness.digest(operands).items() if digest != before[name])
        for name, (view, values) in self._held.items():
            found |= {} if np.array_equal(self._harness.contents(view), values) else {name: None}
        return f"it changed its inputs: {', '.join(found)}" if found else ""


def reads_of(config: GroupedGemmConfig, sizes: Any, group_offset: int = 0) -> GroupBounds:
    """Which rows a run with these host sizes reads, (batch, group_count): those of each group from `group_offset` on."""
    each = np.broadcast_to(np.asarray(sizes), (config.batch_count, config.group_total))
    return select_groups(scan(each, config.ragged_extent), group_offset, config.group_count)


Part = tuple[str, dict[int, tuple[int, int]]]
"""Of an operand, by name: first and one-past-last index along some axes."""


def unread_parts(operands: OperandSet, reads: GroupBounds) -> list[Part]:
    """All that `reads` leaves out."""
    parts: list[Part] = []
    for entry, (starts, ends) in enumerate(zip(reads.starts.tolist(), reads.ends.tolist(), strict=True)):
        first, last = (starts[0], ends[-1]) if starts else (0, 0)
        for name, axis in _ragged_axes(operands.config).items():
            parts += [(name, {1: (entry, entry + 1), axis: part}) for part in ((0, first), (last, operands.layouts[name].shape[axis]))]
        if operands.config.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            empty = [group for group, (start, end) in enumerate(zip(starts, ends, strict=True)) if start >= end]
            parts += [("rhs", {0: (group, group + 1), 1: (entry, entry + 1)}) for group in empty]
    return parts


def group_parts(operands: OperandSet, reads: GroupBounds, group: int) -> tuple[list[Part], list[Part]]:
    """What one group, counted from the first that is computed, alone reads; and what of out it alone fills."""
    read: list[Part] = []
    filled: list[Part] = []
    contracting = operands.config.ragged_mode is RaggedDotMode.CONTRACTING
    for entry, (start, end) in enumerate(zip(reads.starts[:, group].tolist(), reads.ends[:, group].tolist(), strict=True)):
        mine = {1: (entry, entry + 1)}
        read += [(name, mine | {axis: (start, end)}) for name, axis in _ragged_axes(operands.config).items()]
        read += [] if contracting else [("rhs", mine | {0: (group, group + 1)})]
        if start < end:
            filled.append(("out", mine | ({0: (group, group + 1)} if contracting else {2: (start, end)})))
    return read, filled


def fill_parts(harness: Harness, operands: OperandSet, parts: Sequence[Part], byte: int | None = None) -> None:
    """Fills parts with NaN, or with a byte. Layouts whose elements are interleaved or repeated are left alone."""
    for name, chosen in parts:
        layout = operands.layouts[name]
        if any(layout.shape[i] > 1 and layout.strides[i] == 0 for i in chosen):  # what the part tells apart repeats its elements
            continue
        for offset, nbytes in spans(layout, chosen):
            harness.set_bytes(operands.pointers[name] + offset, layout.poison if byte is None else byte, nbytes)


def _ragged_axes(config: GroupedGemmConfig) -> dict[str, int]:
    """The ragged axis of each operand that has one."""
    return {"lhs": 2} if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else {"lhs": 3, "rhs": 2}


class Verifier:
    """Brings operands through a config's size sets, and checks and times executables on them.

    Args:
        harness: where. config: the problem, with its true ragged extent. sets: the size sets.
        seed: of operands and of the check's sample. copies: of the operands at the most, that timed calls take in turns.
        watch: whether it is looked at after each run if inputs are as they were. budget: of a check, see `Harness.check`.
        note: called before each step with what comes: "operands", "prepare", "run" or "check".

    Raises MemoryError where the device has not room for the operands.
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
        self.operands, self._made_for = [], None
        self._ready: tuple[int, SizeSet] | None = None  # the set that the operands are ready for
        self._spoiled: list[Part] = []  # of out, what is NaN by right
        self._touched = False  # a candidate has changed inputs

    def use(self, index: int, *, timing: bool) -> SizeSet:
        """Brings operands, sizes and poison of a size set to where the last one's were; the set as it can be had."""
        chosen = self.sets[index]
        self._note("operands")
        wanted = (chosen.config or self.config, timing and self._copies > 1)
        fresh = self._made_for != wanted
        if fresh:
            self._make(*wanted)
        elif self._ready is not None and self._ready[0] == index and not self._touched:
            return self._ready[1]
        unused = self._ready is None
        renewed = not fresh and (self._touched or not (timing or unused))
        if renewed:
            for turn, operands in enumerate(self.operands):
                self.harness.renew(operands, seed=self._seed + 7919 * (index + 1) + turn)
        self._touched, self._ready, self._spoiled = True, None, []
        if chosen.adversarial and not timing and self.config.ragged_mode is not RaggedDotMode.BATCH:
            chosen = self._poison(chosen)
        self.inputs.use(chosen)
        if fresh or renewed or unused:
            self.inputs.seal(self.operands if self._watch else [])
        self._touched, self._ready = False, (index, chosen)
        return chosen

    def _poison(self, chosen: SizeSet) -> SizeSet:
        """Poisons what the sizes do not read, and the group that is to be spoiled where that can be done."""
        (operands,) = self.operands
        reads = reads_of(operands.config, chosen.sizes, chosen.group_offset)
        fill_parts(self.harness, operands, unread_parts(operands, reads))
        if chosen.spoiled is not None:
            read, filled = group_parts(operands, reads, chosen.spoiled)
            if not all(spans(operands.layouts[name], part) for name, part in filled):
                return dataclasses.replace(chosen, spoiled=None)
            fill_parts(self.harness, operands, read)
            self._spoiled = filled
        return chosen

    def check(self, index: int, prepare: Callable[[], Executable], *, deterministic: bool = False) -> Outcome:
        """Runs a candidate on a poisoned out and checks the result; where it claims to be deterministic, runs it again on an out full of
        numbers and compares bits. The verdict is "", "wrong" or "nondeterministic"; what the candidate raises is raised.

        Args:
            index: of the size set. prepare: gives the executable, once the operands are ready. deterministic: what it claims.
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
        second = self._run(one, executable, again, checked=False)
        differing = self.harness.same(operands, first)
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
            if "c" in arguments.lists:
                arguments.lists["c"] = arguments.lists["out"]
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
        fill_parts(self.harness, operands, self._spoiled, _NUMBERS)
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
        self._touched = True
        with contextlib.suppress(Exception):  # the device's own affair
            self._touched = bool(self.inputs.changed())

    def close(self) -> None:
        """Frees operands and sizes; the harness is its caller's."""
        self._drop()
        self.inputs = Inputs(self.harness)
