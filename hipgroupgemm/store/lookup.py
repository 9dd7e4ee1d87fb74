"""Which of a config's stored results answers a question, if one does."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.store.records import StoredRecord
from hipgroupgemm.tuning.report import TuningRow, best_row

__all__ = ["Asked", "Here", "answer"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked for: sizes of a class where it is known, a backend where it is named, only deterministic algorithms or any."""

    size_class: str | None = None
    backend: str | None = None
    deterministic: bool = False


class Here(Protocol):
    """What this process has, for one config and device."""

    device_name: str

    def usable(self, backend: str) -> bool:
        """Whether a backend is here and can run the config."""

    def versions(self, backend: str) -> Mapping[str, str]:
        """The versions that a usable backend's results depend on."""

    def find(self, algorithm: MatmulAlgorithm) -> MatmulAlgorithm | None:
        """A usable backend's algorithm of that index and name."""

    def otherwise(self) -> str | None:
        """The backend that runs the config when nothing is stored and none is named; None where there is none."""

    def stale(self, record: StoredRecord, reason: str) -> None:
        """Is told of each record that would have answered if it were not stale."""

    def unanswered(self, reason: str) -> None:
        """Is told of other reasons why there is no answer."""


def answer(records: Iterable[StoredRecord], asked: Asked, here: Here) -> StoredRecord | None:
    """The record to go by, its row to take first and those of all that it was compared to behind it; None where there is none.

    Records of one device's name, class and origin of sizes make a group. The groups are asked in this order: those of the class that was
    asked for, of this device's name (others have as many compute units of the same target), of sizes that the user gave, of the balanced
    seed, of synthetic distributions; the newest first. In a group the records of the newest one's sizes compete, since only they were
    timed on equal work. A group is passed over as stale when its answer was tuned with other versions or is no longer among its
    backend's algorithms: something better is unknown then. Where no backend was asked for it is passed over, too, when its answer was not
    compared to the backend that comes first without it: that the one backend which was tuned is the faster one nobody knows.
    """
    groups: dict[tuple[str, str, str], list[StoredRecord]] = {}
    for record in records:
        if asked.backend not in (None, record.backend):
            continue
        rows = tuple(row for row in record.rows if row.algorithm.deterministic or not asked.deterministic)
        if rows:
            one = record if len(rows) == len(record.rows) else dataclasses.replace(record, rows=rows)
            groups.setdefault((record.device_name, record.size_class, record.origin), []).append(one)

    def rank(item: tuple[tuple[str, str, str], list[StoredRecord]]) -> tuple[object, ...]:
        (name, size_class, _), members = item
        newest = max(record.date for record in members)
        return (size_class != asked.size_class, name != here.device_name, members[0].origin_rank, _EPOCH - newest)

    if not groups:
        deterministic = " with a deterministic algorithm" if asked.deterministic else ""
        here.unanswered(f"nothing is stored for this config{f' of backend {asked.backend}' if asked.backend else ''}{deterministic}")

    usable: dict[str, bool] = {}
    for _, members in sorted(groups.items(), key=rank):
        for backend in {record.backend for record in members} - usable.keys():
            usable[backend] = here.usable(backend)
        found = _of_group([record for record in members if usable[record.backend]], here, named=asked.backend is not None)
        if found is not None:
            return found
    refusing = [backend for backend, runs in usable.items() if not runs]
    if refusing:
        here.unanswered(f"what is stored for this config is of {' and '.join(sorted(refusing))}, which can't run it here")
    return None


def _of_group(members: list[StoredRecord], here: Here, *, named: bool) -> StoredRecord | None:
    """The best of the records that were tuned on the newest one's sizes, None where that is stale."""
    present = [record for record in members if record.versions == here.versions(record.backend)]
    former = [record for record in members if record not in present]
    if not present:
        if former:
            newest = max(former, key=lambda record: record.date)
            here.stale(newest, _change(newest.versions, here.versions(newest.backend)))
        return None
    digest = max(present, key=lambda record: record.date).sizes.get("digest")
    contenders = [record for record in present if record.sizes.get("digest") == digest]
    pairs = [(row, record) for record in contenders for row in record.rows]
    best = best_row(row for row, _ in pairs)
    if best is None:
        return None
    known = {record.backend for record in contenders}
    for record in former:  # its backend was the faster one, and has changed: how fast it is now is not known
        if record.backend not in known and record.sizes.get("digest") == digest and record.median_ms < (best.median_ms or math.inf):
            here.stale(record, _change(record.versions, here.versions(record.backend)))
            return None
    chosen = next(record for row, record in pairs if row is best)
    otherwise = None if named else here.otherwise()
    if otherwise not in (None, *known, *(name for record in contenders for name in record.compared)):
        here.unanswered(
            f"what is stored for this config is of {chosen.backend}, and was not compared to {otherwise}, which comes first; tune both, or "
            f"name backend={chosen.backend!r}"
        )
        return None
    algorithm = here.find(best.algorithm)
    if algorithm is None:
        here.stale(chosen, f"there is no algorithm {best.algorithm.name!r} with index {best.algorithm.index} now")
        return None
    others: list[TuningRow] = sorted((row for row, _ in pairs if row is not best), key=lambda row: row.median_ms or math.inf)
    return dataclasses.replace(chosen, rows=(dataclasses.replace(best, algorithm=algorithm), *others))


def _change(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The versions that differ, in words."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} is {now.get(name, 'not here')} now and was {then.get(name, 'not known')}" for name in names)
