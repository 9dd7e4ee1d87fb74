"""The machine's own ceilings, measured: the rate of a large product and of a large copy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hipgroupgemm.benchmark.labs import Lab

__all__ = ["Roofline", "measure_ceilings"]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What the machine can do at the most.

    Attributes:
        flops: floating-point operations a second of the product. bandwidth: bytes read plus written a second of the copy.
        product, copy: what was measured, in words.
    """

    flops: float
    bandwidth: float
    product: str
    copy: str

    def floor_ms(self, flops: int, min_bytes: int) -> float:
        """The time below which no implementation can come: that of the operations or that of the bytes, whichever is longer."""
        return max(flops / self.flops, min_bytes / self.bandwidth) * 1e3

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.flops / 1e12:.3g} TFLOP/s ({self.product}), {self.bandwidth / 1e9:.3g} GB/s ({self.copy})"


def measure_ceilings(lab: Lab, dtype: np.dtype[Any], seed: int = 0) -> Roofline:
    """Measures both ceilings: the best of a few runs each, since a ceiling is what the machine can do, not what it mostly does.

    On a CPU, 16- and 8-bit products are computed in float32, so it is float32's product that bounds them.
    """
    rng = np.random.default_rng(seed)
    extent, runs, nbytes = (1536, 5, 128 << 20) if lab.device.kind == "cpu" else (8192, 12, 1 << 30)
    kind = lab.product_dtype(dtype)
    a, b = lab.normal((extent, extent), kind, rng), lab.normal((extent, extent), kind, rng)
    out = lab.xp.empty((extent, extent), kind)
    lab.xp.matmul(a, b, out=out)
    best = min(lab.time(lambda: lab.xp.matmul(a, b, out=out)) for _ in range(runs))
    bandwidth = lab.copy_rate(nbytes)
    return Roofline(
        flops=2 * extent**3 / best * 1e3,
        bandwidth=bandwidth,
        product=f"product of {extent} x {extent} {kind.name} matrices",
        copy=f"copy of {nbytes >> 20} MiB, read + written",
    )
