"""The race of the candidates: in turns, in orders drawn anew, pruned where they are slow, combined over samples, the winner confirmed."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.measure.check import Outcome
from hipgroupgemm.measure.timer import leader_of, ratio_to
from hipgroupgemm.processes import WorkerDied, WorkerTimedOut
from hipgroupgemm.tuning.race import Entry, Race
from hipgroupgemm.tuning.report import best_row
from hipgroupgemm.tuning.runners import Deadlines, Runner


class FakeRunner(Runner):
    """Says what `ms` says for (name, sample, how often it was asked before); keeps who was asked."""

    def __init__(self, ms):
        self.ms, self.calls, self.checked, self.forgotten = ms, [], [], []
        self.seen = collections.Counter()

    def time(self, algorithm, sample, turn, checked):
        self.calls.append(algorithm.name)
        count = self.seen[algorithm.name, sample]
        self.seen[algorithm.name, sample] += 1
        if checked:
            self.checked.append(algorithm.name)
        found = self.ms(algorithm.name, sample, count)
        return found if isinstance(found, Outcome) else Outcome(ms=found)

    def forget(self, algorithm):
        self.forgotten.append(algorithm.name)

    def _step(self, kind, algorithm, *arguments):
        raise NotImplementedError

    def close(self, *, abruptly=False):
        pass


def run(names, ms, *, samples=1, warmup=0, repetitions=None, seed=0, deadlines=None, confirm=None):
    """The runner, the entries by name, and what progress was told; `confirm` gets the notes of a confirmation."""
    runner = FakeRunner(ms)
    entries = [Entry(MatmulAlgorithm("fake", index, name, 0, True), runner) for index, name in enumerate(names)]
    told = []
    race = Race(entries, samples, warmup, repetitions, seed, deadlines or Deadlines(60), lambda e, n: told.append((e.algorithm.name, n)))
    race.run()
    if confirm is not None:
        race.confirm(confirm)
    return runner, {entry.algorithm.name: entry for entry in entries}, told


def rows_of(entries):
    leader = leader_of([entry for entry in entries.values() if not entry.verdict])
    return {name: entry.row(leader, 1e9, None) for name, entry in entries.items()}


def test_candidates_take_turns_in_an_order_of_each_round_s_own():
    names = [f"a{i}" for i in range(9)]
    runner, _, _ = run(names, lambda *_: 1.0, repetitions=6)
    rounds = [runner.calls[i : i + 9] for i in range(0, len(runner.calls), 9)]
    assert len(rounds) == 6
    assert all(sorted(one) == names for one in rounds)
    assert rounds[0] == names  # the best guesses first, since a time limit may come
    assert len({tuple(one) for one in rounds}) >= 5
    again, _, _ = run(names, lambda *_: 1.0, repetitions=6)
    assert again.calls == runner.calls
    other, _, _ = run(names, lambda *_: 1.0, repetitions=6, seed=1)
    assert other.calls != runner.calls


def test_drift_hits_all_alike():
    """Clocks that fall by half while it is measured: two equal candidates have equal medians to within a round's drift."""
    calls = iter(range(10**6))
    _, entries, _ = run(["a", "b"], lambda *_: 1.0 + next(calls) / 40, repetitions=20)
    assert entries["a"].median == pytest.approx(entries["b"].median, abs=0.06)


def test_who_is_far_behind_is_pruned():
    ms = {"best": 1.0, "near": 1.9, "far": 2.1}
    runner, entries, _ = run(ms, lambda name, *_: ms[name], repetitions=10)
    assert [len(entries[name].times) for name in ms] == [10, 10, 3]
    assert (entries["far"].verdict, entries["near"].verdict) == ("pruned", "")
    assert "2.1 times the leader's time in the same 3 rounds" in entries["far"].reason
    assert runner.forgotten == ["far"]
    row = entries["far"].row(entries["best"], 1e9, 0.5)
    assert (row.verdict, row.median_ms, row.ratio, row.samples) == ("pruned", None, 2.1, 3)


