"""Ragged dots inside torch: gradients, torch.compile, torch.export, torch.func, autocast, CUDA graphs.

    from hipgroupgemm.integrations.torch import grouped_mm

    out = grouped_mm(tokens, weights, offs=group_ends)  # (m, n), differentiable

The functions compute at once where nothing has to be recorded. Else they call `torch.ops.hipgroupgemm.ragged_dot`, an operator that
autograd, the compiler and the transformations know. Tensors on a CPU are computed by the reference backend.
"""

from __future__ import annotations

from typing import Any

import torch

from hipgroupgemm.integrations.torch_forms import BASIC_FORM
from hipgroupgemm.integrations.torch_general import ragged_dot_general as _general
from hipgroupgemm.integrations.torch_ops import compute
from hipgroupgemm.integrations.torch_ops import ragged_dot as _ragged_dot
from hipgroupgemm.operands.arrays import torch_transforming
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers

__all__ = ["grouped_mm", "ragged_dot", "ragged_dot_general"]

Tensor = Any
_TYPES = (torch.Tensor, torch.nn.Parameter)
_autocast: Any = torch._C._is_any_autocast_enabled
_recording: Any = torch.is_grad_enabled


def ragged_dot(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Any = None,
    precision: str | None = None,
    preferred_element_type: torch.dtype | None = None,
    group_offset: Any = None,
    *,
    offs: Any = None,
    bias: Tensor | None = None,
    weight_grad_into: Tensor | None = None,
) -> Tensor:
    """Multiplies consecutive groups of lhs's rows by one matrix per group, as `hipgroupgemm.ragged_dot`; differentiable.

    Args:
        lhs: (m, k), rows in group order.
        rhs: (g, k, n), one matrix per group.
        group_sizes, offs: exactly one: how many rows each group has, or where it ends, (g,) integers. On the device they are not read back.
        precision: as JAX's, by name; None: float32 products are IEEE.
        preferred_element_type: out's type; None for the operands' wider one.
        group_offset: an int, or a (1,) integer tensor: sizes then has more than g entries, and groups [offset, offset + g) are computed.
        bias: (g, n), out's type, added to covered rows.
        weight_grad_into: shaped as rhs, of any floating type (Megatron's `main_grad`, float32): backward adds rhs's gradient to it, and
            rhs itself gets none. Only where rhs requires a gradient; such a backward cannot be differentiated.

    Returns:
        (m, n). Rows that no group covers are zero; so are lhs's gradient there and the gradients of empty groups.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `hipgroupgemm.ragged_dot`; NotImplementedError also for nested tensors
            and under torch.jit.trace.

    Example:
        >>> tokens, weights = torch.ones(5, 2), torch.ones(2, 2, 3, requires_grad=True)
        >>> ragged_dot(tokens, weights, torch.tensor([2, 3])).sum().backward()
        >>> weights.grad[:, 0, 0]
        tensor([2., 3.])
    """
    sizes, ends = _sizes(group_sizes, offs)
    if lhs.dim() != 2 or rhs.dim() != 3 or sizes.dim() != 1:
        _refuse(lhs, rhs)
        raise TypeError(
            f"ragged_dot: got lhs {tuple(lhs.shape)}, rhs {tuple(rhs.shape)}, {'offs' if ends else 'group_sizes'} {tuple(sizes.shape)}; "
            "wanted (m, k), (g, k, n) and (g,); ragged_dot_general takes other ranks"
        )
    return _dot(lhs, rhs, sizes, BASIC_FORM, ends, bias, preferred_element_type, precision, group_offset, weight_grad_into)


