"""The algorithms of the real library: how many, their names and workspaces, limits, and finding one again."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from hipgroupgemm.native import (
    DataType,
    Epilogue,
    GroupedGemm,
    Handle,
    NativeAlgorithm,
    NativeUnsupportedError,
    NativeValueError,
    Ragged,
)

GROUPS = 8
F16 = DataType.FLOAT16
# Debian's hipBLASLt 7.1.1, gfx90a, fp16 in and out or in only; NN, TN, NT, TT.
COUNTS = {(False, False): 360, (True, False): 480, (False, True): 258, (True, True): 2}


def grouped(handle: Handle, trans_a: bool, trans_b: bool, output: DataType = F16, bias: bool = False) -> GroupedGemm:
    gemm = GroupedGemm(
        handle,
        F16,
        F16,
        output,
        output,
        trans_a=trans_a,
        trans_b=trans_b,
        epilogue=Epilogue.BIAS if bias else Epilogue.DEFAULT,
    )
    capacity = [500] + [1] * (GROUPS - 1)
    if trans_b:
        gemm.set_problem(64, 96, capacity, ragged=Ragged.K, alpha=0.75, beta=0.5)
    else:
        gemm.set_problem(64, capacity, 96, alpha=0.75, beta=0.5)
    return gemm


@pytest.mark.parametrize("output", [F16, DataType.FLOAT32])
@pytest.mark.parametrize("transposes", COUNTS)
def test_all(handle: Handle, transposes: tuple[bool, bool], output: DataType) -> None:
    gemm = grouped(handle, *transposes, output)
    algorithms = gemm.all_algorithms()
    assert len(algorithms) == COUNTS[transposes]
    assert len({a.index for a in algorithms}) == len(algorithms)
    assert len({a.name for a in algorithms}) == len(algorithms), "a name does not identify an algorithm"
    stored = f"Cijk_A{'lik' if transposes[0] else 'ilk'}_B{'jlk' if transposes[1] else 'ljk'}_"
    letters = "HHS" if output == F16 else "HSS"
    for a in algorithms:
        assert a.supported
        assert a.verified, a.name  # every GSU is 1 and every SK is 0 in this catalogue
        assert a.workspace_size in (168 * GROUPS, 240 * GROUPS), a.name
        assert a.name.startswith(f"{stored}{letters}_BH_")
        assert a.kernel_name.startswith(f"{stored}{letters}_BH_")
        assert "_GSU1_" in a.name


@pytest.mark.parametrize("transposes", COUNTS)
def test_heuristic_is_a_ranking_of_them(handle: Handle, transposes: tuple[bool, bool]) -> None:
    gemm = grouped(handle, *transposes)
    everything = {a.index: a for a in gemm.all_algorithms()}
    ranked = gemm.heuristic(max_count=10_000)
    assert 0 < len(ranked) <= len(everything)
    assert len({a.index for a in ranked}) == len(ranked)
    for a in ranked:
        assert everything[a.index] == a
    assert gemm.heuristic(max_count=1) == ranked[:1]
    assert gemm.heuristic(max_count=7) == ranked[:7]


def test_workspace_limit_is_enforced(handle: Handle) -> None:
    gemm = grouped(handle, False, False)
    small, large = 168 * GROUPS, 240 * GROUPS
    sizes = [a.workspace_size for a in gemm.all_algorithms()]
    assert set(sizes) == {small, large}
    for ask in (gemm.all_algorithms, lambda limit: gemm.heuristic(10_000, limit)):
        assert not ask(small - 1)
        assert {a.workspace_size for a in ask(small)} == {small}
        assert {a.workspace_size for a in ask(large - 1)} == {small}
        assert {a.workspace_size for a in ask(large)} == {small, large}
    # A limit is a filter before the list is cut: the first three that fit, not those of the first three that
    # fit.
    ranked = [a for a in gemm.heuristic(10_000) if a.workspace_size <= small]
    assert gemm.heuristic(3, small) == ranked[:3]


def test_workspace_follows_the_problem(handle: Handle) -> None:
    gemm = grouped(handle, False, False)
    index = gemm.heuristic(1)[0].index
    for groups in (2, 17, 2000):
        gemm.set_problem(64, [500] + [1] * (groups - 1), 96)
        assert gemm.algorithm(index).workspace_size in (168 * groups, 240 * groups)


def test_bias_leaves_the_kernels_that_have_it(handle: Handle) -> None:
    algorithms = grouped(handle, False, False, bias=True).all_algorithms()
    assert len(algorithms) == 180
    assert all("_Bias_" in a.name for a in algorithms)
    plain = grouped(handle, False, False)
    without = next(a for a in plain.all_algorithms() if "_Bias_" not in a.name)
    gemm = grouped(handle, False, False, bias=True)
    refused = gemm.algorithm(without.index)
    assert (refused.supported, refused.workspace_size) == (False, 0)
    with pytest.raises(NativeUnsupportedError, match="does not support the problem"):
        gemm.initialize(refused, 1 << 20, 1 << 20)


def test_kernels_that_need_some_width_are_not_offered_to_a_ragged_size(handle: Handle) -> None:
    """With B transposed no kernel takes n = 1; with a fixed n of 64 they would all have been offered."""
    gemm = GroupedGemm(handle, F16, F16, F16, F16, trans_b=True)
    gemm.set_problem(64, [64, 64], 96, ragged=Ragged.FIXED)
    assert len(gemm.all_algorithms()) == COUNTS[False, True]
    gemm.set_problem(64, [64, 1], 96)
    assert gemm.all_algorithms() == gemm.heuristic() == []
    for trans_a, count in ((False, 0), (True, 472)):  # and of a ragged m likewise
        gemm = GroupedGemm(handle, F16, F16, F16, F16, trans_a=trans_a)
        gemm.set_problem([64, 1], 64, 96, ragged=Ragged.M)
        assert len(gemm.all_algorithms()) == count


@pytest.mark.parametrize("dtype", [DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT8_E4M3FNUZ])
def test_none_for_other_types(handle: Handle, dtype: DataType) -> None:
    gemm = GroupedGemm(handle, dtype, dtype, DataType.FLOAT32, DataType.FLOAT32)
    gemm.set_problem(64, [64, 1], 64)
    assert gemm.all_algorithms() == []
    assert gemm.heuristic() == []


def test_find(handle: Handle) -> None:
    gemm = grouped(handle, True, False)
    for a in gemm.all_algorithms()[::97]:
        assert gemm.find_algorithm(a.name, a.index) == a
        assert gemm.find_algorithm(a.name) == a


def test_find_refuses(handle: Handle) -> None:
    gemm = grouped(handle, True, False)
    first, second = gemm.all_algorithms()[:2]
    with pytest.raises(NativeValueError, match=f"index {first.index} is algorithm .*{second.index}"):
        gemm.find_algorithm(second.name, first.index)
    with pytest.raises(NativeValueError, match="is no algorithm"):
        gemm.find_algorithm(first.name, 5)
    with pytest.raises(NativeValueError, match="does not exist"):
        gemm.find_algorithm(first.name[:-1], first.index)
    with pytest.raises(NativeValueError, match="0 of 480 algorithms"):
        gemm.find_algorithm("Cijk")
    foreign = grouped(handle, False, True).all_algorithms()[0]
    with pytest.raises(NativeValueError, match="does not exist"):
        gemm.find_algorithm(foreign.name, foreign.index)
    for index, name in ((-2, first.name), (first.index, "")):
        with pytest.raises(NativeValueError, match="HGG_INVALID_ARGUMENT"):
            gemm.find_algorithm(name, index)
    with pytest.raises(NativeValueError, match="zero bytes"):
        gemm.find_algorithm(first.name + "\0", first.index)


def test_find_before_a_problem_is_set(handle: Handle) -> None:
    """A pinned algorithm can be looked for at once; what it needs depends on the problem."""
    known = grouped(handle, False, False).all_algorithms()[3]
    gemm = GroupedGemm(handle, F16, F16, F16, F16)
    with pytest.raises(RuntimeError, match="no problem is set"):
        gemm.find_algorithm(known.name, known.index)
    gemm.set_problem(64, [500] + [1] * (GROUPS - 1), 96, alpha=0.75, beta=0.5)
    assert gemm.find_algorithm(known.name, known.index) == known


def test_sizes_as_scalars_and_arrays(handle: Handle) -> None:
    gemm = GroupedGemm(handle, F16, F16, F16, F16)
    gemm.set_problem(64, [500, 1], 96)
    first = gemm.all_algorithms()
    gemm.set_problem(np.array([64, 64], np.int32), np.array([500, 1], np.uint64), [96, 96], batch=np.int8(1))
    assert gemm.all_algorithms() == first
    with pytest.raises(NativeValueError, match="unequal length: m 3, n 2"):
        gemm.set_problem([64] * 3, [500, 1], 96)
    with pytest.raises(NativeValueError, match="unequal length: n 2, ldd 1"):
        gemm.set_problem(64, [500, 1], 96, ldd=[64])
    with pytest.raises(NativeValueError, match="single numbers"):
        gemm.set_problem(64, 1, 96)
    with pytest.raises(TypeError, match="n has dtype float64"):
        gemm.set_problem(64, [500.0, 1.0], 96)
    with pytest.raises(TypeError, match="n has dtype bool"):
        gemm.set_problem(64, [True, True], 96)
    with pytest.raises(TypeError, match="one dimension"):
        gemm.set_problem(64, [[500, 1]], 96)  # type: ignore[list-item]
    assert gemm.all_algorithms() == first, "a refused problem changed something"


def test_no_kernel_library_for_the_device() -> None:
    """Debian's build has none for gfx942: the handle is made, and the question for algorithms is answered."""
    code = (
        "import hipgroupgemm.native as n\n"
        "h = n.Handle()\n"
        "g = n.GroupedGemm(h, *[n.DataType.FLOAT16] * 4)\n"
        "g.set_problem(64, [64, 1], 64)\n"
        "for ask in (g.heuristic, g.all_algorithms, lambda: g.algorithm(1), lambda: g.find_algorithm('x')):\n"
        "    try:\n"
        "        ask()\n"
        "    except n.NativeUnsupportedError as e:\n"
        "        print('refused', 'no kernel library for this device' in str(e))\n"
    )
    environment = os.environ | {"STANDIN_ARCH": "gfx942:sramecc+:xnack-"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:4] == ["refused True"] * 4


def test_algorithm_object(handle: Handle) -> None:
    a = grouped(handle, False, False).heuristic(1)[0]
    assert isinstance(a, NativeAlgorithm)
    assert hash(a) == hash(NativeAlgorithm(**vars(a)))
