"""How each platform runs the primitive.

CUDA and ROCm: the native handler (`native.py`); where it cannot be had, or the backend's launches are no list of kernels, this package's
own call from `jax.experimental.buffer_callback`, which costs Python and a few hundred microseconds at every call. One log line says why.
CPU: NumPy, from the definition, as a host callback. XLA has nothing that keeps this package's rules.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from hipgroupgemm import api
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.backends.reference import compute_call
from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.integrations.jax import native
from hipgroupgemm.integrations.jax.primitive import Settings, bind, by_role, problem_of, ragged_dot_p, shapes_of
from hipgroupgemm.operands.arrays import as_array
from hipgroupgemm.operands.dtypes import compute_type_of
from hipgroupgemm.operands.views import Device
from hipgroupgemm.problem.canonicalize import canonicalize
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers
from hipgroupgemm.problem.parse import parse

__all__ = ["rearranged", "register"]

_log = logging.getLogger("hipgroupgemm.jax")


def _arguments(settings: Settings) -> dict[str, Any]:
    """This package's own function's keywords."""
    return {
        "ragged_dot_dimension_numbers": settings.numbers,
        "precision": settings.precision,
        "preferred_element_type": settings.out_type,
        "alpha": settings.alpha,
        "group_count": settings.group_count,
        "group_offset": settings.group_offset,
    }


# ---- CPU -----------------------------------------------------------------------------------------------------------------------


def _on_host(*operands: Any, settings: Settings) -> Any:
    arguments = {**_arguments(settings), **{role: np.asarray(operand) for role, operand in by_role(operands, settings).items()}}
    _, problem = problem_of(shapes_of(operands), settings)
    arguments["out"] = np.empty(problem.axes.out_shape, problem.out_dtype)
    call = parse(arguments)
    kind = compute_type_of(call.lhs.dtype, call.views["rhs"].dtype, problem.out_dtype)
    compute_call(call, canonicalize(call, arguments).axes, np.dtype(kind), batch_invariant=settings.batch_invariant)
    return arguments["out"]


def _cpu(*operands: Any, settings: Settings) -> Any:
    if settings.backend not in (None, "reference"):
        raise NotImplementedError(f"backend {settings.backend!r} runs on GPUs, and this program is for the CPU")
    _, problem = problem_of(shapes_of(operands), settings)
    out = jax.ShapeDtypeStruct(problem.axes.out_shape, problem.out_dtype)
    return jax.pure_callback(functools.partial(_on_host, settings=settings), out, *operands)


# ---- GPUs ----------------------------------------------------------------------------------------------------------------------


def _gpu(kind: str, *operands: Any, settings: Settings) -> Any:
    devices = [Device(kind, device.local_hardware_id) for device in jax.local_devices(backend=kind)]
    call, problem = problem_of(shapes_of(operands), settings, devices[0])
    out = jax.ShapeDtypeStruct(problem.axes.out_shape, problem.out_dtype)
    if problem.config is None:
        return rearranged(operands, settings)
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    sizes = call.sizes
    view = type(sizes)(0, problem.sizes_shape, problem.sizes_strides, sizes.dtype, devices[0], "jax")
    offset = call.views.get("group_offset", call.group_offset or 0)
    arguments = Arguments(problem.config, {}, view, False, offset, "zero", "none", 0)
    slots = (*settings.roles, "out", "scratch")
    try:
        target, number, scratch = native.add_recipe(devices, arguments, slots, settings.plan)
    except native.NativeDoorError as error:
        _log_once(str(error))
        return _buffer_callback(operands, out, settings)
    results = (out, jax.ShapeDtypeStruct((scratch,), np.uint8))
    return jax.ffi.ffi_call(target, results)(*operands, recipe=np.int64(number))[0]


@functools.lru_cache(64)
def _log_once(reason: str) -> None:
    _log.warning("calls under jit go through Python (buffer_callback), some hundred microseconds each: %s", reason)


def _buffer_callback(operands: tuple[Any, ...], out: Any, settings: Settings) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    types = [operand.dtype.name for operand in operands]

    def call(context: Any, result: Any, *buffers: Any) -> None:
        arrays = {role: as_array(x, kind) for role, x, kind in zip(settings.roles, buffers, types, strict=True)}
        api.ragged_dot_general(
            **{**_arguments(settings), **arrays}, out=as_array(result, out.dtype), stream=context.stream, **settings.plan
        )

    return buffer_callback(call, out, command_buffer_compatible=False)(*operands)


# ---- operands that do not lie as a backend takes them --------------------------------------------------------------------------


def rearranged(operands: tuple[Any, ...], settings: Settings) -> Any:
    """The same result from operands that XLA has transposed and merged to (batch, m, k) and (g, batch, k, n)."""
    _, problem = problem_of(shapes_of(operands), settings)
    axes, held = problem.axes, by_role(operands, settings)
    lhs, rhs, sizes = held["lhs"], held["rhs"], held["group_sizes"]
    contracting, grouped = axes.mode is RaggedDotMode.CONTRACTING, axes.mode is RaggedDotMode.NON_CONTRACTING
    batch, summed = [axis.extent for axis in axes.batch], [lhs.shape[axis] for axis in axes.lhs_summed]
    m, k = [lhs.shape[axis] for axis in axes.lhs_rows], [lhs.shape[axis] for axis in axes.lhs_contracting]
    n, groups = [rhs.shape[axis] for axis in axes.rhs_columns], [axes.group_count] if grouped else []
    outer = math.prod(batch) * math.prod(summed)

    order: list[Any] = [axis.lhs for axis in axes.batch]
    a = jnp.transpose(lhs, [*order, *axes.lhs_summed, *axes.lhs_rows, *axes.lhs_contracting])
    a = a.reshape(outer, math.prod(m), math.prod(k))
    group = [] if axes.rhs_group is None else [axes.rhs_group]
    shared: list[Any] = [axis.rhs for axis in axes.batch if axis.rhs is not None]
    b = jnp.transpose(rhs, [*group, *shared, *axes.rhs_summed, *axes.rhs_contracting, *axes.rhs_columns])
    whole = bool(batch) and not shared and not summed  # no batch axis of rhs
    if not whole:
        lead = [axis.extent if axis.rhs is not None else 1 for axis in axes.batch]
        b = b.reshape(*groups, *lead, *summed, math.prod(k), math.prod(n))
        b = jnp.broadcast_to(b, (*groups, *batch, *summed, *b.shape[-2:]))
    b = b.reshape(*groups, *([] if whole else [outer]), math.prod(k), math.prod(n))
    if axes.mode is not RaggedDotMode.BATCH:
        if sizes.ndim > 1:
            present = [axis.sizes for axis in axes.batch] + list(axes.sizes_summed)
            shape = [extent if at is not None else 1 for at, extent in zip(present, [*batch, *summed], strict=True)]
            sizes = jnp.transpose(sizes, [*(at for at in present if at is not None), sizes.ndim - 1]).reshape(*shape, axes.group_total)
            sizes = jnp.broadcast_to(sizes, (*batch, *summed, axes.group_total)).reshape(outer, axes.group_total)
        if contracting and math.prod(k[1:]) != 1:  # rows of the ragged axis become so many each
            most = min(k[0] + 1, jnp.iinfo(sizes.dtype).max)
            sizes = jnp.clip(sizes, -1 if jnp.issubdtype(sizes.dtype, jnp.signedinteger) else 0, most).astype(jnp.int32)
            sizes = sizes * math.prod(k[1:])
    else:
        sizes = jnp.zeros((1,), jnp.int32)
    at = 1 + grouped
    pairs = ((), ()) if whole else ((0,), (int(grouped),))
    ragged = {RaggedDotMode.NON_CONTRACTING: 1, RaggedDotMode.CONTRACTING: 2, RaggedDotMode.BATCH: 0}[axes.mode]
    numbers = RaggedDotDimensionNumbers((((2,), (at - whole,)), pairs), (ragged,), (0,) if grouped else ())
    wide = jnp.promote_types(settings.out_type, jnp.float32).name if math.prod(summed) != 1 else settings.out_type
    used = {**held, "lhs": a, "rhs": b, "group_sizes": sizes}
    if "bias" in held:
        used["bias"] = held["bias"].reshape(axes.group_count, math.prod(n))
    out = bind(used, settings.change(numbers=numbers, out_type=wide, group_count=axes.group_count if contracting else None))
    slabs = [axes.group_count] if contracting else []
    out = out.reshape(*slabs, math.prod(batch), math.prod(summed), math.prod(m), math.prod(n))
    if math.prod(summed) != 1:
        out = out.sum(len(slabs) + 1)
    out = out.astype(settings.out_type).reshape(*slabs, *batch, *m, *n)
    labels = [*([0] if contracting else []), *(axis.out for axis in axes.batch), *axes.out_rows, *axes.out_columns]
    return jnp.transpose(out, [labels.index(axis) for axis in range(len(labels))])


def register() -> None:
    """Gives JAX these ways."""
    mlir.register_lowering(ragged_dot_p, mlir.lower_fun(_cpu, multiple_results=False), platform="cpu")
    for kind in ("cuda", "rocm"):
        mlir.register_lowering(ragged_dot_p, mlir.lower_fun(functools.partial(_gpu, kind), multiple_results=False), platform=kind)
