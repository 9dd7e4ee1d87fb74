"""The race of the candidates that are right: timed in rounds, pruned within them, the winner confirmed against the runner-up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.measure.timer import Timed, leader_of, ratio_to, time_rounds
from hipgroupgemm.measure.verify import Outcome
from hipgroupgemm.tuning.report import TuningRow, best_row
from hipgroupgemm.tuning.runners import Deadlines, Runner

__all__ = ["Entry", "Race", "bring_back", "out_of_race"]

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
        if not verdict:
            verdict, reason = ("ok", "") if times else ("untimed", "the time limit came before it was timed")
        row = TuningRow(self.algorithm, "untimed", reason, error=self.error, error_limit=self.error_limit, checked=self.checked)
        if verdict in ("ok", "pruned"):
            row = dataclasses.replace(row, ratio=None if leader is None else ratio_to(self, leader), samples=len(times))
        if verdict == "ok":
            p10, median, p90 = (float(q) for q in np.percentile(times, (10, 50, 90)))
            fraction = None if floor_ms is None else floor_ms / median
            row = dataclasses.replace(row, median_ms=median, p10_ms=p10, p90_ms=p90, tflops=flops / median / 1e9, fraction=fraction)
        return dataclasses.replace(row, verdict=verdict)


def out_of_race(entries: Sequence[Entry]) -> int:
    """How many are out of the race for good."""
    return sum(entry.verdict not in ("", "pruned") for entry in entries)


def bring_back(entries: Sequence[Entry]) -> None:
    """The leader of those that were pruned is out: they race again."""
    for entry in entries:
        if entry.verdict == "pruned":
            entry.verdict = entry.reason = ""


class Race:
    """Times candidates that are right.

    Each round times each candidate once on each size sample. A candidate's time in a round is the mean over the samples, as if routing
    like each of them came equally often. A round that a time limit cuts short counts for those that were timed in full. In a candidate's
    last round the result is checked once more: what has been right so far may fail when called often.

    Args:
        entries: in the order of the first round. samples: how many size samples there are.
        warmup: untimed calls of each candidate before its first timed one.
        repetitions: rounds; None for 5 to 20, as many as take about a second per candidate.
        seed: of the orders. deadlines: of the time limit. progress: called with an entry that was timed, and how often all are at the most.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        samples: int,
        warmup: int,
        repetitions: int | None,
        seed: int,
        deadlines: Deadlines,
        progress: Callable[[Entry, int], object] = lambda entry, total: None,
    ) -> None:
        self._entries, self._samples, self._warmup, self._seed = entries, samples, warmup, seed
        self._rounds = (repetitions, repetitions) if repetitions is not None else _ROUNDS
        self._deadlines, self._progress = deadlines, progress
        self._turn = 0
        self._out = out_of_race(entries)

    def leader(self) -> Entry | None:
        """The fastest one that is right."""
        return leader_of([entry for entry in self._entries if not entry.verdict])

    def run(self) -> None:
        """All rounds that are left."""
        self._deadlines.found = any(entry.times for entry in self._entries)  # a time limit waits for the first time
        seconds = _SECONDS * len(self._entries) * self._samples
        time_rounds(
            self._entries,
            self._time,
            rounds=self._rounds,
            seconds=seconds,
            seed=self._seed,
            over=self._deadlines.over,
            after_round=lambda number: self._prune(),
        )

    def _time(self, entry: Entry, number: int, progress: bool = True) -> float | None:
        del number
        self._turn += 1
        took = self._time_samples(entry)
        if took is not None:
            self._deadlines.found = True
        if progress:
            self._progress(entry, len(self._entries) * self._rounds[1])
        return took

    def _time_samples(self, entry: Entry) -> float | None:
        done, total = len(entry.times), 0.0
        checked = done + 1 in self._rounds  # without a number of rounds, the earliest that may be the last one as well
        for sample in range(self._samples):
            for _ in range(0 if done else self._warmup):
                if not entry.take(entry.runner.time(entry.algorithm, sample, self._turn, False)):
                    return None
            outcome = entry.runner.time(entry.algorithm, sample, self._turn + sample, checked)
            if not entry.take(outcome):
                return None
            if outcome.ms is None or not (math.isfinite(outcome.ms) and outcome.ms > 0):
                entry.take(Outcome("failed", f"it was timed at {outcome.ms} ms: the clock or the device's events cannot be relied on"))
                return None
            total += outcome.ms
        return total / self._samples

    def _prune(self) -> None:
        """Takes out who is far behind the leader of the same rounds; who was, brings them back when that leader is out."""
        if self._out != (out := out_of_race(self._entries)):
            self._out = out
            bring_back(self._entries)
        leader = self.leader()
        for entry in self._entries:
            if leader is None or entry.verdict or len(entry.times) >= self._rounds[1]:
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
            rows = {
                entry.algorithm.key: (entry.row(leader, 0.0, None), entry) for entry in self._entries if not entry.verdict and entry.times
            }
            best = best_row(row for row, _ in rows.values())
            if best is None or len(rows) < 2:
                return
            winner = rows.pop(best.algorithm.key)[1]
            second = min(rows.values(), key=lambda other: other[0].ratio or math.inf)[1]
            pair = frozenset((winner, second))
            if pair in met:
                return
            if self._deadlines.over():
                notes.append("the time limit came before the winner was confirmed against the runner-up")
                return
            met.add(pair)
            self._duel(winner, second)

    def _duel(self, *pair: Entry) -> None:
        """A few rounds of two, who begin by turns."""
        first = 1 + max(number for entry in self._entries for number in entry.times)
        for number in range(first, first + min(_DUEL_ROUNDS, self._rounds[0])):
            for entry in pair if number % 2 else reversed(pair):
                if self._deadlines.over() or not all(one.racing for one in pair):
                    return
                took = self._time(entry, number, progress=False)
                if took is not None:
                    entry.times[number] = took
