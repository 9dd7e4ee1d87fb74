"""The copy engine's descriptors of one kernel's operands, encoded where the launch reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from hipgroupgemm.backends.list_tables import MAP_BYTES
from hipgroupgemm.backends.triton.compiler import ELEMENTS, CompiledKernel
from hipgroupgemm.backends.triton.specs import operands_of
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.cuda.tensor_map import TensorMapEncoder
from hipgroupgemm.runtime.parameters import KernelParameters

__all__ = ["Descriptors", "layouts"]

_TALLEST = 256  # no less than the tallest box
_FAR = 1 << 30  # hopper_common.FAR
_ANY = 0x7FFF0000
_WRAP = 1 << 35  # bytes; see hopper_common
_ROLES = ("lhs", "rhs", "out")  # as they stand in the kernels' parameters

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layouts(config: GroupedGemmConfig) -> dict[str, Layout]:
    """(shape, strides in bytes but for the innermost) of each operand, of a list's arrays, as the sm_90 kernels describe them."""
    c, batch = config, max(config.batch_count, 1)
    at = {
        name: stride * FLOAT_BYTES[operand.type] for operand in operands_of(c).values() for name, stride in operand.strides.items()
    }  # fmt: skip

    def steps(*pairs: tuple[int, int]) -> tuple[int, ...]:
        """Strides of axes; those of one entry say nothing and become a legal number."""
        return tuple(stride if extent > 1 else 16 for extent, stride in pairs)

    lhs_b, rhs_b, out_b = ((batch, at[f"{role}_b"]) for role in _ROLES)
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        rows, slabs = max(c.k, 1), 1 if c.out_listed else c.group_count
        return {
            "lhs": ((batch, rows, _TALLEST, c.m), (*steps(lhs_b), at["lhs_k"], at["lhs_k"])),
            "rhs": ((batch, rows, _TALLEST, c.n), (*steps(rhs_b), at["rhs_k"], at["rhs_k"])),
            "out": ((slabs, batch, c.m, c.n), (*steps((slabs, at["out_g"]), out_b), at["out_m"])),
        }
    inner, outer, step = (c.k, c.n, at["rhs_n"]) if c.trans_b else (c.n, c.k, at["rhs_k"])
    groups = c.group_count if c.ragged_mode is RaggedDotMode.NON_CONTRACTING and not c.rhs_listed else 1
    return {
        "lhs": ((batch, _ANY, _ANY, _FAR, c.k), (*steps(lhs_b), _WRAP - at["lhs_m"], at["lhs_m"], at["lhs_m"])),
        "rhs": ((groups, batch, outer, inner), (*steps((groups, at["rhs_g"]), rhs_b), step)),
        "out": ((batch, _ANY, _ANY, _FAR, c.n), (*steps(out_b), _WRAP - at["out_m"], at["out_m"], at["out_m"])),
    }


class Descriptors:
    """Encodes lhs, rhs and out. Only an operand's address changes from call to call, until a config lays it out differently.

    Attributes:
        encoders: by role. maps: by role, the host address of the tensor map.
    """

    def __init__(self, runtime: Runtime, kernel: CompiledKernel, parameters: KernelParameters, config: GroupedGemmConfig) -> None:
        any_runtime: Any = runtime
        self._parameters = parameters
        self._layouts: dict[str, Layout] = {}
        self.encoders: dict[str, TensorMapEncoder] = {}
        self.maps: dict[str, int] = {}
        operands = operands_of(config)
        for role, (box, swizzle) in zip(_ROLES, kernel.boxes, strict=True):
            self.encoders[role] = TensorMapEncoder(
                any_runtime, ELEMENTS[operands[role].type], box, swizzle=swizzle, l2_promotion=256
            )  # fmt: skip
            self.maps[role] = parameters.blob_address(parameters.index(role))

    def write_maps(self, config: GroupedGemmConfig, role: str, addresses: Sequence[int], into: int) -> None:
        """Writes tensor maps of arrays at these addresses, 128 bytes each, to a host address; `config` says how all of them lie."""
        encoder = self.encoders[role]
        encoder.encode(into, addresses[0], *layouts(config)[role])
        for number, address in enumerate(addresses[1:], 1):
            ctypes.memmove(into + MAP_BYTES * number, into, MAP_BYTES)
            encoder.replace_address(into + MAP_BYTES * number, address)

    def describe(self, config: GroupedGemmConfig, addresses: dict[str, int]) -> None:
        """Describes operands of `config`'s layout at these addresses."""
        for role, (shape, strides) in layouts(config).items():
            if self._layouts.get(role) == (shape, strides):  # other rows alone change nothing in NON_CONTRACTING
                self.encoders[role].replace_address(self.maps[role], addresses[role])
                continue
            encoder, index, rank = self.encoders[role], self._parameters.index(role), len(shape)
            self._layouts.pop(role, None)
            encoder.encode(self.maps[role], addresses[role], shape, strides)
            for i in range(rank):
                self._parameters[index + 1 + i] = min(shape[i], 0x7FFFFFFF)
                self._parameters[index + 1 + rank + i] = strides[i] // encoder.itemsize if i < rank - 1 else 1
            self._layouts[role] = shape, strides
