"""Sweeps for people (tables) and for programs (CSV, JSON), one alone or several beside each other: `hipgroupgemm report`."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from hipgroupgemm.benchmark.plots import Panel, Place, cluster_text, floor_label, write_panels
from hipgroupgemm.measure.environment import ONE_THREAD, busy_note
from hipgroupgemm.measure.text import bytes_text, console_for, csv_text, number_text, say, write_json, write_text
from hipgroupgemm.measure.workloads import geometric_mean
from hipgroupgemm.sweep.compare import Comparison, Finding, Pair, compare, flat, means_by_class, series_of
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.sweep.results import RIGHT, Record, Row, Sweep, identity_text, read_sweep
from hipgroupgemm.tuning.tables import FEW, WIDE, Column, fitting_table, noise_text

__all__ = ["comparison_panels", "counts_text", "print_sweep", "report", "sweep_lines", "sweep_panels", "warnings_of", "write_csv"]

_MOST = 20  # lines of a list


# ---- one sweep -----------------------------------------------------------------------------------------------------------------


def counts_text(names: Iterable[str]) -> str:
    """How many there are of each: "12 ok, 3 pruned"."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items()) or "none"


def print_sweep(console: Console, records: Sequence[Record]) -> None:
    """A table a problem and kind of device, a row a class; then what was not right."""
    for (problem, device), group in itertools.groupby(records, lambda record: (record.job.problem_title, record.device_title)):
        _print_problem(console, f"{problem} on {device}", list(group))
    notes = []
    for record in records:
        if record.reason:
            notes.append(f"{record.job.full_title}: {'' if record.status == 'ok' else f'{record.status}: '}{record.reason}")
        wrong = [row for row in record.rows if row.verdict not in (*RIGHT, "untimed")]
        notes += [f"{record.job.full_title}: {r.backend} {r.index} {r.name}: {r.verdict}: {_first_line(r.reason)}" for r in wrong]
    _print_list(console, notes)


def _print_problem(console: Console, title: str, records: Sequence[Record]) -> None:
    def column(title: str, text: Callable[[Row], str], rank: int = 0, right: bool = True) -> Column:
        return Column(title, ["-" if record.best is None else text(record.best) for record in records], rank, right)

    winners = [record.best.name if record.best else "no winner" if record.status == "ok" else record.status for record in records]
    columns = [
        Column("class", [record.job.kind for record in records], right=False),
        column("backend", lambda best: best.backend, 2, right=False),
        Column("winner", winners, right=False, name=True),
        column("median ms", lambda best: number_text(best.median_ms)),
        column("p10", lambda best: number_text(best.p10_ms), 5),
        column("p90", lambda best: number_text(best.p90_ms), 5),
        column("runs", lambda best: str(best.samples), 4),
        column("TFLOP/s", lambda best: number_text(best.tflops), 3),
        column("of floor", lambda best: "-" if best.fraction is None else f"{best.fraction:.2g}", 6),
        column("workspace", lambda best: bytes_text(best.workspace_size), 8),
        Column("candidates", [counts_text(row.verdict for row in record.rows) for record in records], 1, right=False),
    ]
    styles = [None if record.best is not None else "red" if record.status in ("ok", "failed") else "dim" for record in records]
    console.print(fitting_table(columns, styles, console.width, title))


def warnings_of(records: Sequence[Record]) -> list[str]:
    """Why times may not be trusted: others at work before the sweep began or in it, winners with few timed calls or a wide spread."""
    # a GPU's times hardly depend on the load
    notes = [busy_note(record.load_average, record.cores) for record in records if record.identity.get("kind") == "cpu"]
    if alone := sum(any(ONE_THREAD in note for note in (record.report or {}).get("notes", ())) for record in records):
        notes.append(f"{ONE_THREAD} in {alone} of {len(records)} jobs, since others kept the cores busy when they began.")
    best = [record.best for record in records if record.best is not None]
    counts = Counter(noise_text(row.median_ms, row.p10_ms, row.p90_ms, row.samples) for row in best)
    if counts["few"]:
        more = "A longer --time-limit or more --repetitions help."
        notes.append(f"Winners with fewer than {FEW} timed calls: {counts['few']}; their p10 and p90 say little of noise. {more}")
    if counts["wide"]:
        notes.append(f"Winners whose times spread by more than {WIDE:.0%} from p10 to p90: {counts['wide']}; a close win may be chance.")
    return [note for note in dict.fromkeys(notes) if note]


