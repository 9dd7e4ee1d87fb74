"""Tables that fit any terminal: what has no room beside the rest stands below it, and nothing is cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console_on", "print_table", "printable"]

_PLAIN_WIDTH = 144
_READABLE = 24


def console_on(stderr: bool = False) -> Console:
    """A console on stdout or stderr; where that is no terminal, wide enough for whole tables, whatever COLUMNS says of another window."""
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    plain = max(_PLAIN_WIDTH, int(columns) if columns.isdecimal() else 0)
    return Console(stderr=stderr, width=None if stream is not None and stream.isatty() else plain)


def printable(text: str) -> str:
    """A text without what a terminal would obey or can't show: names come from libraries and files."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, name: str = "", right: Sequence[str] = ()
) -> None:
    """Prints rows of texts.

    Args:
        title: above the table; "" for none.
        name: the column whose texts may be folded to what the others leave. Where that is too little, each row is a paragraph, with
            this text on a line of its own, which only the terminal wraps.
        right: the columns that are aligned to the right.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, [column, *(row[index] for row in cells)])) for index, column in enumerate(columns)]
    longest = widths[columns.index(name)] if name else 0
    room = console.width - (sum(widths) - longest) - 2 * len(columns)
    if room < (min(longest, _READABLE) if name else 0):
        if title:
            console.print(Text(printable(title), style="bold"), soft_wrap=True)
        for row in cells:
            short = [f"{column} {cell}" for column, cell in zip(columns[1:], row[1:], strict=True) if cell and column != name]
            console.print(Text(f"{row[0]}  {'; '.join(short)}"))
            if name:
                console.print(Text(f"  {row[columns.index(name)]}"), soft_wrap=True)
        return
    heading = Text(printable(title)) if title else None
    table = Table(box=SIMPLE_HEAD, title=heading, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=column != name)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)
