"""Results for people and programs: numbers and bytes in words, the console of standard output, files that are written whole."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["STDOUT", "bytes_text", "number_text", "plain_width", "stdout_console", "write_text"]

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


def stdout_console() -> Console:
    """A console on stdout; where that is no terminal, wide enough for the whole table, whatever COLUMNS says of some other window."""
    return Console(width=plain_width(sys.stdout))


def plain_width(stream: Any) -> int | None:
    """The width of a console on a stream: its terminal's own (None), or wide. A stream may be missing (cron, `>&-`)."""
    if stream is not None and stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    return max(_PLAIN_WIDTH, int(columns) if columns.isdigit() else 0)


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
        path.write_text(text, encoding="utf-8", newline="")
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # of the file that is wanted: nobody knows the temporary one
        missing = f"there is no directory {path.parent}; make it first" if isinstance(error, FileNotFoundError) else error.strerror
        raise type(error)(error.errno, missing, str(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
