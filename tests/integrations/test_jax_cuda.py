"""`hipgroupgemm.integrations.jax` on a CUDA device: both doors, against float64 and against JAX's own ragged dot.

JAX_PLATFORMS=cuda,cpu python -m pytest -m cuda tests/integrations/test_jax_cuda.py
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from comparison import assert_close
from dimension_cases import random_case
from generators import Mode
from jax_judge import numbers_for_jax

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import hipgroupgemm as hgg  # noqa: E402
from hipgroupgemm.integrations import jax as door  # noqa: E402
from hipgroupgemm.integrations.jax import lowering, native  # noqa: E402
from hipgroupgemm.integrations.jax.primitive import Settings  # noqa: E402
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers  # noqa: E402

pytestmark = pytest.mark.cuda

WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
DGRAD = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
BATCHED = RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
ENTRIES = RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))

CASES = {
    "rows": (BASIC, (1000, 256), (8, 256, 384)),
    "many groups": (BASIC, (3000, 64), (1500, 64, 64)),
    "transposed weights": (DGRAD, (1000, 256), (8, 384, 256)),
    "weight gradient": (WGRAD, (1000, 256), (1000, 384)),
    "odd sizes": (BASIC, (333, 65), (5, 65, 37)),
    "odd weight gradient": (WGRAD, (333, 65), (333, 37)),
    "batch": (BATCHED, (3, 64, 128), (3, 128, 64)),
    "batch entries": (ENTRIES, (2, 300, 128), (4, 2, 128, 64)),
    "no rows": (BASIC, (0, 64), (4, 64, 64)),
    "no k": (BASIC, (100, 0), (4, 0, 64)),
    "an empty contraction": (WGRAD, (0, 64), (0, 64)),
}


@pytest.fixture(autouse=True)
def on_the_device():
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.fail("JAX has no CUDA device; set JAX_PLATFORMS=cuda,cpu")


def operands_of(name, rng, dtype="bfloat16"):
    """Operands with uncovered rows at the end, which hold NaN, and an empty group, whose weights do."""
    numbers, lhs_shape, rhs_shape = CASES[name]
    ragged = lhs_shape[numbers.lhs_ragged_dimensions[0]]
    groups = rhs_shape[0] if numbers.rhs_group_dimensions else {BATCHED: 2}.get(numbers, 6)
    lhs, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in (lhs_shape, rhs_shape))
    sizes = rng.multinomial(max(ragged - 5, 0), rng.dirichlet(np.ones(groups))).astype(np.int32)
    if groups > 1:
        sizes[0] += sizes[1]
        sizes[1] = 0
    if numbers is not BATCHED and ragged:
        lhs[(slice(None),) * numbers.lhs_ragged_dimensions[0] + (slice(int(sizes.sum()), None),)] = np.nan
        if numbers.rhs_group_dimensions and groups > 1:
            rhs[1] = np.nan
    return [jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), jnp.asarray(sizes)], numbers


def exact(operands, numbers, **keywords):
    """The result and the sum of its terms' magnitudes in float64, by the definition on the host."""
    lhs, rhs, sizes = (np.asarray(x) for x in operands)
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    return [hgg.ragged_dot_reference(f(lhs), f(rhs), sizes, numbers, **keywords) for f in (lambda x: x, np.abs)]


def check(got, operands, numbers, **keywords):
    value, magnitude = exact(operands, numbers, **keywords)
    lhs = operands[0]
    length = int(np.prod([lhs.shape[axis] for axis in numbers.dot_dimension_numbers[0][0]]))
    assert_close(np.asarray(got), value, magnitude, length, [np.dtype(x.dtype) for x in operands[:2]])


@pytest.fixture(params=["native", "buffer_callback"])
def way(request, monkeypatch, caplog):
    """Both doors; the first must be open here."""
    jax.clear_caches()
    if request.param == "native":
        native.load()
    else:

        def closed():
            raise native.NativeDoorError("closed by a test")

        monkeypatch.setattr(native, "load", closed)
    lowering._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "hipgroupgemm.jax"):
        yield request.param
    jax.clear_caches()
    warned = [record for record in caplog.get_records("call") if record.name == "hipgroupgemm.jax"]
    once = request.param != "native" and "no rows" not in request.node.name  # without an element there is nothing to call
    assert len(warned) == once, warned


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values(name, dtype, way, rng):
    operands, numbers = operands_of(name, rng, dtype)
    program = jax.jit(lambda *x: door.ragged_dot_general(*x, numbers))
    with jax.transfer_guard_device_to_host("disallow"):
        for scale in (1, 2, 3):  # other addresses, and memory that was used for something else
            operands = [operands[0] * scale, operands[1], operands[2]]
            got = program(*operands)
            got.block_until_ready()
    check(got, operands, numbers)
    assert (native.TARGET in program.lower(*operands).as_text()) == (way == "native" and 0 not in got.shape)


