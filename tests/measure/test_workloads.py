"""Presets, classes and group sizes: against the published tables, JAX's shapes, and files of every kind."""

import json
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipgroupgemm import RaggedDotMode, config_for_ragged_dot
from hipgroupgemm.measure.distributions import (
    DISTRIBUTIONS,
    DistributionError,
    balanced_sizes,
    dirichlet_sizes,
    group_size_vectors,
    group_sizes_of,
    read_group_sizes,
    scale_group_sizes,
    zipf_sizes,
)
from hipgroupgemm.measure.workloads import ALIASES, CLASSES, PRESETS, SUITES, MoEShape, geometric_mean, presets_of
from hipgroupgemm.operands.arrays import ArraySpec

# name: (K, N, E, top-k, seq, M); M from the micro-benchmark where it has this (K, N, E), else seq x top-k
PUBLISHED = {
    "mixtral-8x7b": (6144, 20480, 32, 4, 3072, 15360),
    "mixtral-8x7b-large": (8192, 28672, 64, 8, 4096, 40960),
    "mixtral-8x7b-published": (4096, 14336, 8, 2, 3072, 6144),
    "deepseek2-16b": (2048, 1408, 64, 6, 512, 3840),
    "deepseek3-test-mi300": (512, 512, 32, 8, 512, 4096),
    "deepseek3-test-mi350": (512, 512, 256, 8, 512, 5120),
    "deepseek3-671b-reduced": (7168, 2048, 32, 8, 512, 4096),
    "gemma4-26b": (2816, 704, 128, 8, 1024, 10240),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 1024, 10240),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 2048, 20480),
    "llama4-17b-16e": (5120, 8192, 16, 1, 1024, 1280),
}
MICRO_BENCHMARK = {
    (3840, 2048, 1408, 64), (1920, 5120, 1536, 160), (5120, 512, 512, 256), (10240, 2816, 704, 128), (10240, 2880, 2880, 128),
    (1280, 5120, 8192, 16), (15360, 6144, 20480, 32), (40960, 8192, 28672, 64), (20480, 4096, 1536, 128), (10240, 2048, 768, 128),
    (6400, 2048, 512, 512),
}  # fmt: skip
SKEWED = [(6400, 512), (10240, 128), (20480, 128), (15360, 32)]


def test_presets_are_the_published_tables() -> None:
    assert list(PRESETS) == list(PUBLISHED)
    for name, (k, n, e, top_k, seq, m) in PUBLISHED.items():
        assert PRESETS[name].extents == (m, k, n, e)
        assert PRESETS[name].label == name
        assert (m, k, n, e) in MICRO_BENCHMARK or m == seq * top_k


def test_alias_stands_for_both_variants() -> None:
    assert [preset.e for preset in presets_of("deepseek3-test")] == [32, 256]
    assert set(ALIASES) == {"deepseek3-test"}
    assert presets_of("gemma4-26b") == (PRESETS["gemma4-26b"],)
    with pytest.raises(ValueError, match=r"model 'gpt': no such preset; there are mixtral-8x7b, .*deepseek3-test$"):
        presets_of("gpt")


def test_suites() -> None:
    assert {shape.extents for shape in SUITES["table12"]} == MICRO_BENCHMARK
    assert len(SUITES["table12"]) == 11
    assert [shape.label for shape in SUITES["models"]] == list(PRESETS)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_the_shapes_jax_gives_them(name: str) -> None:
    kind, shape = CLASSES[name], MoEShape(24, 10, 6, 4)
    lhs, rhs, out = kind.shapes(shape)
    numbers = kind.dimension_numbers
    jax_numbers = jax.lax.RaggedDotDimensionNumbers(
        numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    )
    specs = [jax.ShapeDtypeStruct(s, np.float32) for s in (lhs, rhs)] + [jax.ShapeDtypeStruct((4,), np.int32)]
    assert jax.eval_shape(lambda *a: jax.lax.ragged_dot_general(*a, ragged_dot_dimension_numbers=jax_numbers), *specs).shape == out
    config = config_for_ragged_dot(ArraySpec(lhs, "float32"), ArraySpec(rhs, "float32"), ArraySpec((4,), "int32"), numbers)
    assert config.ragged_mode is kind.mode
    assert kind.mode is (RaggedDotMode.CONTRACTING if name.startswith("wgrad") else RaggedDotMode.NON_CONTRACTING)
    assert config.flops() == 2 * 24 * 10 * 6


