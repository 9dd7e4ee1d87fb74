"""JAX as the outside judge: its dimension numbers, and 64-bit types in every version of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

import hipgroupgemm as hgg


def enable_x64() -> AbstractContextManager[Any]:
    """A context in which JAX has float64 and int64; it moved from jax.experimental to jax."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as experimental

    return experimental()


def numbers_for_jax(numbers: hgg.RaggedDotDimensionNumbers) -> Any:
    """This package's dimension numbers as JAX's."""
    return jax.lax.RaggedDotDimensionNumbers(numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
