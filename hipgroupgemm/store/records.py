"""What the tuning store keeps, as plain data: its document, its records, and the rules by which two results become one.

A document holds all results of one kind of device:

    {"format": ..., "schema": 1, "device": {"kind", "target", "compute_units"},
     "configs": {<id>: {"config": {...}, "results": [...]}}}

The id is a digest of the config's key. A result is what one run of tuning found for one backend: the device's name, the class of the
group sizes and where they came from, the versions that matter to that backend, the date, a summary of the sizes, and a few rows of
the report, the best first. Keys that this version does not know are kept when a document is written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.store.identity import DeviceKind
from hipgroupgemm.tuning.report import SEED, USER, TuningReport, TuningRow, best_row

__all__ = [
    "BrokenDocument",
    "FORMAT",
    "NewerDocument",
    "SCHEMA",
    "StoredRecord",
    "check_document",
    "condemned_by",
    "config_id",
    "date_back",
    "dated_after",
    "keep_rows",
    "kind_of",
    "merge_result",
    "new_document",
    "parse_date",
    "results_of",
    "versions_in",
]

FORMAT = "hipgroupgemm tuning store"
SCHEMA = 1

_RUNNERS_UP = 3
_SECOND, _TICK = datetime.timedelta(seconds=1), datetime.timedelta(microseconds=1)
_EARLIEST = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_LARGEST = 1 << 63
_CONDEMNED = ("wrong", "nondeterministic", "crashed", "hung")


class BrokenDocument(ValueError):
    """Data that is no document of the store."""


class NewerDocument(ValueError):
    """A document of a schema that only a newer version of this package knows."""


@dataclasses.dataclass(frozen=True)
class StoredRecord:
    """One stored result: a backend's best algorithms for one config on one kind of device, by one run of tuning.

    Attributes:
        config: the key that was tuned.
        device: the kind of device. device_name: the product that it was tuned on.
        rows: the algorithms that are kept, verified and timed; the one to take first. The others are its runner-ups.
        versions: what the result depends on, by name.
        size_class: "balanced", "skewed" or "sparse". origin: where the sizes came from, as in a report: "seed", "user", or a name such as
            "zipf". Results of one origin never take the place of another's.
        sizes: what is told of the group sizes: "digest", "samples", "groups", "ragged_extent", "rows" (a sample, on average),
            "largest" (group), "empty" (groups of a sample, on average).
        tuned: when, ISO 8601, UTC; never later than now, see `from_dict`.
        compared: the backends whose algorithms were tried in the same run, this one among them.
    """

    config: GroupedGemmConfig
    device: DeviceKind
    device_name: str
    rows: tuple[TuningRow, ...]
    versions: Mapping[str, str]
    size_class: str
    origin: str
    sizes: Mapping[str, Any]
    tuned: str
    compared: tuple[str, ...] = ()

    @property
    def algorithm(self) -> MatmulAlgorithm:
        """The algorithm to take, with its median time and verdict."""
        return self.rows[0].algorithm

    @property
    def backend(self) -> str:
        """The name of the algorithm's backend."""
        return self.rows[0].algorithm.backend

    @property
    def median_ms(self) -> float:
        """Its median device time in milliseconds."""
        return self.rows[0].median_ms or math.nan

    @property
    def fraction(self) -> float | None:
        """The device's floor over the median; None where no ceiling was known."""
        return self.rows[0].fraction

    @property
    def slot(self) -> tuple[Any, ...]:
        """What the result stands for, beside its config: two results of one slot are forms of the same thing."""
        return (self.device_name, self.size_class, self.origin, self.backend, tuple(sorted(self.versions.items())))

    @property
    def seeded(self) -> bool:
        """Whether the sizes were the balanced seed."""
        return self.origin == SEED

    @property
    def place(self) -> tuple[Any, ...]:
        """Where a store keeps it: a store holds one result for each place."""
        return (self.device, config_id(self.config), *self.slot)

    @property
    def origin_rank(self) -> int:
        """How much the sizes say of calls to come: 0 real routing, 1 the balanced seed, 2 a synthetic distribution."""
        return (USER, SEED).index(self.origin) if self.origin in (USER, SEED) else 2

    @property
    def sizes_text(self) -> str:
        """What it was tuned on, for a person."""
        if self.origin == USER:
            return f"{self.size_class} sizes of the user's"
        return "balanced sizes" if self.origin == SEED else f"synthetic sizes ({self.origin}, {self.size_class})"

    @property
    def date(self) -> datetime.datetime:
        """When it was tuned."""
        return parse_date(self.tuned)

    def describe(self) -> str:
        """When it was tuned and on what, for a person."""
        share = "" if self.fraction is None else f", {self.fraction:.2g} of the floor"
        return f"tuned {self.date:%Y-%m-%d %H:%M} UTC on {self.sizes_text}, {self.device_name}: {self.median_ms:.4g} ms{share}"

    def to_dict(self) -> dict[str, Any]:
        """The result as it stands in a document."""
        return {
            "device_name": self.device_name,
            "size_class": self.size_class,
            "origin": self.origin,
            "backend": self.backend,
            "versions": dict(self.versions),
            "tuned": self.tuned,
            "sizes": dict(self.sizes),
            "compared": list(self.compared),
            "rows": [row.to_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, config: GroupedGemmConfig, device: DeviceKind, data: Any) -> StoredRecord:
        """A result of a document. Raises ValueError, and nothing but that, for anything else.

        A date in the future was written by a clock that was wrong. It is taken for now: who knows when it was.
        """
        try:
            rows = tuple(TuningRow.from_dict(row) for row in data["rows"])
            if not rows:
                raise ValueError("rows: has none")
            for row in rows:
                if not _timed(row):
                    raise ValueError(f'rows: {row.algorithm.name!r} is {row.verdict!r} with {row.median_ms} ms, wanted "ok" with a time')
                if row.algorithm.backend != data["backend"]:
                    raise ValueError(f"rows: {row.algorithm.name!r} is of {row.algorithm.backend!r}, wanted {_shown(data['backend'])}")
            return cls(
                config,
                device,
                _text(data, "device_name", empty=True),
                rows,
                {str(name): _text(data["versions"], name, empty=True) for name in dict(data["versions"])},
                _text(data, "size_class"),
                _text(data, "origin"),
                _sizes(data["sizes"]),
                _not_after_now(data["tuned"]),
                _names(data.get("compared")),
            )
        except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"result: is none of the store's ({type(error).__name__}: {error})") from None