def test_class_operands_are_table_7() -> None:
    operands = {name: (kind.lhs, kind.rhs, kind.out) for name, kind in CLASSES.items()}
    assert operands == {
        "fwd_wi": ("MK", "EKN", "MN"),
        "fwd_wo": ("MN", "ENK", "MK"),
        "dgrad_wi": ("MN", "EKN", "MK"),
        "dgrad_wo": ("MK", "ENK", "MN"),
        "wgrad_wi": ("MK", "MN", "EKN"),
        "wgrad_wo": ("MN", "MK", "ENK"),
    }


# ---- shapes ----------------------------------------------------------------------------------------------------------------------


def test_shape_scaling_keeps_the_experts_and_says_its_scale() -> None:
    shape = MoEShape(10240, 2048, 768, 128, label="x").scaled(8)
    assert shape.extents == (1280, 256, 96, 128)
    assert (shape.scale, shape.label) == (8, "x")
    assert shape.scaled(2).scale == 16
    assert MoEShape(4, 2, 1, 3).scaled(8).extents == (1, 1, 1, 3)
    with pytest.raises(ValueError, match="divisor=0: wanted an int of at least 1"):
        shape.scaled(0)


@given(st.integers(1, 50000), st.integers(1, 9000), st.integers(1, 30000), st.integers(1, 512), st.integers(1, 10**13))
def test_fitting_is_the_smallest_power_of_two(m: int, k: int, n: int, e: int, limit: int) -> None:
    shape = MoEShape(m, k, n, e)
    fitted = shape.fitting(limit)
    assert fitted.scale & (fitted.scale - 1) == 0
    assert fitted.extents == shape.scaled(fitted.scale).extents
    assert fitted.padded_flops <= limit or (fitted.m, fitted.k, fitted.n) == (1, 1, 1)
    assert fitted.scale == 1 or shape.scaled(fitted.scale // 2).padded_flops > limit


def test_shape_parsing() -> None:
    assert MoEShape.parse("10240,2048,768,128").extents == (10240, 2048, 768, 128)
    assert MoEShape.parse("4x3x2x1").extents == (4, 3, 2, 1)
    for text, pattern in [("1,2,3", "wanted four integers"), ("1,2,3,x", "wanted four integers"), ("1,2,0,4", "n=0: wanted at least 1")]:
        with pytest.raises(ValueError, match=pattern):
            MoEShape.parse(text)
    with pytest.raises(TypeError, match=r"m=2\.0: wanted an int"):
        MoEShape(2.0, 1, 1, 1)  # type: ignore[arg-type]


# ---- distributions ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 600))
def test_balanced(m: int, e: int) -> None:
    sizes = balanced_sizes(m, e)
    assert sizes.tolist() == [m // e + (group < m % e) for group in range(e)]
    assert sizes.dtype == np.int32


@pytest.mark.parametrize(("m", "e"), SKEWED)
def test_zipf_is_the_published_draw(m: int, e: int) -> None:
    rng = np.random.default_rng(0)
    p = np.arange(1, e + 1) ** -0.8
    rng.shuffle(p)
    p /= p.sum()
    np.testing.assert_array_equal(zipf_sizes(m, e), rng.multinomial(m, p))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_named_distributions_sum_to_m_and_follow_the_seed(name: str) -> None:
    shape = MoEShape(5000, 8, 8, 96)
    sizes = group_sizes_of(name, shape, 3)
    assert sizes.sum() == 5000
    assert sizes.shape == (96,)
    assert sizes.min() >= 0
    assert sizes.dtype == np.int32
    np.testing.assert_array_equal(sizes, group_sizes_of(name, shape, 3))
    assert (group_sizes_of(name, shape, 4) == sizes).all() == (name == "balanced")
    with pytest.raises(ValueError, match="wanted one of balanced, zipf, dirichlet"):
        group_sizes_of("uniform", shape)


def test_dirichlet_concentration_goes_from_skew_to_balance() -> None:
    spread = [dirichlet_sizes(100_000, 64, 1, concentration).std() for concentration in (0.1, 0.5, 5.0, 5000.0)]
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < 100  # close to the sampling noise of 1562 tokens a group


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(0, 3000), st.integers(1, 64))
def test_scaled_sizes_fit_the_scaled_shape(sizes: list[int], uncovered: int, scale: int) -> None:
    m = max(sum(sizes) + uncovered, 1)
    scaled = scale_group_sizes(np.array(sizes, np.int32), scale)
    assert scaled.min() >= 0
    assert scaled.sum() == sum(sizes) // scale
    assert scaled.sum() <= MoEShape(m, 1, 1, len(sizes)).scaled(scale).m
    assert not scaled[np.array(sizes) == 0].any()


# ---- files -----------------------------------------------------------------------------------------------------------------------


def _write(path, content) -> str:
    if path.suffix == ".npy":
        np.save(path, content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.json", [1, 2, 3], [[1, 2, 3]]),
        ("a.json", [[1, 2], [0, 7]], [[1, 2], [0, 7]]),
        ("a.json", {"group_sizes": [4, 5], "step": 3}, [[4, 5]]),
        ("a.json", {"group_sizes": [[4, 5], [1, 1], [2, 0]]}, [[4, 5], [1, 1], [2, 0]]),
        ("a.npy", np.array([3, 1], np.uint8), [[3, 1]]),
        ("a.npy", np.array([[3, 1], [0, 2]], np.int64), [[3, 1], [0, 2]]),
        ("a.txt", "# a step\n1 2 3\n\n4, 5,6 # another\n", [[1, 2, 3], [4, 5, 6]]),
        ("sizes", "7\n", [[7]]),
    ],
)
def test_files_of_group_sizes(tmp_path, name, content, wanted) -> None:
    found = read_group_sizes(_write(tmp_path / name, content))
    assert [vector.tolist() for vector in found] == wanted
    assert all(vector.dtype == np.int64 for vector in found)


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", {"sizes": [1]}, 'has no "group_sizes", only sizes'),
        ("a.json", "3", "holds int, wanted a list"),
        ("a.json", [], "holds no group sizes"),
        ("a.json", [[1], []], "vector 1: is empty"),
        ("a.json", [1, -2], "vector 0, group 1: got -2, wanted an integer from 0"),
        ("a.json", [1, 2.5], "vector 0, group 1: got 2.5"),
        ("a.json", [1, True], "vector 0, group 1: got True"),
        ("a.json", [1, 2**31], "vector 0, group 1: got 2147483648"),
        ("a.json", [[1, 2], 3], r"vector 0, group 0: got \[1, 2\]"),
        ("a.npy", np.array([1.0, 2.0]), r"holds float64 of shape .*numpy\.save\(path, numpy\.asarray\(sizes, numpy\.int64\)\)"),
        ("a.npy", np.array([1.5, 2.0]), r"wanted integers of shape \(E,\) or \(vectors, E\)"),
        ("a.json", [1, 2.0], "vector 0, group 1: got 2.0, wanted an integer"),
        ("a.txt", "1 2.0\n", "line 1: '1 2.0' is not integers .*3 and not 3.0"),
        ("a.npy", np.zeros((1, 2, 3), int), "wanted integers of shape"),
        ("a.npy", np.array([3, -1]), "vector 0, group 1: got -1"),
        ("a.txt", "1 2\n3 four\n", "line 2: '3 four' is not integers"),
        ("a.txt", "# nothing\n", "holds no group sizes"),
    ],
)
def test_broken_files_are_refused_with_the_place(tmp_path, name, content, pattern) -> None:
    with pytest.raises(ValueError, match=pattern) as info:
        read_group_sizes(_write(tmp_path / name, content))
    assert name in str(info.value)


