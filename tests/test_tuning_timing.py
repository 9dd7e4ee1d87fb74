"""How candidates are timed: in turns, in orders drawn anew, left behind where they are slow, combined over samples."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.measure.timer import Entry, close_entries, time_entries
from hipgroupgemm.measure.verify import Outcome
from hipgroupgemm.tuning.runners import Patience, Runner


class FakeLane(Runner):
    """Says what `ms` says for (name, sample, how often it was asked before); keeps who was asked."""

    def __init__(self, ms):
        self.ms, self.calls, self.judged, self.forgotten = ms, [], [], []
        self.seen = collections.Counter()
        self.turns = collections.defaultdict(list)

    def time(self, algorithm, sample, turn, judged):
        self.calls.append(algorithm.name)
        self.turns[algorithm.name].append(turn)
        count = self.seen[algorithm.name, sample]
        self.seen[algorithm.name, sample] += 1
        if judged:
            self.judged.append(algorithm.name)
        found = self.ms(algorithm.name, sample, count)
        return found if isinstance(found, Outcome) else Outcome(ms=found)

    def forget(self, algorithm):
        self.forgotten.append(algorithm.name)


def run(names, ms, *, samples=1, warmup=0, repetitions=None, seed=0, patience=None):
    lane = FakeLane(ms)
    entries = [Entry(MatmulAlgorithm("fake", index, name, 0, True), lane) for index, name in enumerate(names)]
    told = []
    time_entries(
        entries,
        samples,
        warmup=warmup,
        repetitions=repetitions,
        seed=seed,
        patience=patience or Patience(60, None),
        progress=lambda number, rounds, entry: told.append((number, rounds, entry.algorithm.name)),
    )
    return lane, {entry.algorithm.name: entry for entry in entries}, told


def test_candidates_take_turns_in_an_order_of_each_round_s_own():
    names = [f"a{i}" for i in range(9)]
    lane, _, _ = run(names, lambda *_: 1.0, repetitions=6)
    rounds = [lane.calls[i : i + 9] for i in range(0, len(lane.calls), 9)]
    assert len(rounds) == 6
    assert all(sorted(one) == names for one in rounds)
    assert rounds[0] == names  # the best guesses first, since a time limit may come
    assert len({tuple(one) for one in rounds}) >= 5
    again, _, _ = run(names, lambda *_: 1.0, repetitions=6)
    assert again.calls == lane.calls
    other, _, _ = run(names, lambda *_: 1.0, repetitions=6, seed=1)
    assert other.calls != lane.calls


def test_drift_hits_all_alike():
    """Clocks that fall by half while it is measured: two equal candidates have equal medians to within a round's drift."""
    calls = iter(range(10**6))
    _, entries, _ = run(["a", "b"], lambda *_: 1.0 + next(calls) / 40, repetitions=20)
    assert entries["a"].median == pytest.approx(entries["b"].median, abs=0.06)


def test_far_behind_is_left_behind():
    ms = {"best": 1.0, "near": 1.9, "far": 2.1}
    lane, entries, _ = run(ms, lambda name, *_: ms[name], repetitions=10)
    assert [len(entries[name].times) for name in ms] == [10, 10, 3]
    assert (entries["far"].verdict, entries["near"].verdict) == ("behind", "")
    assert "2.1 times the best time after 3 rounds" in entries["far"].reason
    assert lane.forgotten == ["far"]
    row = entries["far"].row(1e9, 0.5)
    assert (row.verdict, row.median_ms, row.samples) == ("behind", 2.1, 3)


def test_who_was_left_behind_one_that_fails_comes_back():
    """The fastest is wrong in its last round; the others then go on where they were, and the far slower one is left behind again."""
    ms = {"cheat": 0.1, "good": 1.0, "far": 3.0}

    def says(name, _, count):
        return Outcome("wrong", "late", 9.0, 1.0) if (name, count) == ("cheat", 7) else ms[name]

    lane, entries, _ = run(ms, says, repetitions=8)
    assert lane.seen["good", 0] == 8
    assert {name: entry.verdict for name, entry in entries.items()} == {"cheat": "wrong", "good": "", "far": "behind"}
    assert "3 times the best time" in entries["far"].reason
    assert lane.judged.count("good") == 1
    assert entries["good"].row(1.0, None).samples == 8


