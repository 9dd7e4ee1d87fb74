"""Tuning reports for people: the terminal's table and the plot."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hipgroupgemm.benchmark.table import bytes_text, number_text
from hipgroupgemm.tuning.report import TuningReport, TuningRow

__all__ = ["ReportTable", "plot_report"]

_COLOURS = {"ok": "#1b6ca8", "behind": "#b9c4cc"}
_DPI = 150
_WIDE = 132
_OTHERS, _FEW = 101, 58  # columns of a terminal that the table takes without the names of backend and algorithm


class ReportTable:
    """What `TuningReport.__rich__` shows: on narrow terminals p10, p90, index and workspace are left to JSON and CSV."""

    def __init__(self, report: TuningReport) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, then the reasons of those that are not right, then the notes."""
        del console
        yield _table(self.report, options.max_width)
        for row in self.report.rows:
            if row.verdict not in ("ok", "behind") and row.reason:
                yield Text(f"{row.algorithm.backend} {row.algorithm.index} {row.algorithm.name}: {row.verdict}: {row.reason}")
        for note in self.report.notes:
            yield Text(note)


def _table(report: TuningReport, width: int) -> Table:
    wide = width >= _WIDE
    table = Table(box=SIMPLE_HEAD, title=_title(report), title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    measures = ("index", "workspace", "median ms", "p10", "p90", "TFLOP/s", "of floor", "error")
    shown = measures if wide else ("median ms", "TFLOP/s", "of floor", "error")
    for name in shown:
        table.add_column(name if wide else name.split()[-1], justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    best = report.best
    backend = max((len(row.algorithm.backend) for row in report.rows), default=0)
    room = max(width - backend - (_OTHERS if wide else _FEW), 12)
    for row in report.rows:
        a = row.algorithm
        texts = {
            "index": str(a.index),
            "workspace": bytes_text(a.workspace_size),
            "median ms": number_text(row.median_ms),
            "p10": number_text(row.p10_ms),
            "p90": number_text(row.p90_ms),
            "TFLOP/s": number_text(row.tflops),
            "of floor": "-" if row.fraction is None else f"{row.fraction:.2g}",
            "error": "-" if row.error is None else f"{row.error:.1e}",
        }
        style = "bold" if row is best else None if row.verdict == "ok" else "dim" if row.verdict in ("behind", "untimed") else "red"
        table.add_row(
            "*" if row is best else "", a.backend, _short(a.name, room), *(texts[name] for name in shown), row.verdict, style=style
        )
    return table


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
    timed = sorted((row for row in report.rows if row.median_ms is not None), key=_median)
    if not timed:
        raise ValueError("rows: no candidate was timed, there is nothing to plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    title = _title(report) + (f"\n{len(shown)} of {len(timed)} timed" if len(shown) < len(timed) else "")
    figure.suptitle(title, fontsize=8, wrap=True)
    figure.savefig(path, dpi=_DPI)


def _median(row: TuningRow) -> float:
    return float("inf") if row.median_ms is None else row.median_ms


def _label(row: TuningRow, best: bool) -> str:
    name = row.algorithm.name
    return f"{'* ' if best else ''}{row.algorithm.backend} {_short(name, 44)}"


def _short(name: str, width: int) -> str:
    """A name without its middle, where it is too long: kernels of one library differ at both ends."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"
