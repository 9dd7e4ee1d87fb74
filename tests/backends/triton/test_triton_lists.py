"""Operands as lists in the Triton backend, on a device or interpreted: bit for bit as stacked, and fresh when addresses change."""

from __future__ import annotations

import functools
import os

import device_graphs
import numpy as np
import pytest
from generators import UNALIGNED, Layout, ListOperand, Mode, make_problem, random_sizes, random_values
from test_triton_device import RAGGED, assert_near, config_of, library, run_plan, triton_dot

import hipgroupgemm as hgg
from hipgroupgemm.backends.triton import kernel_config

__all__ = ["library"]
pytestmark = [pytest.mark.usefixtures("library")]
NON_CONTRACTING, CONTRACTING = Mode.NON_CONTRACTING, Mode.CONTRACTING


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    """With HIPGROUPGEMM_LIST_MAPS=1 the sm_90 kernels take lists as well, by tables of tensor maps."""
    if os.environ.get("HIPGROUPGEMM_LIST_MAPS") == "1":
        hgg.clear_plan_cache()
        monkeypatch.setattr(kernel_config, "HOPPER_FEATURES", kernel_config.HOPPER_FEATURES | {"rhs_listed", "out_listed"})


def problem_of(rng, mode, library, *, aligned=True, dtype="bfloat16", groups=5, **settings):
    """A problem with lists: a ragged extent of 90 rows, NaN wherever nothing may be read."""
    m, n, k = ((90, 72, 48) if mode is NON_CONTRACTING else (72, 48, 90)) if aligned else (90, 45, 37)
    layouts = {} if aligned else {name: UNALIGNED for name in ("lhs", "rhs", "out", "c")}
    sizes = random_sizes(rng, m if mode is NON_CONTRACTING else k, groups)
    return make_problem(rng, mode, m, n, k, sizes, dtype, layouts=layouts, listed=True, library=library, **settings)


def list_name(mode):
    return "rhs" if mode is NON_CONTRACTING else "out"


def stacked_result(problem, function):
    """What the same values give, stacked."""
    before = {name: getattr(problem, name) for name in ("rhs", "out", "c")}
    for name, operand in before.items():
        if isinstance(operand, ListOperand):
            setattr(problem, name, operand.stacked())
    if before["c"] is not None and before["c"] is before["out"]:
        problem.c = problem.out
    try:
        return problem.run(function)
    finally:
        for name, operand in before.items():
            setattr(problem, name, operand)


@RAGGED
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_algorithm_gives_what_it_gives_for_the_stacked_array(mode, dtype, aligned, library, rng):
    problem = problem_of(rng, mode, library, aligned=aligned, dtype=dtype)
    config = config_of(problem)
    assert config.features() >= {f"{list_name(mode)}_listed"}
    with hgg.GroupedMatmulPlan(config, "triton", library.device) as plan:
        algorithms = plan.get_algorithms()
        every = os.environ.get("HIPGROUPGEMM_ALL_ALGORITHMS") == "1"
        for algorithm in algorithms[:: 1 if every else max(1, len(algorithms) // (12 if library.kind == "cuda" else 3))]:
            plan.set_algorithm(algorithm)
            print(algorithm.name)
            result = problem.check(run_plan(plan))
            if aligned:  # else the stacked array may have other algorithms
                stacked = stacked_result(problem, functools.partial(run_stacked, algorithm.name, library))
                assert result.tobytes() == stacked.tobytes(), algorithm.name


def run_stacked(name, library, lhs, rhs, group_sizes, ragged_dot_dimension_numbers, *, out, **kwargs):
    """The stacked call by the algorithm of that name."""
    config = hgg.config_for_ragged_dot(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, out=out)
    with hgg.GroupedMatmulPlan(config, "triton", library.device) as plan:
        plan.set_algorithm(next(found for found in plan.get_algorithms() if found.name == name))
        return plan.execute(lhs, rhs, group_sizes, out=out)


@RAGGED
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_alpha_beta_and_c(mode, dtype, library, rng):
    for alpha, beta, c in [(1, 1, "array"), (-1.5, 0.5, "out"), (0, 3, "array"), (0, 0, None), (2, 0, "array")]:
        problem_of(rng, mode, library, dtype=dtype, alpha=alpha, beta=beta, c=c).check(triton_dot)


@RAGGED
def test_layouts_types_batches_and_offsets(mode, library, rng):
    m, n, k = (60, 32, 48) if mode is NON_CONTRACTING else (32, 48, 60)
    name = list_name(mode)
    sizes = random_sizes(rng, 60, 5)
    for settings in (
        {"layouts": {name: Layout(order=(0, 2, 1))}},
        {"layouts": {name: Layout(pad=8, lead=8)}},
        {"layouts": {name: Layout(step=2, lead=3)}},
        {"out_dtype": "float32", "alpha": 0.5},
        {"batch": 3},
        {"batch": 2, "sizes": np.stack([sizes, random_sizes(rng, 60, 5)])},
        {"group_offset": 1, **({"rhs_groups": 3} if mode is NON_CONTRACTING else {"group_count": 3})},
        {"sizes": np.array([60])},
    ):
        print(settings)
        problem = make_problem(rng, mode, m, n, k, **{"sizes": sizes, **settings}, dtype="bfloat16", listed=True, library=library)
        problem.check(triton_dot)


@RAGGED
@pytest.mark.parametrize("extents", [(0, 24, 40), (24, 0, 40), (24, 40, 0)])
def test_extents_of_zero(mode, extents, library, rng):
    m, n, k = extents
    rows = m if mode is NON_CONTRACTING else k
    sizes = np.zeros(3, np.int64) if rows == 0 else random_sizes(rng, rows, 3)
    make_problem(rng, mode, m, n, k, sizes, "bfloat16", listed=True, library=library).check(triton_dot)


def moved(operand):
    """The same values elsewhere."""
    return ListOperand(operand.values, Layout(), operand.library)


@RAGGED
@pytest.mark.parametrize("aligned", [True, False])
def test_tables_follow_the_addresses_and_only_them(mode, aligned, library, rng, monkeypatch):
    problem = problem_of(rng, mode, library, aligned=aligned)
    name, runtime = list_name(mode), library.runtime
    copied = []
    copy = runtime.memcpy_async
    with hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device) as plan:
        value, magnitude = problem.expected()

        def run():
            copied.clear()
            result = plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array)
            assert result is problem.out.array
            copied_now = list(copied)
            copied.clear()
            assert_near(problem.out.read(), value, magnitude)
            copied.clear()
            return copied_now

        monkeypatch.setattr(runtime, "memcpy_async", lambda *a: (copied.append(a), copy(*a)))
        assert len(run()) == 1
        for _ in range(3):
            assert run() == [], "nothing has moved"
        first = getattr(problem, name)
        layout = Layout() if aligned else UNALIGNED
        second = ListOperand(random_values(rng, first.shape, "bfloat16"), layout, library)
        for operand in (second, first, second):
            setattr(problem, name, operand)
            if mode is CONTRACTING:
                for part in operand.parts:  # what an earlier call wrote must not pass for this one's
                    fill(library, part)
            value, magnitude = problem.expected()
            assert len(run()) == 1, "the table is written once"
            assert run() == []
        half = ListOperand(first.values, layout, library)
        mixed = getattr(problem, name)
        mixed.parts[1], mixed.array[1] = half.parts[1], half.array[1]  # the caller's own list, one array of it replaced
        mixed.values[1] = half.values[1]
        value, magnitude = problem.expected()
        assert len(run()) == 1


