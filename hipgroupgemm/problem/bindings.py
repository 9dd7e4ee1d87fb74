"""From a call's arguments to axes, output type and config: what `ragged_dot`, `config_for_ragged_dot` and plans share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hipgroupgemm.calls import Operands
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.dtypes import dtype_of, float_dtype, result_dtype
from hipgroupgemm.operands.views import ArrayView
from hipgroupgemm.problem.canonicalize import DoesNotCollapse, Precision, config_from_views, precision_of
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes, RaggedDotDimensionNumbers, resolve

__all__ = ["Binding", "Wanted", "bind", "bind_config", "check_bias", "shapes_of", "with_scalars"]

_MEMO = 1024


class Wanted:
    """What a call asks for beside its operands, with a hashable form for the memo."""

    __slots__ = ("group_count", "numbers", "precision", "preferred", "signature")

    def __init__(self, numbers: Any, precision: Any, preferred: Any, group_count: int | None) -> None:
        self.numbers = RaggedDotDimensionNumbers.of(numbers)
        self.precision = precision_of(precision)
        self.preferred = None if preferred is None else float_dtype(dtype_of(preferred, "preferred_element_type"), "preferred_element_type")
        if group_count is not None and (isinstance(group_count, bool) or not hasattr(group_count, "__index__")):
            raise TypeError(f"group_count={group_count!r}: must be an int or None")
        self.group_count = None if group_count is None else int(group_count)
        self.signature = (self.numbers, self.precision, self.preferred, self.group_count)


class Binding:
    """How a call's operands map to a config; config is None, with a reason, where they do not collapse to one."""

    __slots__ = ("axes", "config", "out_dtype", "reason")

    def __init__(self, axes: RaggedDotAxes, out_dtype: np.dtype[Any], config: GroupedGemmConfig | None, reason: str) -> None:
        self.axes, self.out_dtype, self.config, self.reason = axes, out_dtype, config, reason


_resolve = functools.lru_cache(_MEMO)(resolve)
_bindings: dict[Any, Binding] = {}


def shapes_of(operands: Operands, wanted: Wanted) -> tuple[RaggedDotAxes, np.dtype[Any]]:
    """The axes by role, and out's type."""
    group_count = wanted.group_count
    numbers = wanted.numbers
    if group_count is None and operands.out is not None and operands.group_offset is not None and operands.out.ndim:
        ragged = numbers.lhs_ragged_dimensions
        if ragged and ragged[0] in numbers.dot_dimension_numbers[0][0]:
            group_count = operands.out.shape[0]
    axes = _resolve(
        numbers,
        operands.lhs.shape,
        operands.rhs.shape,
        operands.sizes.shape,
        has_group_offset=operands.group_offset is not None,
        group_count=group_count,
        sizes_name=operands.sizes_name,
    )
    return axes, result_dtype(operands.lhs.dtype, operands.rhs.dtype, wanted.preferred)


def bind(operands: Operands, wanted: Wanted) -> Binding:
    """Binds checked operands; remembered by their layouts, so that a repeated call costs a look-up."""
    o = operands
    memo = (
        wanted.signature,
        *(None if v is None else v.signature() for v in (o.lhs, o.rhs, o.sizes, o.out, o.c, o.bias)),
        o.ends,
        o.group_offset is None,
        bool(o.beta),
    )
    found = _bindings.get(memo)
    if found is not None:
        if found.config is None:
            return found
        return Binding(found.axes, found.out_dtype, with_scalars(found.config, o.alpha, o.beta), found.reason)
    axes, out_dtype = shapes_of(operands, wanted)
    out = operands.expected_output(axes.out_shape, out_dtype)
    config, reason = None, ""
    try:
        config = bind_config(axes, operands, out, wanted.precision)
    except DoesNotCollapse as error:
        check_bias(axes, operands, out)
        reason = str(error)
    if len(_bindings) >= _MEMO:
        _bindings.clear()
    found = _bindings[memo] = Binding(axes, out_dtype, config, reason)
    return found


def with_scalars(config: GroupedGemmConfig, alpha: float, beta: float) -> GroupedGemmConfig:
    """`config` with another alpha and beta, which `gather` has checked: not validated anew, and with the key that it has found already.

    Raises ValueError when beta comes or goes: that is another key.
    """
    if (alpha, beta) == (config.alpha, config.beta):
        return config
    if bool(beta) != bool(config.beta):
        raise ValueError(f"beta={beta}: is another key than beta={config.beta}")
    other = object.__new__(GroupedGemmConfig)
    other.__dict__.update(config.__dict__, alpha=alpha, beta=beta, _hash=None)
    return other


def bind_config(
    axes: RaggedDotAxes, operands: Operands, out: ArrayView, precision: Precision, like: GroupedGemmConfig | None = None
) -> GroupedGemmConfig:
    """The config of exactly these operands, written to `out`."""
    check_bias(axes, operands, out)
    return config_from_views(
        axes,
        operands.lhs,
        operands.rhs,
        out,
        operands.sizes,
        c=operands.c if operands.beta else None,
        bias=operands.bias,
        alpha=operands.alpha,
        beta=operands.beta,
        precision=precision,
        like=like,
    )


def check_bias(axes: RaggedDotAxes, operands: Operands, out: ArrayView) -> None:
    """Raises TypeError for a bias of a wrong shape or type, ValueError for one where none can be."""
    bias = operands.bias
    if bias is None:
        return
    if axes.mode is not RaggedDotMode.NON_CONTRACTING:
        raise ValueError(f"bias: only NON_CONTRACTING takes one, this is {axes.mode.name}; leave it out")
    wanted = (axes.group_count, *(axes.out_shape[axis] for axis in axes.out_columns))
    if bias.shape != wanted:
        raise TypeError(f"bias: got shape {bias.shape}, wanted {wanted}")
    if bias.dtype != out.dtype:
        raise TypeError(f"bias: got {bias.dtype!s}, wanted {out.dtype.name}, out's type")
