"""Workloads: the ragged dots of mixture-of-experts layers and their shapes; `distributions` has how routers fill the groups.

The presets' shapes come from AMD's article about grouped GEMM in XLA, which ran the MoE models of MaxText in configurations of its own: its
mixtral-8x7b has 32 experts; Mistral's, of 8, is mixtral-8x7b-published.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.api import config_for_ragged_dot
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers

__all__ = [
    "ALIASES", "AUTO_PADDED_FLOPS", "CLASSES", "PRESETS", "SUITES", "MoEShape", "RaggedDotClass", "Sizes", "config_of",
    "geometric_mean", "presets_of", "scaled_shapes",
]  # fmt: skip

Sizes = np.ndarray[Any, np.dtype[np.int32]]

_MOST_ROWS = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class MoEShape:
    """The extents of an MoE layer's ragged dots.

    Attributes:
        m: routed tokens, batch x sequence x top-k: the ragged dimension.
        k: embedding dimension. n: the expert MLP's dimension. e: experts, the groups.
        label: the model's or the suite's name for it; takes no part in comparisons.
        scale: the divisor that m, k and n were divided by, 1 for the full shape.
    """

    m: int
    k: int
    n: int
    e: int
    label: str = dataclasses.field(default="", compare=False)
    scale: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "k", "n", "e", "scale"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: wanted an int")
            if value < 1:
                raise ValueError(f"{name}={value}: wanted at least 1")
        if self.m > _MOST_ROWS:
            raise ValueError(f"m={self.m}: wanted at most {_MOST_ROWS}, as group sizes are 32-bit here")

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """(M, K, N, E)."""
        return (self.m, self.k, self.n, self.e)

    @property
    def padded_flops(self) -> int:
        """Floating-point operations of the padded dot, in which every group is multiplied with all M rows: 2 E M K N."""
        return 2 * math.prod(self.extents)

    def scaled(self, divisor: int) -> MoEShape:
        """This shape with M, K and N divided by `divisor`, none below 1. E stays: it is what sets ragged and padded apart."""
        if not isinstance(divisor, int) or divisor < 1:
            raise ValueError(f"divisor={divisor!r}: wanted an int of at least 1")
        m, k, n = (max(extent // divisor, 1) for extent in (self.m, self.k, self.n))
        return dataclasses.replace(self, m=m, k=k, n=n, scale=self.scale * divisor)

    def fitting(self, padded_flops: int) -> MoEShape:
        """This shape, scaled by the smallest power of two with which a padded dot takes at most so many operations."""
        shape = self
        while shape.padded_flops > padded_flops and max(shape.m, shape.k, shape.n) > 1:
            shape = self.scaled(2 * shape.scale // self.scale)
        return shape

    @classmethod
    def parse(cls, text: str) -> MoEShape:
        """A shape from "M,K,N,E"; raises ValueError for anything else."""
        try:
            m, k, n, e = (int(part) for part in text.replace("x", ",").split(","))
        except ValueError:
            raise ValueError(f"shape {text!r}: wanted four integers M,K,N,E, such as 10240,2048,768,128") from None
        try:
            return cls(m, k, n, e, label=f"{m},{k},{n},{e}")
        except ValueError as error:
            raise ValueError(f"shape {text!r}: {error}") from None


PRESETS: Mapping[str, MoEShape] = {
    name: MoEShape(*extents, label=name)
    for name, extents in {
        "mixtral-8x7b": (15360, 6144, 20480, 32),
        "mixtral-8x7b-large": (40960, 8192, 28672, 64),
        "mixtral-8x7b-published": (3072 * 2, 4096, 14336, 8),
        "deepseek2-16b": (3840, 2048, 1408, 64),
        "deepseek3-test-mi300": (512 * 8, 512, 512, 32),
        "deepseek3-test-mi350": (5120, 512, 512, 256),
        "deepseek3-671b-reduced": (512 * 8, 7168, 2048, 32),
        "gemma4-26b": (10240, 2816, 704, 128),
        "qwen3-30b-a3b": (10240, 2048, 768, 128),
        "qwen3-235b-a22b": (20480, 4096, 1536, 128),
        "llama4-17b-16e": (1280, 5120, 8192, 16),
    }.items()
}
"""Models by name, with the extents of the article's tables 4 and 5 (MI300, MI350) or results (published Mixtral), not the models' published
ones; several are cut down there. M is what the article's micro-benchmark has for this K, N, E, else sequence length x top-k."""

ALIASES: Mapping[str, tuple[str, ...]] = {"deepseek3-test": ("deepseek3-test-mi300", "deepseek3-test-mi350")}
"""Names that stand for several presets."""


