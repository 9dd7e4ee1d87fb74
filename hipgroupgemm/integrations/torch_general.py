"""`torch.ops.hipgroupgemm.ragged_dot_general`: JAX's dimension numbers, taken apart into views and a form of `ragged_dot`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.integrations.torch_ops import LIBRARY, ragged_dot
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes, RaggedDotDimensionNumbers, resolve

__all__ = ["ragged_dot_general"]

Tensor = Any
LIBRARY.define(
    "ragged_dot_general(Tensor lhs, Tensor rhs, Tensor sizes, int[] lhs_contracting, int[] rhs_contracting, int[] lhs_batch, "
    "int[] rhs_batch, int[] lhs_ragged, int[] rhs_group, Tensor? bias=None, Tensor? device_offset=None, Tensor? weight_grad_into=None, "
    "bool ends=False, str? precision=None, SymInt? group_offset=None, ScalarType? dtype=None, SymInt? group_count=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ragged_dot_general = torch.ops.hipgroupgemm.ragged_dot_general.default


def _general(
    lhs: Tensor,
    rhs: Tensor,
    sizes: Tensor,
    lhs_contracting: list[int],
    rhs_contracting: list[int],
    lhs_batch: list[int],
    rhs_batch: list[int],
    lhs_ragged: list[int],
    rhs_group: list[int],
    bias: Tensor | None = None,
    device_offset: Tensor | None = None,
    weight_grad_into: Tensor | None = None,
    ends: bool = False,
    precision: str | None = None,
    group_offset: int | None = None,
    dtype: Any = None,
    group_count: int | None = None,
) -> Tensor:
    """Axes are put in the form's order by views; several that make m, n or k are merged, by a copy where they do not lie as one."""
    numbers = RaggedDotDimensionNumbers(((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), lhs_ragged, rhs_group)
    axes = resolve(
        numbers,
        tuple(lhs.shape),
        tuple(rhs.shape),
        tuple(sizes.shape),
        has_group_offset=group_offset is not None or device_offset is not None,
        group_count=group_count,
        sizes_name="offs" if ends else "group_sizes",
    )
    if bias is not None and axes.mode is not RaggedDotMode.NON_CONTRACTING:
        raise ValueError(f"bias: only NON_CONTRACTING takes one, this is {axes.mode.name}; leave it out")
    batch = [axis.extent for axis in axes.batch] + [lhs.shape[i] for i in axes.lhs_summed]
    rows, columns = _extents(lhs, axes.lhs_rows), _extents(rhs, axes.rhs_columns)
    order = [axis.lhs for axis in axes.batch if axis.lhs is not None]
    a = lhs.permute([*order, *axes.lhs_summed, *axes.lhs_rows, *axes.lhs_contracting])
    a = _merged(a, batch, rows, _extents(lhs, axes.lhs_contracting))
    b = _rhs_in_order(rhs, axes, batch)
    buffer = None if weight_grad_into is None else _rhs_in_order(weight_grad_into, axes, batch, writes=True)
    settings = (ends, precision, group_offset, dtype)
    if axes.mode is RaggedDotMode.BATCH:
        out = ragged_dot(a, b, None, None, None, None, "bmk,bkn", *settings)
        return out.reshape(axes.out_shape)
    sizes = _sizes_in_order(sizes, axes, batch)
    if axes.mode is RaggedDotMode.NON_CONTRACTING:
        bias = None if bias is None else bias.reshape(bias.shape[0], -1)
        out = ragged_dot(a, b, sizes, bias, device_offset, buffer, "mk,gkn", *settings, group_count)
        out = out.reshape(*out.shape[:-1], *columns)
        places = [*(axis.out for axis in axes.batch), *axes.out_rows, *axes.out_columns]
        return out.permute([places.index(place) for place in range(len(places))])
    inner = math.prod(_extents(lhs, axes.lhs_contracting[1:]))  # contracted axes inside the ragged one: each of its rows is so many
    sizes = sizes if len(axes.lhs_contracting) == 1 else sizes * inner
    out = ragged_dot(a, b, sizes, None, device_offset, buffer, "mk,kn", *settings, group_count)
    if axes.lhs_summed:
        first = 1 + len(axes.batch)
        out = out.sum(tuple(range(first, first + len(axes.lhs_summed))))
    return out.reshape(axes.out_shape)


LIBRARY.impl("ragged_dot_general", _general, "CompositeImplicitAutograd")


def _extents(tensor: Tensor, axes: tuple[int, ...]) -> list[int]:
    return [tensor.shape[axis] for axis in axes]


def _merged(tensor: Tensor, lead: list[int], first: list[int], second: list[int]) -> Tensor:
    if len(first) == len(second) == 1:
        return tensor
    return tensor.reshape(*lead, math.prod(first), math.prod(second))


def _rhs_in_order(rhs: Tensor, axes: RaggedDotAxes, batch: list[int], writes: bool = False) -> Tensor:
    """rhs as ([g,] *batch, k, n); axes that it lacks are broadcast."""
    group = [] if axes.rhs_group is None else [axes.rhs_group]
    present = [axis.rhs for axis in axes.batch if axis.rhs is not None]
    view = rhs.permute([*group, *present, *axes.rhs_summed, *axes.rhs_contracting, *axes.rhs_columns])
    lacking = [len(group) + place for place, axis in enumerate(axes.batch) if axis.rhs is None]
    contracted, columns = _extents(rhs, axes.rhs_contracting), _extents(rhs, axes.rhs_columns)
    if writes and (lacking or len(contracted) != 1 or len(columns) != 1):
        raise NotImplementedError("weight_grad_into: wanted an rhs of one group, one contracted and one free axis, and lhs's batch axes")
    for place in lacking:
        view = view.unsqueeze(place)
    view = view.expand(*view.shape[: len(group)], *batch, *view.shape[len(group) + len(batch) :])
    return _merged(view, [*view.shape[: len(group)], *batch], contracted, columns)


def _sizes_in_order(sizes: Tensor, axes: RaggedDotAxes, batch: list[int]) -> Tensor:
    """Sizes as (g,) or (*batch, g); along axes that they lack they are broadcast."""
    if sizes.dim() == 1:
        return sizes
    places = [*(axis.sizes for axis in axes.batch), *axes.sizes_summed]
    view = sizes.permute([place for place in places if place is not None] + [sizes.dim() - 1])
    for place in itertools.compress(range(len(places)), [place is None for place in places]):
        view = view.unsqueeze(place)
    return view.expand(*batch, view.shape[-1])
