"""torch, CuPy and JAX on a CUDA device: graphs that capture calls, temporaries that are dropped at once. Needs all three."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import hipgroupgemm as hgg

pytestmark = pytest.mark.cuda

GROUPS, K, N = 1500, 64, 48  # so many that a scan with scratch memory runs before the product


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def plans():
    hgg.clear_plan_cache()
    yield
    hgg.clear_plan_cache()


def problem(torch, rng, groups=GROUPS):
    sizes = rng.integers(0, 4, groups).astype(np.int32)
    rows = int(sizes.sum()) + 3
    lhs, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, K), (groups, K, N)))
    operands = [torch.from_numpy(values).cuda().to(torch.bfloat16) for values in (lhs, rhs)] + [torch.from_numpy(sizes).cuda()]
    return operands, expected(torch, *operands)


def expected(torch, lhs, rhs, sizes):
    ids = torch.repeat_interleave(torch.arange(len(sizes), device="cuda"), sizes.long())
    out = torch.zeros(lhs.shape[0], rhs.shape[2], device="cuda", dtype=torch.float64)
    out[: len(ids)] = torch.einsum("mk,mkn->mn", lhs[: len(ids)].double(), rhs.double()[ids])
    return out


def assert_right(torch, got, wanted):
    assert torch.isfinite(got).all()
    assert (got.double() - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize("groups", [5, GROUPS])
def test_a_graph_outlives_the_cache_of_plans(groups, torch, rng):
    """The usual warm-up and capture; then the cached plan would be evicted, and what it had is used by others."""
    (lhs, rhs, sizes), wanted = problem(torch, rng, groups)
    out = torch.full((lhs.shape[0], N), float("nan"), device="cuda", dtype=torch.bfloat16)
    hgg.ragged_dot(lhs, rhs, sizes, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own, which was never used
        hgg.ragged_dot(lhs, rhs, sizes, out=out)
    assert hgg.clear_plan_cache() >= 1  # plans that graphs used stay
    for n in range(1, 140):  # more plans than the cache holds
        small = torch.ones(4, 16, device="cuda", dtype=torch.bfloat16)
        hgg.ragged_dot(small, torch.ones(2, 16, 8 * n, device="cuda", dtype=torch.bfloat16), torch.tensor([1, 2], device="cuda"))
    witnesses = [torch.full((1 << 20,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(torch, out, wanted)
    assert all((witness == 7).all() for witness in witnesses), "the graph wrote into memory of others"
    sizes.zero_()  # sizes are read at each replay
    graph.replay()
    torch.cuda.synchronize()
    assert not out.any()


def test_cupy_captures_after_a_run(cupy, torch, rng):
    (lhs, rhs, sizes), wanted = problem(torch, rng)
    a, b, s = cupy.asarray(lhs.float()).astype(np.float16), cupy.asarray(rhs.float()).astype(np.float16), cupy.asarray(sizes)
    out = cupy.full((a.shape[0], N), np.nan, np.float16)
    hgg.ragged_dot(a, b, s, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        hgg.ragged_dot(a, b, s, out=out)
        graph = stream.end_capture()
    cupy.cuda.Device().synchronize()
    out.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_right(torch, torch.as_tensor(out, device="cuda"), wanted)


def test_close_gives_back_what_captures_took(torch, rng):
    (lhs, rhs, sizes), _ = problem(torch, rng)
    out = torch.empty(lhs.shape[0], N, device="cuda", dtype=torch.bfloat16)

    def rounds(count):
        with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), use_store=False) as plan:
            plan.execute(lhs, rhs, sizes, out=out)
            graphs = []
            for _ in range(count):
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1]):
                    plan.execute(lhs, rhs, sizes, out=out)
            for graph in graphs:
                graph.replay()
            torch.cuda.synchronize()
            del graphs, graph
            gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    rounds(60)
    before = rounds(60)
    for _ in range(4):
        after = rounds(60)
    assert before - after < 2 << 20, f"{(before - after) >> 20} MB are gone"


def test_jax_temporaries_may_be_dropped_at_once(rng):
    """JAX hands their memory to its next operation on a stream of its own, while our kernel still waits on another."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    gpu = jax.devices("cuda")[0]
    w = jax.device_put(rng.standard_normal((8, 1024, 1024)).astype(np.float32), gpu).astype(jnp.bfloat16)
    s = jax.device_put(np.full(8, 512, np.int32), gpu)
    x = jax.device_put(rng.standard_normal((4096, 1024)).astype(np.float32), gpu)
    make = jax.jit(lambda x, i: (x * i).astype(jnp.bfloat16))
    spoil = jax.jit(lambda i: jnp.full((4096, 1024), jnp.nan, jnp.bfloat16) * i)
    wanted = [np.asarray(hgg.ragged_dot(make(x, i + 1.0), w, s).astype(jnp.float32)) for i in range(4)]
    for _ in range(5):
        results = []
        for i in range(4):
            results.append(hgg.ragged_dot(make(x, i + 1.0), w, s))
            held = [spoil(1.0) for _ in range(4)]
        for result, right in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(result.astype(jnp.float32)), right)
        del held