def _shown(value: Any) -> str:
    """A value of any type and size, for a message."""
    try:
        return reprlib.repr(value)
    except Exception:  # an integer of too many digits, for one
        return f"a {type(value).__name__}"


def _text(data: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    value = data[name]
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{name}: got {_shown(value)}, wanted text")
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Backends' names; none where it is no list of names, as in a file of a version that did not tell."""
    return tuple(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else ()


def _sizes(value: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of group sizes: the digest, and what else has a plain value."""

    def plain(part: Any) -> bool:
        if isinstance(part, float):
            return math.isfinite(part)
        return part is None or isinstance(part, str | bool) or (isinstance(part, int) and abs(part) < _LARGEST)

    _text(value, "digest")
    return {name: part for name, part in value.items() if isinstance(name, str) and plain(part)}


def _timed(row: TuningRow) -> bool:
    """Whether a row's times can be compared to others."""
    spread = (row.p10_ms, row.p90_ms)
    known = row.verdict == "ok" and row.median_ms is not None and 0 < row.median_ms < math.inf
    return known and all(ms is None or 0 <= ms < math.inf for ms in spread)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _not_after_now(text: Any) -> str:
    """A date as it is written, that of now where it is later. Raises ValueError for anything that is no date."""
    now = _now()
    return str(text) if parse_date(text) <= now else now.isoformat()


def parse_date(text: Any) -> datetime.datetime:
    """A date of ISO 8601, in UTC; raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError(f"date: got {_shown(text)}, wanted ISO 8601 text")
    date = datetime.datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)  # Python 3.10 does not know Z
    try:
        return date.astimezone(datetime.timezone.utc) if date.tzinfo is not None else date.replace(tzinfo=datetime.timezone.utc)
    except OverflowError:  # before the year 1 or after 9999, in UTC
        raise ValueError(f"date: got {_shown(text)}, which has no date in UTC") from None


# ---- documents -----------------------------------------------------------------------------------------------------------------


def new_document(device: DeviceKind) -> dict[str, Any]:
    """A document without results."""
    return {"format": FORMAT, "schema": SCHEMA, "device": dataclasses.asdict(device), "configs": {}}


def check_document(data: Any) -> DeviceKind:
    """The device of a document whose frame is right; single results are looked at when they are used.

    Raises:
        NewerDocument: of a later schema.
        BrokenDocument: anything else that is not a document.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BrokenDocument("is no tuning store")
    schema = data.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise NewerDocument(f"has schema {_shown(schema)}, this version of hipgroupgemm knows {SCHEMA}")
    if type(schema) is not int or schema != SCHEMA:
        raise BrokenDocument(f"has schema {_shown(schema)}, wanted {SCHEMA}")
    device, configs = data.get("device"), data.get("configs")
    try:
        kind = kind_of(device)
    except ValueError:
        raise BrokenDocument(f"has device {_shown(device)}") from None
    if not isinstance(configs, dict):
        raise BrokenDocument("has no configs")
    for entry in configs.values():
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict) or not isinstance(entry.get("results"), list):
            raise BrokenDocument("has a config without its results")
    return kind


def config_id(key: GroupedGemmConfig) -> str:
    """The name of a config's key in a document: 16 hexadecimal digits."""
    cached = key.__dict__.get("_store_id")
    if cached is None:
        cached = hashlib.sha256(json.dumps(json.loads(key.to_json()), sort_keys=True).encode()).hexdigest()[:16]
        object.__setattr__(key, "_store_id", cached)
    return str(cached)


# ---- from a report -------------------------------------------------------------------------------------------------------------


def kind_of(identity: Any) -> DeviceKind:
    """The kind of device of an identity; raises ValueError for anything else."""
    try:
        return DeviceKind(identity["kind"], identity["target"], identity["compute_units"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"identity: is none that identity() gave ({type(error).__name__}: {error})") from None


def versions_in(identity: Mapping[str, Any], backend: str) -> dict[str, str]:
    """The versions that matter to a backend, out of an identity."""
    try:
        return {name: str(identity["versions"][name]) for name in identity.get("backends", {}).get(backend, ["hipgroupgemm"])}
    except (KeyError, TypeError) as error:
        raise ValueError(f"identity: is none that identity() gave ({type(error).__name__}: {error})") from None


def _summary(report: TuningReport) -> dict[str, Any]:
    vectors = [vector for sample in report.size_samples for vector in (sample if sample and isinstance(sample[0], Sequence) else [sample])]
    groups = max((len(vector) for vector in vectors), default=0)
    count = max(1, len(vectors))
    return {
        "digest": hashlib.sha256(json.dumps(report.size_samples).encode()).hexdigest()[:16],
        "samples": len(report.size_samples),
        "groups": groups,
        "ragged_extent": report.ragged_extent,
        "rows": round(sum(sum(vector) for vector in vectors) / count, 1),
        "largest": max((max(vector, default=0) for vector in vectors), default=0),
        "empty": round(sum(sum(1 for size in vector if size == 0) for vector in vectors) / count, 1),
    }


def keep_rows(rows: Sequence[TuningRow], winner: TuningRow | None = None) -> tuple[TuningRow, ...]:
    """The rows that answer any question that is asked later, the best first.

    These are the best, the fastest (which decides what ties) and `winner`, of all and of the deterministic ones alone; and the next in
    speed, should the best one turn out to be wrong.
    """
    kept: list[TuningRow] = []
    for candidates in (rows, [row for row in rows if row.algorithm.deterministic]):
        fastest = min(candidates, key=lambda row: row.median_ms or math.inf, default=None)
        for row in (winner if winner in candidates else None, best_row(candidates), fastest):
            if row is not None and row not in kept:
                kept.append(row)
    kept += [row for row in sorted(rows, key=lambda row: row.median_ms or math.inf)[:_RUNNERS_UP] if row not in kept]
    return tuple(kept)


def results_of(report: TuningReport) -> list[StoredRecord]:
    """What a report has to store: one result for each backend with an algorithm that is right and timed."""
    right = [row for row in report.rows if _timed(row)]
    winner = best_row(right)
    compared = tuple(dict.fromkeys(row.algorithm.backend for row in report.rows if row.verdict != "untimed"))
    device = kind_of(report.identity)
    return [
        StoredRecord(
            report.config.key(),
            device,
            str(report.identity["name"]),
            keep_rows([row for row in right if row.algorithm.backend == backend], winner),
            versions_in(report.identity, backend),
            report.size_class,
            report.origin,
            _summary(report),
            _not_after_now(report.started),
            compared,
        )
        for backend in dict.fromkeys(row.algorithm.backend for row in right)
    ]


def dated_after(results: Sequence[StoredRecord], stored: Iterable[Any]) -> list[StoredRecord]:
    """Results of one report, dated after all that are stored of the second that it began in: of these the one added later wins.

    Args:
        results: what is to be added, all of one date.
        stored: a config's results as they stand in a document.
    """
    if not results:
        return []
    date = later = results[0].date
    for result in stored:
        with contextlib.suppress(ValueError):
            other = parse_date(result.get("tuned") if isinstance(result, Mapping) else None)
            if date <= other < date + _SECOND:
                later = max(later, other + _TICK)
    if later == date:
        return list(results)
    return [dataclasses.replace(result, tuned=later.isoformat(timespec="microseconds")) for result in results]


def date_back(stored: list[Any], before: datetime.datetime) -> None:
    """Gives results that are dated in the future a date before another: the clock of whoever wrote them was wrong, so what is stored now is
    the later one. Else it could not take their place until that date.

    Args:
        stored: a config's results as they stand in a document; is changed.
        before: the date of what is to be stored.
    """
    now = _now()
    earlier = max(before, _EARLIEST) - _TICK
    for place, result in enumerate(stored):
        with contextlib.suppress(ValueError):
            if isinstance(result, Mapping) and parse_date(result.get("tuned")) > now:
                stored[place] = {**result, "tuned": earlier.isoformat()}


def condemned_by(report: TuningReport) -> set[tuple[str, int, str]]:
    """(backend, index, name) of the algorithms that a report found wrong: these are not to be used whatever was stored before."""
    return {(a.backend, a.index, a.name) for a in (row.algorithm for row in report.rows if row.verdict in _CONDEMNED)}


# ---- two results of one slot ---------------------------------------------------------------------------------------------------


def merge_result(old: StoredRecord, new: StoredRecord, judged: Iterable[MatmulAlgorithm] = ()) -> StoredRecord:
    """One result out of two of one slot.

    Tuned on the same group sizes: rows of both are candidates, the later measurement of an algorithm counts, and the best wins. Tuned on
    other sizes their times say nothing about each other: the later result counts (of equally old ones the faster).

    Args:
        old, new: the results, in any order of age.
        judged: what the run of `new` looked at, though it is not among its rows: where it is later it says more than the earlier one.
    """
    dates = (old.date, new.date)
    if dates[0] == dates[1]:
        later, earlier = (new, old) if new.median_ms <= old.median_ms else (old, new)
    else:
        later, earlier = (new, old) if dates[1] > dates[0] else (old, new)
    if old.sizes.get("digest") != new.sizes.get("digest"):
        return later
    known = {(a.index, a.name) for a in (*(row.algorithm for row in later.rows), *(judged if later is new else ()))}
    left = [row for row in earlier.rows if (row.algorithm.index, row.algorithm.name) not in known]
    compared = tuple(dict.fromkeys([*later.compared, *earlier.compared]))
    return dataclasses.replace(later, rows=keep_rows([*later.rows, *left]) if left else later.rows, compared=compared)
