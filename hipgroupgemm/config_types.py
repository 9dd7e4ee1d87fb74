"""The types that a config is made of: modes, epilogues, and the one table of element types. Imports nothing of the package."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import ClassVar

FLOAT_BYTES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
COMPUTE_TYPES = ("float32", "tf32", "float64")
PRECISION_ALGORITHMS = (
    "ALG_UNSET",
    "ALG_DOT_BF16_BF16_F32",
    "ALG_DOT_F16_F16_F32",
    "ALG_DOT_TF32_TF32_F32",
    "ALG_DOT_F32_F32_F32",
    "ALG_DOT_F64_F64_F64",
)


class RaggedDotMode(enum.Enum):
    """Which dimension of lhs is ragged. The names are XLA's, the shapes stand in `GroupedGemmConfig`."""

    NON_CONTRACTING = "non_contracting"
    CONTRACTING = "contracting"
    BATCH = "batch"


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is done to the product before it is stored: z = alpha P + bias, then the activation of z.

    Every field that differs from its default is a feature that a backend has to declare, see `GroupedGemmConfig.features`.

    Attributes:
        bias: whether a bias row is added; a call sets it from whether `bias=` was given.
        activation: None, or the name of a function that is applied to z.
        gate: None, "halves" (the first n columns of z are the gate, the last n what it multiplies) or "interleaved" (even, odd columns).
        limit, sigmoid_scale: of the activation "swiglu_clamped".
    """

    bias: bool = False
    activation: str | None = None
    gate: str | None = None
    limit: float = 7.0
    sigmoid_scale: float = 1.702

    DEFAULT: ClassVar[Epilogue]
    BIAS: ClassVar[Epilogue]

    def features(self) -> frozenset[str]:
        """The names of the fields that differ from their defaults."""
        return frozenset(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)


Epilogue.DEFAULT, Epilogue.BIAS = Epilogue(), Epilogue(bias=True)
