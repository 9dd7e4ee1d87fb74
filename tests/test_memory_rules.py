"""What is read and written: overlap, strides, alignment, NaN isolation, extents of 0, and experts past 2^32 elements."""

from __future__ import annotations

import itertools
import mmap
import os

import numpy as np
import pytest
from comparison import assert_close
from generators import (
    FORWARD,
    WEIGHT_GRADIENT,
    Layout,
    Mode,
    Operand,
    dtype_of,
    make_problem,
    random_layout,
    random_sizes,
    random_values,
)

import hipgroupgemm as hgg

NON_CONTRACTING, CONTRACTING = Mode.NON_CONTRACTING, Mode.CONTRACTING
MODES = pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
RAGGED = pytest.mark.parametrize("mode", [NON_CONTRACTING, CONTRACTING], ids=lambda mode: mode.name)
as_strided = np.lib.stride_tricks.as_strided


# ---- layouts -------------------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_layout_gives_the_same(mode, dtype, rng):
    """Any order of axes, padding, steps, addresses and broadcast inputs, with NaN all round every operand."""
    for _ in range(40):
        batch = int(rng.integers(1, 4)) if mode is Mode.BATCH or rng.random() < 0.4 else None
        rows, groups = int(rng.integers(1, 40)), int(rng.integers(1, 5))
        ndim = 2 if batch is None else 3
        ranks = {"lhs": ndim, "rhs": ndim + (mode is NON_CONTRACTING), "out": ndim + (mode is CONTRACTING)}
        layouts = {name: random_layout(rng, rank, may_broadcast=name != "out") for name, rank in ranks.items()}
        layouts["sizes"] = Layout(step=int(rng.integers(1, 4)), lead=int(rng.integers(3)))
        other = [int(extent) for extent in rng.integers(1, 12, 2)]
        extents = (*other, rows) if mode is CONTRACTING else (rows, *other)
        if batch is not None and mode is not Mode.BATCH and rng.random() < 0.5:
            sizes = np.array([random_sizes(rng, rows, groups) for _ in range(batch)])
            layouts["sizes"] = random_layout(rng, 2)
        else:
            sizes = random_sizes(rng, rows, groups)
        print(extents, batch, sizes.tolist(), layouts)
        make_problem(rng, mode, *extents, sizes, dtype, batch=batch, layouts=layouts).check()


@RAGGED
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_slices_of_bigger_arrays(mode, dtype, rng):
    """[1:, 1:] of bigger arrays: neither addresses nor strides are multiples of 16 bytes."""
    sizes = np.array([1, 127, 3])
    extents = (131, 53, 77) if mode is NON_CONTRACTING else (53, 77, 131)
    problem = make_problem(rng, mode, *extents, sizes, dtype)
    whole = {}
    for name in ("lhs", "rhs", "out"):
        operand = getattr(problem, name)
        big = np.full([extent + 2 for extent in operand.shape], np.nan, operand.dtype)
        inner = big[tuple(slice(1, -1) for _ in operand.shape)]
        inner[...] = operand.values
        whole[name] = big
        operand.array = inner
    value, magnitude = problem.expected()
    hgg.ragged_dot_general(**problem.arguments(), out=problem.out.array)
    assert_close(problem.out.array, value, magnitude, problem.length, (problem.lhs.dtype,))
    ring = np.ones(whole["out"].shape, bool)
    ring[tuple(slice(1, -1) for _ in ring.shape)] = False
    assert np.isnan(whole["out"][ring].astype(np.float64)).all(), "elements of the bigger array round out were written"


def test_addresses_that_are_no_multiple_of_the_item_size(rng):
    """Every address a byte off: slow is fine, wrong is not."""
    arrays = {"lhs": random_values(rng, (20, 7), "float32"), "rhs": random_values(rng, (3, 7, 9), "float32")}
    odd = {}
    for name, values in arrays.items():
        memory = np.zeros(values.nbytes + 1, np.uint8)
        odd[name] = np.ndarray(values.shape, values.dtype, memory, 1)
        odd[name][...] = values
        assert not odd[name].flags.aligned
    out = np.ndarray((20, 9), np.float32, np.full(20 * 9 * 4 + 1, 255, np.uint8), 1)
    hgg.ragged_dot(odd["lhs"], odd["rhs"], [5, 9, 4], out=out)
    np.testing.assert_allclose(out, hgg.ragged_dot(arrays["lhs"], arrays["rhs"], [5, 9, 4]), rtol=1e-5, atol=1e-5)
    config = hgg.config_for_ragged_dot(odd["lhs"], odd["rhs"], [5, 9, 4], out=out)
    assert (config.lhs_alignment, config.rhs_alignment, config.output_alignment) == (1, 1, 1)