def test_one_slow_run_leaves_nobody_behind():
    _, entries, _ = run(["a", "b"], lambda name, _, count: 9.0 if (name, count) == ("b", 0) else 1.0, repetitions=8)
    assert entries["b"].verdict == ""
    assert entries["b"].median == 1.0


def test_nobody_is_left_behind_who_has_been_timed_in_full():
    _, entries, _ = run(["a", "b"], lambda name, *_: {"a": 1.0, "b": 5.0}[name], repetitions=3)
    assert [entry.verdict for entry in entries.values()] == ["", ""]


def test_medians_and_percentiles():
    times = [5.0, 1.0, 2.0, 4.0, 3.0]
    _, entries, _ = run(["a"], lambda _, __, count: times[count], repetitions=5)
    row = entries["a"].row(6e9, 1.5)
    assert (row.median_ms, row.samples, row.tflops, row.fraction) == (3.0, 5, 2.0, 0.5)
    assert (row.p10_ms, row.p90_ms) == tuple(np.percentile(times, (10, 90)))


def test_samples_are_combined_by_their_mean():
    """Routing a favours the one, routing b the other; the mean decides."""
    ms = {("even", 0): 1.0, ("even", 1): 1.0, ("odd", 0): 0.2, ("odd", 1): 1.6}
    _, entries, _ = run(["even", "odd"], lambda name, sample, _: ms[name, sample], samples=2, repetitions=5)
    assert (entries["even"].median, entries["odd"].median) == (1.0, pytest.approx(0.9))


def test_warm_ups_are_not_counted():
    _, entries, _ = run(["a"], lambda _, __, count: 100.0 if count < 3 else 1.0, warmup=3, repetitions=4)
    assert entries["a"].times == [1.0] * 4


def test_turns_rotate_the_operands():
    lane, _, _ = run(["a", "b", "c"], lambda *_: 1.0, repetitions=8)
    assert all(len({turn % 8 for turn in turns}) > 3 for turns in lane.turns.values())


def test_the_last_round_is_judged():
    lane, _, _ = run(["a", "b"], lambda *_: 1.0, repetitions=7)
    assert sorted(lane.judged) == ["a", "b"]
    assert sorted(lane.calls[-2:]) == sorted(lane.judged[-2:])
    lane, entries, _ = run(
        ["a", "b"], lambda name, _, c: Outcome("wrong", "late", 9.0, 1.0) if (name, c) == ("b", 6) else 1.0, repetitions=7
    )
    assert (entries["b"].verdict, entries["b"].reason, entries["b"].error) == ("wrong", "late", 9.0)
    assert entries["b"].row(1.0, None).median_ms is None


def test_who_fails_is_asked_no_more():
    lane, entries, _ = run(["a", "b"], lambda name, *_: Outcome("crashed", "gone") if name == "a" else 1.0, samples=2, repetitions=5)
    assert lane.calls.count("a") == 1
    assert entries["a"].row(1.0, None).verdict == "crashed"
    assert len(entries["b"].times) == 5


def test_without_a_number_there_are_as_many_rounds_as_fit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("hipgroupgemm.measure.timer.time.monotonic", lambda: now[0])

    def slow(*_):
        now[0] += 0.5
        return 500.0

    assert len(run(["a"], slow)[1]["a"].times) == 5
    now[0] = 0.0
    assert len(run(["a"], lambda *_: 1.0)[1]["a"].times) == 20


def test_a_time_limit_keeps_what_is_done():
    class Short(Patience):
        def __init__(self, calls):
            super().__init__(60, None)
            self.calls = calls

        def over(self):
            self.calls -= 1
            return self.found and self.calls < 0

    _, entries, _ = run(["a", "b", "c"], lambda *_: 1.0, repetitions=9, patience=Short(2))
    assert [len(entries[name].times) for name in "abc"] == [1, 1, 0]
    rows = [entries[name].row(1.0, None) for name in "abc"]
    assert [row.verdict for row in rows] == ["ok", "ok", "untimed"]
    assert "time limit" in rows[2].reason
    _, entries, _ = run(["a", "b", "c"], lambda *_: 1.0, repetitions=9, patience=Short(0))
    assert [len(entries[name].times) for name in "abc"] == [1, 0, 0]  # one at the least


