"""What the kernels must leave behind, worked out from a case with Python's integers and NumPy.

No code is shared with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import layout as L
from .cases import Case, Operand, Place


@dataclass
class Scan:
    starts: np.ndarray  # (batches, groups)
    ends: np.ndarray
    covered_range: np.ndarray  # (batches, 2)
    fault: tuple[int, int, int, int, int] | None


def saturate(value: int) -> int:
    return min(max(value, -(2**63)), 2**63 - 1)


def scan_batch(values: list[int], extent: int, offsets: bool) -> tuple[list[int], list[int], tuple[int, ...] | None]:
    """Starts and ends of all groups, and the first fault as (kind, group, wanted, left)."""
    starts, ends, fault, before = [], [], None, 0
    for group, given in enumerate(values):
        value = saturate(given)
        if offsets:
            wrong = L.FAULT_OFFSETS if given < before or given > extent else 0
            after = max(before, min(max(given, 0), extent))
            wanted = saturate(value - before)
        else:
            wrong = L.FAULT_NEGATIVE if given < 0 else L.FAULT_PAST_END if before + given > extent else 0
            after = before + min(max(given, 0), extent + 1)
            wanted = value
        if wrong and fault is None:
            fault = (wrong, group, wanted, extent - before)
        starts.append(min(before, extent))
        ends.append(min(after, extent))
        before = after
    return starts, ends, fault


def scan(case: Case, arena: np.ndarray) -> Scan:
    """The scan of a case on the arena as it was before any launch."""
    offset, fault = 0, None
    if isinstance(case.group_offset, Place):
        given = int(case.group_offset.view(arena)[0])
    else:
        given = case.group_offset
    room = case.total - case.groups
    offset = min(max(given, 0), room)
    if given != offset:
        fault = (L.FAULT_GROUP_OFFSET, 0, 0, saturate(given), room)
    starts = np.zeros((case.batches, case.groups), np.int64)
    ends = np.zeros_like(starts)
    covered_range = np.zeros((case.batches, 2), np.int64)
    for batch in range(case.batches):
        if case.sizes is None:
            begin, end, wrong = [0] * case.total, [case.extent] * case.total, None
        else:
            begin, end, wrong = scan_batch(case.sizes.view(arena)[batch].tolist(), case.extent, case.offsets)
        if wrong and fault is None:
            fault = (wrong[0], batch, *wrong[1:])
        starts[batch] = begin[offset : offset + case.groups]
        ends[batch] = end[offset : offset + case.groups]
        if case.groups:
            covered_range[batch] = starts[batch, 0], ends[batch, -1]
    return Scan(starts, ends, covered_range, fault)


def addresses(op: Operand | None, otherwise: Any, arena: np.ndarray, first: np.ndarray, group: np.ndarray, batch: np.ndarray) -> Any:
    if op is None:
        return otherwise
    terms = zip((first, group, batch), (op.row_stride, op.group_stride, op.batch_stride), strict=True)
    if op.table is not None:
        return op.table.view(arena)[group] + sum(
            x.astype(np.uint64) * np.uint64(s) for x, s in ((first, op.row_stride), (batch, op.batch_stride))
        )
    return np.uint64(op.base) + sum(x.astype(np.uint64) * np.uint64(s) for x, s in terms)


def records(case: Case, scanned: Scan, arena: np.ndarray) -> np.ndarray:
    """All records: one for each (batch, group), then those without rows."""
    assert case.records is not None
    out = np.zeros(case.records.shape, L.RECORD)
    out[...] = case.template
    problems = case.batches * case.groups
    rows = np.zeros(len(out), np.int64)
    first, group, batch = np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(rows)
    rows[:problems] = (scanned.ends - scanned.starts).ravel()
    first[:problems] = scanned.starts.ravel()
    first[rows == 0] = 0
    group[:problems] = np.tile(np.arange(case.groups), case.batches)
    batch[:problems] = np.repeat(np.arange(case.batches), case.groups)
    if case.mode == "contracting":
        out["k"] = rows
        out["n"] = np.where(rows == 0, 0, out["n"])
    else:
        out["n" if case.swapped or case.mode == "batch" else "m"] = rows
    operands = {"d": "out", "c": "c", "bias": "bias", "a": "lhs", "b": "rhs"}
    if case.swapped:
        operands |= {"a": "rhs", "b": "lhs"}
    for name, mine in operands.items():
        out[name] = addresses(case.operands[mine], case.template[name], arena, first, group, batch)
    if case.alpha is not None:
        out["alpha"] = np.void(case.alpha)
    if case.beta is not None:
        out["beta"] = np.void(case.beta)
    return out


def tile_table(case: Case, scanned: Scan) -> list[tuple[int, int, int]]:
    return [
        (batch * case.groups + group, min(case.block_rows, end - first), first)
        for batch in range(case.batches)
        for group, (start, end) in enumerate(zip(scanned.starts[batch].tolist(), scanned.ends[batch].tolist(), strict=True))
        for first in range(start, end, case.block_rows)
    ]


def scaled(case: Case, c: np.ndarray) -> np.ndarray:
    """beta * c in float32 (float64 for float64 out), rounded once to out's type."""
    assert case.out is not None
    real = np.float64 if case.out.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        return (real(case.uncovered_beta) * c.astype(real)).astype(case.out.dtype)


