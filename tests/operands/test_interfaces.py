"""DLPack and the CUDA array interface, by producers of the tests' own; device pointers are claimed, never followed."""

from __future__ import annotations

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from generators import FLOAT8S, FLOATS, random_values
from producers import CudaArray, DLPackArray, capsule_name

import hipgroupgemm as hgg
from hipgroupgemm.operands.arrays import ANYWHERE, as_array, view_of
from hipgroupgemm.operands.dlpack import export_capsule, import_capsule
from hipgroupgemm.operands.views import CPU, Device

SIZES = [5, 0, 7]


def operands(rng, dtype="float32"):
    return random_values(rng, (12, 7), dtype), random_values(rng, (3, 7, 5), dtype)


# ---- DLPack --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S])
@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_of_every_type(dtype, versioned, rng):
    lhs, rhs = operands(rng, dtype)
    a, b = DLPackArray(lhs, versioned=versioned), DLPackArray(rhs, versioned=versioned)
    sizes = DLPackArray(np.array(SIZES, np.int64), versioned=versioned)
    got = hgg.ragged_dot(a, b, sizes)
    assert type(got) is np.ndarray
    assert got.dtype == lhs.dtype
    np.testing.assert_array_equal(got.view(np.uint8), hgg.ragged_dot(lhs, rhs, SIZES).view(np.uint8))
    assert a.requests[0] == {"max_version": (1, 0)}
    assert len(a.requests) == (1 if versioned else 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *FLOAT8S])
def test_jax_s_own_capsules_are_read_right(dtype, rng):
    """Another implementation's codes for every element type; JAX's arrays themselves are not read by DLPack on a CPU."""
    lhs, rhs = operands(rng, dtype)

    class Only:
        def __init__(self, values):
            array = jnp.asarray(values)
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    got = hgg.ragged_dot(Only(lhs), Only(rhs), SIZES)
    assert got.dtype == lhs.dtype
    np.testing.assert_array_equal(got.view(np.uint8), hgg.ragged_dot(lhs, rhs, SIZES).view(np.uint8))


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_strides_offsets_and_their_absence(versioned, rng):
    lhs, rhs = operands(rng)
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    big = np.full((14, 9), np.nan, np.float32)
    big[1:13, 1:8] = lhs
    for array in (
        DLPackArray(lhs, versioned=versioned, null_strides=True),
        DLPackArray(lhs, versioned=versioned, byte_offset=24),
        DLPackArray(big[1:13, 1:8], versioned=versioned, byte_offset=40),
        DLPackArray(np.asfortranarray(lhs), versioned=versioned),
    ):
        np.testing.assert_allclose(hgg.ragged_dot(array, rhs, SIZES), wanted, rtol=1e-5, atol=1e-5)
    empty = DLPackArray(lhs[:0], versioned=versioned)
    assert hgg.ragged_dot(empty, rhs, [0, 0, 0]).shape == (0, 5)
    scalar = DLPackArray(np.array(1, np.int64), versioned=versioned)
    assert hgg.ragged_dot(lhs, rhs[:1], [0, 12], group_offset=scalar).any()
    with pytest.raises(ValueError, match=r"lhs: the stride of axis 0 \(-28 bytes\) is negative"):
        hgg.ragged_dot(DLPackArray(lhs[::-1], versioned=versioned), rhs, SIZES)


def test_dlpack_out_is_written_unless_it_is_read_only(rng):
    lhs, rhs = operands(rng)
    out = np.full((12, 5), np.nan, np.float32)
    producer = DLPackArray(out)
    assert hgg.ragged_dot(lhs, rhs, SIZES, out=producer) is producer
    np.testing.assert_array_equal(out, hgg.ragged_dot(lhs, rhs, SIZES))
    with pytest.raises(TypeError, match="out: is read-only"):
        hgg.ragged_dot(lhs, rhs, SIZES, out=DLPackArray(out, readonly=True))
    assert hgg.ragged_dot(DLPackArray(lhs, readonly=True), rhs, SIZES).shape == (12, 5)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"device": (7, 0)}, NotImplementedError, ("lhs", "DLPack type 7", "CPU, CUDA or ROCm")),
        ({"type_code": (2, 32, 4)}, NotImplementedError, ("lhs", "4 lanes")),
        ({"type_code": (17, 4, 1)}, NotImplementedError, ("lhs", "code 17 of 4 bits")),
        ({"type_code": (0, 32, 1)}, NotImplementedError, ("lhs", "int32", "floating")),
        ({"type_code": (6, 8, 1)}, NotImplementedError, ("lhs", "bool", "floating")),
        ({"version": (2, 0)}, NotImplementedError, ("lhs", "version 2.0", "1.x")),
    ],
    ids=str,
)
def test_dlpack_that_is_refused(settings, kind, words, rng):
    lhs, rhs = operands(rng)
    with pytest.raises(kind) as caught:
        hgg.ragged_dot(DLPackArray(lhs, **settings), rhs, SIZES)
    for word in words:
        assert word in str(caught.value)


