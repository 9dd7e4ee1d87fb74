"""The reference backend: NumPy on the CPU, and the judge of all the others.

One BLAS product a group, no padding, no loop over rows. 16- and 8-bit operands are widened group by group and accumulated in
float32, the result is rounded once. `compute` is the operation itself on NumPy views; `ReferenceBackend` serves plans with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Backend, Device, Executable, MatmulAlgorithm
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import ArrayView, ListView, host_array, numpy_view
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes
from hipgroupgemm.problem.groups import GroupBounds, scan, select_groups
from hipgroupgemm.problem.parse import Call

__all__ = ["ReferenceBackend", "compute", "compute_call", "numpy_view"]

Array = np.ndarray[Any, Any]
Stack = Any
"""An operand with groups: an array with them along axis 0, or a list of arrays."""


def widen(values: Array, dtype: np.dtype[Any]) -> Array:
    """`values` in the accumulation dtype; values that have it already are not copied."""
    if values.dtype == dtype:
        return values
    if values.dtype == DTYPES["bfloat16"] and dtype == np.float32:
        # bf16 is float32's upper half: shifting it up is exact, and several times faster than converting
        shifted: Array = values.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return shifted.view(np.float32)
    wide: Array = values.astype(dtype)
    return wide


def _multiply_in_order(a: Array, b: Array) -> Array:
    """a @ b, summed along k from the front, each product and sum rounded: BLAS may choose its order by the number and place of rows."""
    total = np.zeros((len(a), b.shape[1]), a.dtype)
    term = np.empty_like(total)
    for column, row in zip(a.T, b, strict=True):
        total += np.multiply(column[:, None], row, out=term)
    return total


class _Epilogue:
    """Writes alpha * P + beta * c + bias into slices of out, rounding once."""

    def __init__(self, alpha: float, beta: float, accumulate: np.dtype[Any], *, in_order: bool) -> None:
        self.alpha, self.beta, self.accumulate = alpha, beta, accumulate
        self.multiply: Callable[[Array, Array], Array] = _multiply_in_order if in_order else np.matmul

    def stores_product_itself(self, a: Array, b: Array, out: Array, bias: Array | None) -> bool:
        """Whether P = a b goes into matrices of out unchanged, so that BLAS may write it there, from operands that need no widening."""
        plain = self.multiply is np.matmul and self.alpha == 1 and self.beta == 0 and bias is None
        return plain and a.dtype == b.dtype == out.dtype == self.accumulate

    def store(self, out: Array, pairs: Iterable[tuple[Array, Array]], c: Array | None, bias: Array | None = None) -> None:
        """P is the sum of the products of these pairs of matrices, zero without any; c has out's shape."""
        value: Any = None
        for a, b in pairs if self.alpha != 0 else ():
            product = self.multiply(widen(a, self.accumulate), widen(b, self.accumulate))
            value = product if value is None else value + product
        if value is not None:
            value = value.reshape(out.shape)
            if self.alpha != 1:
                value = value * self.accumulate.type(self.alpha)
        if self.beta != 0 and c is not None:
            scaled = widen(c, self.accumulate) * self.accumulate.type(self.beta)
            value = scaled if value is None else value + scaled
        if bias is not None:
            row = widen(bias, self.accumulate).reshape(out.shape[1:])
            value = np.broadcast_to(row, out.shape) if value is None else value + row
        out[...] = 0 if value is None else _narrow(value, out.dtype)


