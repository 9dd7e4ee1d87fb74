"""A sweep's results for people (tables) and for programs (CSV)."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hipgroupgemm.benchmark.table import bytes_text, number_text, write_text
from hipgroupgemm.sweep.record import Record

__all__ = ["device_title", "first_line", "print_sweep", "problem_title", "shorten", "write_csv"]

_WIDE = 120
_MOST_NOTES = 20
_JOB_COLUMNS = ("class", "model", "m", "k", "n", "e", "scale", "dtype", "distribution")
_ROW_COLUMNS = (
    "backend",
    "index",
    "name",
    "workspace_size",
    "deterministic",
    "verdict",
    "reason",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "tflops",
    "fraction",
    "error",
    "error_limit",
    "checked",
    "samples",
)


def problem_title(job: dict[str, Any]) -> str:
    """A job's shape, element type and distribution."""
    label = "" if job["model"].count(",") == 3 else f"{job['model']}  "
    scaled = f", scaled: M, K and N are 1/{job['scale']}" if job["scale"] != 1 else ""
    return f"{label}M={job['m']} K={job['k']} N={job['n']} E={job['e']}, {job['dtype']}, {job['distribution']}{scaled}"


def shorten(name: str, width: int) -> str:
    """A name that fits a width: of a long one the middle is left out, since both ends tell kernels apart."""
    if len(name) <= width:
        return name
    head = max((width - 1) // 2, 1)
    return f"{name[:head]}…{name[len(name) - max(width - 1 - head, 1) :]}"


def first_line(reason: str) -> str:
    """What the terminal shows of a reason; JSON and CSV have the rest, such as a crash's last words."""
    return reason.split("\n", 1)[0]


def device_title(record: Record) -> str:
    """The device's kind and product name."""
    name = str(record.identity.get("name") or record.identity.get("target") or "")
    return f"{record.identity.get('kind')}: {name}" if name else record.device


def print_sweep(console: Console, records: Sequence[Record]) -> None:
    """A table a problem and kind of device, a row a class; then what was not right."""
    for _, group in itertools.groupby(records, lambda record: (device_title(record), problem_title(record.job))):
        _print_problem(console, list(group))
    notes = list(_notes(records))
    for note in notes[:_MOST_NOTES]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if len(notes) > _MOST_NOTES:
        console.print(f"and {len(notes) - _MOST_NOTES} more; --json and --csv have them all", highlight=False)


def _notes(records: Iterable[Record]) -> Iterable[str]:
    for record in records:
        where = f"{record.job['class']} {problem_title(record.job)}"
        if record.status != "ok":
            yield f"{where}: {record.status}: {record.reason}"
        elif record.reason:
            yield f"{where}: {record.reason}"
        for row in record.rows:
            if row["verdict"] not in ("ok", "behind", "untimed"):
                yield f"{where}: {row['backend']} {row['index']} {row['name']}: {row['verdict']}: {first_line(row['reason'])}"


def _print_problem(console: Console, records: Sequence[Record]) -> None:
    wide = console.width >= _WIDE
    title = f"{problem_title(records[0].job)} on {device_title(records[0])}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("class", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("winner", no_wrap=True)
    measures = ("median ms", "p10", "p90", "TFLOP/s", "of floor", "workspace") if wide else ("ms", "TFLOP/s", "floor")
    for name in measures:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("candidates", no_wrap=True)
    verdicts = [_verdicts(record, wide) for record in records]
    room = max(console.width - (86 if wide else 55) - max(map(len, verdicts)), 10)  # what the other columns leave
    for record, counts in zip(records, verdicts, strict=True):
        best = record.best
        if best is None:
            state = record.status if record.status != "ok" else "no winner"
            style = "red" if record.status in ("ok", "failed") else "dim"
            table.add_row(record.job["class"], "-", state, *("-" for _ in measures), counts, style=style)
            continue
        fraction = "-" if best["fraction"] is None else f"{float(best['fraction']):.2g}"
        values = [number_text(best["median_ms"]), number_text(best["tflops"]), fraction]
        if wide:
            values[1:1] = [number_text(best["p10_ms"]), number_text(best["p90_ms"])]
            values.append(bytes_text(best["workspace_size"]))
        table.add_row(record.job["class"], best["backend"], shorten(best["name"], room), *values, counts)
    console.print(table)


def _verdicts(record: Record, wide: bool) -> str:
    """How many candidates got which verdict: "12 ok, 3 behind"; on narrow terminals "12 of 15 ok"."""
    counts = Counter(row["verdict"] for row in record.rows)
    if counts and not wide:
        return f"{counts['ok']} of {counts.total()} ok"
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "-"


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """One line a candidate, and one for each job that has none; problem, device and versions are repeated on each."""
    buffer = io.StringIO()
    names = (
        *_JOB_COLUMNS,
        "device",
        "device_name",
        "target",
        "versions",
        "status",
        "winner",
        *_ROW_COLUMNS,
        "floor_ms",
        "size_class",
        "finished",
    )
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\n")
    writer.writeheader()
    for record in records:
        report = record.report or {}
        common: dict[str, Any] = {name: record.job[name] for name in _JOB_COLUMNS}
        common.update(
            device=record.device,
            device_name=record.identity.get("name", ""),
            target=record.identity.get("target", ""),
            versions="; ".join(f"{name} {version}" for name, version in dict(record.identity.get("versions", {})).items()),
            status=record.status,
            floor_ms=_cell(report.get("floor_ms")),
            size_class=_cell(report.get("size_class")),
            finished=record.finished,
        )
        for row in record.rows:
            cells = {name: _cell(row.get(name)) for name in _ROW_COLUMNS}
            writer.writerow({**common, **cells, "winner": row == record.best})
        if not record.rows:
            writer.writerow({**common, "winner": False, "reason": record.reason})
    write_text(path, buffer.getvalue())


def _cell(value: Any) -> Any:
    return "" if value is None else value
