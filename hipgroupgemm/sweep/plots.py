"""Plots of sweeps (matplotlib, the extra `bench`): what the winners reach, and the ratios of a comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.benchmark.plots import draw_bars, label_short_bars
from hipgroupgemm.measure.workloads import geometric_mean
from hipgroupgemm.sweep.compare import Comparison
from hipgroupgemm.sweep.output import device_title
from hipgroupgemm.sweep.record import Record

__all__ = ["plot_comparisons", "plot_sweep"]

_DPI = 150
_CLUSTERS = 8  # beside each other at the most


@dataclasses.dataclass(frozen=True)
class _Panel:
    """What is drawn by (cluster, class). noise: the bars whose ratio may be chance, drawn pale."""

    title: str
    values: Mapping[tuple[str, str], float]
    draw: Callable[[Any, _Panel, list[str]], None]
    noise: frozenset[tuple[str, str]] = frozenset()


def plot_sweep(records: Sequence[Record], path: Path) -> None:
    """Writes the winners' fraction of the floor by class and shape, or their TFLOP/s where no floor is known; a panel a kind of device.

    Raises:
        ValueError: no job has a winner.
    """
    panels = []
    for device in dict.fromkeys(device_title(record) for record in records):
        winners = [record for record in records if device_title(record) == device and record.best is not None]
        for field, words, draw in (("fraction", "fraction of the floor", _draw_fraction), ("tflops", "TFLOP/s", _draw_tflops)):
            values = {_place(record): float((record.best or {})[field]) for record in winners if (record.best or {})[field] is not None}
            if values:
                mean = geometric_mean(list(values.values()))
                panels.append(_Panel(f"{device}: the winners' {words}, geometric mean {mean:.3g}", values, draw))
                break
    if not panels:
        raise ValueError("no job has a winner, there is nothing to plot")
    _save(panels, path, _note(records))


def plot_comparisons(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes the ratios of each comparison by class and shape: bars above 1 are faster than the first sweep.

    Raises:
        ValueError: no problem has a winner in two sweeps.
    """
    panels = []
    for comparison in comparisons:
        values = {_place(pair.base): pair.ratio for pair in comparison.pairs if pair.ratio > 0}
        if values:
            noise = frozenset(_place(pair.base) for pair in comparison.pairs if pair.noise)
            pale = "; pale and ~: within noise" if noise else ""
            title = f"{comparison.other.label}: speed over {comparison.base.label}, geometric mean {comparison.ratio:.4g}x{pale}"
            panels.append(_Panel(title, values, _draw_ratio, noise))
    if not panels:
        raise ValueError("no problem has a winner in two sweeps, there is nothing to plot")
    devices = dict.fromkeys(one.device for comparison in comparisons for one in (comparison.base, comparison.other))
    _save(panels, path, " and ".join(devices))


def _place(record: Record) -> tuple[str, str]:
    """The cluster and the class of a bar."""
    job = record.job
    label = f"M={job['m']} K={job['k']}\nN={job['n']}" if job["model"].count(",") == 3 else _two_lines(str(job["model"]))
    scaled = f", 1/{job['scale']}" if job["scale"] != 1 else ""
    return f"{label}\nE={job['e']}{scaled}\n{job['dtype']}, {job['distribution']}", job["class"]


def _two_lines(name: str) -> str:
    """A long name, broken at the hyphen that is nearest to its middle."""
    places = [place for place, letter in enumerate(name) if letter == "-"]
    if len(name) < 18 or not places:
        return name
    middle = min(places, key=lambda place: abs(place - len(name) // 2))
    return f"{name[: middle + 1]}\n{name[middle + 1 :]}"


def _note(records: Sequence[Record]) -> str:
    versions = {name: str(version) for record in records for name, version in dict(record.identity.get("versions", {})).items()}
    date = max(record.finished for record in records)[:10]
    return " · ".join([", ".join(f"{name} {version}" for name, version in versions.items()), date])


def _save(panels: Sequence[_Panel], path: Path, note: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [(panel, names, number) for panel in panels for number, names in enumerate(_lines(panel))]
    width = 1.3 * max(len(names) for _, names, _ in rows) + 2.2
    figure = Figure(figsize=(max(7.5, width), 0.8 + 3.9 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for axis, (panel, names, number) in zip(axes, rows, strict=True):
        panel.draw(axis, panel, names)
        axis.set_title(panel.title if number == 0 else f"{panel.title.partition(',')[0]}, continued", fontsize=10, loc="left")
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, Patch(color=to_rgb(handle.patches[0].get_facecolor())))
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supxlabel(note, fontsize=8, color="0.35")
    figure.savefig(path, dpi=_DPI)


def _lines(panel: _Panel) -> list[list[str]]:
    """A panel's clusters in lines of equal length, so that a picture of many problems is no wider than a page."""
    names = list(dict.fromkeys(cluster for cluster, _ in panel.values))
    lines = math.ceil(len(names) / _CLUSTERS)
    length = math.ceil(len(names) / lines)
    return [names[start : start + length] for start in range(0, len(names), length)]


def _of(panel: _Panel, clusters: list[str]) -> dict[tuple[str, str], float]:
    return {place: value for place, value in panel.values.items() if place[0] in clusters}


def _draw_fraction(axis: Any, panel: _Panel, clusters: list[str]) -> None:
    draw_bars(axis, _of(panel, clusters), clusters, 0.0)
    values = panel.values  # one scale for all lines
    axis.set_ylim(0, max(1.05, max(values.values()) * 1.08))
    axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    label_short_bars(axis, "{:.2g}")
    axis.set_ylabel("floor / median time (1 = the ceiling)", fontsize=9)


def _draw_tflops(axis: Any, panel: _Panel, clusters: list[str]) -> None:
    draw_bars(axis, _of(panel, clusters), clusters, 0.0)
    values = panel.values
    axis.set_ylim(0, max(values.values()) * 1.1)
    label_short_bars(axis, "{:.3g}")
    axis.set_ylabel("TFLOP/s", fontsize=9)


def _draw_ratio(axis: Any, panel: _Panel, clusters: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis.set_yscale("log")
    draw_bars(axis, _of(panel, clusters), clusters, 1.0)
    values = panel.values
    low, high = min(values.values()), max(values.values())
    axis.set_ylim(min(0.9, low / 1.25), max(1.1, high * 1.25))  # with room for the values at both ends
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_major_locator(MaxNLocator(8) if max(high, 1) / min(low, 1) < 4 else LogLocator(10, subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    _label_ratios(axis, panel, clusters)
    axis.set_ylabel("time before / time now", fontsize=9)


def _label_ratios(axis: Any, panel: _Panel, clusters: list[str]) -> None:
    """Every bar's value at its end; bars within noise are pale, their values have a ~."""
    crowded = sum(len(container) for container in axis.containers) > 12
    for container in axis.containers:
        there = [cluster for cluster in clusters if (cluster, container.get_label()) in panel.values]  # the order that draw_bars has
        for bar, cluster in zip(container, there, strict=True):
            value = panel.values[cluster, container.get_label()]
            noise = (cluster, container.get_label()) in panel.noise
            if noise:
                bar.set_alpha(0.4)
            up = value >= 1
            axis.annotate(
                f"{'~' if noise else ''}{value:.3g}x",
                (bar.get_x() + bar.get_width() / 2, value),
                xytext=(0, 3 if up else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if up else "top",
                color="0.2",
                zorder=4,
                rotation=90 if crowded else 0,
                fontsize=6 if crowded else 7,
            )
