"""Results for people and programs: numbers and bytes in words, consoles and progress bars, CSV and JSON, files that are written whole."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hipgroupgemm.runtime.directories import replace_file

__all__ = ["STDOUT", "bytes_text", "console_for", "csv_text", "number_text", "plain", "progress", "say", "write_json", "write_text"]

STDOUT = Path("-")
"""The name of standard output, where a file to write is named."""

_PLAIN_WIDTH = 144


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
    amount, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" or amount >= 100 else f"{amount:.3g} {units[0]}"


def console_for(*outputs: Path | None) -> Console:
    """A console on standard output, or on stderr where one of the files to write is standard output, which is the file's alone then.

    Where the stream is no terminal the console is wide enough for whole tables, whatever COLUMNS says of some other window.
    """
    on_stderr = STDOUT in outputs
    console = Console(stderr=on_stderr)
    if not (sys.stderr if on_stderr else sys.stdout).isatty():
        columns = os.environ.get("COLUMNS", "")
        console.width = max(_PLAIN_WIDTH, int(columns) if columns.isdigit() else 0)
    return console


def say(text: str, style: str | None = None, console: Console | None = None) -> None:
    """A line of text as it is, however long; on stderr where no console is given."""
    (console or Console(stderr=True)).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def progress(console: Console) -> Progress:
    """A bar with the time that is left; nothing where the console is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    off = not console.is_terminal
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=900, disable=off)


# ---- files ---------------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as JSON data; NaN and infinities, which JSON has no word for, become strings that `float` reads again."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(rows: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> str:
    """Rows as CSV. The columns are `names`, then what else rows have, in that order; None is an empty cell, a mapping is "a 1; b 2"."""

    def cell(value: Any) -> Any:
        return "; ".join(f"{key} {cell(part)}" for key, part in value.items()) if isinstance(value, Mapping) else value

    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys([*names, *(name for row in rows for name in row)])), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue()


def write_json(path: Path | None, data: Any, console: Console | None = None) -> None:
    """Writes plain data as JSON, see `write_text`; nothing without a path."""
    if path is not None:
        write_text(path, json.dumps(plain(data), indent=1, allow_nan=False) + "\n", console)


def write_text(path: Path, text: str, console: Console | None = None) -> None:
    """Writes a file whole or not at all: a reader never sees half of it, and a failure leaves what was there.

    A link is followed. What is there and no file (a pipe, /dev/null) is written into, never replaced. `STDOUT` is standard output; of any
    other path the console, if there is one, says that it was written.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    real = Path(os.path.realpath(path))
    try:
        if real.exists() and not real.is_file():
            real.write_text(text, encoding="utf-8", newline="")
        else:
            replace_file(real, text.encode(), 0o666)
    except OSError as error:
        why = f"there is no directory {real.parent}; make it first" if isinstance(error, FileNotFoundError) else error.strerror
        raise type(error)(error.errno, why or str(error), str(path)) from None
    if console is not None:
        say(f"wrote {path}", console=console)
