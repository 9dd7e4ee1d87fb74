"""`hipgroupgemm.integrations.jax` on the CPU: values and every transformation, in all modes.

Values: JAX's own ragged dot and a loop of products in float64. Derivatives: a bilinear map and its transpose give equal inner products,
to the last digits of float64; and a loop of products that NumPy differentiates by hand.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from dimension_cases import WRONG, random_case
from generators import Mode
from jax_judge import enable_x64, numbers_for_jax

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import hipgroupgemm as hgg  # noqa: E402
from hipgroupgemm.integrations.jax import ragged_dot, ragged_dot_general  # noqa: E402
from hipgroupgemm.integrations.jax.lowering import rearranged  # noqa: E402
from hipgroupgemm.integrations.jax.primitive import Settings  # noqa: E402

MODES = list(Mode)


@pytest.fixture
def x64():
    with enable_x64():
        yield


def arrays_of(case, rng, dtype=np.float64):
    lhs, rhs = (rng.standard_normal(shape).astype(dtype) for shape in (case.lhs_shape, case.rhs_shape))
    return lhs, rhs, case.sizes


def dot(case, **keywords):
    return lambda lhs, rhs, sizes: ragged_dot_general(lhs, rhs, sizes, case.numbers, **keywords)


def right(lhs, rhs, sizes, numbers, **keywords):
    """By the definition, in float64."""
    lhs, rhs = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
    return hgg.ragged_dot_reference(lhs, rhs, np.asarray(sizes), numbers, **keywords)


def close(got, wanted, epsilon=1e-12):
    """To a few units in the last place of float64, or to `epsilon` of the largest value."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    if got.size:
        assert np.abs(got - wanted).max() <= epsilon * max(1.0, np.abs(wanted).max())


# ---- values ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", [False, True])
def test_values_are_jax_s(mode, empty, rng, x64):
    """As they lie, and rearranged as XLA does on a GPU with operands that no backend takes as they lie."""
    for _ in range(3):
        case = random_case(rng, mode, empty=empty)
        operands = arrays_of(case, rng)
        settings = Settings(case.numbers, "float64")

        @jax.jit
        def program(lhs, rhs, sizes, small, case=case, settings=settings):
            return dot(case)(lhs, rhs, sizes), rearranged((lhs, rhs, sizes), settings), rearranged((lhs, rhs, small), settings)

        for got in program(*operands, case.sizes.astype(np.uint8)):
            close(got, right(*operands, case.numbers))
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA refuses some orders of axes of its own program
            if not empty:
                close(got, jax.lax.ragged_dot_general(*map(jnp.asarray, operands), numbers_for_jax(case.numbers)))


def test_every_type_that_jax_gives(rng):
    x, w, s = rng.standard_normal((7, 5)), rng.standard_normal((3, 5, 4)), jnp.array([2, 0, 4])
    for lhs_type in ("bfloat16", "float16", "float32"):
        for rhs_type in (lhs_type, "float32"):
            for preferred in (None, "float32", "bfloat16"):
                lhs, rhs = jnp.asarray(x, lhs_type), jnp.asarray(w, rhs_type)
                got = jax.jit(lambda a, b, p=preferred: ragged_dot(a, b, s, preferred_element_type=p))(lhs, rhs)
                assert got.dtype.name == (preferred or ("float32" if rhs_type == "float32" else lhs_type))
                close(got, right(lhs, rhs, s, hgg_basic()), 2**-7)
    with enable_x64():
        assert ragged_dot(lhs, rhs, s, preferred_element_type=jnp.float64).dtype == jnp.float64
    assert ragged_dot(lhs, rhs, s, preferred_element_type=np.float64).dtype == jnp.float32  # as all of JAX without x64


def hgg_basic():
    from hipgroupgemm.problem.dimension_numbers import BASIC

    return BASIC


