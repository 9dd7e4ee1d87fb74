"""Differentiation and vmap of the primitive. It is bilinear in lhs and rhs, and its derivatives are ragged dots on operands as they lie.

d_out is a ragged dot's operand as out was its result: in NON_CONTRACTING lhs's gradient is NON_CONTRACTING, over n, and rhs's is
CONTRACTING, over the rows; in CONTRACTING d_out has the groups, so both are NON_CONTRACTING; in BATCH both are BATCH.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.integrations.jax.primitive import Settings, bind, by_role, problem_of, ragged_dot_p, shapes_of
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers

__all__ = ["register"]


class _Axes:
    """The axes of lhs, rhs and out by role, each in its operand's order, but batch and contracted ones in that of the numbers."""

    def __init__(self, numbers: RaggedDotDimensionNumbers, lhs_rank: int, rhs_rank: int) -> None:
        (self.lhs_k, self.rhs_k), (self.lhs_b, self.rhs_b) = numbers.dot_dimension_numbers
        self.ragged = numbers.lhs_ragged_dimensions[0]
        self.group = group = numbers.rhs_group_dimensions
        self.lhs_free = tuple(a for a in range(lhs_rank) if a not in (*self.lhs_k, *self.lhs_b))
        self.rhs_free = tuple(a for a in range(rhs_rank) if a not in (*self.rhs_k, *self.rhs_b, *group))
        contracting = self.ragged in self.lhs_k
        self.mode = RaggedDotMode.CONTRACTING if contracting else RaggedDotMode.BATCH
        if self.ragged in self.lhs_free:
            self.mode = RaggedDotMode.NON_CONTRACTING
        self.out_group: tuple[int, ...] = (0,) if contracting else ()
        first = len(self.out_group)
        self.out_b = tuple(range(first, first + len(self.lhs_b)))
        first += len(self.lhs_b)
        self.out_m = tuple(range(first, first + len(self.lhs_free)))
        first += len(self.lhs_free)
        self.out_n = tuple(range(first, first + len(self.rhs_free)))

    def rhs_k_by_rhs(self) -> list[int]:
        """The contracted axes of lhs, in the order that their partners have in rhs."""
        return [a for _, a in sorted(zip(self.rhs_k, self.lhs_k, strict=True))]

    def lhs_k_by_lhs(self) -> list[int]:
        """The contracted axes of rhs, in the order that their partners have in lhs."""
        return [b for _, b in sorted(zip(self.lhs_k, self.rhs_k, strict=True))]


_Numbers = RaggedDotDimensionNumbers
_Plan = tuple[RaggedDotDimensionNumbers, bool, list[int]]
"""Dimension numbers of a gradient; whether its operands are (d_out, other) or (other, d_out); and which axes its result has."""


def _lhs_gradient(x: _Axes) -> _Plan:
    contracted, batch = (x.out_n, x.rhs_free), (x.out_b, x.rhs_b)
    labels = [*x.lhs_b, *x.lhs_free, *x.rhs_k_by_rhs()]
    if x.mode is RaggedDotMode.NON_CONTRACTING:
        return _Numbers((contracted, batch), (x.out_m[x.lhs_free.index(x.ragged)],), x.group), True, labels
    if x.mode is RaggedDotMode.BATCH:
        return _Numbers((contracted, batch), (x.out_b[x.lhs_b.index(x.ragged)],), ()), True, labels
    ragged = x.rhs_k[x.lhs_k.index(x.ragged)]
    numbers = _Numbers(((x.rhs_free, x.out_n), (x.rhs_b, x.out_b)), (ragged,), x.out_group)
    return numbers, False, [*x.lhs_b, *x.rhs_k_by_rhs(), *x.lhs_free]


def _rhs_gradient(x: _Axes) -> _Plan:
    kept = x.lhs_k_by_lhs()
    if x.mode is RaggedDotMode.CONTRACTING:
        numbers = _Numbers(((x.lhs_free, x.out_m), (x.lhs_b, x.out_b)), (x.ragged,), x.out_group)
        return numbers, False, [*x.rhs_b, *kept, *x.rhs_free]
    straight = [*x.group, *x.rhs_b, *kept, *x.rhs_free]
    swapped = [*x.group, *x.rhs_b, *x.rhs_free, *kept]
    if swapped == sorted(swapped) and straight != swapped:  # as a transposed rhs lies
        where = x.out_m[x.lhs_free.index(x.ragged)] if x.group else x.out_b[x.lhs_b.index(x.ragged)]
        return _Numbers(((x.out_m, x.lhs_free), (x.out_b, x.lhs_b)), (where,), ()), True, swapped
    return _Numbers(((x.lhs_free, x.out_m), (x.lhs_b, x.out_b)), (x.ragged,), ()), False, straight


