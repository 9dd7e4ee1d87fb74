"""JAX's dimension numbers for a ragged dot, checked against operand shapes and reduced to the axes of one canonical problem.

The rules and the names are those of `jax.lax.ragged_dot_general`; an error of shapes or dimension numbers is a TypeError, as there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from hipgroupgemm.config import RaggedDotMode

__all__ = ["DotDimensionNumbers", "RaggedDotAxes", "RaggedDotDimensionNumbers", "resolve"]

DotDimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class RaggedDotDimensionNumbers:
    """Which dimensions of lhs and rhs are contracted, batched, ragged and grouped.

    Args:
        dot_dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, sequences of axis numbers.
        lhs_ragged_dimensions: the one ragged axis of lhs, as a sequence of length 1.
        rhs_group_dimensions: the group axis of rhs as a sequence of length 1 when the ragged axis is not contracted, else empty.

    An object of JAX's class of the same name is taken wherever this one is.

    Example:
        (m, k) x (g, k, n), row groups, as in `ragged_dot`; and its gradients for lhs and for rhs:

        >>> forward = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        >>> data_gradient = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
        >>> weight_gradient = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    """

    dot_dimension_numbers: DotDimensionNumbers
    lhs_ragged_dimensions: tuple[int, ...]
    rhs_group_dimensions: tuple[int, ...]

    def __init__(
        self,
        dot_dimension_numbers: Sequence[Sequence[Sequence[int]]],
        lhs_ragged_dimensions: Sequence[int],
        rhs_group_dimensions: Sequence[int],
    ) -> None:
        try:
            (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dot_dimension_numbers
        except (TypeError, ValueError):
            raise TypeError(
                f"dot_dimension_numbers={dot_dimension_numbers!r}: must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))"
            ) from None
        dims = (
            (_axes("lhs_contracting", lhs_contracting), _axes("rhs_contracting", rhs_contracting)),
            (_axes("lhs_batch", lhs_batch), _axes("rhs_batch", rhs_batch)),
        )
        object.__setattr__(self, "dot_dimension_numbers", dims)
        object.__setattr__(self, "lhs_ragged_dimensions", _axes("lhs_ragged_dimensions", lhs_ragged_dimensions))
        object.__setattr__(self, "rhs_group_dimensions", _axes("rhs_group_dimensions", rhs_group_dimensions))

    @classmethod
    def of(cls, numbers: Any) -> RaggedDotDimensionNumbers:
        """`numbers` as this class: an instance of it, or any object with the same three attributes, such as JAX's."""
        if isinstance(numbers, cls):
            return numbers
        try:
            return cls(numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
        except AttributeError:
            raise TypeError(
                f"ragged_dot_dimension_numbers: got {type(numbers).__name__}, wanted RaggedDotDimensionNumbers "
                "(of hipgroupgemm or of jax.lax)"
            ) from None


def _axes(name: str, value: Sequence[int]) -> tuple[int, ...]:
    try:
        axes = tuple(value)
        if any(isinstance(axis, bool) for axis in axes):
            raise TypeError
        return tuple(int(axis.__index__()) for axis in axes)
    except (TypeError, AttributeError):
        raise TypeError(f"{name}={value!r}: must be a sequence of axis numbers") from None


BASIC = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
"""What `ragged_dot` uses: lhs (m, k), rhs (g, k, n)."""


class BatchAxis(NamedTuple):
    """One axis that the product runs over entry by entry; None where an operand lacks it (it is broadcast along it)."""

    extent: int
    lhs: int | None
    rhs: int | None
    out: int
    sizes: int | None


class RaggedDotAxes(NamedTuple):
    """The axes of a ragged dot by their role, for given operand shapes.

    Attributes:
        mode: which dimension is ragged.
        batch: axes run over entry by entry, in the order in which out has them. In NON_CONTRACTING the other free axes of lhs
            are among them.
        lhs_rows, out_rows: the axes that make m.
        rhs_columns, out_columns: the axes that make n.
        lhs_contracting, rhs_contracting: the axes that make k, paired. In CONTRACTING the ragged one comes first and the ones
            inside it follow.
        lhs_summed, rhs_summed, sizes_summed: CONTRACTING only: contracted axes outside the ragged one, each entry with sizes of
            its own where group_sizes has the full prefix (sizes_summed), else with the shared ones (None).
        rhs_group: rhs's group axis (NON_CONTRACTING), else None. out's group axis is 0 in CONTRACTING.
        ragged_extent: R, the length of the ragged axis (0 in BATCH: nothing depends on it there).
        group_count, group_total: groups computed, sizes given.
        out_shape: out's shape.
    """

    mode: RaggedDotMode
    batch: tuple[BatchAxis, ...]
    lhs_rows: tuple[int, ...]
    out_rows: tuple[int, ...]
    rhs_columns: tuple[int, ...]
    out_columns: tuple[int, ...]
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_summed: tuple[int, ...]
    rhs_summed: tuple[int, ...]
    sizes_summed: tuple[int | None, ...]
    rhs_group: int | None
    ragged_extent: int
    group_count: int
    group_total: int
    out_shape: tuple[int, ...]


def _check_axes(name: str, axes: tuple[int, ...], rank: int, operand: str) -> None:
    for axis in axes:
        if not 0 <= axis < rank:
            raise TypeError(f"{name}={axes}: axis {axis} is not one of {operand}'s {rank} axes (0 to {rank - 1})")
    if len(set(axes)) != len(axes):
        raise TypeError(f"{name}={axes}: an axis may be named only once")


def _check_pairs(
    what: str, lhs_axes: tuple[int, ...], rhs_axes: tuple[int, ...], lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
) -> None:
    if len(lhs_axes) != len(rhs_axes):
        raise TypeError(f"{what} dimensions: lhs names {lhs_axes}, rhs names {rhs_axes}; they must come in pairs")
    lhs_extents, rhs_extents = tuple(lhs_shape[a] for a in lhs_axes), tuple(rhs_shape[a] for a in rhs_axes)
    if lhs_extents != rhs_extents:
        raise TypeError(
            f"{what} dimensions: lhs {lhs_shape} has {lhs_extents} on axes {lhs_axes}, rhs {rhs_shape} has {rhs_extents} "
            f"on axes {rhs_axes}; they must be equal"
        )


def resolve(
    numbers: RaggedDotDimensionNumbers,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    sizes_shape: tuple[int, ...],
    *,
    has_group_offset: bool = False,
    group_count: int | None = None,
    sizes_name: str = "group_sizes",
) -> RaggedDotAxes:
    """Checks the dimension numbers against the shapes and sorts the axes by their role.

    Args:
        numbers: the dimension numbers.
        lhs_shape, rhs_shape, sizes_shape: the operands' shapes.
        has_group_offset: whether group_offset is given; group_total may exceed group_count only then.
        group_count: CONTRACTING with a group offset: how many slabs out has (default: all groups).
        sizes_name: how errors call the sizes ("group_sizes" or "offs").

    Raises:
        TypeError: as `jax.lax.ragged_dot_general` does, the text naming the argument, what it got and what it wanted.
    """
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    lhs_rank, rhs_rank = len(lhs_shape), len(rhs_shape)
    if len(numbers.lhs_ragged_dimensions) != 1:
        raise TypeError(f"lhs_ragged_dimensions={numbers.lhs_ragged_dimensions}: must name exactly one axis of lhs")
    ragged = numbers.lhs_ragged_dimensions[0]
    for name, axes, rank, operand in (
        ("lhs_ragged_dimensions", numbers.lhs_ragged_dimensions, lhs_rank, "lhs"),
        ("lhs_contracting", lhs_contracting, lhs_rank, "lhs"),
        ("rhs_contracting", rhs_contracting, rhs_rank, "rhs"),
        ("lhs_batch", lhs_batch, lhs_rank, "lhs"),
        ("rhs_batch", rhs_batch, rhs_rank, "rhs"),
        ("rhs_group_dimensions", numbers.rhs_group_dimensions, rhs_rank, "rhs"),
    ):
        _check_axes(name, axes, rank, operand)
    for operand, contracting, batch in (("lhs", lhs_contracting, lhs_batch), ("rhs", rhs_contracting, rhs_batch)):
        both = sorted(set(contracting) & set(batch))
        if both:
            raise TypeError(f"{operand} axes {both} are named as contracting and as batch dimensions; an axis has one role")
    _check_pairs("contracting", lhs_contracting, rhs_contracting, lhs_shape, rhs_shape)
    _check_pairs("batch", lhs_batch, rhs_batch, lhs_shape, rhs_shape)

    lhs_free = tuple(a for a in range(lhs_rank) if a not in lhs_contracting and a not in lhs_batch)
    if ragged in lhs_free:
        mode, prefix = RaggedDotMode.NON_CONTRACTING, lhs_batch + lhs_free[: lhs_free.index(ragged)]
    elif ragged in lhs_contracting:
        mode, prefix = RaggedDotMode.CONTRACTING, lhs_batch + lhs_contracting[: lhs_contracting.index(ragged)]
    else:
        mode, prefix = RaggedDotMode.BATCH, lhs_batch[: lhs_batch.index(ragged)]

    if not sizes_shape:
        raise TypeError(f"{sizes_name}: got a scalar, wanted shape (g,)")
    prefix_shape = tuple(lhs_shape[a] for a in prefix)
    has_prefix, group_total = len(sizes_shape) > 1, sizes_shape[-1]
    if has_prefix and sizes_shape[:-1] != prefix_shape:
        raise TypeError(f"{sizes_name}: got shape {sizes_shape}, wanted (g,) or {(*prefix_shape, group_total)}")

    group = numbers.rhs_group_dimensions
    if mode is RaggedDotMode.NON_CONTRACTING:
        if len(group) != 1:
            raise TypeError(f"rhs_group_dimensions={group}: must name exactly one axis of rhs when lhs's rows are ragged")
        if group[0] in rhs_contracting or group[0] in rhs_batch:
            raise TypeError(f"rhs_group_dimensions={group}: must differ from rhs's contracting and batch dimensions")
        count = rhs_shape[group[0]]
        if count > group_total or (count < group_total and not has_group_offset):
            raise TypeError(
                f"{sizes_name}: got {group_total} groups, but rhs {rhs_shape} has {count} on its group axis {group[0]}; they must be "
                "equal (give group_offset to compute a part of the groups)"
            )
        if group_count is not None and group_count != count:
            raise TypeError(f"group_count={group_count}: rhs {rhs_shape} has {count} groups")
    else:
        if group:
            raise TypeError(f"rhs_group_dimensions={group}: must be empty when lhs's ragged axis is contracted or a batch axis")
        count = group_total
        if mode is RaggedDotMode.CONTRACTING and group_count is not None:
            count = group_count
            if not 0 <= count <= group_total or (count < group_total and not has_group_offset):
                raise TypeError(
                    f"group_count={group_count}: {sizes_name} has {group_total} groups; out must have as many slabs (give group_offset "
                    "to compute a part of the groups)"
                )
    if mode is RaggedDotMode.BATCH and has_group_offset:
        raise TypeError("group_offset: has no meaning when lhs's ragged axis is a batch axis; leave it out")

    rhs_free = tuple(a for a in range(rhs_rank) if a not in rhs_contracting and a not in rhs_batch and a not in group)
    slabs = (count,) if mode is RaggedDotMode.CONTRACTING else ()  # out has a group axis first, then batch, rows and columns
    out_shape = (*slabs, *(lhs_shape[a] for a in (*lhs_batch, *lhs_free)), *(rhs_shape[a] for a in rhs_free))
    first_row = len(slabs) + len(lhs_batch)
    first_column = first_row + len(lhs_free)

    def sizes_axis(axis: int) -> int | None:
        return prefix.index(axis) if has_prefix and axis in prefix else None

    pairs = enumerate(zip(lhs_batch, rhs_batch, strict=True), len(slabs))
    batch_axes = [BatchAxis(lhs_shape[a], a, b, out, sizes_axis(a)) for out, (a, b) in pairs]
    rows, out_rows = lhs_free, tuple(range(first_row, first_column))
    summed = 0  # contracted axes outside of the ragged one
    if mode is RaggedDotMode.NON_CONTRACTING:
        free = [(a, out) for a, out in zip(lhs_free, out_rows, strict=True) if a != ragged]
        batch_axes += [BatchAxis(lhs_shape[a], a, None, out, sizes_axis(a)) for a, out in free]
        rows, out_rows = (ragged,), (first_row + lhs_free.index(ragged),)
    elif mode is RaggedDotMode.CONTRACTING:
        summed = lhs_contracting.index(ragged)
    return RaggedDotAxes(
        mode=mode,
        batch=tuple(batch_axes),
        lhs_rows=rows,
        out_rows=out_rows,
        rhs_columns=rhs_free,
        out_columns=tuple(range(first_column, len(out_shape))),
        lhs_contracting=lhs_contracting[summed:],
        rhs_contracting=rhs_contracting[summed:],
        lhs_summed=lhs_contracting[:summed],
        rhs_summed=rhs_contracting[:summed],
        sizes_summed=tuple(sizes_axis(a) for a in lhs_contracting[:summed]),
        rhs_group=group[0] if group else None,
        ragged_extent=0 if mode is RaggedDotMode.BATCH else lhs_shape[ragged],
        group_count=count,
        group_total=group_total,
        out_shape=out_shape,
    )
