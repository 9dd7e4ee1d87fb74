"""Pictures of sweeps: what the winners reach, and the ratios of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from hipgroupgemm.benchmark.plots import Panel, Place, cluster_text, floor_label
from hipgroupgemm.measure.workloads import geometric_mean
from hipgroupgemm.sweep.compare import Comparison
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.sweep.results import Record

__all__ = ["comparison_panels", "sweep_panels"]


def sweep_panels(records: Sequence[Record]) -> list[Panel]:
    """The winners' fraction of the floor by class and shape, or their TFLOP/s where no floor is known; a panel per kind of device."""
    panels = []
    for device in dict.fromkeys(record.device_title for record in records):
        best = {_place(record.job): record.best for record in records if record.device_title == device and record.best is not None}
        fractions = {place: row.fraction for place, row in best.items() if row.fraction}
        values = fractions or {place: row.tflops for place, row in best.items() if row.tflops}
        if values:
            words, axis = ("fraction of the floor", floor_label(values)) if fractions else ("TFLOP/s", "TFLOP/s")
            title = f"{device}: the winners' {words}, geometric mean {geometric_mean(list(values.values())):.3g}"
            panels.append(Panel(title, axis, values, line=bool(fractions)))
    return panels


def comparison_panels(comparisons: Sequence[Comparison]) -> list[Panel]:
    """The ratios of each comparison by class and shape, with their bands: bars above 1 are faster than the first sweep."""
    panels = []
    for comparison in comparisons:
        pairs = {_place(pair.job): pair for pair, _ in comparison.pairs}
        values = {_place(pair.job): ratio for pair, ratio in comparison.pairs}
        bands = {place: (pair.ratio_from or values[place], pair.ratio_to or values[place]) for place, pair in pairs.items()}
        marks = {place: pair.mark for place, pair in pairs.items() if pair.mark}
        title = f"{comparison.other.label}: speed over {comparison.base.label}"
        title += f", geometric mean {comparison.means['all']:.4g}x" if comparison.means else ""
        for mark, words in (("~", "within noise"), ("?", "not comparable")):
            title += f"; pale and {mark}: {words}" if mark in marks.values() else ""
        if values:
            panels.append(Panel(title, "time before / time now", values, True, True, bands, marks))
    return panels


def _place(job: SweepJob) -> Place:
    return cluster_text(job.model, job.m, job.k, job.n, job.e, job.scale, f"\n{job.dtype}, {job.distribution}"), job.kind