def test_who_was_left_behind_one_that_fails_comes_back():
    """The fastest is wrong in its last round; the others then go on where they were, and the far slower one is left behind again."""
    ms = {"cheat": 0.1, "good": 1.0, "far": 3.0}

    def says(name, _, count):
        return Outcome("wrong", "late", 9.0, 1.0) if (name, count) == ("cheat", 7) else ms[name]

    runner, entries, _ = run(ms, says, repetitions=8)
    assert runner.seen["good", 0] == 8
    assert {name: entry.verdict for name, entry in entries.items()} == {"cheat": "wrong", "good": "", "far": "pruned"}
    assert "3 times the leader's time" in entries["far"].reason
    assert runner.checked.count("good") == 1
    assert entries["good"].row(None, 1.0, None).samples == 8


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
    row = entries["a"].row(None, 6e9, 1.5)
    assert (row.median_ms, row.samples, row.tflops, row.fraction) == (3.0, 5, 2.0, 0.5)
    assert (row.p10_ms, row.p90_ms) == tuple(np.percentile(times, (10, 90)))


def test_samples_are_combined_by_their_mean():
    """Routing a favours the one, routing b the other; the mean decides."""
    ms = {("even", 0): 1.0, ("even", 1): 1.0, ("odd", 0): 0.2, ("odd", 1): 1.6}
    _, entries, _ = run(["even", "odd"], lambda name, sample, _: ms[name, sample], samples=2, repetitions=5)
    assert (entries["even"].median, entries["odd"].median) == (1.0, pytest.approx(0.9))


def test_warm_ups_are_not_counted():
    _, entries, _ = run(["a"], lambda _, __, count: 100.0 if count < 3 else 1.0, warmup=3, repetitions=4)
    assert list(entries["a"].times.values()) == [1.0] * 4


def test_the_last_round_is_judged():
    runner, _, _ = run(["a", "b"], lambda *_: 1.0, repetitions=7)
    assert sorted(runner.checked) == ["a", "b"]
    assert sorted(runner.calls[-2:]) == sorted(runner.checked[-2:])
    runner, entries, _ = run(
        ["a", "b"], lambda name, _, c: Outcome("wrong", "late", 9.0, 1.0) if (name, c) == ("b", 6) else 1.0, repetitions=7
    )
    assert (entries["b"].verdict, entries["b"].reason, entries["b"].error) == ("wrong", "late", 9.0)
    assert entries["b"].row(None, 1.0, None).median_ms is None


def test_who_fails_is_asked_no_more():
    runner, entries, _ = run(["a", "b"], lambda name, *_: Outcome("crashed", "gone") if name == "a" else 1.0, samples=2, repetitions=5)
    assert runner.calls.count("a") == 1
    assert entries["a"].row(None, 1.0, None).verdict == "crashed"
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
    class Short(Deadlines):
        def __init__(self, calls):
            super().__init__(60)
            self.calls = calls

        def over(self):
            self.calls -= 1
            return self.found and self.calls < 0

    _, entries, _ = run(["a", "b", "c"], lambda *_: 1.0, repetitions=9, deadlines=Short(2))
    assert [len(entries[name].times) for name in "abc"] == [1, 1, 0]
    rows = [entries[name].row(None, 1.0, None) for name in "abc"]
    assert [row.verdict for row in rows] == ["ok", "ok", "untimed"]
    assert "time limit" in rows[2].reason
    _, entries, _ = run(["a", "b", "c"], lambda *_: 1.0, repetitions=9, deadlines=Short(0))
    assert [len(entries[name].times) for name in "abc"] == [1, 0, 0]  # one at the least


def test_the_largest_error_is_kept():
    entry = Entry(MatmulAlgorithm("fake", 0, "a", 0, True), FakeRunner(None))
    for error, limit in ((1e-3, 2.0), (5e-3, 3.0), (2e-3, 4.0)):
        assert entry.take(Outcome(error=error, error_limit=limit))
    assert (entry.error, entry.error_limit, entry.checked) == (5e-3, 3.0, 3)
    assert not entry.take(Outcome("wrong", "why", math.nan, 5.0))
    assert math.isnan(entry.error)


