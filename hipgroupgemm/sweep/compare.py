"""What sets two sweeps apart: ratios of times, changed winners, algorithms that were right and are wrong. Plain data, no printing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from hipgroupgemm.measure.environment import busy_note
from hipgroupgemm.measure.workloads import CLASSES, geometric_mean
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.sweep.results import BAD, RIGHT, Record, Row, Sweep
from hipgroupgemm.tuning.tables import FEW

__all__ = ["Comparison", "Finding", "Pair", "compare", "flat", "means_by_class", "series_of"]

DRIFT = 1.1
DOUBTS = {
    "busy": "others were at work on the machine",
    "few": f"fewer than {FEW} timed calls",
    "drift": f"the device's measured roofline differs by more than {DRIFT - 1:.0%}",
}
"""Why the times of two sweeps can't be compared."""


class Pair(msgspec.Struct):
    """One problem of two sweeps. What there is no value for is None.

    Attributes:
        base, other: what came of it in either sweep. base_winner, other_winner: "backend name".
        ratio: the base's median over the other's: above 1 the other is faster. ratio_from, ratio_to: what p10 and p90 make of it.
        within_noise: it may be chance: 1 lies in that range, or both sweeps are of one build on one machine.
        not_comparable: words of `DOUBTS`.
        same_algorithms_ratio: the geometric mean of that ratio over the algorithms that are right and timed in both.
        changed: another algorithm wins. old_winner_now: then, what became of the base's winner in the other sweep.
    """

    job: SweepJob
    base: str | None = None
    other: str | None = None
    base_winner: str | None = None
    other_winner: str | None = None
    base_ms: float | None = None
    other_ms: float | None = None
    ratio: float | None = None
    ratio_from: float | None = None
    ratio_to: float | None = None
    within_noise: bool = False
    not_comparable: str = ""
    same_algorithms_ratio: float | None = None
    changed: bool = False
    old_winner_now: str = ""

    @property
    def mark(self) -> str:
        """What stands before a ratio that means little."""
        return "?" if self.not_comparable else "~" if self.within_noise else ""


class Finding(msgspec.Struct):
    """An algorithm, or a whole job where `algorithm` is empty, whose verdict is another one now; `reason` is of the latter."""

    job: SweepJob
    backend: str
    algorithm: str
    before: str
    after: str
    reason: str


class Comparison(msgspec.Struct):
    """One sweep against the first.

    Attributes:
        same_build: both are of one build on one machine with equal settings: what differs between them is noise.
        newly_wrong: algorithms that were right, and jobs that ended, but are or do no more. newly_right: the other way round.
        new, missing: "backend name" of algorithms that only one of them has, and for how many problems of both.
    """

    base: Sweep
    other: Sweep
    same_build: bool
    problems: list[Pair] = []
    newly_wrong: list[Finding] = []
    newly_right: list[Finding] = []
    new: Counter[str] = msgspec.field(default_factory=Counter)
    missing: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def pairs(self) -> list[tuple[Pair, float]]:
        """The problems with a winner in both, and the ratios."""
        return [(pair, pair.ratio) for pair in self.problems if pair.ratio is not None]

    @property
    def means(self) -> dict[str, float]:
        """The geometric means of the ratios that can be compared."""
        return means_by_class([(pair.job.kind, ratio) for pair, ratio in self.pairs if not pair.not_comparable])

    @property
    def warnings(self) -> list[str]:
        """What tables and pictures say of ratios that mean little."""
        found = []
        if self.same_build and self.pairs:
            largest = max(max(ratio, 1 / ratio) for _, ratio in self.pairs)
            found.append(f"Both are of one build on one machine: the ratios, up to {largest:.3g}, are the noise between two runs.")
        counts = Counter(doubt for pair, _ in self.pairs for doubt in pair.not_comparable.split())
        if counts:
            reasons = "; ".join(f"{DOUBTS[doubt]}: {count}" for doubt, count in counts.items())
            left_out = sum(bool(pair.not_comparable) for pair, _ in self.pairs)
            found.append(f"Ratios that can't be compared (?), left out of the means: {left_out} of {len(self.pairs)} ({reasons}).")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything that it has, as plain data."""
        lists = {name: list(map(flat, getattr(self, name))) for name in ("problems", "newly_wrong", "newly_right")}
        labels = {"base": self.base.label, "other": self.other.label, "warnings": self.warnings, "ratio": self.means}
        return {**labels, **lists, "new_algorithms": self.new, "missing_algorithms": self.missing}


def means_by_class(found: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The geometric means of (class, value): "all", then by class; those of nothing are left out."""
    values = {name: [value for kind, value in found if name in ("all", kind)] for name in ("all", *CLASSES)}
    return {name: geometric_mean(own) for name, own in values.items() if own}


def flat(value: Finding | Pair) -> dict[str, Any]:
    """Plain data for JSON and CSV, the problem's fields first."""
    data = msgspec.to_builtins(value)
    return {**data.pop("job"), **data}


