"""Fair times: candidates take turns, cold each time, in an order that is drawn anew each round, so that drift hits all alike."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.measure.verify import Outcome
from hipgroupgemm.tuning.report import TuningRow
from hipgroupgemm.tuning.runners import Patience, Runner

__all__ = ["BEHIND", "BEHIND_AFTER", "Entry", "close_entries", "time_entries"]

BEHIND = 2.0
"""A candidate whose median is more than so many times the best one's is not timed any longer ..."""
BEHIND_AFTER = 3
"""... once it has been timed so often."""

_ROUNDS = (5, 20)
_BUDGET_SECONDS = 1.0


@dataclasses.dataclass(eq=False)
class Entry:
    """A candidate on its way through tuning.

    Attributes:
        algorithm, lane: what, and where it runs.
        verdict: "" while nothing is wrong with it. reason: why, where something is.
        error, error_limit, checked: the largest error so far and its limit, and how many runs were judged.
        times: milliseconds a round: the mean over the size samples.
    """

    algorithm: MatmulAlgorithm
    lane: Runner
    verdict: str = ""
    reason: str = ""
    error: float | None = None
    error_limit: float | None = None
    checked: int = 0
    times: list[float] = dataclasses.field(default_factory=list)

    def blame(self, outcome: Outcome) -> None:
        """Takes in what it did out of its turn, unless there is a verdict already."""
        if self.verdict in ("", "behind"):
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

    @property
    def median(self) -> float:
        """Of the times; infinite where there are none."""
        return statistics.median(self.times) if self.times else float("inf")

    def row(self, flops: float, floor_ms: float | None) -> TuningRow:
        """The report's row; flops are the mean over the size samples."""
        verdict, reason = self.verdict, self.reason
        if not verdict:
            verdict, reason = ("ok", "") if self.times else ("untimed", "the time limit came before it was timed")
        measured = bool(self.times) and verdict in ("ok", "behind")
        median = self.median if measured else None
        p10, p90 = (float(q) for q in np.percentile(self.times, (10, 90))) if measured else (None, None)
        return TuningRow(
            self.algorithm,
            verdict,
            reason,
            median_ms=median,
            p10_ms=p10,
            p90_ms=p90,
            tflops=flops / median / 1e9 if median else None,
            fraction=floor_ms / median if median and floor_ms is not None else None,
            error=self.error,
            error_limit=self.error_limit,
            checked=self.checked,
            samples=len(self.times) if measured else 0,
        )


def time_entries(
    entries: Sequence[Entry],
    samples: int,
    *,
    warmup: int,
    repetitions: int | None,
    seed: int,
    patience: Patience,
    progress: Callable[[int, int, Entry], None],
) -> None:
    """Times candidates that are right, in rounds.

    Each round times each candidate once on each size sample, in an order of its own; the first round keeps the entries' order, the best
    guesses first, since a time limit may end it. A candidate's time in a round is the mean over the samples, as if routing like each of
    them came equally often. A round that a time limit cuts short counts for those that were timed in full. In a candidate's last round
    the result is judged once more: what has been right so far may fail when called often. Those that were left behind a candidate that
    fails come back.

    Args:
        entries: in the order of the first round. samples: how many size samples there are.
        warmup: untimed calls of each candidate before its first timed one.
        repetitions: rounds; None for 5 to 20, as many as take about a second a candidate.
        seed: of the orders. patience: of the time limit. progress: called with (rounds done, rounds at the most, entry).
    """
    rng = np.random.default_rng(seed)
    rounds = repetitions or _ROUNDS[1]
    judged = (rounds - 1, (repetitions or _ROUNDS[0]) - 1)  # without a number, the earliest round that may be the last one as well
    patience.found = False  # a time limit waits for the first time
    turn, number, started = 0, 0, time.monotonic()
    out = _out(entries)
    while True:
        due = [entry for entry in entries if not entry.verdict and len(entry.times) < rounds]
        spent = time.monotonic() - started
        if repetitions is None and spent > _BUDGET_SECONDS * len(entries) * samples:
            due = [entry for entry in due if len(entry.times) < _ROUNDS[0]]
        if not due:
            return
        for entry in due if number == 0 else [due[i] for i in rng.permutation(len(due))]:
            if patience.over():
                return
            if entry.verdict:  # was blamed in another one's turn
                continue
            turn += 1
            done = len(entry.times)
            _time_one(entry, samples, turn, judged=done in judged, warmup=0 if done else warmup)
            patience.found = patience.found or bool(entry.times)
            progress(number, rounds, entry)
        if out != (out := _out(entries)):
            _bring_back(entries)  # the one that they were behind may be out
        _leave_behind(entries, rounds)
        number += 1


