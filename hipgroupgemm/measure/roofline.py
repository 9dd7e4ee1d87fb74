"""The machine's measured roofline: the rate of a large product, and that of a large copy or read."""

from __future__ import annotations

import dataclasses

__all__ = ["Roofline"]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What the machine was seen to do at the most. A result that stays in a cache can beat it: nothing then goes to memory.

    Attributes:
        flops: floating-point operations a second of the product. bandwidth: bytes a second of the copy (read plus written) or the read.
        product, copy: what was measured, in words.
    """

    flops: float
    bandwidth: float
    product: str
    copy: str

    def floor_ms(self, flops: int, min_bytes: int) -> float:
        """The least time by both rates: that of the operations or that of the bytes, whichever is longer."""
        return max(flops / self.flops, min_bytes / self.bandwidth) * 1e3

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.flops / 1e12:.3g} TFLOP/s ({self.product}), {self.bandwidth / 1e9:.3g} GB/s ({self.copy})"
