"""Results for people (rich tables) and for programs (CSV and JSON)."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hipgroupgemm.benchmark.runner import Row
from hipgroupgemm.measure.workloads import PRESETS

__all__ = ["STDOUT", "bytes_text", "number_text", "print_rows", "write_csv", "write_json", "write_text"]

STDOUT = Path("-")
"""The name of standard output, where a file to write is named."""

_WIDE = 129  # columns of a terminal from which every row repeats M, K, N and E
_MEASURES = ("median ms", "runs", "TFLOP/s", "of floor", "vs padded", "extra mem", "error")
_SHORT = ("ms", "runs", "TFLOP/s", "floor", "padded", "memory", "error")


def _problem(row: Row) -> tuple[Any, ...]:
    return (row.model, row.m, row.k, row.n, row.e, row.scale, row.distribution, row.dtype)


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table a shape. On narrow terminals M, K, N and E are in its title only, and algorithms are left to CSV and JSON."""
    for _, group in itertools.groupby(rows, _problem):
        _print_shape(console, list(group))
    notes = dict.fromkeys(
        f"{row.backend}, {row.model or 'shape'} {row.ragged_dot_class}: {row.status}: {row.detail}" for row in rows if row.status != "ok"
    )
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _print_shape(console: Console, rows: Sequence[Row]) -> None:
    wide = console.width >= _WIDE
    first = rows[0]
    padding = (0, 1 if wide else 0, 0, 0)  # beside the blank that the box has between columns
    table = Table(box=SIMPLE_HEAD, title=_title(first), title_justify="left", title_style="bold", padding=padding, pad_edge=False)
    table.add_column("class", no_wrap=True)
    for name in "MKNE" if wide else "":
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    if wide:
        table.add_column("algorithm", overflow="ellipsis", no_wrap=True, max_width=28)
    for name in _MEASURES if wide else _SHORT:
        table.add_column(name, justify="right", no_wrap=True)
    for name, of_class in itertools.groupby(rows, lambda row: row.ragged_dot_class):
        for index, row in enumerate(of_class):
            extents = [str(extent) for extent in (row.m, row.k, row.n, row.e)] if wide else []
            algorithm = [row.algorithm] if wide else []
            style = "dim" if row.baseline and row.status == "ok" else None if row.status == "ok" else "red"
            if index == 0 and table.row_count:
                table.add_section()
            table.add_row(name, *extents, row.backend, *algorithm, *_measures(row, wide), style=style)
    console.print(table)


def _title(row: Row) -> str:
    whole = "the model's" if row.model in PRESETS else f"{row.model or 'the shape'}'s"
    scaled = f", scaled: M, K and N are 1/{row.scale} of {whole}" if row.scale != 1 else ""
    covered = f", {row.rows} of {row.m} rows in groups" if row.rows != row.m else ""
    return f"{row.model}  M={row.m} K={row.k} N={row.n} E={row.e}, {row.dtype}, {row.distribution}{covered}{scaled}"


def _measures(row: Row, wide: bool) -> list[str]:
    error = "-" if row.error is None else f"{row.error:.1e}"
    if row.status != "ok":
        status = "WRONG" if row.status == "wrong" else row.status
        return [
            status if wide else status.replace("out of memory", "no room"),  # the notes below the tables have it in full
            str(row.repetitions or "-"),
            "-",
            "-",
            "-",
            bytes_text(row.peak_extra_bytes),
            error,
        ]
    return [
        number_text(row.median_ms),
        str(row.repetitions),
        number_text(row.tflops),
        "-" if row.floor_fraction is None else f"{row.floor_fraction:.2g}",
        "-" if row.speedup is None else f"{number_text(row.speedup)}x",
        bytes_text(row.peak_extra_bytes),
        error,
    ]


def number_text(value: float | None) -> str:
    """Three significant digits, without an exponent where that is short; "-" for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 2 - (math.floor(math.log10(abs(value))) if value else 0)
        return f"{value:.{max(digits, 0)}f}"
    return f"{value:.2e}"


def bytes_text(value: int | None) -> str:
    """Bytes in binary units: "0 B", "1.5 KiB", "320 MiB"."""
    if value is None:
        return "-"
    amount, units = float(value), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if amount < 1000 or unit == units[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1024
    raise RuntimeError("unreachable")


def write_csv(path: Path, rows: Iterable[Row], context: Mapping[str, Any]) -> None:
    """One line a row; the context (device, versions, date, seed) is repeated on each, so that files can be joined."""
    flat = {key: _flat(value) for key, value in context.items()}
    names = [field.name for field in dataclasses.fields(Row)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *flat])
    writer.writeheader()
    for row in rows:
        values = {name: "" if value is None else value for name, value in dataclasses.asdict(row).items()}
        writer.writerow({**values, **flat})
    write_text(path, text.getvalue())


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_flat(part)}" for key, part in value.items())
    return value


def write_json(path: Path, rows: Iterable[Row], context: Mapping[str, Any]) -> None:
    """{**context, "rows": [...]}; numbers that JSON has no word for (NaN, infinities) become strings."""
    data = {**context, "rows": [_jsonable(dataclasses.asdict(row)) for row in rows]}
    write_text(path, json.dumps(_jsonable(data), indent=1, allow_nan=False) + "\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a reader never sees half of it, and a failure leaves what was there.

    A link is followed. What is there and no file (a pipe, /dev/null) is written into, never replaced. `STDOUT` is standard output.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as special:
            special.write(text)
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # of the file that is wanted: nobody knows the temporary one
        missing = f"there is no directory {path.parent}; make it first" if isinstance(error, FileNotFoundError) else error.strerror
        raise type(error)(error.errno, missing, str(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
