"""A sweep's results for people (tables) and for programs (CSV)."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.measure.environment import busy_note
from hipgroupgemm.measure.text import bytes_text, number_text, write_text
from hipgroupgemm.sweep.record import Record
from hipgroupgemm.tuning.columns import FEW, WIDE, Column, fitting_table, noise_text

__all__ = ["device_title", "first_line", "noise_notes", "print_sweep", "problem_title", "write_csv"]

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
    title = f"{problem_title(records[0].job)} on {device_title(records[0])}"

    def cells(text: Callable[[dict[str, Any]], str]) -> list[str]:
        return ["-" if record.best is None else text(record.best) for record in records]

    columns = [
        Column("class", [record.job["class"] for record in records], right=False),
        Column("backend", cells(lambda best: str(best["backend"])), 2, right=False),
        Column("winner", [_winner(record) for record in records], right=False, name=True),
        Column("median ms", cells(lambda best: number_text(best["median_ms"]))),
        Column("p10", cells(lambda best: number_text(best.get("p10_ms"))), 5),
        Column("p90", cells(lambda best: number_text(best.get("p90_ms"))), 5),
        Column("runs", cells(lambda best: str(best.get("samples", "-"))), 4),
        Column("TFLOP/s", cells(lambda best: number_text(best.get("tflops"))), 3),
        Column("of floor", cells(lambda best: "-" if best.get("fraction") is None else f"{float(best['fraction']):.2g}"), 6),
        Column("workspace", cells(lambda best: bytes_text(best.get("workspace_size"))), 8),
        Column("candidates", [_verdicts(record) for record in records], 1, right=False),
    ]
    styles = [None if record.best is not None else "red" if record.status in ("ok", "failed") else "dim" for record in records]
    console.print(fitting_table(columns, styles, console.width, title))


def _winner(record: Record) -> str:
    if record.best is not None:
        return str(record.best["name"])
    return record.status if record.status != "ok" else "no winner"


def _verdicts(record: Record) -> str:
    """How many candidates got which verdict: "12 ok, 3 behind"."""
    counts = Counter(row["verdict"] for row in record.rows)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "-"


def noise_notes(records: Iterable[Record], load: float | None = None, cores: int = 1) -> list[str]:
    """Why times may not be trusted: winners with few timed calls or a wide spread, and others at work before the sweep began."""
    counts: Counter[str] = Counter()
    on_cpu = False
    for record in records:
        on_cpu |= record.identity.get("kind") == "cpu"  # a GPU's times hardly depend on the load
        best = record.best or {}
        counts[noise_text(best.get("median_ms"), best.get("p10_ms"), best.get("p90_ms"), int(best.get("samples", 0)))] += 1
    notes = []
    if counts["few"]:
        notes.append(
            f"Winners with fewer than {FEW} timed calls: {counts['few']}; their p10 and p90 say little of noise. "
            "A longer --time-limit or more --repetitions help."
        )
    if counts["wide"]:
        notes.append(f"Winners whose times spread by more than {WIDE:.0%} from p10 to p90: {counts['wide']}; a close win may be chance.")
    busy = busy_note(load, cores) if on_cpu else ""
    return [*notes, busy] if busy else notes


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
