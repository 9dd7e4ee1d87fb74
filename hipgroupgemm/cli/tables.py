"""Tables that fit any terminal: nothing is cut, and names can be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from hipgroupgemm.measure.text import say
from hipgroupgemm.tuning.tables import Column, fitting_table

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
        say(printable(title), "bold", console)
    table = [Column(column, [row[index] for row in cells], right=column in right) for index, column in enumerate(columns)]
    if sum(column.width + 2 for column in table) <= console.width:
        console.print(fitting_table(table, [None] * len(cells), console.width, ""))
        return
    for row in cells:
        short = [f"{column} {cell}" for column, cell in zip(columns[1:], row[1:], strict=True) if cell and column != name]
        console.print(Text(f"{row[0]}  {'; '.join(short)}"))
        if name:
            say(f"  {row[columns.index(name)]}", console=console)