def test_six_classes_of_a_layer_need_no_copy_of_the_weights(rng):
    """fwd, dgrad and wgrad of both projections, weights and tokens as they are stored: views in, no transpose in memory."""
    tokens, emb, mlp, groups = 40, 16, 24, 4
    sizes = random_sizes(rng, tokens, groups, full=True)
    x, h = random_values(rng, (tokens, emb), "bfloat16"), random_values(rng, (tokens, mlp), "bfloat16")
    wi, wo = random_values(rng, (groups, emb, mlp), "bfloat16"), random_values(rng, (groups, mlp, emb), "bfloat16")
    back = hgg.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    for numbers, lhs, rhs in [
        (FORWARD, x, wi),
        (FORWARD, h, wo),
        (back, h, wi),
        (back, x, wo),
        (WEIGHT_GRADIENT, x, h),
        (WEIGHT_GRADIENT, h, x),
    ]:
        config = hgg.config_for_ragged_dot(lhs, rhs, sizes, numbers)  # NotImplementedError would mean that a copy is needed
        assert config.trans_b == (numbers is back)
        assert config.trans_a == (numbers is WEIGHT_GRADIENT)
        assert config.must_swap_operands


def test_transposed_views_are_equal_to_the_other_dimension_numbers(rng):
    lhs, stored = random_values(rng, (30, 8), "float32"), random_values(rng, (3, 5, 8), "float32")
    back = hgg.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    by_numbers = hgg.ragged_dot_general(lhs, stored, [9, 9, 9], back)
    by_view = hgg.ragged_dot(lhs, stored.transpose(0, 2, 1), [9, 9, 9])
    np.testing.assert_array_equal(by_numbers, by_view)
    assert hgg.config_for_ragged_dot(lhs, stored, [9, 9, 9], back) == hgg.config_for_ragged_dot(lhs, stored.transpose(0, 2, 1), [9, 9, 9])


@pytest.mark.parametrize("name", ["lhs", "rhs", "group_sizes", "out", "c", "bias"])
@pytest.mark.parametrize("what", ["negative", "no multiple"])
def test_strides_that_are_refused_with_a_reason(name, what, rng):
    arrays = {
        "lhs": random_values(rng, (20, 7), "float32"),
        "rhs": random_values(rng, (3, 7, 9), "float32"),
        "group_sizes": np.array([5, 9, 4], np.int32),
        "out": np.zeros((20, 9), np.float32),
        "c": np.zeros((20, 9), np.float32),
        "bias": np.zeros((3, 9), np.float32),
    }
    if what == "negative":
        arrays[name] = arrays[name][..., ::-1]
    else:
        fields = np.zeros(arrays[name].shape, [("pad", "i1"), ("value", arrays[name].dtype)])
        arrays[name] = fields["value"]
    stride = arrays[name].strides[-1]
    with pytest.raises(ValueError) as caught:
        hgg.ragged_dot(**arrays, beta=1)
    for word in (f"{name}:", str(stride), "negative" if what == "negative" else "multiple of the item size, 4", "copy"):
        assert word in str(caught.value)


def test_strides_along_axes_of_one_element_say_nothing(rng):
    lhs, rhs = random_values(rng, (1, 7), "float32"), random_values(rng, (1, 7, 9), "float32")
    plain = hgg.ragged_dot(lhs, rhs, [1])
    for stride in (-4, 3, 0, 10**9):
        odd = as_strided(lhs, lhs.shape, (stride, 4)), as_strided(rhs, rhs.shape, (stride, 36, 4))
        np.testing.assert_array_equal(hgg.ragged_dot(*odd, [1]), plain)
    empty = np.zeros((0, 7), np.float32)[:, ::-1]
    assert hgg.ragged_dot(empty, rhs, [0]).shape == (0, 9)


def test_one_expert_for_all_and_one_row_for_all(rng):
    """Inputs of stride 0."""
    lhs, rhs = random_values(rng, (30, 8), "float32"), random_values(rng, (1, 8, 5), "float32")
    got = hgg.ragged_dot(lhs, np.broadcast_to(rhs, (3, 8, 5)), [10, 0, 20])
    np.testing.assert_allclose(got, lhs @ rhs[0], rtol=1e-5, atol=1e-5)
    row = np.broadcast_to(lhs[:1], (30, 8))
    np.testing.assert_allclose(hgg.ragged_dot(row, rhs, [30]), np.broadcast_to(lhs[:1] @ rhs[0], (30, 5)), rtol=1e-5, atol=1e-5)
    c = np.broadcast_to(np.float32(3), (30, 5))
    np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, [0], c=c, beta=2), np.full((30, 5), 6))


