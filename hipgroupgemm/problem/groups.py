"""Group sizes and end offsets: the scan that turns them into starts and ends, and what is wrong with them.

This is the NumPy reference of the device's scan routine. Wrong sizes never lead outside the operands: a size is limited to
[0, R + 1] before the 64-bit sum, starts and ends are limited to R. End offsets are limited to [0, R] and made non-decreasing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import numpy as np

__all__ = ["GroupBounds", "GroupFault", "scan", "select_groups"]


class GroupFault(NamedTuple):
    """The first thing wrong with group sizes or with a group offset (lowest batch entry, then group).

    Attributes:
        kind: "group_sizes", "offs" or "group_offset".
        batch, group: where it is; batch is 0 where all batch entries share the sizes.
        wanted: the size asked for; for "group_offset" the offset asked for.
        left: the rows that were left for the group; for "group_offset" the largest valid offset.
    """

    kind: str
    batch: int
    group: int
    wanted: int
    left: int

    def describe(self, extent: int) -> str:
        """The fault in words, for a ragged extent of `extent` rows."""
        if self.kind == "group_offset":
            return f"group_offset: got {self.wanted}, wanted 0 to {self.left}; give the index of the first group to compute"
        where = f"group {self.group}" + (f" of batch entry {self.batch}" if self.batch else "")
        start = extent - self.left
        if self.kind == "offs":
            ends = f"ends at {start + self.wanted}, "
            what = ends + (f"before row {start}, its start" if self.wanted < 0 else "past the ragged dimension")
            rule = "end offsets must not decrease, nor exceed the ragged extent"
        else:
            what = "has a negative size" if self.wanted < 0 else "runs past the ragged dimension"
            rule = "sizes must be at least 0 and sum to at most the ragged extent"
        return f"{self.kind}: {where} {what}: {self.wanted} rows wanted, {self.left} left of {extent}; {rule}"

    def throw(self, extent: int) -> NoReturn:
        """Raises this fault as a ValueError."""
        raise ValueError(self.describe(extent))


class GroupBounds(NamedTuple):
    """First and one-past-last row of every group, int64, shape (..., g), and the first fault if there is one."""

    starts: np.ndarray[Any, np.dtype[np.int64]]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    fault: GroupFault | None


def scan(sizes: np.ndarray[Any, Any], extent: int, *, ends: bool = False) -> GroupBounds:
    """Starts and ends of groups along a ragged dimension.

    Args:
        sizes: host integers of any dtype, shape (g,) or (batch..., g): group sizes, or end offsets where `ends` is true.
        extent: R, the length of the ragged dimension.
        ends: whether `sizes` are end offsets.

    Returns:
        Bounds of shape sizes.shape with 0 <= starts <= ends <= extent, whatever the sizes are.
    """
    rows = sizes.reshape(math.prod(sizes.shape[:-1]), sizes.shape[-1])  # -1 would be ambiguous where there are no groups
    wide = rows.astype(np.uint64 if rows.dtype.kind == "u" else np.int64)
    limited = np.minimum(np.maximum(wide, 0), extent if ends else extent + 1).astype(np.int64)
    if ends:
        stops = np.maximum.accumulate(limited, axis=1) if rows.size else limited
        starts = np.concatenate([np.zeros((rows.shape[0], 1), np.int64), stops[:, :-1]], axis=1)[:, : rows.shape[1]]
        bad = (wide < 0) | (limited < starts) | (wide > extent)
    else:
        total = np.add.accumulate(limited, axis=1, dtype=np.int64)
        starts, stops = np.minimum(total - limited, extent), np.minimum(total, extent)
        bad = (wide < 0) | (limited > extent - starts)
    fault = None
    if np.logical_or.reduce(bad, axis=None):
        batch, group = (int(i) for i in np.argwhere(bad)[0])
        start, value = int(starts[batch, group]), int(rows[batch, group])
        wanted = value - start if ends else value
        fault = GroupFault("offs" if ends else "group_sizes", batch, group, wanted, extent - start)
    return GroupBounds(starts.reshape(sizes.shape), stops.reshape(sizes.shape), fault)


def select_groups(bounds: GroupBounds, offset: int, count: int) -> GroupBounds:
    """The bounds of groups [offset, offset + count); an offset out of range is clamped and becomes the fault if there is none."""
    largest = bounds.starts.shape[-1] - count
    fault = bounds.fault
    if not 0 <= offset <= largest:
        fault = fault or GroupFault("group_offset", 0, 0, offset, largest)
        offset = min(max(offset, 0), largest)
    part = slice(offset, offset + count)
    return GroupBounds(bounds.starts[..., part], bounds.ends[..., part], fault)
