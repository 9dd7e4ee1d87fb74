"""Tables that fit any terminal: nothing is cut, and names can be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table", "printable"]


def printable(text: str) -> str:
    """A text without what a terminal would obey or can't show: names come from libraries and files."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, name: str = "", right: Sequence[str] = ()
) -> None:
    """Prints rows of texts, each of them whole: as a table where that fits, else each row as a paragraph.

    Args:
        title: above the table; "" for none.
        name: the column whose texts stand on lines of their own in paragraphs, which only the terminal wraps.
        right: the columns that are aligned to the right.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if title:
        console.print(Text(printable(title), style="bold"), soft_wrap=True)
    width = sum(max(map(cell_len, [column, *(row[index] for row in cells)])) + 2 for index, column in enumerate(columns))
    if width > console.width:
        for row in cells:
            short = [f"{column} {cell}" for column, cell in zip(columns[1:], row[1:], strict=True) if cell and column != name]
            console.print(Text(f"{row[0]}  {'; '.join(short)}"))
            if name:
                console.print(Text(f"  {row[columns.index(name)]}"), soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print()
