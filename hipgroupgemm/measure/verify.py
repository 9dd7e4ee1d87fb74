"""Checking and timing executables of one config on its size sets.

Every candidate that is timed has been checked on every size set: on the sizes that are tuned for and on adversarial ones, on outputs full
of NaN and full of numbers, with poison where nothing may be read, by a check that shares no code with any backend. Each set has inputs of
its own at the addresses of the one before, and what a run changes in them is seen. A backend's promise counts for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.base import Harness, OperandSet
from hipgroupgemm.measure.check import Outcome, bounds_of
from hipgroupgemm.measure.sizes import SizeSet, size_sets
from hipgroupgemm.operands.views import ArrayView

__all__ = ["Part", "SizeSet", "Verifier", "group_parts", "size_sets", "unread_parts"]

Array = np.ndarray[Any, Any]

_NUMBERS = 0x42
"""Elements whose bytes are all this are finite and not small in any type (2.3 to 1.6e11)."""


Part = tuple[str, dict[int, tuple[int, int]]]
"""Of an operand, by name: first and one-past-last index along some axes."""


def unread_parts(config: GroupedGemmConfig, sizes: Any, group_offset: int) -> Iterator[Part]:
    """All that a run with these host sizes does not read."""
    for entry, (starts, ends) in enumerate(zip(*bounds_of(config, sizes, group_offset), strict=True)):
        first, last = (int(starts[0]), int(ends[-1])) if starts.size else (0, 0)
        for name, axis in _ragged_axes(config).items():
            for rows in ((0, first), (last, config.ragged_extent)):
                yield name, {1: (entry, entry + 1), axis: rows}
        if config.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            edges = np.flatnonzero(np.diff(starts >= ends, prepend=False, append=False))  # of runs of empty groups
            for first, last in edges.reshape(-1, 2).tolist():
                yield "rhs", {0: (first, last), 1: (entry, entry + 1)}


def group_parts(config: GroupedGemmConfig, sizes: Any, group_offset: int, group: int) -> tuple[list[Part], list[Part]]:
    """What one group, counted from the first that is computed, alone reads; and what of out it alone fills."""
    read: list[Part] = []
    filled: list[Part] = []
    contracting = config.ragged_mode is RaggedDotMode.CONTRACTING
    starts, ends = bounds_of(config, sizes, group_offset)
    for entry, rows in enumerate(zip(starts[:, group].tolist(), ends[:, group].tolist(), strict=True)):
        mine = {1: (entry, entry + 1)}
        slab = mine | {0: (group, group + 1)}
        read += [(name, mine | {axis: rows}) for name, axis in _ragged_axes(config).items()]
        read += [] if contracting else [("rhs", slab)]
        if rows[0] < rows[1]:
            filled.append(("out", slab if contracting else mine | {2: rows}))
    return read, filled


def _ragged_axes(config: GroupedGemmConfig) -> dict[str, int]:
    """The ragged axis of each operand that has one."""
    return {"lhs": 2} if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else {"lhs": 3, "rhs": 2}


def _at(where: str, outcome: Outcome) -> Outcome:
    """An outcome whose reason, if it has one, says where."""
    return dataclasses.replace(outcome, reason=f"{where}: {outcome.reason}") if outcome.reason else outcome


class Verifier:
    """Brings operands through a config's size sets, and checks and times executables on them.

    Sizes and operands are changed in place between size sets: a candidate that remembers by address what it has read is wrong from the
    second set on.

    Args:
        harness: where. config: the problem, with its true ragged extent. sets: the size sets.
        seed: of operands and of the check's sample.
        watch: whether it is looked at after each run if inputs are as they were. budget: of a check, see `Harness.check`.
        note: called before each step with what comes: "operands", "prepare", "run" or "check".

    Attributes:
        operands: what runs now. sizes: sizes or end offsets. group_offset: the first group, here or on the device.

    Raises MemoryError where the device has not room for the operands.
    """

    operands: OperandSet
    sizes: ArrayView
    group_offset: int | ArrayView

    def __init__(
        self,
        harness: Harness,
        config: GroupedGemmConfig,
        sets: Sequence[SizeSet],
        *,
        seed: int = 0,
        watch: bool = True,
        budget: float | None = None,
        note: Callable[[str], None] = lambda step: None,
    ) -> None:
        self.harness, self.config, self.sets = harness, config, sets
        self._seed, self._watch, self._budget, self._note = seed, watch, budget, note
        self._memory: dict[tuple[str, str, tuple[int, ...]], ArrayView] = {}  # of integers, by name, type and shape
        self._integers: dict[str, tuple[ArrayView, Array]] = {}  # where they lie, and what they are
        self._digests: dict[str, int] = {}  # of inputs as they should be
        self._make(config)

    def _make(self, config: GroupedGemmConfig) -> None:
        self.operands = self.harness.operands(config, seed=self._seed)
        self._ready: tuple[int, SizeSet] | None = None  # the set that the operands are ready for
        self._spoiled: list[Part] = []  # of out, what is NaN by right
        self._spent = False  # inputs are poisoned, or a candidate has changed them

    def use(self, index: int, *, timing: bool) -> SizeSet:
        """Brings operands, sizes and poison of a size set to where the last one's were; the set as it can be had."""
        chosen = self.sets[index]
        self._note("operands")
        if self._ready is not None and self._ready[0] == index:
            return self._ready[1]
        config = chosen.config or self.config
        if self.operands.config != config or not self.operands.memory:
            self.harness.release(self.operands)
            self._ready, self._digests = None, {}
            self._make(config)
        elif self._spent or not (timing or self._ready is None):
            self.harness.renew(self.operands, seed=self._seed + 7919 * (index + 1))
            self._digests = {}
        self._spent, self._ready, self._spoiled = True, None, []
        poisoned = chosen.adversarial and not timing and config.ragged_mode is not RaggedDotMode.BATCH
        if poisoned:
            chosen = self._poison(chosen)
        self._place_integers(chosen)
        if self._watch and not self._digests:
            self._digests = self.harness.digest(self.operands)
        self._spent, self._ready = poisoned, (index, chosen)
        return chosen

    def _poison(self, chosen: SizeSet) -> SizeSet:
        """Poisons what the sizes do not read, and the group that is to be spoiled where that can be done."""
        operands, at = self.operands, (chosen.sizes, chosen.group_offset)
        for name, part in unread_parts(operands.config, *at):
            self.harness.fill(operands, name, part)
        if chosen.spoiled is None or not operands.layouts["out"].nested:
            return dataclasses.replace(chosen, spoiled=None)
        read, self._spoiled = group_parts(operands.config, *at, chosen.spoiled)
        for name, part in read:
            self.harness.fill(operands, name, part)
        return chosen

    def _place_integers(self, one: SizeSet) -> None:
        """Brings a set's sizes, and its group offset where that lies on the device, to the device."""
        self._integers, values = {}, one.integers()
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
            self.harness.rewrite(self._memory[key], values)
        else:
            self._memory[key] = self.harness.sizes(values)
        self._integers[name] = (self._memory[key], values)
        return self._memory[key]

    def _changed(self) -> str:
        """Which inputs are no longer as they were, in words; "" where all are."""
        digests = self.harness.digest(self.operands) if self._digests else {}
        found = [name for name, digest in digests.items() if digest != self._digests[name]]
        found += [name for name, (view, values) in self._integers.items() if not np.array_equal(self.harness.contents(view), values)]
        return f"it changed its inputs: {', '.join(found)}" if found else ""

    def distrust(self) -> None:
        """A candidate has failed: whoever comes next finds inputs as they should be."""
        try:
            changed = bool(self._changed())
        except Exception:  # the device's own affair
            changed = True
        if changed:
            self._spent, self._ready = True, None

    def check(self, index: int, prepare: Callable[[], Executable], *, deterministic: bool = False) -> Outcome:
        """Runs a candidate on a poisoned out and checks the result; where it claims to be deterministic, runs it again on an out full of
        numbers and compares bits. The verdict is "", "wrong" or "nondeterministic"; what the candidate raises is raised.

        Args:
            index: of the size set. prepare: gives the executable, once the operands are ready. deterministic: what it claims.
        """
        one = self.use(index, timing=False)
        where, fill = one.describe(), _NUMBERS if one.filled else None
        executable = prepare()
        first = self._run(one, executable, fill)
        if first.verdict or not deterministic or one.once:
            return _at(where, first)
        try:
            before = self.harness.snapshot(self.operands)
        except MemoryError:  # without room for a copy of out the bits go unseen; values are checked nonetheless
            return first
        again = _NUMBERS if fill is None else None
        second = self._run(one, executable, again, checked=False)
        differing = self.harness.same(self.operands, before)
        if second.verdict:
            return _at(f"{where}, second run", second)
        if not differing:
            return first
        second = self._result(one, again, self._seed)
        if second.verdict:
            return _at(f"{where}, second run, on an out full of {'numbers' if again is not None else 'NaN'}", second)
        reason = f"{differing} elements differ between two runs on equal inputs, though it claims to be deterministic"
        return _at(where, dataclasses.replace(first, verdict="nondeterministic", reason=reason))

    def _run(self, one: SizeSet, executable: Executable, fill: int | None, *, checked: bool = True) -> Outcome:
        """One run on an out full of NaN or of a byte, waited for: what is wrong with it."""
        harness, operands = self.harness, self.operands
        harness.poison(operands, fill)
        arguments = self._arguments(one)
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
        changed = self._changed()
        if changed or not checked:  # what it has computed from changed inputs cannot be checked
            return Outcome("wrong" if changed else "", changed, 0.0, 0.0)
        result = self._result(one, fill, self._seed)
        if result.verdict or (one.wrong_sizes is None) == (fault is None):
            return result
        words = "it does not report that sizes are wrong"
        if fault is not None:
            words = f"it reports wrong sizes where they are right: {fault.describe(operands.config.ragged_extent)}"
        return dataclasses.replace(result, verdict="wrong", reason=words)

    def _arguments(self, one: SizeSet) -> Arguments:
        how: dict[str, Any] = {"alpha": one.alpha, "beta": one.beta, "tail": one.tail, "ends": one.ends}
        return self.harness.arguments(self.operands, self.sizes, group_offset=self.group_offset, **how)

    def _result(self, one: SizeSet, fill: int | None, seed: int) -> Outcome:
        """What lies in out, which was full of NaN or of a byte before the run."""
        self._note("check")
        for name, part in self._spoiled:
            self.harness.fill(self.operands, name, part, _NUMBERS)
        run: dict[str, Any] = {"alpha": one.alpha, "beta": one.beta, "tail": one.tail, "group_offset": one.group_offset}
        return self.harness.check(self.operands, one.sizes, seed=seed, budget=self._budget, fill=fill, without=one.spoiled, **run)

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
            turn: which timed call it is, for the reason and for the check's sample.
            checked: whether the result is checked as well, or what decides that once the milliseconds are known.
            cold: whether the executable was made anew, so that a call comes first that pays for what only a first call does.
        """
        one, harness = self.use(index, timing=True), self.harness
        executable, arguments = prepare(), self._arguments(one)
        self._note("run")
        if cold:
            executable.execute(arguments)
            harness.synchronize()
        if checked:
            harness.poison(self.operands)
        harness.flush()
        took = harness.time(lambda: executable.execute(arguments))
        where = f"{one.describe()}, timed run {turn}"
        self._note("check")
        changed = self._changed()
        if changed:
            return Outcome("wrong", f"{where}: {changed}", ms=took)
        if not (checked(took) if callable(checked) else checked):
            return Outcome(ms=took)
        return _at(where, dataclasses.replace(self._result(one, None, self._seed + turn), ms=took))

    def close(self) -> None:
        """Frees operands and sizes; the harness is its caller's."""
        self.harness.release(self.operands)
        self._memory, self._integers, self._digests, self._ready = {}, {}, {}, None
