"""Real arrays of CuPy, torch, JAX and Numba on a CUDA device, as views and as consumers of DeviceArray."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.views import Device

pytestmark = pytest.mark.cuda
DEVICE = Device("cuda", 0)


def read(view: arrays.ArrayView) -> np.ndarray:
    """A view's elements, copied to the host."""
    from hipgroupgemm.runtime import get_runtime

    runtime = get_runtime("cuda")
    host = np.zeros(max(view.reach, 1), np.uint8)
    with runtime.use_device(0):
        runtime.synchronize_device(0)
        if view.reach:
            runtime.memcpy_async(host.ctypes.data, view.pointer, view.reach, 0)
            runtime.synchronize_stream(0)
    return np.ndarray(view.shape, view.dtype, host, 0, view.strides).copy()


def random(shape, dtype):
    return np.random.default_rng().standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.uint8])
def test_cupy(dtype):
    import cupy

    host = (random((7, 10), np.float32) * 50).astype(dtype)
    array = cupy.asarray(host)
    for mine, theirs in ((array, host), (array[1:, ::3], host[1:, ::3]), (array.T, host.T), (array[:0], host[:0])):
        view = arrays.view_of(mine, "lhs")
        assert (view.shape, view.dtype, view.device, view.framework) == (theirs.shape, theirs.dtype, DEVICE, "cupy")
        np.testing.assert_array_equal(read(view), theirs)
    with pytest.raises(ValueError, match="negative"):
        arrays.view_of(array[::-1], "lhs")


def test_cupy_bf16():
    import cupy

    host = random((5, 6), ml_dtypes.bfloat16)
    raw = cupy.asarray(host.view(np.uint16))
    view = arrays.as_array(raw, dtype="bfloat16")
    np.testing.assert_array_equal(read(view), host)
    made, _ = arrays.empty((3, 4), np.dtype(ml_dtypes.bfloat16), arrays.view_of(raw, "lhs"), DEVICE, 0)
    out = arrays.as_array(made, "bfloat16")
    assert isinstance(made, cupy.ndarray)
    assert out.shape == (3, 4)
    assert out.dtype == ml_dtypes.bfloat16
    assert out.pointer % 16 == 0


def test_cupy_current_stream():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert arrays.current_stream("cupy", DEVICE) == stream.ptr
    assert arrays.current_stream("cupy", DEVICE) != stream.ptr


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_torch(name):
    import torch

    tensor = torch.randn(6, 8, device="cuda").to(getattr(torch, name))
    for mine in (tensor, tensor[1:, 2:], tensor.t(), tensor[:0]):
        view = arrays.view_of(mine, "lhs")
        assert (view.shape, view.dtype.name, view.device, view.framework) == (tuple(mine.shape), name, DEVICE, "torch")
        np.testing.assert_array_equal(read(view).astype(np.float64), mine.double().cpu().numpy())
    made, pointer = arrays.empty((3, 4), view.dtype, view, DEVICE, 0)
    out = arrays.view_of(made, "out")
    assert pointer == out.pointer
    assert made.dtype is getattr(torch, name)
    assert made.is_cuda
    assert out.dtype.name == name
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert arrays.current_stream("torch", DEVICE) == stream.cuda_stream


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32"])
def test_jax(name):
    import jax

    if all(device.platform == "cpu" for device in jax.devices()):
        pytest.fail("this JAX sees no GPU")
    host = (np.arange(30).reshape(5, 6) % 13).astype(np.dtype(getattr(ml_dtypes, name, name)))
    array = jax.numpy.asarray(host)
    view = arrays.view_of(array, "lhs")
    assert (view.shape, view.dtype, view.device, view.framework, view.readonly) == ((5, 6), host.dtype, DEVICE, "jax", True)
    np.testing.assert_array_equal(read(view), host)
    made, _ = arrays.empty((5, 6), host.dtype, view, DEVICE, 0)
    made = hgg.DeviceArray.from_numpy(host, "cuda:0")
    back = arrays.deliver(made, view, DEVICE)
    assert isinstance(back, jax.Array)
    np.testing.assert_array_equal(np.asarray(back), host)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Numba's own, at its import
def test_numba():
    from numba import cuda

    host = random((4, 6), np.float32)
    array = cuda.to_device(host)
    view = arrays.view_of(array, "lhs")
    assert (view.shape, view.dtype, view.device, view.framework) == ((4, 6), host.dtype, DEVICE, "numba")
    np.testing.assert_array_equal(read(view), host)
    made = hgg.DeviceArray.from_numpy(host, "cuda:0")
    np.testing.assert_array_equal(arrays.deliver(made, view, DEVICE).copy_to_host(), host)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64])
def test_device_array_reaches_every_framework(dtype):
    import cupy
    import torch

    host = (np.arange(24).reshape(4, 6) % 7).astype(dtype)
    made = hgg.DeviceArray.from_numpy(host, "cuda:0")
    np.testing.assert_array_equal(made.to_numpy(), host)
    np.testing.assert_array_equal(torch.from_dlpack(made).double().cpu().numpy(), host.astype(np.float64))
    if np.dtype(dtype).isbuiltin == 1:
        np.testing.assert_array_equal(cupy.asarray(made).get(), host)
        np.testing.assert_array_equal(cupy.from_dlpack(made).get(), host)
    view = arrays.view_of(made, "lhs")
    assert (view.shape, view.device, view.pointer) == ((4, 6), DEVICE, made.ptr)


def test_device_array_outlives_its_name():
    import torch

    host = random((300, 300), np.float32)
    tensor = torch.from_dlpack(hgg.DeviceArray.from_numpy(host, "cuda:0"))
    others = [hgg.DeviceArray.from_numpy(random((300, 300), np.float32), "cuda:0") for _ in range(8)]
    np.testing.assert_array_equal(tensor.cpu().numpy(), host)
    assert len(others) == 8


def test_devices_that_differ_are_named():
    import cupy

    a, b = cupy.zeros((4, 3), "f4"), np.zeros((2, 3, 5), "f4")
    with pytest.raises(ValueError, match=r"rhs is on cpu, but lhs is on cuda:0"):
        hgg.ragged_dot(a, b, np.array([2, 2]))
    with pytest.raises(ValueError, match=r"group_sizes is on cuda:0, but lhs is on cpu"):
        hgg.ragged_dot(np.zeros((4, 3), "f4"), b, cupy.array([2, 2]))


def test_the_reference_named_on_a_gpu_refuses():
    import cupy

    a, b = cupy.zeros((4, 3), "f4"), cupy.zeros((2, 3, 5), "f4")
    with pytest.raises(NotImplementedError, match="CPU"):
        hgg.ragged_dot(a, b, cupy.array([2, 2]), backend="reference")
