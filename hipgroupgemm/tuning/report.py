"""What tuning found: every candidate with its time, its error and its verdict."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig

__all__ = ["SEED", "USER", "VERDICTS", "TuningReport", "TuningRow", "best_row", "printable"]

VERDICTS = ("ok", "behind", "wrong", "nondeterministic", "crashed", "hung", "failed", "untimed")
"""ok: right and timed; only these can win. behind: right, but so slow that its timing was stopped early. wrong: a result that is not
right. nondeterministic: two runs on equal inputs differ though it claims equal bits. crashed: took its process down. hung: had not ended
when its time was over. failed: raised an error. untimed: the time limit came first."""

SEED, USER = "seed", "user"
"""Where group sizes come from, if they are neither a named distribution's: the balanced partition that tuning makes itself, or real ones
that the caller gave."""

SCHEMA = 1
_TIE = 0.01
_LARGEST = 1 << 63
_MEASURES = ("median_ms", "p10_ms", "p90_ms", "tflops", "fraction", "error", "error_limit")


@dataclasses.dataclass(frozen=True)
class TuningRow:
    """One candidate's result. What there is no value for is None.

    Attributes:
        algorithm: the candidate; its `time` and `verdict` are this row's.
        verdict: one of `VERDICTS`.
        reason: why, where the verdict is not "ok"; for a person.
        median_ms, p10_ms, p90_ms: device time in milliseconds of cold calls: median, 10th and 90th percentile.
        tflops: 10^12 floating-point operations a second that the group sizes ask for, by the median.
        fraction: the report's floor over the median; None where no ceiling of the device is known.
        error: the largest relative Frobenius error over all size sets that were checked; may be infinite or NaN.
        error_limit: what is right at the most, on the size set of that error.
        checked: how many runs were judged.
        samples: how many runs were timed.
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

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r}: wanted one of {', '.join(VERDICTS)}")
        if self.verdict == "ok" and self.median_ms is None:
            raise ValueError('verdict="ok": wanted a median_ms with it, got None')
        told = dataclasses.replace(self.algorithm, time=self.median_ms, verdict=self.verdict)
        object.__setattr__(self, "algorithm", told)

    @property
    def uncertainty_ms(self) -> float:
        """The standard error of the median, in milliseconds.

        Half the range from p10 to p90 is 1.28 standard deviations, and the standard error of a median of n samples is 1.25 / sqrt(n)
        of one (both for normal noise).
        """
        if self.p10_ms is None or self.p90_ms is None or not self.samples:
            return 0.0
        return (self.p90_ms - self.p10_ms) / 2 / math.sqrt(self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the algorithm's fields, then the row's. Numbers that JSON has no word for are strings."""
        a = self.algorithm
        data: dict[str, Any] = {
            "backend": a.backend,
            "index": a.index,
            "name": a.name,
            "workspace_size": a.workspace_size,
            "deterministic": a.deterministic,
        }
        for field in dataclasses.fields(self)[1:]:
            data[field.name] = _plain(getattr(self, field.name))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TuningRow:
        """The row that `to_dict` wrote; raises ValueError for anything else."""
        try:
            algorithm = MatmulAlgorithm(
                backend=_text(data["backend"]),
                index=_integer(data["index"], -_LARGEST),
                name=_text(data["name"]),
                workspace_size=_integer(data["workspace_size"]),
                deterministic=_flag(data["deterministic"]),
            )
            values = {name: None if data[name] is None else _float(data[name]) for name in _MEASURES}
            checked, samples = _integer(data["checked"]), _integer(data["samples"])
            return cls(algorithm, _text(data["verdict"]), _text(data["reason"]), checked=checked, samples=samples, **values)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"row: is none that to_dict() wrote ({type(error).__name__}: {error})") from None


def best_row(rows: Iterable[TuningRow]) -> TuningRow | None:
    """The row that wins among rows that were timed on the same group sizes, see `TuningReport.best`."""
    right = [(row.median_ms, row) for row in rows if row.verdict == "ok" and row.median_ms is not None]
    if not right:
        return None
    least, fastest = min(right, key=lambda pair: pair[0])

    def noise(row: TuningRow) -> float:
        return max(_TIE * least, fastest.uncertainty_ms, row.uncertainty_ms)

    tied = [(row.algorithm.workspace_size, median, row) for median, row in right if median - least <= noise(row)]
    return min(tied, key=lambda entry: entry[:2])[2]


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What one run of tuning found on one device for one config.

    Attributes:
        config: what was tuned: the config's key, which has its ragged extent at capacity, alpha = 1, and beta = 1 where it is not 0.
        device: "cpu", "cuda:0", "rocm:1". device_name: its product name.
        identity: what a stored result holds for: target, compute units, library versions.
        ragged_extent: R of the problems that were timed.
        size_samples: the group sizes that were timed: (g,) lists, or (batch, g) where the config has sizes a batch entry.
        size_class: "balanced", "skewed" or "sparse".
        origin: where the sizes come from: "seed" (balanced ones that tuning made, as none were given), "user" (real routing that was
            given), or the name of the synthetic distribution that they were drawn from, such as "zipf".
        seed: of operands, order and samples. started: ISO 8601, UTC. seconds: how long it took.
        floor_ms: the least time by the device's ceilings, the mean over the size samples, None where they are not known.
        ceilings: flops, bandwidth (a second) and how they were measured, or None.
        rows: the candidates, the fastest first, those that were not timed last.
        notes: what a person should know of the run itself.
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
    ceilings: dict[str, Any] | None = None
    rows: list[TuningRow] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def seeded(self) -> bool:
        """Whether the sizes are the balanced seed, as none were given."""
        return self.origin == SEED

    @property
    def best(self) -> TuningRow | None:
        """The row that wins, None where none is "ok".

        That is the smallest median. Rows within noise of it tie: whose median is higher by at most 1 % or by the larger of the two
        medians' standard errors. Among those the smallest workspace wins, then the smallest median.
        """
        return best_row(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` makes an equal report of."""
        data: dict[str, Any] = {"schema": SCHEMA}
        for field in dataclasses.fields(self):
            data[field.name] = _plain(getattr(self, field.name))
        data["config"] = json.loads(self.config.to_json())
        data["rows"] = [row.to_dict() for row in self.rows]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TuningReport:
        """The report that `to_dict` wrote; raises ValueError for anything else and for another schema version."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"report: wanted a tuning report of schema {SCHEMA}, got {got}")
        names = {field.name for field in dataclasses.fields(cls)}
        if data.keys() - {"schema"} != names:
            missing, unknown = sorted(names - data.keys()), sorted(data.keys() - names - {"schema"})
            raise ValueError(f"report: missing fields {missing}, unknown fields {unknown}")
        try:
            values = {name: data[name] for name in names}
            values["config"] = GroupedGemmConfig.from_json(json.dumps(data["config"]))
            values["rows"] = [TuningRow.from_dict(row) for row in data["rows"]]
            values["seconds"] = _float(data["seconds"])
            values["floor_ms"] = None if data["floor_ms"] is None else _float(data["floor_ms"])
            return cls(**values)
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"report: is none that to_dict() wrote ({type(error).__name__}: {error})") from None

    def to_json(self, path: Path | str | None = None) -> str:
        """The report as JSON text; also written to `path`, whole or not at all, where one is given."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        if path is not None:
            _write(path, text)
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
        """One line a candidate as CSV text; device, problem and date are repeated on each, so that files can be joined.

        Written to `path` too, whole or not at all, where one is given.
        """
        c = self.config
        context = {
            "device": self.device,
            "device_name": self.device_name,
            "mode": c.ragged_mode.name,
            "m": self.ragged_extent if c.ragged_mode.name == "NON_CONTRACTING" else c.m,
            "n": c.n,
            "k": self.ragged_extent if c.ragged_mode.name == "CONTRACTING" else c.k,
            "batch": c.batch_count,
            "groups": c.group_count,
            "type_a": c.type_a,
            "type_b": c.type_b,
            "type_d": c.type_d,
            "beta": c.beta,
            "size_class": self.size_class,
            "origin": self.origin,
            "floor_ms": self.floor_ms,
            "started": self.started,
        }
        rows = [{**row.to_dict(), **context} for row in self.rows]
        names = [*_ROW_NAMES, *context]
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = {name: "" if row[name] is None else row[name] for name in names}
            writer.writerow({name: printable(cell) if isinstance(cell, str) else cell for name, cell in cells.items()})
        if path is not None:
            _write(path, buffer.getvalue())
        return buffer.getvalue()

    def plot(self, path: Path | str, count: int = 30) -> None:
        """Writes a picture (.png, .svg, .pdf) of the `count` fastest candidates: median, and p10 to p90 as a line.

        Raises ValueError where no candidate was timed or for another ending, ImportError without matplotlib (the extra `bench`).
        """
        from hipgroupgemm.tuning.tables import plot_report

        plot_report(self, Path(path), count)

    def __str__(self) -> str:
        """The problem, the winner and the verdicts in a few lines; rich.print(report) shows a table of all candidates."""
        from hipgroupgemm.tuning.tables import summary_text

        return summary_text(self)

    def __rich__(self) -> Any:
        """A table of the candidates for a terminal, then the reasons of those that are not "ok"."""
        from hipgroupgemm.tuning.tables import ReportTable

        return ReportTable(self)


_ROW_NAMES = ("backend", "index", "name", "workspace_size", "deterministic", *(field.name for field in dataclasses.fields(TuningRow)[1:]))


def printable(text: str) -> str:
    """`text` with what UTF-8 has no bytes for written as an escape: a lone surrogate can't be printed, nor written to a file."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {type(value).__name__}, wanted text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"got {type(value).__name__}, wanted true or false")
    return value


def _integer(value: Any, least: int = 0) -> int:
    """An integer that fits into 64 bits with a sign, or one as text, as it stands in a CSV file."""
    value = int(value) if isinstance(value, str) else value
    if type(value) is not int:
        raise TypeError(f"got {type(value).__name__}, wanted an integer")
    if not least <= value < _LARGEST:
        raise OverflowError(f"got an integer that is not from {least} to 2^63 - 1")
    return value


def _float(value: Any) -> float:
    """A number, or text of one, as `_plain` writes those that JSON has no word for."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"got {type(value).__name__}, wanted a number")
    return float(value)


def _plain(value: Any) -> Any:
    """`value` as JSON data; NaN and infinities become strings that `float` reads again."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path | str, text: str) -> None:
    from hipgroupgemm.measure.text import write_text

    write_text(Path(path), text)
