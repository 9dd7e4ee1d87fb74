"""JAX's `precision` argument."""

from __future__ import annotations

from typing import Any, NamedTuple

from hipgroupgemm.operands.dtypes import compute_type_of
from hipgroupgemm.operands.views import ArrayView

__all__ = ["Precision", "compute_type_under", "precision_of"]


class Precision(NamedTuple):
    """What JAX's `precision` argument comes to: XLA's operand precision (0 default, 1 high, 2 highest) and dot algorithm."""

    level: int = 0
    algorithm: str = "ALG_UNSET"


_LEVELS = {"default": 0, "high": 1, "highest": 2, "float32": 2, "bfloat16": 0, "fastest": 0}
_ALGORITHMS = {
    "tensorfloat32": "ALG_DOT_TF32_TF32_F32",
    "tf32": "ALG_DOT_TF32_TF32_F32",
    **{name: f"ALG_DOT_{name}" for name in ("BF16_BF16_F32", "F16_F16_F32", "TF32_TF32_F32", "F32_F32_F32", "F64_F64_F64")},
}


def precision_of(value: Any) -> Precision:
    """JAX's precision: None, a name ("default", "high", "highest", "tensorfloat32"), lax.Precision, a pair of either, a DotAlgorithmPreset.

    float32 products are IEEE float32 for every name but "tensorfloat32" / TF32_TF32_F32, which allows TF32.

    Raises ValueError for an unknown name, NotImplementedError for a known algorithm that is not offered, TypeError for other types.
    """
    if value is None:
        return Precision()
    if isinstance(value, (tuple, list)):
        both = [precision_of(item) for item in value]
        if len(both) != 2:
            raise ValueError(f"precision={value!r}: a pair is wanted, one for lhs and one for rhs")
        if both[0].algorithm != both[1].algorithm:
            raise NotImplementedError(f"precision={value!r}: both operands must use the same algorithm")
        return Precision(max(both[0].level, both[1].level), both[0].algorithm)
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        hint = "; out= is given by name" if hasattr(value, "shape") else ""
        raise TypeError(
            f"precision: got {type(value).__name__}, wanted None, a name, lax.Precision, a pair of them or a DotAlgorithmPreset{hint}"
        )
    if name.lower() in _LEVELS:
        return Precision(_LEVELS[name.lower()])
    algorithm = _ALGORITHMS.get(name.removeprefix("ALG_DOT_")) or _ALGORITHMS.get(name.lower())
    if algorithm is not None:
        return Precision(0, algorithm)
    known = ", ".join([*_LEVELS, *_ALGORITHMS])
    if not isinstance(value, str):
        raise NotImplementedError(f"precision={name}: this algorithm is not offered; wanted one of {known}")
    raise ValueError(f"precision={value!r}: unknown; wanted one of {known}")


def compute_type_under(precision: Precision, lhs: ArrayView, rhs: ArrayView, out: ArrayView) -> str:
    """The accumulation type under a precision; NotImplementedError where a named algorithm does not take these operands."""
    kind = compute_type_of(lhs.dtype, rhs.dtype, out.dtype)
    named = precision.algorithm.removeprefix("ALG_DOT_").split("_")
    if precision.algorithm == "ALG_UNSET":
        return kind
    wanted = {"BF16": "bfloat16", "F16": "float16", "TF32": "float32", "F32": "float32", "F64": "float64"}[named[0]]
    if not lhs.dtype.name == rhs.dtype.name == wanted:
        raise NotImplementedError(
            f"precision={precision.algorithm.removeprefix('ALG_DOT_')}: takes {wanted} operands, got {lhs.dtype.name} and "
            f"{rhs.dtype.name}; convert them, or leave precision out"
        )
    return "tf32" if named[0] == "TF32" else kind