def test_sizes_shared_along_an_axis_that_merges_with_one_that_has_its_own(rng):
    """Batch axes that lie as one in memory, sizes of stride 0 or length 1 along them."""
    numbers = hgg.RaggedDotDimensionNumbers((((3,), (1,)), ((), ())), (1,), (0,))  # lhs (x, m, y, k): sizes (x, g)
    stored = random_values(rng, (9, 2, 3, 7), "float32")  # (m, x, y, k)
    rhs = random_values(rng, (2, 7, 5), "float32")
    lhs = stored.transpose(1, 0, 2, 3)
    for lead in (1, 2):
        part = lhs[:lead]
        shared = np.broadcast_to(np.array([4, 3], np.int32), (lead, 2))
        wanted = hgg.ragged_dot_general(part, rhs, [4, 3], numbers)
        np.testing.assert_array_equal(hgg.ragged_dot_general(part, rhs, shared, numbers), wanted)
        np.testing.assert_array_equal(hgg.ragged_dot_general(part, rhs, shared.copy(), numbers), wanted)
        for sizes in (shared, shared.copy()):
            out = np.full((9, 2, 3, 5), np.nan, np.float32).transpose(1, 0, 2, 3)[:lead]
            hgg.ragged_dot_general(part, rhs, sizes, numbers, out=out)
            np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
        merged = hgg.config_for_ragged_dot(part, rhs, shared, numbers, out=out)
        assert (merged.batch_count, merged.sizes_per_batch) == (3 * lead, lead == 2)


# ---- overlap -------------------------------------------------------------------------------------------------------------------


def test_out_may_not_share_memory_with_an_input(rng):
    buffer = random_values(rng, (40, 16), "float32")
    rhs, sizes = random_values(rng, (2, 8, 8), "float32"), np.array([20, 20], np.int32)
    lhs = buffer[:, :8]
    for out in (buffer[:, :8], buffer[:, 4:12], buffer[:, 7:15], buffer.reshape(80, 8)[:40]):
        with pytest.raises(ValueError, match="out: shares memory with lhs"):
            hgg.ragged_dot(lhs, rhs, sizes, out=out)
    weights = random_values(rng, (2, 8, 8), "float32")
    with pytest.raises(ValueError, match="out: shares memory with rhs"):
        hgg.ragged_dot(lhs[:16], weights, [8, 8], out=weights.reshape(16, 8))
    with pytest.raises(ValueError, match="out: shares memory with bias"):
        hgg.ragged_dot(lhs[:2], rhs, [1, 1], out=weights[0, :2], bias=weights[0, 1:3])
    numbers = np.zeros(16, np.float32)
    with pytest.raises(ValueError, match="out: shares memory with group_sizes"):
        hgg.ragged_dot(lhs[:2], rhs, numbers[:2].view(np.int32), out=numbers.reshape(2, 8))
    with pytest.raises(ValueError, match="out: shares memory with offs"):
        hgg.ragged_dot(lhs[:2], rhs, offs=numbers[:2].view(np.int32), out=numbers.reshape(2, 8))


def test_c_may_be_out_exactly_or_not_at_all(rng):
    lhs, rhs, sizes = random_values(rng, (20, 7), "float32"), random_values(rng, (2, 7, 5), "float32"), [10, 10]
    buffer = np.ones((24, 5), np.float32)
    out = buffer[:20]
    wanted = hgg.ragged_dot(lhs, rhs, sizes) + 1
    hgg.ragged_dot(lhs, rhs, sizes, out=out, c=buffer[:20], beta=1)  # another view of the same elements
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    for c in (buffer[1:21], buffer[4:], as_strided(buffer, (20, 5), (0, 4))):
        for beta in (0, 1):
            with pytest.raises(ValueError, match="out: shares memory with c without being exactly c"):
                hgg.ragged_dot(lhs, rhs, sizes, out=out, c=c, beta=beta)


