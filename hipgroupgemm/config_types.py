"""The types that a config is made of: modes, epilogues, and the one table of element types. Imports nothing of the package."""

from __future__ import annotations

import dataclasses
import enum
import math
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

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")
GATES = ("halves", "interleaved")


def require_type(name: str, value: object, wanted: type, text: str) -> None:
    """Raises TypeError for a field of another type."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name}={value!r}: must be {text}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises TypeError for a field that is no string, ValueError for one that is no choice."""
    require_type(name, value, str, f"a name, one of {', '.join(choices)}")
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")


def require_real(name: str, value: object) -> float:
    """A field as a float; raises TypeError for what is no real number, which a bool is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: must be a real number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


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
        activation: None, "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swiglu_clamped" (which takes a gate). No backend has any of them
            yet: they are refused by name.
        gate: None, "halves" (the first n columns of z are the gate, the last n what it multiplies) or "interleaved" (even, odd columns).
        limit, sigmoid_scale: of the activation "swiglu_clamped"; limit is positive.

    Raises TypeError for a field of a wrong type, ValueError for a value that is none of these.

    Example:
        >>> Epilogue(bias=True) == Epilogue.BIAS
        True
    """

    bias: bool = False
    activation: str | None = None
    gate: str | None = None
    limit: float = 7.0
    sigmoid_scale: float = 1.702

    DEFAULT: ClassVar[Epilogue]
    BIAS: ClassVar[Epilogue]

    def __post_init__(self) -> None:
        require_type("bias", self.bias, bool, "a bool")
        for name, choices in (("activation", ACTIVATIONS), ("gate", GATES)):
            if getattr(self, name) is not None:
                require_choice(name, getattr(self, name), choices)
        for name in ("limit", "sigmoid_scale"):
            value = require_real(name, getattr(self, name))
            if not math.isfinite(value) or (name == "limit" and value <= 0):
                raise ValueError(f"{name}={value!r}: must be finite{' and positive' if name == 'limit' else ''}")
            object.__setattr__(self, name, value)
        if self.activation == "swiglu_clamped" and self.gate is None:
            raise ValueError(f"gate=None: swiglu_clamped needs a gate, one of {', '.join(GATES)}")

    def features(self) -> frozenset[str]:
        """The names of the fields that differ from their defaults."""
        return frozenset(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)


Epilogue.DEFAULT, Epilogue.BIAS = Epilogue(), Epilogue(bias=True)
