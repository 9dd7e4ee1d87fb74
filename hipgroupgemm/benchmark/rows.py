"""Rows of a benchmark: what each holds, as tables for people, as CSV and JSON for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from hipgroupgemm.measure.text import bytes_text, number_text, write_text
from hipgroupgemm.measure.workloads import PRESETS

__all__ = ["FINE", "Row", "print_rows", "write_csv", "write_json"]

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


# ---- tables ----------------------------------------------------------------------------------------------------------------------


def _text(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


_SHORT = {"out of memory": "no room", "wrong": "WRONG"}  # the notes below the tables have it in full
_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (  # title on a wide terminal, on a narrow one ("": left out), cell
    ("class", "class", lambda row: row.ragged_dot_class),
    ("backend", "backend", lambda row: row.backend),
    ("algorithm", "", lambda row: row.algorithm),
    ("median ms", "ms", lambda row: number_text(row.median_ms) if row.status == "ok" else _SHORT.get(row.status, row.status)),
    ("runs", "runs", lambda row: str(row.repetitions or "-")),
    ("TFLOP/s", "TFLOP/s", lambda row: number_text(row.tflops)),
    ("of floor", "floor", lambda row: _text(row.floor_fraction, "{:.2g}")),
    ("vs padded", "padded", lambda row: _text(row.speedup, f"{number_text(row.speedup)}x")),
    ("extra mem", "memory", lambda row: bytes_text(row.peak_extra_bytes)),
    ("error", "error", lambda row: _text(row.error, "{:.1e}")),
)
_TEXTS = ("class", "backend", "algorithm")
_WIDE = 122  # columns of a terminal that the algorithms need
_FIRST_TO_GO = ("memory", "error", "TFLOP/s", "runs", "floor")  # where a terminal has no room for all; CSV and JSON have them


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table a problem; what was not right is told below them. A narrow terminal has fewer columns; no cell is cut."""
    wide = console.width >= _WIDE
    for title, of_title in itertools.groupby(rows, lambda row: row.title):
        group = list(of_title)
        padding = (0, int(wide), 0, 0)  # beside the blank that the box has between columns
        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=padding, pad_edge=False)
        columns = [(name if wide else short, cell) for name, short, cell in _COLUMNS if wide or short]
        for gone in () if wide else _FIRST_TO_GO:
            if sum(max(len(name), *(len(cell(row)) for row in group)) + 1 for name, cell in columns) >= console.width:
                columns = [column for column in columns if column[0] != gone]
        for name, _ in columns:
            name_column = name == "algorithm"
            justify: JustifyMethod = "left" if name in _TEXTS else "right"
            table.add_column(name, justify=justify, no_wrap=not name_column, overflow="fold", max_width=28 if name_column else None)
        for _, of_class in itertools.groupby(group, lambda row: row.ragged_dot_class):
            table.add_section()
            for row in of_class:
                style = "red" if row.status != "ok" else "dim" if row.baseline else None
                table.add_row(*(cell(row) for _, cell in columns), style=style)
        console.print(table)
    for row in rows:
        if row.status != "ok":
            note = f"{row.backend}, {row.model or 'shape'} {row.ragged_dot_class}: {row.status}: {row.detail}"
            console.print(note, markup=False, highlight=False, soft_wrap=True)


# ---- files -----------------------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Iterable[Row], context: Mapping[str, Any]) -> None:
    """One line a row; the context (device, versions, date, seed) is repeated on each, so that files can be joined."""
    flat, text = {key: _flat(value) for key, value in context.items()}, io.StringIO()
    writer = csv.DictWriter(text, [*(field.name for field in dataclasses.fields(Row)), *flat])
    writer.writeheader()
    writer.writerows({**dataclasses.asdict(row), **flat} for row in rows)
    write_text(path, text.getvalue())


def _flat(value: Any) -> Any:
    return "; ".join(f"{key} {_flat(part)}" for key, part in value.items()) if isinstance(value, Mapping) else value


def write_json(path: Path, rows: Iterable[Row], context: Mapping[str, Any]) -> None:
    """{**context, "rows": [...]}; numbers that JSON has no word for (NaN, infinities) become strings."""
    data = {**context, "rows": [dataclasses.asdict(row) for row in rows]}
    write_text(path, json.dumps(_jsonable(data), indent=1, allow_nan=False) + "\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
