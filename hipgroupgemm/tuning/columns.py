"""Tables that fit a terminal: what matters least is left out before names become unreadable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table

__all__ = ["Column", "fitting_table", "noise_text", "shorten"]

_READABLE = 24  # columns of a terminal that a name should have, if it is that long
_LEAST = 12
_TILE = re.compile(r"MT\d+x\d+(x\d+)?")  # of hipBLASLt's names
_GAP = 2  # blanks between two columns

FEW, WIDE = 5, 0.2
"""Fewer timed calls than this tell little about noise; a range from p10 to p90 above this part of the median is much of it."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title, cells: its texts. right: aligned to the right.
        rank: 0 for one that is always there; of the others those with the highest go first, together. name: this one is shortened.
    """

    title: str
    cells: Sequence[str]
    rank: int = 0
    right: bool = True
    name: bool = False

    @property
    def width(self) -> int:
        """Columns of a terminal."""
        return max(map(cell_len, [self.title, *self.cells]))


def fitting_table(columns: Sequence[Column], styles: Sequence[str | None], width: int, title: str) -> Table:
    """The table, in `width` columns of a terminal: as many columns as leave names readable, then names without their middle."""
    shown = list(columns)
    while _rest(shown, width) < min(_longest(shown), _READABLE) and any(column.rank for column in shown):
        last = max(column.rank for column in shown)
        shown = [column for column in shown if column.rank != last]
    room = max(_rest(shown, width), _LEAST)
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column in shown:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for index, style in enumerate(styles):
        table.add_row(*(shorten(column.cells[index], room) if column.name else column.cells[index] for column in shown), style=style)
    return table


def _longest(columns: Sequence[Column]) -> int:
    return max((column.width for column in columns if column.name), default=0)


def _rest(columns: Sequence[Column], width: int) -> int:
    """What the other columns leave for each column of names."""
    names = sum(column.name for column in columns)
    taken = sum(column.width for column in columns if not column.name) + _GAP * (len(columns) - 1) + 2
    return (width - taken) // max(names, 1)


def shorten(name: str, width: int) -> str:
    """A name that fits a width: of a long one the middle is left out, save for a macro tile in it: these tell kernels apart."""
    if len(name) <= width:
        return name
    tile = _TILE.search(name)
    kept = "" if tile is None else f"{tile[0]}…"
    head = max((width - 1 - len(kept)) // 2, 1)
    tail = name[len(name) - max(width - 1 - len(kept) - head, 1) :]
    if tile is None or len(kept) + 3 > width or tile.end() > len(name) - len(tail):
        head = max((width - 1) // 2, 1)
        return f"{name[:head]}…{name[len(name) - max(width - 1 - head, 1) :]}"
    return f"{name[: min(head, tile.start())]}…{kept}{tail}"


def noise_text(median: float | None, p10: float | None, p90: float | None, samples: int) -> str:
    """What is to be said of a time that few calls or a wide range make doubtful: "few", "wide" or ""."""
    if median is None or p10 is None or p90 is None:
        return ""
    if 0 < samples < FEW:
        return "few"
    return "wide" if p90 - p10 > WIDE * median else ""
