"""Plots of sweeps (matplotlib, the extra `bench`): what the winners reach, and the ratios of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.benchmark.plots import draw_bars, label_short_bars
from hipgroupgemm.sweep.compare import Comparison
from hipgroupgemm.sweep.output import device_title
from hipgroupgemm.sweep.record import Record
from hipgroupgemm.workloads import geometric_mean

__all__ = ["plot_comparisons", "plot_sweep"]

_DPI = 150


@dataclasses.dataclass(frozen=True)
class _Panel:
    title: str
    values: Mapping[tuple[str, str], float]
    draw: Callable[[Any, Mapping[tuple[str, str], float], list[str]], None]


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
            title = f"{comparison.other.label}: speed over {comparison.base.label}, geometric mean {comparison.ratio:.4g}x"
            panels.append(_Panel(title, values, _draw_ratio))
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
    from matplotlib.figure import Figure

    clusters = [list(dict.fromkeys(cluster for cluster, _ in panel.values)) for panel in panels]
    figure = Figure(figsize=(max(7.5, 1.3 * max(map(len, clusters)) + 2.2), 0.8 + 3.9 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for axis, panel, names in zip(axes, panels, clusters, strict=True):
        panel.draw(axis, panel.values, names)
        axis.set_title(panel.title, fontsize=10, loc="left")
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.supxlabel(note, fontsize=8, color="0.35")
    figure.savefig(path, dpi=_DPI)


def _draw_fraction(axis: Any, values: Mapping[tuple[str, str], float], clusters: list[str]) -> None:
    draw_bars(axis, dict(values), clusters, 0.0)
    axis.set_ylim(0, max(1.05, max(values.values()) * 1.08))
    axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    label_short_bars(axis, "{:.2g}")
    axis.set_ylabel("floor / median time (1 = the ceiling)", fontsize=9)


def _draw_tflops(axis: Any, values: Mapping[tuple[str, str], float], clusters: list[str]) -> None:
    draw_bars(axis, dict(values), clusters, 0.0)
    axis.set_ylim(0, max(values.values()) * 1.1)
    label_short_bars(axis, "{:.3g}")
    axis.set_ylabel("TFLOP/s", fontsize=9)


def _draw_ratio(axis: Any, values: Mapping[tuple[str, str], float], clusters: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis.set_yscale("log")
    draw_bars(axis, dict(values), clusters, 1.0)
    low, high = min(values.values()), max(values.values())
    axis.set_ylim(min(0.9, low / 1.1), max(1.1, high * 1.15))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_major_locator(MaxNLocator(8) if max(high, 1) / min(low, 1) < 4 else LogLocator(10, subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    label_short_bars(axis, "{:.3g}x")
    axis.set_ylabel("time before / time now", fontsize=9)
