"""Rows of a benchmark for people (rich tables) and for programs (CSV and JSON)."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hipgroupgemm.benchmark.runner import Row
from hipgroupgemm.measure.text import bytes_text, number_text, write_text
from hipgroupgemm.measure.workloads import PRESETS

__all__ = ["print_rows", "write_csv", "write_json"]

_WIDE = 129  # columns of a terminal from which every row repeats M, K, N and E
_MEASURES = ("median ms", "runs", "TFLOP/s", "of floor", "vs padded", "extra mem", "error")
_SHORT = ("ms", "runs", "TFLOP/s", "floor", "padded", "memory", "error")


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table a shape. On narrow terminals M, K, N and E are in its title only, and algorithms are left to CSV and JSON."""
    for _, group in itertools.groupby(rows, lambda r: (r.model, r.m, r.k, r.n, r.e, r.scale, r.distribution, r.dtype)):
        _print_shape(console, list(group))
    for row in rows:
        if row.status != "ok":
            note = f"{row.backend}, {row.model or 'shape'} {row.ragged_dot_class}: {row.status}: {row.detail}"
            console.print(note, markup=False, highlight=False, soft_wrap=True)


def _print_shape(console: Console, rows: Sequence[Row]) -> None:
    wide = console.width >= _WIDE
    padding = (0, 1 if wide else 0, 0, 0)  # beside the blank that the box has between columns
    table = Table(box=SIMPLE_HEAD, title=_title(rows[0]), title_justify="left", title_style="bold", padding=padding, pad_edge=False)
    left = ("class", "backend", "algorithm")
    columns = ["class", *("MKNE" if wide else ""), "backend", *(["algorithm"] if wide else []), *(_MEASURES if wide else _SHORT)]
    for name in columns:
        most = 28 if name == "algorithm" else None
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True, overflow="ellipsis", max_width=most)
    for name, of_class in itertools.groupby(rows, lambda row: row.ragged_dot_class):
        if table.row_count:
            table.add_section()
        for row in of_class:
            extents = [str(extent) for extent in (row.m, row.k, row.n, row.e)] if wide else []
            style = "red" if row.status != "ok" else "dim" if row.baseline else None
            table.add_row(name, *extents, row.backend, *([row.algorithm] if wide else []), *_measures(row, wide), style=style)
    console.print(table)


def _title(row: Row) -> str:
    whole = "the model's" if row.model in PRESETS else f"{row.model or 'the shape'}'s"
    scaled = f", scaled: M, K and N are 1/{row.scale} of {whole}" if row.scale != 1 else ""
    covered = f", {row.rows} of {row.m} rows in groups" if row.rows != row.m else ""
    return f"{row.model}  M={row.m} K={row.k} N={row.n} E={row.e}, {row.dtype}, {row.distribution}{covered}{scaled}"


def _measures(row: Row, wide: bool) -> list[str]:
    first = number_text(row.median_ms)
    if row.status != "ok":  # the notes below the tables have it in full
        first = "WRONG" if row.status == "wrong" else row.status if wide else row.status.replace("out of memory", "no room")
    fraction = "-" if row.floor_fraction is None else f"{row.floor_fraction:.2g}"
    speedup = "-" if row.speedup is None else f"{number_text(row.speedup)}x"
    error = "-" if row.error is None else f"{row.error:.1e}"
    return [first, str(row.repetitions or "-"), number_text(row.tflops), fraction, speedup, bytes_text(row.peak_extra_bytes), error]


def write_csv(path: Path, rows: Iterable[Row], context: Mapping[str, Any]) -> None:
    """One line a row; the context (device, versions, date, seed) is repeated on each, so that files can be joined."""
    flat = {key: _flat(value) for key, value in context.items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(field.name for field in dataclasses.fields(Row)), *flat])
    writer.writeheader()
    for row in rows:
        values = {name: "" if value is None else value for name, value in dataclasses.asdict(row).items()}
        writer.writerow({**values, **flat})
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