def test_the_largest_error_is_kept():
    entry = Entry(MatmulAlgorithm("fake", 0, "a", 0, True), FakeLane(None))
    for error, limit in ((1e-3, 2.0), (5e-3, 3.0), (2e-3, 4.0)):
        assert entry.take(Outcome(error=error, error_limit=limit))
    assert (entry.error, entry.error_limit, entry.checked) == (5e-3, 3.0, 3)
    assert not entry.take(Outcome("wrong", "why", math.nan, 5.0))
    assert math.isnan(entry.error)


def test_progress_counts_rounds():
    _, _, told = run(["a", "b"], lambda *_: 1.0, repetitions=3)
    assert [number for number, _, _ in told] == [0, 0, 1, 1, 2, 2]
    assert {rounds for _, rounds, _ in told} == {3}


def test_patience(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hipgroupgemm.tuning.runners.time.monotonic", lambda: now[0])
    patience = Patience(60.0, 30.0)
    assert patience.limits()["run"] == 30.0  # no right candidate yet: the limit waits, and one may take all of it
    now[0] = 140.0
    assert not patience.over()
    patience.found = True
    assert patience.over()
    limits = patience.limits()
    assert 0 < limits["run"] < 60.0
    assert patience.shortened("run", limits["run"])
    assert not patience.shortened("run", 60.0)
    assert not Patience(60.0, None).over()
    assert limits["operands"] >= 600
    assert 0 < limits["close"] < 60.0
    assert 60.0 <= limits["check"] < 600  # the time limit holds for judging too
    assert patience.shortened("check", limits["check"])
    assert not patience.shortened("close", limits["close"])  # who takes so long hangs
    assert Patience(60.0, None).limits()["check"] >= 600


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_none(ms):
    _, entries, _ = run(["odd", "good"], lambda name, *_: ms if name == "odd" else 0.002, repetitions=4)
    assert (entries["odd"].verdict, entries["good"].verdict) == ("failed", "")
    assert f"{ms} ms" in entries["odd"].reason
    assert entries["odd"].row(1.0, None).median_ms is None
    assert len(entries["good"].times) == 4


def test_who_is_blamed_out_of_turn_is_asked_no_more():
    """By another one's turn: it had to make room and could not be closed."""

    def says(name, _, count):
        if (name, count) == ("good", 3):
            entries["culprit"].blame(Outcome("failed", "close is broken"))
        return {"culprit": 0.9, "good": 1.0, "near": 1.0}[name]

    lane = FakeLane(says)
    entries = {n: Entry(MatmulAlgorithm("fake", i, n, 0, True), lane) for i, n in enumerate(("culprit", "good", "near"))}
    time_entries(list(entries.values()), 1, warmup=0, repetitions=8, seed=0, patience=Patience(60, None), progress=lambda *_: None)
    assert lane.seen["culprit", 0] <= 4
    assert {name: entry.verdict for name, entry in entries.items()} == {"culprit": "failed", "good": "", "near": ""}


def test_closing_is_a_part_of_being_right():
    lane = FakeLane(None)
    fast, slow, far = entries = [Entry(MatmulAlgorithm("fake", i, str(i), 0, True), lane, times=[1.0]) for i in range(3)]
    far.verdict = "behind"
    lane.forget = lambda algorithm: fast.blame(Outcome("hung", "while it was closed")) if algorithm is fast.algorithm else None
    assert not close_entries(entries)
    assert [entry.verdict for entry in entries] == ["hung", "", ""]  # the one behind is back
    assert close_entries([slow, far])
    slow.blame(Outcome("wrong", "first"))
    slow.blame(Outcome("failed", "second"))
    assert slow.reason == "first"