def test_what_only_looks_like_overlap_is_taken(rng):
    """Interleaved in one buffer, yet no element shared."""
    rhs, sizes = random_values(rng, (2, 8, 8), "float32"), np.array([20, 20], np.int32)
    lhs = random_values(rng, (40, 8), "float32")
    wanted = hgg.ragged_dot(lhs, rhs, sizes)
    columns = np.full((40, 16), np.nan, np.float32)
    columns[:, :8] = lhs
    hgg.ragged_dot(columns[:, :8], rhs, sizes, out=columns[:, 8:])
    np.testing.assert_array_equal(columns[:, 8:], wanted)
    np.testing.assert_array_equal(columns[:, :8], lhs)
    steps = np.full((40, 16), np.nan, np.float32)
    steps[:, ::2] = lhs
    hgg.ragged_dot(steps[:, ::2], rhs, sizes, out=steps[:, 1::2])
    np.testing.assert_allclose(steps[:, 1::2], wanted, rtol=1e-5, atol=1e-5)
    rows = np.full((80, 8), np.nan, np.float32)
    rows[1::2] = lhs
    hgg.ragged_dot(rows[1::2], rhs, sizes, out=rows[::2])
    np.testing.assert_array_equal(rows[::2], wanted)
    behind = np.full((80, 8), np.nan, np.float32)
    behind[:40] = lhs
    hgg.ragged_dot(behind[:40], rhs, sizes, out=behind[40:])
    np.testing.assert_array_equal(behind[40:], wanted)


def test_a_workspace_is_nobody_elses_memory(rng):
    memory = np.zeros(4096, np.uint8)
    lhs, out = memory[:96].view(np.float32).reshape(8, 3), memory[1024 : 1024 + 160].view(np.float32).reshape(8, 5)
    rhs = random_values(rng, (2, 3, 5), "float32")
    for start, name in ((90, "lhs"), (1100, "out"), (0, "lhs")):
        with pytest.raises(ValueError, match=f"workspace: shares memory with {name}"):
            hgg.ragged_dot(lhs, rhs, [4, 4], out=out, workspace=memory[start : start + 64])
    frozen = memory[2048:].copy()
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="workspace: is read-only"):
        hgg.ragged_dot(lhs, rhs, [4, 4], out=out, workspace=frozen)
    hgg.ragged_dot(lhs, rhs, [4, 4], out=out, workspace=memory[2048:])


def test_out_may_not_overlap_itself(rng):
    lhs, rhs = random_values(rng, (4, 3), "float32"), random_values(rng, (2, 3, 5), "float32")
    memory = np.zeros(100, np.float32)
    for strides in ((0, 4), (4, 4), (16, 4), (20, 0), (4, 12)):
        with pytest.raises(ValueError, match="out: its elements overlap"):
            hgg.ragged_dot(lhs, rhs, [2, 2], out=as_strided(memory, (4, 5), strides))
    numbers = hgg.RaggedDotDimensionNumbers((((3,), (1,)), ((), ())), (1,), (0,))
    with pytest.raises(ValueError, match="out: its elements overlap"):  # where operands do not collapse to a config as well
        hgg.ragged_dot_general(
            np.ones((2, 3, 4, 5), "f4"), np.ones((2, 5, 3), "f4"), [1, 2], numbers, out=as_strided(memory, (2, 3, 4, 3), (0, 48, 12, 4))
        )
    assert hgg.ragged_dot(lhs[:1], rhs, [1, 0], out=as_strided(memory, (1, 5), (0, 4))).shape == (1, 5)
    assert not memory[5:].any()


# ---- isolation of NaN ----------------------------------------------------------------------------------------------------------


@RAGGED
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_of_one_group_stays_there(mode, dtype, poison, rng):
    sizes = np.array([33, 0, 37, 5], np.int32)
    starts = np.cumsum(sizes) - sizes
    extents = (80, 6, 8) if mode is NON_CONTRACTING else (6, 8, 80)
    clean = make_problem(rng, mode, *extents, sizes, dtype)
    wanted = clean.run()
    for group, where in itertools.product((0, 2, 3), ("lhs", "rhs")):
        problem = make_problem(rng, mode, *extents, sizes, dtype)
        values = {"lhs": clean.lhs.values.copy(), "rhs": clean.rhs.values.copy()}
        rows = slice(starts[group], starts[group] + sizes[group])
        if where == "rhs" and mode is NON_CONTRACTING:
            values["rhs"][group] = poison
        else:
            values[where][rows] = poison
        problem.lhs, problem.rhs = Operand(values["lhs"]), Operand(values["rhs"])
        result = problem.run().astype(np.float64)
        mine = np.zeros(len(result), bool)
        mine[rows if mode is NON_CONTRACTING else group] = True
        assert not np.isfinite(result[mine]).any(), "poison must not be lost either"
        np.testing.assert_array_equal(result[~mine], wanted.astype(np.float64)[~mine])


