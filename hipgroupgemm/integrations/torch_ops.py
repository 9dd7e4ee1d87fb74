"""The torch operators behind `hipgroupgemm.integrations.torch`: schemas, kernels, shapes without data, derivatives, vmap and autocast.

`torch.ops.hipgroupgemm.ragged_dot` is one form (`torch_forms.py`) of a ragged dot. Its kernels call the package's own functions; its
derivatives are calls of itself, so they have derivatives again. `ragged_dot_add_` adds a product into a tensor: for weight gradients that
accumulate. Both are made by `define` and `impl`: a call of such an op costs a third of one of `torch.library.custom_op`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from hipgroupgemm import api
from hipgroupgemm.integrations.torch_forms import BASIC_FORM, Derivative, is_batch, is_grouped, lhs_derivative, numbers_of, rhs_derivative
from hipgroupgemm.operands.dtypes import dtype_of, float_dtype, result_dtype
from hipgroupgemm.problem.dimension_numbers import resolve

__all__ = ["LIBRARY", "compute", "ragged_dot"]

Tensor = Any
LIBRARY = torch.library.Library("hipgroupgemm", "DEF")
_SETTINGS = "str? precision=None, SymInt? group_offset=None"
for _schema in (
    "ragged_dot(Tensor lhs, Tensor rhs, Tensor? sizes, Tensor? bias=None, Tensor? device_offset=None, Tensor? weight_grad_into=None, "
    f"str form='{BASIC_FORM}', bool ends=False, {_SETTINGS}, ScalarType? dtype=None, SymInt? group_count=None) -> Tensor",
    "ragged_dot_add_(Tensor(a!) into, Tensor lhs, Tensor rhs, Tensor sizes, Tensor? device_offset, str form, bool ends, "
    f"{_SETTINGS}) -> ()",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
ragged_dot = torch.ops.hipgroupgemm.ragged_dot.default
_ragged_dot_add_ = torch.ops.hipgroupgemm.ragged_dot_add_.default

# ---- kernels -------------------------------------------------------------------------------------------------------------------


def compute(
    lhs: Tensor,
    rhs: Tensor,
    sizes: Tensor | None,
    bias: Tensor | None = None,
    device_offset: Tensor | None = None,
    weight_grad_into: Tensor | None = None,
    form: str = BASIC_FORM,
    ends: bool = False,
    precision: str | None = None,
    group_offset: int | None = None,
    dtype: Any = None,
    group_count: int | None = None,
) -> Tensor:
    """The op's kernel, for tensors on a CPU or a GPU that nothing has to be recorded of.

    Args:
        lhs, rhs, sizes, bias: as the form has them; no sizes for a batch.
        device_offset, group_offset: the first group computed, on the device or on the host; one of them or none.
        weight_grad_into: for the backward alone.
        form: of `torch_forms`. ends: whether the sizes are end offsets.
        precision, dtype, group_count: `ragged_dot_general`'s; dtype is its preferred_element_type.
    """
    del weight_grad_into
    deterministic = torch.are_deterministic_algorithms_enabled()
    offset = group_offset if device_offset is None else device_offset
    if sizes is None and is_batch(form):  # has to be there, and is not read
        sizes = lhs.new_empty(lhs.shape[0], dtype=torch.int32)
    counts, offs = (None, sizes) if ends else (sizes, None)
    if form == BASIC_FORM and lhs.dim() == 2:
        return api.ragged_dot(lhs, rhs, counts, precision, dtype, offset, offs=offs, bias=bias, deterministic=deterministic)
    numbers = numbers_of(form, lhs.dim())
    return api.ragged_dot_general(
        lhs, rhs, counts, numbers, precision, dtype, offset, offs=offs, bias=bias, deterministic=deterministic, group_count=group_count
    )


def _add(
    into: Tensor,
    lhs: Tensor,
    rhs: Tensor,
    sizes: Tensor,
    device_offset: Tensor | None,
    form: str,
    ends: bool,
    precision: str | None = None,
    group_offset: int | None = None,
) -> None:
    offset = group_offset if device_offset is None else device_offset
    counts, offs = (None, sizes) if ends else (sizes, None)
    written = {"out": into, "c": into, "beta": 1.0, "deterministic": torch.are_deterministic_algorithms_enabled()}
    api.ragged_dot_general(lhs, rhs, counts, numbers_of(form, lhs.dim()), precision, into.dtype, offset, offs=offs, **written)


def _fake(
    lhs: Tensor,
    rhs: Tensor,
    sizes: Tensor | None,
    bias: Tensor | None = None,
    device_offset: Tensor | None = None,
    weight_grad_into: Tensor | None = None,
    form: str = BASIC_FORM,
    ends: bool = False,
    precision: str | None = None,
    group_offset: int | None = None,
    dtype: Any = None,
    group_count: int | None = None,
) -> Tensor:
    """An out without data: of the shape and type that the kernels give it, or their error."""
    del precision, weight_grad_into
    axes = resolve(
        numbers_of(form, lhs.dim()),
        tuple(lhs.shape),
        tuple(rhs.shape),
        (lhs.shape[0],) if sizes is None else tuple(sizes.shape),
        has_group_offset=group_offset is not None or device_offset is not None,
        group_count=group_count,
        sizes_name="offs" if ends else "group_sizes",
    )
    kind = _result_type(lhs.dtype, rhs.dtype, dtype)
    if bias is not None and (bias.dtype != kind or tuple(bias.shape) != (axes.group_count, axes.out_shape[-1])):
        wanted = f"{kind} of shape {(axes.group_count, axes.out_shape[-1])}"
        raise TypeError(f"bias: got {bias.dtype} of shape {tuple(bias.shape)}, wanted {wanted}")
    return lhs.new_empty(axes.out_shape, dtype=kind)


@functools.cache
def _result_type(lhs: Any, rhs: Any, dtype: Any) -> Any:
    preferred = None if dtype is None else float_dtype(dtype_of(dtype), "preferred_element_type")
    return getattr(torch, result_dtype(float_dtype(dtype_of(lhs), "lhs"), float_dtype(dtype_of(rhs), "rhs"), preferred).name)


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("ragged_dot", compute, _key)
    LIBRARY.impl("ragged_dot_add_", _add, _key)
torch.library.register_fake("hipgroupgemm::ragged_dot", _fake, lib=LIBRARY)
torch.library.register_fake("hipgroupgemm::ragged_dot_add_", lambda *_: None, lib=LIBRARY)

# ---- derivatives ---------------------------------------------------------------------------------------------------------------


def _is_transposed(tensor: Tensor) -> bool:
    """Whether the last two axes lie exchanged in memory. Gradients lie as what they are of: autograd would copy others."""
    return bool(tensor.stride(-2) == 1 and tensor.stride(-1) != 1)


class _RaggedDot(torch.autograd.Function):  # type: ignore[misc]  # torch is not looked at
    """Recorded below the dispatcher, where torch.func's transformations arrive one level at a time."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Applies it to this level alone; `Function.apply` would begin with the outermost once more."""
        return super(torch.autograd.Function, cls).apply(*args)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        lhs, rhs, sizes, bias, device_offset, into, form, ends, precision, group_offset, _, group_count = args
        transformed = torch._C._are_functorch_transforms_active()
        if into is not None:
            _check_buffer(into, rhs, form, transformed)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            if transformed:  # forward runs without recording, but the level below decides for itself
                stack.enter_context(torch.enable_grad())
                stack.enter_context(torch.autograd.forward_ad._set_fwd_grad_enabled(True))
            out = ragged_dot(*args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lhs if ctx.needs_input_grad[1] else None, rhs, sizes, device_offset)
        ctx.save_for_forward(lhs, rhs, sizes, device_offset)
        ctx.form, ctx.into, ctx.settings, ctx.group_count = form, into, (ends, precision, group_offset), group_count
        ctx.types = lhs.dtype, rhs.dtype, None if bias is None else bias.dtype, out.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        """Two products, on the operands as they lie; and the sum of grad's rows per group, for a bias."""
        found: list[Any] = [None] * 12
        if grad is None:
            return tuple(found)
        lhs, rhs, sizes, offset = ctx.saved_tensors
        tensors, settings = {"lhs": lhs, "rhs": rhs, "out": grad}, ctx.settings
        slabs = rhs.shape[0] if is_grouped(ctx.form) and (offset is not None or settings[2] is not None) else None

        def product(way: Derivative, dtype: Any) -> Tensor:
            count = None if is_grouped(way.form) else slabs
            result = ragged_dot(tensors[way.lhs], tensors[way.rhs], sizes, None, offset, None, way.form, *settings, dtype, count)
            return result.mT if way.transposed else result

        if ctx.needs_input_grad[0]:
            found[0] = product(lhs_derivative(ctx.form), ctx.types[0])
        if ctx.needs_input_grad[1] and ctx.into is None:
            found[1] = product(rhs_derivative(ctx.form, _is_transposed(rhs)), ctx.types[1])
        elif ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():
                raise NotImplementedError("weight_grad_into: a gradient that is added to a buffer cannot be differentiated; leave it out")
            way = rhs_derivative(ctx.form, _is_transposed(ctx.into))
            into = ctx.into.mT if way.transposed else ctx.into
            _ragged_dot_add_(into, tensors[way.lhs], tensors[way.rhs], sizes, offset, way.form, *settings)
        if ctx.needs_input_grad[3]:  # a row of ones times the rows of each group
            ones = grad.new_ones(()).expand(*grad.shape[:-2], 1, grad.shape[-2])
            sums = ragged_dot(ones, grad, sizes, None, offset, None, "mk,kn", *settings, ctx.types[2], slabs).squeeze(-2)
            found[3] = sums.sum(tuple(range(1, sums.dim() - 1))) if sums.dim() > 2 else sums
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """The product is linear in lhs and bias together, and in rhs."""
        lhs, rhs, sizes, offset = ctx.saved_tensors
        of_lhs, of_rhs, of_bias = tangents[0], tangents[1], tangents[3]
        if of_lhs is None and of_bias is not None:
            of_lhs = lhs.new_zeros(()).expand(lhs.shape)
        rest = (offset, None, ctx.form, *ctx.settings, ctx.types[3], ctx.group_count)
        first = None if of_lhs is None else ragged_dot(of_lhs, rhs, sizes, of_bias, *rest)
        second = None if of_rhs is None else ragged_dot(lhs, of_rhs, sizes, None, *rest)
        return second if first is None else first if second is None else first + second