def test_a_capsule_that_is_none(rng):
    lhs, rhs = operands(rng)

    class Liar(DLPackArray):
        def __dlpack__(self, **arguments):
            return object()

    with pytest.raises(TypeError, match="lhs: __dlpack__ gave no DLPack capsule"):
        hgg.ragged_dot(Liar(lhs), rhs, SIZES)


def test_an_error_of_a_producer_is_its_own(rng):
    lhs, rhs = operands(rng)

    class Broken(DLPackArray):
        def __dlpack__(self, **arguments):
            raise BufferError("it is gone")

    with pytest.raises(BufferError, match="it is gone"):
        hgg.ragged_dot(Broken(lhs), rhs, SIZES)


def test_a_view_keeps_a_dlpack_producer_alive(rng):
    lhs, rhs = operands(rng)
    producer = DLPackArray(lhs.copy())
    alive = weakref.ref(producer)
    view = as_array(producer)
    del producer
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(hgg.ragged_dot(view, rhs, SIZES), hgg.ragged_dot(lhs, rhs, SIZES))
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("versioned", [False, True])
def test_capsules_of_our_own_go_to_numpy_and_back(versioned, rng):
    for dtype in ("float32", "float64", "float16", "int32", "uint8"):
        values = np.asfortranarray(random_values(rng, (3, 4), "float32").astype(dtype))
        view = view_of(values, "values")

        class Exporter:
            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, *, view=view, values=values, **arguments):
                return export_capsule(view, versioned=versioned, keep=values)

        taken = np.from_dlpack(Exporter())
        assert taken.ctypes.data == values.ctypes.data
        np.testing.assert_array_equal(taken, values)
        assert taken.strides == values.strides


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", *FLOAT8S])
def test_capsules_of_our_own_hold_what_they_name_until_they_are_done(versioned, dtype, rng):
    values = random_values(rng, (3, 4), dtype)

    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    capsule = export_capsule(view_of(values, "values"), versioned=versioned, keep=owner)
    assert capsule_name(capsule) == (b"dltensor_versioned" if versioned else b"dltensor")
    del owner
    gc.collect()
    assert alive() is not None
    back = import_capsule(capsule, "values")
    assert (back.pointer, back.shape, back.strides, back.dtype) == (values.ctypes.data, (3, 4), values.strides, values.dtype)
    del back, capsule
    gc.collect()
    assert alive() is None, "a capsule that nobody took must release its owner"


# ---- the CUDA array interface --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(fake_runtime):
    """A runtime with two GPUs: pointers ending in ...1xxx are on the first, in ...2xxx on the second."""
    asked = []

    def device_of_pointer(pointer):
        asked.append(pointer)
        return ("rocm", (pointer >> 12 & 15) - 1)

    fake_runtime.device_of_pointer = device_of_pointer
    return asked


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_cai_of_every_version(version, two_gpus):
    view = view_of(CudaArray((12, 7), "<f4", version=version), "lhs")
    assert (view.pointer, view.shape, view.strides, view.dtype) == (0x7F00_0000_1000, (12, 7), (28, 4), np.float32)
    assert (view.device, view.readonly, view.stream, view.framework) == (Device("rocm", 0), False, None, "")
    assert two_gpus == [0x7F00_0000_1000]
    assert view_of(CudaArray([12, 7], "<f8", strides=None, version=version), "lhs").strides == (56, 8)
    strided = view_of(CudaArray((12, 7), "<f2", strides=(2, 24), version=version), "lhs")
    assert strided.strides == (2, 24)
    assert view_of(CudaArray((3,), "<i4", version=version, readonly=True), "sizes").readonly


def test_cai_streams(two_gpus):
    for stream in (1, 2, 0x5555):
        assert view_of(CudaArray((3,), "<i4", stream=stream), "sizes").stream == stream
    assert view_of(CudaArray((3,), "<i4", stream=None), "sizes").stream is None
    assert view_of(CudaArray((3,), "<i4", stream=7, version=2), "sizes").stream is None  # version 2 has no stream
    with pytest.raises(ValueError, match=r"sizes: __cuda_array_interface__ stream 0 is ambiguous.*1 \(legacy\) or 2"):
        view_of(CudaArray((3,), "<i4", stream=0), "sizes")


