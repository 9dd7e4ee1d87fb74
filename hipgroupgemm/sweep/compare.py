"""What sets two sweeps apart: ratios of times, changed winners, algorithms that were right and are wrong. Plain data, no printing."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.measure.workloads import CLASSES, geometric_mean
from hipgroupgemm.sweep.record import Record, Sweep

__all__ = ["Comparison", "Finding", "Pair", "Series", "compare", "series_of", "summary"]

RIGHT = ("ok", "behind")
WRONG = ("wrong", "nondeterministic", "crashed", "hung", "failed")

Key = tuple[str, str, int]
"""An algorithm in two processes: backend, name, and the place among those of one name; indices may differ."""


@dataclasses.dataclass
class Series:
    """The results of one sweep on one kind of device with one set of versions.

    Attributes:
        label: the file's name, with the device's where the file has several.
        identity: the device and the versions.
        records: by problem; where a file has a problem twice, the one that ended last.
        path: the file. done, wanted: how many of its jobs have ended, and how many there are. sessions: its starts.
    """

    label: str
    identity: dict[str, Any]
    records: dict[tuple[Any, ...], Record]
    path: Path = Path()
    done: int = 0
    wanted: int = 0
    sessions: list[Any] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all jobs of the file have ended."""
        return self.done >= self.wanted

    @property
    def device(self) -> str:
        """The device's product name, or its target."""
        return str(self.identity.get("name") or self.identity.get("target") or self.identity.get("kind"))

    @property
    def versions(self) -> dict[str, str]:
        """The versions of what ran."""
        return {str(name): str(version) for name, version in dict(self.identity.get("versions", {})).items()}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One problem in both series, with a winner in each.

    Attributes:
        base, other: the records.
        ratio: the base's median over the other's: above 1 the other is faster.
        noise: the ranges from p10 to p90 of the two winners overlap: the ratio may be chance.
        same: the geometric mean of that ratio over the algorithms that are right and timed in both, None where there are none.
        changed: another algorithm wins.
        fate: where another wins: what became of the base's winner in the other series.
    """

    base: Record
    other: Record
    ratio: float
    noise: bool
    same: float | None
    changed: bool
    fate: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """An algorithm, or a whole job where `algorithm` is empty, whose verdict is another one now.

    Attributes:
        job: the problem. backend, algorithm: the algorithm. before, after: the verdicts. reason: of the latter.
    """

    job: dict[str, Any]
    backend: str
    algorithm: str
    before: str
    after: str
    reason: str


@dataclasses.dataclass
class Comparison:
    """One series against the first.

    Attributes:
        base, other: the series. pairs: the problems with a winner in both, in the base's order.
        newly_wrong: algorithms that were right, and jobs that ended, but are or do no more. newly_right: the other way round.
        new, missing: (backend, name) of algorithms that only one of the series has, and for how many problems of both.
        only_base, only_other: jobs that the other series has not.
    """

    base: Series
    other: Series
    pairs: list[Pair]
    newly_wrong: list[Finding]
    newly_right: list[Finding]
    new: Counter[tuple[str, str]]
    missing: Counter[tuple[str, str]]
    only_base: list[dict[str, Any]]
    only_other: list[dict[str, Any]]

    @property
    def ratio(self) -> float:
        """The geometric mean of the ratios; NaN without any."""
        return geometric_mean([pair.ratio for pair in self.pairs])

    @property
    def by_class(self) -> dict[str, float]:
        """The geometric mean of the ratios of each class."""
        names = [name for name in CLASSES if any(pair.base.job["class"] == name for pair in self.pairs)]
        return {name: geometric_mean([pair.ratio for pair in self.pairs if pair.base.job["class"] == name]) for name in names}

    @property
    def changed(self) -> list[Pair]:
        """The problems that another algorithm wins."""
        return [pair for pair in self.pairs if pair.changed]


def series_of(sweeps: Sequence[Sweep]) -> list[Series]:
    """The series in a list of sweeps, in their order."""
    names = Counter(sweep.path.name for sweep in sweeps)
    found = []
    for sweep in sweeps:
        kinds: dict[str, list[Record]] = {}
        for record in sweep.records:
            kinds.setdefault(json.dumps(record.identity, sort_keys=True), []).append(record)
        label = sweep.path.name if names[sweep.path.name] == 1 else str(sweep.path)
        for records in kinds.values():
            one = Series(label, records[0].identity, {record.problem: record for record in sorted(records, key=lambda r: r.finished)})
            one.path, one.done, one.wanted = sweep.path, sweep.done, sweep.wanted
            one.sessions = list(sweep.header.get("sessions", []))
            one.records = {record.problem: one.records[record.problem] for record in records}  # in the file's order
            if len(kinds) > 1:
                one.label = f"{label} [{one.device}]"
            found.append(one)
    versions = [", ".join(f"{name} {version}" for name, version in one.versions.items()) for one in found]
    alike: dict[str, set[str]] = {}
    for one, text in zip(found, versions, strict=True):
        alike.setdefault(one.label, set()).add(text)
    for one, text in zip(found, versions, strict=True):
        if len(alike[one.label]) > 1:  # one file, one device, several versions
            one.label += f" [{text}]"
    labels = Counter(one.label for one in found)
    seen: Counter[str] = Counter()
    for one in found:
        if labels[one.label] > 1:  # one file twice
            seen[one.label] += 1
            one.label += f" ({seen[one.label]})"
    return found


def compare(base: Series, other: Series) -> Comparison:
    """What is different in `other`."""
    comparison = Comparison(base, other, [], [], [], Counter(), Counter(), [], [])
    comparison.only_base = [record.job for problem, record in base.records.items() if problem not in other.records]
    comparison.only_other = [record.job for problem, record in other.records.items() if problem not in base.records]
    for problem, before in base.records.items():
        after = other.records.get(problem)
        if after is not None:
            _compare_job(comparison, before, after)
    return comparison


def _compare_job(comparison: Comparison, before: Record, after: Record) -> None:
    old, new = _by_key(before.rows), _by_key(after.rows)
    if before.status != after.status and "ok" in (before.status, after.status):
        finding = Finding(before.job, "", "", before.status, after.status, after.reason)
        (comparison.newly_wrong if before.status == "ok" else comparison.newly_right).append(finding)
    for key, row in old.items():
        if key not in new:
            comparison.missing[key[:2]] += after.status == "ok"
            continue
        then, now = row["verdict"], new[key]["verdict"]
        finding = Finding(before.job, key[0], key[1], then, now, str(new[key].get("reason", "")))
        if then in RIGHT and now in WRONG:
            comparison.newly_wrong.append(finding)
        elif then in WRONG and now in RIGHT:
            comparison.newly_right.append(finding)
    if before.status == "ok":
        comparison.new.update(key[:2] for key in new if key not in old)
    comparison.missing += Counter()  # without zeros
    if before.best is not None and after.best is not None:
        comparison.pairs.append(_pair(before, after, old, new))


def _pair(before: Record, after: Record, old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]]) -> Pair:
    was, now = before.best or {}, after.best or {}
    ratios = [
        old[key]["median_ms"] / new[key]["median_ms"]
        for key in old.keys() & new.keys()
        if old[key]["verdict"] == new[key]["verdict"] == "ok" and _positive(old[key]) and _positive(new[key])
    ]
    key = _key_of(was, old)
    changed = key != _key_of(now, new)
    ratio = was["median_ms"] / now["median_ms"] if _positive(was) and _positive(now) else math.nan
    same = geometric_mean(sorted(ratios)) if ratios else None
    return Pair(before, after, ratio, _overlap(was, now), same, changed, _fate(new.get(key), now) if changed else "")


def _positive(row: dict[str, Any]) -> bool:
    value = row["median_ms"]
    return isinstance(value, (int, float)) and value > 0


def _by_key(rows: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Rows by backend, name and, where kernels share a name, their order by index."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[Key, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: int(row["index"])):
        name = (str(row["backend"]), str(row["name"]))
        key = (*name, seen[name])
        found[key] = row
        seen[name] += 1
    return found


def _key_of(best: dict[str, Any], rows: dict[Key, dict[str, Any]]) -> Key:
    identity = (best["backend"], best["name"], best["index"])
    found = next((key for key, row in rows.items() if (row["backend"], row["name"], row["index"]) == identity), None)
    return found if found is not None else (str(best["backend"]), str(best["name"]), 0)


def _overlap(one: dict[str, Any], two: dict[str, Any]) -> bool:
    bounds = [one.get("p10_ms"), one.get("p90_ms"), two.get("p10_ms"), two.get("p90_ms")]
    if any(not isinstance(bound, (int, float)) for bound in bounds):
        return False
    return bool(bounds[0] <= bounds[3] and bounds[2] <= bounds[1])  # type: ignore[operator]


def _fate(row: dict[str, Any] | None, winner: dict[str, Any]) -> str:
    """What became of a winner that wins no more."""
    if row is None:
        return "not among the candidates now"
    if row["verdict"] != "ok" or not _positive(row):
        return f"{row['verdict']} now"
    return f"{row['median_ms'] / winner['median_ms']:.3g} times the new winner's time"


def summary(series: Series) -> dict[str, Any]:
    """A series in numbers: jobs by status, winners by backend, verdicts, and the geometric mean of the winners' fraction of the floor."""
    records = list(series.records.values())
    winners = [record for record in records if record.best is not None]
    fractions: dict[str, list[float]] = {}
    for record in winners:
        fraction = (record.best or {}).get("fraction")
        if isinstance(fraction, (int, float)) and fraction > 0:
            fractions.setdefault(record.job["class"], []).append(fraction)
    every = [value for values in fractions.values() for value in values]
    return {
        "label": series.label,
        "file": {"path": str(series.path), "jobs_done": series.done, "jobs_wanted": series.wanted},
        "device": series.device,
        "versions": series.versions,
        "jobs": dict(Counter(record.status for record in records)),
        "winners": dict(Counter(str((record.best or {})["backend"]) for record in winners)),
        "verdicts": dict(Counter(str(row["verdict"]) for record in records for row in record.rows)),
        "fraction_of_floor": geometric_mean(every) if every else None,
        "fraction_by_class": {name: geometric_mean(fractions[name]) for name in CLASSES if name in fractions},
    }