def test_nan_never_leaves_its_group(rng):
    x, w = rng.standard_normal((9, 5)).astype(np.float32), rng.standard_normal((4, 5, 3)).astype(np.float32)
    sizes = np.array([2, 0, 3, 1], np.int32)
    clean = x.copy(), w.copy()
    x[6:], w[1] = np.nan, np.inf  # uncovered rows, and an empty group's weights
    x[2], w[2] = np.nan, np.nan

    def f(x, w, s):
        return ragged_dot(x, w, s)

    got = np.asarray(jax.jit(f)(x, w, sizes))
    wanted = np.asarray(f(*clean, sizes))
    np.testing.assert_array_equal(got[[0, 1, 5, 6, 7, 8]], wanted[[0, 1, 5, 6, 7, 8]])
    assert np.isnan(got[2:5]).all() and not got[6:].any()

    d_out = rng.standard_normal(got.shape).astype(np.float32)
    d_out[6:] = np.nan
    d_x, d_w = jax.vjp(lambda x, w: f(x, w, sizes), x, w)[1](d_out)
    assert not np.asarray(d_x)[6:].any() and np.isfinite(np.asarray(d_x)[[0, 1, 5]]).all()
    assert not np.asarray(d_w)[1].any() and np.isfinite(np.asarray(d_w)[[0, 3]]).all() and np.isnan(np.asarray(d_w)[2]).any()


def test_batch_invariance(rng):
    """A token's bits, and those of its gradient, are the same alone and among others."""
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((61, 33), (2, 33, 17)))

    def value_and_gradient(x, sizes):
        out, back = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, batch_invariant=True), x, w)
        return out, back(jnp.ones_like(out))[0]

    many = value_and_gradient(x, jnp.array([20, 41]))
    few = value_and_gradient(x[17:26], jnp.array([3, 6]))
    for all_rows, some in zip(many, few, strict=True):
        np.testing.assert_array_equal(np.asarray(all_rows)[17:26], np.asarray(some))
    with pytest.raises(NotImplementedError, match="batch_invariant"):
        wgrad = hgg.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        ragged_dot_general(x, x, jnp.array([20, 41]), wgrad, batch_invariant=True)
    with pytest.raises(ValueError, match="max_multiprocessors"):
        ragged_dot(x, w, jnp.array([20, 41]), max_multiprocessors=0)


def test_wrong_sizes_are_clamped(rng):
    x, w = jnp.asarray(rng.standard_normal((6, 4))), jnp.asarray(rng.standard_normal((3, 4, 2)))
    for wrong, clamped in (([4, 5, 9], [4, 2, 0]), ([-3, 2, 1], [0, 2, 1])):
        close(jax.jit(ragged_dot)(x, w, jnp.array(wrong)), ragged_dot(x, w, jnp.array(clamped)), 0)


# ---- derivatives -------------------------------------------------------------------------------------------------------------


def inner(a, b):
    return float((np.asarray(a, np.float64) * np.asarray(b, np.float64)).sum())


