"""The caller's arrays: NumPy and its subclasses, JAX on the CPU, as_array, ArraySpec, and results in the caller's framework."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from generators import FLOAT8S, FLOATS, dtype_of, random_values
from jax_judge import enable_x64

import hipgroupgemm as hgg
from hipgroupgemm.operands.arrays import view_of

SIZES = [5, 0, 7]


def operands(rng, dtype="float32"):
    return random_values(rng, (12, 7), dtype), random_values(rng, (3, 7, 5), dtype)


# ---- NumPy ---------------------------------------------------------------------------------------------------------------------


class Tagged(np.ndarray):
    """A subclass, as units and labels libraries have."""


def test_numpy_subclasses_are_read_as_the_arrays_they_are(rng, tmp_path):
    lhs, rhs = operands(rng)
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    mapped = np.memmap(tmp_path / "lhs", lhs.dtype, "w+", shape=lhs.shape)
    mapped[...] = lhs
    for array in (lhs.view(Tagged), mapped, np.rec.fromarrays([lhs], names="x")["x"]):
        got = hgg.ragged_dot(array, rhs, SIZES)
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, wanted)
    out = np.zeros((12, 5), np.float32).view(Tagged)
    assert hgg.ragged_dot(lhs, rhs, SIZES, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), wanted)


@pytest.mark.parametrize("name", ["lhs", "rhs", "group_sizes", "out", "c", "bias"])
def test_masked_arrays_are_refused(name, rng):
    lhs, rhs = operands(rng)
    arguments = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": np.array(SIZES),
        "c": np.zeros((12, 5), np.float32),
        "beta": 1.0,
        "bias": np.zeros((3, 5), np.float32),
    }
    arguments["out"] = np.zeros((12, 5), np.float32)
    arguments[name] = np.ma.masked_array(arguments[name])
    with pytest.raises(TypeError, match=rf"{name}: got a masked array.*\.filled"):
        hgg.ragged_dot(**arguments)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2"])
def test_foreign_byte_order_is_refused_by_name(dtype, rng):
    lhs, rhs = operands(rng)
    with pytest.raises(NotImplementedError, match=r"lhs: .*byte order.*convert"):
        hgg.ragged_dot(lhs.astype(dtype), rhs, SIZES)
    with pytest.raises(NotImplementedError, match=r"rhs: .*byte order"):
        hgg.ragged_dot(lhs, rhs.astype(dtype), SIZES)
    with pytest.raises(TypeError, match=r"group_sizes: .*byte order"):
        hgg.ragged_dot(lhs, rhs, np.array(SIZES, ">i4"))
    with pytest.raises(TypeError, match="out: got >f4, wanted float32"):
        hgg.ragged_dot(lhs, rhs, SIZES, out=np.zeros((12, 5), ">f4"))


def test_read_only_arrays_are_read_and_never_written(rng):
    lhs, rhs = operands(rng)
    for array in (lhs, rhs):
        array.flags.writeable = False
    assert hgg.ragged_dot(lhs, rhs, SIZES).flags.writeable
    out = np.zeros((12, 5), np.float32)
    out.flags.writeable = False
    for bad in (out, np.broadcast_to(np.float32(0), (12, 5))):
        with pytest.raises(TypeError, match="out: is read-only; pass a writable array"):
            hgg.ragged_dot(lhs, rhs, SIZES, out=bad)
    assert not out.any()


def test_sizes_may_be_lists_tuples_and_any_strides(rng):
    lhs, rhs = operands(rng)
    wanted = hgg.ragged_dot(lhs, rhs, np.array(SIZES))
    wide = np.zeros((3, 4), np.int64)
    wide[:, 2] = SIZES
    for sizes in (SIZES, tuple(SIZES), [np.int8(5), 0, np.uint16(7)], wide[:, 2], np.array(SIZES, np.int16)):
        np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, sizes), wanted)
    np.testing.assert_array_equal(hgg.ragged_dot(lhs, rhs, offs=(5, 5, 12)), wanted)


# ---- JAX -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S])
def test_jax_arrays_of_every_type(dtype, rng):
    with enable_x64():
        lhs, rhs = operands(rng, dtype)
        a, b, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(SIZES)
        assert a.dtype == dtype_of(dtype)
        got = hgg.ragged_dot(a, b, sizes)
        assert isinstance(got, jax.Array)
        assert got.dtype == dtype_of(dtype)
        assert got.devices() == a.devices()
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), hgg.ragged_dot(lhs, rhs, SIZES).view(np.uint8))


def test_the_framework_of_lhs_decides(rng):
    lhs, rhs = operands(rng)
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    mixed = hgg.ragged_dot(lhs, jnp.asarray(rhs), jnp.asarray(SIZES))
    assert type(mixed) is np.ndarray
    other = hgg.ragged_dot(jnp.asarray(lhs), rhs, SIZES)
    assert isinstance(other, jax.Array)
    for got in (mixed, other):
        np.testing.assert_array_equal(np.asarray(got), wanted)
    out = np.zeros((12, 5), np.float32)
    assert hgg.ragged_dot(jnp.asarray(lhs), rhs, SIZES, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    empty = hgg.ragged_dot(jnp.zeros((0, 7)), jnp.asarray(rhs), jnp.zeros(3, int))
    assert isinstance(empty, jax.Array)
    assert empty.shape == (0, 5)


def test_a_jax_result_keeps_its_values(rng):
    """It must not alias memory that is used again."""
    lhs, rhs = operands(rng)
    results = [hgg.ragged_dot(jnp.asarray(lhs) * scale, jnp.asarray(rhs), SIZES) for scale in range(20)]
    for scale, result in enumerate(results):
        np.testing.assert_allclose(np.asarray(result), scale * hgg.ragged_dot(lhs, rhs, SIZES), rtol=1e-5, atol=1e-5)


def test_a_jax_array_is_never_out(rng):
    lhs, rhs = operands(rng)
    out = jnp.zeros((12, 5), jnp.float32)
    for function in (hgg.ragged_dot, hgg.ragged_dot_reference):
        with pytest.raises(TypeError, match="out: JAX arrays are immutable; leave out away"):
            function(lhs, rhs, SIZES, out=out)
    assert not np.asarray(out).any()


def test_tracers_are_refused_with_a_way_out(rng):
    lhs, rhs = operands(rng)
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(TypeError, match=r"lhs: got a JAX tracer .*pure_callback"):
            transform(lambda a: hgg.ragged_dot(a, rhs, SIZES).sum())(jnp.ones((12, 12, 7)) if transform is jax.vmap else jnp.asarray(lhs))
    with pytest.raises(TypeError, match="group_sizes: got a JAX tracer"):
        jax.jit(lambda sizes: hgg.ragged_dot(lhs, rhs, sizes))(jnp.asarray(SIZES))

    def host(a):
        return jax.pure_callback(lambda a: hgg.ragged_dot(np.asarray(a), rhs, SIZES), jax.ShapeDtypeStruct((12, 5), np.float32), a)

    np.testing.assert_array_equal(np.asarray(jax.jit(host)(lhs)), hgg.ragged_dot(lhs, rhs, SIZES))


def test_jax_s_dtypes_and_dimension_numbers_are_taken(rng):
    lhs, rhs = operands(rng)
    assert hgg.ragged_dot(lhs, rhs, SIZES, preferred_element_type=jnp.bfloat16).dtype == ml_dtypes.bfloat16
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    np.testing.assert_array_equal(hgg.ragged_dot_general(lhs, rhs, SIZES, numbers), hgg.ragged_dot(lhs, rhs, SIZES))


# ---- as_array and ArraySpec ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", *FLOAT8S])
def test_as_array_names_a_type_that_the_object_cannot(dtype, rng):
    lhs, rhs = operands(rng, dtype)
    raw = "V2" if dtype == "bfloat16" else "V1"
    plain = "uint16" if dtype == "bfloat16" else "int8"
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    for kind in (raw, plain):
        a, b = hgg.as_array(lhs.view(kind), dtype), hgg.as_array(rhs.view(kind), dtype=dtype_of(dtype))
        got = hgg.ragged_dot(a, b, SIZES)
        assert got.dtype == dtype_of(dtype)
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))
        out = np.zeros((12, 5), kind)
        assert hgg.ragged_dot(a, b, SIZES, out=hgg.as_array(out, dtype)) is not None
        np.testing.assert_array_equal(out.view(np.uint8), wanted.view(np.uint8))
    with pytest.raises(TypeError, match=r"lhs: its interface names no element type .*as_array\(obj, dtype="):
        hgg.ragged_dot(lhs.view(raw), rhs, SIZES)
    with pytest.raises(TypeError, match="names no element type"):
        hgg.as_array(lhs.view(raw))
    with pytest.raises(TypeError, match=r"dtype=float32: has 4 bytes an element, obj has"):
        hgg.as_array(lhs.view(raw), "float32")


def test_as_array_shares_memory_and_keeps_it_alive(rng):
    lhs, rhs = operands(rng)
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    array = np.array(lhs).view(Tagged)
    alive = weakref.ref(array)
    view = hgg.as_array(array)
    assert view.pointer == array.ctypes.data
    assert hgg.as_array(view).pointer == view.pointer
    del array
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(hgg.ragged_dot(view, rhs, SIZES), wanted)
    del view
    gc.collect()
    assert alive() is None, "a view that is gone keeps its array alive"
    with pytest.raises(TypeError, match="obj: got list, wanted an array"):
        hgg.as_array([1.0])
    with pytest.raises(TypeError, match="dtype='nope'"):
        hgg.as_array(lhs, "nope")


def test_a_call_keeps_no_operand_alive(rng):
    arrays = [np.array(values).view(Tagged) for values in operands(rng)]
    alive = [weakref.ref(array) for array in arrays]
    hgg.ragged_dot(*arrays, SIZES)
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*arrays, SIZES), device="cpu") as plan:
        plan.execute(*arrays, SIZES)
        del arrays
        gc.collect()
        assert [ref() for ref in alive] == [None, None]


def test_array_spec_is_for_configs_and_has_no_memory(rng):
    lhs, rhs = operands(rng)
    spec = hgg.ArraySpec(lhs.shape, "float32")
    assert hgg.config_for_ragged_dot(spec, rhs, SIZES).m == 12
    assert hgg.ArraySpec((3, 4), "float8_e5m2", strides=(8, 1)).strides == (8, 1)
    assert hgg.ArraySpec((3, 4), ml_dtypes.bfloat16).strides == (8, 2)
    for arguments, name in [((spec, rhs, SIZES), "lhs"), ((lhs, hgg.ArraySpec(rhs.shape, "float32"), SIZES), "rhs")]:
        for function in (hgg.ragged_dot, hgg.ragged_dot_reference):
            with pytest.raises(ValueError, match=f"{name}: has shape .* but no memory"):
                function(*arguments)
    with pytest.raises(ValueError, match="group_sizes: has shape"):
        hgg.ragged_dot(lhs, rhs, hgg.ArraySpec((3,), "int32"))
    with pytest.raises(ValueError, match="out: has shape"):
        hgg.ragged_dot(lhs, rhs, SIZES, out=hgg.ArraySpec((12, 5), "float32"))
    with pytest.raises(ValueError, match=r"strides=\(4,\): wanted 2 of them"):
        hgg.ArraySpec((3, 4), "float32", strides=(4,))
    with pytest.raises(TypeError, match="dtype='nope'"):
        hgg.ArraySpec((3, 4), "nope")


def test_views_say_what_they_are(rng):
    lhs, _ = operands(rng)
    view = view_of(lhs[2:, 1:3], "lhs")
    assert (view.shape, view.strides, view.ndim, view.size) == ((10, 2), (28, 4), 2, 20)
    assert view.pointer == lhs.ctypes.data + 2 * 28 + 4
    assert view.reach == 9 * 28 + 4 + 4
    assert view.describe() == "float32 (10, 2) on cpu"
    assert view_of(lhs[:0], "lhs").reach == 0
    assert view_of(lhs[:0], "lhs").pointer == 0
