"""The race of the candidates that are right: timed in rounds, pruned within them, the winner confirmed against the runner-up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.measure.check import Outcome
from hipgroupgemm.measure.timer import Timed, leader_of, ratio_to, time_rounds
from hipgroupgemm.tuning.report import TuningRow, best_row
from hipgroupgemm.tuning.runners import Deadlines, Runner

__all__ = ["Entry", "Race"]

_PRUNED_ABOVE = 2.0
_PRUNED_AFTER = 3  # rounds that it has in common with the leader
_ROUNDS = (5, 20)
_SECONDS = 1.0  # per candidate and sample
_DUELS, _DUEL_ROUNDS = 3, 5


@dataclasses.dataclass(eq=False)
class Entry(Timed):
    """A candidate on its way through tuning.

    Attributes:
        algorithm, runner: what, and where it runs.
        verdict: "" while nothing is wrong with it. reason: why, where something is.
        error, error_limit, checked: the largest error so far and its limit, and how many runs were checked.
    """

    algorithm: MatmulAlgorithm
    runner: Runner
    verdict: str = ""
    reason: str = ""
    error: float | None = None
    error_limit: float | None = None
    checked: int = 0

    @property
    def racing(self) -> bool:
        """Whether it is to be timed any longer."""
        return not self.verdict

    def record_failure(self, outcome: Outcome) -> None:
        """Takes in what it did out of its turn, unless there is a verdict already."""
        if self.verdict in ("", "pruned"):
            self.take(outcome)

    def take(self, outcome: Outcome) -> bool:
        """Takes in a step's outcome; whether the candidate is still in the race."""
        if outcome.error is not None:
            self.checked += 1
            if self.error is None or not outcome.error <= self.error:  # NaN counts as the largest
                self.error, self.error_limit = outcome.error, outcome.error_limit
        if outcome.verdict:
            self.verdict, self.reason = outcome.verdict, outcome.reason
        return not self.verdict

    def row(self, leader: Timed | None, flops: float, floor_ms: float | None) -> TuningRow:
        """The report's row; flops are the mean over the size samples."""
        verdict, reason, times = self.verdict, self.reason, list(self.times.values())
        values: dict[str, Any] = {"error": self.error, "error_limit": self.error_limit, "checked": self.checked}
        if not verdict:
            verdict, reason = ("ok", "") if times else ("untimed", "the time limit came before it was timed")
        if verdict in ("ok", "pruned"):
            values |= {"ratio": None if leader is None else ratio_to(self, leader), "samples": len(times)}
        if verdict == "ok":
            values |= zip(("p10_ms", "median_ms", "p90_ms"), map(float, np.percentile(times, (10, 50, 90))), strict=True)
            values["tflops"] = flops / values["median_ms"] / 1e9
            values["fraction"] = None if floor_ms is None else floor_ms / values["median_ms"]
        return TuningRow(self.algorithm, verdict, reason, **values)