def series_of(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """The sweeps, each split by kinds of devices; labels are the file's name, with the device's where the file has several."""
    names = Counter(sweep.path.name for sweep in sweeps)
    found = []
    for sweep in sweeps:
        kinds = dict.fromkeys(kind for _, kind in sweep.results)
        for kind in kinds:
            one = msgspec.structs.replace(sweep, results={key: record for key, record in sweep.results.items() if key[1] == kind})
            one.label = sweep.path.name if names[sweep.path.name] == 1 else str(sweep.path)
            one.label += f" [{one.records[0].device_title}]" if len(kinds) > 1 else ""
            found.append(one)
    labels = [one.label for one in found]
    for number, one in enumerate(found):
        if labels.count(one.label) > 1:  # one file twice
            one.label += f" ({labels[: number + 1].count(one.label)})"
    return found


def compare(base: Sweep, other: Sweep) -> Comparison:
    """What is different in `other`."""
    one, two = base.header, other.header
    alike = base.records[0].identity == other.records[0].identity and one.machine == two.machine
    same_build = alike and one.request.settings() == two.request.settings() and not one.machine.get("uncommitted_changes")
    comparison = Comparison(base, other, same_build)
    before, after = ({record.job.problem: record for record in sweep.records} for sweep in (base, other))
    for problem in dict.fromkeys([*before, *after]):
        was, now = before.get(problem), after.get(problem)
        old, new = (_by_key(record.rows) if record is not None else {} for record in (was, now))
        comparison.problems.append(_compare_times(was, now, old, new, same_build))
        if was is not None and now is not None:
            _compare_rows(comparison, was, now, old, new)
    return comparison


def _compare_rows(comparison: Comparison, before: Record, after: Record, old: _Rows, new: _Rows) -> None:
    """What was right and is not, or the other way round, and what is new or missing."""
    verdicts = [(row.backend, row.name, row.verdict, new[key].verdict, new[key].reason) for key, row in old.items() if key in new]
    for backend, name, then, now, reason in [("", "", before.status, after.status, after.reason), *verdicts]:
        finding = Finding(before.job, backend, name, then, now, reason)
        if (then in RIGHT and now in BAD) or (then == "ok" != now and not name):
            comparison.newly_wrong.append(finding)
        elif (then in BAD and now in RIGHT) or (then != "ok" == now and not name):
            comparison.newly_right.append(finding)
    if after.status == "ok":
        comparison.missing.update(f"{key[0]} {key[1]}" for key in old if key not in new)
    if before.status == "ok":
        comparison.new.update(f"{key[0]} {key[1]}" for key in new if key not in old)


def _compare_times(before: Record | None, after: Record | None, old: _Rows, new: _Rows, same_build: bool) -> Pair:
    """What came of a problem in both; the ratio of the winners, what it is worth, and what became of the old one."""
    pair = Pair((before or after).job)  # type: ignore[union-attr]
    for side, record in (("base", before), ("other", after)):
        if record is not None:
            setattr(pair, side, record.status)
            if record.best is not None:
                setattr(pair, f"{side}_winner", f"{record.best.backend} {record.best.name}")
                setattr(pair, f"{side}_ms", record.best.median_ms)
    was, best = (record.best if record is not None else None for record in (before, after))
    if before is None or after is None or was is None or best is None or not was.median_ms or not best.median_ms:
        return pair
    pair.ratio = was.median_ms / best.median_ms
    if was.p10_ms and was.p90_ms and best.p10_ms and best.p90_ms:
        pair.ratio_from, pair.ratio_to = was.p10_ms / best.p90_ms, was.p90_ms / best.p10_ms
    pair.within_noise = same_build or (pair.ratio_from or math.inf) <= 1 <= (pair.ratio_to or 0)
    busy = any(record.identity.get("kind") == "cpu" and busy_note(record.load_average, record.cores) for record in (before, after))
    doubts = {"busy": busy, "few": min(was.samples, best.samples) < FEW, "drift": _drifted(before, after)}
    pair.not_comparable = " ".join(name for name, there in doubts.items() if there)
    both = [(row.median_ms, new[key].median_ms) for key, row in old.items() if key in new and row.verdict == new[key].verdict == "ok"]
    ratios = [one / two for one, two in both if one and two]
    pair.same_algorithms_ratio = geometric_mean(ratios) if ratios else None
    now = next((new.get(key) for key, row in old.items() if row == was), None)
    pair.changed = now != best
    if now is None:
        pair.old_winner_now = "not among the candidates now"
    elif now.verdict != "ok" or not now.median_ms:
        pair.old_winner_now = f"{now.verdict} now"
    elif pair.changed:  # times of the same rounds, which tuning's ratios are of, too
        pair.old_winner_now = f"{now.median_ms / best.median_ms:.3g} times the new winner's time"
    return pair


_Rows = dict[tuple[str, str, int], Row]


def _by_key(rows: Iterable[Row]) -> _Rows:
    """Rows by backend, name and, where kernels share a name, their order by index: indices may differ in two processes."""
    found: _Rows = {}
    seen: Counter[tuple[str, str]] = Counter()
    for row in sorted(rows, key=lambda row: row.index):
        found[row.backend, row.name, seen[row.backend, row.name]] = row
        seen[row.backend, row.name] += 1
    return found


def _drifted(before: Record, after: Record) -> bool:
    """Whether one kind of device had another roofline the second time."""
    one, two = ({**((record.report or {}).get("roofline") or {}), **record.identity} for record in (before, after))
    if any(one.get(name) != two.get(name) for name in ("kind", "target", "name", "compute_units")):
        return False
    pairs = [(one.get(name), two.get(name)) for name in ("flops", "bandwidth")]
    return any(a and b and max(a / b, b / a) > DRIFT for a, b in pairs)
