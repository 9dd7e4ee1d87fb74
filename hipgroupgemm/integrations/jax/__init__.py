"""`ragged_dot` and `ragged_dot_general` for JAX's transformations: jit, grad (every mode), jvp, vmap and shard_map.

On a CUDA or ROCm device the launches of a plan are made by a native XLA FFI handler, with no Python between XLA and the driver; see
`native.py`. On a CPU NumPy computes, from the definition. Nothing is copied to the host on a GPU.

    >>> import jax, jax.numpy as jnp
    >>> from hipgroupgemm.integrations.jax import ragged_dot
    >>> x, w = jnp.ones((5, 4)), jnp.ones((2, 4, 3))
    >>> float(jax.grad(lambda w: ragged_dot(x, w, jnp.array([2, 1])).sum())(w)[0, 0, 0])
    2.0

Wrong sizes on the device never read or write outside of the operands; `check` says whether there were any.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hipgroupgemm.backends.base import Multiprocessors
from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.integrations.jax import lowering as _lowering
from hipgroupgemm.integrations.jax import transformations as _transformations
from hipgroupgemm.integrations.jax.native import NativeDoorError, build, check
from hipgroupgemm.integrations.jax.primitive import Settings, bind, problem_of, shapes_of
from hipgroupgemm.operands.dtypes import dtype_of, float_dtype, result_dtype
from hipgroupgemm.problem.canonicalize import check_host_values
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers

__all__ = ["NativeDoorError", "build", "check", "ragged_dot", "ragged_dot_general"]

_lowering.register()
_transformations.register()


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    max_multiprocessors: int | None = None,
    backend: str | None = None,
    use_store: bool = True,
) -> Any:
    """Multiplies consecutive groups of lhs's rows by one matrix per group: `jax.lax.ragged_dot`, with this package's rules.

    Args:
        lhs: (m, k), rows in group order.
        rhs: (g, k, n), one matrix per group.
        group_sizes: (g,) integers: how many rows each group has. Rows past their sum get zeros.
        precision: as JAX's; float32 products are IEEE unless TF32 is asked for by name ("tensorfloat32").
        preferred_element_type: out's type; None for JAX's rule (the operands' wider type).
        group_offset: an int or a (1,) integer array: sizes then has more than g entries, and groups [offset, offset + g) are computed.
        bias: (g, n), out's type, added to covered rows.
        alpha: a real number that scales the product.
        deterministic: only algorithms that give equal bits for equal inputs.
        batch_invariant: only algorithms with which a row of out has the same bits whatever m, its place and the other rows are; lhs's
            gradient as well.
        max_multiprocessors: the most CUs or SMs to occupy at a time; None for all. Without effect on a CPU.
        backend: a backend's name, which then runs it or refuses when it is lowered; None takes the best.
        use_store: whether stored tuning results decide about backend and algorithm. They are looked at when a program is lowered.

    Returns:
        (m, n).

    Raises:
        TypeError: shapes, element types or dimension numbers that do not fit; the text names the argument, what it got and wanted.
        ValueError: a group_offset that is known and out of range.
        NotImplementedError: operands that are not floating, or no backend that can run this.
    """
    if (jnp.ndim(lhs), jnp.ndim(rhs), jnp.ndim(group_sizes)) != (2, 3, 1):
        raise TypeError(
            f"ragged_dot: got lhs {jnp.shape(lhs)}, rhs {jnp.shape(rhs)}, group_sizes {jnp.shape(group_sizes)}; wanted (m, k), (g, k, n) "
            "and (g,); ragged_dot_general takes other ranks"
        )
    arguments = locals()
    return _call(**arguments, numbers=BASIC, group_count=None)


def ragged_dot_general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    max_multiprocessors: int | None = None,
    backend: str | None = None,
    use_store: bool = True,
    group_count: int | None = None,
) -> Any:
    """`jax.lax.ragged_dot_general`: the ragged dot with any contracting, batch, ragged and group dimensions.

    Args:
        ragged_dot_dimension_numbers: `RaggedDotDimensionNumbers`, JAX's or this package's.
        group_count: contracted ragged dimension only, with a group_offset: how many slabs out has (default: all groups).
        lhs, rhs, ...: as in `ragged_dot`; their shapes are those of `hipgroupgemm.ragged_dot_general`.

    Returns:
        out. Operands that do not lie as a backend takes them are rearranged by XLA first.

    Raises:
        As `ragged_dot`.
    """
    arguments = locals()
    numbers = RaggedDotDimensionNumbers.of(arguments.pop("ragged_dot_dimension_numbers"))
    return _call(**arguments, numbers=numbers)


def _call(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    numbers: RaggedDotDimensionNumbers,
    *,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any,
    bias: Any,
    **settings: Any,
) -> Any:
    operands = {"lhs": jnp.asarray(lhs), "rhs": jnp.asarray(rhs), "group_sizes": jnp.asarray(group_sizes)}
    if bias is not None:
        operands["bias"] = jnp.asarray(bias)
    known = None
    if isinstance(group_offset, (int, np.integer)) and not isinstance(group_offset, bool):
        known = int(group_offset)
    elif group_offset is not None:
        operands["group_offset"] = jnp.asarray(group_offset)
    for role in ("lhs", "rhs"):
        float_dtype(operands[role].dtype, role)
    preferred = None
    if preferred_element_type is not None:
        preferred = float_dtype(dtype_of(preferred_element_type, "preferred_element_type"), "preferred_element_type")
    out_type = result_dtype(operands["lhs"].dtype, operands["rhs"].dtype, preferred)
    out_type = jax.dtypes.canonicalize_dtype(out_type)
    precision = tuple(precision) if isinstance(precision, list) else precision
    if settings["max_multiprocessors"] is not None:
        Multiprocessors.of(settings["max_multiprocessors"])
    chosen = Settings(numbers, out_type.name, precision, known, **settings)
    _, problem = problem_of(
        shapes_of(operands[role] for role in ("lhs", "rhs", "group_sizes", "group_offset", "bias") if role in operands),
        chosen.change(has_group_offset="group_offset" in operands, has_bias=bias is not None),
    )
    check_host_values(problem.axes, None, ends=False, group_offset=known)
    if chosen.batch_invariant and problem.axes.mode is not RaggedDotMode.NON_CONTRACTING:
        raise NotImplementedError(f"batch_invariant=True: is said of rows of out that are ragged, this is {problem.axes.mode.name}")
    return bind(operands, chosen)
