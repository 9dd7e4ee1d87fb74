"""The group sizes of tuning: the seed, the caller's samples, the adversarial ones, classes; and poison where sizes read nothing."""

from __future__ import annotations

import numpy as np
import pytest
from generators import BATCH, FORWARD, FORWARD_BATCHED, WEIGHT_GRADIENT
from harness_contract import Case, case_list, offset_config

import hipgroupgemm as hgg
from hipgroupgemm.measure.check import bounds_of
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.layouts import Layout, layouts_of
from hipgroupgemm.measure.sizes import adversarial_sizes, origin_of, seed_sizes, size_class, size_class_of, size_samples
from hipgroupgemm.measure.verify import group_parts, size_sets, unread_parts

EXTENTS = [(0, 0), (0, 3), (1, 1), (1, 5), (2, 1), (3, 9), (5, 2), (7, 3), (1002, 4), (640, 128), (100_000, 8), (130, 130), (129, 130)]


def forward(m=1002, groups=4):
    lhs, rhs = hgg.ArraySpec((m, 8), "float32"), hgg.ArraySpec((groups, 8, 8), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((groups,), np.int32), FORWARD)


def per_batch(m=10, groups=3):
    lhs, rhs = hgg.ArraySpec((2, m, 8), "float32"), hgg.ArraySpec((groups, 2, 8, 8), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((2, groups), np.int32), FORWARD_BATCHED)


# ---- the seed ------------------------------------------------------------------------------------------------------------------


def test_the_seed_is_balanced_with_the_remainder_in_front():
    assert seed_sizes(forward(1002, 4)).tolist() == [251, 251, 250, 250]
    assert seed_sizes(forward(8, 4)).tolist() == [2, 2, 2, 2]
    assert seed_sizes(forward(2, 4)).tolist() == [1, 1, 0, 0]
    assert seed_sizes(forward(0, 4)).tolist() == [0, 0, 0, 0]
    assert seed_sizes(forward(5, 0)).tolist() == []
    assert seed_sizes(per_batch()).tolist() == [[4, 3, 3], [4, 3, 3]]
    gradient = hgg.config_for_ragged_dot(
        hgg.ArraySpec((11, 9), "float32"), hgg.ArraySpec((11, 7), "float32"), hgg.ArraySpec((3,), np.int32), WEIGHT_GRADIENT
    )
    assert seed_sizes(gradient).tolist() == [4, 4, 3]


def test_huge_extents_keep_their_sizes():
    config = forward(3 << 31, 1)
    assert seed_sizes(config).tolist() == [3 << 31]
    assert adversarial_sizes(3 << 31, 2)["one_group"].tolist() == [0, 3 << 31]
    assert size_samples([[3 << 31]], config)[0].tolist() == [3 << 31]


def test_group_total_counts_the_sizes():
    lhs, rhs = hgg.ArraySpec((10, 8), "float32"), hgg.ArraySpec((2, 8, 8), "float32")
    config = hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((5,), np.int32), FORWARD, group_offset=0)
    assert seed_sizes(config).tolist() == [2, 2, 2, 2, 2]


# ---- the caller's --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [[3, 0, 4, 1], (3, 0, 4, 1), np.array([3, 0, 4, 1], np.uint8), np.array([[3, 0, 4, 1]]), [[3, 0, 4, 1]], [np.array([3, 0, 4, 1])]],
)
def test_one_sample_in_many_forms(given):
    (sample,) = size_samples(given, forward(8, 4))
    assert sample.tolist() == [3, 0, 4, 1]
    assert sample.dtype == np.int32


def test_several_samples():
    several = size_samples([np.array([1, 2, 3, 2]), [8, 0, 0, 0]], forward(8, 4))
    assert [sample.tolist() for sample in several] == [[1, 2, 3, 2], [8, 0, 0, 0]]
    assert len(size_samples(np.ones((7, 4), np.int64), forward(8, 4))) == 7


def test_sizes_per_batch_entry():
    assert size_samples([[1, 2, 3], [4, 5, 1]], per_batch())[0].tolist() == [[1, 2, 3], [4, 5, 1]]
    assert len(size_samples(np.ones((5, 2, 3), int), per_batch())) == 5
    with pytest.raises(TypeError, match=r"got shape \(3,\), wanted \(2, 3\)"):
        size_samples([1, 2, 3], per_batch())


