"""Arrays of other producers: results in the caller's framework, interfaces that an object has or lacks, malformed ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.operands.device_array import DeviceArray
from hipgroupgemm.operands.views import Device


def operands():
    rng = np.random.default_rng(5)
    return rng.standard_normal((8, 4), np.float32), rng.standard_normal((2, 4, 3), np.float32), np.array([3, 5])


def test_plan_gives_results_in_the_framework_of_lhs():
    lhs, rhs, sizes = operands()
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), device="cpu") as plan:
        result = plan.execute(jnp.asarray(lhs), jnp.asarray(rhs), sizes)
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(np.asarray(result), plan.execute(lhs, rhs, sizes))


class Memory:
    """Stands for device memory: nothing here touches it."""

    ptr = 4096


@pytest.mark.parametrize("device", [Device("rocm", 1), Device("cuda", 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=str)
def test_device_arrays_are_taken(device, dtype):
    """Also where they have no __cuda_array_interface__, and with the stream that their contents are produced on."""
    view = hgg.as_array(DeviceArray(Memory(), (3, 5), np.dtype(dtype), device, 64))
    assert (view.pointer, view.shape, view.dtype, view.device, view.stream) == (4096, (3, 5), np.dtype(dtype), device, 64)
    assert view.strides == (5 * view.dtype.itemsize, view.dtype.itemsize)


class OnTheHost:
    """Has the interface as a property that raises, as torch's tensors on a CPU."""

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("on the host")


class WithDLPack(OnTheHost):
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_an_interface_that_an_object_lacks_gives_way_to_dlpack():
    lhs, rhs, sizes = operands()
    np.testing.assert_array_equal(hgg.ragged_dot(WithDLPack(lhs), rhs, sizes), hgg.ragged_dot(lhs, rhs, sizes))
    with pytest.raises(TypeError, match="lhs: got OnTheHost, wanted an array"):
        hgg.ragged_dot(OnTheHost(), rhs, sizes)


@pytest.mark.parametrize(
    "change",
    [
        {"strides": (4,)},
        {"strides": (16, 4, 4)},
        {"strides": 4},
        {"shape": (-1, 0)},
        {"shape": 4},
        {"data": ("0x10", False)},
        {"data": None},
        {"typestr": "nonsense"},
        {"version": None},
    ],
    ids=str,
)
def test_malformed_interfaces_are_named(change):
    class Producer:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (0, 4), "typestr": "<f4", "data": (0, False), "strides": None, "version": 3, **change}

    _, rhs, _ = operands()
    with pytest.raises(TypeError, match="lhs: its __cuda_array_interface__ is malformed"):
        hgg.ragged_dot(Producer(), rhs, [0, 0])


def test_specs_have_no_negative_extents():
    with pytest.raises(ValueError, match=r"shape=\(-1, 4\): extents must not be negative"):
        hgg.ArraySpec((-1, 4), "float32")