@pytest.mark.parametrize("name", ["rows", "transposed weights", "weight gradient", "odd sizes"])
def test_values_beside_jax_s(name, rng):
    operands, numbers = operands_of(name, rng, "bfloat16")
    operands[0], operands[1] = (jnp.nan_to_num(x) for x in operands[:2])  # JAX's own lets an empty group's NaN through
    got = jax.jit(lambda *x: door.ragged_dot_general(*x, numbers, preferred_element_type=jnp.float32))(*operands)
    theirs = jax.jit(lambda *x: jax.lax.ragged_dot_general(*x, numbers_for_jax(numbers), preferred_element_type=jnp.float32))(*operands)
    scale = float(jnp.abs(theirs).max())
    assert float(jnp.abs(got - theirs).max()) <= 1e-2 * scale  # theirs may multiply in bf16 of another order


@pytest.mark.parametrize("name", ["rows", "many groups", "transposed weights", "weight gradient", "odd sizes", "batch", "batch entries"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients(name, dtype, way, rng):
    """<d_out, f(x)> = <f's transpose of d_out, x>, in which the sums are the host's; and value by value against the CPU's primitive."""
    operands, numbers = operands_of(name, rng, dtype)
    lhs, rhs, sizes = operands

    def gradients(lhs, rhs, sizes, d_out):
        return jax.vjp(lambda lhs, rhs: door.ragged_dot_general(lhs, rhs, sizes, numbers), lhs, rhs)[1](d_out)

    shape = jax.eval_shape(lambda *x: door.ragged_dot_general(*x, numbers), *operands).shape
    d_out = jnp.asarray(rng.standard_normal(shape).astype(np.float32), dtype)
    got = jax.jit(gradients)(lhs, rhs, sizes, d_out)
    cpu = jax.devices("cpu")[0]
    wide = [jax.device_put(np.asarray(x, np.float32), cpu) for x in (lhs, rhs)]
    with jax.default_device(cpu):
        wanted = jax.jit(gradients)(*wide, jax.device_put(np.asarray(sizes), cpu), jax.device_put(np.asarray(d_out, np.float32), cpu))
    for device, host in zip(got, wanted, strict=True):
        assert device.dtype == dtype and device.shape == host.shape
        one, right = np.asarray(device, np.float64), np.asarray(host, np.float64)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(right))  # an uncovered row's NaN is in no gradient of others
        bound = (2**-7 if dtype == "bfloat16" else 1e-4) * np.nanmax(np.abs(right), initial=1)
        assert np.nanmax(np.abs(one - right), initial=0) <= bound


def test_gradients_beside_jax_s(rng):
    (lhs, rhs, sizes), _ = operands_of("rows", rng, "float32")
    lhs, rhs = jnp.nan_to_num(lhs), jnp.nan_to_num(rhs)

    def loss(f):
        return jax.jit(jax.grad(lambda x, w: jnp.sin(f(x, w, sizes, precision="highest") / 16).sum(), (0, 1)))

    for one, theirs in zip(loss(door.ragged_dot)(lhs, rhs), loss(jax.lax.ragged_dot)(lhs, rhs), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(theirs), atol=1e-4 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("mode", list(Mode))
def test_any_dimension_numbers(mode, way, rng):
    for _ in range(4):
        case = random_case(rng, mode)
        operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (case.lhs_shape, case.rhs_shape)]
        operands.append(jnp.asarray(case.sizes))
        check(jax.jit(lambda *x, n=case.numbers: door.ragged_dot_general(*x, n))(*operands), operands, case.numbers)
        got = jax.jit(lambda *x, n=case.numbers: lowering.rearranged(x, Settings(n, "float32")))(*operands)
        np.testing.assert_allclose(np.asarray(got), exact(operands, case.numbers)[0], atol=1e-3)


def test_vmap_bias_and_offset(way, rng):
    x, w, b = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((3, 64, 32), (5, 32, 48), (5, 48)))
    sizes = jnp.asarray(rng.integers(0, 9, (3, 7)), jnp.int32)
    offset = jnp.array([1], jnp.int32)

    def f(x, s):
        return door.ragged_dot(x, w, s, group_offset=offset, bias=b, alpha=0.5)

    got = jax.jit(jax.vmap(f))(x, sizes)
    for entry in range(3):
        lhs, rhs, bias = (np.asarray(a, np.float64) for a in (x[entry], w, b))
        value = hgg.ragged_dot_reference(lhs, rhs, np.asarray(sizes[entry]), group_offset=1, bias=bias, alpha=0.5)
        np.testing.assert_allclose(np.asarray(got[entry], np.float64), value, atol=2**-6 * np.abs(value).max())