def test_progress_counts_rounds():
    _, _, told = run(["a", "b"], lambda *_: 1.0, repetitions=3)
    assert sorted(name for name, _ in told) == ["a"] * 3 + ["b"] * 3
    assert {total for _, total in told} == {6}


def test_deadlines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hipgroupgemm.tuning.runners.time.monotonic", lambda: now[0])
    deadlines = Deadlines(60.0, 30.0)
    assert deadlines.of_steps()["run"] == 30.0  # no right candidate yet: the limit waits, and one may take all of it
    now[0] = 140.0
    assert not deadlines.over()
    deadlines.found = True
    assert deadlines.over()
    limits = deadlines.of_steps()
    assert 0 < limits["run"] < 60.0
    assert deadlines.shortened(WorkerTimedOut("run", limits["run"]))
    assert not deadlines.shortened(WorkerTimedOut("run", 60.0))
    assert not deadlines.shortened(WorkerDied("gone", step="run"))
    assert not Deadlines(60.0).over()
    assert limits["operands"] >= 600
    assert 0 < limits["close"] < 60.0
    assert 60.0 <= limits["check"] < 600  # the time limit holds for judging too
    assert deadlines.shortened(WorkerTimedOut("check", limits["check"]))
    assert not deadlines.shortened(WorkerTimedOut("close", limits["close"]))  # who takes so long hangs
    assert Deadlines(60.0).of_steps()["check"] >= 600


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_none(ms):
    _, entries, _ = run(["odd", "good"], lambda name, *_: ms if name == "odd" else 0.002, repetitions=4)
    assert (entries["odd"].verdict, entries["good"].verdict) == ("failed", "")
    assert f"{ms} ms" in entries["odd"].reason
    assert entries["odd"].row(None, 1.0, None).median_ms is None
    assert len(entries["good"].times) == 4


def test_who_is_blamed_out_of_turn_is_asked_no_more():
    """By another one's turn: it had to make room and could not be closed."""

    def says(name, _, count):
        if (name, count) == ("good", 3):
            entries["culprit"].record_failure(Outcome("failed", "close is broken"))
        return {"culprit": 0.9, "good": 1.0, "near": 1.0}[name]

    runner = FakeRunner(says)
    entries = {n: Entry(MatmulAlgorithm("fake", i, n, 0, True), runner) for i, n in enumerate(("culprit", "good", "near"))}
    Race(list(entries.values()), 1, 0, 8, 0, Deadlines(60)).run()
    assert runner.seen["culprit", 0] <= 4
    assert {name: entry.verdict for name, entry in entries.items()} == {"culprit": "failed", "good": "", "near": ""}


def test_the_first_failure_counts():
    entry = Entry(MatmulAlgorithm("fake", 0, "a", 0, True), FakeRunner(None))
    entry.record_failure(Outcome("wrong", "first"))
    entry.record_failure(Outcome("failed", "second"))
    assert (entry.verdict, entry.reason) == ("wrong", "first")


# ---- clocks that move -----------------------------------------------------------------------------------------------------------


class Drift:
    """A clock that falls: the first rounds are fast, the later ones are slow, by up to `most` times."""

    def __init__(self, ms, calls, most=4.0):
        self.ms, self.calls, self.most, self.done = ms, calls, most, 0

    def __call__(self, name, *_):
        self.done += 1
        return self.ms[name] * (1 + (self.most - 1) * min(self.done / self.calls, 1.0))