def test_files_that_are_not_what_their_name_says(tmp_path) -> None:
    (tmp_path / "a.npy").write_bytes(b"no numpy file")
    (tmp_path / "pickled.npy").write_bytes(b"")
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "raw.npy").write_bytes(pickle.dumps([1, 2]))
    (tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x01\x00\x04\x00{]}\n")
    np.savez(tmp_path / "a.npz", sizes=[1, 2])
    (tmp_path / "zip.npy").write_bytes((tmp_path / "a.npz").read_bytes())
    (tmp_path / "folder").mkdir()
    for name, text in [
        ("a.npy", "can't be read as integers .*write it with numpy.save"),
        ("pickled.npy", "can't be read as integers"),
        ("raw.npy", "can't be read as integers"),
        ("header.npy", "can't be read as integers"),
        ("object.npy", "can't be read as integers"),
        ("zip.npy", "is an archive of arrays"),
        ("a.npz", "is an archive of arrays; write the sizes alone: numpy.save"),
        ("folder", "is a folder; name the file"),
        ("a.txt", "not text"),
    ]:
        with pytest.raises(ValueError, match=f"{name}: .*{text}"):
            read_group_sizes(tmp_path / name, 2)
    with pytest.raises(OSError, match="nowhere"):
        read_group_sizes(tmp_path / "nowhere.json")


