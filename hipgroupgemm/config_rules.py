"""What makes a config valid: the rules among its fields, in one function."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from hipgroupgemm.config_types import COMPUTE_TYPES, FLOAT32_MAX, FLOAT_BYTES, PRECISION_ALGORITHMS, Epilogue, RaggedDotMode

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


_BOOLS = ("trans_a", "trans_b", "must_swap_operands", "sizes_per_batch")


def validate_config(config: GroupedGemmConfig) -> None:
    """Checks a config; every GroupedGemmConfig passes through it when it is made.

    Raises:
        TypeError: a field of the wrong Python type.
        ValueError: a field's value breaks a rule; the text names the field, its value and the rule.
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in _BOOLS:
            _require_type(name, value, bool, "a bool")
        elif name in ("alpha", "beta"):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}={value!r}: must be a real number")
            limit = sys.float_info.max if config.compute_type == "float64" else FLOAT32_MAX
            if not -limit <= value <= limit:  # NaN as well
                raise ValueError(f"{name}={value!r}: must be finite in the accumulator's type, compute_type={config.compute_type}")
            object.__setattr__(config, name, float(value))
        elif name == "ragged_mode":
            _require_type(name, value, RaggedDotMode, "a RaggedDotMode")
        elif name == "epilogue":
            _require_type(name, value, Epilogue, "an Epilogue")
        elif name.endswith("_extent") and value is None:
            continue
        elif name.startswith("type_"):
            _require_choice(name, value, tuple(FLOAT_BYTES))
        elif name == "precision_algorithm":
            _require_choice(name, value, PRECISION_ALGORITHMS)
        elif name == "compute_type":
            _require_choice(name, value, COMPUTE_TYPES)
        else:
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


def _require_type(name: str, value: object, wanted: type, text: str) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{name}={value!r}: must be {text}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: must be a name, one of {', '.join(choices)}")
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")


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
    if mode is RaggedDotMode.NON_CONTRACTING:
        derived = {
            "stride_ragged_dim": c.lhs_strides[1],
            "output_stride_ragged_dim": c.output_strides[2],
            "c_stride_ragged_dim": c.c_strides[2],
        }
    elif mode is RaggedDotMode.CONTRACTING:
        derived = {"stride_ragged_dim": c.lhs_strides[2], "stride_group_dim": c.rhs_strides[2]}
    else:
        derived = {
            "stride_ragged_dim": c.lhs_batch_stride,
            "stride_group_dim": c.rhs_batch_stride,
            "output_stride_ragged_dim": c.output_batch_stride,
            "c_stride_ragged_dim": c.c_batch_stride,
        }
    for name, wanted in derived.items():
        if getattr(c, name) != wanted:
            raise ValueError(f"{name}={getattr(c, name)}: must be {wanted} in {mode.name} (GroupedGemmConfig says which)")
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
    if config.epilogue.bias and config.ragged_mode is not RaggedDotMode.NON_CONTRACTING:
        raise ValueError(f"epilogue.bias: only NON_CONTRACTING takes a bias, not {config.ragged_mode.name}")
