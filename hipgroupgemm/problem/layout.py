"""From operands and dimension numbers to a config: which strides the canonical problem has, and whether it has one.

A ragged dot of any rank *collapses* to a config when each role's axes (batch, m, n, k) merge into one axis of one stride, without a
copy. The reference backend computes the ones that do not; no other backend does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hipgroupgemm.config import Epilogue, GroupedGemmConfig, RaggedDotMode, inner_axis
from hipgroupgemm.operands.views import ArrayView
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes
from hipgroupgemm.problem.precision import Precision, compute_type_under

__all__ = ["DoesNotCollapse", "config_from_views"]


class DoesNotCollapse(Exception):
    """The operands' strides do not reduce to a config; the text says which axes."""


# ---- collapsing axes ---------------------------------------------------------------------------------------------------------


def _collapse(extents: Sequence[int], strides: Sequence[Sequence[int]], what: str) -> tuple[int, list[int]]:
    """Axes merged into one: its extent, and its stride in each operand.

    Args:
        extents: one an axis, outermost first.
        strides: for each operand its strides along these axes, in elements.
        what: the role, for the error.
    """
    count = len(strides)
    if 0 in extents:
        return 0, [0] * count
    axes = [(extent, [s[i] for s in strides]) for i, extent in enumerate(extents) if extent != 1]
    if not axes:
        return 1, [0] * count
    extent, steps = axes[0]
    for next_extent, next_steps in axes[1:]:
        if any(outer != inner * next_extent for outer, inner in zip(steps, next_steps, strict=True)):
            raise DoesNotCollapse(f"the axes that make {what}, of extents {tuple(extents)}, do not lie as one axis in every operand")
        extent, steps = extent * next_extent, next_steps
    return extent, list(steps)


@dataclasses.dataclass
class _Matrix:
    """One operand's strides along (group, batch, rows, columns), in elements."""

    group: int
    batch: int
    rows: int
    columns: int


