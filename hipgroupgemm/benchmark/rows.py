"""Rows of a benchmark: what each holds, as tables for people, as CSV and JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.measure.text import bytes_text, csv_text, number_text, say, write_json, write_text
from hipgroupgemm.measure.workloads import PRESETS
from hipgroupgemm.tuning.tables import Column, fitting_table

__all__ = ["FINE", "Row", "print_rows", "write_rows"]

FINE = ("ok", "refused", "out of memory")
"""The states of a row that are no failure of a backend."""


@dataclasses.dataclass
class Row:
    """One candidate's result on one problem. Times are milliseconds, memory is bytes, None is what there is no value for.

    Attributes:
        model, ragged_dot_class, m, k, n, e, scale, distribution, rows, dtype: the problem; m, k and n are divided by scale already, rows
            is the sum of the group sizes.
        backend, algorithm: who ran it; baseline is whether that is one of the baselines.
        status: "ok", "wrong", "refused", "out of memory" or "failed". detail: why, where it is not ok.
        median_ms, min_ms, repetitions: of the timed calls.
        tflops: the operations that the group sizes ask for, by the median; the padded baselines' superfluous ones do not count.
        floor_ms, floor_fraction: the least time by the measured roofline, and that over the median.
        speedup: the padded dot's median over this one's.
        peak_extra_bytes: most bytes held in a call beyond the operands and out, setting up included.
        error, error_limit, checked: relative Frobenius error against float64, what is right at the most, how much was compared.
    """

    model: str
    ragged_dot_class: str
    m: int
    k: int
    n: int
    e: int
    scale: int
    distribution: str
    rows: int
    dtype: str
    backend: str
    algorithm: str
    baseline: bool
    status: str = "ok"
    detail: str = ""
    median_ms: float | None = None
    min_ms: float | None = None
    repetitions: int = 0
    tflops: float | None = None
    floor_ms: float | None = None
    floor_fraction: float | None = None
    speedup: float | None = None
    peak_extra_bytes: int | None = None
    error: float | None = None
    error_limit: float | None = None
    checked: str = ""

    @property
    def title(self) -> str:
        """What the rows of a table have in common."""
        whole = "the model's" if self.model in PRESETS else f"{self.model or 'the shape'}'s"
        scaled = f", scaled: M, K and N are 1/{self.scale} of {whole}" if self.scale != 1 else ""
        covered = f", {self.rows} of {self.m} rows in groups" if self.rows != self.m else ""
        return f"{self.model}  M={self.m} K={self.k} N={self.n} E={self.e}, {self.dtype}, {self.distribution}{covered}{scaled}"


_SHORT = {"out of memory": "no room", "wrong": "WRONG"}  # the notes below the tables have it in full
_WIDE = 100  # columns of a terminal


def _time_text(row: Row) -> str:
    return number_text(row.median_ms) if row.status == "ok" else _SHORT.get(row.status, row.status)


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table a problem; what was not right is told below them, once for all problems of which it is true.

    A narrow terminal has fewer columns, and no number is cut: CSV and JSON have them all.
    """
    wide = console.width >= _WIDE
    for title, of_title in itertools.groupby(rows, lambda row: row.title):
        group = list(of_title)

        def column(title: str, cell: Callable[[Row], str], rank: int = 0, group: list[Row] = group, **settings: bool) -> Column:
            return Column(title, [cell(row) for row in group], rank, **settings)

        columns = [
            column("class", lambda row: row.ragged_dot_class, right=False),
            column("backend", lambda row: row.backend, right=False),
            column("algorithm", lambda row: row.algorithm, 6, right=False, name=True),
            column("median ms" if wide else "ms", _time_text),
            column("runs", lambda row: str(row.repetitions or "-"), 5),
            column("TFLOP/s", lambda row: number_text(row.tflops), 2),
            column("of floor" if wide else "floor", lambda row: "-" if row.floor_fraction is None else f"{row.floor_fraction:.2g}", 1),
            column("vs padded" if wide else "padded", lambda row: "-" if row.speedup is None else f"{number_text(row.speedup)}x"),
            column("extra mem" if wide else "memory", lambda row: bytes_text(row.peak_extra_bytes), 4),
            column("error", lambda row: "-" if row.error is None else f"{row.error:.1e}", 3),
        ]
        styles = ["red" if row.status != "ok" else "dim" if row.baseline else None for row in group]
        console.print(fitting_table(columns, styles, console.width, title))
    notes: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for row in rows:
        if row.status != "ok":
            places = notes.setdefault((row.backend, row.status, row.detail), {})
            places.setdefault(row.model or "shape", []).append(row.ragged_dot_class)
    for (backend, status, detail), places in notes.items():
        where = "; ".join(f"{model} {', '.join(dict.fromkeys(kinds))}" for model, kinds in places.items())
        say(f"{backend}, {where}: {status}: {detail}", console=console)


def write_rows(
    rows: Sequence[Row], context: Mapping[str, Any], csv: Path | None, json: Path | None, more: Mapping[str, Any], console: Console
) -> None:
    """Writes CSV, a line a row with the context (device, versions, date, seed) on each, so that files can be joined, and JSON: an object of
    the context, of `more`, and of the rows."""
    found = [dataclasses.asdict(row) for row in rows]
    if csv is not None:
        names = [*(field.name for field in dataclasses.fields(Row)), *context]
        write_text(csv, csv_text([{**row, **context} for row in found], names), console)
    write_json(json, {**context, **more, "rows": found}, console)