def test_no_pruned_candidate_is_shown_faster_than_the_winner():
    """Timed in the first rounds alone, the pruned ones have smaller medians than the winner has over all rounds."""
    ms = {"best": 1.0, "near": 1.3, **{f"far{i}": 2.4 for i in range(4)}}
    _, entries, _ = run(ms, Drift(ms, 40, 8.0), repetitions=20, confirm=[])
    assert [name for name, entry in entries.items() if entry.verdict == "pruned"] == [f"far{i}" for i in range(4)]
    assert entries["far0"].median < entries["best"].median  # the trap
    rows = rows_of(entries)
    assert best_row(rows.values()).algorithm.name == "best"
    assert rows["best"].ratio == 1.0
    for name in ("far0", "far3"):
        assert rows[name].ratio > 2
        assert rows[name].median_ms is rows[name].p10_ms is rows[name].tflops is None


def test_pruning_compares_times_of_the_same_rounds():
    """The clock falls to a sixth while they are timed: nobody is pruned for being timed later."""
    ms = {"a": 1.0, "b": 1.02, "c": 1.05}
    _, entries, _ = run(ms, Drift(ms, 12, 6.0), repetitions=20)
    assert [entry.verdict for entry in entries.values()] == ["", "", ""]


def test_who_comes_back_is_compared_in_common_rounds():
    """The leader fails in its last round; who was pruned for it has missed the fast rounds, and wins nonetheless."""
    ms = {"cheat": 0.1, "slow": 1.5, "fast": 1.0}
    drift = Drift(ms, 60, 5.0)

    def says(name, sample, count):
        return Outcome("wrong", "late", 9.0, 1.0) if (name, count) == ("cheat", 9) else drift(name)

    _, entries, _ = run(ms, says, repetitions=10)
    rows = rows_of(entries)
    assert (rows["cheat"].verdict, rows["fast"].verdict, rows["slow"].verdict) == ("wrong", "ok", "ok")
    assert rows["fast"].ratio == 1.0
    assert rows["slow"].ratio == pytest.approx(1.5, rel=0.3)


def test_the_winner_is_confirmed_against_the_runner_up():
    """One was lucky in all rounds that all took part in: against the runner-up alone it is not."""
    ms = {"lucky": 1.0, "better": 1.05, "third": 1.5}

    def says(name, _, count):
        return 1.3 if (name == "lucky" and count >= 3) else ms[name]

    runner, entries, _ = run(ms, says, repetitions=3)
    assert best_row(rows_of(entries).values()).algorithm.name == "lucky"
    notes = []
    runner, entries, _ = run(ms, says, repetitions=3, confirm=notes)
    assert [runner.seen[name, 0] for name in ms] == [6, 6, 3]
    runner, entries, _ = run(ms, lambda name, _, count: says(name, _, count + 1), repetitions=4, confirm=notes)
    rows = rows_of(entries)
    assert best_row(rows.values()).algorithm.name == "better"
    assert rows["better"].ratio == 1.0 < rows["lucky"].ratio
    assert notes == []


def test_one_that_fails_when_it_is_confirmed_is_no_winner():
    runner, entries, _ = run(
        ["a", "b", "c"],
        lambda name, _, c: Outcome("crashed", "late") if (name, c) == ("a", 4) else {"a": 1, "b": 1.2, "c": 1.3}[name],
        repetitions=3,
        confirm=[],
    )
    rows = rows_of(entries)
    assert rows["a"].verdict == "crashed"
    assert best_row(rows.values()).algorithm.name == "b"
    assert runner.seen["c", 0] == 6  # the new runner-up


def test_without_time_the_winner_is_not_confirmed_and_a_note_says_so():
    class Over(Deadlines):
        def over(self):
            return len(calls) >= 6

    calls, notes = [], []

    def says(name, *_):
        calls.append(name)
        return 1.0

    run(["a", "b"], says, repetitions=3, deadlines=Over(60), confirm=notes)
    assert notes == ["the time limit came before the winner was confirmed against the runner-up"]


def test_ratios_need_a_common_round():
    one, other = (Entry(MatmulAlgorithm("fake", i, str(i), 0, True), FakeRunner(None), times={i: 1.0}) for i in range(2))
    assert ratio_to(one, other) is None
    assert leader_of([]) is None
    assert leader_of([one, other]) is one