def test_recycled_memory_never_shows(rng):
    """A result without out= comes from memory that may hold anything; uncovered rows and empty slabs must be written all the same."""
    for mode, extents in ((NON_CONTRACTING, (512, 64, 8)), (CONTRACTING, (64, 8, 512))):
        for _ in range(5):
            dirty = [np.full((512, 64), np.nan, np.float32) for _ in range(4)]
            del dirty
            result = make_problem(rng, mode, *extents, [10, 0, 3, 0, 0, 0, 0, 0], give_out=False).check()
            assert np.isfinite(result).all()


# ---- extents of 0 --------------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_extent_may_be_zero(mode, dtype, rng):
    """m, n, k, groups and batch, each 0 or not, with and without out, c and bias."""
    for m, n, k, groups, batch in itertools.product((0, 3), (0, 5), (0, 7), (0, 2), (None, 0, 2)):
        if mode is Mode.BATCH and batch is None:
            continue
        rows = k if mode is CONTRACTING else m
        sizes = random_sizes(rng, rows, groups)
        for give_out, c, bias in ((True, None, False), (False, "array", False), (True, "out", False), (True, None, True)):
            if bias and (mode is not NON_CONTRACTING or batch is not None):
                continue
            beta = 0.5 if c else 0
            make_problem(rng, mode, m, n, k, sizes, dtype, batch=batch, give_out=give_out, c=c, beta=beta, bias=bias).check()


def test_zero_groups_leave_nothing_but_the_tail(rng):
    c = random_values(rng, (6, 5), "float32")
    lhs, rhs = np.full((6, 3), np.nan, np.float32), np.zeros((0, 3, 5), np.float32)
    for sizes in ([], np.zeros(0, np.int64)):
        np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, sizes), np.zeros((6, 5)))
        np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, sizes, c=c, beta=2), 2 * c)


# ---- far addresses -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sparse(tmp_path):
    """Makes a large array of zeros in a sparse file: it takes address space, and disk only where it is written."""
    maps = []

    def make(elements, dtype):
        path = tmp_path / f"sparse{len(maps)}"
        with path.open("wb") as file:
            file.truncate(elements * dtype.itemsize)
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 0))
        return np.ndarray(elements, dtype, maps[-1]), path

    return make


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_experts_past_2_to_the_32_elements(dtype, sparse, rng):
    kind, stride = dtype_of(dtype), 2**31 + 64
    flat, path = sparse(2 * stride + 64 * 64, kind)
    rhs = as_strided(flat, (3, 64, 64), (stride * kind.itemsize, 64 * kind.itemsize, kind.itemsize))
    weights = random_values(rng, (64, 64), dtype)
    rhs[2] = weights
    lhs = random_values(rng, (16, 64), dtype)
    got = hgg.ragged_dot(lhs, rhs, [0, 0, 16], preferred_element_type=np.float32)
    np.testing.assert_array_equal(got, hgg.ragged_dot(lhs, weights[None], [16], preferred_element_type=np.float32))
    assert got.any()
    config = hgg.config_for_ragged_dot(lhs, rhs, [0, 0, 16])
    assert config.stride_group_dim == stride
    with hgg.GroupedMatmulPlan(config, device="cpu") as plan:
        assert plan.execute(lhs, rhs, [0, 0, 16]).astype(np.float32).any()
    assert os.stat(path).st_blocks * 512 < 2**24, "the file was to stay sparse"


def test_rows_and_slabs_past_2_to_the_32_elements(sparse, rng):
    kind = dtype_of("float16")
    far = 2**32 + 8
    flat, _ = sparse(far * 2 + 4096, kind)
    lhs = as_strided(flat, (3, 8), (far * 2, 2))
    lhs[2] = 1
    rhs = random_values(rng, (1, 8, 4), "float16")
    np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, [3])[2], hgg.ragged_dot(np.ones((1, 8), kind), rhs, [1])[0])
    slabs, _ = sparse(far * 2 + 4096, kind)
    out = as_strided(slabs, (3, 2, 4), (far * 2, 8, 2))
    tokens, gradients = random_values(rng, (6, 2), "float16"), random_values(rng, (6, 4), "float16")
    hgg.ragged_dot_general(tokens, gradients, [2, 2, 2], WEIGHT_GRADIENT, out=out)
    np.testing.assert_array_equal(out, hgg.ragged_dot_general(tokens, gradients, [2, 2, 2], WEIGHT_GRADIENT))
    assert out[2].any()