def ragged_dot_general(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Any = None,
    ragged_dot_dimension_numbers: Any = None,
    precision: str | None = None,
    preferred_element_type: torch.dtype | None = None,
    group_offset: Any = None,
    *,
    offs: Any = None,
    bias: Tensor | None = None,
    group_count: int | None = None,
    weight_grad_into: Tensor | None = None,
) -> Tensor:
    """The ragged dot with any contracting, batch, ragged and group dimensions, as `hipgroupgemm.ragged_dot_general`; differentiable.

    Args:
        lhs, rhs, group_sizes, offs, bias, group_count: as in `hipgroupgemm.ragged_dot_general`.
        ragged_dot_dimension_numbers: `RaggedDotDimensionNumbers`, this package's or JAX's. Axes that make m, n or k and do not lie as one
            axis are merged by a copy.
        precision, preferred_element_type, group_offset, weight_grad_into: as in `ragged_dot`.

    Returns:
        out, shaped as JAX's.

    Raises:
        As `ragged_dot`.
    """
    if ragged_dot_dimension_numbers is None:
        raise TypeError("ragged_dot_dimension_numbers: missing; wanted RaggedDotDimensionNumbers")
    sizes, ends = _sizes(group_sizes, offs)
    _refuse(lhs, rhs, sizes, bias)
    numbers = RaggedDotDimensionNumbers.of(ragged_dot_dimension_numbers)
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    dimensions = (lhs_contracting, rhs_contracting, lhs_batch, rhs_batch, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    host, device = _offset(group_offset)
    settings = (ends, precision, host, preferred_element_type, group_count)
    return _general(lhs, rhs, sizes, *dimensions, bias, device, weight_grad_into, *settings)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Any = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    weight_grad_into: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm`, for every floating type and layout, with a bias, and differentiable with every out_dtype.

    =========  =========  ==========================================  =========
    a          b          group i, rows [offs[i - 1], offs[i])        out
    =========  =========  ==========================================  =========
    (m, k)     (g, k, n)  out[rows] = a[rows] @ b[i]                  (m, n)
    (g, m, k)  (k, n)     out[:, rows] = a[i] @ b[:, rows]            (m, n)
    (m, k)     (k, n)     out[i] = a[:, rows] @ b[rows]               (g, m, n)
    (g, m, k)  (g, k, n)  out[i] = a[i] @ b[i], without offs          (g, m, n)
    =========  =========  ==========================================  =========

    Args:
        a, b: the operands.
        offs: (g,) integers, where each group ends; on the device they are not read back.
        bias: (g, n), out's type, added to what each group covers; not for (g, m, k) with (k, n).
        out_dtype: out's type; None for the operands' wider one.
        weight_grad_into: as in `ragged_dot`, for the operand that is 3-D where one is.

    Returns:
        out. What no group covers is zero (torch leaves it uninitialised).

    Raises:
        As `ragged_dot`.
    """
    ranks = (a.dim(), b.dim())
    if ranks not in _GROUPED_FORMS or (offs is None) != (ranks == (3, 3)):
        _refuse(a, b)
    if ranks not in _GROUPED_FORMS:
        raise TypeError(f"grouped_mm: got a {tuple(a.shape)} and b {tuple(b.shape)}; wanted tensors of 2 or 3 axes")
    if (offs is None) != (ranks == (3, 3)):
        raise TypeError(
            f"offs: {'missing' if offs is None else 'given'} for a {tuple(a.shape)} and b {tuple(b.shape)}; wanted with 2-D ones"
        )
    offs, form = None if offs is None else _integers(offs), _GROUPED_FORMS[ranks]
    if ranks == (2, 3):
        return _dot(a, b, offs, form, True, bias, out_dtype, None, None, weight_grad_into)
    if ranks == (3, 2):  # out's transpose has ragged rows
        if bias is not None:
            raise NotImplementedError("bias: groups of columns have none; add it to the result")
        return _dot(b, a, offs, form, True, None, out_dtype, None, None, weight_grad_into).mT
    out = _dot(a, b, offs, form, offs is not None, None, out_dtype, None, None, weight_grad_into)
    return out if bias is None else out + bias.unsqueeze(-2)


_GROUPED_FORMS = {(2, 3): BASIC_FORM, (3, 2): "km,gnk", (2, 2): "mk,kn", (3, 3): "bmk,bkn"}


def _dot(
    lhs: Tensor,
    rhs: Tensor,
    sizes: Tensor | None,
    form: str,
    ends: bool,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    precision: str | None,
    group_offset: Any,
    into: Tensor | None,
) -> Tensor:
    host, device = (None, None) if group_offset is None else _offset(group_offset)
    if _is_plain(lhs, rhs, bias):
        return compute(lhs, rhs, sizes, bias, device, None, form, ends, precision, host, dtype)
    _refuse(lhs, rhs, sizes, bias)
    return _ragged_dot(lhs, rhs, sizes, bias, device, into, form, ends, precision, host, dtype)


def _is_plain(lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing but the product is wanted: then the op is left out, whose way through torch's dispatcher costs 5 us."""
    if torch.compiler.is_compiling() or _autocast() or torch_transforming() or type(lhs) not in _TYPES or type(rhs) not in _TYPES:
        return False
    if bias is not None and type(bias) not in _TYPES:
        return False
    return not _recording() or not (lhs.requires_grad or rhs.requires_grad or (bias is not None and bias.requires_grad))


def _refuse(*tensors: Tensor | None) -> None:
    """Refuses what torch would trace, or take apart, without an error and wrongly."""
    if any(tensor is not None and tensor.is_nested for tensor in tensors):
        raise NotImplementedError("hipgroupgemm: got a nested tensor; pass its values and offsets (offs=) instead")
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise NotImplementedError("hipgroupgemm: torch.jit.trace is not supported; use torch.compile or torch.export")


def _sizes(group_sizes: Any, offs: Any) -> tuple[Tensor, bool]:
    if (group_sizes is None) == (offs is None):
        raise TypeError(f"group_sizes and offs: got {'neither' if offs is None else 'both'}, wanted exactly one of them")
    sizes = group_sizes if offs is None else offs
    return _integers(sizes), offs is not None


def _integers(values: Any) -> Tensor:
    """A list or a NumPy array as a tensor."""
    if isinstance(values, torch.Tensor):
        return values
    made = torch.as_tensor(values)
    return made if made.numel() else made.long()  # no element says what type they would have


def _offset(group_offset: Any) -> tuple[int | None, Tensor | None]:
    """group_offset as an int or as a tensor."""
    return (None, group_offset) if isinstance(group_offset, torch.Tensor) else (group_offset, None)
