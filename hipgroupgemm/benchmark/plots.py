"""Pictures (matplotlib, the extra `bench`): bars by class and problem, of benchmarks here and of sweeps in `sweep.report`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.benchmark.baselines import PADDED
from hipgroupgemm.benchmark.rows import Row
from hipgroupgemm.measure.text import say
from hipgroupgemm.measure.workloads import CLASSES, geometric_mean

__all__ = ["Panel", "Place", "cluster_text", "draw_panel", "floor_label", "row_panels", "save_panels", "write_panels"]

_COLOURS = dict(zip(CLASSES, ("#1b6ca8", "#6fb1de", "#c8553d", "#f0a58f", "#3c7d4f", "#93c7a0"), strict=True))
_CLUSTERS = 8  # beside each other at the most

Place = tuple[str, str]
"""The cluster (a problem) and the class of a bar."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """Bars by place.

    Attributes:
        title, axis: the words. values: the bars' heights; those of ratios hang from 1, on a logarithmic scale.
        line: whether 1 is marked. bands: what each ratio may be, drawn as a line; every bar has its value then, else short ones alone.
        marks: of bars that mean little: they are pale, and the mark stands before the value.
    """

    title: str
    axis: str
    values: Mapping[Place, float]
    ratios: bool = False
    line: bool = True
    bands: Mapping[Place, tuple[float, float]] = dataclasses.field(default_factory=dict)
    marks: Mapping[Place, str] = dataclasses.field(default_factory=dict)


_WORDS = {  # what the title and the axis say of a row's field, and whether it is a ratio
    "speedup": ("speed-up over the padded dot, geometric mean {:.3g}x", f"speed-up over {PADDED}", True),
    "floor_fraction": ("fraction of the measured floor, geometric mean {:.2g}", "", False),
}


def row_panels(rows: Sequence[Row], fields: Sequence[str] = tuple(_WORDS)) -> list[Panel]:
    """The speed-ups and the fractions of the floor, or one of them: a panel for each backend, a bar per class and problem.

    Bars are geometric means over the group sizes. What no row has is left out.
    """
    panels = []
    for field in fields:
        found: dict[str, dict[Place, list[float]]] = {}
        for row in rows:
            if row.status == "ok" and not row.baseline and getattr(row, field) is not None:
                place = (cluster_text(row.model, row.m, row.k, row.n, row.e, row.scale), row.ragged_dot_class)
                found.setdefault(row.backend, {}).setdefault(place, []).append(getattr(row, field))
        title, axis, ratios = _WORDS[field]
        for backend, places in found.items():
            values = {place: geometric_mean(numbers) for place, numbers in places.items()}
            mean = geometric_mean(list(values.values()))
            panels.append(Panel(f"{backend}: {title.format(mean)}", axis or floor_label(values), values, ratios))
    return panels


def floor_label(values: Mapping[Place, float]) -> str:
    """What the axis of fractions of the floor says: 1 was measured, and a result that stays in a cache beats it."""
    return "measured floor / median time" + ("\n(above 1: operands stayed in a cache)" if max(values.values()) > 1 else "")


def cluster_text(model: str, m: int, k: int, n: int, e: int, scale: int, more: str = "") -> str:
    """What stands below a cluster."""
    name = f"M={m} K={k}\nN={n}" if model.count(",") == 3 else "\n".join(textwrap.wrap(model, 18))
    return f"{name}\nE={e}{f', 1/{scale}' if scale != 1 else ''}{more}"


# ---- drawing ---------------------------------------------------------------------------------------------------------------------


def write_panels(paths: Sequence[Path], panels: Sequence[Panel], note: str, console: Console) -> None:
    """Writes pictures, and says of each that it is written, or that there is nothing to draw."""
    for path in paths:
        if panels:
            save_panels(panels, path, note)
        say(f"wrote {path}" if panels else f"{path} was not written: there is no winner, so there is nothing to plot", console=console)


def save_panels(panels: Sequence[Panel], path: Path, note: str = "") -> None:
    """Draws panels, of which there are some, below each other, the legend above all of them, where it hides no bar, and a note below.

    What the note says of a busy machine stands on the picture as it does under the table. Raises ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    parts = [(panel, clusters, number) for panel in panels for number, clusters in enumerate(_lines(panel))]
    width = max(7.5, 1.3 * max(len(clusters) for _, clusters, _ in parts) + 2.2)
    figure = Figure(figsize=(width, 0.8 + 3.9 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (panel, clusters, number) in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        draw_panel(axis, panel, clusters)
        title = f"{panel.title.partition(',')[0]}, continued" if number else panel.title
        axis.set_title(textwrap.fill(title, int(width * 12)), fontsize=10, loc="left")
    there = {kind for panel in panels for _, kind in panel.values}
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in there]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    if note:
        figure.supxlabel("\n".join(textwrap.fill(line, int(width * 15)) for line in note.splitlines()), fontsize=8, color="0.35")
    figure.savefig(path, dpi=150)


def _lines(panel: Panel) -> list[list[str]]:
    """A panel's clusters in lines of equal length, so that a picture of many problems is no wider than a page."""
    names = list(dict.fromkeys(cluster for cluster, _ in panel.values))
    length = math.ceil(len(names) / math.ceil(len(names) / _CLUSTERS))
    return [names[start : start + length] for start in range(0, len(names), length)]


def draw_panel(axis: Any, panel: Panel, clusters: list[str]) -> None:
    """Draws the bars of some clusters; one scale for all lines of a panel. Short bars have their value, all have it beside bands."""
    _set_scale(axis, panel)
    base = 1.0 if panel.ratios else 0.0
    classes = [name for name in _COLOURS if any(kind == name for _, kind in panel.values)]
    width = min(0.84 / len(classes), 0.25 if len(clusters) > 2 else 0.14)  # a single bar is no block
    crowded = sum(cluster in clusters for cluster, _ in panel.values) > 12
    words = {"textcoords": "offset points", "ha": "center", "color": "0.2", "zorder": 4}
    words |= {"rotation": 90, "fontsize": 6} if crowded else {"fontsize": 7}
    for (number, cluster), (index, name) in itertools.product(enumerate(clusters), enumerate(classes)):
        place, x = (cluster, name), number + (index - (len(classes) - 1) / 2) * width
        if place not in panel.values:
            continue
        value, pale = panel.values[place], 0.4 if place in panel.marks else None
        axis.bar(x, value - base, width * 0.92, bottom=base, color=_COLOURS[name], zorder=2, alpha=pale)
        low, high = panel.bands.get(place, (value, value))
        start, end = (axis.transData.transform((0, y))[1] for y in (base, value))
        if panel.bands:
            axis.plot([x, x], [low, high], color="0.2", linewidth=1, zorder=3)
        if panel.bands or abs(end - start) < 0.06 * axis.bbox.height:
            up = value >= base or not panel.bands
            at = {"xytext": (0, 3), "va": "bottom"} if up else {"xytext": (0, -3), "va": "top"}
            text = f"{panel.marks.get(place, '')}{value:.3g}{'x' if panel.ratios else ''}"
            axis.annotate(text, (x, max(high, base) if up else min(low, base)), **at, **words)
    axis.set_xticks(range(len(clusters)), clusters, fontsize=8)
    axis.set_xlim(-0.6, len(clusters) - 0.4)
    axis.set_ylabel(panel.axis, fontsize=9)
    axis.grid(axis="y", which="major", color="0.88", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.line:
        axis.axhline(1, color="0.3", linewidth=1, zorder=3)


def _set_scale(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    ends = [*panel.values.values(), *itertools.chain(*panel.bands.values())]
    low, high = min(ends), max(ends)
    if not panel.ratios:
        axis.set_ylim(0, max(1.05 if panel.line else 0, high * 1.08))
        return
    axis.set_yscale("log")
    axis.set_ylim(min(0.9, low / 1.25), max(1.1, high * 1.25))  # with room for the values at both ends
    span = max(high, 1) / min(low, 1)
    axis.yaxis.set_major_locator(MaxNLocator(8) if span < 4 else LogLocator(10, subs=(1, 2, 5) if span < 300 else (1,)))
    axis.yaxis.set_major_formatter("{x:g}x")
    axis.yaxis.set_minor_formatter(NullFormatter())
