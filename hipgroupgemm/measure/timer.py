"""Fair times: all take turns, in an order that is drawn anew each round, and only times of the same rounds are compared.

Clocks move and machines get busy: within a round that hits all alike, so a ratio of two times of one round says something where two times
of different rounds say nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

__all__ = ["Timed", "leader_of", "ratio_to", "time_rounds"]


@dataclasses.dataclass(eq=False)
class Timed:
    """One that is timed among others; `times`: milliseconds by round."""

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
            if entry.racing and (took := time_once(entry, number)) is not None:  # another one's turn may have ended it
                entry.times[number] = took
        after_round(number)
        number += 1