def test_jax_and_torch_like_arrays():
    import jax.numpy as jnp

    assert size_samples(jnp.array([3, 0, 4, 1]), forward(8, 4))[0].tolist() == [3, 0, 4, 1]
    assert len(size_samples([jnp.array([3, 0, 4, 1]), jnp.array([1, 1, 1, 1])], forward(8, 4))) == 2


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([3, 0, 4], TypeError, ("shape (3,)", "(4,)")),
        ([3, 0, 4, 1.0], TypeError, ("got float", "integer")),
        ([True, False, True, False], TypeError, ("bool",)),
        (np.array(["3", "0"]), TypeError, ("integer",)),
        ("3 0 4 1", TypeError, ("str", "one size a group")),
        ([[1, 2], [3]], TypeError, ("group_sizes[0]", "shape (2,)")),
        ([3, -1, 4, 1], ValueError, ("group 1", "negative", "-1")),
        ([[1, 1, 1, 1], [3, 3, 3, 3]], ValueError, ("group_sizes[1]", "group 2", "3 rows wanted, 2 left of 8")),
        ([2**62, 2**62, 2**62, 2**62], ValueError, ("group 0", "runs past")),
        (np.zeros((0, 4), int), ValueError, ("no sample",)),
        ([0, 0, 0, 0], ValueError, ("all groups are empty", "nothing to time")),
        ([[0, 0, 0, 0]] * 3, ValueError, ("all groups are empty", "nothing to time")),
        (7, TypeError, ("shape ()",)),
    ],
)
def test_wrong_sizes_are_refused(given, error, words):
    with pytest.raises(error) as caught:
        size_samples(given, forward(8, 4))
    for word in (*words, "group_sizes"):
        assert word in str(caught.value)


def test_a_wrong_sample_among_several_is_not_told_that_several_may_be_given():
    with pytest.raises(TypeError) as caught:
        size_samples([[4, 4], [1, 2]], forward(8, 4))
    assert str(caught.value) == "group_sizes[0]: got shape (2,), wanted (4,): one size for each of the config's groups"
    assert len(size_samples([[0, 0, 0, 0], [0, 1, 0, 0]], forward(8, 4))) == 2, "a step without rows among real ones"


@pytest.mark.parametrize(
    ("sizes", "named", "wanted"),
    [(None, None, "seed"), ([1], None, "user"), ([1], "zipf", "zipf"), ([1], "user", "user"), (None, "seed", "seed")],
)
def test_where_sizes_come_from(sizes, named, wanted):
    assert origin_of(sizes, named) == wanted


@pytest.mark.parametrize(
    ("sizes", "named", "error"), [(None, "zipf", ValueError), ([1], "seed", ValueError), ([1], " ", ValueError), ([1], 3, TypeError)]
)
def test_origins_that_make_no_sense(sizes, named, error):
    with pytest.raises(error, match=r"^origin"):
        origin_of(sizes, named)


def test_batch_sizes_are_checked_for_shape_only():
    config = hgg.config_for_ragged_dot(
        hgg.ArraySpec((3, 30, 9), "float32"), hgg.ArraySpec((3, 9, 7), "float32"), hgg.ArraySpec((3,), np.int32), BATCH
    )
    assert size_samples([-1, 99, 2**40], config)[0].tolist() == [-1, 99, 2**40]
    assert seed_sizes(config).tolist() == [0, 0, 0]
    assert [one.name for one in size_sets(config, [seed_sizes(config)])] == ["tuning sizes", "sizes that are not read"]