def _gradient(role: str, d_out: Any, other: Any, aval: Any, operands: dict[str, Any], settings: Settings) -> Any:
    """The gradient of lhs or rhs."""
    ranks = (len(aval.shape), other.ndim) if role == "lhs" else (other.ndim, len(aval.shape))
    axes = _Axes(settings.numbers, *ranks)
    numbers, first, labels = (_lhs_gradient if role == "lhs" else _rhs_gradient)(axes)
    pair = (d_out, other) if first else (other, d_out)
    used: dict[str, Any] = {
        "lhs": pair[0],
        "rhs": pair[1],
        **{name: operands[name] for name in ("group_sizes", "group_offset") if name in operands},
    }
    slabs = aval.shape[axes.group[0]] if role == "rhs" and axes.mode is RaggedDotMode.NON_CONTRACTING else None
    # rows of a weight gradient belong to no token, so there is nothing to be invariant; lhs's gradient of a ragged k has rows of tokens
    invariant = settings.batch_invariant and (role == "lhs") == (axes.mode is RaggedDotMode.NON_CONTRACTING)
    result = bind(used, settings.change(numbers=numbers, out_type=aval.dtype.name, group_count=slabs, batch_invariant=invariant))
    order = [labels.index(axis) for axis in range(len(labels))]
    return result if order == sorted(order) else jnp.transpose(result, order)


def _transpose(d_out: Any, *primals: Any, settings: Settings) -> list[Any]:
    operands, results = by_role(primals, settings), [None] * len(primals)
    role, other = ("lhs", "rhs") if ad.is_undefined_primal(operands["lhs"]) else ("rhs", "lhs")
    if ad.is_undefined_primal(operands[other]) or settings.has_bias:
        raise NotImplementedError("ragged_dot: not linear in these operands together")
    place = settings.roles.index(role)
    aval = operands[role].aval
    results[place] = ad.Zero(aval) if type(d_out) is ad.Zero else _gradient(role, d_out, operands[other], aval, operands, settings)
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, settings: Settings) -> tuple[Any, Any]:
    operands, moved = by_role(primals, settings), by_role(tangents, settings)
    out = bind(operands, settings)
    plain = {role: operand for role, operand in operands.items() if role != "bias"}
    terms = [bind({**plain, role: moved[role]}, settings) for role in ("lhs", "rhs") if type(moved[role]) is not ad.Zero]
    if settings.has_bias and type(moved["bias"]) is not ad.Zero:
        terms.append(_spread_bias({**plain, "bias": moved["bias"]}, settings))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return out, total


def _spread_bias(operands: dict[str, Any], settings: Settings) -> Any:
    """The bias of each covered row: a ragged dot over an axis of length 1."""
    axes = _Axes(settings.numbers, operands["lhs"].ndim, operands["rhs"].ndim)
    lhs, rhs, bias = operands["lhs"], operands["rhs"], operands["bias"]
    ones = jnp.ones([1 if axis in axes.lhs_k else extent for axis, extent in enumerate(lhs.shape)], bias.dtype)
    at = (*axes.group, *axes.rhs_free)
    order = sorted(range(len(at)), key=lambda place: at[place])
    shape = [extent if axis in at else 1 for axis, extent in enumerate(rhs.shape)]
    full = [1 if axis in axes.rhs_k else extent for axis, extent in enumerate(rhs.shape)]
    spread = jnp.broadcast_to(jnp.transpose(bias, order).reshape(shape), full)
    return bind({**_without_bias(operands), "lhs": ones, "rhs": spread}, settings.change(alpha=1.0, precision=None))


def _without_bias(operands: dict[str, Any]) -> dict[str, Any]:
    return {role: operand for role, operand in operands.items() if role != "bias"}


# ---- vmap ----------------------------------------------------------------------------------------------------------------------


def _batch(operands: Sequence[Any], places: Sequence[int | None], *, settings: Settings) -> tuple[Any, int]:
    held, at = by_role(operands, settings), by_role(places, settings)
    extent = next(x.shape[place] for x, place in zip(operands, places, strict=True) if place is not None)
    front = {role: x if at[role] is None else jnp.moveaxis(x, at[role], 0) for role, x in held.items()}
    if at.get("group_offset") is not None:  # one ragged dot has one offset
        entries = [{role: x if at[role] is None else x[i] for role, x in front.items()} for i in range(extent)]
        if not entries:
            _, problem = problem_of(shapes_of(x[0:0].sum(0) if at[r] is not None else x for r, x in front.items()), settings)
            return jnp.zeros((0, *problem.axes.out_shape), problem.out_dtype), 0
        return jnp.stack([bind(entry, settings) for entry in entries]), 0
    if at.get("bias") is not None:
        wide = jnp.promote_types(settings.out_type, jnp.float32).name
        bias = {**front, "bias": front["bias"].astype(wide)}
        product, where = _batch_product(_without_bias(front), at, extent, settings.change(out_type=wide))
        spread = _batch_bias(bias, at, settings.change(out_type=wide))
        return (jnp.moveaxis(product, where, 0) + spread).astype(settings.out_type), 0
    return _batch_product(front, at, extent, settings)


def _batch_bias(front: dict[str, Any], at: dict[str, Any], settings: Settings) -> Any:
    """`_spread_bias` of each entry, in front."""
    shapes = {role: front[role].shape[at[role] is not None :] for role in ("lhs", "rhs")}
    like = {role: jax.ShapeDtypeStruct(shape, front[role].dtype) for role, shape in shapes.items()}

    def one(bias: Any, sizes: Any) -> Any:
        return _spread_bias({**front, **like, "bias": bias, "group_sizes": sizes}, settings)

    return jax.vmap(one, in_axes=(0, None if at["group_sizes"] is None else 0))(front["bias"], front["group_sizes"])