def test_cai_of_no_elements_has_no_pointer_and_no_device(two_gpus):
    for shape in ((0, 7), (3, 0)):
        view = view_of(CudaArray(shape, "<f4", pointer=0), "lhs")
        assert (view.pointer, view.device, view.size) == (0, ANYWHERE, 0)
    assert not two_gpus, "there is no pointer to ask about"
    with pytest.raises(ValueError, match=r"lhs: its pointer is 0, though it has elements, shape \(3, 7\)"):
        view_of(CudaArray((3, 7), "<f4", pointer=0), "lhs")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"mask": np.ones(3, bool)}, NotImplementedError, ("lhs", "mask")),
        ({"version": 4}, NotImplementedError, ("lhs", "version 4", "3")),
        ({"data": ...}, TypeError, ("lhs", "malformed", "data")),
        ({"data": 4096}, TypeError, ("lhs", "malformed")),
        ({"data": ("here", False)}, TypeError, ("lhs", "malformed")),
        ({"shape": ...}, TypeError, ("lhs", "malformed", "shape")),
        ({"shape": 12}, TypeError, ("lhs", "malformed")),
        ({"typestr": "<c8"}, NotImplementedError, ("lhs", "complex64", "floating")),
        ({"typestr": "??"}, TypeError, ("lhs", "malformed")),
        ({"typestr": ...}, TypeError, ("lhs", "malformed", "typestr")),
        ({"version": ...}, TypeError, ("lhs", "malformed", "version")),
        ({"strides": (4,)}, TypeError, ("lhs", "malformed", "strides")),
        ({"strides": ("a", 4)}, TypeError, ("lhs", "malformed")),
        ({"shape": (-1, 7)}, TypeError, ("lhs", "malformed")),
        ({"strides": (-28, 4)}, ValueError, ("lhs", "-28", "negative")),
        ({"strides": (28, 3)}, ValueError, ("lhs", "3 bytes", "multiple of the item size, 4")),
        ({"typestr": "<V2"}, TypeError, ("lhs", "no element type", "as_array")),
        ({"typestr": ">f4"}, NotImplementedError, ("lhs", "byte order")),
        ({"typestr": "<i4"}, NotImplementedError, ("lhs", "int32", "floating")),
    ],
    ids=str,
)
def test_cai_that_is_refused(changes, kind, words, two_gpus):
    changes = {"typestr": "<f4", "shape": (12, 7), **changes}
    lhs = CudaArray(changes.pop("shape"), changes.pop("typestr"), **changes)
    with pytest.raises(kind) as caught:
        hgg.config_for_ragged_dot(lhs, CudaArray((3, 7, 5), "<f4"), CudaArray((3,), "<i4"))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_bf16_and_fp8_by_cai_need_a_name(two_gpus):
    lhs, rhs, sizes = CudaArray((12, 7), "<V2"), CudaArray((3, 7, 5), "<V2"), CudaArray((3,), "<i8")
    named = [hgg.as_array(array, "bfloat16") for array in (lhs, rhs)]
    config = hgg.config_for_ragged_dot(*named, sizes)
    assert (config.type_a, config.type_b, config.type_d) == ("bfloat16",) * 3
    assert hgg.as_array(CudaArray((3,), "<V1"), "float8_e4m3fn").dtype.name == "float8_e4m3fn"
    assert hgg.as_array(lhs, "bfloat16").owner is lhs


def test_devices_that_differ_are_an_error_that_names_both(two_gpus):
    first, second = 0x7F00_0000_1000, 0x7F00_0000_2000
    host = np.zeros((3, 7, 5), np.float32)
    lhs, rhs, sizes = CudaArray((12, 7), "<f4", first), CudaArray((3, 7, 5), "<f4", first), CudaArray((3,), "<i4", first)
    other = CudaArray((3, 7, 5), "<f4", second)
    out = CudaArray((12, 5), "<f4", second)
    for arguments, words in [
        ((lhs, other, sizes), ("rhs is on rocm:1", "lhs is on rocm:0")),
        ((lhs, host, sizes), ("rhs is on cpu", "lhs is on rocm:0")),
        ((np.zeros((12, 7), np.float32), rhs, sizes), ("rhs is on rocm:0", "lhs is on cpu")),
        ((lhs, rhs, CudaArray((3,), "<i4", second)), ("group_sizes is on rocm:1", "lhs is on rocm:0")),
        ((np.zeros((12, 7), np.float32), host, sizes), ("group_sizes is on rocm:0", "lhs is on cpu")),
    ]:
        with pytest.raises(ValueError) as caught:
            hgg.config_for_ragged_dot(*arguments)
        for word in (*words, "move one of them"):
            assert word in str(caught.value)
    for name, array in [("out", out), ("c", out), ("bias", CudaArray((3, 5), "<f4", second))]:
        with pytest.raises(ValueError, match=f"{name} is on rocm:1, but lhs is on rocm:0"):
            hgg.config_for_ragged_dot(lhs, rhs, sizes, beta=float(name == "c"), **{name: array})
    with pytest.raises(ValueError, match="group_offset is on rocm:1, but lhs is on rocm:0"):
        hgg.config_for_ragged_dot(lhs, rhs, sizes, group_offset=CudaArray((1,), "<i4", second))
    assert hgg.config_for_ragged_dot(lhs, rhs, np.array(SIZES)).m == 12  # group sizes may lie on the host
    empty = CudaArray((0, 7), "<f4", 0)
    assert hgg.config_for_ragged_dot(empty, rhs, sizes).m == 0  # and what has no memory is nowhere