# ---- adversarial ones --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "groups"), EXTENTS)
def test_adversarial_sizes_are_valid_and_adversarial(m, groups):
    found = adversarial_sizes(m, groups)
    assert list(found) == ["borders", "short", "many_empty", "all_empty", "one_group"]
    for sizes in found.values():
        assert sizes.shape == (groups,)
        assert sizes.dtype == np.int32
        assert (sizes >= 0).all()
        assert sizes.sum() <= m
    if not groups:
        return
    assert found["borders"].sum() == m
    assert np.count_nonzero(found["borders"]) == min(m, groups)
    assert not found["all_empty"].any()
    assert found["one_group"].max() == m
    assert np.count_nonzero(found["one_group"]) == min(m, 1)
    if m >= 2:
        assert 0 < found["short"].sum() < m
        assert 0 < found["many_empty"].sum() < m
    if m >= 16 and groups >= 4:
        assert np.count_nonzero(found["many_empty"]) <= -(-groups // 4)
        assert found["many_empty"][0] == found["many_empty"][-1] == 0


def test_adversarial_sizes_are_the_same_every_time():
    first, second = adversarial_sizes(1002, 4), adversarial_sizes(1002, 4)
    assert all((first[name] == second[name]).all() for name in first)


def test_beta_goes_with_the_config():
    c = hgg.ArraySpec((1002, 8), "float32")
    beta = hgg.config_for_ragged_dot(
        hgg.ArraySpec((1002, 8), "float32"), hgg.ArraySpec((4, 8, 8), "float32"), hgg.ArraySpec((4,), np.int32), c=c, beta=0.25
    )
    sets = size_sets(beta, size_samples(None, beta))
    assert all(one.beta != 0 for one in sets)
    assert {one.beta for one in sets} >= {1.0, 0.5}
    assert {one.alpha for one in sets} >= {1.0, -1.5}
    assert all(one.beta == 0 for one in size_sets(forward(), size_samples(None, forward())))


def test_batch_entries_differ():
    sets = {one.name: one.sizes for one in size_sets(per_batch(), size_samples(None, per_batch()))}
    assert sets["one_group"].tolist() == [[0, 10, 0], [0, 0, 10]]


# ---- classes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "m", "wanted"),
    [
        ([251, 251, 250, 250], 1002, "balanced"),
        ([300, 234, 234, 234], 1002, "balanced"),
        ([315, 229, 229, 229], 1002, "skewed"),  # 1.25 times the mean and one row is 314
        ([251, 251, 250, 249], 1002, "skewed"),  # a row that no group covers
        ([1002, 0, 0, 0], 1002, "sparse"),
        ([501, 501, 0, 0], 1002, "skewed"),  # half of them are empty, not more
        ([1, 1, 0, 0, 0], 2, "balanced"),  # as even as two rows can be
        ([0, 0, 0, 0], 9, "sparse"),
        ([], 0, "balanced"),
        ([[2, 2], [2, 2]], 4, "balanced"),
        ([[2, 2], [4, 0]], 4, "skewed"),
        ([5, 9], 0, "balanced"),  # BATCH
    ],
)
def test_classes(sizes, m, wanted):
    assert size_class(sizes, m) == wanted


def test_the_class_of_several_samples_is_that_of_most():
    balanced, sparse, skewed = [3, 3, 2], [8, 0, 0], [6, 2, 0]
    assert size_class_of([balanced, balanced, sparse], 8) == "balanced"
    assert size_class_of([balanced, sparse], 8) == "sparse"
    assert size_class_of([balanced, skewed], 8) == "skewed"


# ---- poison --------------------------------------------------------------------------------------------------------------------


def read_elements(config, sizes, offset):
    """By operand: which elements a right kernel may read, from the definition alone."""
    batch, groups = config.batch_count, config.group_count
    chosen = slice(offset, offset + groups)
    ends = np.broadcast_to(np.cumsum(sizes, axis=-1), (batch, config.group_total))[:, chosen]
    sizes = np.broadcast_to(sizes, (batch, config.group_total))[:, chosen]
    lhs, rhs = np.zeros((batch, config.m, config.k), bool), np.zeros((groups, batch, config.k, config.n), bool)
    contracting = config.ragged_mode is hgg.RaggedDotMode.CONTRACTING
    if contracting:
        rhs = rhs[:1]
    for entry in range(batch):
        for group in range(groups):
            rows = slice(int(ends[entry, group] - sizes[entry, group]), int(ends[entry, group]))
            if contracting:
                lhs[entry, :, rows] = True
                rhs[0, entry, rows] = True
            elif rows.stop > rows.start:
                lhs[entry, rows] = True
                rhs[group, entry] = True
    return {"lhs": lhs[None], "rhs": rhs}


