"""Tuning reports for people: the terminal's table, a few lines of text, and the plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hipgroupgemm.measure.text import bytes_text, number_text
from hipgroupgemm.tuning.tables import Column, fitting_table, noise_text, printable, shorten

if TYPE_CHECKING:
    from hipgroupgemm.tuning.report import TuningReport, TuningRow

__all__ = ["plot_report", "rich_parts", "summary_text"]

_COLOURS = {"ok": "#1b6ca8", "pruned": "#b9c4cc"}
_DPI = 150
_STYLES = {"ok": None, "pruned": "dim", "untimed": "dim"}
_SUFFIXES = (".png", ".svg", ".pdf")


def rich_parts(report: TuningReport, width: int) -> Iterator[Table | Text]:
    """The table, then the reasons of those that are not right, then the notes. What there is no room for is left to JSON and CSV."""
    yield _table(report, width)
    for row in report.rows:
        if row.verdict not in ("ok", "pruned") and row.reason:
            a = row.algorithm
            yield Text(printable(f"{a.backend} {a.index} {a.name}: {row.verdict}: {row.reason}"))
    for note in _notes(report):
        yield Text(printable(note))


def _table(report: TuningReport, width: int) -> Table:
    rows, best = report.rows, report.best

    def column(title: str, text: Callable[[TuningRow], str], rank: int = 0, *, right: bool = True, name: bool = False) -> Column:
        return Column(title, [printable(text(row)) for row in rows], rank, right, name)

    columns = [
        column("", lambda row: "*" if row is best else "", right=False),
        column("backend", lambda row: row.algorithm.backend, right=False),
        column("algorithm", lambda row: row.algorithm.name, right=False, name=True),
        column("index", lambda row: str(row.algorithm.index), 8),
        column("workspace", lambda row: bytes_text(row.algorithm.workspace_size), 7),
        column("median ms", lambda row: number_text(row.median_ms)),
        column("p10", lambda row: number_text(row.p10_ms), 4),
        column("p90", lambda row: number_text(row.p90_ms), 4),
        column("ratio", lambda row: "-" if row.ratio is None else f"{row.ratio:.3f}", 1),
        column("runs", lambda row: str(row.samples) if row.samples else "-", 3),
        column("TFLOP/s", lambda row: number_text(row.tflops), 2),
        column("of floor", lambda row: "-" if row.fraction is None else f"{row.fraction:.2g}", 5),
        column("error", lambda row: "-" if row.error is None else f"{row.error:.1e}", 6),
        column("verdict", lambda row: row.verdict, right=False),
    ]
    styles = ["bold" if row is best else _STYLES.get(row.verdict, "red") for row in rows]
    return fitting_table(columns, styles, width, printable(_title(report)))


def summary_text(report: TuningReport) -> str:
    """What `str` makes of a report: the problem, the winner, how many candidates got which verdict, and the notes."""
    best = report.best
    lines = [_title(report)]
    if best is None:
        lines.append("no winner")
    else:
        fraction = "" if best.fraction is None else f", {best.fraction:.2g} of the floor"
        lines.append(
            f"best: {best.algorithm.backend} {best.algorithm.name}, {number_text(best.median_ms)} ms (p10 {number_text(best.p10_ms)}, "
            f"p90 {number_text(best.p90_ms)}, runs {best.samples}), {number_text(best.tflops)} TFLOP/s{fraction}"
        )
    counts = Counter(row.verdict for row in report.rows)
    lines.append(f"candidates: {', '.join(f'{count} {verdict}' for verdict, count in counts.items()) or 'none'}")
    return printable("\n".join([*lines, *_notes(report)]))


def _notes(report: TuningReport) -> list[str]:
    """The report's notes, and what makes the winner's time doubtful."""
    best = report.best
    doubt = "" if best is None else noise_text(best.median_ms, best.p10_ms, best.p90_ms, best.samples)
    calls = "" if best is None else f"{best.samples} timed call{'s' * (best.samples != 1)}"
    words = {
        "few": f"the winner's median is of {calls}, which says little of noise; give it more time or repetitions",
        "wide": "the winner's times spread widely (p10 to p90): the device was busy or its clocks moved",
    }
    return [*report.notes, *([words[doubt]] if doubt else [])]


def _title(report: TuningReport) -> str:
    c = report.config
    mode = c.ragged_mode.name
    m = report.ragged_extent if mode == "NON_CONTRACTING" else c.m
    k = report.ragged_extent if mode == "CONTRACTING" else c.k
    sizes = "the balanced seed" if report.seeded else f"{len(report.size_samples)} given"
    floor = "" if report.floor_ms is None else f", floor {number_text(report.floor_ms)} ms"
    return (
        f"{mode} m={m} n={c.n} k={k} groups={c.group_count}{f' batch={c.batch_count}' if c.batch_count != 1 else ''}, "
        f"{c.type_a} x {c.type_b} -> {c.type_d} on {report.device_name or report.device}; sizes: {sizes}, {report.size_class}{floor}"
    )


def plot_report(report: TuningReport, path: Path, count: int) -> None:
    """What `TuningReport.plot` writes. A candidate whose timing was stopped early has its ratio times the winner's median."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"path={str(path)!r}: wanted a name that ends in {', '.join(_SUFFIXES)}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}: wanted an int of at least 1")
    best = report.best
    scale = best.median_ms / (best.ratio or 1.0) if best is not None and best.median_ms is not None else 0.0
    bars = [(row.median_ms or (row.ratio or 0.0) * scale, row) for row in report.rows]
    timed = sorted((bar for bar in bars if bar[0]), key=lambda bar: bar[0])
    if not timed:
        raise ValueError("rows: no candidate was timed, there is nothing to plot")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plot needs matplotlib ({error}): pip install 'hipgroupgemm[bench]'") from error

    shown = timed[:count]
    rows, places = [row for _, row in shown], range(len(shown))
    figure = Figure(figsize=(9.0, 1.6 + 0.28 * len(shown)), layout="constrained")
    axis = figure.subplots()
    axis.barh(places, [ms for ms, _ in shown], 0.7, color=[_COLOURS.get(row.verdict, "#c8553d") for row in rows])
    for place, row in enumerate(rows):
        axis.plot([row.p10_ms or math.nan, row.p90_ms or math.nan], [place, place], color="0.2", linewidth=1.2)
    names = shorten([printable(row.algorithm.name) for row in rows], 44)
    labels = [f"{'* ' if row is best else ''}{row.algorithm.backend} {name}" for row, name in zip(rows, names, strict=True)]
    axis.set_yticks(places, labels, fontsize=7)
    axis.invert_yaxis()
    if report.floor_ms is not None:
        axis.axvline(report.floor_ms, color="0.3", linewidth=1, linestyle="--")
    axis.set_xlim(left=0)
    words = "median ms, cold (line: p10 to p90; dashed: the floor; grey: stopped early, its ratio times the winner's time)"
    axis.set_xlabel(words, fontsize=8)
    notes = [note for note in _notes(report) if "load average" in note or note.startswith("the winner's")]
    lines = [_title(report), *([f"{len(shown)} of {len(timed)} timed"] if len(shown) < len(timed) else []), *notes]
    figure.suptitle(printable("\n".join(lines)), fontsize=8, wrap=True)
    figure.savefig(path, dpi=_DPI)