def test_a_gpu_without_a_backend_is_refused_with_reasons(two_gpus):
    lhs, rhs, sizes = CudaArray((12, 7), "<f4"), CudaArray((3, 7, 5), "<f4", 0x7F00_0000_1400), CudaArray((3,), "<i4", 0x7F00_0000_1800)
    out = CudaArray((12, 5), "<f4", 0x7F00_0000_1C00)
    with pytest.raises(NotImplementedError) as caught:
        hgg.ragged_dot(lhs, rhs, sizes, out=out, backend="reference")
    for word in ("reference", "computes on the CPU", "rocm:0"):
        assert word in str(caught.value)
    with pytest.raises(NotImplementedError, match="ragged_dot_reference: lhs is on rocm:0; it computes on the CPU"):
        hgg.ragged_dot_reference(lhs, rhs, sizes)
    with pytest.raises(TypeError, match="out: is read-only"):
        hgg.ragged_dot(lhs, rhs, sizes, out=CudaArray((12, 5), "<f4", 0x7F00_0000_1C00, readonly=True))


def test_out_on_a_gpu_may_not_overlap_either(two_gpus):
    lhs, rhs, sizes = CudaArray((12, 7), "<f4"), CudaArray((3, 7, 5), "<f4", 0x7F00_0000_1400), CudaArray((3,), "<i4", 0x7F00_0000_1800)
    with pytest.raises(ValueError, match="out: shares memory with lhs"):
        hgg.ragged_dot(lhs, rhs, sizes, out=CudaArray((12, 5), "<f4", 0x7F00_0000_1000 + 11 * 28))
    with pytest.raises(ValueError, match="out: shares memory with rhs"):
        hgg.ragged_dot(lhs, rhs, sizes, out=CudaArray((12, 5), "<f4", 0x7F00_0000_1400 + 4))


class OnTheHost(DLPackArray):
    """As frameworks do it: the class has the CUDA interface, but a host array raises AttributeError for it."""

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("this array is on the host")


def test_a_class_with_both_interfaces_is_read_by_the_one_its_object_has(rng):
    lhs, rhs = operands(rng)
    np.testing.assert_array_equal(hgg.ragged_dot(OnTheHost(lhs), rhs, SIZES), hgg.ragged_dot(lhs, rhs, SIZES))

    class Late:
        """Gets its interface in the instance."""

        def __init__(self, values):
            self.__dlpack__ = DLPackArray(values).__dlpack__
            self.__dlpack_device__ = lambda: (1, 0)

    np.testing.assert_array_equal(hgg.ragged_dot(Late(lhs), rhs, SIZES), hgg.ragged_dot(lhs, rhs, SIZES))


def test_pinned_memory_counts_as_host(rng):
    lhs, rhs = operands(rng)
    for kind in (3, 11):  # CUDA's and ROCm's pinned host memory
        assert view_of(DLPackArray(lhs, device=(kind, 0)), "lhs").device == CPU
        assert hgg.ragged_dot(DLPackArray(lhs, device=(kind, 0)), rhs, DLPackArray(np.array(SIZES), device=(kind, 0))).shape == (12, 5)


@pytest.mark.parametrize(
    ("code", "kind", "asked", "given"), [(2, "cuda", None, 1), (2, "cuda", 77, 77), (10, "rocm", None, 0), (10, "rocm", 77, 77)]
)
def test_dlpack_s_stream_rules(code, kind, asked, given, rng):
    producer = DLPackArray(operands(rng)[0], device=(code, 1))
    view = view_of(producer, "lhs", asked)
    assert view.device == Device(kind, 1)
    assert producer.requests == [{"max_version": (1, 0), "stream": given}]
    assert view.stream == (asked or 0)  # for which the producer has ordered itself


def test_sizes_without_elements_are_where_the_operands_are(rng):
    class NoElements:
        __cuda_array_interface__ = {"version": 3, "shape": (0,), "typestr": "<i4", "data": (0, False), "stream": None}  # noqa: RUF012

    lhs = np.ones((4, 3), np.float32)
    out = hgg.ragged_dot(lhs, np.ones((0, 3, 5), np.float32), NoElements())
    assert out.shape == (4, 5) and not out.any()
