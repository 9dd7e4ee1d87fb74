"""What tuning found: every candidate with its time, its error and its verdict."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from hipgroupgemm.backends.base import NO_SETTINGS, MatmulAlgorithm, PlanSettings
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.text import csv_text, plain, write_text
from hipgroupgemm.store.records import SEED
from hipgroupgemm.tuning.show import plot_report, rich_parts, summary_text
from hipgroupgemm.tuning.tables import printable

__all__ = ["VERDICTS", "TuningReport", "TuningRow", "best_row"]

VERDICTS = ("ok", "pruned", "nondeterministic", "wrong", "crashed", "timed out", "failed", "untimed")
"""ok: right and timed; only these can win. pruned: right, but so much slower than the leader of the same rounds that its timing was stopped
early. nondeterministic: two runs on equal inputs differ though it claims equal bits. wrong: a result that is not right. crashed: took its
process down. timed out: had not ended at its deadline. failed: raised an error. untimed: the time limit came first."""

SCHEMA = 2
_TIE = 0.01
_LARGEST = 1 << 63


@dataclasses.dataclass(frozen=True)
class TuningRow:
    """One candidate's result. What there is no value for is None.

    Times of different rounds cannot be compared, since clocks move. So a row has a `ratio`, which is of rounds that it shares with the
    leader, and a pruned one, which was timed in few rounds, has no times.

    Attributes:
        algorithm: the candidate; its `time` and `verdict` are this row's.
        verdict: one of `VERDICTS`.
        reason: why, where the verdict is not "ok"; for a person.
        median_ms, p10_ms, p90_ms: device time in milliseconds of cold calls: median, 10th and 90th percentile.
        tflops: 10^12 floating-point operations per second that the group sizes ask for, by the median.
        fraction: the report's floor over the median; None where the device's roofline is not known.
        error: the largest relative Frobenius error over all size sets that were checked; may be infinite or NaN.
        error_limit: what is right at the most, on the size set of that error.
        checked: how many runs were checked.
        samples: how many runs were timed.
        ratio: its time over the leader's in the same rounds, the median; 1 for the leader.
    """

    algorithm: MatmulAlgorithm
    verdict: str
    reason: str = ""
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    tflops: float | None = None
    fraction: float | None = None
    error: float | None = None
    error_limit: float | None = None
    checked: int = 0
    samples: int = 0
    ratio: float | None = None

    def __post_init__(self) -> None:
        a = self.algorithm
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r}: wanted one of {', '.join(VERDICTS)}")
        if self.verdict == "ok" and self.median_ms is None:
            raise ValueError('verdict="ok": wanted a median_ms with it, got None')
        if not -_LARGEST <= a.index < _LARGEST or not all(0 <= n < _LARGEST for n in (a.workspace_size, self.checked, self.samples)):
            raise ValueError("row: has a number that is out of range")
        object.__setattr__(self, "algorithm", dataclasses.replace(a, time=self.median_ms, verdict=self.verdict))

    @property
    def uncertainty(self) -> float:
        """The standard error of the median, as a part of it.

        Half the range from p10 to p90 is 1.28 standard deviations, and the standard error of a median of n samples is 1.25 / sqrt(n)
        of one (both for normal noise).
        """
        if not self.median_ms or self.p10_ms is None or self.p90_ms is None or not self.samples:
            return 0.0
        return (self.p90_ms - self.p10_ms) / 2 / math.sqrt(self.samples) / self.median_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the algorithm's fields, then the row's. Numbers that JSON has no word for are strings."""
        data = {name: getattr(self.algorithm, name) for name in _ALGORITHM} | {name: getattr(self, name) for name in _ROW}
        return dict(plain(data))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TuningRow:
        """The row that `to_dict` wrote; raises ValueError for anything else."""
        import msgspec  # what only reads reports needs it

        try:
            data = {"batch_invariant": False, **data}
            values = {name: data[name] for name in _ROW} | {"algorithm": {name: data[name] for name in _ALGORITHM}}
            values |= {name: float(data[name]) for name in ("error", "error_limit") if isinstance(data[name], str)}
            return msgspec.convert(values, cls)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"row: is none that to_dict() wrote ({type(error).__name__}: {error})") from None


_ALGORITHM = ("backend", "index", "name", "workspace_size", "deterministic", "batch_invariant")
_ROW = tuple(field.name for field in dataclasses.fields(TuningRow)[1:])