def _batch_product(front: dict[str, Any], at: dict[str, Any], extent: int, settings: Settings) -> tuple[Any, int]:
    """The ragged dot with one axis more in front of what is batched. A bias is shared."""
    lhs, rhs, sizes = front["lhs"], front["rhs"], front["group_sizes"]
    own = {role: at[role] is not None for role in ("lhs", "rhs", "group_sizes")}
    axes = _Axes(settings.numbers, lhs.ndim - own["lhs"], rhs.ndim - own["rhs"])
    per_entry = own["group_sizes"] and axes.mode is not RaggedDotMode.BATCH
    if own["group_sizes"] and not per_entry:
        sizes = sizes[0] if extent else jnp.zeros(sizes.shape[1:], sizes.dtype)  # they are not read
    free_lhs = axes.mode is not RaggedDotMode.CONTRACTING or not per_entry
    if own["lhs"] and not own["rhs"] and free_lhs:  # the new axis is a row axis of lhs
        kind = "rows"
    elif own["rhs"] and not own["lhs"] and not per_entry:
        kind = "columns"
    elif per_entry and not (own["lhs"] or own["rhs"]) and axes.mode is RaggedDotMode.NON_CONTRACTING:  # the sizes alone
        kind, lhs, own["lhs"] = "rows", jnp.broadcast_to(lhs, (extent, *lhs.shape)), True
    elif not (own["lhs"] or own["rhs"] or per_entry):
        return jnp.broadcast_to(bind({**front, "group_sizes": sizes}, settings), (extent, *_out_shape(front, sizes, settings))), 0
    else:
        kind = "batch"
        lhs = lhs if own["lhs"] else jnp.broadcast_to(lhs, (extent, *lhs.shape))
        rhs = rhs if own["rhs"] else jnp.broadcast_to(rhs, (extent, *rhs.shape))
        own.update(lhs=True, rhs=True)

    def up(places: Sequence[int], role: str) -> tuple[int, ...]:
        return tuple(place + own[role] for place in places)

    batch = [up(axes.lhs_b, "lhs"), up(axes.rhs_b, "rhs")]
    last = axes.mode is RaggedDotMode.BATCH  # behind the ragged one, so that the sizes' axes stay as they are
    if kind == "batch":
        batch = [(*pair, 0) if last else (0, *pair) for pair in batch]
    numbers = _Numbers(
        ((up(axes.lhs_k, "lhs"), up(axes.rhs_k, "rhs")), tuple(batch)),
        (axes.ragged + own["lhs"],),
        up(axes.group, "rhs"),
    )
    first = len(axes.out_group)
    rows = first + len(axes.lhs_b)
    where = {"rows": rows, "columns": rows + len(axes.lhs_free)}.get(kind, rows if last else first)
    in_prefix = kind == "batch" or (kind == "rows" and axes.mode is RaggedDotMode.NON_CONTRACTING)
    if not last and in_prefix and (per_entry or sizes.ndim > 1):
        sizes = _with_prefix(sizes, per_entry, extent, lhs, axes, 0 if kind == "batch" else len(axes.lhs_b))
    used = {**front, "lhs": lhs, "rhs": rhs, "group_sizes": sizes}
    if kind == "columns" and "bias" in front:
        bias = front["bias"]
        used["bias"] = jnp.broadcast_to(bias[:, None], (bias.shape[0], extent, *bias.shape[1:]))
    return bind(used, settings.change(numbers=numbers)), where


def _out_shape(front: dict[str, Any], sizes: Any, settings: Settings) -> tuple[int, ...]:
    used = {**front, "group_sizes": sizes}
    return problem_of(shapes_of(used[role] for role in settings.roles), settings)[1].axes.out_shape


def _with_prefix(sizes: Any, per_entry: bool, extent: int, lhs: Any, axes: _Axes, where: int) -> Any:
    """Sizes with their full prefix, in which the new axis is number `where`. `lhs` has the new axis in front."""
    before = {
        RaggedDotMode.NON_CONTRACTING: axes.lhs_free,
        RaggedDotMode.CONTRACTING: axes.lhs_k,
    }[axes.mode]
    prefix = (*axes.lhs_b, *before[: before.index(axes.ragged)])
    extents = [lhs.shape[axis + 1] for axis in prefix]
    if not per_entry:
        sizes = sizes[None]
    if sizes.ndim == 2:
        sizes = sizes.reshape(sizes.shape[0], *[1] * len(extents), sizes.shape[-1])
    return jnp.moveaxis(jnp.broadcast_to(sizes, (extent, *extents, sizes.shape[-1])), 0, where)


def register() -> None:
    """Gives JAX these rules."""
    ad.primitive_jvps[ragged_dot_p] = _jvp
    ad.primitive_transposes[ragged_dot_p] = _transpose
    batching.primitive_batchers[ragged_dot_p] = _batch
