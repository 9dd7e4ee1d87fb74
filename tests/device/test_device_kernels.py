"""The device kernels' host build against the independent model, and against numbers worked out by hand."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from device_host import layout as L
from device_host.build import HostBuild, compile_host
from device_host.cases import INTEGER_TYPES, ODD_COUNTS, Place, draw_case
from device_host.check import Drawn, differences, draw, launches

CASES = 10_000
DRAW = 500


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostBuild:
    return HostBuild(compile_host(tmp_path_factory.mktemp("device")))


def run(host: HostBuild, drawn: Drawn) -> np.ndarray:
    got = drawn.before.copy()
    host.run(*launches(drawn, got.ctypes.data))
    return got


def kinds_of(drawn: Drawn) -> Counter[str]:
    """What the cases are about, so that a test can say that it met everything."""
    seen: Counter[str] = Counter()
    for case in drawn.cases:
        seen[case.mode] += 1
        seen[case.kernel] += 1
        if case.fault is not None:
            before, after = (int(case.fault.view(x)["kind"][0]) for x in (drawn.before, drawn.expected))
            seen[f"fault {after}" if before == 0 else "fault kept"] += 1
            if before == 0 and after and int(case.fault.view(drawn.expected)["batch"][0]) > 0:
                seen["fault in a later batch"] += 1
        seen["more than a window"] += case.batches * case.total > 8 * L.THREADS
        seen["offset on the device"] += isinstance(case.group_offset, Place)
        if case.records is not None:
            seen["surplus records"] += case.records.shape[0] > case.batches * case.groups
            seen["lists"] += any(op is not None and op.table is not None for op in case.operands.values())
        if case.out is not None:
            before_out, after_out = (case.out.view(x).tobytes() for x in (drawn.before, drawn.expected))
            seen[f"out {case.out.dtype}"] += before_out != after_out
            seen["c is out"] += case.c is case.out
            seen["c broadcast"] += case.c is not None and 0 in case.c.strides
    return seen


def test_ten_thousand_random_configs(host: HostBuild) -> None:
    seen: Counter[str] = Counter()
    for seed in range(CASES // DRAW):
        drawn = draw(seed, DRAW)
        assert differences(drawn, run(host, drawn)) == [], f"seed {seed}"
        seen += kinds_of(drawn)
    needed = ["non_contracting", "contracting", "batch", *L.KERNELS[:2]]
    needed += [f"fault {kind}" for kind in range(5)] + [
        "fault kept",
        "fault in a later batch",
        "more than a window",
    ]
    needed += ["offset on the device", "surplus records", "lists", "c is out", "c broadcast"]
    needed += [f"out {name}" for name in L.FLOATS]
    assert {name: seen[name] for name in needed if seen[name] < 50} == {}


@pytest.mark.parametrize("dtype_name", INTEGER_TYPES)
def test_group_counts_for_every_size_type(host: HostBuild, dtype_name: str) -> None:
    kinds = ("exact", "tail", "past", "wrong", "noise")
    makers = [partial(draw_case, count=count, dtype_name=dtype_name, kind=kind) for count in ODD_COUNTS for kind in kinds]
    drawn = draw(1000 + L.INTEGERS[dtype_name], len(makers), makers)
    assert differences(drawn, run(host, drawn)) == []


def test_order_of_threads_and_blocks_does_not_matter(host: HostBuild) -> None:
    drawn = draw(7, 60)
    for order in range(6):
        for grid in (1, 4, 29):
            for case in drawn.cases:
                case.order, case.grid = order, grid
            assert differences(drawn, run(host, drawn)) == [], f"order {order}, {grid} blocks"


def scanned(
    host: HostBuild, sizes: list[int], dtype: str, extent: int, kernel: str = "hgg_scan", **other: int
) -> tuple[list[tuple[int, int]], tuple[int, ...], list[int]]:
    """Rows of each group, the fault and the covered_range, of one batch and one launch without the model."""
    values = np.array(sizes, dtype)
    total = len(sizes)
    starts, ends = np.full(total, -7, np.int64), np.full(total, -7, np.int64)
    covered_range, fault = np.full(2, -7, np.int64), np.zeros((), L.FAULT)
    a = np.zeros((), L.ARGUMENTS)
    a["sizes"], a["sizes_stride"], a["sizes_type"] = (
        values.ctypes.data,
        values.itemsize,
        L.INTEGERS[values.dtype.str[1:]],
    )
    a["sizes_kind"], a["ragged_extent"], a["batch_count"] = L.SIZES_COUNTS, extent, 1
    a["group_count"] = a["group_total"] = total
    for name, array in (("starts", starts), ("ends", ends), ("covered_range", covered_range), ("fault", fault)):
        a[name] = array.ctypes.data
    for name, value in other.items():
        a[name] = value
    assert host.launch(kernel, a, 2) == 0
    count = int(a["group_count"])
    return list(zip(starts.tolist(), ends.tolist(), strict=True))[:count], fault.item(), covered_range.tolist()


def test_right_sizes_by_hand(host: HostBuild) -> None:
    rows, fault, covered_range = scanned(host, [3, 0, 4], "i4", 9)
    assert rows == [(0, 3), (3, 3), (3, 7)]
    assert fault == (0, 0, 0, 0, 0)
    assert covered_range == [0, 7]


@pytest.mark.parametrize(
    ("sizes", "dtype", "extent", "rows", "fault"),
    [
        ([3, -1, 20], "i4", 10, [(0, 3), (3, 3), (3, 10)], (L.FAULT_NEGATIVE, 0, 1, -1, 7)),
        ([3, 8, -1], "i8", 10, [(0, 3), (3, 10), (10, 10)], (L.FAULT_PAST_END, 0, 1, 8, 7)),
        ([6, 5, 1], "u1", 10, [(0, 6), (6, 10), (10, 10)], (L.FAULT_PAST_END, 0, 1, 5, 4)),
        ([10, 0, 1], "i2", 10, [(0, 10), (10, 10), (10, 10)], (L.FAULT_PAST_END, 0, 2, 1, 0)),
        ([2**64 - 1, 2**64 - 1], "u8", 10, [(0, 10), (10, 10)], (L.FAULT_PAST_END, 0, 0, 2**63 - 1, 10)),
        ([2**63 - 1] * 3, "i8", 5, [(0, 5), (5, 5), (5, 5)], (L.FAULT_PAST_END, 0, 0, 2**63 - 1, 5)),
        ([1, -(2**63)], "i8", 5, [(0, 1), (1, 1)], (L.FAULT_NEGATIVE, 0, 1, -(2**63), 4)),
        ([2**31, 2**31], "u4", 2**32, [(0, 2**31), (2**31, 2**32)], (0, 0, 0, 0, 0)),
        (
            [2**31, 2**31],
            "u4",
            2**32 - 1,
            [(0, 2**31), (2**31, 2**32 - 1)],
            (L.FAULT_PAST_END, 0, 1, 2**31, 2**31 - 1),
        ),
        ([127] * 4, "i1", 508, [(0, 127), (127, 254), (254, 381), (381, 508)], (0, 0, 0, 0, 0)),
    ],
)
def test_wrong_and_huge_sizes_by_hand(
    host: HostBuild,
    sizes: list[int],
    dtype: str,
    extent: int,
    rows: list[tuple[int, int]],
    fault: tuple[int, ...],
) -> None:
    for kernel in ("hgg_scan", "hgg_fill"):
        assert scanned(host, sizes, dtype, extent, kernel)[:2] == (rows, fault)


@pytest.mark.parametrize(
    ("offsets", "dtype", "rows", "fault"),
    [
        ([3, 3, 9], "i4", [(0, 3), (3, 3), (3, 9)], (0, 0, 0, 0, 0)),
        ([3, 2, 9], "i4", [(0, 3), (3, 3), (3, 9)], (L.FAULT_OFFSETS, 0, 1, -1, 7)),
        ([3, 12, 9], "u2", [(0, 3), (3, 10), (10, 10)], (L.FAULT_OFFSETS, 0, 1, 9, 7)),
        ([-1, 4, 10], "i1", [(0, 0), (0, 4), (4, 10)], (L.FAULT_OFFSETS, 0, 0, -1, 10)),
        ([1, -(2**63), 2], "i8", [(0, 1), (1, 1), (1, 2)], (L.FAULT_OFFSETS, 0, 1, -(2**63), 9)),
        ([1, 2**64 - 1, 2], "u8", [(0, 1), (1, 10), (10, 10)], (L.FAULT_OFFSETS, 0, 1, 2**63 - 2, 9)),
    ],
)
def test_end_offsets_by_hand(host: HostBuild, offsets: list[int], dtype: str, rows: list[tuple[int, int]], fault: tuple[int, ...]) -> None:
    assert scanned(host, offsets, dtype, 10, sizes_kind=L.SIZES_OFFSETS)[:2] == (rows, fault)


@pytest.mark.parametrize(
    ("offset", "rows", "fault", "covered_range"),
    [
        (1, [(2, 5), (5, 9)], (0, 0, 0, 0, 0), [2, 9]),
        (5, [(5, 9), (9, 10)], (L.FAULT_GROUP_OFFSET, 0, 0, 5, 2), [5, 10]),
        (-1, [(0, 2), (2, 5)], (L.FAULT_GROUP_OFFSET, 0, 0, -1, 2), [0, 5]),
    ],
)
def test_group_offset_by_hand(
    host: HostBuild, offset: int, rows: list[tuple[int, int]], fault: tuple[int, ...], covered_range: list[int]
) -> None:
    where = {"group_count": 2, "group_offset_value": offset}
    assert scanned(host, [2, 3, 4, 1], "i4", 10, **where) == (rows, fault, covered_range)
    on_device = np.array([offset], np.int8)
    where = {"group_count": 2, "group_offset": on_device.ctypes.data, "group_offset_type": L.INTEGERS["i1"]}
    assert scanned(host, [2, 3, 4, 1], "i4", 10, **where) == (rows, fault, covered_range)


def test_a_fault_stays_until_it_is_cleared(host: HostBuild) -> None:
    flag = np.zeros((), L.FAULT)
    scanned(host, [3, 9], "i4", 10, fault=flag.ctypes.data)
    first = flag.item()
    assert first == (L.FAULT_PAST_END, 0, 1, 9, 7)
    scanned(host, [-1, 9], "i4", 10, fault=flag.ctypes.data)
    scanned(host, [1, 1], "i4", 10, fault=flag.ctypes.data, group_count=1, group_offset_value=9)
    assert flag.item() == first
    flag[...] = 0
    scanned(host, [1, 1], "i4", 10, fault=flag.ctypes.data)
    assert flag.item() == (0, 0, 0, 0, 0)
    scanned(host, [-1, 9], "i4", 10, fault=flag.ctypes.data)
    assert flag.item() == (L.FAULT_NEGATIVE, 0, 0, -1, 10)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("in_place", [False, True])
def test_slabs_of_a_list_that_no_group_covers(host: HostBuild, rng: np.random.Generator, dtype: str, in_place: bool) -> None:
    sizes, beta = [3, 0, 4, 0, 0], 0.5

    def slabs(first: int) -> list[np.ndarray]:
        """Arrays of (2, 3, 5), each somewhere else, some at odd addresses."""
        starts = [first + 1000 * at + shift for at, shift in zip(rng.permutation(5), (0, 1, 16, 3, 2), strict=True)]
        return [np.ndarray((2, 3, 5), dtype, memory.data, start) for start in starts]

    memory = np.zeros(20000, np.uint8)
    out, c = slabs(64), slabs(8000)
    for slab in [*out, *c]:
        slab[...] = rng.standard_normal(slab.shape)
    before, given = memory.copy(), [slab.copy() for slab in (out if in_place else c)]
    tables = [np.array([slab.__array_interface__["data"][0] for slab in list_], np.uint64) for list_ in (out, out if in_place else c)]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    a = np.zeros((), L.ARGUMENTS)
    a["starts"], a["ends"], a["mode"] = starts.ctypes.data, ends.ctypes.data, L.RAGGED_K
    a["batch_count"], a["group_count"], a["group_total"], a["out_batch_count"], a["out_rows"], a["out_columns"] = 1, 5, 5, 2, 3, 5
    a["out_type"] = a["c_type"] = L.FLOATS[dtype]
    a["beta"] = np.void(np.array(beta, "f8" if dtype == "float64" else "f4").tobytes().ljust(16, b"\0"))
    size = np.dtype(dtype).itemsize
    for name, table in zip(("out", "c_matrix"), tables, strict=True):
        a[name] = (table.ctypes.data, 5 * size, size, L.LISTED, 15 * size)
    assert host.launch("hgg_zero_uncovered", a, 3) == 0
    expected = before.copy()
    for slab, rows, values in zip(out, sizes, given, strict=True):
        if not rows:
            start = slab.__array_interface__["data"][0] - memory.ctypes.data
            np.ndarray((2, 3, 5), dtype, expected.data, start)[...] = (values.astype("f8") * beta).astype(dtype)
    np.testing.assert_array_equal(memory, expected)


@pytest.fixture(scope="module")
def finished(host: HostBuild) -> tuple[Drawn, np.ndarray]:
    drawn = draw(11, 40)
    got = run(host, drawn)
    assert differences(drawn, got) == []
    return drawn, got


@pytest.mark.parametrize("word", range(L.RECORD.itemsize // 4))
def test_one_wrong_bit_of_one_record_is_seen(finished: tuple[Drawn, np.ndarray], word: int) -> None:
    drawn, right = finished
    got = right.copy()
    places = [case.records for case in drawn.cases if case.records is not None]
    place = places[word % len(places)]
    record = place.shape[0] // 2
    got[place.offset + record * L.RECORD.itemsize + 4 * word] ^= 1 << word % 8
    said = differences(drawn, got)
    assert len(said) == 1
    assert "records[" in said[0]


@pytest.mark.parametrize("name", ["starts", "ends", "covered_range", "fault", "tiles", "tile_count", "out", "sizes"])
def test_one_wrong_byte_elsewhere_is_seen(finished: tuple[Drawn, np.ndarray], name: str) -> None:
    drawn, right = finished
    got = right.copy()
    place = next(p for p in (getattr(case, name) for case in drawn.cases) if p is not None and 0 not in p.shape)
    got[place.offset] ^= 1
    assert f"{name}[0]" in differences(drawn, got)[0]
