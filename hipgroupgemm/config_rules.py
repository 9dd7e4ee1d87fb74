"""What makes a config valid: the rules among its fields, in one function."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from hipgroupgemm.config_types import (
    COMPUTE_TYPES,
    FLOAT32_MAX,
    FLOAT_BYTES,
    PRECISION_ALGORITHMS,
    Epilogue,
    RaggedDotMode,
    require_choice,
    require_real,
    require_type,
)

if TYPE_CHECKING:
    from hipgroupgemm.config import GroupedGemmConfig

__all__ = ["inner_axis", "validate_config"]


def inner_axis(strides: tuple[int, int], prefer_second: bool = True) -> int:
    """Which of two axes is a matrix's inner one: stride 1 first, then the smaller non-zero stride, then the preferred axis."""

    def rank(stride: int) -> tuple[bool, bool, int]:
        return (stride != 1, stride == 0, stride)

    first, second = rank(strides[0]), rank(strides[1])
    if first == second:
        return 1 if prefer_second else 0
    return 0 if first < second else 1


_TYPES = {
    **dict.fromkeys(("trans_a", "trans_b", "must_swap_operands", "sizes_per_batch", "rhs_listed", "out_listed"), (bool, "a bool")),
    **{"ragged_mode": (RaggedDotMode, "a RaggedDotMode"), "epilogue": (Epilogue, "an Epilogue")},
}
_CHOICES = {"precision_algorithm": PRECISION_ALGORITHMS, "compute_type": COMPUTE_TYPES}


def validate_config(config: GroupedGemmConfig) -> None:
    """Checks a config; every GroupedGemmConfig passes through it when it is made.

    Raises:
        TypeError: a field of the wrong Python type.
        ValueError: a field's value breaks a rule; the text names the field, its value and the rule.
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in _TYPES:
            require_type(name, value, *_TYPES[name])
        elif name in ("alpha", "beta"):
            number = require_real(name, value)
            limit = sys.float_info.max if config.compute_type == "float64" else FLOAT32_MAX
            if not -limit <= number <= limit:  # NaN as well
                raise ValueError(f"{name}={value!r}: must be finite in the accumulator's type, compute_type={config.compute_type}")
            object.__setattr__(config, name, number)
        elif name.startswith("type_") or name in _CHOICES:
            require_choice(name, value, _CHOICES.get(name) or tuple(FLOAT_BYTES))
        elif value is not None or not name.endswith("_extent"):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: must be an int")
            if value < 0:
                raise ValueError(f"{name}={value}: must not be negative")
            if value >= 1 << 63:
                raise ValueError(f"{name}={value}: must fit 63 bits")
            if name.endswith("_alignment") and value not in (1, 2, 4, 8, 16):
                raise ValueError(f"{name}={value}: must be 1, 2, 4, 8 or 16 (bytes)")
    _validate_types(config)
    _validate_layout(config)
    _validate_groups(config)


def _validate_types(config: GroupedGemmConfig) -> None:
    if config.type_c != config.type_d:
        raise ValueError(f"type_c={config.type_c}: c must have out's type, type_d={config.type_d}")
    double = "float64" in (config.type_a, config.type_b, config.type_d)
    if double != (config.compute_type == "float64"):
        raise ValueError(
            f"compute_type={config.compute_type}: float64 accumulation goes with a float64 operand or output, "
            f"got type_a={config.type_a}, type_b={config.type_b}, type_d={config.type_d}"
        )
    if config.compute_type == "tf32" and not config.type_a == config.type_b == "float32":
        raise ValueError(f"compute_type=tf32: needs float32 operands, got {config.type_a} and {config.type_b}")
    if config.compute_precision not in (0, 1, 2):
        raise ValueError(f"compute_precision={config.compute_precision}: must be 0 (default), 1 (high) or 2 (highest)")


def _validate_layout(config: GroupedGemmConfig) -> None:
    c = config
    checks = [
        ("trans_a", c.trans_a, (c.lhs_strides[1], c.lhs_strides[2]), 0 if c.trans_a else 1),
        ("trans_b", c.trans_b, (c.rhs_strides[2], c.rhs_strides[3]), 0 if c.trans_b else 1),
        ("must_swap_operands", c.must_swap_operands, (c.output_strides[2], c.output_strides[3]), 1 if c.must_swap_operands else 0),
    ]
    for name, value, strides, axis in checks:
        if inner_axis(strides, prefer_second=axis == 1) != axis:
            raise ValueError(
                f"{name}={value}: the inner axis must be the one with the smaller stride, got strides {strides[0]} and {strides[1]}"
            )
    mode = c.ragged_mode
    for name, field in c.derived_fields().items():
        if getattr(c, name) != getattr(c, field):
            raise ValueError(f"{name}={getattr(c, name)}: must be {getattr(c, field)} in {mode.name}, as {field}")
    if 0 not in (c.m, c.n, c.batch_count):
        axes = zip((c.group_count if mode is RaggedDotMode.CONTRACTING else 1, c.batch_count, c.m, c.n), c.output_strides, strict=True)
        reach = 1
        for extent, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
            if stride < reach:
                raise ValueError(
                    f"output_leading_dim_stride={c.output_leading_dim_stride}: out's elements would overlap in memory, "
                    f"its strides along (group, batch, m, n) are {c.output_strides}"
                )
            reach = stride * (extent - 1) + reach


def _validate_groups(config: GroupedGemmConfig) -> None:
    if config.group_total < config.group_count and config.ragged_mode is not RaggedDotMode.BATCH:
        raise ValueError(f"group_total={config.group_total}: there must be at least group_count={config.group_count} group sizes")
    for name, mode in (("rhs_listed", RaggedDotMode.NON_CONTRACTING), ("out_listed", RaggedDotMode.CONTRACTING)):
        if getattr(config, name) and config.ragged_mode is not mode:
            raise ValueError(f"{name}=True: only {mode.name} has it, not {config.ragged_mode.name}")
        if getattr(config, name) and config.group_count == 0:
            raise ValueError(f"{name}=True: a list has at least one array, and group_count is 0")
    if config.epilogue.bias and config.ragged_mode is not RaggedDotMode.NON_CONTRACTING:
        raise ValueError(f"epilogue.bias: only NON_CONTRACTING takes a bias, not {config.ragged_mode.name}")
