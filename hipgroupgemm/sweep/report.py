"""`hipgroupgemm report`: sweeps beside each other, for people and for programs."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hipgroupgemm.measure.text import number_text, write_text
from hipgroupgemm.sweep.compare import Comparison, Finding, Pair, Series, compare, series_of, summary
from hipgroupgemm.sweep.output import first_line, noise_notes, print_sweep, problem_title
from hipgroupgemm.sweep.record import Record, read_sweep
from hipgroupgemm.tuning.columns import shorten

__all__ = ["print_report", "read_series", "report", "report_as_dict", "write_report_csv"]

_MOST = 20
_WIDE = 120


def read_series(paths: Sequence[Path], console: Console) -> list[Series]:
    """The series of several sweeps' files; what could be left out of a file is said on the console.

    Raises:
        OSError, ValueError: a file can't be read, is no sweep's, or holds no finished job.
    """
    sweeps = [read_sweep(path) for path in paths]
    for sweep in sweeps:
        for warning in sweep.warnings:
            console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
        if not sweep.records:
            raise ValueError(f"{sweep.path}: holds no finished job; take the sweep up with hipgroupgemm sweep --resume {sweep.path}")
    return series_of(sweeps)


def report(series: Sequence[Series]) -> list[Comparison]:
    """Every series after the first against the first."""
    return [compare(series[0], other) for other in series[1:]]


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """1 where something that was right is wrong now, else 0."""
    return 1 if any(comparison.newly_wrong for comparison in comparisons) else 0


# ---- for people ----------------------------------------------------------------------------------------------------------------


def print_report(console: Console, series: Sequence[Series], comparisons: Sequence[Comparison]) -> None:
    """The series in a few lines each; the tables of the one, or every comparison."""
    if len(series) == 1:
        print_sweep(console, list(series[0].records.values()))
    for one in series:
        _print_summary(console, one)
    for comparison in comparisons:
        _print_comparison(console, comparison)


def _line(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _print_summary(console: Console, series: Series) -> None:
    facts = summary(series)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    _line(console, series.label, "bold")
    _line(console, f"  {facts['device']}; {versions}")
    _line(
        console,
        f"  jobs: {_share(series)}{_counts(facts['jobs'])}; candidates: {_counts(facts['verdicts'])}; "
        f"winners by backend: {_counts(facts['winners'])}",
    )
    if not series.finished:
        _line(console, f"  unfinished; hipgroupgemm sweep --resume {series.path} goes on", "yellow")
    loads = [found for session in series.sessions if (found := _load(session)) is not None]
    for note in noise_notes(series.records.values(), *max(loads, default=(None, 1))):
        _line(console, f"  {note}", "yellow")
    if facts["fraction_of_floor"] is not None:
        classes = ", ".join(f"{name} {value:.3g}" for name, value in facts["fraction_by_class"].items())
        _line(console, f"  the winners' fraction of the floor, geometric mean: {facts['fraction_of_floor']:.3g} ({classes})")


def _share(series: Series) -> str:
    """How much of its file's jobs have ended, where not all have."""
    return "" if series.finished else f"{series.done} of {series.wanted} in the file, unfinished: "


def _load(session: Any) -> tuple[float, int] | None:
    load = session.get("load_average") if isinstance(session, dict) else None
    cores = session.get("machine", {}).get("cores") if load is not None else None
    return (float(load), int(cores)) if load is not None and cores else None


def _print_comparison(console: Console, comparison: Comparison) -> None:
    base, other = comparison.base.label, comparison.other.label
    _line(console, "")
    _line(console, f"{other} against {base}", "bold")
    _line(console, "ratio: time of the old winner over time of the new one, above 1 it is faster now; ~ the ranges from p10 to p90 overlap")
    if comparison.pairs:
        for _, group in itertools.groupby(comparison.pairs, lambda pair: problem_title(pair.base.job)):
            _print_pairs(console, list(group))
        classes = ", ".join(f"{name} {value:.3f}" for name, value in comparison.by_class.items())
        _line(console, f"geometric mean of {len(comparison.pairs)} ratios: {comparison.ratio:.4g} ({classes})", "bold")
    else:
        _line(console, "no problem has a winner in both")
    _print_list(console, "changed winners", [_change(pair) for pair in comparison.changed])
    _print_list(console, "newly wrong", [_finding(found) for found in comparison.newly_wrong], "red")
    _print_list(console, "newly right", [_finding(found) for found in comparison.newly_right])
    _print_list(console, "new algorithms", _names(comparison.new))
    _print_list(console, "missing algorithms", _names(comparison.missing))
    for label, jobs in ((base, comparison.only_base), (other, comparison.only_other)):
        _print_list(console, f"only in {label}", [f"{job['class']} {problem_title(job)}" for job in jobs])