def presets_of(name: str) -> tuple[MoEShape, ...]:
    """The presets' shapes that a name stands for; raises ValueError, listing the names there are, for any other."""
    names = ALIASES.get(name, (name,))
    if any(one not in PRESETS for one in names):
        raise ValueError(f"model {name!r}: no such preset; there are {', '.join((*PRESETS, *ALIASES))}")
    return tuple(PRESETS[one] for one in names)


_TABLE12 = (
    (3840, 2048, 1408, 64), (1920, 5120, 1536, 160), (5120, 512, 512, 256), (10240, 2816, 704, 128), (10240, 2880, 2880, 128),
    (1280, 5120, 8192, 16), (15360, 6144, 20480, 32), (40960, 8192, 28672, 64), (20480, 4096, 1536, 128), (10240, 2048, 768, 128),
    (6400, 2048, 512, 512),
)  # fmt: skip

SUITES: Mapping[str, tuple[MoEShape, ...]] = {
    "table12": tuple(MoEShape.parse(",".join(map(str, extents))) for extents in _TABLE12),
    "models": tuple(PRESETS.values()),
}
"""Named lists of shapes: the article's micro-benchmark, and all presets."""


@dataclasses.dataclass(frozen=True)
class RaggedDotClass:
    """One of the ragged dots of an MoE layer's training step (the article's table 7).

    Attributes:
        name: what it is called. lhs, rhs, out: the operands' axes, letters of M, K, N, E. M is always lhs's ragged axis 0.
    """

    name: str
    lhs: str
    rhs: str
    out: str

    @property
    def mode(self) -> RaggedDotMode:
        """CONTRACTING for weight gradients, else NON_CONTRACTING."""
        return RaggedDotMode.NON_CONTRACTING if self.rhs[0] == "E" else RaggedDotMode.CONTRACTING

    @property
    def dimension_numbers(self) -> RaggedDotDimensionNumbers:
        """What `ragged_dot_general` takes for this class."""
        contracting = self.mode is RaggedDotMode.CONTRACTING
        letter = "M" if contracting else self.lhs[1]
        axes = ((self.lhs.index(letter),), (self.rhs.index(letter),))
        return RaggedDotDimensionNumbers((axes, ((), ())), (0,), () if contracting else (0,))

    def shapes(self, shape: MoEShape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of lhs, rhs and out."""
        extents = dict(zip("MKNE", shape.extents, strict=True))
        lhs, rhs, out = (tuple(extents[axis] for axis in axes) for axes in (self.lhs, self.rhs, self.out))
        return lhs, rhs, out


CLASSES: Mapping[str, RaggedDotClass] = {
    kind.name: kind
    for kind in (
        RaggedDotClass("fwd_wi", "MK", "EKN", "MN"),  # forward, gate and up projection
        RaggedDotClass("fwd_wo", "MN", "ENK", "MK"),  # forward, down projection
        RaggedDotClass("dgrad_wi", "MN", "EKN", "MK"),  # data gradient of gate and up
        RaggedDotClass("dgrad_wo", "MK", "ENK", "MN"),  # data gradient of down
        RaggedDotClass("wgrad_wi", "MK", "MN", "EKN"),  # weight gradient of gate and up
        RaggedDotClass("wgrad_wo", "MN", "MK", "ENK"),  # weight gradient of down
    )
}
"""The six classes by name."""


def config_of(kind: RaggedDotClass, shape: MoEShape, dtype: str) -> GroupedGemmConfig:
    """The config of a workload with packed, well aligned operands, int32 sizes and an output of the operands' type."""
    lhs, rhs, _ = kind.shapes(shape)
    return config_for_ragged_dot(ArraySpec(lhs, dtype), ArraySpec(rhs, dtype), ArraySpec((shape.e,), "int32"), kind.dimension_numbers)


AUTO_PADDED_FLOPS = 10**10
"""On a CPU a shape is scaled until a padded dot takes at most so many operations: a tenth of a second on two cores."""


def scaled_shapes(
    shapes: Sequence[MoEShape], exact: Sequence[MoEShape], scale: int | None, on_cpu: bool
) -> list[tuple[MoEShape, MoEShape]]:
    """(whole, scaled) of all shapes, by a divisor; None divides `shapes`, not `exact` ones, until they fit a CPU."""
    if scale is not None:
        return [(whole, whole.scaled(scale)) for whole in (*shapes, *exact)]
    return [(whole, whole.fitting(AUTO_PADDED_FLOPS) if on_cpu else whole) for whole in shapes] + [(whole, whole) for whole in exact]


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers, the mean that ratios have; NaN for none."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else math.nan