def _check_buffer(into: Tensor, rhs: Tensor, form: str, transformed: bool) -> None:
    if transformed:
        raise NotImplementedError("weight_grad_into: torch.func's transformations return gradients; leave it out")
    if not is_grouped(form):
        raise NotImplementedError("weight_grad_into: only a ragged dot with one weight per group has it; leave it out")
    if into.shape != rhs.shape or into.device != rhs.device:
        wanted = f"rhs's, {tuple(rhs.shape)} on {rhs.device}"
        raise TypeError(f"weight_grad_into: got shape {tuple(into.shape)} on {into.device}, wanted {wanted}")


_DEFAULTS = (None, None, None, BASIC_FORM, False, None, None, None, None)  # the dispatcher drops arguments that are their defaults


def _all(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args + _DEFAULTS[len(args) - 3 :]


def _record(*args: Any) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return _RaggedDot.apply(*_all(args))
    if (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)) or torch.autograd.forward_ad._current_level >= 0:
        return _RaggedDot.apply(*_all(args))
    with torch._C._AutoDispatchBelowAutograd():
        return ragged_dot(*args)


LIBRARY.impl("ragged_dot", _record, "Autograd")

# ---- vmap and autocast ---------------------------------------------------------------------------------------------------------


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """One more batch axis, the first; what is not mapped over is broadcast along it."""
    lhs, rhs, sizes, bias, offset, into, form, *settings = _all(args)
    of_lhs, of_rhs, of_sizes, of_bias, of_offset = (in_dims + (None,) * 5)[:5]
    if of_offset is not None or into is not None:
        raise NotImplementedError("vmap: group_offset and weight_grad_into must be the same for all entries")
    grouped = is_grouped(form)

    def put(tensor: Tensor, dim: int | None, place: int) -> Tensor:
        if dim is not None:
            return tensor.movedim(dim, place)
        one = tensor.unsqueeze(place)
        return one.expand(*one.shape[:place], info.batch_size, *one.shape[place + 1 :])

    lhs, rhs = put(lhs, of_lhs, 0), put(rhs, of_rhs, int(grouped))
    if of_sizes is not None or (sizes is not None and sizes.dim() > 1):
        sizes = put(sizes, of_sizes, 0)
        if sizes.dim() == 2:  # so far all batch entries had the same
            sizes = sizes.reshape(info.batch_size, *[1] * (lhs.dim() - 3), sizes.shape[1]).expand(*lhs.shape[:-2], -1)
    out = ragged_dot(lhs, rhs, sizes, None if of_bias is not None else bias, offset, None, form, *settings)
    if of_bias is not None:  # as a product with a column of ones
        groups, _, columns = (weights := bias.movedim(of_bias, 1)).shape
        weights = weights.reshape(groups, info.batch_size, *[1] * (lhs.dim() - 2), columns).expand(-1, *lhs.shape[:-2], 1, -1)
        ones = out.new_ones(()).expand(*out.shape[:-1], 1)
        out = out + ragged_dot(ones, weights, sizes, None, offset, None, BASIC_FORM, *settings[:3], out.dtype)
    return out, 0 if grouped or is_batch(form) else 1


torch.library.register_vmap("hipgroupgemm::ragged_dot", _vmap, lib=LIBRARY)


def _register_autocast(device: str, key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(tensor: Tensor | None, dtype: Any) -> Tensor | None:
        eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if tensor is not None and eligible else tensor

    def run(*args: Any) -> Tensor:
        lhs, rhs, sizes, bias, offset, into, form, ends, precision, group_offset, dtype, count = _all(args)
        kind = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            operands = (cast(lhs, kind), cast(rhs, kind), sizes, cast(bias, kind if dtype is None else dtype))
            return ragged_dot(*operands, offset, into, form, ends, precision, group_offset, dtype, count)

    LIBRARY.impl("ragged_dot", run, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")