def _elements(view: ArrayView) -> tuple[int, ...]:
    return tuple(stride // view.dtype.itemsize for stride in view.strides)


def _settle(matrix: _Matrix, extents: tuple[int, int, int, int], like: tuple[int, int, int, int] | None, size: int) -> tuple[_Matrix, int]:
    """Gives axes of at most one element, along which a stride says nothing, the strides of `like` or else of a packed operand.

    Returns the matrix and the inner axis (0 rows, 1 columns).
    """
    groups, batch, rows, columns = extents
    nothing = size == 0
    free_rows, free_columns = nothing or rows <= 1, nothing or columns <= 1
    if like is not None:
        r, c = (like[2] if free_rows else matrix.rows), (like[3] if free_columns else matrix.columns)
    else:
        r, c = matrix.rows, matrix.columns
        if free_columns and free_rows:
            r, c = max(columns, 1), 1
        elif free_columns:
            c = 1
        elif free_rows:
            r = max(columns, 1) * max(c, 1)
    slab = max(rows, 1) * r if r >= c else max(columns, 1) * c
    b = matrix.batch if batch > 1 and not nothing else (0 if batch <= 1 else like[1] if like else slab)
    if groups > 1 and not nothing:
        g = matrix.group
    elif like is not None:
        g = like[0]
    else:
        g = 0 if groups == 0 else max(batch, 1) * slab
    return _Matrix(g, b, r, c), inner_axis((r, c))


def _alignment(view: ArrayView, matrix: _Matrix, inner: int, *, batch: int, groups: int) -> int:
    """The power of two, up to 16, that divides the address and every stride but the inner one, in bytes."""
    size = view.dtype.itemsize
    bits = view.pointer | 16 | (matrix.rows if inner == 1 else matrix.columns) * size
    if batch > 1:
        bits |= matrix.batch * size
    if groups > 1:
        bits |= matrix.group * size
    return bits & -bits


def config_from_views(
    axes: RaggedDotAxes,
    lhs: ArrayView,
    rhs: ArrayView,
    out: ArrayView,
    sizes: ArrayView,
    *,
    c: ArrayView | None = None,
    bias: ArrayView | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    precision: Precision | None = None,
    like: GroupedGemmConfig | None = None,
) -> GroupedGemmConfig:
    """The config of exactly this problem.

    Args:
        axes: the roles of the operands' axes.
        lhs, rhs, out, sizes, c, bias: the operands. Without c its layout is out's.
        alpha, beta, precision: as the operation's.
        like: a plan's key; strides that say nothing (axes of at most one element) are taken from it, so that such operands fit.

    Raises:
        DoesNotCollapse: there is no such config without a copy.
        ValueError, TypeError: from the config's own validation.
    """
    precision = precision or Precision()
    mode = axes.mode
    a, b, d = _elements(lhs), _elements(rhs), _elements(out)
    e = d if c is None else _elements(c)
    s = _elements(sizes)
    per_batch = any(axis.sizes is not None and axis.extent != 1 for axis in axes.batch)
    if mode is RaggedDotMode.BATCH:
        per_batch = False
    if any(lhs.shape[axis] != 1 for axis in (*axes.lhs_summed, *axes.lhs_contracting[1:])) and mode is RaggedDotMode.CONTRACTING:
        raise DoesNotCollapse("contracted axes beside the ragged one are longer than 1")

    batch_strides = [
        [a[axis.lhs] if axis.lhs is not None else 0 for axis in axes.batch],
        [b[axis.rhs] if axis.rhs is not None else 0 for axis in axes.batch],
        [d[axis.out] for axis in axes.batch],
        [e[axis.out] for axis in axes.batch],
    ]
    if per_batch:
        batch_strides.append([s[axis.sizes] if axis.sizes is not None else 0 for axis in axes.batch])
    batch, batch_steps = _collapse([axis.extent for axis in axes.batch], batch_strides, "the batch")
    rows = [lhs.shape[i] for i in axes.lhs_rows]
    m, (a_m, d_m, e_m) = _collapse(rows, [[a[i] for i in axes.lhs_rows], [d[i] for i in axes.out_rows], [e[i] for i in axes.out_rows]], "m")
    n, (b_n, d_n, e_n) = _collapse(
        [rhs.shape[i] for i in axes.rhs_columns],
        [[b[i] for i in axes.rhs_columns], [d[i] for i in axes.out_columns], [e[i] for i in axes.out_columns]],
        "n",
    )
    k, (a_k, b_k) = _collapse_contracted(axes, lhs.shape, a, b)

    groups = axes.group_count
    contracting, non_contracting = mode is RaggedDotMode.CONTRACTING, mode is RaggedDotMode.NON_CONTRACTING
    rhs_groups, out_groups = (groups if non_contracting else 0), (groups if contracting else 0)
    rhs_group = b[axes.rhs_group] if axes.rhs_group is not None else 0
    lhs_matrix, lhs_inner = _settle(
        _Matrix(0, batch_steps[0], a_m, a_k), (0, batch, m, k), (0, *like.lhs_strides) if like else None, lhs.size
    )
    rhs_matrix, rhs_inner = _settle(
        _Matrix(rhs_group, batch_steps[1], b_k, b_n), (rhs_groups, batch, k, n), like.rhs_strides if like else None, rhs.size
    )
    out_matrix, out_inner = _settle(
        _Matrix(d[0] if contracting else 0, batch_steps[2], d_m, d_n),
        (out_groups, batch, m, n),
        like.output_strides if like else None,
        out.size,
    )
    c_matrix, _ = _settle(
        _Matrix(e[0] if contracting else 0, batch_steps[3], e_m, e_n),
        (out_groups, batch, m, n),
        like.c_strides if like else None,
        out.size,
    )
    if like is not None:
        lhs_inner = _keep_orientation(lhs_inner, lhs_matrix, 0 if like.trans_a else 1)
        rhs_inner = _keep_orientation(rhs_inner, rhs_matrix, 0 if like.trans_b else 1)
        out_inner = _keep_orientation(out_inner, out_matrix, 1 if like.must_swap_operands else 0)
    alignments = {
        "lhs_alignment": _alignment(lhs, lhs_matrix, lhs_inner, batch=batch, groups=0),
        "rhs_alignment": _alignment(rhs, rhs_matrix, rhs_inner, batch=batch, groups=rhs_groups),
        "output_alignment": _alignment(out, out_matrix, out_inner, batch=batch, groups=out_groups),
        "c_alignment": _alignment(out if c is None else c, c_matrix, out_inner, batch=batch, groups=out_groups),
    }
    if like is not None:  # better aligned operands fit as well
        alignments = {name: getattr(like, name) if value >= getattr(like, name) else value for name, value in alignments.items()}

    def leading(matrix: _Matrix, inner: int) -> int:
        return matrix.rows if inner == 1 else matrix.columns

    def inner_stride(matrix: _Matrix, inner: int) -> int:
        return matrix.columns if inner == 1 else matrix.rows

    if non_contracting:
        ragged, group, out_ragged, c_ragged = lhs_matrix.rows, rhs_matrix.group, out_matrix.rows, c_matrix.rows
    elif contracting:
        ragged, group, out_ragged, c_ragged = lhs_matrix.columns, rhs_matrix.rows, out_matrix.group, c_matrix.group
    else:
        ragged, group, out_ragged, c_ragged = lhs_matrix.batch, rhs_matrix.batch, out_matrix.batch, c_matrix.batch
    bias_strides = (0, 1)
    if bias is not None:
        columns = _elements(bias)[1:]
        _, (bias_n,) = _collapse([rhs.shape[i] for i in axes.rhs_columns], [columns], "the bias's n")
        bias_strides = (_elements(bias)[0], bias_n)
    return GroupedGemmConfig(
        m=m,
        n=n,
        k=k,
        batch_count=batch,
        group_count=groups,
        lhs_leading_dim_stride=leading(lhs_matrix, lhs_inner),
        rhs_leading_dim_stride=leading(rhs_matrix, rhs_inner),
        c_leading_dim_stride=leading(c_matrix, out_inner),
        output_leading_dim_stride=leading(out_matrix, out_inner),
        trans_a=lhs_inner == 0,
        trans_b=rhs_inner == 0,
        must_swap_operands=out_inner == 1,
        alpha=alpha,
        beta=beta,
        type_a=lhs.dtype.name,
        type_b=rhs.dtype.name,
        type_c=out.dtype.name,
        type_d=out.dtype.name,
        stride_ragged_dim=ragged,
        stride_group_dim=group,
        c_stride_ragged_dim=c_ragged,
        output_stride_ragged_dim=out_ragged,
        precision_algorithm=precision.algorithm,
        compute_precision=precision.level,
        ragged_mode=mode,
        compute_type=compute_type_under(precision, lhs, rhs, out),
        lhs_batch_stride=lhs_matrix.batch,
        rhs_batch_stride=rhs_matrix.batch,
        c_batch_stride=c_matrix.batch,
        output_batch_stride=out_matrix.batch,
        lhs_inner_stride=inner_stride(lhs_matrix, lhs_inner),
        rhs_inner_stride=inner_stride(rhs_matrix, rhs_inner),
        c_inner_stride=inner_stride(c_matrix, out_inner),
        output_inner_stride=inner_stride(out_matrix, out_inner),
        sizes_per_batch=per_batch and batch > 1,
        group_total=axes.group_total,
        epilogue=Epilogue(bias=bias is not None),
        bias_group_stride=bias_strides[0] if groups > 1 else 0,
        bias_inner_stride=bias_strides[1] if n > 1 else 1,
        **alignments,
    )


def _keep_orientation(inner: int, matrix: _Matrix, wanted: int) -> int:
    """The plan's orientation where the strides allow it as well."""
    return wanted if inner_axis((matrix.rows, matrix.columns), prefer_second=wanted == 1) == wanted else inner


def _collapse_contracted(axes: RaggedDotAxes, lhs_shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, list[int]]:
    """k: any order of the contracted axes will do, as long as lhs and rhs use the same one."""
    pairs = list(zip(axes.lhs_contracting, axes.rhs_contracting, strict=True))
    orders = [pairs]
    if len(pairs) > 1:
        orders.append(sorted(pairs, key=lambda pair: -a[pair[0]]))
    error: DoesNotCollapse | None = None
    for order in orders:
        try:
            return _collapse([lhs_shape[i] for i, _ in order], [[a[i] for i, _ in order], [b[j] for _, j in order]], "k")
        except DoesNotCollapse as failed:
            error = failed
    raise error if error is not None else DoesNotCollapse("k")