def best_row(rows: Iterable[TuningRow]) -> TuningRow | None:
    """The row that wins among rows of one tuning, see `TuningReport.best`."""

    def slowness(row: TuningRow) -> float:
        return row.ratio or row.median_ms or math.inf

    right = [row for row in rows if row.verdict == "ok"]
    leader = min(right, key=slowness, default=None)
    if leader is None:
        return None
    ties = [row for row in right if slowness(row) <= (1 + max(_TIE, leader.uncertainty, row.uncertainty)) * slowness(leader)]
    return min(ties, key=lambda row: (row.algorithm.workspace_size, slowness(row)))


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What one run of tuning found on one device for one config.

    Attributes:
        config: what was tuned: the config's key, which has its ragged extent at capacity, alpha = 1, and beta = 1 where it is not 0.
        device: "cpu", "cuda:0", "rocm:1". device_name: its product name.
        identity: what a stored result holds for: target, compute units, library versions.
        ragged_extent: R of the problems that were timed.
        size_samples: the group sizes that were timed: (g,) lists, or (batch, g) where the config has sizes per batch entry.
        size_class: "balanced", "skewed" or "sparse".
        origin: where the sizes come from: "seed" (balanced ones that tuning made, as none were given), "user" (real routing that was
            given), or the name of the synthetic distribution that they were drawn from, such as "zipf".
        seed: of operands, order and samples. started: ISO 8601, UTC. seconds: how long it took.
        floor_ms: the least time by the device's roofline, the mean over the size samples, None where that is not known.
        roofline: flops, bandwidth (per second) and how they were measured, or None.
        rows: the candidates, the fastest first, those that were not timed last.
        notes: what a person should know of the run itself.
        settings: what was asked for of all candidates.
    """

    config: GroupedGemmConfig
    device: str
    device_name: str
    identity: dict[str, Any]
    ragged_extent: int
    size_samples: list[Any]
    size_class: str
    origin: str
    seed: int
    started: str
    seconds: float
    floor_ms: float | None = None
    roofline: dict[str, Any] | None = None
    rows: list[TuningRow] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    settings: PlanSettings = NO_SETTINGS

    @property
    def seeded(self) -> bool:
        """Whether the sizes are the balanced seed, as none were given."""
        return self.origin == SEED

    @property
    def best(self) -> TuningRow | None:
        """The row that wins, None where none is "ok".

        That is the smallest ratio. Rows within noise of it tie: whose ratio is higher by at most 1 % or by the larger of the standard
        errors of the two medians. Among those the smallest workspace wins, then the smallest ratio.
        """
        return best_row(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` makes an equal report of."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data |= {"config": json.loads(self.config.to_json()), "settings": dataclasses.asdict(self.settings)}
        return {"schema": SCHEMA, **data, "rows": [row.to_dict() for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TuningReport:
        """The report that `to_dict` wrote; raises ValueError for anything else and for another schema version."""
        import msgspec

        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"report: wanted a tuning report of schema {SCHEMA}, got {got}")
        data, types = {"settings": {}, **data}, get_type_hints(cls)
        missing, unknown = sorted(types.keys() - data.keys()), sorted(data.keys() - types.keys() - {"schema"})
        if missing or unknown:
            raise ValueError(f"report: missing fields {missing}, unknown fields {unknown}")
        types = {name: kind for name, kind in types.items() if name not in ("config", "rows")}
        try:
            rows = [TuningRow.from_dict(row) for row in data["rows"]]
            config = GroupedGemmConfig.from_json(json.dumps(data["config"]))
            rest = msgspec.convert({name: data[name] for name in types}, msgspec.defstruct("Rest", list(types.items())))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"report: is none that to_dict() wrote: {error}") from None
        return cls(config=config, rows=rows, **msgspec.structs.asdict(rest))

    def to_json(self, path: Path | str | None = None) -> str:
        """The report as JSON text; also written to `path`, whole or not at all, where one is given."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_text(Path(path), text)
        return text

    @classmethod
    def from_json(cls, source: Path | str) -> TuningReport:
        """The report that `to_json` wrote, from its text or, given a Path, from a file. Raises ValueError for anything else."""
        text = source.read_text("utf-8") if isinstance(source, Path) else source
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"report: not JSON ({error}); pass what to_json() returned, or a Path") from None
        return cls.from_dict(data)

    def to_csv(self, path: Path | str | None = None) -> str:
        """One line per candidate as CSV text; device, problem and date are repeated on each, so that files can be joined.

        Written to `path` too, whole or not at all, where one is given.
        """
        c = self.config
        context = {name: getattr(self, name) for name in ("device", "device_name", "size_class", "origin", "floor_ms", "started")}
        context |= {name: getattr(c, name) for name in ("m", "n", "k", "type_a", "type_b", "type_d", "beta")}
        context |= {"mode": c.ragged_mode.name, "batch": c.batch_count, "groups": c.group_count}
        if c.ragged_mode.name != "BATCH":
            context["m" if c.ragged_mode.name == "NON_CONTRACTING" else "k"] = self.ragged_extent
        text = printable(csv_text([row.to_dict() | context for row in self.rows], [*_ALGORITHM, *_ROW, *context]))
        if path is not None:
            write_text(Path(path), text)
        return text

    def plot(self, path: Path | str, count: int = 30) -> None:
        """Writes a picture (.png, .svg, .pdf) of the `count` fastest candidates: median, and p10 to p90 as a line.

        Raises ValueError where no candidate was timed, for another ending or a count below 1, ImportError without matplotlib.
        """
        plot_report(self, Path(path), count)

    def __str__(self) -> str:
        """The problem, the winner and the verdicts in a few lines; rich.print(report) shows a table of all candidates."""
        return summary_text(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """A table of the candidates for a terminal, then the reasons of those that are not "ok"."""
        return rich_parts(self, options.max_width)
