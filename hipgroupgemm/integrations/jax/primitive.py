"""The primitive: what a ragged dot is to JAX's transformations, whatever platform runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.problem.canonicalize import Problem, canonicalize
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers
from hipgroupgemm.problem.parse import Call, parse

__all__ = ["Settings", "bind", "by_role", "problem_of", "ragged_dot_p"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """All of a call but its arrays, hashable.

    Attributes:
        numbers: the dimension numbers. out_type: out's, by name.
        group_offset: the first group where it is known on the host; an array comes as an operand.
        has_group_offset, has_bias: which operands follow lhs, rhs and group_sizes.
        precision, group_count, alpha, backend, deterministic, batch_invariant, max_multiprocessors, use_store: as `ragged_dot_general`'s.
    """

    numbers: RaggedDotDimensionNumbers
    out_type: str
    precision: Any = None
    group_offset: int | None = None
    group_count: int | None = None
    alpha: float = 1.0
    backend: str | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    max_multiprocessors: int | None = None
    use_store: bool = True
    has_group_offset: bool = False
    has_bias: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """The operands' roles, in order."""
        return ("lhs", "rhs", "group_sizes", *(("group_offset",) * self.has_group_offset), *(("bias",) * self.has_bias))

    @property
    def plan(self) -> dict[str, Any]:
        """What a plan is made with."""
        names = ("backend", "deterministic", "batch_invariant", "max_multiprocessors", "use_store")
        return {name: getattr(self, name) for name in names}

    def change(self, **changes: Any) -> Settings:
        """With other values."""
        return dataclasses.replace(self, **changes)


def by_role(operands: Sequence[Any], settings: Settings) -> dict[str, Any]:
    """The operands by their roles."""
    return dict(zip(settings.roles, operands, strict=True))


@functools.lru_cache(1024)
def problem_of(shapes: tuple[tuple[tuple[int, ...], str], ...], settings: Settings, device: Device = CPU) -> tuple[Call, Problem]:
    """The call of operands of these shapes and types, row-major, and its problem in canonical form.

    Raises:
        TypeError, ValueError, NotImplementedError: as `ragged_dot_general`.
    """
    views = {role: ArraySpec(shape, dtype, device=device) for role, (shape, dtype) in zip(settings.roles, shapes, strict=True)}
    offset = views.get("group_offset")
    arguments: dict[str, Any] = {**views, "alpha": settings.alpha, "group_offset": settings.group_offset}
    arguments.update(precision=settings.precision, preferred_element_type=settings.out_type, group_count=settings.group_count)
    arguments["ragged_dot_dimension_numbers"] = settings.numbers
    if offset is not None:  # its value is not known; as a device array's is not
        if offset.shape not in ((), (1,)) or offset.dtype.kind not in "iu":
            raise TypeError(f"group_offset: got {offset.dtype.name} {offset.shape}, wanted an int or an integer array of shape (1,)")
        arguments["group_offset"] = 0
    call = parse(arguments)
    if offset is not None:
        call.views["group_offset"], call.group_offset = offset, None
    return call, canonicalize(call, arguments)


def shapes_of(operands: Iterable[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and types of arrays or abstract ones, hashable."""
    return tuple((tuple(operand.shape), operand.dtype.name) for operand in operands)


# ---- the primitive ---------------------------------------------------------------------------------------------------------------

ragged_dot_p: Any = Primitive("hipgroupgemm_ragged_dot")


def _abstract(*avals: Any, settings: Settings) -> Any:
    _, problem = problem_of(shapes_of(avals), settings)
    lhs, shape = avals[0], problem.axes.out_shape
    sharding = lhs.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    # made of lhs's, so that what it carries of shard_map's axes goes on
    return lhs.update(shape=shape, dtype=problem.out_dtype, weak_type=False, sharding=sharding)


@functools.lru_cache(256)
def _jitted(settings: Settings) -> Any:
    return jax.jit(functools.partial(ragged_dot_p.bind, settings=settings))


def _run(*operands: Any, settings: Settings) -> Any:
    with jax.disable_jit(False):  # a primitive has to be compiled
        return _jitted(settings)(*operands)


ragged_dot_p.def_abstract_eval(_abstract)
ragged_dot_p.def_impl(_run)


def _varying(x: Any) -> frozenset[Any]:
    """The axes of shard_map's mesh along which a value differs."""
    aval = jax.typeof(x)
    axes = getattr(aval, "mat", None)
    return frozenset(getattr(aval, "vma", ())) if axes is None else frozenset(axes.varying)


def _with_contracted_in_order(
    operands: dict[str, Any], numbers: RaggedDotDimensionNumbers
) -> tuple[dict[str, Any], RaggedDotDimensionNumbers]:
    """The same product with the contracted axes in the order of the numbers in both operands.

    Sizes that differ along contracted axes name these in the numbers' order, and a gradient in the operand's.
    """
    (lhs_k, rhs_k), batch = numbers.dot_dimension_numbers
    if len(lhs_k) < 2 or numbers.lhs_ragged_dimensions[0] not in lhs_k:
        return operands, numbers
    moved, places = dict(operands), {}
    for role, k in (("lhs", lhs_k), ("rhs", rhs_k)):
        order = list(range(operands[role].ndim))
        for place, axis in zip(sorted(k), k, strict=True):
            order[place] = axis
        places[role] = tuple(sorted(k))
        if order != sorted(order):
            moved[role] = jnp.transpose(operands[role], order)
    ragged = places["lhs"][lhs_k.index(numbers.lhs_ragged_dimensions[0])]
    return moved, RaggedDotDimensionNumbers(((places["lhs"], places["rhs"]), batch), (ragged,), numbers.rhs_group_dimensions)


def bind(operands: dict[str, Any], settings: Settings) -> Any:
    """The ragged dot of operands by role. Inside shard_map all of them are made to vary along the same axes."""
    if operands["group_sizes"].ndim > 1:
        operands, numbers = _with_contracted_in_order(operands, settings.numbers)
        settings = settings.change(numbers=numbers)
    settings = settings.change(has_group_offset="group_offset" in operands, has_bias="bias" in operands)
    arrays = [operands[role] for role in settings.roles]
    varying = [_varying(array) for array in arrays]
    wanted = frozenset().union(*varying)
    if wanted:
        arrays = [_vary(array, tuple(wanted - has)) for array, has in zip(arrays, varying, strict=True)]
    return ragged_dot_p.bind(*arrays, settings=settings)


def _vary(x: Any, axes: tuple[Any, ...]) -> Any:
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)
