"""From a parsed call to its canonical problem: the axes by role, out's type and the config. Functions and plans share it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.dtypes import DTYPES, dtype_of, float_dtype, result_dtype
from hipgroupgemm.operands.views import ArrayView, ListView, packed_strides
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotAxes, RaggedDotDimensionNumbers, resolve
from hipgroupgemm.problem.groups import GroupBounds, GroupFault, scan
from hipgroupgemm.problem.layout import DoesNotCollapse, config_from_views
from hipgroupgemm.problem.parse import Call
from hipgroupgemm.problem.precision import Precision, precision_of

__all__ = ["GroupCount", "Problem", "canonicalize", "canonicalize_for_plan", "check_host_values"]


class Problem(NamedTuple):
    """What a call asks for, in canonical form.

    Attributes:
        axes: the operands' axes by role. out_dtype: out's type.
        config: of exactly this problem; None, with the reason, where the operands do not collapse to one.
        sizes_shape, sizes_strides: the sizes' axes as backends expect them: (group_total,), or (batch, group_total) where the sizes differ
            by batch entry; strides in bytes.
    """

    axes: RaggedDotAxes
    out_dtype: np.dtype[Any]
    config: GroupedGemmConfig | None
    reason: str
    sizes_shape: tuple[int, ...]
    sizes_strides: tuple[int, ...]


class GroupCount(int):
    """A group_count that was looked at. Its type tells call caches apart what equals it, such as True."""

    @classmethod
    def of(cls, value: Any) -> GroupCount:
        """`value` as a count; raises TypeError for what is no integer."""
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"group_count={value!r}: must be an int or None")
        return cls(value.__index__())


_resolve = functools.lru_cache(1024)(resolve)


def canonicalize(call: Call, arguments: dict[str, Any]) -> Problem:
    """The problem of a call of one of the functions.

    Args:
        call: parsed from `arguments`, in which the settings are: ragged_dot_dimension_numbers, precision, preferred_element_type,
            group_count, each with its default where it is absent.

    Raises:
        TypeError, ValueError, NotImplementedError: as the functions; the text names the argument.
    """
    given = arguments.get
    numbers = RaggedDotDimensionNumbers.of(given("ragged_dot_dimension_numbers", BASIC))
    precision, preferred, group_count = precision_of(given("precision")), given("preferred_element_type"), given("group_count")
    if preferred is not None:
        preferred = float_dtype(dtype_of(preferred, "preferred_element_type"), "preferred_element_type")
    group_count = None if group_count is None else GroupCount.of(group_count)
    out = call.views.get("out")
    if group_count is None and out is not None and out.ndim and call.has_group_offset:
        ragged = numbers.lhs_ragged_dimensions
        if ragged and ragged[0] in numbers.dot_dimension_numbers[0][0]:
            group_count = out.shape[0]
    axes = _axes_of(call, numbers, group_count)
    out_dtype = result_dtype(call.lhs.dtype, call.views["rhs"].dtype, preferred)
    try:
        return _problem(axes, call, out_dtype, precision)
    except DoesNotCollapse as error:
        return Problem(axes, out_dtype, None, str(error), call.sizes.shape, call.sizes.strides)


def _axes_of(call: Call, numbers: RaggedDotDimensionNumbers, group_count: int | None) -> RaggedDotAxes:
    shapes = (call.lhs.shape, call.views["rhs"].shape, call.sizes.shape)
    return _resolve(numbers, *shapes, has_group_offset=call.has_group_offset, group_count=group_count, sizes_name=call.sizes_name)


def _problem(axes: RaggedDotAxes, call: Call, dtype: np.dtype[Any], precision: Precision, like: GroupedGemmConfig | None = None) -> Problem:
    """The problem of these axes; `like` is a plan's key, from which strides that say nothing are taken."""
    _check_lists(axes, call)
    out = _expected_output(axes, call, dtype)
    unread = () if call.beta else ("c",)
    views = {role: view for role, view in call.views.items() if role not in unread}
    config = config_from_views(axes, {**views, "out": out}, alpha=call.alpha, beta=call.beta, precision=precision, like=like)
    return Problem(axes, dtype, config, "", *_sizes_layout(config, call.sizes))


def _check_lists(axes: RaggedDotAxes, call: Call) -> None:
    """Raises TypeError for a list where the operand has no axis of groups, or where that is not its first one."""
    listed = {role for role, view in call.views.items() if isinstance(view, ListView)}
    if "rhs" in listed and axes.rhs_group != 0:
        raise TypeError(
            "rhs: is a list, so its groups are axis 0; pass rhs_group_dimensions=(0,), and one array where lhs's rows are not ragged"
        )
    if listed & {"out", "c"} and axes.mode is not RaggedDotMode.CONTRACTING:
        raise TypeError(f"{' and '.join(sorted(listed - {'rhs'}))}: lists go with a contracted ragged axis, this is {axes.mode.name}")
    if "c" in call.views and ("c" in listed) != ("out" in listed):
        raise TypeError(f"out and c: {'c' if 'c' in listed else 'out'} alone is a list; pass both as lists, or both as arrays")


