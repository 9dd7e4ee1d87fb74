"""The device kernels compiled at run time and run on a GPU: the same random cases, the same model.

`pytest -m cuda` needs CuPy and an NVIDIA GPU, `pytest -m hip` hip-python and an AMD GPU, real or emulated.
"""

from __future__ import annotations

import pytest
from device_host.check import differences, draw, launches
from device_host.gpu import CudaBuild, HipBuild

SEED = 97


@pytest.mark.cuda
def test_random_configs_on_a_cuda_device() -> None:
    gpu = CudaBuild()
    drawn = draw(SEED, 500)
    arena = gpu.arena(drawn.before)
    gpu.run(*launches(drawn, gpu.address(arena)))
    assert differences(drawn, gpu.read(arena)) == []


@pytest.mark.hip
def test_random_configs_on_a_hip_device() -> None:
    gpu = HipBuild()
    drawn = draw(SEED, 40)
    arena = gpu.arena(drawn.before)
    gpu.run(*launches(drawn, gpu.address(arena)))
    assert differences(drawn, gpu.read(arena)) == []


@pytest.mark.hip
@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950"])
def test_compiles_for_the_targets_that_have_grouped_kernels(target: str) -> None:
    code = HipBuild().compile(target)
    for name in (b"hgg_fill", b"hgg_scan", b"hgg_zero_uncovered"):
        assert name in code