def test_wrong_sizes_are_told(rng):
    native.check()
    x, w = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((3, 64, 64), jnp.bfloat16)
    got = jax.jit(door.ragged_dot)(x, w, jnp.array([10, 90, 1]))
    np.testing.assert_array_equal(np.asarray(got, np.float32), 64)  # all rows are covered, and nothing past them was touched
    with pytest.raises(ValueError, match="group 1"):
        door.check()
    door.check()


def test_threads(rng):
    """Programs of one recipe from several threads: every result has its own operands."""
    w, s = jnp.asarray(rng.standard_normal((8, 256, 256)), jnp.bfloat16), jnp.full(8, 32, jnp.int32)
    program = jax.jit(door.ragged_dot)
    x = [jnp.full((256, 256), i + 1, jnp.bfloat16) for i in range(8)]
    wanted = [np.asarray(program(one, w, s), np.float32) for one in x]
    with ThreadPoolExecutor(4) as pool:
        for i, got in enumerate(pool.map(lambda i: np.asarray(program(x[i % 8], w, s), np.float32), range(200))):
            np.testing.assert_array_equal(got, wanted[i % 8])


CHAIN = """
import sys
import jax, jax.numpy as jnp, numpy as np
from hipgroupgemm.integrations.jax import native, ragged_dot
groups, rows, runs = int(sys.argv[1]), 2048, 20
rng = np.random.default_rng()
x = jnp.asarray(rng.standard_normal((rows, 256)), jnp.bfloat16)
w = jnp.asarray(rng.standard_normal((groups, 256, 256)) / 16, jnp.bfloat16)
s = jnp.asarray(rng.multinomial(rows - 3, np.ones(groups) / groups), jnp.int32)

def chain(x, w, s):
    a = b = x
    for _ in range(3):  # two chains that do not wait for each other, by one recipe
        a, b = jnp.tanh(ragged_dot(a, w, s)), jnp.tanh(ragged_dot(-b, w, s))
    return a, b

program = jax.jit(chain)
with jax.disable_jit():
    wanted = [np.asarray(r, np.float32) for r in chain(x, w, s)]
before = native.load().hgg_call_count()
for run in range(runs):
    got = program(x * 1, w, s)
    for one, right in zip(got, wanted):
        assert np.abs(np.asarray(one, np.float32) - right).max() < 0.05, run
print("calls", native.load().hgg_call_count() - before, "of", 6 * runs)
"""


@pytest.mark.parametrize("groups", [8, 1500])
@pytest.mark.parametrize("buffers", ["", "FUSION,CUSTOM_CALL"])
def test_chains_with_and_without_command_buffers(groups, buffers):
    flags = f"--xla_gpu_enable_command_buffer={buffers} --xla_gpu_graph_min_graph_size=1"
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run([sys.executable, "-c", CHAIN, str(groups)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)
    calls, of = (int(word) for word in result.stdout.split()[1::2])
    assert calls == of if not buffers else calls < of


def test_training_steps(way, rng):
    """A gated expert layer by scan: its loss follows a loop of products that JAX differentiates."""
    x, target = (jnp.asarray(rng.standard_normal((96, 32)), jnp.float32) for _ in range(2))
    up, down = (jnp.asarray(rng.standard_normal(shape) / 6, jnp.float32) for shape in ((4, 32, 64), (4, 64, 32)))
    sizes = np.array([40, 0, 30, 26], np.int32)

    def dot(x, w):
        return door.ragged_dot(x, w, jnp.asarray(sizes))

    def loop(x, w):
        ends = np.cumsum(sizes)
        return jnp.concatenate([x[end - size : end] @ w[g] for g, (size, end) in enumerate(zip(sizes, ends, strict=True))])

    def losses(dot):
        def loss(weights):
            return ((dot(jax.nn.silu(dot(x, weights[0])), weights[1]) - target) ** 2).mean()

        def step(weights, _):
            value, gradient = jax.value_and_grad(loss)(weights)
            return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient), value

        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.jit(lambda w: jax.lax.scan(step, w, None, 20)[1])((up, down)))

    got, wanted = losses(dot), losses(loop)
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_shard_map_over_one_device(way, rng):
    from jax.sharding import Mesh, PartitionSpec

    shard_map = getattr(jax, "shard_map", None) or pytest.importorskip("jax.experimental.shard_map").shard_map
    (x, w, s), numbers = operands_of("rows", rng, "bfloat16")
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = PartitionSpec("x"), PartitionSpec(), PartitionSpec()
    program = jax.jit(shard_map(lambda *x: door.ragged_dot_general(*x, numbers), mesh=mesh, in_specs=spec, out_specs=spec[0]))
    check(program(x, w, s), (x, w, s), numbers)
