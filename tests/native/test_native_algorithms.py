"""The algorithms of the real library: how many, their names and workspaces, limits, and finding one again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grouped import gemm_problem
from kernel_files import remove_kernel_files

import hipgroupgemm.native as n
from hipgroupgemm.native import GroupedGemm, Handle, NativeAlgorithm, NativeUnsupportedError, NativeValueError

GROUPS = 8
F16 = "float16"
# Debian's hipBLASLt 7.1.1, gfx90a, fp16 in and out or in only; NN, TN, NT, TT.
COUNTS = {(False, False): 360, (True, False): 480, (False, True): 258, (True, True): 2}


def grouped(handle: Handle, trans_a: bool, trans_b: bool, output: str = F16, bias: bool = False, groups: int = GROUPS) -> GroupedGemm:
    n, k, ragged = (96, 500, "k") if trans_b else (500, 96, "n")
    types = {"type_c": output, "type_d": output, "bias_type": "float32" if bias else None}
    problem = gemm_problem(64, n, k, groups, trans_a=trans_a, trans_b=trans_b, ragged=ragged, alpha=0.75, beta=0.5, **types)
    return GroupedGemm(handle, problem)


@pytest.mark.parametrize("output", [F16, "float32"])
@pytest.mark.parametrize("transposes", COUNTS)
def test_all(handle: Handle, transposes: tuple[bool, bool], output: str) -> None:
    gemm = grouped(handle, *transposes, output)
    algorithms = gemm.algorithms()
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
    everything = {a.index: a for a in gemm.algorithms()}
    ranked = gemm.algorithms(10_000)
    assert 0 < len(ranked) <= len(everything)
    assert len({a.index for a in ranked}) == len(ranked)
    for a in ranked:
        assert everything[a.index] == a
    assert gemm.algorithms(1) == ranked[:1]
    assert gemm.algorithms(7) == ranked[:7]


def test_workspace_follows_the_problem(handle: Handle) -> None:
    index = grouped(handle, False, False).algorithms(1)[0].index
    for groups in (2, 17, 2000):
        gemm = grouped(handle, False, False, groups=groups)
        assert gemm.algorithm(index).workspace_size in (168 * groups, 240 * groups)


def test_bias_leaves_the_kernels_that_have_it(handle: Handle) -> None:
    algorithms = grouped(handle, False, False, bias=True).algorithms()
    assert len(algorithms) == 180
    assert all("_Bias_" in a.name for a in algorithms)
    plain = grouped(handle, False, False)
    without = next(a for a in plain.algorithms() if "_Bias_" not in a.name)
    gemm = grouped(handle, False, False, bias=True)
    refused = gemm.algorithm(without.index)
    assert (refused.supported, refused.workspace_size) == (False, 0)
    with pytest.raises(NativeUnsupportedError, match="does not support the problem"):
        gemm.initialize(refused.index, 1 << 20, 1 << 20, 0)


def test_kernels_that_need_some_width_are_not_offered_to_a_ragged_size(handle: Handle) -> None:
    """With B transposed no kernel takes n = 1; with a fixed n of 64 they would all have been offered."""
    fixed = GroupedGemm(handle, gemm_problem(64, 64, 96, trans_b=True, ragged=""))
    assert len(fixed.algorithms()) == COUNTS[False, True]
    ragged = GroupedGemm(handle, gemm_problem(64, 64, 96, trans_b=True))
    assert ragged.algorithms() == ragged.algorithms(16) == []
    for trans_a, count in ((False, 0), (True, 472)):  # and of a ragged m likewise
        assert len(GroupedGemm(handle, gemm_problem(64, 64, 96, trans_a=trans_a, ragged="m")).algorithms()) == count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fnuz"])
def test_none_for_other_types(handle: Handle, dtype: str) -> None:
    gemm = GroupedGemm(handle, gemm_problem(64, 64, 64, type_a=dtype, type_b=dtype, type_c="float32", type_d="float32"))
    assert gemm.algorithms() == []
    assert gemm.algorithms(16) == []


def test_by_index(handle: Handle) -> None:
    gemm = grouped(handle, True, False)
    for a in gemm.algorithms()[::97]:
        assert gemm.algorithm(a.index) == a
        assert grouped(handle, True, False).algorithm(a.index) == a
    with pytest.raises(NativeValueError, match=r"no algorithm of index 5 .*it has 480"):
        gemm.algorithm(5)
    with pytest.raises(NativeValueError, match="no algorithm of index"):
        gemm.algorithm(grouped(handle, False, True).algorithms(1)[0].index)


def python(code: str, **environment: str) -> list[str]:
    """What a process of its own prints."""
    setup = f"import sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    setup += "import hipgroupgemm.native as n\nfrom grouped import gemm_problem\n"
    environment = os.environ | environment
    result = subprocess.run([sys.executable, "-c", setup + code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_no_kernel_library_for_the_device() -> None:
    """Debian's build has none for gfx942: the handle is made, and the question for algorithms is answered."""
    code = (
        "g = n.GroupedGemm(n.Handle(), gemm_problem(64, 64, 64))\n"
        "for ask in (lambda: g.algorithms(16), g.algorithms, lambda: g.algorithm(1)):\n"
        "    try:\n"
        "        ask()\n"
        "    except n.NativeUnsupportedError as e:\n"
        "        print('refused', 'no kernel library for this device' in str(e))\n"
    )
    assert python(code, STANDIN_ARCH="gfx942:sramecc+:xnack-") == ["refused True"] * 3


def test_missing_kernel_files(tmp_path: Path) -> None:
    """The catalogue lists kernels whose file is gone: what is missing can be asked for, and the launch that fails names the algorithm."""
    code = (
        "from standin_device import Device\n"
        "device, gemm = Device(), n.GroupedGemm(n.Handle(), gemm_problem(64, 64, 96))\n"
        "a = gemm.algorithms(1)[0]\n"
        "gemm.initialize(a.index, device.malloc(a.workspace_size), a.workspace_size, 0)\n"
        "try:\n"
        "    gemm.run(device.malloc(2 * 196), 0)\n"
        "except n.NativeError as e:\n"
        "    print(e.call, e.status, e.library_status, a.name in str(e), 'missing' in str(e))\n"
        "for path in n.missing_kernel_files():\n"
        "    print(path)\n"
    )
    gone = remove_kernel_files(tmp_path, "_GG_*_Ailk_Bljk_*_gfx90a.co")
    out = python(code, HIPBLASLT_TENSILE_LIBPATH=str(tmp_path))
    assert out == ["hgg_run HGG_LIBRARY_ERROR 6 True True", *(str(path) for path in gone)]
    assert n.missing_kernel_files() == []
    catalogue = gone[0].with_suffix(".dat")
    catalogue.unlink()
    wanted = sorted([str(path) for path in (*gone, catalogue)])
    assert sorted(python("print(*n.missing_kernel_files(), sep='\\n')", HIPBLASLT_TENSILE_LIBPATH=str(tmp_path))) == wanted


def test_algorithm_object(handle: Handle) -> None:
    a = grouped(handle, False, False).algorithms(1)[0]
    assert isinstance(a, NativeAlgorithm)
    assert hash(a) == hash(NativeAlgorithm(**vars(a)))
