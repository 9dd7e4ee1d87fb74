"""The scan that turns group sizes and end offsets into starts, ends and the first fault, against unbounded Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from generators import SIZE_TYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import first_fault, group_rows

from hipgroupgemm.problem.groups import GroupBounds, GroupFault, scan, select_groups


@st.composite
def size_arrays(draw):
    """(sizes, extent): any integer type, its extreme values and small ones, one row of them or several."""
    dtype = np.dtype(draw(st.sampled_from(SIZE_TYPES)))
    info = np.iinfo(dtype)
    extent = draw(st.sampled_from([0, 1, 5, 40, 300, 2**31 + 7, 2**40]))
    extremes = {info.min, info.max, info.max - 1, 0, 1, extent, extent - 1, extent + 1, extent // 2, -1}
    values = st.sampled_from(sorted(v for v in extremes if info.min <= v <= info.max)) | st.integers(max(info.min, -3), min(info.max, 20))
    batch = draw(st.sampled_from([(), (), (1,), (3,), (2, 2), (0,)]))
    groups = draw(st.integers(0, 6))
    flat = draw(st.lists(values, min_size=int(np.prod((*batch, groups))), max_size=int(np.prod((*batch, groups)))))
    return np.array(flat, dtype).reshape(*batch, groups), extent


@settings(max_examples=400, deadline=None)
@given(size_arrays(), st.booleans())
def test_scan_is_the_definition_for_every_integer_type(case, offs):
    sizes, extent = case
    bounds = scan(sizes, extent, ends=offs)
    assert bounds.starts.dtype == bounds.ends.dtype == np.int64
    assert bounds.starts.shape == bounds.ends.shape == sizes.shape
    rows = sizes.reshape(int(np.prod(sizes.shape[:-1])), sizes.shape[-1])
    starts, ends = (part.reshape(rows.shape) for part in (bounds.starts, bounds.ends))
    wanted_fault = None
    for entry, row in enumerate(rows):
        wanted = group_rows(row, extent, offs=offs)
        assert list(zip(starts[entry].tolist(), ends[entry].tolist(), strict=True)) == wanted
        found = first_fault(row, extent, offs=offs)
        if found is not None and wanted_fault is None:
            wanted_fault = GroupFault("offs" if offs else "group_sizes", entry, *found)
    assert bounds.fault == wanted_fault


@pytest.mark.parametrize("dtype", SIZE_TYPES)
def test_groups_are_contiguous_and_never_leave_the_extent(dtype, rng):
    """Whatever bits the sizes hold, starts and ends stay in order and inside."""
    info = np.iinfo(dtype)
    for extent in (0, 7, 1000):
        sizes = rng.integers(info.min, info.max, (50, 9), dtype=dtype, endpoint=True)
        for offs in (False, True):
            bounds = scan(sizes, extent, ends=offs)
            assert (bounds.starts >= 0).all()
            assert (bounds.ends <= extent).all()
            assert (bounds.starts <= bounds.ends).all()
            np.testing.assert_array_equal(bounds.starts[:, 1:], bounds.ends[:, :-1])


def test_sums_do_not_overflow():
    """Sums past 2^63 of the given values: each is limited before it is added."""
    for dtype in ("int64", "uint64"):
        sizes = np.full(1000, np.iinfo(dtype).max, dtype)
        bounds = scan(sizes, 10)
        assert bounds.ends.tolist() == [10] * 1000
        assert bounds.fault == GroupFault("group_sizes", 0, 0, np.iinfo(dtype).max, 10)
    int8 = np.full(100, 100, np.int8)  # their sum does not fit their own type
    assert scan(int8, 10_000).ends.tolist() == list(range(100, 10_001, 100))
    assert scan(int8, 10_000).fault is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-3, 12), st.integers(0, 8))
def test_select_groups_clamps_and_flags(sizes, offset, count):
    count = min(count, len(sizes))
    bounds = scan(np.array(sizes, np.int32), sum(sizes))
    part = select_groups(bounds, offset, count)
    largest = len(sizes) - count
    clamped = min(max(offset, 0), largest)
    assert part.starts.tolist() == bounds.starts.tolist()[clamped : clamped + count]
    assert part.ends.tolist() == bounds.ends.tolist()[clamped : clamped + count]
    assert part.fault == (None if offset == clamped else GroupFault("group_offset", 0, 0, offset, largest))


def test_a_fault_of_the_sizes_comes_ahead_of_one_of_the_offset():
    bounds = scan(np.array([3, -1, 2]), 10)
    assert select_groups(bounds, 99, 2).fault == GroupFault("group_sizes", 0, 1, -1, 7)


@pytest.mark.parametrize(
    ("sizes", "extent", "offs", "words"),
    [
        ([40, 40], 64, False, ["group_sizes", "group 1", "40 rows wanted", "24 left of 64"]),
        ([32, -5, 32], 64, False, ["group_sizes", "group 1", "negative", "-5 rows wanted", "32 left"]),
        ([10, 4], 64, True, ["offs", "group 1", "-6 rows wanted", "54 left"]),
        ([10, 70], 64, True, ["offs", "group 1", "60 rows wanted", "54 left of 64"]),
        ([[1, 1], [1, 9]], 4, False, ["batch entry 1", "group 1", "9 rows wanted", "3 left of 4"]),
    ],
)
def test_a_fault_says_group_wanted_and_left(sizes, extent, offs, words):
    fault = scan(np.array(sizes), extent, ends=offs).fault
    with pytest.raises(ValueError) as caught:
        fault.throw(extent)
    for word in words:
        assert word in str(caught.value)


def test_bounds_of_no_batch_entries():
    bounds = scan(np.zeros((0, 3), np.int32), 5)
    assert isinstance(bounds, GroupBounds)
    assert bounds.starts.shape == (0, 3)
    assert bounds.fault is None
