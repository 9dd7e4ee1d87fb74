"""A plan's operands: whether one call's are those that the plan was made for, in whatever order their axes come."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from hipgroupgemm.calls import Operands
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import ArrayView, packed_strides
from hipgroupgemm.problem.bindings import bind_config
from hipgroupgemm.problem.canonicalize import DoesNotCollapse, Precision, config_from_views
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes, RaggedDotDimensionNumbers, resolve

__all__ = ["match_operands"]


def match_operands(key: GroupedGemmConfig, operands: Operands) -> tuple[RaggedDotAxes, GroupedGemmConfig]:
    """Reads the operands' axes in the config's order, then in the other orders, until lhs and rhs are the config's.

    Args:
        key: of the plan. operands: of one call, gathered.

    Returns:
        What their axes are, and the config of exactly these operands.

    Raises:
        TypeError, ValueError: they are not the plan's; the text says where they differ.
    """
    dtype = DTYPES[key.type_d]
    precision = Precision(key.compute_precision, key.precision_algorithm)
    reasons: list[tuple[int, Exception]] = []
    for numbers in _readings(key.ragged_mode, operands.lhs, operands.rhs):
        try:
            axes = resolve(
                numbers,
                operands.lhs.shape,
                operands.rhs.shape,
                operands.sizes.shape,
                has_group_offset=operands.group_offset is not None,
                group_count=key.group_count if key.ragged_mode is RaggedDotMode.CONTRACTING else None,
                sizes_name=operands.sizes_name,
            )
            if axes.ragged_extent > key.ragged_extent:
                error = TypeError(
                    f"lhs: has {axes.ragged_extent} ragged rows, this plan serves up to {key.ragged_extent}; "
                    "make its config for the most that come"
                )
                reasons.append((1, error))
                continue
            packed = packed_strides(axes.out_shape, dtype.itemsize)
            stand_in = ArrayView(0, axes.out_shape, packed, dtype, operands.device, "")
            inputs = config_from_views(axes, operands.lhs, operands.rhs, stand_in, operands.sizes, precision=precision, like=key)
            differences = _differences(inputs.key(key.ragged_extent), key, of_inputs=True)
        except (TypeError, ValueError, DoesNotCollapse) as refused:
            reasons.append((99, refused))
            continue
        if differences:
            reasons.append((len(differences), _mismatch(differences)))
            continue
        config = bind_config(axes, operands, operands.expected_output(axes.out_shape, dtype), precision, key)
        differences = _differences(config.key(key.ragged_extent), key)
        if differences:
            reasons = [(0, _mismatch(differences))]
            break
        return axes, config
    closest = min(reasons, key=lambda reason: reason[0])[1]  # the config's own order of axes among equals
    kind = TypeError if isinstance(closest, TypeError) else ValueError
    raise kind(f"the operands are not this plan's: {closest} (see config_for_ragged_dot)")


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


def _differences(got: GroupedGemmConfig, wanted: GroupedGemmConfig, *, of_inputs: bool = False) -> dict[str, str]:
    """The fields in which two configs differ, and how in words; `of_inputs` leaves out those that speak of c, out and bias."""
    names = [field.name for field in dataclasses.fields(got)]
    if of_inputs:
        names = [name for name in names if name in ("m", "n", "k") or name.startswith(_INPUT_FIELDS)]
    return {
        name: f"{name} is {getattr(got, name)}, the plan's is {getattr(wanted, name)}"
        for name in names
        if getattr(got, name) != getattr(wanted, name)
    }


def _mismatch(differences: dict[str, str]) -> Exception:
    """The error of these differences: TypeError where shapes or types differ, ValueError where only layouts or settings do."""
    if "beta" in differences:
        return ValueError(f"{differences['beta']}, and a plan serves either beta = 0 or others; give beta= to config_for_ragged_dot too")
    if "epilogue" in differences:
        return ValueError(f"{differences['epilogue']}; give bias= to config_for_ragged_dot exactly where execute gets one")
    shapes = any(name in ("m", "n", "k") or name.startswith(("type_", "batch_count", "group_")) for name in differences)
    return (TypeError if shapes else ValueError)("; ".join(differences.values()))
