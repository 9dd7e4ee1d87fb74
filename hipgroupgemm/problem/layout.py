"""From operands and dimension numbers to a config: which strides the canonical problem has, and whether it has one.

A ragged dot of any rank *collapses* to a config when each role's axes (batch, m, n, k) merge into one axis of one stride, without a
copy. The reference backend computes the ones that do not; no other backend does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hipgroupgemm.config import Epilogue, GroupedGemmConfig, RaggedDotMode, inner_axis
from hipgroupgemm.operands.views import ArrayView, ListView
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


class _Matrix(NamedTuple):
    """One operand's strides along (group, batch, rows, columns), in elements."""

    group: int
    batch: int
    rows: int
    columns: int


def _elements(view: ArrayView) -> tuple[int, ...]:
    return tuple(stride // view.dtype.itemsize for stride in view.strides)


def _settle(
    matrix: _Matrix, extents: tuple[int, int, int, int], like: tuple[int, int, int, int] | None, size: int, listed: bool
) -> tuple[_Matrix, int]:
    """Gives axes whose stride says nothing (of at most one element, and a list's groups) the strides of `like` or else of a packed operand.

    Returns the matrix and the inner axis (0 rows, 1 columns).
    """
    groups, batch, rows, columns = extents
    g, b, r, c = matrix
    says = [extent > 1 and size != 0 for extent in extents]  # whether the stride along an axis says anything
    if not says[3]:
        c = like[3] if like else 1
    if not says[2]:
        r = like[2] if like else max(columns, 1) * max(c, 1)
    slab = max(rows, 1) * r if r >= c else max(columns, 1) * c
    if not says[1]:
        b = 0 if batch <= 1 else like[1] if like else slab
    if listed or not says[0]:
        g = like[0] if like else max(batch, 1) * (max(slab, b, 1) if listed else slab) if groups else 0
    return _Matrix(g, b, r, c), inner_axis((r, c))


def _alignment(view: ArrayView, matrix: _Matrix, inner: int, *, batch: int, groups: int) -> int:
    """The power of two, up to 16, that divides the address (each of a list's) and every stride but the inner one, in bytes."""
    size = view.dtype.itemsize
    bits = view.address_bits | 16 | (matrix.rows if inner == 1 else matrix.columns) * size
    if batch > 1:
        bits |= matrix.batch * size
    if groups > 1 and not isinstance(view, ListView):
        bits |= matrix.group * size
    return bits & -bits


_XLA_STRIDES = {
    RaggedDotMode.NON_CONTRACTING: {"lhs": "rows", "rhs": "group", "output": "rows"},
    RaggedDotMode.CONTRACTING: {"lhs": "columns", "rhs": "rows", "output": "group"},
    RaggedDotMode.BATCH: {"lhs": "batch", "rhs": "batch", "output": "batch"},
}
"""Which stride of an operand XLA's stride_ragged_dim, stride_group_dim and output_stride_ragged_dim (c's likewise) are."""


def config_from_views(
    axes: RaggedDotAxes,
    views: Mapping[str, ArrayView],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    precision: Precision | None = None,
    like: GroupedGemmConfig | None = None,
) -> GroupedGemmConfig:
    """The config of exactly this problem.

    Args:
        axes: the roles of the operands' axes.
        views: the operands by role: lhs, rhs, group_sizes, out; c and bias where there are such. Without c its layout is out's.
        alpha, beta, precision: as the operation's.
        like: a plan's key; strides that say nothing (axes of at most one element) are taken from it, so that such operands fit.

    Raises:
        DoesNotCollapse: there is no such config without a copy.
        ValueError, TypeError: from the config's own validation.
    """
    precision, mode, groups = precision or Precision(), axes.mode, axes.group_count
    contracting = mode is RaggedDotMode.CONTRACTING
    lhs, rhs, out, bias = views["lhs"], views["rhs"], views["out"], views.get("bias")
    held = {"lhs": lhs, "rhs": rhs, "output": out, "c": views.get("c", out)}
    strides = {role: _elements(view) for role, view in held.items()}
    if contracting and any(lhs.shape[axis] != 1 for axis in (*axes.lhs_summed, *axes.lhs_contracting[1:])):
        raise DoesNotCollapse("contracted axes beside the ragged one are longer than 1")

    def along(role: str, places: Iterable[int | None]) -> list[int]:
        return [0 if place is None else strides[role][place] for place in places]

    batch_places = {"lhs": [axis.lhs for axis in axes.batch], "rhs": [axis.rhs for axis in axes.batch]}
    batch_places["output"] = batch_places["c"] = [axis.out for axis in axes.batch]
    batch_strides = [along(role, places) for role, places in batch_places.items()]
    per_batch = mode is not RaggedDotMode.BATCH and any(axis.sizes is not None and axis.extent != 1 for axis in axes.batch)
    if per_batch:
        strides["group_sizes"] = _elements(views["group_sizes"])
        batch_strides.append(along("group_sizes", [axis.sizes for axis in axes.batch]))
    batch, (a_batch, b_batch, d_batch, e_batch, *_) = _collapse([axis.extent for axis in axes.batch], batch_strides, "the batch")
    rows, columns = axes.out_rows, axes.out_columns
    m_strides = [along("lhs", axes.lhs_rows), along("output", rows), along("c", rows)]
    m, (a_m, d_m, e_m) = _collapse([lhs.shape[i] for i in axes.lhs_rows], m_strides, "m")
    n_extents = [rhs.shape[i] for i in axes.rhs_columns]
    n, (b_n, d_n, e_n) = _collapse(n_extents, [along("rhs", axes.rhs_columns), along("output", columns), along("c", columns)], "n")
    k, (a_k, b_k) = _collapse_contracted(axes, lhs.shape, strides["lhs"], strides["rhs"])

    b_group = 0 if axes.rhs_group is None else strides["rhs"][axes.rhs_group]
    d_group, e_group = (strides["output"][0], strides["c"][0]) if contracting else (0, 0)
    slabs = groups if contracting else 0
    found = {
        "lhs": (_Matrix(0, a_batch, a_m, a_k), (0, batch, m, k)),
        "rhs": (_Matrix(b_group, b_batch, b_k, b_n), (0 if axes.rhs_group is None else groups, batch, k, n)),
        "output": (_Matrix(d_group, d_batch, d_m, d_n), (slabs, batch, m, n)),
        "c": (_Matrix(e_group, e_batch, e_m, e_n), (slabs, batch, m, n)),
    }
    xla: dict[str, int] = {}
    fields: dict[str, Any] = {}
    inner_axes: dict[str, int] = {}
    for role, (unsettled, extents) in found.items():
        hint = None if like is None else getattr(like, f"{role}_strides")
        hint = hint if hint is None or len(hint) == 4 else (0, *hint)
        matrix, inner = _settle(unsettled, extents, hint, held[role].size, isinstance(held[role], ListView))
        if role == "c":
            inner = inner_axes["output"]
        elif like is not None:  # the plan's orientation where the strides allow it as well
            wanted = int({"lhs": not like.trans_a, "rhs": not like.trans_b, "output": like.must_swap_operands}[role])
            inner = wanted if inner_axis((matrix.rows, matrix.columns), prefer_second=wanted == 1) == wanted else inner
        inner_axes[role] = inner
        leading, innermost = (matrix.rows, matrix.columns) if inner == 1 else (matrix.columns, matrix.rows)
        alignment = _alignment(held[role], matrix, inner, batch=batch, groups=extents[0])
        if like is not None:  # better aligned operands fit as well
            alignment = min(alignment, getattr(like, f"{role}_alignment"))
        fields.update({f"{role}_leading_dim_stride": leading, f"{role}_inner_stride": innermost})
        fields.update({f"{role}_batch_stride": matrix.batch, f"{role}_alignment": alignment})
        xla[role] = getattr(matrix, _XLA_STRIDES[mode]["output" if role == "c" else role])
    if bias is not None:
        _, (bias_n,) = _collapse(n_extents, [_elements(bias)[1:]], "the bias's n")
        fields.update(bias_group_stride=_elements(bias)[0] if groups > 1 else 0, bias_inner_stride=bias_n if n > 1 else 1)
    return GroupedGemmConfig(
        m=m,
        n=n,
        k=k,
        batch_count=batch,
        group_count=groups,
        trans_a=inner_axes["lhs"] == 0,
        trans_b=inner_axes["rhs"] == 0,
        must_swap_operands=inner_axes["output"] == 1,
        alpha=alpha,
        beta=beta,
        type_a=lhs.dtype.name,
        type_b=rhs.dtype.name,
        type_c=out.dtype.name,
        type_d=out.dtype.name,
        stride_ragged_dim=xla["lhs"],
        stride_group_dim=xla["rhs"],
        c_stride_ragged_dim=xla["c"],
        output_stride_ragged_dim=xla["output"],
        precision_algorithm=precision.algorithm,
        compute_precision=precision.level,
        ragged_mode=mode,
        compute_type=compute_type_under(precision, lhs, rhs, out),
        sizes_per_batch=per_batch and batch > 1,
        group_total=axes.group_total,
        epilogue=Epilogue(bias=bias is not None),
        rhs_listed=isinstance(rhs, ListView),
        out_listed=isinstance(out, ListView),
        **fields,
    )


def _collapse_contracted(axes: RaggedDotAxes, lhs_shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, list[int]]:
    """k: any order of the contracted axes will do, as long as lhs and rhs use the same one."""
    pairs = list(zip(axes.lhs_contracting, axes.rhs_contracting, strict=True))

    def collapsed(order: list[tuple[int, int]]) -> tuple[int, list[int]]:
        return _collapse([lhs_shape[i] for i, _ in order], [[a[i] for i, _ in order], [b[j] for _, j in order]], "k")

    try:
        return collapsed(pairs)
    except DoesNotCollapse:
        return collapsed(sorted(pairs, key=lambda pair: -a[pair[0]]))
