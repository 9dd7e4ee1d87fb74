"""Tuning reports for people: the terminal's table and the plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hipgroupgemm.measure.text import bytes_text, number_text
from hipgroupgemm.tuning.columns import Column, fitting_table, noise_text, shorten
from hipgroupgemm.tuning.report import TuningReport, TuningRow, printable

__all__ = ["ReportTable", "plot_report", "summary_text"]

_COLOURS = {"ok": "#1b6ca8", "behind": "#b9c4cc"}
_DPI = 150
_STYLES = {"ok": None, "behind": "dim", "untimed": "dim"}
_SUFFIXES = (".png", ".svg", ".pdf")


class ReportTable:
    """What `TuningReport.__rich__` shows: what a narrow terminal has no room for is left to JSON and CSV."""

    def __init__(self, report: TuningReport) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, then the reasons of those that are not right, then the notes."""
        del console
        yield _table(self.report, options.max_width)
        for row in self.report.rows:
            if row.verdict not in ("ok", "behind") and row.reason:
                told = f"{row.algorithm.backend} {row.algorithm.index} {row.algorithm.name}: {row.verdict}: {row.reason}"
                yield Text(printable(told))
        for note in _notes(self.report):
            yield Text(printable(note))


def _table(report: TuningReport, width: int) -> Table:
    rows, best = report.rows, report.best

    def cells(text: Callable[[TuningRow], str]) -> list[str]:
        return [printable(text(row)) for row in rows]

    columns = [
        Column("", cells(lambda row: "*" if row is best else ""), right=False),
        Column("backend", cells(lambda row: row.algorithm.backend), right=False),
        Column("algorithm", cells(lambda row: row.algorithm.name), right=False, name=True),
        Column("index", cells(lambda row: str(row.algorithm.index)), 8),
        Column("workspace", cells(lambda row: bytes_text(row.algorithm.workspace_size)), 7),
        Column("median ms", cells(lambda row: number_text(row.median_ms))),
        Column("p10", cells(lambda row: number_text(row.p10_ms)), 4),
        Column("p90", cells(lambda row: number_text(row.p90_ms)), 4),
        Column("runs", cells(lambda row: str(row.samples) if row.samples else "-"), 3),
        Column("TFLOP/s", cells(lambda row: number_text(row.tflops)), 2),
        Column("of floor", cells(lambda row: "-" if row.fraction is None else f"{row.fraction:.2g}"), 5),
        Column("error", cells(lambda row: "-" if row.error is None else f"{row.error:.1e}"), 6),
        Column("verdict", cells(lambda row: row.verdict), right=False),
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
    if best is None or not doubt:
        return list(report.notes)
    if doubt == "few":
        calls = "1 timed call" if best.samples == 1 else f"{best.samples} timed calls"
        return [*report.notes, f"the winner's median is of {calls}, which says little of noise; give it more time or repetitions"]
    return [*report.notes, "the winner's times spread widely (p10 to p90): the device was busy or its clocks moved"]


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
    """What `TuningReport.plot` writes."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"path={str(path)!r}: wanted a name that ends in {', '.join(_SUFFIXES)}")
    timed = sorted((row for row in report.rows if row.median_ms is not None), key=_median)
    if not timed:
        raise ValueError("rows: no candidate was timed, there is nothing to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plot needs matplotlib ({error}): pip install 'hipgroupgemm[bench]'") from error

    shown = timed[:count]
    figure = Figure(figsize=(9.0, 1.6 + 0.28 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    places = list(range(len(shown)))
    axis.barh(places, [_median(row) for row in shown], 0.7, color=[_COLOURS.get(row.verdict, "#c8553d") for row in shown], zorder=2)
    for place, row in zip(places, shown, strict=True):
        if row.p10_ms is not None and row.p90_ms is not None:
            axis.plot([row.p10_ms, row.p90_ms], [place, place], color="0.2", linewidth=1.2, zorder=3)
    axis.set_yticks(places, [_label(row, row is report.best) for row in shown], fontsize=7)
    axis.invert_yaxis()
    if report.floor_ms is not None:
        axis.axvline(report.floor_ms, color="0.3", linewidth=1, linestyle="--", zorder=4)
    axis.set_xlim(left=0)
    axis.set_xlabel("median ms, cold (line: p10 to p90; dashed: the floor; grey: stopped early; red: not right)", fontsize=8)
    axis.grid(axis="x", color="0.88", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    title = printable(_title(report)) + (f"\n{len(shown)} of {len(timed)} timed" if len(shown) < len(timed) else "")
    figure.suptitle(title, fontsize=8, wrap=True)
    figure.savefig(path, dpi=_DPI)


def _median(row: TuningRow) -> float:
    return float("inf") if row.median_ms is None else row.median_ms


def _label(row: TuningRow, best: bool) -> str:
    name = row.algorithm.name
    return f"{'* ' if best else ''}{row.algorithm.backend} {printable(shorten(name, 44))}"
