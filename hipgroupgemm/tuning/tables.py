"""Tables that fit a terminal: what matters least is left out before names become unreadable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table

__all__ = ["FEW", "WIDE", "Column", "fitting_table", "noise_text", "printable", "shorten"]

FEW, WIDE = 5, 0.2
"""Fewer timed calls than this tell little about noise; a range from p10 to p90 above this part of the median is much of it."""

_READABLE = 24  # columns of a terminal that a name should have, if it is that long
_LEAST = 12
_GAP = 2  # blanks between two columns
_TILE = re.compile(r"MT\d+x\d+(?:x\d+)*|\d+x\d+(?:x\d+)*")  # the macro tile tells kernels apart
_GONE = "…"


# ---- tables ----------------------------------------------------------------------------------------------------------------------


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
        table.add_row(*row, style=style)
    return table


def _rest(columns: Sequence[Column], width: int) -> int:
    """What the other columns leave for each column of names."""
    names = sum(column.name for column in columns)
    taken = sum(column.width for column in columns if not column.name) + _GAP * (len(columns) - 1) + 2
    return (width - taken) // max(names, 1)


def shorten(names: Sequence[str], width: int) -> list[str]:
    """Names that fit a width. Of long ones the parts that all have in common go first; the macro tile stays."""
    parts = [name.split("_") for name in names]
    common = set.intersection(*map(set, parts)) if len(set(names)) > 1 else set()
    return [name if len(name) <= width else _cut(_without(own, common, width), width) for name, own in zip(names, parts, strict=True)]


def _without(parts: list[str], common: set[str], width: int) -> str:
    """A name without the common parts in its middle that there is no room for, the longest first."""
    left: list[str] = list(parts)
    for part in sorted(common, key=len, reverse=True):
        if len(_joined(left)) <= width:
            break
        left = [left[0], *("" if one == part else one for one in left[1:])]
    return _joined(left)


def _joined(parts: list[str]) -> str:
    return re.sub("_*(_)?…(_…)*", _GONE, "_".join(part or _GONE for part in parts))


def _cut(name: str, width: int) -> str:
    """A name that fits: both ends, and the macro tile between them where there is one."""
    if len(name) <= width:
        return name
    tiles = sorted(_TILE.findall(name), key=lambda text: not text.startswith("MT"))
    tile = tiles[0] if tiles and len(tiles[0]) + 3 <= width else ""
    room = width - 1 - (len(tile) + 1 if tile else 0)
    head, tail = name[: room // 2], name[len(name) - (room - room // 2) :]
    if tile and (tile in head or tile in tail):
        room, tile = width - 1, ""
        head, tail = name[: room // 2], name[len(name) - (room - room // 2) :]
    return re.sub("…[_…]*…", _GONE, f"{head}{_GONE}{tile}{_GONE if tile else ''}{tail}")


# ---- texts -----------------------------------------------------------------------------------------------------------------------


def noise_text(median: float | None, p10: float | None, p90: float | None, samples: int) -> str:
    """What is to be said of a time that few calls or a wide range make doubtful: "few", "wide" or ""."""
    if median is None or p10 is None or p90 is None:
        return ""
    if 0 < samples < FEW:
        return "few"
    return "wide" if p90 - p10 > WIDE * median else ""


def printable(text: str) -> str:
    """`text` with what UTF-8 has no bytes for written as an escape: a lone surrogate can't be printed, nor written to a file."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
