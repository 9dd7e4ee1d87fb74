"""Tables that fit a terminal: what matters least is left out before names become unreadable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

__all__ = ["FEW", "WIDE", "Column", "fitting_table", "noise_text", "printable", "shorten"]

FEW, WIDE = 5, 0.2
"""Fewer timed calls than this tell little about noise; a range from p10 to p90 above this part of the median is much of it."""

_READABLE = 24  # columns of a terminal that a name should have, if it is that long
_LEAST = 12
_GAP = 2  # blanks between two columns
_TILE = re.compile(r"MT\d+x\d+(?:x\d+)*|\d+x\d+(?:x\d+)*")  # the macro tile tells kernels apart


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
    """The table in `width` columns of a terminal: as many columns as leave names readable, then names shortened to what differs."""
    shown = list(columns)
    while _rest(shown, width) < min(max((c.width for c in shown if c.name), default=0), _READABLE) and any(c.rank for c in shown):
        last = max(column.rank for column in shown)
        shown = [column for column in shown if column.rank != last]
    room = max(_rest(shown, width), _LEAST)
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column in shown:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=not column.name, overflow="fold")
    cells = [shorten(column.cells, room) if column.name else column.cells for column in shown]
    for row, style in zip(zip(*cells, strict=True), styles, strict=True):
        table.add_row(*map(Text, row), style=style)  # names are no markup
    return table


def _rest(columns: Sequence[Column], width: int) -> int:
    """What the other columns leave for each column of names."""
    taken = sum(column.width for column in columns if not column.name) + _GAP * (len(columns) - 1) + 2
    return (width - taken) // max(sum(column.name for column in columns), 1)


def shorten(names: Sequence[str], width: int) -> list[str]:
    """Names that fit a width. Of long ones the parts that all have in common go first, the longest of them before the others."""
    parts = [set(name.split("_")) for name in names]
    common = sorted(set.intersection(*parts), key=lambda part: (-len(part), part)) if len(set(names)) > 1 else []
    return [_fitting(name, common, width) for name in names]


def _fitting(name: str, common: Sequence[str], width: int) -> str:
    left = name.split("_")
    for part in common:
        if len(name) <= width:
            break
        left = ["…" if one == part else one for one in left]
        name = re.sub("_?…[_…]*", "…", "_".join(left))
    return name if len(name) <= width else _cut(name, width)


def _cut(name: str, width: int) -> str:
    """A name that fits: both ends, and the macro tile between them where it would be lost."""
    tiles = sorted(_TILE.findall(name), key=lambda text: not text.startswith("MT"))
    kept = [f"{text}…" for text in tiles[:1] if len(text) + 4 <= width]
    for tile in ("", *kept):
        room = width - 1 - len(tile)
        cut = f"{name[: room // 2]}…{tile}{name[len(name) - (room - room // 2) :]}"
        if not kept or tiles[0] in cut:
            break
    return cut


def noise_text(median: float | None, p10: float | None, p90: float | None, samples: int) -> str:
    """What is to be said of a time that few calls or a wide range make doubtful: "few", "wide" or ""."""
    if median is None or p10 is None or p90 is None:
        return ""
    if 0 < samples < FEW:
        return "few"
    return "wide" if p90 - p10 > WIDE * median else ""


def printable(text: str) -> str:
    """`text` with what UTF-8 has no bytes for written as an escape: a lone surrogate can't be printed, nor written to a file."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
