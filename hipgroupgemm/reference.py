"""`ragged_dot_reference`: the ragged dot on host arrays of any rank, straight from its definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hipgroupgemm.backends.reference import compute
from hipgroupgemm.calls import Operands, gather, host_array
from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.dtypes import compute_type_of, dtype_of
from hipgroupgemm.problem.bindings import Wanted, check_bias, shapes_of
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotAxes
from hipgroupgemm.problem.groups import GroupBounds, scan, select_groups

__all__ = ["compute_uncollapsed", "ragged_dot_reference"]


def ragged_dot_reference(
    lhs: Any,
    rhs: Any,
    group_sizes: Any = None,
    ragged_dot_dimension_numbers: Any = BASIC,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    offs: Any = None,
    out: Any = None,
    c: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    tail: str = "zero",
    check: str = "none",
    group_count: int | None = None,
    accumulate: Any = None,
) -> Any:
    """The ragged dot by NumPy, straight from its definition: the judge of every backend. Host arrays only.

    Unlike `ragged_dot_general` on host arrays it treats wrong sizes as a device does: they are clamped, and refused only where
    check="sync".

    Args:
        lhs, rhs, ...: as in `ragged_dot_general`.
        accumulate: the type that products are accumulated in; None for the operation's own (float32, or float64 for float64
            operands). float64 with preferred_element_type=float64 gives the value that errors are measured against.

    Returns:
        out.
    """
    operands = gather(
        lhs,
        rhs,
        group_sizes,
        offs=offs,
        out=out,
        c=c,
        bias=bias,
        alpha=alpha,
        beta=beta,
        group_offset=group_offset,
        tail=tail,
        check=check,
        stream=None,
        workspace=None,
    )
    if operands.device.kind != "cpu":
        raise NotImplementedError(f"ragged_dot_reference: lhs is on {operands.device}; it computes on the CPU, copy the operands there")
    axes, out_dtype = shapes_of(operands, Wanted(ragged_dot_dimension_numbers, precision, preferred_element_type, group_count))
    check_bias(axes, operands, operands.expected_output(axes.out_shape, out_dtype))
    operands.require_memory()
    operands.take_output(axes.out_shape, out_dtype)
    kind = compute_type_of(operands.lhs.dtype, operands.rhs.dtype) if accumulate is None else accumulate
    accumulator = dtype_of(kind, "accumulate")
    if accumulator not in (np.float32, np.float64):
        raise TypeError(f"accumulate={accumulator!s}: wanted float32 or float64")
    compute_uncollapsed(operands, axes, accumulator)
    return arrays.deliver(operands.out_object, operands.lhs, operands.device) if out is None else arrays.written(out, operands.output)


def compute_uncollapsed(operands: Operands, axes: RaggedDotAxes, accumulate: np.dtype[Any]) -> None:
    """The reference on operands of any rank: axes are put in order by views, merged by a copy where need be; out is never copied."""
    batch = [axis.extent for axis in axes.batch]
    lhs, rhs = host_array(operands.lhs), host_array(operands.rhs)
    summed = [lhs.shape[i] for i in axes.lhs_summed]
    m = [lhs.shape[i] for i in axes.lhs_rows]
    k = [lhs.shape[i] for i in axes.lhs_contracting]
    n = [rhs.shape[i] for i in axes.rhs_columns]
    a = lhs.transpose([axis.lhs for axis in axes.batch if axis.lhs is not None] + [*axes.lhs_summed, *axes.lhs_rows, *axes.lhs_contracting])
    a = a.reshape(*batch, *summed, math.prod(m), math.prod(k))
    group = [] if axes.rhs_group is None else [axes.rhs_group]
    order = group + [axis.rhs for axis in axes.batch if axis.rhs is not None] + [*axes.rhs_summed, *axes.rhs_contracting, *axes.rhs_columns]
    b = rhs.transpose(order)
    groups = [rhs.shape[i] for i in group]
    lead = [axis.extent if axis.rhs is not None else 1 for axis in axes.batch]
    b = b.reshape(*groups, *lead, *summed, math.prod(k), math.prod(n))
    b = np.broadcast_to(b, (*groups, *batch, *summed, *b.shape[-2:]))
    slabs = [0] if axes.mode is RaggedDotMode.CONTRACTING else []
    out_order = [*slabs, *(axis.out for axis in axes.batch), *axes.out_rows, *axes.out_columns]
    out = host_array(operands.output).transpose(out_order)
    c = host_array(operands.c).transpose(out_order) if operands.c is not None and operands.beta else None
    bias = host_array(operands.bias) if operands.bias is not None else None
    bounds = None
    if axes.mode is not RaggedDotMode.BATCH:
        sizes = host_array(operands.sizes)
        bounds = scan(sizes, axes.ragged_extent, ends=operands.ends)
        offset = operands.group_offset if isinstance(operands.group_offset, int) else 0
        bounds = select_groups(bounds, offset, axes.group_count)
        if bounds.fault is not None and operands.check == "sync":
            bounds.fault.throw(axes.ragged_extent)
        inner = math.prod(k[1:]) if axes.mode is RaggedDotMode.CONTRACTING else 1
        sizes_axes = [axis.sizes for axis in axes.batch] + list(axes.sizes_summed)
        starts, ends = bounds.starts, bounds.ends
        if sizes.ndim > 1:  # the prefix's axes in the order of batch and summed, length 1 where the sizes are shared
            present = [axis for axis in sizes_axes if axis is not None]
            shape = [extent if axis is not None else 1 for axis, extent in zip(sizes_axes, [*batch, *summed], strict=True)]
            starts, ends = (part.transpose([*present, sizes.ndim - 1]).reshape(*shape, axes.group_count) for part in (starts, ends))
        bounds = GroupBounds(starts * inner, ends * inner, bounds.fault)
    compute(
        axes.mode,
        a,
        b,
        out,
        bounds,
        batch_ndim=len(batch),
        summed_ndim=len(summed),
        c=c,
        bias=bias,
        alpha=operands.alpha,
        beta=operands.beta,
        zero_tail=operands.tail == "zero",
        accumulate=accumulate,
    )
