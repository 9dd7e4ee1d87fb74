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

    @classmethod
    def of(cls, extent: int, dtype: str, product_ms: float, nbytes: int, copy_ms: float, read_ms: float) -> Roofline:
        """From the times of a square product, and of a copy and a read of so many bytes."""
        mebi, product = nbytes >> 20, f"product of {extent} x {extent} {dtype} matrices"
        by_copy = 2 * read_ms > copy_ms
        words = f"copy of {mebi} MiB, read + written" if by_copy else f"read of {mebi} MiB"
        return cls(2 * extent**3 / product_ms * 1e3, (2 * nbytes / copy_ms if by_copy else nbytes / read_ms) * 1e3, product, words)

    def floor_ms(self, flops: int, min_bytes: int) -> float:
        """The least time by both rates: that of the operations or that of the bytes, whichever is longer."""
        return max(flops / self.flops, min_bytes / self.bandwidth) * 1e3

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.flops / 1e12:.3g} TFLOP/s ({self.product}), {self.bandwidth / 1e9:.3g} GB/s ({self.copy})"