def test_one_number_a_line_is_one_vector_where_there_are_as_many_groups(tmp_path) -> None:
    path = tmp_path / "sizes.txt"
    path.write_text("# a group a line\n5\n0\n\n7  # the last\n")
    assert [vector.tolist() for vector in read_group_sizes(path, 3)] == [[5, 0, 7]]
    assert [vector.tolist() for vector in read_group_sizes(path, 1)] == [[5], [0], [7]]
    assert [vector.tolist() for vector in read_group_sizes(path)] == [[5], [0], [7]]
    with pytest.raises(ValueError, match="has 3 lines of one number each, but there are E = 4 groups; give one line a group"):
        read_group_sizes(path, 4)
    path.write_text("1 2 3\n4 5 6\n7 8 9\n")  # as many lines as groups, but of several numbers
    assert [vector.tolist() for vector in read_group_sizes(path, 3)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ([1, 2], r"a\.json: has 2 sizes, but model has E = 3 groups"),
        ([[1, 2, 3], [5, 5, 1]], r"a\.json\[1\]: the sizes sum to 11, but model has only M = 10 rows"),
        ([2**31 - 1] * 3, "sum to 6442450941"),
        ([1, 2, -1], "got -1"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, sizes, pattern) -> None:
    shape = MoEShape(10, 1, 1, 3, label="model")
    with pytest.raises(DistributionError, match=pattern):
        group_size_vectors(_write(tmp_path / "a.json", sizes), shape, shape)


def test_sizes_that_fit(tmp_path) -> None:
    whole = MoEShape(10, 4, 4, 3)
    name, (sizes,) = group_size_vectors(_write(tmp_path / "a.json", [4, 0, 6]), whole, whole.scaled(2))
    assert (name, sizes.tolist(), sizes.dtype) == ("a.json", [2, 0, 3], np.int32)


def test_geometric_mean() -> None:
    assert geometric_mean([1, 100]) == pytest.approx(10)
    assert np.isnan(geometric_mean([]))


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, hipgroupgemm.measure.distributions, hipgroupgemm.measure.tolerance\n"
        "heavy = {'click', 'rich', 'matplotlib', 'cupy', 'torch', 'jax', 'msgspec', 'hipgroupgemm.benchmark'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