def _print_pairs(console: Console, pairs: Sequence[Pair]) -> None:
    wide = console.width >= _WIDE
    title = problem_title(pairs[0].base.job)
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("class", no_wrap=True)
    for name in ("before ms", "now ms", "ratio", "same alg."):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("winner", no_wrap=True)
    room = console.width - 54  # what the columns of numbers leave
    for pair in pairs:
        was, now = pair.base.best or {}, pair.other.best or {}
        names = f"{was['backend']} {was['name']}", f"{now['backend']} {now['name']}"
        if pair.changed and wide:
            winner = " -> ".join(shorten(name, (room - 4) // 2) for name in names)
        else:
            winner = f"-> {shorten(names[1], room - 3)}" if pair.changed else shorten(names[1], room)
        ratio = "-" if math.isnan(pair.ratio) else f"{'~ ' if pair.noise else ''}{pair.ratio:.3f}"
        same = "-" if pair.same is None else f"{pair.same:.3f}"
        table.add_row(pair.base.job["class"], number_text(was["median_ms"]), number_text(now["median_ms"]), ratio, same, winner)
    console.print(table)


def _change(pair: Pair) -> str:
    was, now = pair.base.best or {}, pair.other.best or {}
    noise = ", within noise" if pair.noise else ""
    return (
        f"{pair.base.job['class']} {problem_title(pair.base.job)}: {was['backend']} {was['name']} -> {now['backend']} {now['name']}, "
        f"ratio {pair.ratio:.3f}{noise}; the old one: {pair.fate}"
    )


def _finding(found: Finding) -> str:
    who = f"{found.backend} {found.algorithm}" if found.algorithm else "the job"
    reason = f": {first_line(found.reason)}" if found.reason else ""
    return f"{found.job['class']} {problem_title(found.job)}: {who}: {found.before} -> {found.after}{reason}"


def _names(counts: Counter[tuple[str, str]]) -> list[str]:
    return [f"{backend} {name} ({count} {'problem' if count == 1 else 'problems'})" for (backend, name), count in counts.items()]


def _print_list(console: Console, title: str, lines: Sequence[str], style: str | None = None) -> None:
    if not lines:
        return
    _line(console, f"{title}: {len(lines)}", f"bold {style}" if style else "bold")
    for line in lines[:_MOST]:
        _line(console, f"  {line}", style)
    if len(lines) > _MOST:
        _line(console, f"  and {len(lines) - _MOST} more; --json has them all")


# ---- for programs --------------------------------------------------------------------------------------------------------------


def report_as_dict(series: Sequence[Series], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything that the report has, as plain data."""
    return {
        "format": "hipgroupgemm report",
        "version": 1,
        "series": [summary(one) for one in series],
        "comparisons": [_comparison_as_dict(comparison) for comparison in comparisons],
    }


def _comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    return {
        "base": comparison.base.label,
        "other": comparison.other.label,
        "ratio": _number(comparison.ratio),
        "ratio_by_class": {name: _number(value) for name, value in comparison.by_class.items()},
        "problems": [{**_pair_cells(pair), "group_sizes": pair.base.job["group_sizes"]} for pair in comparison.pairs],
        "changed_winners": [_pair_cells(pair) for pair in comparison.changed],
        "newly_wrong": [_finding_as_dict(found) for found in comparison.newly_wrong],
        "newly_right": [_finding_as_dict(found) for found in comparison.newly_right],
        "new_algorithms": [_name_as_dict(*entry) for entry in comparison.new.items()],
        "missing_algorithms": [_name_as_dict(*entry) for entry in comparison.missing.items()],
        "only_base": [_problem(job) for job in comparison.only_base],
        "only_other": [_problem(job) for job in comparison.only_other],
    }


def _problem(job: dict[str, Any]) -> dict[str, Any]:
    return {name: job[name] for name in ("class", "model", "m", "k", "n", "e", "scale", "dtype", "distribution")}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _finding_as_dict(found: Finding) -> dict[str, Any]:
    return {
        **_problem(found.job),
        "backend": found.backend,
        "algorithm": found.algorithm,
        "before": found.before,
        "after": found.after,
        "reason": found.reason,
    }


def _name_as_dict(name: tuple[str, str], count: int) -> dict[str, Any]:
    return {"backend": name[0], "algorithm": name[1], "problems": count}


def _winner_cells(prefix: str, record: Record | None) -> dict[str, Any]:
    best = (record.best if record is not None else None) or {}
    return {
        f"{prefix}_status": record.status if record is not None else None,
        f"{prefix}_backend": best.get("backend"),
        f"{prefix}_algorithm": best.get("name"),
        f"{prefix}_ms": best.get("median_ms"),
        f"{prefix}_tflops": best.get("tflops"),
        f"{prefix}_fraction": best.get("fraction"),
    }


def _pair_cells(pair: Pair) -> dict[str, Any]:
    return {
        **_problem(pair.base.job),
        **_winner_cells("base", pair.base),
        **_winner_cells("other", pair.other),
        "ratio": _number(pair.ratio),
        "within_noise": pair.noise,
        "same_algorithms_ratio": _number(pair.same),
        "changed": pair.changed,
        "old_winner_now": pair.fate,
    }


def write_report_csv(path: Path, series: Sequence[Series], comparisons: Sequence[Comparison]) -> None:
    """One line a problem of each comparison, those that only one side has included; of one series, a line a problem."""
    lines: list[dict[str, Any]] = []
    for comparison in comparisons:
        names = {"base": comparison.base.label, "other": comparison.other.label}
        pairs = {pair.base.problem: pair for pair in comparison.pairs}
        for problem in dict.fromkeys([*comparison.base.records, *comparison.other.records]):
            if problem in pairs:
                lines.append({**names, **_pair_cells(pairs[problem])})
                continue
            before, after = comparison.base.records.get(problem), comparison.other.records.get(problem)
            job = (before or after).job  # type: ignore[union-attr]
            lines.append({**names, **_problem(job), **_winner_cells("base", before), **_winner_cells("other", after)})
    if not comparisons:
        for one in series:
            lines += [{"base": one.label, **_problem(r.job), **_winner_cells("base", r)} for r in one.records.values()]
    buffer = io.StringIO()
    columns = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({name: "" if value is None else value for name, value in line.items()})
    write_text(path, buffer.getvalue())


def write_report_json(path: Path, series: Sequence[Series], comparisons: Sequence[Comparison]) -> None:
    """`report_as_dict` as a file."""
    write_text(path, json.dumps(report_as_dict(series, comparisons), indent=1, allow_nan=False) + "\n")