@dataclasses.dataclass(eq=False)
class Race:
    """Times candidates that are right.

    Each round times each candidate once on each size sample. A candidate's time in a round is the mean over the samples, as if routing
    like each of them came equally often. A round that a time limit cuts short counts for those that were timed in full. In a candidate's
    last round the result is checked once more: what has been right so far may fail when called often.

    Attributes:
        entries: in the order of the first round. samples: how many size samples there are.
        warmup: untimed calls of each candidate before its first timed one.
        repetitions: rounds; None for 5 to 20, as many as take about a second per candidate.
        seed: of the orders. deadlines: of the time limit. progress: called with an entry that was timed, and how often all are at the most.
    """

    entries: Sequence[Entry]
    samples: int
    warmup: int
    repetitions: int | None
    seed: int
    deadlines: Deadlines
    progress: Callable[[Entry, int], object] = lambda entry, total: None
    _out: int = 0

    @property
    def rounds(self) -> tuple[int, int]:
        """How many at the least and at the most."""
        return _ROUNDS if self.repetitions is None else (self.repetitions, self.repetitions)

    def leader(self) -> Entry | None:
        """The fastest one that is right."""
        return leader_of([entry for entry in self.entries if entry.racing])

    def finish(self, notes: list[str]) -> None:
        """Times, confirms and closes the candidates, until nobody drops out any more: closing is a part of being right."""
        while True:
            self.run()
            self.confirm(notes)
            for entry in self.entries:
                if entry.racing:
                    entry.runner.forget(entry.algorithm)
            if not self._dropped_out():
                return

    def run(self) -> None:
        """All rounds that are left."""
        self.deadlines.found = any(entry.times for entry in self.entries)  # a time limit waits for the first time
        time_rounds(
            self.entries,
            self._time,
            rounds=self.rounds,
            seconds=_SECONDS * len(self.entries) * self.samples,
            seed=self.seed,
            over=self.deadlines.over,
            after_round=lambda number: self._prune(),
        )

    def _time(self, entry: Entry, number: int) -> float | None:
        took = self._time_samples(entry, number)
        self.deadlines.found |= took is not None
        self.progress(entry, len(self.entries) * self.rounds[1])
        return took

    def _time_samples(self, entry: Entry, number: int) -> float | None:
        done, total = len(entry.times), 0.0
        checked = done + 1 in self.rounds  # without a number of rounds, the earliest that may be the last one as well
        for sample in range(self.samples):
            for _ in range(0 if done else self.warmup):
                if not entry.take(entry.runner.time(entry.algorithm, sample, number, False)):
                    return None
            outcome = entry.runner.time(entry.algorithm, sample, number, checked)
            if not entry.take(outcome):
                return None
            if outcome.ms is None or not 0 < outcome.ms < math.inf:
                entry.take(Outcome("failed", f"it was timed at {outcome.ms} ms: the clock or the device's events cannot be relied on"))
                return None
            total += outcome.ms
        return total / self.samples

    def _dropped_out(self) -> bool:
        """Whether somebody has left the race for good since this was asked. Others may have been pruned for him: they race again."""
        before, self._out = self._out, sum(entry.verdict not in ("", "pruned") for entry in self.entries)
        if self._out == before:
            return False
        for entry in self.entries:
            if entry.verdict == "pruned":
                entry.verdict = entry.reason = ""
        return True

    def _prune(self) -> None:
        """Takes out who is far behind the leader of the same rounds."""
        self._dropped_out()
        leader = self.leader()
        for entry in self.entries:
            if leader is None or not entry.racing or len(entry.times) >= self.rounds[1]:
                continue
            common = len(entry.times.keys() & leader.times.keys())
            ratio = ratio_to(entry, leader)
            if common >= _PRUNED_AFTER and ratio is not None and ratio > _PRUNED_ABOVE:
                entry.verdict, entry.reason = "pruned", f"{ratio:.3g} times the leader's time in the same {common} rounds"
                entry.runner.forget(entry.algorithm)

    def confirm(self, notes: list[str]) -> None:
        """Times the winner and the runner-up against each other: the winner of many has been lucky more often than not."""
        met: set[frozenset[Entry]] = set()
        for _ in range(_DUELS):
            leader = self.leader()
            rows = [(entry.row(leader, 0.0, None), entry) for entry in self.entries if entry.racing and entry.times]
            best = best_row(row for row, _ in rows)
            rows.sort(key=lambda pair: (pair[0] is not best, pair[0].ratio or math.inf))
            pair = [entry for _, entry in rows[:2]]
            if len(pair) < 2 or frozenset(pair) in met:
                return
            if self.deadlines.over():
                notes.append("the time limit came before the winner was confirmed against the runner-up")
                return
            met.add(frozenset(pair))
            self._duel(pair)

    def _duel(self, pair: Sequence[Entry]) -> None:
        """A few rounds of two, who begin by turns."""
        first = 1 + max(number for entry in self.entries for number in entry.times)
        for number in range(first, first + min(_DUEL_ROUNDS, self.rounds[0])):
            for entry in pair if number % 2 else reversed(pair):
                if self.deadlines.over() or not all(one.racing for one in pair):
                    return
                took = self._time(entry, number)
                if took is not None:
                    entry.times[number] = took
