"""What comes of a tuning: the plan that asked for it takes the best algorithm, and the tuning store gets what a report has for it."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hipgroupgemm.backends.base import NO_SETTINGS, MatmulAlgorithm
from hipgroupgemm.store.files import warn_once
from hipgroupgemm.store.identity import DeviceKind
from hipgroupgemm.store.records import SEED, USER, StoredResult
from hipgroupgemm.store.store import TuningStore, default_store
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.report import TuningReport, best_row

if TYPE_CHECKING:
    from hipgroupgemm.plan import GroupedMatmulPlan

__all__ = ["NoRightCandidate", "keep", "stored_result", "tune_plan"]

_SHOWN = 8
_WRONG = ("wrong", "nondeterministic", "crashed", "timed out")


@dataclasses.dataclass(eq=False)
class NoRightCandidate(RuntimeError):
    """Tuning found no algorithm that is right. `report` says what is wrong with each."""

    text: str
    report: TuningReport

    def __str__(self) -> str:
        """The text."""
        return self.text


def tune_plan(plan: GroupedMatmulPlan, group_sizes: Any, *, store: bool, **settings: Any) -> TuningReport:
    """Tunes a plan's config, stores the report, and makes the plan run the best; see `GroupedMatmulPlan.autotune`.

    An error that comes once tuning is done has the report, which may have taken hours, as its attribute `report`.
    """
    report = tune(plan.config, plan.device, group_sizes, **settings)
    try:
        try:
            if report.best is not None:  # first, so that an interrupt while the report is being stored loses nothing
                _take(plan, report, report.best.algorithm)
        finally:
            if store:
                keep(report)
        if report.best is None:
            words = [f"{row.algorithm.backend} {row.algorithm.name!r} {row.verdict}: {row.reason.splitlines()[0]}" for row in report.rows]
            more = f"; and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
            text = f"no candidate is right on {plan.device}: {'; '.join(words[:_SHOWN])}{more}; see the error's report"
            raise NoRightCandidate(text, report)
    except BaseException as error:
        error.report = report  # type: ignore[attr-defined]
        raise
    return report


def _take(plan: GroupedMatmulPlan, report: TuningReport, best: MatmulAlgorithm) -> None:
    made_up = {SEED: "balanced sizes", USER: "the caller's sizes"}
    sizes = f"{made_up.get(report.origin, report.origin)}, {report.size_class}, ragged extent {report.ragged_extent}"
    on = f"{report.device_name} ({report.device})"
    plan._take(best, f"tuned in this process at {report.started} on {on} for {sizes}: ok, median {best.time:.3g} ms")


def keep(report: TuningReport, store: TuningStore | None = None) -> bool:
    """Stores a report's winners in the environment's store or a given one. Whether it holds them now.

    What the report found wrong is struck from earlier results. An error, whatever it is, costs one warning.
    """
    try:
        store, result = store or default_store(), stored_result(report)
        wrong = [row.algorithm for row in report.rows if row.verdict in _WRONG]
        if wrong:
            for settings in dict.fromkeys((report.settings, NO_SETTINGS)):
                store.strike(report.config.key(), _kind(report), wrong, _versions(report), settings)
        return result is not None and store.add(result)
    except Exception as error:
        warn_once(("store", type(error)), "tuning store: what was tuned is not stored: %s: %s", type(error).__name__, error)
        return False


def stored_result(report: TuningReport) -> StoredResult | None:
    """What the store keeps of a report: the winner, and each backend's best and best deterministic one; None where nothing is right."""
    right = [row for row in report.rows if row.verdict == "ok"]
    by_backend = [[row for row in right if row.algorithm.backend == name] for name in dict.fromkeys(row.algorithm.backend for row in right)]
    choices = [best_row(row for row in rows if row.algorithm.deterministic >= wanted) for rows in (right, *by_backend) for wanted in (0, 1)]
    kept = list(dict.fromkeys(row for row in choices if row is not None))
    if not kept:
        return None
    kept[1:] = sorted(kept[1:], key=lambda row: row.median_ms or 0.0)
    return StoredResult(
        config=report.config.key(),
        device=_kind(report),
        device_name=report.identity["name"],
        size_class=report.size_class,
        origin=report.origin,
        algorithms=tuple(row.algorithm for row in kept),
        versions=_versions(report),
        tuned=datetime.datetime.fromisoformat(report.started.replace("Z", "+00:00")),  # Python 3.10 does not know Z
        sizes=_summary(report),
        floor_ms=report.floor_ms,
        settings=report.settings,
    )


def _kind(report: TuningReport) -> DeviceKind:
    return DeviceKind(report.identity["kind"], report.identity["target"], report.identity["compute_units"])


def _versions(report: TuningReport) -> dict[str, dict[str, str]]:
    """Of each backend that was tried, the versions that decide its algorithms."""
    names, versions = report.identity["backends"], report.identity["versions"]
    tried = dict.fromkeys(row.algorithm.backend for row in report.rows if row.verdict != "untimed")
    return {backend: {name: str(versions[name]) for name in names.get(backend, ["hipgroupgemm"])} for backend in tried}


def _summary(report: TuningReport) -> dict[str, Any]:
    vectors = [vector for sample in report.size_samples for vector in (sample if sample and isinstance(sample[0], Sequence) else [sample])]
    sizes, count = [size for vector in vectors for size in vector], max(1, len(vectors))
    return {
        "digest": hashlib.sha256(json.dumps(report.size_samples).encode()).hexdigest()[:16],
        "samples": len(report.size_samples),
        "groups": max(map(len, vectors), default=0),
        "ragged_extent": report.ragged_extent,
        "rows": round(sum(sizes) / count, 1),
        "largest": max(sizes, default=0),
        "empty": round(sizes.count(0) / count, 1),
    }
