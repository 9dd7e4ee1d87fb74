"""Plots of benchmark rows (matplotlib, the extra `bench`): speed-up by class and model, and the fraction of the floor."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.benchmark.baselines import PADDED
from hipgroupgemm.benchmark.runner import Row
from hipgroupgemm.measure.workloads import CLASSES, geometric_mean

__all__ = ["SUFFIXES", "draw_bars", "label_short_bars", "plot_both", "plot_floor", "plot_speedup", "save_figure"]

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#1b6ca8", "#6fb1de", "#c8553d", "#f0a58f", "#3c7d4f", "#93c7a0")  # forward, data gradient, weight gradient; wi dark, wo light
_DPI = 150


def plot_speedup(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Writes the speed-up over the padded dot, a bar a class and a cluster a model, for every backend among the rows.

    Raises:
        ValueError: no row has a speed-up (the padded baseline was left out, or nothing ran).
    """
    _save([(rows, _draw_speedup)], path, title)


def plot_floor(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Writes the fraction of the measured floor, like `plot_speedup`."""
    _save([(rows, _draw_floor)], path, title)


def plot_both(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Writes both plots into one file, the fraction of the floor alone where no row has a speed-up."""
    panels = [(rows, _draw_speedup)] if any(_speedups(rows, name) for name in _backends(rows)) else []
    _save([*panels, (rows, _draw_floor)], path, title)


def _backends(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.backend for row in rows if not row.baseline and row.status == "ok"))


def _speedups(rows: Sequence[Row], backend: str) -> dict[tuple[str, str], float]:
    return _values(rows, backend, "speedup")


def _values(rows: Sequence[Row], backend: str, field: str) -> dict[tuple[str, str], float]:
    """(model and scale, class) -> the geometric mean of the field over the group sizes that were run."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        value = getattr(row, field)
        if row.backend == backend and row.status == "ok" and value is not None:
            found.setdefault((_model(row), row.ragged_dot_class), []).append(value)
    return {key: geometric_mean(values) for key, values in found.items()}


def _model(row: Row) -> str:
    name = row.model if row.model.count(",") != 3 else f"M={row.m} K={row.k}\nN={row.n}"
    name = (
        name.replace("-published", "\npublished").replace("-reduced", "\nreduced").replace("-large", "\nlarge").replace("-test-", "\ntest-")
    )
    scaled = f", 1/{row.scale}" if row.scale != 1 else ""
    return f"{name}\nE={row.e}{scaled}"


def _save(panels: Sequence[tuple[Sequence[Row], Any]], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    jobs = [(rows, draw, backend) for rows, draw in panels for backend in _backends(rows)]
    jobs = [job for job in jobs if _values(job[0], job[2], "speedup" if job[1] is _draw_speedup else "floor_fraction")]
    if not jobs:
        raise ValueError("rows: none has the value to plot; run at least one backend, with the padded_dot baseline for speed-ups")
    models = max(len(dict.fromkeys(_model(row) for row in rows)) for rows, _, _ in jobs)
    figure = Figure(figsize=(max(7.5, 1.2 * models + 2.2), 0.8 + 3.7 * len(jobs)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(jobs), 1, squeeze=False)[:, 0]
    for axis, (rows, draw, backend) in zip(axes, jobs, strict=True):
        draw(axis, rows, backend)
    save_figure(figure, axes[0], path, title)


def save_figure(figure: Any, axis: Any, path: Path, note: str = "") -> None:
    """Writes a figure with the legend of one of its axes above all of them, where it hides no bar, and a note below, folded to fit.

    What the note says of a busy machine stands on the picture as it does under the table.
    """
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    if note:
        width = int(figure.get_figwidth() * 17)
        figure.supxlabel("\n".join(textwrap.fill(line, width) for line in note.splitlines()), fontsize=8, color="0.35")
    figure.savefig(path, dpi=_DPI)


def draw_bars(axis: Any, values: dict[tuple[str, str], float], models: list[str], base: float) -> None:
    """Draws values by (cluster, class) as bars from `base`, a colour a class, a cluster a model."""
    classes = [name for name in CLASSES if any(cls == name for _, cls in values)]
    width = min(0.84 / max(len(classes), 1), 0.25 if len(models) > 2 else 0.14)  # a single bar is no block
    for index, name in enumerate(classes):
        at = [place + (index - (len(classes) - 1) / 2) * width for place, model in enumerate(models) if (model, name) in values]
        heights = [values[model, name] - base for model in models if (model, name) in values]
        axis.bar(at, heights, width * 0.92, bottom=base, label=name, color=_COLOURS[list(CLASSES).index(name)], zorder=2)
    axis.set_xticks(range(len(models)), models, fontsize=8)
    axis.set_xlim(-0.6, len(models) - 0.4)
    axis.grid(axis="y", which="major", color="0.88", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def label_short_bars(axis: Any, text: str) -> None:
    """Writes the value at bars whose length tells nothing; the limits and the scale of the axis have to be set before."""
    to_pixels = axis.transData.transform
    height = axis.bbox.height
    crowded = sum(len(container) for container in axis.containers) > 12
    for container in axis.containers:
        for bar in container:
            start, end = bar.get_y(), bar.get_y() + bar.get_height()
            if abs(to_pixels((0, end))[1] - to_pixels((0, start))[1]) < 0.06 * height:
                at = (bar.get_x() + bar.get_width() / 2, max(start, end))
                turn = {"rotation": 90, "fontsize": 6} if crowded else {"fontsize": 7}
                axis.annotate(
                    text.format(end), at, xytext=(0, 3), textcoords="offset points", ha="center", va="bottom", color="0.2", zorder=4, **turn
                )


def _draw_speedup(axis: Any, rows: Sequence[Row], backend: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = _speedups(rows, backend)
    models = list(dict.fromkeys(model for model, _ in values))
    axis.set_yscale("log")
    draw_bars(axis, values, models, 1.0)  # from 1x, so that what is slower hangs down
    low, high = min(values.values()), max(values.values())
    axis.set_ylim(min(0.8, low / 1.3), max(high * 1.6, 2))
    axis.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / min(low, 1) < 300 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    label_short_bars(axis, "{:.3g}x")
    axis.set_ylabel(f"speed-up over {PADDED}", fontsize=9)
    mean = geometric_mean(list(values.values()))
    axis.set_title(f"{backend}: speed-up over the padded dot, geometric mean {mean:.3g}x", fontsize=10, loc="left")


def _draw_floor(axis: Any, rows: Sequence[Row], backend: str) -> None:
    values = _values(rows, backend, "floor_fraction")
    models = list(dict.fromkeys(model for model, _ in values))
    draw_bars(axis, values, models, 0.0)
    highest = max(values.values())
    axis.set_ylim(0, max(1.05, highest * 1.08))
    axis.axhline(1, color="0.3", linewidth=1, zorder=3)
    label_short_bars(axis, "{:.2g}")
    beaten = "\nabove 1: a result that stayed in a cache" if highest > 1 else ""
    axis.set_ylabel(f"measured floor / median time{beaten}", fontsize=9)
    mean = geometric_mean(list(values.values()))
    axis.set_title(f"{backend}: fraction of the measured floor, geometric mean {mean:.2g}", fontsize=10, loc="left")