def check_transpose(f, operands, rng, reference):
    """Value, gradient and tangent of a bilinear f of (lhs, rhs, sizes), in one program."""
    value = reference(*operands)
    d_out = rng.standard_normal(value.shape)
    moved = [rng.standard_normal(np.shape(x)) for x in operands[:2]]

    @jax.jit
    def program(lhs, rhs, sizes, d_out, x, y):
        out, back = jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes), lhs, rhs)
        return out, back(d_out), jax.jvp(lambda lhs, rhs: f(lhs, rhs, sizes), (lhs, rhs), (x, y))[1]

    out, gradients, tangent = program(*operands, d_out, *moved)
    lhs, rhs, sizes = operands
    close(out, value)
    changed = reference(moved[0], rhs, sizes), reference(lhs, moved[1], sizes)
    close(tangent, changed[0] + changed[1])
    for gradient, x, y in zip(gradients, moved, changed, strict=True):
        assert gradient.shape == x.shape
        assert abs(inner(gradient, x) - inner(d_out, y)) <= 1e-11 * max(1, inner(np.abs(d_out), np.abs(y)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", [False, True])
def test_gradients_are_the_transpose(mode, empty, rng, x64):
    for _ in range(3):
        case = random_case(rng, mode, empty=empty)
        check_transpose(dot(case, alpha=0.75), arrays_of(case, rng), rng, lambda *x, n=case.numbers: right(*x, n, alpha=0.75))


def test_sizes_have_no_gradient(rng):
    x, w, s = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([1, 2])
    out, back = jax.vjp(ragged_dot, x, w, s)
    assert back(out)[2].dtype == jax.dtypes.float0


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives(mode, rng, x64):
    case = random_case(rng, mode, largest=3)
    lhs, rhs, sizes = arrays_of(case, rng)
    check_grads(jax.jit(lambda a, b: jnp.sin(dot(case)(a, b, sizes))), (lhs, rhs), order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


def loop_gradients(x, w, sizes, d_out):
    """(d_x, d_w) of the plain ragged dot, one product per group, in float64."""
    x, w, d_out = (np.asarray(a, np.float64) for a in (x, w, d_out))
    d_x, d_w, start = np.zeros(x.shape), np.zeros(w.shape), 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        d_x[rows], d_w[group] = d_out[rows] @ w[group].T, x[rows].T @ d_out[rows]
        start += size
    return d_x, d_w


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_follow_a_loop(dtype, rng):
    sizes = np.array([5, 0, 17, 1, 8], np.int32)
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((37, 19), (5, 19, 23)))
    d_out = jnp.asarray(rng.standard_normal((37, 23)), dtype)
    got = jax.jit(lambda x, w, d: jax.vjp(lambda x, w: ragged_dot(x, w, sizes), x, w)[1](d))(x, w, d_out)
    for one, wanted in zip(got, loop_gradients(x, w, sizes, d_out), strict=True):
        assert one.dtype == dtype
        close(one, wanted, 2**-7 if dtype == "bfloat16" else 1e-5)


def test_gradients_need_no_transposed_copies(rng):
    """Operands as they lie: no transpose stands in the backward program, for weights either way round."""
    transposed = hgg.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    for numbers, shape in ((hgg_basic(), (3, 5, 4)), (transposed, (3, 4, 5))):
        x, w, s = jnp.ones((7, 5)), jnp.ones(shape), jnp.array([2, 0, 4])
        text = str(jax.make_jaxpr(jax.grad(lambda x, w, n=numbers, s=s: ragged_dot_general(x, w, s, n).sum(), (0, 1)))(x, w))
        assert text.count("hipgroupgemm_ragged_dot") >= 2 and "transpose" not in text


# ---- bias, offsets -----------------------------------------------------------------------------------------------------------


def test_a_bias(rng, x64):
    x, w, b = (jnp.asarray(rng.standard_normal(shape)) for shape in ((9, 5), (3, 5, 4), (3, 4)))
    sizes = jnp.array([2, 0, 4])
    groups = np.repeat(np.arange(3), np.asarray(sizes))

    def f(x, w, b):
        return ragged_dot(x, w, sizes, bias=b, alpha=0.5)

    wanted = np.zeros((9, 4))
    wanted[:6] = 0.5 * np.einsum("mk,mkn->mn", np.asarray(x)[:6], np.asarray(w)[groups]) + np.asarray(b)[groups]
    close(jax.jit(f)(x, w, b), wanted)
    check_grads(jax.jit(lambda *operands: jnp.sin(f(*operands))), (x, w, b), order=2, modes=["rev"], atol=1e-4, rtol=1e-4)
    d_out = rng.standard_normal((9, 4))
    d_bias = jax.vjp(f, x, w, b)[1](jnp.asarray(d_out))[2]
    close(d_bias, np.stack([d_out[:6][groups == group].sum(0) for group in range(3)]))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_group_offset(on_device, rng, x64):
    x, w = (jnp.asarray(rng.standard_normal(shape)) for shape in ((9, 5), (2, 5, 4)))
    sizes = jnp.array([2, 1, 3, 2])
    offset = jnp.array([1], jnp.int32) if on_device else 1

    def f(x, w):
        return ragged_dot(x, w, sizes, group_offset=offset)

    full = np.zeros((4, 5, 4))
    full[1:3] = w
    close(jax.jit(f)(x, w), right(x, full, sizes, hgg_basic()))
    check_grads(jax.jit(f), (x, w), order=1, modes=["fwd", "rev"], atol=1e-5, rtol=1e-5)
    d_out = jnp.asarray(rng.standard_normal((9, 4)))
    d_w = jax.vjp(f, x, w)[1](d_out)[1]
    close(d_w, loop_gradients(x, full, sizes, d_out)[1][1:3])
    wgrad = hgg.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

    def g(x, d):
        return ragged_dot_general(x, d, sizes, wgrad, group_offset=offset, group_count=2)

    close(g(x, d_out), d_w)
    check_grads(jax.jit(g), (x, d_out), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


# ---- vmap --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_vmap_is_a_stack(mode, rng, x64):
    for mapped in ((1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)):
        case = random_case(rng, mode, empty=bool(rng.random() < 0.3), largest=3)
        operands, places = list(arrays_of(case, rng)), []
        for i, yes in enumerate(mapped):
            places.append(int(rng.integers(0, operands[i].ndim + 1)) if yes else None)
            if yes:
                fresh = (rng.standard_normal(operands[i].shape) if i < 2 else rng.permuted(case.sizes, axis=-1) for _ in range(3))
                operands[i] = np.stack(list(fresh), places[i])

        def stack(*operands, places=tuple(places), case=case):
            taken = zip(operands, places, strict=True)
            entries = [[x if at is None else x.take(i, at) for x, at in taken] for i, taken in enumerate([list(taken)] * 3)]
            return np.stack([right(*entry, case.numbers) for entry in entries])

        check_transpose(jax.vmap(dot(case), places), operands, rng, stack)


def test_vmap_of_nothing(rng):
    case = random_case(rng, Mode.NON_CONTRACTING)
    lhs, rhs, sizes = arrays_of(case, rng, np.float32)
    out = jax.vmap(lambda x: dot(case)(x, rhs, sizes))(jnp.zeros((0, *lhs.shape), lhs.dtype))
    assert out.shape[0] == 0


@pytest.mark.parametrize("mapped", [(0, None, None, None), (None, 0, None, None), (None, None, 0, None), (0, 0, 0, 0), (0, None, 0, 0)])
@pytest.mark.parametrize("with_bias", ["shared", "own"])
def test_vmap_with_bias_and_offset(mapped, with_bias, rng, x64):
    extent = 3
    shapes = {"x": (9, 5), "w": (3, 5, 4), "s": (5,), "o": (1,), "b": (3, 4)}
    axes = dict(zip("xwso", mapped, strict=True)) | {"b": 0 if with_bias == "own" else None}
    values = {name: rng.standard_normal((extent, *shape)) for name, shape in shapes.items()}
    values["s"], values["o"] = rng.integers(0, 3, (extent, 5)), rng.integers(0, 3, (extent, 1))
    stacked = {name: jnp.asarray(value if axes[name] == 0 else value[0]) for name, value in values.items()}

    def f(x, w, s, o, b):
        return ragged_dot(x, w, s, group_offset=o, bias=b)

    got = jax.vmap(f, tuple(axes.values()))(*stacked.values())
    entries = [[x[i] if axes[name] == 0 else x for name, x in stacked.items()] for i in range(extent)]
    wanted = [
        right(x, w, s, hgg_basic(), group_offset=int(o[0]), bias=np.asarray(b), preferred_element_type="float64")
        for x, w, s, o, b in entries
    ]
    close(got, np.stack(wanted))


# ---- programs ----------------------------------------------------------------------------------------------------------------


def test_inside_other_transformations(rng):
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((9, 5), (3, 5, 5)))
    sizes = jnp.array([2, 0, 4])

    def step(carry, scale):
        return jnp.tanh(ragged_dot(carry, w * scale, sizes)), carry.sum()

    def loss(w, f):
        return jax.lax.scan(lambda c, s: (jnp.tanh(f(c, w * s, sizes)), c.sum()), x, jnp.array([1.0, 0.5, 2.0]))[0].sum()

    plain = jax.grad(loss)(w, ragged_dot)
    close(jax.jit(jax.grad(loss), static_argnums=1)(w, jax.checkpoint(ragged_dot)), plain, 1e-5)
    close(plain, jax.grad(loss)(w, jax.lax.ragged_dot), 1e-5)
    out, linear = jax.linearize(lambda w: ragged_dot(x, w, sizes), w)
    close(linear(w), out, 1e-6)
    with jax.disable_jit():
        close(ragged_dot(x, w, sizes), out, 1e-6)
    close(jax.lax.cond(sizes[0] > 1, lambda: ragged_dot(x, w, sizes), lambda: x), out, 1e-6)


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from hipgroupgemm.integrations.jax import ragged_dot
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("x",))
rng = np.random.default_rng()
x = jnp.asarray(rng.standard_normal((4 * 7, 5)), jnp.float32)
w = jnp.asarray(rng.standard_normal((3, 5, 4)), jnp.float32)
s = jnp.asarray(rng.integers(0, 3, (4, 3)), jnp.int32)
wanted = np.concatenate([np.asarray(ragged_dot(x[7 * i : 7 * i + 7], w, s[i])) for i in range(4)])

@functools.partial(shard_map, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
def tokens(x, w, s):
    return ragged_dot(x, w, s[0])

def plain(x, w, s):
    return jnp.concatenate([ragged_dot(x[7 * i : 7 * i + 7], w, s[i]) for i in range(4)])

np.testing.assert_array_equal(np.asarray(jax.jit(tokens)(x, w, s)), wanted)
got = jax.jit(jax.grad(lambda x, w: jnp.sin(tokens(x, w, s)).sum(), (0, 1)))(x, w)
right = jax.grad(lambda x, w: jnp.sin(plain(x, w, s)).sum(), (0, 1))(x, w)
for a, b in zip(got, right):
    np.testing.assert_allclose(a, b, atol=1e-4)  # the weights are shared: their gradient is summed over the devices
tangent = jax.jvp(lambda w: tokens(x, w, s), (w,), (w,))[1]
np.testing.assert_allclose(tangent, wanted, atol=1e-5)

# expert parallel: each device has a group of four, and finds its rows by its offset
w4 = jnp.asarray(rng.standard_normal((4, 5, 4)), jnp.float32)
s4 = jnp.asarray([3, 0, 9, 5], jnp.int32)
@functools.partial(shard_map, mesh=mesh, in_specs=(P(), P("x"), P()), out_specs=P())
def experts(x, w, s):
    return jax.lax.psum(ragged_dot(x, w, s, group_offset=jax.lax.axis_index("x")[None]), "x")
np.testing.assert_allclose(jax.jit(experts)(x, w4, s4), ragged_dot(x, w4, s4), atol=1e-5)
got = jax.jit(jax.grad(lambda w: jnp.sin(experts(x, w, s4)).sum()))(w4)
np.testing.assert_allclose(got, jax.grad(lambda w: jnp.sin(ragged_dot(x, w, s4)).sum())(w4), atol=1e-4)

# an array that lies on all devices, without shard_map
put = jax.device_put(x, NamedSharding(mesh, P("x")))
np.testing.assert_array_equal(np.asarray(jax.jit(ragged_dot)(put, w, s[0])), np.asarray(ragged_dot(x, w, s[0])))
print("sharded")
"""


def test_shard_map():
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    result = run_python(SHARDED, XLA_FLAGS=flags)
    assert result.returncode == 0 and "sharded" in result.stdout, result.stderr[-3000:]


def run_python(text, **variables):
    import os

    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_package_does_not_import_jax():
    text = "import sys, hipgroupgemm; assert 'jax' not in sys.modules; import hipgroupgemm.integrations; assert 'jax' not in sys.modules"
    result = run_python(text)
    assert result.returncode == 0, result.stderr


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_wrong_calls_are_refused_as_such(case):
    lhs, rhs, sizes = jnp.ones(case.lhs), jnp.ones(case.rhs), jnp.ones(case.sizes, case.sizes_dtype)
    with pytest.raises(TypeError) as caught:
        ragged_dot_general(lhs, rhs, sizes, hgg.RaggedDotDimensionNumbers(case.dims, case.ragged, case.group))
    assert all(word in str(caught.value) for word in case.words)


def test_other_refusals(rng):
    x, w, s = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([1, 2])
    with pytest.raises(TypeError, match="ragged_dot_general"):
        ragged_dot(x[None], w, s)
    with pytest.raises(NotImplementedError, match="int32"):
        ragged_dot(x.astype(jnp.int32), w, s)
    with pytest.raises(TypeError, match="bias: got shape"):
        ragged_dot(x, w, s, bias=jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="group_offset"):
        ragged_dot(x, w[:1], s, group_offset=2)
    with pytest.raises(TypeError, match="group_offset"):
        ragged_dot(x, w, s, group_offset=jnp.ones(2, jnp.int32))
    with pytest.raises(NotImplementedError, match="runs on GPUs"):
        ragged_dot(x, w, s, backend="triton")
    with pytest.raises(ValueError, match="precision"):
        ragged_dot(x, w, s, precision="sloppy")