def _time_one(entry: Entry, samples: int, turn: int, *, judged: bool, warmup: int) -> None:
    total = 0.0
    for sample in range(samples):
        for _ in range(warmup):
            if not entry.take(entry.lane.time(entry.algorithm, sample, turn, False)):
                return
        outcome = entry.lane.time(entry.algorithm, sample, turn + sample, judged)
        if not entry.take(outcome) or outcome.ms is None:
            return
        if not (math.isfinite(outcome.ms) and outcome.ms > 0):
            entry.take(Outcome("failed", f"it was timed at {outcome.ms} ms: the clock or the device's events cannot be relied on"))
            return
        total += outcome.ms
    entry.times.append(total / samples)


def _leave_behind(entries: Sequence[Entry], rounds: int) -> None:
    best = min((entry.median for entry in entries if not entry.verdict), default=float("inf"))
    for entry in entries:
        done = len(entry.times)
        if not entry.verdict and BEHIND_AFTER <= done < rounds and entry.median > BEHIND * best:
            entry.verdict, entry.reason = "behind", f"{entry.median / best:.3g} times the best time after {done} rounds"
            entry.lane.forget(entry.algorithm)


def close_entries(entries: Sequence[Entry]) -> bool:
    """Closes the candidates that are still right; closing is a part of it.

    Returns:
        Whether all could be. Else those that were left behind one that could not are back, and there is timing left to do.
    """
    out = _out(entries)
    for entry in entries:
        if not entry.verdict:
            entry.lane.forget(entry.algorithm)
    if out == _out(entries):
        return True
    _bring_back(entries)
    return False


def _out(entries: Sequence[Entry]) -> int:
    """How many are out of the race for good."""
    return sum(entry.verdict not in ("", "behind") for entry in entries)


def _bring_back(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.verdict == "behind":
            entry.verdict = entry.reason = ""


# ---- below: tuning's next timer, which the benchmark uses already


@dataclasses.dataclass(eq=False)
class Timed:
    """One that is timed among others.

    Attributes:
        times: milliseconds by round.
    """

    times: dict[int, float] = dataclasses.field(default_factory=dict, kw_only=True)

    @property
    def racing(self) -> bool:
        """Whether it is to be timed any longer."""
        return True

    @property
    def median(self) -> float:
        """Of its times; infinite where there are none."""
        return statistics.median(self.times.values()) if self.times else float("inf")


_Timed = TypeVar("_Timed", bound=Timed)


def ratio_to(one: Timed, leader: Timed) -> float | None:
    """The median of its time over the leader's in the rounds that both have; None where there is none."""
    common = one.times.keys() & leader.times.keys()
    return statistics.median(one.times[number] / leader.times[number] for number in common) if common else None


def leader_of(entries: Sequence[_Timed]) -> _Timed | None:
    """The fastest one by the rounds that it has in common with each other one; None where none has a time."""
    timed = [entry for entry in entries if entry.times]
    leader = min(timed, key=lambda entry: entry.median, default=None)
    for _ in timed:  # ratios of different rounds need not be transitive: it ends nonetheless
        ratios = [(ratio, entry) for entry in timed if leader is not None and (ratio := ratio_to(entry, leader)) is not None]
        best, faster = min(ratios, key=lambda pair: pair[0])
        if best >= 1:
            break
        leader = faster
    return leader


def time_rounds(
    entries: Sequence[_Timed],
    time_once: Callable[[_Timed, int], float | None],
    *,
    rounds: tuple[int, int],
    seconds: float = float("inf"),
    seed: int = 0,
    over: Callable[[], bool] = lambda: False,
    after_round: Callable[[int], object] = lambda number: None,
) -> None:
    """Times entries in rounds, each of which times each entry once.

    The first round keeps the entries' order, the best guesses first, since a time limit may end it; every other has an order of its own.

    Args:
        entries: those that are racing are timed, until they no longer are.
        time_once: milliseconds of an entry in the round of that number; None where it could not be timed, and is not racing any more.
        rounds: how many each entry gets at the least, and at the most where they take no longer than `seconds` in all.
        seed: of the orders. over: says when to stop at once. after_round: called after each round with its number.
    """
    least, most = rounds
    rng, started = np.random.default_rng(seed), time.monotonic()
    number = first = 1 + max((max(entry.times, default=-1) for entry in entries), default=-1)
    while True:
        enough = most if time.monotonic() - started <= seconds else least
        due = [entry for entry in entries if entry.racing and len(entry.times) < enough]
        if not due:
            return
        for entry in due if number == first else [due[i] for i in rng.permutation(len(due))]:
            if over():
                return
            if entry.racing:  # another one's turn may have ended it
                took = time_once(entry, number)
                if took is not None:
                    entry.times[number] = took
        after_round(number)
        number += 1
