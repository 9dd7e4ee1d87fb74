"""Names of element types, and the rules by which operand types give an output type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hipgroupgemm.config import FLOAT_BYTES

__all__ = ["ALIASES", "DTYPES", "compute_type_of", "dtype_of", "float_dtype", "result_dtype"]

_EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name) if name in _EXTENDED else name) for name in FLOAT_BYTES}
"""NumPy dtypes of the supported floating types, by name."""


ALIASES = {
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    **{"fp64": "float64", "double": "float64"},
}
"""Other names that a type goes by, in Python and in the commands."""


def dtype_of(value: Any, name: str = "dtype") -> np.dtype[Any]:
    """`value` as a NumPy dtype: a dtype, a scalar type, a name ("bfloat16" included) or torch's dtype object.

    Raises TypeError when it is none of these.
    """
    if isinstance(value, str):
        value = ALIASES.get(value, value)
        if value in DTYPES:
            return DTYPES[value]
    if type(value).__module__ == "torch":
        text = str(value).removeprefix("torch.")
        value = DTYPES.get(text, text)
    try:
        found: np.dtype[Any] = np.dtype(value)
        return found
    except TypeError:
        raise TypeError(f"{name}={value!r}: not an element type; wanted one of {', '.join(DTYPES)}") from None


def float_dtype(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """`dtype` if it is a supported floating type; raises NotImplementedError naming the argument otherwise."""
    if dtype.name in DTYPES and DTYPES[dtype.name] == dtype:
        return dtype
    if not dtype.isnative:
        raise NotImplementedError(f"{name}: got {dtype.name} of foreign byte order ({dtype.str}); convert it to the native one")
    raise NotImplementedError(f"{name}: got {dtype.name}, wanted a floating type, one of {', '.join(DTYPES)}; convert it first")


_finfo: Any = ml_dtypes.finfo  # untyped


def _rank(dtype: np.dtype[Any]) -> tuple[int, int, int]:
    info: Any = _finfo(dtype)
    return (int(info.maxexp), int(info.nmant), int(info.bits))


def result_dtype(lhs: np.dtype[Any], rhs: np.dtype[Any], preferred: np.dtype[Any] | None) -> np.dtype[Any]:
    """The output dtype by JAX's rule for dot_general: the preferred one, else the operand type of the larger range, then precision.

    Raises TypeError, as JAX does, for two different types of equal range, precision and width.
    """
    if lhs == rhs:
        wider = lhs
    elif _rank(lhs) == _rank(rhs):
        raise TypeError(f"lhs is {lhs.name} and rhs is {rhs.name}: neither type includes the other; convert one of them")
    else:
        wider = lhs if _rank(lhs) > _rank(rhs) else rhs
    return wider if preferred is None else preferred


def compute_type_of(*dtypes: np.dtype[Any]) -> str:
    """The type products are accumulated in: float64 where an operand or the output asked for is float64, else float32."""
    return "float64" if np.dtype(np.float64) in dtypes else "float32"
