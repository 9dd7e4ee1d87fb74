"""Pictures of sweeps (matplotlib, the extra `bench`): what the winners reach, and the ratios of a comparison."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hipgroupgemm.benchmark.plots import draw_bars, label_short_bars
from hipgroupgemm.measure.workloads import geometric_mean
from hipgroupgemm.sweep.compare import Comparison
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.sweep.results import Record

__all__ = ["Panel", "comparison_panels", "save_panels", "sweep_panels"]

_CLUSTERS = 8  # beside each other at the most
Place = tuple[str, str]
"""The cluster and the class of a bar."""


class Panel(msgspec.Struct):
    """Bars by place. Of ratios, which are drawn from 1, with the band of what each may be; `marks` are of pale bars, which mean little.

    notes: what the tables say of these values, below the picture.
    """

    title: str
    axis: str
    values: dict[Place, float]
    notes: list[str]
    bands: dict[Place, tuple[float, float]] | None = None
    marks: dict[Place, str] = {}


def sweep_panels(records: Sequence[Record], notes: list[str]) -> list[Panel]:
    """The winners' fraction of the floor by class and shape, or their TFLOP/s where no floor is known; a panel a kind of device."""
    panels = []
    for device in dict.fromkeys(record.device_title for record in records):
        best = {_place(record.job): record.best for record in records if record.device_title == device and record.best is not None}
        versions = dict(next(record for record in records if record.device_title == device).identity.get("versions", {}))
        date = f"{', '.join(f'{name} {version}' for name, version in versions.items())}; {max(record.finished for record in records)[:10]}"
        for words, axis, values in (
            ("fraction of the floor", "floor / median time", {place: row.fraction for place, row in best.items()}),
            ("TFLOP/s", "TFLOP/s", {place: row.tflops for place, row in best.items()}),
        ):
            found = {place: value for place, value in values.items() if value}
            if found:
                mean = geometric_mean(list(found.values()))
                panels.append(Panel(f"{device}: the winners' {words}, geometric mean {mean:.3g}", axis, found, [date, *notes]))
                break
    return panels


def comparison_panels(comparisons: Sequence[Comparison]) -> list[Panel]:
    """The ratios of each comparison by class and shape, with their bands: bars above 1 are faster than the first sweep."""
    panels = []
    for comparison in comparisons:
        pairs = {_place(pair.job): (pair, ratio) for pair, ratio in comparison.pairs}
        marks = {
            place: "?" if pair.not_comparable else "~" for place, (pair, _) in pairs.items() if pair.not_comparable or pair.within_noise
        }
        mean = f", geometric mean {comparison.means['all']:.4g}x" if comparison.means else ""
        words = {"~": "; pale and ~: within noise", "?": "; pale and ?: not comparable"}
        title = (
            f"{comparison.other.label}: speed over {comparison.base.label}{mean}{''.join(words[m] for m in sorted(set(marks.values())))}"
        )
        bands = {place: (pair.ratio_from or ratio, pair.ratio_to or ratio) for place, (pair, ratio) in pairs.items()}
        if pairs:
            notes = [*dict.fromkeys(sweep.records[0].device_title for sweep in (comparison.base, comparison.other)), *comparison.warnings]
            values = {place: ratio for place, (_, ratio) in pairs.items()}
            panels.append(Panel(title, "time before / time now", values, notes, bands, marks))
    return panels


def _place(job: SweepJob) -> Place:
    label = f"M={job.m} K={job.k}\nN={job.n}" if job.model.count(",") == 3 else "\n".join(textwrap.wrap(job.model, 18))
    return f"{label}\nE={job.e}{f', 1/{job.scale}' if job.scale != 1 else ''}\n{job.dtype}, {job.distribution}", job.kind


def save_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draws panels below each other. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [(panel, clusters, number) for panel in panels for number, clusters in enumerate(_lines(panel))]
    width = max(7.5, 1.3 * max(len(clusters) for _, clusters, _ in rows) + 2.2)
    notes = [
        line for note in dict.fromkeys(note for panel in panels for note in panel.notes) for line in textwrap.wrap(note, int(width * 15))
    ]
    figure = Figure(figsize=(width, 0.8 + 3.9 * len(rows) + 0.15 * len(notes)), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    for axis, (panel, clusters, number) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        draw_panel(axis, panel, clusters)
        title = panel.title if number == 0 else f"{panel.title.partition(',')[0]}, continued"
        axis.set_title("\n".join(textwrap.wrap(title, int(width * 12))), fontsize=10, loc="left")
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, Patch(color=to_rgb(handle.patches[0].get_facecolor())))
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supxlabel("\n".join(notes), fontsize=8, color="0.35")
    figure.savefig(path, dpi=150)


def _lines(panel: Panel) -> list[list[str]]:
    """A panel's clusters in lines of equal length, so that a picture of many problems is no wider than a page."""
    names = list(dict.fromkeys(cluster for cluster, _ in panel.values))
    length = math.ceil(len(names) / math.ceil(len(names) / _CLUSTERS))
    return [names[start : start + length] for start in range(0, len(names), length)]


def draw_panel(axis: Any, panel: Panel, clusters: list[str]) -> None:
    """Draws the bars of some clusters; one scale for all lines of a panel."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    own = {place: value for place, value in panel.values.items() if place[0] in clusters}
    if panel.axis != "TFLOP/s":
        axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    axis.set_ylabel(panel.axis, fontsize=9)
    if panel.bands is None:
        draw_bars(axis, own, clusters, 0.0)
        axis.set_ylim(0, max(panel.values.values()) * 1.1 if panel.axis == "TFLOP/s" else max(1.05, 1.08 * max(panel.values.values())))
        label_short_bars(axis, "{:.3g}")
        return
    axis.set_yscale("log")
    draw_bars(axis, own, clusters, 1.0)
    low, high = min(band[0] for band in panel.bands.values()), max(band[1] for band in panel.bands.values())
    axis.set_ylim(min(0.9, low / 1.25), max(1.1, high * 1.25))  # with room for the values at both ends
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_major_locator(MaxNLocator(8) if max(high, 1) / min(low, 1) < 4 else LogLocator(10, subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    look: dict[str, Any] = {"rotation": 90, "fontsize": 6} if len(own) > 12 else {"fontsize": 7}
    for container in list(axis.containers):
        there = [(cluster, container.get_label()) for cluster in clusters if (cluster, container.get_label()) in own]
        for bar, place in zip(container, there, strict=True):  # in the order that draw_bars has
            value, band, x = own[place], panel.bands[place], bar.get_x() + bar.get_width() / 2
            bar.set_alpha(0.4 if place in panel.marks else None)
            axis.plot([x, x], band, color="0.2", linewidth=1, zorder=3)
            end, side = (max(band[1], 1), 1) if value >= 1 else (min(band[0], 1), -1)
            text, where = f"{panel.marks.get(place, '')}{value:.3g}x", {"va": "bottom" if side > 0 else "top"}
            axis.annotate(
                text, (x, end), xytext=(0, 3 * side), textcoords="offset points", ha="center", color="0.2", zorder=4, **where, **look
            )