def zero_uncovered(case: Case, scanned: Scan, before: np.ndarray, after: np.ndarray) -> None:
    assert case.out is not None
    old_c = None if case.c is None else case.c.view(before)
    new = case.out.view(after)

    def give(where: tuple[Any, ...]) -> None:
        new[where] = 0 if old_c is None else scaled(case, old_c[where])

    for batch in range(case.out.shape[-3]):
        source = 0 if case.batches == 1 else batch
        if case.mode == "contracting":
            for group in range(case.groups):
                if scanned.starts[source, group] == scanned.ends[source, group]:
                    give((group, batch))
        else:
            begin, end = scanned.covered_range[source].tolist()
            give((batch, slice(0, begin)))
            give((batch, slice(end, None)))


def expect(case: Case, before: np.ndarray, after: np.ndarray) -> None:
    """Writes what the case's launches must write, from the arena ``before`` into the arena ``after``."""
    scanned = scan(case, before)
    for name in ("starts", "ends", "covered_range"):
        place = getattr(case, name)
        if place is not None:
            place.view(after)[...] = getattr(scanned, name)
    if case.fault is not None and scanned.fault and case.fault.view(before)["kind"][0] == 0:
        case.fault.view(after)[0] = scanned.fault
    if case.records is not None:
        case.records.view(after)[...] = records(case, scanned, before)
    if case.tiles is not None and case.tile_count is not None:
        table = tile_table(case, scanned)
        case.tile_count.view(after)[0] = len(table)
        kept = min(len(table), case.tiles.shape[0])
        case.tiles.view(after)[:kept] = np.array(table[:kept], L.TILE)
    if case.uncovered_grid:
        zero_uncovered(case, scanned, before, after)


def same_nans(case: Case, expected: np.ndarray, got: np.ndarray) -> None:
    """A NaN is a NaN: where both have one in out, ``got`` is given the expected bits."""
    if case.uncovered_grid and case.c is not None and case.out is not None:
        mine, theirs = case.out.view(expected), case.out.view(got)
        with np.errstate(invalid="ignore"):  # fp16 has signalling NaN
            both = np.isnan(mine) & np.isnan(theirs)
        theirs[both] = mine[both]


def describe(case: Case, offset: int) -> str:
    """What lies at a byte of the arena, for the message of a failed comparison."""
    for name in ("sizes", "starts", "ends", "covered_range", "fault", "records", "tiles", "tile_count", "out", "c"):
        place = getattr(case, name)
        if place is None or 0 in place.shape:
            continue
        extent = sum((n - 1) * s for n, s in zip(place.shape, place.strides, strict=True)) + place.dtype.itemsize
        if place.offset <= offset < place.offset + extent:
            at = offset - place.offset
            fields = place.dtype.fields or {}
            inside = [f for f, (t, o, *_) in fields.items() if o <= at % place.dtype.itemsize < o + t.itemsize]
            return f"{name}[{at // place.dtype.itemsize}]{'.' + inside[0] if inside else ''} (byte {at})"
    return "a byte that belongs to nothing"
