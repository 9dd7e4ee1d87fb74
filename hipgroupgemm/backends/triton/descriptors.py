"""The copy engine's descriptors of one kernel's operands, encoded where the launch reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.parameters import KernelParameters

if TYPE_CHECKING:
    from hipgroupgemm.backends.triton.compiler import CompiledKernel

__all__ = ["Descriptors", "layouts"]

_TALLEST = 256  # no less than the tallest box
_FAR = 1 << 30  # hopper_common.FAR
_ANY = 0x7FFF0000
_ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layouts(config: GroupedGemmConfig) -> dict[str, Layout]:
    """(shape, strides in bytes but for the innermost) of each operand, as the sm_90 kernels describe them."""
    c = config
    batch = max(c.batch_count, 1)
    a, b, d = FLOAT_BYTES[c.type_a], FLOAT_BYTES[c.type_b], FLOAT_BYTES[c.type_d]
    lhs_b, lhs_m, lhs_k = (stride * a for stride in c.lhs_strides)
    rhs_g, rhs_b, rhs_k, rhs_n = (stride * b for stride in c.rhs_strides)
    out_g, out_b, out_m, _ = (stride * d for stride in c.output_strides)

    def steps(*pairs: tuple[int, int]) -> tuple[int, ...]:
        """Strides of axes; those of one entry say nothing and become a legal number."""
        return tuple(stride if extent > 1 else 16 for extent, stride in pairs)

    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        rows = max(c.k, 1)
        return {
            "lhs": ((batch, rows, _TALLEST, c.m), (*steps((batch, lhs_b)), lhs_k, lhs_k)),
            "rhs": ((batch, rows, _TALLEST, c.n), (*steps((batch, rhs_b)), rhs_k, rhs_k)),
            "out": ((c.group_count, batch, c.m, c.n), (*steps((c.group_count, out_g), (batch, out_b)), out_m)),
        }
    inner, outer, step = (c.k, c.n, rhs_n) if c.trans_b else (c.n, c.k, rhs_k)
    groups = c.group_count if c.ragged_mode is RaggedDotMode.NON_CONTRACTING else 1
    return {
        "lhs": ((batch, _ANY, _ANY, _FAR, c.k), (*steps((batch, lhs_b)), (1 << 35) - lhs_m, lhs_m, lhs_m)),
        "rhs": ((groups, batch, outer, inner), (*steps((groups, rhs_g), (batch, rhs_b)), step)),
        "out": ((batch, _ANY, _ANY, _FAR, c.n), (*steps((batch, out_b)), (1 << 35) - out_m, out_m, out_m)),
    }


class Descriptors:
    """Encoders for lhs, rhs and out, and what they have encoded last."""

    def __init__(self, runtime: Runtime, kernel: CompiledKernel, parameters: KernelParameters, config: GroupedGemmConfig) -> None:
        from hipgroupgemm.runtime.cuda.tensor_map import TensorMapEncoder

        types = {"lhs": config.type_a, "rhs": config.type_b, "out": config.type_d}
        self._parameters = parameters
        self._encoders: dict[str, tuple[Any, int, int]] = {}
        self._layouts: dict[str, Layout] = {}
        self._config: GroupedGemmConfig | None = None
        self._addresses: dict[str, int] = {}
        any_runtime: Any = runtime
        for name, (box, swizzle) in zip(types, kernel.boxes, strict=True):
            encoder = TensorMapEncoder(any_runtime, _ELEMENTS[types[name]], box, swizzle=swizzle, l2_promotion=256)
            index = parameters.index(name)
            self._encoders[name] = (encoder, parameters.blob_address(index), index)

    def move(self, name: str, address: int) -> None:
        """Describes one operand at another address, the layout being as before."""
        encoder, into, _ = self._encoders[name]
        encoder.replace_address(into, address)
        self._addresses[name] = address

    def point(self, config: GroupedGemmConfig, addresses: dict[str, int]) -> None:
        """Describes operands of `config`'s layout at these addresses."""
        if config is not self._config:
            self._config = None
            wanted = layouts(config)
            if wanted != self._layouts:  # other rows alone change nothing in NON_CONTRACTING
                self._layouts, self._addresses = wanted, {}
        for name, address in addresses.items():
            if self._addresses.get(name) == address:
                continue
            encoder, into, index = self._encoders[name]
            shape, strides = self._layouts[name]
            if name in self._addresses:
                encoder.replace_address(into, address)
            else:
                encoder.encode(into, address, shape, strides)
                rank = len(shape)
                size = encoder.itemsize
                for i in range(rank):
                    self._parameters[index + 1 + i] = min(shape[i], 0x7FFFFFFF)
                    self._parameters[index + 1 + rank + i] = strides[i] // size if i < rank - 1 else 1
            self._addresses[name] = address
        self._config = config