def fill(library, part):
    """NaN where an output part lies."""
    raw = np.full(part.before.nbytes, 0xFF, np.uint8)
    address = part.storage[0]
    with library.runtime.use_device(0):
        type(library.runtime).memcpy_async(library.runtime, address, raw.ctypes.data, raw.nbytes)
        library.runtime.synchronize_device(0)


@RAGGED
def test_a_graph_keeps_its_own_addresses(mode, library, rng):
    runtime, name = library.runtime, list_name(mode)
    one, two = (problem_of(rng, mode, library) for _ in range(2))
    two.lhs, two.sizes = one.lhs, one.sizes
    if mode is CONTRACTING:
        two.rhs = one.rhs
    with runtime.use_device(0), hgg.GroupedMatmulPlan(config_of(one), "triton", library.device) as plan:
        plan.prepare()
        stream = runtime.create_stream(0)

        def execute(p):
            plan.execute(p.lhs.array, p.rhs.array, p.sizes.array, out=p.out.array, stream=stream)

        with device_graphs.capture(runtime, stream) as graph:
            execute(one)
            execute(two)
            execute(two)
        lists = [getattr(p, name).array for p in (one, two)]
        for p in (one, two):
            assert np.isnan(p.out.read().astype(np.float32)).all(), "captured, not run"
        other = problem_of(rng, mode, library)  # a plain call in between has a table of its own
        execute(other)
        for array in lists:
            array.clear()  # the graph knows the addresses; the memory lives on in `parts`
        for _ in range(2):
            device_graphs.launch_graph(runtime, graph[0], stream)
            runtime.synchronize_stream(stream)
            for p in (one, two, other):
                value, magnitude = p.expected()
                assert_near(p.out.read(), value, magnitude)
            for p in (one, two):
                for part in p.out.parts if mode is CONTRACTING else (p.out,):
                    fill(library, part)
        device_graphs.destroy_graph(runtime, graph[0])
        runtime.destroy_stream(stream)


@RAGGED
def test_all_memory_comes_back(mode, library, rng, monkeypatch):
    runtime = library.runtime
    problem = problem_of(rng, mode, library)
    taken = []
    for taking, giving in (("malloc_plain", "free_plain"), ("host_malloc", "host_free")):
        take, give = getattr(runtime, taking), getattr(runtime, giving)
        monkeypatch.setattr(runtime, taking, lambda *a, take=take: taken.append(take(*a)) or taken[-1])
        monkeypatch.setattr(runtime, giving, lambda at, device, give=give: (at in taken and taken.remove(at), give(at, device))[1])
    with runtime.use_device(0):
        plan = hgg.GroupedMatmulPlan(config_of(problem), "triton", library.device)
        problem.run(run_plan(plan))
        stream = runtime.create_stream(0)
        for _ in range(3):
            with device_graphs.capture(runtime, stream) as graph:
                plan.execute(problem.lhs.array, problem.rhs.array, problem.sizes.array, out=problem.out.array, stream=stream)
            device_graphs.destroy_graph(runtime, graph[0])
        assert len(taken) >= 6
        plan.close()
        runtime.destroy_stream(stream)
    library.blocks[:] = [block for block in library.blocks if block not in taken]
    assert not [at for at in taken if at not in library.blocks]
