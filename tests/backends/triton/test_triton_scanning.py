"""Kernels that scan the group sizes themselves, and what hangs on it: up to 1024 groups of int32 or int64 sizes, on sm_90.

On other devices the same calls go through the shared scan, and have to give the same.
"""

from __future__ import annotations

import numpy as np
import pytest
from generators import Layout, Mode, Operand, make_problem, random_sizes
from test_triton_device import NON_CONTRACTING, RAGGED, assert_near, config_of, library, run_plan, triton_dot

import hipgroupgemm as hgg

__all__ = ["library"]  # a fixture
pytestmark = [pytest.mark.usefixtures("library")]


def extents_of(mode, rows, n=64, k=40):
    """(m, n, k) with so many ragged rows, aligned for the copy engine."""
    return (rows, n, k) if mode is NON_CONTRACTING else (k, n, rows)


def many(library, counts):
    """All of the counts on a real device, the first on an emulated one, for which they are too many."""
    return counts if library.kind == "cuda" else counts[:1]


@RAGGED
@pytest.mark.parametrize("sizes_dtype", ["int32", "int64"])
@pytest.mark.parametrize("offs", [False, True])
def test_numbers_of_groups(mode, sizes_dtype, offs, library, rng):
    for groups in many(library, [5, 1, 127, 128, 129, 512, 1000, 1024, 1025]):
        rows = 3 * groups + 7
        sizes = random_sizes(rng, rows, groups)
        given = np.cumsum(sizes) if offs else sizes
        settings = {"offs": True} if offs else {}
        make_problem(
            rng, mode, *extents_of(mode, rows), given, "bfloat16", library=library, sizes_dtype=sizes_dtype, **settings
        ).check(triton_dot)  # fmt: skip


@RAGGED
@pytest.mark.parametrize("sizes_dtype", ["int32", "int64"])
def test_faults_among_many_groups(mode, sizes_dtype, library, rng):
    for groups, at in many(library, [(6, 4), (1000, 700), (512, 0), (1024, 1023)]):
        rows = 2 * groups
        for wrong in (-7, rows + 1, 2**31 - 1, *((2**62, -(2**63)) if sizes_dtype == "int64" else ())):
            sizes = np.ones(groups, np.int64)
            sizes[at] = wrong
            sizes[at + 1 : at + 3] = -1  # only the first is told
            problem = make_problem(rng, mode, *extents_of(mode, rows), sizes, "bfloat16", library=library, sizes_dtype=sizes_dtype)
            with hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device) as plan:
                problem.check(run_plan(plan))
                with pytest.raises(ValueError, match=f"group {at} .*{wrong} rows wanted"):
                    plan.check()
                plan.check()


@RAGGED
def test_end_offsets_that_fall(mode, library, rng):
    ends = np.array([10, 30, 20, 45, 60])
    problem = make_problem(rng, mode, *extents_of(mode, 64), ends, "bfloat16", library=library, offs=True)
    with hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device) as plan:
        problem.check(run_plan(plan))
        with pytest.raises(ValueError, match="group 2 "):
            plan.check()


@RAGGED
def test_alpha_zero_reads_nothing(mode, library, rng):
    sizes = np.array([33, 0, 30, 20])
    problem = make_problem(rng, mode, *extents_of(mode, 90), sizes, "bfloat16", library=library, alpha=0.0)
    for name in ("lhs", "rhs"):
        setattr(problem, name, Operand(np.full_like(getattr(problem, name).values, np.nan), library=library))
    result = problem.run(triton_dot)
    assert np.array_equal(result.astype(float), np.zeros(result.shape))


@pytest.mark.parametrize("what", ["as it lies", "contracted on its last axis"])
def test_long_groups_among_short_ones(what, library, rng):
    sizes = np.array([700, 3, 1290, 0, 65, 128, 129, 513]) if library.kind == "cuda" else np.array([300, 3, 0, 65])
    layouts = {} if what == "as it lies" else {"rhs": Layout(order=(0, 2, 1))}
    problem = make_problem(rng, NON_CONTRACTING, int(sizes.sum()) + 70, 136, 72, sizes, "bfloat16", library=library, layouts=layouts)
    with hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device) as plan:
        algorithms = plan.get_algorithms()
        for algorithm in algorithms if library.kind == "cuda" else algorithms[:2]:
            print(algorithm.name)
            plan.set_algorithm(algorithm)
            problem.check(run_plan(plan))


@RAGGED
def test_one_plan_for_sizes_of_all_kinds(mode, library, rng):
    rows, m_n_k = 90, extents_of(mode, 90)
    plan = None
    for sizes_dtype, offs, host, offset in [
        ("int32", False, False, False),
        ("uint8", False, False, False),
        ("int64", False, False, False),
        ("int32", True, False, False),
        ("int16", True, False, False),
        ("int64", False, True, False),
        ("int32", False, False, True),
        ("int32", False, False, False),
    ]:
        sizes = random_sizes(rng, rows, 5)
        settings = {"offs": True} if offs else {}
        given = np.cumsum(sizes) if offs else sizes
        problem = make_problem(rng, mode, *m_n_k, given, "bfloat16", library=library, sizes_dtype=sizes_dtype, **settings)
        if host:
            problem.sizes = Operand(problem.sizes.values)
        if plan is None:
            plan = hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device)
        if offset:
            zero = Operand(np.zeros(1, np.int32), library=library)
            value, magnitude = problem.expected()
            assert_near(problem.run(run_plan(plan), group_offset=zero.array), value, magnitude)
        else:
            problem.check(run_plan(plan))
    plan.close()


@RAGGED
def test_the_same_again_and_again(mode, library, rng):
    if library.kind != "cuda":
        return
    groups = 512
    sizes = random_sizes(rng, 6 * groups, groups, full=mode is Mode.CONTRACTING)
    problem = make_problem(rng, mode, *extents_of(mode, 6 * groups, 256, 64), sizes, "bfloat16", library=library)
    with hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device) as plan:
        for algorithm in plan.get_algorithms()[:12]:
            plan.set_algorithm(algorithm)
            first = problem.run(run_plan(plan)).copy()
            for _ in range(300):  # without waiting in between
                plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array)
            assert np.array_equal(problem.out.read().view(np.uint16), first.view(np.uint16)), algorithm.name
