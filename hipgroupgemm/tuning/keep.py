"""What a report has for the tuning store, and putting it there."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from hipgroupgemm.store.files import warn_once
from hipgroupgemm.store.identity import DeviceKind
from hipgroupgemm.store.records import StoredResult
from hipgroupgemm.store.store import TuningStore, default_store
from hipgroupgemm.tuning.report import TuningReport, TuningRow, best_row

__all__ = ["keep", "stored_result"]

_WRONG = ("wrong", "nondeterministic", "crashed", "timed out")


def stored_result(report: TuningReport) -> StoredResult | None:
    """What the store keeps of a report: the winner, and each backend's best and best deterministic one; None where nothing is right."""
    right = [row for row in report.rows if row.verdict == "ok"]

    def best(backend: str | None, deterministic: bool) -> TuningRow | None:
        return best_row(row for row in right if backend in (None, row.algorithm.backend) and row.algorithm.deterministic >= deterministic)

    backends = dict.fromkeys(row.algorithm.backend for row in right)
    choices = [best(backend, deterministic) for backend in (None, *backends) for deterministic in (False, True)]
    kept = list(dict.fromkeys(row for row in choices if row is not None))
    if not kept:
        return None
    kept[1:] = sorted(kept[1:], key=lambda row: row.median_ms or 0.0)
    tuned = datetime.datetime.fromisoformat(report.started.replace("Z", "+00:00"))  # Python 3.10 does not know Z
    return StoredResult(
        config=report.config.key(),
        device=DeviceKind(report.identity["kind"], report.identity["target"], report.identity["compute_units"]),
        device_name=report.identity["name"],
        size_class=report.size_class,
        origin=report.origin,
        algorithms=tuple(row.algorithm for row in kept),
        versions=_versions(report),
        tuned=tuned if tuned.tzinfo is not None else tuned.replace(tzinfo=datetime.timezone.utc),
        sizes=_summary(report),
        floor_ms=report.floor_ms,
    )


def keep(report: TuningReport, store: TuningStore | None = None) -> bool:
    """Stores a report's winners, and strikes what it found wrong, in the environment's store or a given one. Whether it holds them now.

    An error, whatever it is, costs one warning: whoever tuned gets what was found all the same.
    """
    try:
        store, result = store or default_store(), stored_result(report)
        wrong = [row.algorithm for row in report.rows if row.verdict in _WRONG]
        if wrong:
            kind = DeviceKind(report.identity["kind"], report.identity["target"], report.identity["compute_units"])
            store.strike(report.config.key(), kind, wrong, _versions(report))
        return result is not None and store.add(result)
    except Exception as error:
        warn_once(("store", type(error)), "tuning store: what was tuned is not stored: %s: %s", type(error).__name__, error)
        return False


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
