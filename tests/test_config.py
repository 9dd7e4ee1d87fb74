"""GroupedGemmConfig: fields and their rules, JSON, keys, capacities, FLOPs and least bytes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest
from generators import FORWARD, FORWARD_BATCHED, WEIGHT_GRADIENT, Layout, Mode, make_problem, random_layout, random_sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import group_rows

import hipgroupgemm as hgg
from hipgroupgemm.config import FLOAT32_MAX, capacity_of

Spec = hgg.ArraySpec


def forward_config(m=40, n=24, k=16, groups=3, dtype="bfloat16", **changes):
    return hgg.config_for_ragged_dot(Spec((m, k), dtype), Spec((groups, k, n), dtype), Spec((groups,), "int32"), FORWARD, **changes)


def gradient_config(rows=40, m=16, n=24, groups=3, dtype="bfloat16", **changes):
    return hgg.config_for_ragged_dot(Spec((rows, m), dtype), Spec((rows, n), dtype), Spec((groups,), "int32"), WEIGHT_GRADIENT, **changes)


def config_of(problem):
    arguments = problem.arguments()
    for name in ("tail", "check"):
        arguments.pop(name, None)
    return hgg.config_for_ragged_dot(**arguments, out=None if problem.out is None else problem.out.array)


# ---- fields --------------------------------------------------------------------------------------------------------------------


def test_the_fields_of_a_forward_problem():
    config = forward_config(alpha=0.5)
    assert (config.ragged_mode, config.m, config.n, config.k, config.batch_count) == (Mode.NON_CONTRACTING, 40, 24, 16, 1)
    assert (config.group_count, config.group_total, config.sizes_per_batch) == (3, 3, False)
    assert (config.trans_a, config.trans_b, config.must_swap_operands) == (False, False, True)
    assert (config.lhs_leading_dim_stride, config.rhs_leading_dim_stride, config.output_leading_dim_stride) == (16, 24, 24)
    assert (config.lhs_inner_stride, config.rhs_inner_stride, config.output_inner_stride) == (1, 1, 1)
    assert (config.stride_ragged_dim, config.stride_group_dim, config.output_stride_ragged_dim) == (16, 16 * 24, 24)
    assert (config.type_a, config.type_b, config.type_c, config.type_d, config.compute_type) == ("bfloat16",) * 4 + ("float32",)
    assert (config.alpha, config.beta, config.epilogue) == (0.5, 0.0, hgg.Epilogue.DEFAULT)
    assert (config.lhs_alignment, config.rhs_alignment, config.output_alignment) == (16, 16, 16)


def test_the_fields_of_a_weight_gradient():
    config = gradient_config(preferred_element_type=np.float32)
    assert (config.ragged_mode, config.m, config.n, config.k, config.ragged_extent) == (Mode.CONTRACTING, 16, 24, 40, 40)
    assert (config.trans_a, config.trans_b, config.must_swap_operands) == (True, False, True)
    assert (config.lhs_leading_dim_stride, config.rhs_leading_dim_stride, config.output_leading_dim_stride) == (16, 24, 24)
    assert (config.stride_ragged_dim, config.stride_group_dim, config.output_stride_ragged_dim) == (16, 24, 16 * 24)
    assert (config.type_a, config.type_d) == ("bfloat16", "float32")


def test_strides_by_axis_are_those_of_the_arrays(rng):
    """(group, batch, m, n) and so on, whatever order the arrays' axes have in memory."""
    for mode in Mode:
        for _ in range(20):
            layouts = {name: Layout(tuple(int(i) for i in rng.permutation(3))) for name in ("lhs", "rhs", "out")}
            layouts["rhs"] = Layout(tuple(int(i) for i in rng.permutation(4 if mode is Mode.NON_CONTRACTING else 3)))
            layouts["out"] = Layout(tuple(int(i) for i in rng.permutation(4 if mode is Mode.CONTRACTING else 3)))
            problem = make_problem(rng, mode, 6, 5, 7, [2, 3], batch=3, layouts=layouts)
            config = config_of(problem)
            item = problem.lhs.dtype.itemsize
            lhs = [stride // item for stride in problem.lhs.array.strides]
            rhs = [stride // item for stride in problem.rhs.array.strides]
            out = [stride // item for stride in problem.out.array.strides]
            if mode is Mode.NON_CONTRACTING:
                assert config.rhs_strides == tuple(rhs)
            else:
                assert config.rhs_strides == (0, *rhs)
            assert config.lhs_strides == ((lhs[0], lhs[2], lhs[1]) if mode is Mode.CONTRACTING else tuple(lhs))
            assert config.output_strides == (tuple(out) if mode is Mode.CONTRACTING else (0, *out))
            assert config.c_strides == config.output_strides


@pytest.mark.parametrize(
    ("lead", "row", "wanted"), [(8, 16, 16), (4, 16, 8), (2, 16, 4), (1, 16, 2), (8, 17, 2), (8, 18, 4), (8, 20, 8), (4, 17, 2)]
)
def test_alignment_is_what_divides_address_and_rows(lead, row, wanted, rng):
    base = np.zeros(4096, np.uint16)
    start = (-base.ctypes.data // 2) % 8 + lead  # an address of that many elements past a multiple of 16 bytes
    lhs = hgg.as_array(np.ndarray((40, 16), np.uint16, base, start * 2, (row * 2, 2)), "bfloat16")
    config = hgg.config_for_ragged_dot(lhs, Spec((3, 16, 24), "bfloat16"), Spec((3,), "int32"))
    assert config.lhs_alignment == wanted
    assert config.rhs_alignment == 16


CHANGES = [
    ({"m": -1}, ValueError, ("m=-1", "negative")),
    ({"n": 1.0}, TypeError, ("n=1.0", "int")),
    ({"k": True}, TypeError, ("k=True", "int")),
    ({"batch_count": "1"}, TypeError, ("batch_count='1'", "int")),
    ({"group_count": 1 << 63}, ValueError, ("group_count", "63 bits")),
    ({"group_total": 2}, ValueError, ("group_total=2", "group_count=3")),
    ({"trans_a": 1}, TypeError, ("trans_a=1", "bool")),
    ({"lhs_inner_stride": 20}, ValueError, ("trans_a=False", "inner axis", "16 and 20")),
    ({"trans_a": True}, ValueError, ("stride_ragged_dim=16", "must be 1")),
    ({"rhs_inner_stride": 30}, ValueError, ("trans_b=False", "inner axis", "24 and 30")),
    ({"output_inner_stride": 30}, ValueError, ("must_swap_operands=True", "inner axis", "24 and 30")),
    ({"alpha": float("nan")}, ValueError, ("alpha=nan", "finite")),
    ({"beta": float("inf")}, ValueError, ("beta=inf", "finite")),
    ({"alpha": 1j}, TypeError, ("alpha=1j", "real")),
    ({"beta": None}, TypeError, ("beta=None", "real")),
    ({"type_a": "int8"}, ValueError, ("type_a='int8'", "bfloat16")),
    ({"type_b": np.float32}, TypeError, ("type_b", "name")),
    ({"type_c": "float32"}, ValueError, ("type_c=float32", "type_d=bfloat16")),
    ({"type_a": "float64"}, ValueError, ("compute_type=float32", "float64")),
    ({"compute_type": "float64"}, ValueError, ("compute_type=float64", "bfloat16")),
    ({"compute_type": "tf32"}, ValueError, ("compute_type=tf32", "float32", "bfloat16")),
    ({"compute_type": "float16"}, ValueError, ("compute_type='float16'", "float32")),
    ({"compute_precision": 3}, ValueError, ("compute_precision=3", "0 (default)")),
    ({"precision_algorithm": "ALG_DOT_ANY"}, ValueError, ("precision_algorithm='ALG_DOT_ANY'", "ALG_UNSET")),
    ({"ragged_mode": "non_contracting"}, TypeError, ("ragged_mode", "RaggedDotMode")),
    ({"epilogue": "bias"}, TypeError, ("epilogue", "Epilogue")),
    ({"lhs_alignment": 3}, ValueError, ("lhs_alignment=3", "1, 2, 4, 8 or 16")),
    ({"c_alignment": 32}, ValueError, ("c_alignment=32", "1, 2, 4, 8 or 16")),
    ({"output_alignment": 0}, ValueError, ("output_alignment=0", "1, 2, 4, 8 or 16")),
    ({"stride_ragged_dim": 17}, ValueError, ("stride_ragged_dim=17", "16", "NON_CONTRACTING")),
    ({"output_stride_ragged_dim": 25}, ValueError, ("output_stride_ragged_dim=25", "24")),
    ({"c_stride_ragged_dim": 25}, ValueError, ("c_stride_ragged_dim=25", "24")),
    ({"output_leading_dim_stride": 23, "output_stride_ragged_dim": 23}, ValueError, ("output_leading_dim_stride=23", "overlap")),
    ({"lhs_batch_stride": -8}, ValueError, ("lhs_batch_stride=-8", "negative")),
    ({"sizes_per_batch": 0}, TypeError, ("sizes_per_batch=0", "bool")),
]


@pytest.mark.parametrize(("changes", "kind", "words"), CHANGES, ids=str)
def test_validation_names_field_value_and_rule(changes, kind, words):
    with pytest.raises(kind) as caught:
        dataclasses.replace(forward_config(), **changes)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_validation_of_the_other_modes():
    with pytest.raises(ValueError, match=r"epilogue\.bias: only NON_CONTRACTING"):
        dataclasses.replace(gradient_config(), epilogue=hgg.Epilogue.BIAS)
    with pytest.raises(ValueError, match=r"stride_group_dim=1: must be 24 in CONTRACTING"):
        dataclasses.replace(gradient_config(), stride_group_dim=1)
    with pytest.raises(ValueError, match="overlap"):
        dataclasses.replace(gradient_config(), output_stride_ragged_dim=100)
    with pytest.raises(TypeError, match="unexpected keyword"):
        dataclasses.replace(forward_config(), colour="blue")


def test_operands_that_do_not_collapse_have_no_config():
    numbers = hgg.RaggedDotDimensionNumbers((((1, 2), (1, 2)), ((), ())), (0,), (0,))
    lhs = Spec((6, 4, 5), "float32", strides=(80, 4, 16))  # the contracted axes in another order than rhs has them
    rhs = Spec((2, 4, 5, 3), "float32")
    with pytest.raises(NotImplementedError, match=r"k, of extents \(.*contiguous copy"):
        hgg.config_for_ragged_dot(lhs, rhs, Spec((2,), "int32"), numbers)
    assert hgg.config_for_ragged_dot(Spec((6, 4, 5), "float32"), rhs, Spec((2,), "int32"), numbers).k == 20


# ---- a value -------------------------------------------------------------------------------------------------------------------

configs = st.builds(
    lambda make, rows, a, b, groups, kind, alpha, beta: make(
        rows, a, b, groups, kind, alpha=alpha, beta=beta, c=Spec((rows, a) if make is forward_config else (groups, a, b), kind)
    ),
    st.sampled_from([forward_config, gradient_config]),
    st.integers(0, 3000),
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(0, 9),
    st.sampled_from(["float32", "bfloat16", "float64", "float8_e5m2"]),
    st.floats(-FLOAT32_MAX, FLOAT32_MAX),
    st.floats(-FLOAT32_MAX, FLOAT32_MAX),
)


@settings(max_examples=150, deadline=None)
@given(configs)
def test_json_pickle_and_copies_are_exact(config):
    for other in (
        hgg.GroupedGemmConfig.from_json(config.to_json()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        dataclasses.replace(config),
    ):
        assert other is not config
        assert other == config
        assert hash(other) == hash(config)
        assert {name: repr(value) for name, value in dataclasses.asdict(other).items()} == {
            name: repr(value) for name, value in dataclasses.asdict(config).items()
        }
        assert other.key() == config.key()
        assert hash(other.key()) == hash(config.key())
    assert config.key().key() == config.key()
    assert len({config, dataclasses.replace(config)}) == 1


def test_cached_values_do_not_travel_with_a_pickle():
    config = forward_config()
    plain = pickle.dumps(config)
    config.key(), hash(config), config.lhs_strides
    assert pickle.dumps(config) == plain


def test_equality_is_by_value_and_by_every_field():
    config = forward_config()
    other = {"m": 41, "alpha": 2.0, "type_a": "float16", "compute_precision": 1, "lhs_alignment": 8, "epilogue": hgg.Epilogue.BIAS}
    for name, value in other.items():
        changed = dataclasses.replace(config, **{name: value})
        assert changed != config
        assert hash(changed) != hash(config)
    assert config != "config"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.m = 3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[]", "version"),
        ("{}", "version"),
        (json.dumps({"version": 1}), "version"),
        (json.dumps({"version": 2, "m": 3}), "missing"),
    ],
)
def test_what_is_no_config_in_json(text, word):
    with pytest.raises(ValueError, match=word):
        hgg.GroupedGemmConfig.from_json(text)


def test_json_is_validated_as_any_config():
    data = json.loads(forward_config().to_json())
    for changes, word in [
        ({"m": -4}, "m=-4"),
        ({"m": "4"}, "m='4'"),
        ({"ragged_mode": ["sideways"]}, "sideways"),
        ({"alpha": "2"}, "alpha='2'"),
        ({"colour": 1}, "colour"),
    ]:
        with pytest.raises(ValueError, match=word):
            hgg.GroupedGemmConfig.from_json(json.dumps({**data, **changes}))


# ---- capacity and key ----------------------------------------------------------------------------------------------------------


def test_capacity_has_eight_steps_an_octave_and_adds_an_eighth_at_the_most():
    capacities = [capacity_of(extent) for extent in range(0, 70_000)]
    for extent, capacity in enumerate(capacities):
        assert extent <= capacity <= extent + extent // 8
        assert capacity_of(capacity) == capacity
    assert capacities == sorted(capacities)
    for octave in range(4, 16):
        assert len({capacity_of(extent) for extent in range(2**octave + 1, 2 ** (octave + 1) + 1)}) == 8
    for extent in (2**31 - 1, 2**40 + 1, 2**62 - 1):
        assert extent <= capacity_of(extent) <= extent + extent // 8


@settings(max_examples=100, deadline=None)
@given(configs, st.integers(0, 5000))
def test_a_key_is_the_config_without_what_may_vary(config, more):
    key = config.key()
    assert key.ragged_extent == config.capacity == capacity_of(config.ragged_extent)
    assert key.alpha == 1
    assert key.beta == (1 if config.beta else 0)
    for field in ("n", "k") if config.ragged_mode is Mode.NON_CONTRACTING else ("m", "n"):
        assert getattr(key, field) == getattr(config, field)
    assert dataclasses.replace(config, alpha=3.25).key() == key
    if config.beta:
        assert dataclasses.replace(config, beta=-7.5).key() == key
    larger = config.key(config.ragged_extent + more)
    assert larger.ragged_extent == config.ragged_extent + more
    assert larger.key(larger.ragged_extent) == larger
    if config.ragged_extent:
        with pytest.raises(ValueError, match=f"capacity={config.ragged_extent - 1}"):
            config.key(config.ragged_extent - 1)


def test_tiny_extents_have_keys_of_any_capacity(rng):
    """Extents of 0 and 1, along which strides say nothing and may tie, in every storage order."""
    for mode in Mode:
        for m, n, k, batch in itertools.product((0, 1, 2), (0, 1, 2), (0, 1, 2), (1, 2)):
            layouts = {name: Layout(tuple(int(i) for i in rng.permutation(3))) for name in ("lhs", "rhs", "out")}
            layouts["rhs"] = Layout(tuple(int(i) for i in rng.permutation(4 if mode is Mode.NON_CONTRACTING else 3)))
            layouts["out"] = Layout(tuple(int(i) for i in rng.permutation(4 if mode is Mode.CONTRACTING else 3)))
            config = config_of(make_problem(rng, mode, m, n, k, [1, 0] if 0 not in (m, k) else [0, 0], batch=batch, layouts=layouts))
            for capacity in range(config.ragged_extent, 5):
                assert config.key(capacity).ragged_extent == (0 if mode is Mode.BATCH else capacity)
                assert config.key(capacity).key(capacity) == config.key(capacity)


def test_packed_column_major_operands_of_one_capacity_share_a_key():
    """Their leading dimension is the ragged extent itself, so it follows the capacity."""
    keys = set()
    for m in range(130, 145):
        lhs = Spec((m, 16), "bfloat16", strides=(2, 2 * m))
        config = hgg.config_for_ragged_dot(lhs, Spec((3, 16, 24), "bfloat16"), Spec((3,), "int32"))
        assert config.trans_a
        keys.add(dataclasses.replace(config.key(), lhs_alignment=1).to_json())
    assert len(keys) == 1


def test_c_is_no_part_of_a_key_whose_beta_is_zero():
    c = Spec((40, 24), "bfloat16", strides=(100, 2))
    plain, with_c = forward_config(), forward_config(c=c, beta=0)
    assert plain.key() == with_c.key()
    assert forward_config(c=c, beta=1).key() != forward_config(c=Spec((40, 24), "bfloat16"), beta=1).key()


@st.composite
def two_problems(draw):
    """Two problems that differ in ragged extent, alpha, beta and values, and perhaps in nothing else."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    mode = draw(st.sampled_from(list(Mode)))
    batch = draw(st.sampled_from([1, 2, 3])) if mode is Mode.BATCH else draw(st.sampled_from([None, None, 1, 2]))
    rows = draw(st.integers(0, 40))
    other = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    groups = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["float32", "bfloat16"]))
    ndim = 2 if batch is None else 3
    ranks = {"lhs": ndim, "rhs": ndim + (mode is Mode.NON_CONTRACTING), "out": ndim + (mode is Mode.CONTRACTING)}
    layouts = {name: random_layout(rng, rank, may_broadcast=name != "out") for name, rank in ranks.items()}
    layouts["c"] = random_layout(rng, ranks["out"])
    per_batch = batch is not None and mode is not Mode.BATCH and draw(st.booleans())
    problems = []
    for _ in range(2):
        extent = draw(st.sampled_from([rows, rows, capacity_of(rows), max(rows - 1, 0), rows + 1]))
        extents = (*other, extent) if mode is Mode.CONTRACTING else (extent, *other)
        shape = (batch, groups) if per_batch else (groups,)
        sizes = np.array([random_sizes(rng, extent, groups) for _ in range(batch if per_batch else 1)]).reshape(shape)
        beta = draw(st.sampled_from([0.0, 1.0, -0.5]))
        own = dict(layouts)
        if draw(st.booleans()):
            own["lhs"] = random_layout(rng, ranks["lhs"])
        problems.append(
            make_problem(
                rng,
                mode,
                *extents,
                sizes,
                kind,
                batch=batch,
                layouts=own,
                c="array" if beta else None,
                alpha=draw(st.sampled_from([1.0, 2.5])),
                beta=beta,
            )
        )
    return problems


def run_by(plan, problem):
    arguments = problem.arguments()
    del arguments["ragged_dot_dimension_numbers"]
    return plan.execute(**arguments, out=problem.out.array)


seen_equal = [0]


@settings(max_examples=120, deadline=None)
@given(two_problems())
def test_problems_of_equal_keys_are_run_by_one_plan(problems):
    first, second = problems
    configs_ = [config_of(problem) for problem in problems]
    plans = [hgg.GroupedMatmulPlan(config, device="cpu") for config in configs_]
    for plan, problem in zip(plans, problems, strict=True):
        problem.check(lambda plan=plan, problem=problem, **_: run_by(plan, problem))
    if configs_[0].key() == configs_[1].key():
        seen_equal[0] += 1
        for plan in plans:
            for problem in (first, second):
                problem.check(lambda plan=plan, problem=problem, **_: run_by(plan, problem))
    for plan in plans:
        plan.close()


def test_the_property_was_tested_at_all():
    """Runs behind the property: it must have met many pairs of equal keys."""
    assert seen_equal[0] >= 10


# ---- work ----------------------------------------------------------------------------------------------------------------------


def counted(problem, config):
    """FLOPs, and bytes of distinct addresses, by going through every element that the definition touches."""
    mode, batch = config.ragged_mode, config.batch_count
    sizes = problem.sizes.values
    item = {name: getattr(problem, name).dtype.itemsize for name in ("lhs", "rhs", "out")}
    reads = {"lhs": set(), "rhs": set(), "c": set(), "bias": set()}
    writes, flops = set(), 0

    def address(strides, *index):
        return sum(int(s) * int(i) for s, i in zip(strides, index, strict=True))

    for b in range(batch):
        if mode is Mode.BATCH:
            spans = [(0, 0, config.m if mode is Mode.BATCH else 0)]
        else:
            row = sizes if sizes.ndim == 1 else sizes[b]
            spans = [(g, start, end) for g, (start, end) in enumerate(group_rows(row, config.ragged_extent))]
        for g, start, end in spans:
            contracting = mode is Mode.CONTRACTING
            ms = range(config.m) if contracting else range(start, end)
            ks = range(start, end) if contracting else range(config.k)
            flops += 2 * len(ms) * len(ks) * config.n
            if len(ms) and len(ks) and config.n:
                reads["lhs"] |= {address(config.lhs_strides, b, i, j) for i in ms for j in ks}
                reads["rhs"] |= {address(config.rhs_strides, g, b, i, j) for i in ks for j in range(config.n)}
            if config.epilogue.bias and len(ms):
                reads["bias"] |= {address((config.bias_group_stride, config.bias_inner_stride), g, j) for j in range(config.n)}
    for g in range(config.group_count if mode is Mode.CONTRACTING else 1):
        for b in range(batch):
            for i in range(config.m):
                for j in range(config.n):
                    writes.add(address(config.output_strides, g, b, i, j))
                    if config.beta:
                        reads["c"].add(address(config.c_strides, g, b, i, j))
    moved = len(reads["lhs"]) * item["lhs"] + len(reads["rhs"]) * item["rhs"]
    return flops, moved + (len(reads["c"]) + len(reads["bias"]) + len(writes)) * item["out"]


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
def test_flops_and_least_bytes_are_those_of_counting(mode, rng):
    for _ in range(60):
        batch = int(rng.integers(1, 4)) if mode is Mode.BATCH or rng.random() < 0.5 else None
        rows, groups = int(rng.integers(0, 12)), int(rng.integers(1, 5))
        other = [int(extent) for extent in rng.integers(0, 5, 2)]
        extents = (*other, rows) if mode is Mode.CONTRACTING else (rows, *other)
        per_batch = batch is not None and mode is not Mode.BATCH and rng.random() < 0.5
        sizes = np.array([random_sizes(rng, rows, groups) for _ in range(batch if per_batch else 1)])
        sizes = sizes if per_batch else sizes[0]
        ndim = 2 if batch is None else 3
        layouts = {
            "lhs": random_layout(rng, ndim, may_broadcast=True),
            "rhs": random_layout(rng, ndim + (mode is Mode.NON_CONTRACTING), may_broadcast=True),
        }
        c = "array" if rng.random() < 0.3 else None
        bias = mode is Mode.NON_CONTRACTING and batch is None and bool(rng.random() < 0.3)
        problem = make_problem(
            rng,
            mode,
            *extents,
            sizes,
            "bfloat16",
            out_dtype="float32",
            batch=batch,
            layouts=layouts,
            c=c,
            beta=1.0 if c else 0.0,
            bias=bias,
        )
        config = config_of(problem)
        flops, moved = counted(problem, config)
        print(config, sizes.tolist())
        assert config.flops(sizes) == flops
        assert config.flops(sizes.tolist()) == flops
        assert config.min_bytes(sizes) == moved


def test_flops_without_sizes_count_every_row():
    assert forward_config(40, 24, 16).flops() == 2 * 40 * 24 * 16
    assert gradient_config(40, 16, 24).flops() == 2 * 40 * 24 * 16
    assert forward_config(40, 24, 16).min_bytes() == 2 * (40 * 16 + 3 * 16 * 24 + 40 * 24)
    batched = hgg.config_for_ragged_dot(Spec((5, 40, 16), "float32"), Spec((3, 5, 16, 24), "float32"), Spec((3,), "int32"), FORWARD_BATCHED)
    assert batched.flops() == 5 * 2 * 40 * 24 * 16
    assert batched.min_bytes() == 4 * 5 * (40 * 16 + 3 * 16 * 24 + 40 * 24)


def test_flops_refuse_the_sizes_that_everything_else_refuses():
    config = forward_config(40, 24, 16)
    assert config.flops() == config.flops(np.array([30, 10, 0])) == 2 * 40 * 24 * 16
    assert config.flops([0, 0, 0]) == 0
    for work in (config.flops, config.min_bytes):
        with pytest.raises(ValueError, match="group 1 has 30 rows, 10 are left of 40"):
            work([30, 30, 0])
        with pytest.raises(ValueError, match="group 0 has -1 rows"):
            work([-1, 5, 0])
        with pytest.raises(TypeError, match="got 2 sizes, wanted 3"):
            work([1, 2])
        with pytest.raises(TypeError, match=r"group 2 has 1\.0, wanted an integer"):
            work([1, 2, 1.0])


def test_with_scalars_is_replace_that_keeps_the_key():
    config = hgg.config_for_ragged_dot(
        Spec((40, 16), "float32"), Spec((3, 16, 24), "float32"), Spec((3,), "int32"), c=Spec((40, 24), "float32"), beta=2
    )
    key, before = config.key(), hash(config)
    other = config.with_scalars(3.0, -1.0)
    assert other == dataclasses.replace(config, alpha=3.0, beta=-1.0)
    assert hash(other) == hash(dataclasses.replace(config, alpha=3.0, beta=-1.0)) != before
    assert other.key() is key
    assert hgg.GroupedGemmConfig.from_json(other.to_json()) == pickle.loads(pickle.dumps(other)) == other
    assert (config.alpha, config.beta, hash(config)) == (1.0, 2.0, before)
    assert config.with_scalars(1.0, 2.0) is config
    with pytest.raises(ValueError, match=r"beta=0\.0: is another key"):
        config.with_scalars(1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"bias": "yes"}, TypeError, "bias='yes'"),
        ({"bias": 1}, TypeError, "bias=1"),
        ({"activation": "mish"}, ValueError, "activation='mish'.*silu.*swiglu_clamped"),
        ({"activation": 3}, TypeError, "activation=3"),
        ({"gate": "thirds"}, ValueError, "gate='thirds'.*halves, interleaved"),
        ({"gate": True}, TypeError, "gate=True"),
        ({"limit": float("nan")}, ValueError, "limit=nan"),
        ({"limit": 0.0}, ValueError, "limit=0.0"),
        ({"limit": 10**400}, ValueError, "limit="),
        ({"limit": "7"}, TypeError, "limit='7'"),
        ({"sigmoid_scale": float("inf")}, ValueError, "sigmoid_scale=inf"),
        ({"sigmoid_scale": True}, TypeError, "sigmoid_scale=True"),
        ({"activation": "swiglu_clamped"}, ValueError, "gate=None"),
    ],
)
def test_fields_of_an_epilogue_are_validated(fields, kind, words):
    with pytest.raises(kind, match=words):
        hgg.Epilogue(**fields)
    data = json.loads(forward_config().to_json())
    data["epilogue"].update(fields)
    with pytest.raises(ValueError, match="text: "):
        hgg.GroupedGemmConfig.from_json(json.dumps(data))


def test_numbers_of_an_epilogue_are_floats():
    one = hgg.Epilogue(activation="swiglu_clamped", gate="halves", limit=5, sigmoid_scale=1)
    assert (type(one.limit), type(one.sigmoid_scale)) == (float, float)
    assert one == pickle.loads(pickle.dumps(one)) and hash(one) == hash(dataclasses.replace(one, limit=5.0))
    with pytest.raises(ValueError, match=r"alpha=1000"):
        dataclasses.replace(forward_config(), alpha=10**400)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"m":' * 100_000, None, 3, b"\xff\xff", "1" * 10_000])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="text: not"):
        hgg.GroupedGemmConfig.from_json(text)


@pytest.mark.parametrize(
    ("epilogue", "words"),
    [(None, "got None"), ([], r"got \["), ({}, "missing fields.*bias"), ({"x": 1}, ".*unknown fields.*x"), (1, "got 1")],
)
def test_an_epilogue_in_json_is_an_object_of_its_fields(epilogue, words):
    data = json.loads(forward_config().to_json())
    with pytest.raises(ValueError, match=f"text: epilogue: {words}"):
        hgg.GroupedGemmConfig.from_json(json.dumps({**data, "epilogue": epilogue}))
