"""Every kernel of the Triton backend compiles for sm_90, gfx942 and gfx950, without a device.

A sample of the candidates by default; all of them with HIPGROUPGEMM_ALL_CANDIDATES=1.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.backends.triton import candidates, compiler, specs
from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers

DGRAD = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
BATCH = RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
MACHINES = {
    "sm_90": candidates.Machine(compiler.target_of("sm_90"), 132, 232448),
    "sm_80": candidates.Machine(compiler.target_of("sm_80"), 108, 166912),
    "gfx942": candidates.Machine(compiler.target_of("gfx942"), 304, 65536),
    "gfx950": candidates.Machine(compiler.target_of("gfx950"), 256, 163840),
}
ALL = os.environ.get("HIPGROUPGEMM_ALL_CANDIDATES") == "1"


def config_of(what, dtype="bfloat16", **kwargs):
    """A config of one of the classes, aligned unless the name says otherwise."""
    m, n, k, g = (1000, 264, 136, 7) if not what.startswith("odd") else (77, 45, 37, 3)
    what = what.removeprefix("odd ")
    sizes = ArraySpec((g,), "int32")
    if what == "forward":
        return hgg.config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((g, k, n), dtype), sizes, BASIC, **kwargs)
    if what == "data gradient":
        return hgg.config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((g, n, k), dtype), sizes, DGRAD, **kwargs)
    if what == "weight gradient":
        return hgg.config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((m, n), dtype), sizes, WGRAD, **kwargs)
    return hgg.config_for_ragged_dot(ArraySpec((g, m, k), dtype), ArraySpec((g, k, n), dtype), sizes, BATCH, **kwargs)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path / "cache"))
    compiler._compiled.clear()


@pytest.mark.parametrize("what", ["forward", "data gradient", "weight gradient", "batch", "odd forward", "odd weight gradient"])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", "gfx950"])
def test_candidates_compile(architecture, what):
    machine, key = MACHINES[architecture], config_of(what).key()
    found = candidates.ordered(key, machine)
    assert found, "nothing runs this config"
    sample = found if ALL else [found[0], found[-1]]
    for _, candidate in sample:
        print(candidate.name)
        kernel = compiler.compile_kernel(specs.spec_of(candidate, key, machine))
        assert kernel.shared <= machine.shared_memory, candidate.name
        assert kernel.code[:4] == b"\x7fELF"
        assert kernel.threads % machine.target.warp_size == 0
        if candidate.kernel == "hopper":
            tables = specs.table_bytes(specs.room_for_groups(candidate, key, machine))
            assert kernel.shared <= candidate.shared_bytes(2, 2) + tables, f"{candidate.name} takes more than it was thought to"
            behind_a_scan = compiler.compile_kernel(specs.spec_of(candidate, key, machine, scanning=False))
            assert behind_a_scan.shared <= candidate.shared_bytes(2, 2), f"{candidate.name} takes more than it was thought to"
        if candidate.split > 1:
            assert compiler.compile_kernel(specs.parts_spec(candidate, key, machine)).code


@pytest.mark.parametrize("architecture", ["sm_90", "sm_80", "gfx942", "gfx950"])
def test_every_variant_of_a_mode_compiles(architecture):
    machine = MACHINES[architecture]
    c, bias = ArraySpec((1000, 264), "float32"), ArraySpec((7, 264), "float32")
    variants = [
        config_of("forward", beta=1.0, c=c, bias=bias, preferred_element_type=np.float32),
        config_of("forward", "float32"),
        config_of("weight gradient", "float32", precision="tensorfloat32"),
        config_of("odd data gradient", "float16"),
    ]
    for config in variants:
        _, candidate = candidates.ordered(config.key(), machine)[0]
        assert compiler.compile_kernel(specs.spec_of(candidate, config.key(), machine)).code


def test_a_kernel_comes_back_from_disk(tmp_path):
    machine, key = MACHINES["gfx942"], config_of("odd forward").key()
    spec = specs.spec_of(candidates.ordered(key, machine)[0][1], key, machine)
    first = compiler.compile_kernel(spec)
    compiler._compiled.clear()
    build, compiler._build = compiler._build, None  # nothing may be compiled now
    try:
        assert compiler.compile_kernel(spec) == first
    finally:
        compiler._build = build


def test_extents_of_zero_have_candidates():
    for machine in MACHINES.values():
        for m, n, k, g in ((0, 8, 8, 2), (8, 0, 8, 2), (8, 8, 0, 2), (8, 8, 8, 0), (0, 0, 0, 0)):
            sizes = ArraySpec((g,), "int32")
            forward = hgg.config_for_ragged_dot(ArraySpec((m, k), "bfloat16"), ArraySpec((g, k, n), "bfloat16"), sizes, BASIC)
            weights = hgg.config_for_ragged_dot(ArraySpec((m, k), "bfloat16"), ArraySpec((m, n), "bfloat16"), sizes, WGRAD)
            batch = hgg.config_for_ragged_dot(ArraySpec((g, m, k), "bfloat16"), ArraySpec((g, k, n), "bfloat16"), sizes, BATCH)
            assert all(candidates.ordered(config.key(), machine) for config in (forward, weights, batch))


def test_names_and_indices():
    for architecture, machine in MACHINES.items():
        for mode in RaggedDotMode:
            names = [candidate.name for candidate in candidates.all_candidates(mode, machine.target)]
            assert len(set(names)) == len(names), f"{architecture} {mode}"


def test_what_keeps_the_copy_engine_away():
    machine = MACHINES["sm_90"]
    assert candidates.copies_reason(config_of("forward").key(), machine.target) is None
    assert "aligned" in candidates.copies_reason(config_of("odd forward").key(), machine.target)
    assert "float32" in candidates.copies_reason(config_of("forward", "float32").key(), machine.target)
    assert "sm_90" in candidates.copies_reason(config_of("forward").key(), MACHINES["gfx942"].target)