def _narrow(value: Any, dtype: np.dtype[Any]) -> Any:
    """`value`, ready to be rounded to `dtype` once: ml_dtypes rounds float64 to its types by way of float32, which would round twice.

    float64 is rounded to float32 *to odd* instead (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
    using rounding to odd"): truncated, with the last bit set where something was lost. Rounding that again gives the right result.
    """
    if value.dtype != np.float64 or dtype.isbuiltin == 1:
        return value
    nearest = value.astype(np.float32)
    inexact = np.isfinite(value) & (nearest != value)
    truncated = np.where(np.abs(nearest) > np.abs(value), np.nextafter(nearest, np.float32(0)), nearest)
    odd = (truncated.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(inexact, odd, nearest)


def compute(
    mode: RaggedDotMode,
    lhs: Array,
    rhs: Stack,
    out: Stack,
    bounds: GroupBounds | None,
    *,
    batch_ndim: int,
    summed_ndim: int = 0,
    c: Stack | None = None,
    bias: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    zero_tail: bool = True,
    accumulate: np.dtype[Any],
    batch_invariant: bool = False,
) -> None:
    """The ragged dot on host arrays, written into out.

    Args:
        mode: which dimension is ragged.
        lhs: (*batch, *summed, m, k); `summed` only in CONTRACTING.
        rhs: NON_CONTRACTING (g, *batch, k, n), or g arrays without that axis; else (*batch, *summed, k, n).
        out: NON_CONTRACTING and BATCH (*batch, *rows, *columns), CONTRACTING (g, *batch, *rows, *columns), or g arrays without that axis;
            *rows make m and *columns make n; in NON_CONTRACTING rows is one axis.
        bounds: (*batch, *summed, g), in units of lhs's ragged axis; None in BATCH.
        batch_ndim, summed_ndim: how many axes `batch` and `summed` are.
        c: like out, or None. bias: (g, n) or None.
        alpha, beta: real. alpha = 0 drops P, beta = 0 drops c, neither is read then, as in BLAS.
        zero_tail: whether rows that no group covers are written (beta * c).
        accumulate: the dtype that products are accumulated in.
        batch_invariant: whether each row's sums are made in one order, whatever the others are; only in NON_CONTRACTING.
    """
    epilogue = _Epilogue(alpha, beta, accumulate, in_order=batch_invariant)
    lead = int(mode is RaggedDotMode.CONTRACTING and not isinstance(out, list))
    one_rhs, one_out = (stack[0] if isinstance(stack, list) else stack for stack in (rhs, out))
    batch_shape, summed_shape = one_out.shape[lead : lead + batch_ndim], lhs.shape[batch_ndim : batch_ndim + summed_ndim]
    is_matrix = one_out.shape[lead + batch_ndim :] == (lhs.shape[-2], one_rhs.shape[-1])  # two axes alone may both be rows, or both columns
    direct = is_matrix and not summed_ndim and epilogue.stores_product_itself(lhs, one_rhs, one_out, bias)
    starts = ends = np.zeros(batch_shape)
    if mode is not RaggedDotMode.BATCH:
        if bounds is None:
            raise TypeError("bounds: got None, wanted the groups' starts and ends; only BATCH goes without")
        shape = (*batch_shape, *summed_shape, bounds.starts.shape[-1])
        starts, ends = np.broadcast_to(bounds.starts, shape), np.broadcast_to(bounds.ends, shape)
    with np.errstate(all="ignore"):  # NaN, Inf and overflow are values here, not news
        for at in np.ndindex(batch_shape):
            a = lhs[at]
            if mode is RaggedDotMode.CONTRACTING:
                slabs = None if c is None else _groups_at(c, at)
                _contracting(a, _groups_at(out, at), slabs, one_rhs[at], starts[at], ends[at], epilogue, direct)
                continue
            inner = (*at, ...)  # stays an array where nothing is left but one element
            rows = one_out[inner], None if c is None else c[inner]
            if mode is RaggedDotMode.NON_CONTRACTING:
                weights, bounds_at = _groups_at(rhs, at), (starts[at].tolist(), ends[at].tolist())
                _non_contracting(a, *rows, weights, *bounds_at, bias, epilogue, direct, zero_tail)
            elif direct:
                np.matmul(a, one_rhs[at], out=rows[0])
            else:
                epilogue.store(rows[0], [(a, one_rhs[at])], rows[1])


def _groups_at(stack: Stack, at: tuple[int, ...]) -> Stack:
    """The groups' arrays at a batch entry."""
    inner, whole = (*at, ...), (slice(None), *at, ...)
    return [array[inner] for array in stack] if isinstance(stack, list) else stack[whole]


def _non_contracting(
    a: Array,
    out: Array,
    c: Array | None,
    weights: Stack,
    starts: list[int],
    ends: list[int],
    bias: Array | None,
    epilogue: _Epilogue,
    direct: bool,
    zero_tail: bool,
) -> None:
    """One batch entry: a (m, k), weights (g, k, n)."""
    matmul = np.matmul
    for group, (start, end, b) in enumerate(zip(starts, ends, weights, strict=True)):
        if start >= end:
            continue
        if direct:  # nothing a group but the product itself: small groups feel every microsecond
            matmul(a[start:end], b, out=out[start:end])
        else:
            rows = slice(start, end)
            epilogue.store(out[rows], [(a[rows], b)], None if c is None else c[rows], None if bias is None else bias[group])
    if zero_tail:
        for rows in (slice(0, starts[0]), slice(ends[-1], None)) if starts else (slice(0, None),):
            if out[rows].size:
                epilogue.store(out[rows], (), None if c is None else c[rows])


def _contracting(a: Array, out: Stack, c: Stack | None, b: Array, starts: Array, ends: Array, epilogue: _Epilogue, direct: bool) -> None:
    """One batch entry: a (*summed, m, k), b (*summed, k, n), starts and ends (*summed, g)."""
    if direct:
        for start, end, slab in zip(starts.tolist(), ends.tolist(), out, strict=True):
            np.matmul(a[:, start:end], b[start:end], out=slab)  # zeros for an empty group
        return
    for group in range(len(out)):
        pairs = []
        for at in np.ndindex(starts.shape[:-1]):
            bound = (*at, group)
            rows = slice(int(starts[bound]), int(ends[bound]))
            if rows.start < rows.stop:
                pairs.append((a[at][:, rows], b[at][rows]))
        slabs = [stack[group] if isinstance(stack, list) else stack[(group, ...)] for stack in (out, c) if stack is not None]
        epilogue.store(slabs[0], pairs, slabs[1] if len(slabs) > 1 else None)


ALGORITHM = MatmulAlgorithm(backend="reference", index=0, name="numpy_matmul_a_group", workspace_size=0, deterministic=True)
IN_ORDER = MatmulAlgorithm("reference", 1, "numpy_sum_along_k", 0, deterministic=True, batch_invariant=True)
"""Many times slower, and the same bits on every machine."""


class ReferenceBackend(Backend):
    """NumPy on the CPU. It serves every config with one BLAS product a group; who asks gets batch-invariant sums in NON_CONTRACTING."""

    name = "reference"
    types = frozenset(FLOAT_BYTES)
    features = frozenset(
        (
            *("alpha", "bias", "c", "group_offset", "mixed_types", "narrow_output", "out_listed", "rhs_listed", "sizes_per_batch", "tf32"),
            "wide_output",
        )
    )
    layouts = frozenset(
        ("bias_inner_stride", "c_inner_stride", "column_major_output", "lhs_inner_stride", "output_inner_stride", "rhs_inner_stride")
    )

    settings = frozenset(("batch_invariant", "max_multiprocessors"))

    def limited(self, max_multiprocessors: int) -> ReferenceBackend:
        """Itself: a CPU has no multiprocessors, and code that is tried on one goes on working."""
        del max_multiprocessors
        return self

    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """None for a CPU, else why not."""
        del config
        if device.kind != "cpu":
            return f"it computes on the CPU, the operands are on {device}"
        return None

    def versions(self, device: Device) -> dict[str, str]:
        """NumPy's version: its BLAS does the work."""
        del device
        return {"numpy": np.__version__}

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        """The one algorithm there is, or the one that is batch-invariant; they need no workspace."""
        del device
        invariant = limits.batch_invariant and config.ragged_mode is RaggedDotMode.NON_CONTRACTING
        return [IN_ORDER if invariant else ALGORITHM][: limits.max_algorithm_count]

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        """Nothing to prepare: a fresh executable."""
        del device, stream
        return _ReferenceExecutable(config, algorithm)


class _ReferenceExecutable(Executable):
    def __init__(self, config: GroupedGemmConfig, algorithm: MatmulAlgorithm) -> None:
        self.config, self.algorithm = config, algorithm

    def execute(self, arguments: Arguments) -> None:
        run_config(arguments.config, arguments, batch_invariant=self.algorithm.batch_invariant)

    def explain(self) -> str:
        c, exact = self.config, " (more exact than the tf32 asked for)"
        kind = c.compute_type.replace("tf32", "float32")
        what = "sums along k in order, group by group" if self.algorithm.batch_invariant else "one NumPy product a group"
        text = f"{what}, accumulated in {kind}{exact if c.compute_type == 'tf32' else ''}"
        operands = (("lhs", c.type_a, c.lhs_inner_stride, c.m * c.k), ("rhs", c.type_b, c.rhs_inner_stride, c.k * c.n))
        widened = [name for name, held, _, _ in operands if held != kind]
        if widened:
            text += f"; {' and '.join(widened)} widened to it a group at a time"
        copied = [name for name, _, stride, extent in operands if stride != 1 and extent > 1]
        if copied:
            text += f"; NumPy copies {' and '.join(copied)} a group at a time, no stride being 1: a contiguous copy may be faster"
        return text


def run_config(config: GroupedGemmConfig, arguments: Arguments, *, batch_invariant: bool = False) -> None:
    """Runs a config on host pointers: every view is made from the config's extents and strides alone, as on a device."""
    mode, batch, groups = config.ragged_mode, config.batch_count, config.group_count
    lead = (groups,) if mode is RaggedDotMode.CONTRACTING else ()
    grouped = (groups,) if mode is RaggedDotMode.NON_CONTRACTING else ()

    def view(pointer: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        dtype = DTYPES[kind]
        return numpy_view(pointer, shape, tuple(s * dtype.itemsize for s in strides[-len(shape) :]), dtype)

    def stack(role: str, kind: str, groups: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Stack:
        addresses = arguments.lists.get(role)
        if addresses is not None:
            return [view(address, kind, shape, strides) for address in addresses]
        return view(arguments.pointers[role], kind, (*groups, *shape), strides)

    lhs = view(arguments.pointers["lhs"], config.type_a, (batch, config.m, config.k), config.lhs_strides)
    rhs = stack("rhs", config.type_b, grouped, (batch, config.k, config.n), config.rhs_strides)
    out = stack("out", config.type_d, lead, (batch, config.m, config.n), config.output_strides)
    bias, c = None, stack("c", config.type_c, lead, (batch, config.m, config.n), config.c_strides) if config.beta else None
    if arguments.pointers.get("bias"):
        bias = view(arguments.pointers["bias"], config.type_d, (groups, config.n), (config.bias_group_stride, config.bias_inner_stride))
    bounds = None
    if mode is not RaggedDotMode.BATCH:
        bounds = arguments.bounds
        if bounds is None:
            bounds = scan(host_array(arguments.group_sizes), config.ragged_extent, ends=arguments.ends)
        bounds = select_groups(bounds, arguments.host_group_offset(), groups)
    compute(
        mode,
        lhs,
        rhs,
        out,
        bounds,
        batch_ndim=1,
        c=c,
        bias=bias,
        alpha=config.alpha,
        beta=config.beta,
        zero_tail=arguments.tail == "zero",
        accumulate=np.dtype(config.compute_type.replace("tf32", "float32")),
        batch_invariant=batch_invariant,
    )


def compute_call(call: Call, axes: RaggedDotAxes, accumulate: np.dtype[Any], *, batch_invariant: bool = False) -> None:
    """The reference on operands of any rank: axes are put in order by views, merged by a copy where need be; out is never copied."""
    batch = [axis.extent for axis in axes.batch]
    lhs, rhs = host_array(call.lhs), call.views["rhs"]
    summed = [lhs.shape[i] for i in axes.lhs_summed]
    m, k = (math.prod(lhs.shape[i] for i in held) for held in (axes.lhs_rows, axes.lhs_contracting))
    n = math.prod(rhs.shape[i] for i in axes.rhs_columns)
    lhs_batch = [axis.lhs for axis in axes.batch if axis.lhs is not None]
    rhs_batch = [axis.rhs for axis in axes.batch if axis.rhs is not None]
    a = lhs.transpose([*lhs_batch, *axes.lhs_summed, *axes.lhs_rows, *axes.lhs_contracting]).reshape(*batch, *summed, m, k)
    group = [] if axes.rhs_group is None else [axes.rhs_group]
    groups, lead = [rhs.shape[i] for i in group], [1 if axis.rhs is None else axis.extent for axis in axes.batch]
    b = _in_order(rhs, [*group, *rhs_batch, *axes.rhs_summed, *axes.rhs_contracting, *axes.rhs_columns])
    if isinstance(rhs, ListView):
        b = [np.broadcast_to(array.reshape(*lead, k, n), (*batch, k, n)) for array in b]
    else:
        b = np.broadcast_to(b.reshape(*groups, *lead, *summed, k, n), (*groups, *batch, *summed, k, n))
    slabs = [0] if axes.mode is RaggedDotMode.CONTRACTING else []
    out_order = [*slabs, *(axis.out for axis in axes.batch), *axes.out_rows, *axes.out_columns]
    out = _in_order(call.views["out"], out_order)
    c = _in_order(call.views["c"], out_order) if call.beta else None
    bias = host_array(call.views["bias"]) if "bias" in call.views else None
    bounds = None
    if axes.mode is not RaggedDotMode.BATCH:
        sizes = host_array(call.sizes)
        bounds = scan(sizes, axes.ragged_extent, ends=call.ends)
        bounds = select_groups(bounds, call.group_offset or 0, axes.group_count)
        if bounds.fault is not None and call.check == "sync":
            bounds.fault.throw(axes.ragged_extent)
        inner = math.prod(lhs.shape[i] for i in axes.lhs_contracting[1:]) if axes.mode is RaggedDotMode.CONTRACTING else 1
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
        alpha=call.alpha,
        beta=call.beta,
        zero_tail=call.tail == "zero",
        accumulate=accumulate,
        batch_invariant=batch_invariant,
    )


def _in_order(view: ArrayView, order: list[int]) -> Stack:
    """Host memory with its axes in another order; of a list, whose groups are axis 0 and stay first, an array per group."""
    if isinstance(view, ListView):
        return [host_array(entry).transpose([axis - 1 for axis in order[1:]]) for entry in view.entries]
    return host_array(view).transpose(order)