CASES = [case for case in case_list() if case.config.ragged_mode is not hgg.RaggedDotMode.BATCH]
CASES += [Case("offset", offset_config(), [4] * 7), Case("offset gradient", offset_config(WEIGHT_GRADIENT), [4] * 7)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_poison_is_where_nothing_is_read_and_nowhere_else(case):
    config = case.config
    shared = any(0 in (s for s, e in zip(la.strides, la.shape, strict=True) if e > 1) for la in layouts_of(config).values())
    with harness_for("cpu") as bench:
        operands = bench.operands(config, seed=3)
        before = {name: bench.values(operands, name) for name in operands.layouts}
        for one in size_sets(config, [seed_sizes(config)])[1:]:
            if one.config is not None:
                continue
            bench.renew(operands, seed=3)
            for part in unread_parts(config, one.sizes, one.group_offset):
                bench.fill(operands, *part)
            read = read_elements(config, one.sizes, one.group_offset)
            if one.spoiled is not None:
                spoiled, _ = group_parts(config, one.sizes, one.group_offset, one.spoiled)
                for part in spoiled:
                    bench.fill(operands, *part)
                if config.ragged_mode is hgg.RaggedDotMode.NON_CONTRACTING:
                    read["rhs"][one.spoiled] = False
                for name, rows in spoiled_rows(config, one).items():
                    read[name] &= ~rows
            for name, wanted in read.items():
                values = bench.values(operands, name)
                np.testing.assert_array_equal(values[wanted], before[name][wanted])
                if not shared:
                    assert np.isnan(values[~wanted].astype(np.float64)).all()
            for name in operands.layouts.keys() - {"lhs", "rhs"}:
                np.testing.assert_array_equal(bench.values(operands, name).view(np.uint8), before[name].view(np.uint8))


def spoiled_rows(config, one):
    """By operand with a ragged axis: the elements of the group that is full of NaN."""
    sizes = np.broadcast_to(one.sizes, (config.batch_count, config.group_total))
    ends = np.cumsum(sizes, axis=1)[:, one.group_offset + one.spoiled]
    rows = np.arange(config.ragged_extent)
    mine = (rows < ends[:, None]) & (rows >= ends[:, None] - sizes[:, one.group_offset + one.spoiled, None])
    if config.ragged_mode is hgg.RaggedDotMode.NON_CONTRACTING:
        return {"lhs": mine[None, :, :, None]}
    return {"lhs": mine[None, :, None, :], "rhs": mine[None, :, :, None]}


def test_what_is_read():
    config = forward(40, 4)
    starts, ends = bounds_of(config, [10, 0, 0, 10])
    assert (starts.tolist(), ends.tolist()) == ([[0, 10, 10, 10]], [[10, 10, 10, 20]])


def test_offsets_move_what_is_read():
    config = offset_config()
    starts, ends = bounds_of(config, [5, 6, 7, 0, 1, 2, 3], 2)
    assert (starts.tolist(), ends.tolist()) == ([[11, 18, 18]], [[18, 18, 19]])
    sets = size_sets(config, [seed_sizes(config)])
    assert [one.group_offset for one in sets][:7] == [0, 4, 0, 2, 4, 0, 2]
    assert "group_offset=4" in sets[1].describe()


def test_c_may_be_out():
    c = hgg.ArraySpec((40, 7), "float32")
    sets = size_sets(offset_config(c=c, beta=1.0), [seed_sizes(offset_config())])
    assert {one.name for one in sets if one.in_place} == {"borders", "many_empty"}
    assert "c is out" in sets[1].describe()
    padded = hgg.ArraySpec((40, 7), "float32", strides=(4 * 11, 4))
    assert not any(one.in_place for one in size_sets(offset_config(c=padded, beta=1.0), [seed_sizes(offset_config())]))


@pytest.mark.parametrize(
    ("strides", "nested"), [((0, 0, 4, 1), True), ((0, 0, 1, 4), True), ((0, 0, 6, 1), True), ((0, 0, 1, 2), False), ((0, 0, 0, 1), False)]
)
def test_parts_are_written_where_axes_lie_inside_each_other(strides, nested):
    """Rows one element apart lie inside each other's columns: nothing of such an operand is poisoned."""
    assert Layout((1, 1, 4, 4), strides, np.dtype(np.float32), 4).nested == nested
