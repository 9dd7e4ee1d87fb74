"""Random and wrong dimension numbers for ragged dots of any rank, shared by the tests that JAX judges."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from generators import Mode, Numbers, random_sizes


@dataclasses.dataclass
class GeneralCase:
    """Shapes, dimension numbers and sizes of one ragged dot of any rank."""

    mode: Mode
    numbers: Numbers
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    sizes: np.ndarray[Any, Any]
    ragged_extent: int

    def __repr__(self) -> str:
        n = self.numbers
        return (
            f"{self.mode.name} lhs {self.lhs_shape} rhs {self.rhs_shape} sizes {self.sizes.tolist()} dims {n.dot_dimension_numbers} "
            f"ragged {n.lhs_ragged_dimensions} group {n.rhs_group_dimensions}"
        )


def random_case(rng: np.random.Generator, mode: Mode, *, empty: bool = False, largest: int = 4) -> GeneralCase:
    """Several batch, contracting and free axes at any place, the ragged one among them, sizes (g,) or with the full prefix.

    Args:
        rng: where it all comes from.
        mode: which role the ragged axis has.
        empty: whether axes may have extent 0 (else they are 1 or more).
        largest: of the axes beside the ragged one.
    """

    def extent() -> int:
        return int(rng.integers(0 if empty else 1, largest + 1))

    counts = {role: int(rng.integers(0, 3)) for role in ("batch", "contracting", "rows", "columns")}
    needs = {Mode.NON_CONTRACTING: "rows", Mode.CONTRACTING: "contracting", Mode.BATCH: "batch"}[mode]
    counts[needs] = max(counts[needs], 1)
    extents = {role: [extent() for _ in range(count)] for role, count in counts.items()}
    ragged_position = int(rng.integers(counts[needs]))
    ragged_extent = int(rng.integers(0 if empty else 1, 14))
    extents[needs][ragged_position] = ragged_extent
    groups = int(rng.integers(0 if empty else 1, 5))

    lhs_axes = [(role, i) for role in ("batch", "contracting", "rows") for i in range(counts[role])]
    rhs_axes = [(role, i) for role in ("batch", "contracting", "columns") for i in range(counts[role])]
    if mode is Mode.NON_CONTRACTING:
        rhs_axes.append(("group", 0))
        extents["group"] = [groups]
    lhs_axes = [lhs_axes[i] for i in rng.permutation(len(lhs_axes))]
    rhs_axes = [rhs_axes[i] for i in rng.permutation(len(rhs_axes))]

    def places(axes: list[tuple[str, int]], role: str) -> tuple[int, ...]:
        return tuple(axes.index((role, i)) for i in range(len(extents[role])))

    lhs_shape = tuple(extents[role][i] for role, i in lhs_axes)
    rhs_shape = tuple(extents[role][i] for role, i in rhs_axes)
    ragged = lhs_axes.index((needs, ragged_position))
    numbers = Numbers(
        (
            (places(lhs_axes, "contracting"), places(rhs_axes, "contracting")),
            (places(lhs_axes, "batch"), places(rhs_axes, "batch")),
        ),
        (ragged,),
        (rhs_axes.index(("group", 0)),) if mode is Mode.NON_CONTRACTING else (),
    )
    batch = places(lhs_axes, "batch")
    if mode is Mode.NON_CONTRACTING:  # free axes of lhs count in the order in which lhs has them
        prefix = batch + tuple(axis for axis, (role, _) in enumerate(lhs_axes) if role == "rows" and axis < ragged)
    elif mode is Mode.CONTRACTING:
        prefix = batch + places(lhs_axes, "contracting")[:ragged_position]
    else:
        prefix = batch[:ragged_position]
    lead = tuple(lhs_shape[axis] for axis in prefix) if rng.random() < 0.5 else ()
    rows = int(np.prod(lead, dtype=np.int64))
    full = [random_sizes(rng, ragged_extent, groups, full=bool(rng.random() < 0.5)) for _ in range(rows)]
    sizes = np.array(full, np.int32).reshape(*lead, groups)
    return GeneralCase(mode, numbers, lhs_shape, rhs_shape, sizes, ragged_extent)


@dataclasses.dataclass
class WrongCase:
    """A call that must be refused with a TypeError, and words that the text must hold."""

    name: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[Any, Any]
    ragged: tuple[int, ...]
    group: tuple[int, ...]
    words: tuple[str, ...]
    sizes_dtype: str = "int32"
    jax_judges: bool = True


_MK = (((1,), (1,)), ((), ()))
_KM = (((0,), (0,)), ((), ()))
_BMK = (((2,), (2,)), ((0,), (1,)))

WRONG = [
    WrongCase("k differs", (6, 5), (2, 4, 3), (2,), _MK, (0,), (0,), ("contracting", "(5,)", "(4,)", "equal")),
    WrongCase("batch differs", (2, 6, 5), (3, 4, 5, 7), (3,), _BMK, (1,), (0,), ("batch", "(2,)", "(4,)", "equal")),
    WrongCase(
        "lhs axis out of range", (6, 5), (2, 5, 3), (2,), (((2,), (1,)), ((), ())), (0,), (0,), ("lhs_contracting", "(2,)", "2 axes")
    ),
    WrongCase("lhs axis negative", (6, 5), (2, 5, 3), (2,), (((-1,), (1,)), ((), ())), (0,), (0,), ("lhs_contracting", "-1")),
    WrongCase(
        "rhs axis out of range", (6, 5), (2, 5, 3), (2,), (((1,), (3,)), ((), ())), (0,), (0,), ("rhs_contracting", "(3,)", "3 axes")
    ),
    WrongCase("batch axis out of range", (2, 6, 5), (3, 2, 5, 7), (3,), (((2,), (2,)), ((4,), (1,))), (1,), (0,), ("lhs_batch", "4")),
    WrongCase("ragged axis out of range", (6, 5), (2, 5, 3), (2,), _MK, (2,), (0,), ("lhs_ragged_dimensions", "2")),
    WrongCase("ragged axis negative", (6, 5), (2, 5, 3), (2,), _MK, (-2,), (0,), ("lhs_ragged_dimensions", "-2")),
    WrongCase("no ragged axis", (6, 5), (2, 5, 3), (2,), _MK, (), (0,), ("lhs_ragged_dimensions", "exactly one")),
    WrongCase("two ragged axes", (6, 5), (2, 5, 3), (2,), _MK, (0, 1), (0,), ("lhs_ragged_dimensions", "exactly one")),
    WrongCase("contracting twice", (6, 5, 5), (2, 5, 5), (2,), (((1, 1), (1, 2)), ((), ())), (0,), (0,), ("lhs_contracting", "once")),
    WrongCase("rhs contracting twice", (6, 5, 5), (2, 5, 5), (2,), (((1, 2), (1, 1)), ((), ())), (0,), (0,), ("rhs_contracting", "once")),
    WrongCase("batch twice", (2, 2, 6, 5), (3, 2, 2, 5, 7), (3,), (((3,), (3,)), ((0, 0), (1, 2))), (2,), (0,), ("lhs_batch", "once")),
    WrongCase("both roles", (5, 6, 5), (3, 5, 5, 7), (3,), (((0,), (2,)), ((0,), (1,))), (1,), (0,), ("contracting", "batch")),
    WrongCase("unpaired contracting", (6, 5, 4), (2, 5, 4), (2,), (((1, 2), (1,)), ((), ())), (0,), (0,), ("contracting", "pairs")),
    WrongCase("unpaired batch", (2, 6, 5), (3, 2, 5, 7), (3,), (((2,), (2,)), ((0,), ())), (1,), (0,), ("batch", "pairs")),
    WrongCase("group axis missing", (6, 5), (2, 5, 3), (2,), _MK, (0,), (), ("rhs_group_dimensions", "exactly one")),
    WrongCase("two group axes", (6, 5), (2, 5, 3), (2,), _MK, (0,), (0, 2), ("rhs_group_dimensions", "exactly one")),
    WrongCase("group axis out of range", (6, 5), (2, 5, 3), (2,), _MK, (0,), (3,), ("rhs_group_dimensions", "3")),
    WrongCase("group axis contracted", (6, 5), (2, 5, 3), (5,), _MK, (0,), (1,), ("rhs_group_dimensions", "contracting")),
    WrongCase("group axis in contracting mode", (6, 5), (6, 3), (2,), _KM, (0,), (1,), ("rhs_group_dimensions", "empty")),
    WrongCase("group axis in batch mode", (2, 6, 5), (2, 5, 3), (2,), (((2,), (1,)), ((0,), (0,))), (0,), (2,), ("rhs_group_dimensions",)),
    WrongCase("scalar sizes", (6, 5), (2, 5, 3), (), _MK, (0,), (0,), ("group_sizes", "scalar", "(g,)")),
    WrongCase("too many sizes", (6, 5), (2, 5, 3), (3,), _MK, (0,), (0,), ("group_sizes", "3", "2")),
    WrongCase("too few sizes", (6, 5), (4, 5, 3), (3,), _MK, (0,), (0,), ("group_sizes", "3", "4")),
    WrongCase("wrong prefix", (2, 6, 5), (3, 2, 5, 7), (4, 3), _BMK, (1,), (0,), ("group_sizes", "(4, 3)", "(2, 3)")),
    WrongCase("prefix where none is", (6, 5), (2, 5, 3), (1, 2), _MK, (0,), (0,), ("group_sizes", "(1, 2)", "(2,)")),
    WrongCase("partial prefix", (2, 3, 6, 5), (4, 2, 3, 5, 7), (3, 4), (((3,), (3,)), ((0, 1), (1, 2))), (2,), (0,), ("group_sizes",)),
    WrongCase("float sizes", (6, 5), (2, 5, 3), (2,), _MK, (0,), (0,), ("group_sizes", "float32", "integer"), "float32"),
    WrongCase("bool sizes", (6, 5), (2, 5, 3), (2,), _MK, (0,), (0,), ("group_sizes", "bool", "integer"), "bool"),
]