def write_csv(path: Path | None, lines: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Lines of plain data as CSV, without the group sizes."""
    if path is not None:
        write_text(path, csv_text([{name: value for name, value in line.items() if name != "group_sizes"} for line in lines]), console)


def sweep_lines(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A line a candidate, and one for each job that has none; problem, device and versions are repeated on each."""
    lines = []
    for record in records:
        report, identity = record.report or {}, record.identity
        common = msgspec.to_builtins(record.job) | {
            "device": record.device,
            "device_name": identity.get("name"),
            "target": identity.get("target"),
            "versions": identity.get("versions", {}),
            "status": record.status,
            "floor_ms": report.get("floor_ms"),
            "size_class": report.get("size_class"),
            "load_average": record.load_average,
            "finished": record.finished,
        }
        lines += [{**common, "winner": row == record.best, **msgspec.to_builtins(row)} for row in record.rows]
        lines += [] if record.rows else [{**common, "winner": False, "reason": record.reason}]
    return lines


# ---- several -------------------------------------------------------------------------------------------------------------------


def report(paths: Sequence[Path], *, csv: Path | None = None, json: Path | None = None, plots: Sequence[Path] = ()) -> int:
    """Compares sweeps with the first of them, or sums up the one; prints, writes the files, and returns the exit status.

    That is 1 where something that was right is wrong now, else 0.

    Raises:
        OSError, ValueError: a file can't be read, is no sweep's, or holds no finished job.
    """
    console = console_for(csv, json)
    sweeps = [read_sweep(path) for path in paths]
    for sweep in sweeps:
        if sweep.torn:
            say(f"{sweep.path}: ends in the middle of a job, the sweep was killed; that job is left out", "yellow", console)
        if not sweep.results:
            raise ValueError(f"{sweep.path}: holds no finished job; take the sweep up with hipgroupgemm sweep --resume {sweep.path}")
    series = series_of(sweeps)
    comparisons, first = [compare(series[0], other) for other in series[1:]], series[0].records
    if not comparisons:
        print_sweep(console, first)
    summaries = [_print_summary(console, one) for one in series]
    for comparison in comparisons:
        _print_comparison(console, comparison)
    data = {"format": "hipgroupgemm report", "version": 2, "series": summaries, "comparisons": [c.to_dict() for c in comparisons]}
    write_json(json, data, console)
    lines = [{"base_label": c.base.label, "other_label": c.other.label, **flat(pair)} for c in comparisons for pair in c.problems]
    write_csv(csv, lines or sweep_lines(first), console)
    notes = [note for one in series for note in (f"{one.label}: {identity_text(one.records[0].identity)}", *warnings_of(one.records))]
    notes += [warning for comparison in comparisons for warning in comparison.warnings]
    panels = comparison_panels(comparisons) if comparisons else sweep_panels(first)
    write_panels(plots, panels, "\n".join(dict.fromkeys(notes)), console)
    return int(any(comparison.newly_wrong for comparison in comparisons))


def _first_line(reason: str) -> str:
    return reason.split("\n", 1)[0]  # JSON and CSV have the rest, such as a crash's last words


def _print_summary(console: Console, sweep: Sweep) -> dict[str, Any]:
    """A sweep in numbers, printed and as plain data."""
    records, first = sweep.records, sweep.records[0]
    winners = [(record.job.kind, record.best) for record in records if record.best is not None]
    facts: dict[str, Any] = {
        "label": sweep.label,
        "file": {"path": str(sweep.path), "jobs_done": sweep.done, "jobs_wanted": sweep.header.jobs},
        "device": first.device_title,
        "versions": first.identity.get("versions", {}),
        "jobs": Counter(record.status for record in records),
        "candidates": Counter(row.verdict for record in records for row in record.rows),
        "winners by backend": Counter(best.backend for _, best in winners),
        "fraction_of_floor": means_by_class([(kind, best.fraction) for kind, best in winners if best.fraction]),
        "warnings": warnings_of(records),
    }
    tell = functools.partial(say, console=console)
    tell(sweep.label, "bold")
    tell(f"  {identity_text(first.identity)}")
    counts = {name: counts_text(facts[name].elements()) for name in ("jobs", "candidates", "winners by backend")}
    tell("  " + "; ".join(f"{name}: {text}" for name, text in counts.items()))
    if sweep.done < sweep.header.jobs:
        state = f"{sweep.done} of {sweep.header.jobs} jobs of the file are done"
        tell(f"  {state}; hipgroupgemm sweep --resume {sweep.path} goes on", "yellow")
    for note in facts["warnings"]:
        tell(f"  {note}", "yellow")
    if facts["fraction_of_floor"]:
        means = ", ".join(f"{name} {value:.3g}" for name, value in facts["fraction_of_floor"].items())
        tell(f"  the winners' fraction of the floor, geometric mean: {means}")
    return facts


def _print_comparison(console: Console, comparison: Comparison) -> None:
    tell = functools.partial(say, console=console)
    base, other, means = comparison.base.label, comparison.other.label, comparison.means
    tell(f"\n{other} against {base}", "bold")
    tell("ratio: the old winner's time over the new one's, above 1 it is faster now; from, to: what p10 and p90 make of it;")
    tell("~: it may be noise; ?: it can't be compared, see below")
    for title, group in itertools.groupby((pair for pair, _ in comparison.pairs), lambda pair: pair.job.problem_title):
        _print_pairs(console, title, list(group))
    for warning in comparison.warnings:
        tell(warning, "yellow")
    if means:
        classes = ", ".join(f"{name} {value:.3f}" for name, value in means.items() if name != "all")
        count = sum(not pair.not_comparable for pair, _ in comparison.pairs)
        tell(f"geometric mean of {count} ratios: {means['all']:.4g} ({classes})", "bold")
    elif not comparison.pairs:
        tell("no problem has a winner in both")
    lists = {
        "changed winners": [_change(pair) for pair, _ in comparison.pairs if pair.changed],
        "newly wrong": list(map(_finding, comparison.newly_wrong)),
        "newly right": list(map(_finding, comparison.newly_right)),
        "new algorithms": [f"{name} ({count} problem{'s' * (count > 1)})" for name, count in comparison.new.items()],
        "missing algorithms": [f"{name} ({count} problem{'s' * (count > 1)})" for name, count in comparison.missing.items()],
        f"only in {base}": [pair.job.full_title for pair in comparison.problems if pair.other is None],
        f"only in {other}": [pair.job.full_title for pair in comparison.problems if pair.base is None],
    }
    for title, lines in lists.items():
        _print_list(console, lines, title, "red" if title == "newly wrong" else "")


def _print_list(console: Console, lines: Sequence[str], title: str = "", style: str = "") -> None:
    if lines and title:
        say(f"{title}: {len(lines)}", f"bold {style}", console)
    for line in lines[:_MOST]:
        say(f"{'  ' * bool(title)}{line}", style, console)
    if len(lines) > _MOST:
        say(f"and {len(lines) - _MOST} more; --json and --csv have them all", style, console)


def _print_pairs(console: Console, title: str, pairs: Sequence[Pair]) -> None:
    def numbers(title: str, name: str, rank: int) -> Column:
        values = [getattr(pair, name) for pair in pairs]
        return Column(title, ["-" if value is None else f"{value:.3f}" for value in values], rank)

    columns = [
        Column("class", [pair.job.kind for pair in pairs], right=False),
        Column("before ms", [number_text(pair.base_ms) for pair in pairs], 1),
        Column("now ms", [number_text(pair.other_ms) for pair in pairs], 1),
        Column("ratio", [f"{pair.mark} {pair.ratio:.3f}" for pair in pairs]),
        numbers("from", "ratio_from", 2),
        numbers("to", "ratio_to", 2),
        numbers("same alg.", "same_algorithms_ratio", 3),
        Column("winner before", [str(pair.base_winner) if pair.changed else "" for pair in pairs], 4, False, True),
        Column("winner", [f"{'-> ' * pair.changed}{pair.other_winner}" for pair in pairs], right=False, name=True),
    ]
    console.print(fitting_table(columns, [None] * len(pairs), console.width, title))


def _change(pair: Pair) -> str:
    noise = ", not comparable" if pair.not_comparable else ", within noise" if pair.within_noise else ""
    names = f"{pair.base_winner} -> {pair.other_winner}"
    return f"{pair.job.full_title}: {names}, ratio {pair.ratio:.3f}{noise}; the old one: {pair.old_winner_now}"


def _finding(found: Finding) -> str:
    who = f"{found.backend} {found.algorithm}" if found.algorithm else "the job"
    reason = f": {_first_line(found.reason)}" if found.reason else ""
    return f"{found.job.full_title}: {who}: {found.before} -> {found.after}{reason}"


# ---- pictures ------------------------------------------------------------------------------------------------------------------


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