def _expected_output(axes: RaggedDotAxes, call: Call, dtype: np.dtype[Any]) -> ArrayView:
    """The caller's out, or a stand-in for the packed one that will be made. Shapes and types of out, c and bias are checked."""
    if "bias" in call.views and axes.mode is not RaggedDotMode.NON_CONTRACTING:
        raise ValueError(f"bias: only NON_CONTRACTING takes one, this is {axes.mode.name}; leave it out")
    shape = axes.out_shape
    for role, wanted in (("c", shape), ("out", shape), ("bias", (axes.group_count, *(shape[axis] for axis in axes.out_columns)))):
        view = call.views.get(role)
        if view is not None and view.shape != wanted:
            raise TypeError(f"{role}: got shape {view.shape}, wanted {wanted}")
        if view is not None and view.dtype != dtype:
            hint = "; preferred_element_type sets out's type" if role == "out" else ", out's type"
            raise TypeError(f"{role}: got {view.dtype!s}, wanted {dtype.name}{hint}")
    stand_in = ArrayView(0, shape, packed_strides(shape, dtype.itemsize), dtype, call.device, call.lhs.framework)
    return call.views.get("out", stand_in)


def _sizes_layout(config: GroupedGemmConfig, sizes: ArrayView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes' shape and strides without batch axes that merge into one or are of length 1."""
    if sizes.ndim == 1 or 0 in sizes.shape[:-1]:
        return sizes.shape, sizes.strides
    if not config.sizes_per_batch:
        return (config.group_total,), sizes.strides[-1:]
    steps = [stride for extent, stride in zip(sizes.shape[:-1], sizes.strides[:-1], strict=True) if extent != 1]
    return (config.batch_count, config.group_total), (steps[-1], sizes.strides[-1])


def check_host_values(axes: RaggedDotAxes, sizes: np.ndarray[Any, Any] | None, ends: bool, group_offset: int | None) -> GroupBounds | None:
    """Refuses wrong sizes and a wrong group offset that lie on the host; on the device they are clamped and flagged.

    Args:
        axes: of the problem. sizes: where they lie on the host, else None. ends: whether they are end offsets. group_offset: likewise.

    Returns:
        The bounds of all groups, where the sizes are on the host and are read at all.
    """
    bounds = None
    if sizes is not None and axes.mode is not RaggedDotMode.BATCH:
        bounds = scan(sizes, axes.ragged_extent, ends=ends)
        if bounds.fault is not None:
            bounds.fault.throw(axes.ragged_extent)
    if group_offset is not None:
        largest = axes.group_total - axes.group_count
        if not 0 <= group_offset <= largest:
            GroupFault("group_offset", 0, 0, group_offset, largest).throw(axes.ragged_extent)
    return bounds


# ---- a plan's operands -------------------------------------------------------------------------------------------------------


def canonicalize_for_plan(call: Call, key: GroupedGemmConfig) -> Problem:
    """Reads the operands' axes in the config's order, then in the other orders, until lhs and rhs are the config's.

    Args:
        call: one call of the plan, parsed. key: the plan's.

    Raises:
        TypeError, ValueError: the operands are not the plan's; the text says where they differ.
    """
    dtype = DTYPES[key.type_d]
    precision = Precision(key.compute_precision, key.precision_algorithm)
    reasons: list[tuple[int, Exception]] = []
    for numbers in _readings(key.ragged_mode, call.lhs, call.views["rhs"]):
        try:
            axes = _axes_of(call, numbers, key.group_count if key.ragged_mode is RaggedDotMode.CONTRACTING else None)
            if axes.ragged_extent > key.ragged_extent:
                error = TypeError(
                    f"lhs: has {axes.ragged_extent} ragged rows, this plan serves up to {key.ragged_extent}; "
                    "make its config for the most that come"
                )
                reasons.append((1, error))
                continue
            packed = packed_strides(axes.out_shape, dtype.itemsize)
            stand_in = ArrayView(0, axes.out_shape, packed, dtype, call.device, "")
            inputs = {role: call.views[role] for role in ("lhs", "rhs", "group_sizes")}
            config = config_from_views(axes, {**inputs, "out": stand_in}, precision=precision, like=key)
            differences = _differences(config.key(key.ragged_extent), key, of_inputs=True)
        except (TypeError, ValueError, DoesNotCollapse) as refused:
            reasons.append((99, refused))
            continue
        if differences:
            reasons.append((len(differences), _mismatch(differences)))
            continue
        problem = _problem(axes, call, dtype, precision, key)
        differences = {} if problem.config is None else _differences(problem.config.key(key.ragged_extent), key)
        if not differences:
            return problem
        reasons = [(0, _mismatch(differences))]
        break
    closest = min(reasons, key=lambda reason: reason[0])[1]  # the config's own order of axes among equals
    kind = TypeError if isinstance(closest, TypeError) else ValueError
    raise kind(f"the operands are not this plan's: {closest}")


def _readings(mode: RaggedDotMode, lhs: ArrayView, rhs: ArrayView) -> Iterator[RaggedDotDimensionNumbers]:
    """Dimension numbers under which operands of these ranks have the config's roles, the config's own order first."""
    grouped = mode is RaggedDotMode.NON_CONTRACTING
    batched = lhs.ndim == 3
    lhs_roles = ("b", "m", "k") if batched else ("m", "k")
    rhs_roles = (("g",) if grouped else ()) + (("b",) if batched else ()) + ("k", "n")
    if lhs.ndim != len(lhs_roles) or rhs.ndim != len(rhs_roles):
        raise TypeError(
            f"lhs of shape {lhs.shape} and rhs of shape {rhs.shape}: wanted axes {lhs_roles} and {rhs_roles}"
            f"{' or with a batch axis b' if not batched else ''}; reshape them"
        )
    ragged = {RaggedDotMode.NON_CONTRACTING: "m", RaggedDotMode.CONTRACTING: "k", RaggedDotMode.BATCH: "b"}[mode]
    for left, right in itertools.product(itertools.permutations(lhs_roles), itertools.permutations(rhs_roles)):
        batch = ((left.index("b"),), (right.index("b"),)) if batched else ((), ())
        if ragged not in left:
            raise TypeError(f"lhs of shape {lhs.shape}: wanted a batch axis, (b, m, k)")
        yield RaggedDotDimensionNumbers(
            (((left.index("k"),), (right.index("k"),)), batch),
            (left.index(ragged),),
            (right.index("g"),) if grouped else (),
        )


_INPUT_FIELDS = ("lhs_", "rhs_", "trans_", "type_a", "type_b", "stride_", "sizes_", "group_", "batch_")
_AXES = {"trans_a": ("lhs", "km"), "trans_b": ("rhs", "nk"), "must_swap_operands": ("out", "mn")}
_WORDS = {
    **{"type_a": "lhs's type", "type_b": "rhs's type", "type_c": "c's type", "type_d": "out's type"},
    **{
        "stride_group_dim": "rhs's group stride",
        "output_stride_ragged_dim": "out's group stride",
        "c_stride_ragged_dim": "c's group stride",
        "rhs_listed": "whether rhs is a list",
        "out_listed": "whether out is a list",
    },
}


def _differences(got: GroupedGemmConfig, wanted: GroupedGemmConfig, *, of_inputs: bool = False) -> dict[str, str]:
    """The fields in which two configs differ, and how in the caller's words; `of_inputs` leaves out those that speak of c, out and bias."""
    names = [field.name for field in dataclasses.fields(got) if field.name not in got.derived_fields()]
    if of_inputs:
        names = [name for name in names if name in ("m", "n", "k") or name.startswith(_INPUT_FIELDS)]
    found = {}
    for name in names:
        values = getattr(got, name), getattr(wanted, name)
        operand, _, what = name.partition("_")
        if values[0] == values[1]:
            continue
        if name == "epilogue":
            found[name] = "bias is given, and the plan has none" if values[0].bias else "bias is left out, and the plan has one"
            continue
        if name in _AXES:
            operand, axes = _AXES[name]
            text, values = f"{operand}'s inner axis", (axes[values[0]], axes[values[1]])
        elif operand in ("lhs", "rhs", "c", "output", "bias") and name not in _WORDS:
            text = f"{operand.replace('output', 'out')}'s {what.replace('_', ' ').replace('dim ', 'dimension ')}"
        else:
            text = _WORDS.get(name, name)
        found[name] = f"{text} is {values[0]}, the plan's is {values[1]}"
    return found


def _mismatch(differences: dict[str, str]) -> Exception:
    """The error of these differences: TypeError where shapes or types differ, ValueError where only layouts or settings do."""
    if "beta" in differences:
        return ValueError(f"{differences['beta']}, and a plan serves either beta = 0 or others; give beta= to config_for_ragged_dot too")
    if "epilogue" in differences:
        return ValueError(f"{differences['epilogue']}; give bias= to config_for_ragged_dot exactly where execute gets one")
    shapes = any(name in ("m", "n", "k") or name.startswith(("type_", "batch_count", "group_")) for name in differences)
    return (TypeError if shapes else ValueError)(f"{'; '.join(differences.values())} (see config_for_ragged_dot)")
