"""Recipes on a device: a call's launches made from C with operands at addresses that nobody knew when they were prepared.

The handler of the JAX door does this inside XLA; here it is done on memory of our own, so that ROCm's emulator can say whether it is right.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from comparison import assert_close

import hipgroupgemm as hgg
from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.backends.scan_arguments import FAULT_BYTES, fault_from_bytes
from hipgroupgemm.operands.views import ArrayView, Device
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers
from hipgroupgemm.runtime import get_runtime, replay

WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
DGRAD = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
BATCHED = RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())

CASES = {
    "rows": (BASIC, (61, 32), (5, 32, 24), {}),
    "transposed weights": (DGRAD, (61, 32), (5, 24, 32), {}),
    "weight gradient": (WGRAD, (61, 32), (61, 24), {}),
    "batch": (BATCHED, (3, 33, 32), (3, 32, 24), {}),
    "bias and alpha": (BASIC, (61, 32), (5, 32, 24), {"bias": True, "alpha": 0.5}),
    "offset": (BASIC, (61, 32), (3, 32, 24), {"group_offset": 1}),
    "no rows": (WGRAD, (0, 32), (0, 24), {}),
}
TARGETS = [
    pytest.param("rocm", "hipblaslt", marks=pytest.mark.hip),
    pytest.param("rocm", "triton", marks=pytest.mark.hip),
    pytest.param("cuda", "triton", marks=pytest.mark.cuda),
]


class Prepared:
    """A recipe of one call on a device."""

    def __init__(self, kind, backend, values, numbers, extra):
        self.where, self.runtime = Device(kind, 0), get_runtime(kind)
        specs = {role: hgg.ArraySpec(x.shape, x.dtype, device=self.where) for role, x in values.items()}
        config = hgg.config_for_ragged_dot(ragged_dot_dimension_numbers=numbers, **specs, **extra)
        sizes = values["group_sizes"]
        view = ArrayView(0, sizes.shape, sizes.strides, sizes.dtype, self.where, "")
        arguments = Arguments(config, {}, view, False, extra.get("group_offset", 0), "zero", "none", 0)
        plan = hgg.GroupedMatmulPlan(config, backend, self.where, use_store=False)
        self.slots = (*values, "out", "scratch")
        self.fault = hgg.DeviceArray.from_numpy(np.zeros(FAULT_BYTES, np.uint8), self.where)
        self.executable = get_backend(backend).prepare(plan.key, self.where, plan.algorithm, 0)
        self.recipe = self.executable.recipe(arguments, self.slots, self.fault.ptr)
        self.list = replay.LaunchList(self.runtime, 0, 0, self.recipe.moves, (), self.recipe.launches)

    def run(self, values, out):
        """out, on the host; it and the scratch hold NaN before."""
        arrays = {role: hgg.DeviceArray.from_numpy(x, self.where) for role, x in values.items()}
        arrays["out"] = hgg.DeviceArray.from_numpy(np.full_like(out, np.nan), self.where)
        arrays["scratch"] = hgg.DeviceArray.from_numpy(np.full(max(256, self.recipe.scratch_size), 0xFF, np.uint8), self.where)
        addresses = [arrays[slot].ptr or arrays["scratch"].ptr for slot in self.slots]
        given = (ctypes.c_uint64 * len(addresses))(*addresses)
        assert replay._replay_function()(ctypes.c_void_p(self.list.address), given) == 0
        self.runtime.synchronize_device(0)
        return arrays["out"].to_numpy()


def values_of(rng, numbers, lhs, rhs, extra, dtype="float16"):
    values = {"lhs": rng.standard_normal(lhs).astype(dtype), "rhs": rng.standard_normal(rhs).astype(dtype)}
    groups = 5 if not numbers.rhs_group_dimensions else rhs[0] + 2 * ("group_offset" in extra)
    ragged = lhs[numbers.lhs_ragged_dimensions[0]]
    values["group_sizes"] = rng.multinomial(max(0, ragged - 4), rng.dirichlet(np.ones(groups))).astype(np.int32)
    if "bias" in extra:
        values["bias"] = rng.standard_normal((rhs[0], rhs[2])).astype(dtype)
    return values


@pytest.mark.parametrize(("kind", "backend"), TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_values(kind, backend, name, rng):
    numbers, lhs, rhs, extra = CASES[name]
    keywords = {key: value for key, value in extra.items() if key != "bias"}
    prepared = None
    for _ in range(3):  # other values at other addresses
        values = values_of(rng, numbers, lhs, rhs, extra)
        prepared = prepared or Prepared(kind, backend, values, numbers, keywords)
        wide = {role: x if role == "group_sizes" else x.astype(np.float64) for role, x in values.items()}
        value = hgg.ragged_dot_reference(ragged_dot_dimension_numbers=numbers, **wide, **keywords)
        magnitude = hgg.ragged_dot_reference(ragged_dot_dimension_numbers=numbers, **{r: np.abs(x) for r, x in wide.items()}, **keywords)
        got = prepared.run(values, value.astype("float16"))
        assert_close(got, value, magnitude, lhs[numbers.dot_dimension_numbers[0][0][0]] + 1, [np.dtype("float16")] * 2)
    assert fault_from_bytes(bytes(prepared.fault.to_numpy())) is None


@pytest.mark.parametrize(("kind", "backend"), TARGETS)
def test_wrong_sizes_are_kept(kind, backend, rng):
    values = values_of(rng, BASIC, (61, 32), (5, 32, 24), {})
    prepared = Prepared(kind, backend, values, BASIC, {})
    values["group_sizes"] = np.array([3, 2, 70, 1, 1], np.int32)
    out = prepared.run(values, np.zeros((61, 24), np.float16))
    assert np.isfinite(out).all()
    fault = fault_from_bytes(bytes(prepared.fault.to_numpy()))
    assert (fault.kind, fault.group, fault.wanted, fault.left) == ("group_sizes", 2, 70, 56)
