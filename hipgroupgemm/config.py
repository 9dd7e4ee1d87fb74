"""The description of a grouped GEMM: pure data, hashable, picklable, to and from JSON.

`GroupedGemmConfig` mirrors XLA's struct of the same name. It says what to compute and how the operands lie in memory; it holds
no array, no pointer and no device. Everything that runs a grouped GEMM takes one. Strides are in elements, alignments in bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterable
from typing import Any

from hipgroupgemm.config_rules import inner_axis, validate_config
from hipgroupgemm.config_types import COMPUTE_TYPES, FLOAT32_MAX, FLOAT_BYTES, PRECISION_ALGORITHMS, Epilogue, RaggedDotMode

__all__ = [
    "COMPUTE_TYPES", "FLOAT32_MAX", "FLOAT_BYTES", "PRECISION_ALGORITHMS", "Epilogue", "GroupedGemmConfig", "RaggedDotMode", "capacity_of",
    "inner_axis", "validate_config",
]  # fmt: skip

JSON_VERSION = 2


def capacity_of(extent: int) -> int:
    """The smallest capacity that holds a ragged extent of `extent` rows: eight steps an octave, so at most an eighth more.

    Problems whose ragged extents share a capacity share a plan, whatever their exact extents are.
    """
    if extent < 16:
        return extent
    step = 1 << (extent.bit_length() - 4)
    return -(-extent // step) * step


_LAYOUT = {"layout": True}  # marks a field that says how an operand lies; any other field with a default is a feature


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmConfig:
    """One grouped GEMM: out = alpha * P + beta * c, then bias.

    A is lhs (m x k a group), B is rhs (k x n a group), C is c and D is out (m x n a group); k is contracted. By mode:

    ===============  ==================  ==================  ===================  ===================
    mode             lhs                 rhs                 out and c            ragged extent R
    ===============  ==================  ==================  ===================  ===================
    NON_CONTRACTING  (batch, m, k)       (g, batch, k, n)    (batch, m, n)        m, all groups' rows
    CONTRACTING      (batch, m, k)       (batch, k, n)       (g, batch, m, n)     k, all groups' rows
    BATCH            (batch, m, k)       (batch, k, n)       (batch, m, n)        none
    ===============  ==================  ==================  ===================  ===================

    Each matrix has two strides (elements): the *leading dimension stride* and the *inner stride* of the axis that is contiguous,
    or nearest to it. `trans_a` false: lhs's inner axis is k, true: m. `trans_b` false: rhs's inner axis is n, true: k.
    `must_swap_operands` true (row-major output): out's inner axis is n, false: m; hipBLASLt is column-major, so a row-major output
    is computed as its transpose with the operands swapped. c's two strides lie along the same axes as out's.

    `stride_ragged_dim`, `stride_group_dim` and `output_stride_ragged_dim` are XLA's. NON_CONTRACTING: lhs's row stride, rhs's group
    stride, out's row stride. CONTRACTING: lhs's stride along k, rhs's stride along k, out's group stride. BATCH: the batch strides.

    `group_total` is the number of sizes; it exceeds `group_count` only where a group offset picks groups out of more.
    The alignments (1 to 16 bytes) are the powers of two that divide an operand's address and all its strides but the inner one.
    Types are names of NumPy / ml_dtypes scalar types. alpha and beta are real and finite.

    Three extents that are equal in a plain product are kept apart: the rows of the lhs array (`lhs_rows`), the rows multiplied (m), and
    the rows of out (`out_rows`). `lhs_rows_extent` and `out_rows_extent` are None where rows are not gathered or scattered.

    `rhs_listed` (NON_CONTRACTING) and `out_listed` (CONTRACTING; c as well): the operand is one array per group, each of them anywhere. Its
    group stride then says nothing and is that of the arrays in a row; its alignment is the least of them all.

    Raises TypeError or ValueError, from `validate_config`, when the fields do not make sense together.

    Example:
        >>> from hipgroupgemm import ArraySpec, config_for_ragged_dot
        >>> config = config_for_ragged_dot(ArraySpec((6, 4), "float32"), ArraySpec((2, 4, 3), "float32"), ArraySpec((2,), "int32"))
        >>> config.ragged_mode.name, config.trans_b, GroupedGemmConfig.from_json(config.to_json()) == config
        ('NON_CONTRACTING', False, True)
    """

    m: int
    n: int
    k: int
    batch_count: int
    group_count: int
    lhs_leading_dim_stride: int
    rhs_leading_dim_stride: int
    c_leading_dim_stride: int
    output_leading_dim_stride: int
    trans_a: bool
    trans_b: bool
    must_swap_operands: bool
    alpha: float
    beta: float
    type_a: str
    type_b: str
    type_c: str
    type_d: str
    stride_ragged_dim: int
    stride_group_dim: int
    c_stride_ragged_dim: int
    output_stride_ragged_dim: int
    precision_algorithm: str
    compute_precision: int
    ragged_mode: RaggedDotMode
    compute_type: str
    lhs_batch_stride: int
    rhs_batch_stride: int
    c_batch_stride: int
    output_batch_stride: int
    lhs_inner_stride: int
    rhs_inner_stride: int
    c_inner_stride: int
    output_inner_stride: int
    lhs_alignment: int
    rhs_alignment: int
    c_alignment: int
    output_alignment: int
    sizes_per_batch: bool
    group_total: int
    epilogue: Epilogue = Epilogue.DEFAULT
    bias_group_stride: int = dataclasses.field(default=0, metadata=_LAYOUT)
    bias_inner_stride: int = dataclasses.field(default=1, metadata=_LAYOUT)
    lhs_rows_extent: int | None = None
    out_rows_extent: int | None = None
    rhs_listed: bool = False
    out_listed: bool = False

    def __post_init__(self) -> None:
        validate_config(self)

    # ---- the ragged extent and the key -------------------------------------------------------------------------------------

    @property
    def ragged_extent(self) -> int:
        """R: m in NON_CONTRACTING, k in CONTRACTING, 0 in BATCH, where nothing is ragged."""
        if self.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            return self.m
        return self.k if self.ragged_mode is RaggedDotMode.CONTRACTING else 0

    @property
    def capacity(self) -> int:
        """The ragged extent that a plan for this config serves at the most, see `capacity_of`."""
        return capacity_of(self.ragged_extent)

    def key(self, capacity: int | None = None) -> GroupedGemmConfig:
        """What plans, compiled kernels and stored tuning results are looked up by: this config with what may vary a call removed.

        The ragged extent is raised to `capacity` (default: its own, `capacity_of`), and with it the strides of axes that lie outside of
        the ragged one and would not leave it that much room; alpha becomes 1; beta becomes 1 where it is not 0; where it is 0 c, being
        never read, takes out's layout. Two problems with equal keys can be run by one plan.

        Raises ValueError when `capacity` is below the ragged extent.
        """
        if capacity is None:
            return self._key
        if isinstance(capacity, bool) or capacity < self.ragged_extent:
            raise ValueError(f"capacity={capacity} is below the ragged extent {self.ragged_extent}; ask for at least that")
        return self._key_at(capacity)

    @functools.cached_property
    def _key(self) -> GroupedGemmConfig:
        return self._key_at(self.capacity)

    def _key_at(self, capacity: int) -> GroupedGemmConfig:
        new: dict[str, Any] = {"alpha": 1.0, "beta": 1.0 if self.beta else 0.0}
        new.update({name: 0 for name in ("lhs_rows_extent", "out_rows_extent") if getattr(self, name) is not None})
        new["epilogue"] = dataclasses.replace(self.epilogue, limit=Epilogue.DEFAULT.limit, sigmoid_scale=Epilogue.DEFAULT.sigmoid_scale)
        mode = self.ragged_mode
        if mode is RaggedDotMode.NON_CONTRACTING:
            new["m"] = capacity
            new.update(self._raised("lhs", self.m, capacity, self.k, ragged_is_inner=self.trans_a))
            for role in ("output", "c"):
                new.update(self._raised(role, self.m, capacity, self.n, ragged_is_inner=not self.must_swap_operands))
        elif mode is RaggedDotMode.CONTRACTING:
            new["k"] = capacity
            new.update(self._raised("lhs", self.k, capacity, self.m, ragged_is_inner=not self.trans_a))
            new.update(self._raised("rhs", self.k, capacity, self.n, ragged_is_inner=self.trans_b))
        new.update({name: new[field] for name, field in self.derived_fields().items() if field in new})
        if not self.beta:
            for name in ("leading_dim_stride", "inner_stride", "batch_stride", "stride_ragged_dim", "alignment"):
                new[f"c_{name}"] = new.get(f"output_{name}", getattr(self, f"output_{name}"))
        return dataclasses.replace(self, **new)

    def _raised(self, which: str, extent: int, capacity: int, other: int, *, ragged_is_inner: bool) -> dict[str, int]:
        """The strides that operand `which` needs at `capacity` (its ragged axis has `extent` now): axes outside of the ragged one that
        are packed, or padded by less than the capacity takes, move outwards, the others stay. The ragged axis counts in full.
        """
        inner, leading = ((extent, capacity), (other, other)) if ragged_is_inner else ((other, other), (extent, capacity))
        axes = {"inner_stride": inner, "leading_dim_stride": leading, "batch_stride": (self.batch_count, self.batch_count)}
        raised = {f"{which}_{name}": getattr(self, f"{which}_{name}") for name in axes}
        ragged = "inner_stride" if ragged_is_inner else "leading_dim_stride"
        reach = reach_at_capacity = 1
        for name in sorted(axes, key=lambda name: raised[f"{which}_{name}"]):  # equal strides (extents of 1) keep their order
            stride = new = raised[f"{which}_{name}"]
            if stride == 0:
                continue
            if stride >= reach:
                new = raised[f"{which}_{name}"] = max(stride, reach_at_capacity)
            reach += stride * (max(axes[name][0], 1) - 1)
            reach_at_capacity = new * capacity if name == ragged else reach_at_capacity + new * (max(axes[name][1], 1) - 1)
        return raised

    @property
    def lhs_rows(self) -> int:
        """Rows of the lhs array along its ragged axis, or along m where that is not ragged: the product's own where none are gathered."""
        rows = self.k if self.ragged_mode is RaggedDotMode.CONTRACTING else self.m
        return rows if self.lhs_rows_extent is None else self.lhs_rows_extent

    @property
    def out_rows(self) -> int:
        """Rows of the out array: m where none are scattered."""
        return self.m if self.out_rows_extent is None else self.out_rows_extent

    # ---- what a backend has to have ------------------------------------------------------------------------------------------

    def features(self) -> frozenset[str]:
        """By name, all that this problem needs beyond the plain product. A backend that does not declare each of them refuses.

        alpha, c, bias, sizes_per_batch, group_offset, mixed_types (operands of two types), wide_output and narrow_output (out has more or
        fewer bytes an element than the operands), tf32; and every field with a default, of this class or of `Epilogue`, that has another
        value: so a field that is added later is a feature, and refused, until a backend declares it.
        """
        found = set(self.epilogue.features())
        for field in dataclasses.fields(self):
            known = field.name in GroupedGemmConfig.__dataclass_fields__ and field.default is dataclasses.MISSING  # to the rules below
            if not known and field.name != "epilogue" and not field.metadata.get("layout") and getattr(self, field.name) != field.default:
                found.add(field.name.removesuffix("_extent"))
        operand = max(FLOAT_BYTES[self.type_a], FLOAT_BYTES[self.type_b])
        needed = {
            "alpha": self.alpha != 1,
            "c": self.beta != 0,
            "sizes_per_batch": self.sizes_per_batch,
            "group_offset": self.group_total != self.group_count and self.ragged_mode is not RaggedDotMode.BATCH,
            "mixed_types": self.type_a != self.type_b,
            "wide_output": FLOAT_BYTES[self.type_d] > operand,
            "narrow_output": FLOAT_BYTES[self.type_d] < operand,
            "tf32": self.compute_type == "tf32",
        }
        return frozenset(found | {name for name, wanted in needed.items() if wanted})

    def layouts(self) -> frozenset[str]:
        """By name, what is unusual about how the operands lie: column_major_output, and <operand>_inner_stride where that is not 1."""
        there = {"lhs": True, "rhs": True, "output": True, "c": self.beta != 0, "bias": self.epilogue.bias}
        strided = [f"{name}_inner_stride" for name in there if there[name] and getattr(self, f"{name}_inner_stride") != 1]
        return frozenset(strided if self.must_swap_operands else [*strided, "column_major_output"])

    def with_scalars(self, alpha: float, beta: float) -> GroupedGemmConfig:
        """This config with another alpha and beta, finite ones: not validated anew, and with the key that it has found already.

        Raises ValueError when beta comes or goes: that is another key.
        """
        if (alpha, beta) == (self.alpha, self.beta):
            return self
        if bool(beta) != bool(self.beta):
            raise ValueError(f"beta={beta}: is another key than beta={self.beta}")
        other = object.__new__(GroupedGemmConfig)
        other.__dict__.update(self.__dict__, alpha=alpha, beta=beta)
        other.__dict__.pop("_hash", None)
        return other

    # ---- strides by axis ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def lhs_strides(self) -> tuple[int, int, int]:
        """Strides (elements) of lhs along (batch, m, k)."""
        inner, leading = self.lhs_inner_stride, self.lhs_leading_dim_stride
        return (self.lhs_batch_stride, *((inner, leading) if self.trans_a else (leading, inner)))

    @functools.cached_property
    def rhs_strides(self) -> tuple[int, int, int, int]:
        """Strides (elements) of rhs along (group, batch, k, n); the group stride is 0 where rhs has no group axis."""
        inner, leading = self.rhs_inner_stride, self.rhs_leading_dim_stride
        group = self.stride_group_dim if self.ragged_mode is RaggedDotMode.NON_CONTRACTING else 0
        return (group, self.rhs_batch_stride, *((inner, leading) if self.trans_b else (leading, inner)))

    @functools.cached_property
    def output_strides(self) -> tuple[int, int, int, int]:
        """Strides (elements) of out along (group, batch, m, n); the group stride is 0 where out has no group axis."""
        return self._output_like("output")

    @functools.cached_property
    def c_strides(self) -> tuple[int, int, int, int]:
        """Strides (elements) of c along (group, batch, m, n); the group stride is 0 where c has no group axis."""
        return self._output_like("c")

    def _output_like(self, which: str) -> tuple[int, int, int, int]:
        inner, leading = getattr(self, f"{which}_inner_stride"), getattr(self, f"{which}_leading_dim_stride")
        group = getattr(self, f"{which}_stride_ragged_dim") if self.ragged_mode is RaggedDotMode.CONTRACTING else 0
        matrix = (leading, inner) if self.must_swap_operands else (inner, leading)
        return (group, getattr(self, f"{which}_batch_stride"), *matrix)

    def derived_fields(self) -> dict[str, str]:
        """The fields that repeat another one, and which: what XLA calls the strides of the ragged dimension and of the groups."""
        mode = self.ragged_mode
        if mode is RaggedDotMode.BATCH:
            return {
                **{"stride_ragged_dim": "lhs_batch_stride", "stride_group_dim": "rhs_batch_stride"},
                **{"output_stride_ragged_dim": "output_batch_stride", "c_stride_ragged_dim": "c_batch_stride"},
            }
        contracting = mode is RaggedDotMode.CONTRACTING
        lhs = "lhs_inner_stride" if self.trans_a != contracting else "lhs_leading_dim_stride"
        if contracting:
            return {"stride_ragged_dim": lhs, "stride_group_dim": "rhs_inner_stride" if self.trans_b else "rhs_leading_dim_stride"}
        row = "leading_dim_stride" if self.must_swap_operands else "inner_stride"
        return {"stride_ragged_dim": lhs, "output_stride_ragged_dim": f"output_{row}", "c_stride_ragged_dim": f"c_{row}"}

    # ---- work ----------------------------------------------------------------------------------------------------------------

    def _rows(self, group_sizes: Iterable[Any] | None) -> list[list[int]]:
        """Rows of every group, a list per batch entry, for one set of sizes or for one per batch entry; wrong ones are refused."""
        extent = self.ragged_extent
        if group_sizes is None:
            used = min(self.group_count, extent)
            return [[extent - used + 1, *[1] * (used - 1)] if used else []] * self.batch_count
        sizes: list[Any] = list(group_sizes)
        rows = [list(row) for row in sizes] if sizes and isinstance(sizes[0], Iterable) else [sizes] * self.batch_count
        if len(rows) != self.batch_count:
            raise TypeError(f"group_sizes: got {len(rows)} rows of sizes, wanted {self.batch_count}, one per batch entry")
        for row in rows:
            if len(row) not in (self.group_count, self.group_total):
                raise TypeError(f"group_sizes: got {len(row)} sizes, wanted {self.group_total}")
            for group, size in enumerate(row):
                if isinstance(size, bool) or not hasattr(size, "__index__"):
                    raise TypeError(f"group_sizes: group {group} has {size!r}, wanted an integer")
                left = extent - sum(int(other) for other in row[:group])
                if not 0 <= int(size) <= left:
                    raise ValueError(f"group_sizes: group {group} has {int(size)} rows, {left} are left of {extent}")
        return [[int(size) for size in row] for row in rows]

    def flops(self, group_sizes: Iterable[Any] | None = None) -> int:
        """Floating-point operations (2 a multiply-add) for the given sizes: `(g,)`, or `(batch, g)` of them on the host.

        Without sizes every row counts as covered. Sizes that the operation would refuse raise TypeError or ValueError.
        """
        if self.ragged_mode is RaggedDotMode.BATCH:
            return 2 * self.batch_count * self.m * self.n * self.k
        covered = sum(sum(rows) for rows in self._rows(group_sizes))
        if self.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            return 2 * covered * self.n * self.k
        return 2 * covered * self.m * self.n

    def min_bytes(self, group_sizes: Iterable[Any] | None = None) -> int:
        """The fewest bytes that device memory must move: each needed input element read once, each output element written once.

        Weights of empty groups need not be read; operands broadcast by a stride of 0 are read once; c is read where beta is not 0.
        The sizes themselves do not count.
        """
        batch, mode, bias = self.batch_count, self.ragged_mode, 0
        per_batch = self._rows(None if mode is RaggedDotMode.BATCH else group_sizes)
        (lhs_batch, lhs_m, lhs_k), (rhs_group, rhs_batch, rhs_k, rhs_n) = self.lhs_strides, self.rhs_strides

        def covered(batch_stride: int, row_stride: int) -> int:
            """Distinct rows among the covered ones, which are the first ones of each batch entry."""
            rows = [_distinct((sum(sizes), row_stride)) for sizes in per_batch]
            return sum(rows) if batch_stride else max(rows, default=0)

        if mode is RaggedDotMode.NON_CONTRACTING:
            used = [(group, entry) for entry, sizes in enumerate(per_batch) for group, size in enumerate(sizes) if size]
            weights = len({(group if rhs_group else 0, entry if rhs_batch else 0) for group, entry in used})
            lhs, rhs = covered(lhs_batch, lhs_m) * _distinct((self.k, lhs_k)), weights * _distinct((self.k, rhs_k), (self.n, rhs_n))
            if self.epilogue.bias:
                bias = len({group if self.bias_group_stride else 0 for group, _ in used}) * _distinct((self.n, self.bias_inner_stride))
        elif mode is RaggedDotMode.CONTRACTING:
            lhs, rhs = covered(lhs_batch, lhs_k) * _distinct((self.m, lhs_m)), covered(rhs_batch, rhs_k) * _distinct((self.n, rhs_n))
        else:
            lhs = _distinct((batch, lhs_batch), (self.m, lhs_m), (self.k, lhs_k))
            rhs = _distinct((batch, rhs_batch), (self.k, rhs_k), (self.n, rhs_n))
        if 0 in (self.m, self.n):  # there is no output that would need them
            lhs = rhs = 0
        extents = (self.group_count if mode is RaggedDotMode.CONTRACTING else 1, batch, self.m, self.n)
        c = _distinct(*zip(extents, self.c_strides, strict=True)) if self.beta else 0
        outputs = math.prod(extents) + c + bias
        return lhs * FLOAT_BYTES[self.type_a] + rhs * FLOAT_BYTES[self.type_b] + outputs * FLOAT_BYTES[self.type_d]

    # ---- JSON ----------------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """This config as one JSON object; `from_json` gives an equal config back."""
        import json  # here, since importing the package should cost little

        data: dict[str, Any] = {"version": JSON_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data[field.name] = value.value if isinstance(value, enum.Enum) else value
        data["epilogue"] = dataclasses.asdict(self.epilogue)
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> GroupedGemmConfig:
        """The config that `to_json` wrote. `rhs_listed` and `out_listed` may be missing: they came after others were written.

        Raises ValueError for text that is no such object, of another version, or with fields missing, unknown or of a wrong type.
        """
        import json

        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"text: not JSON ({error}); pass what to_json() returned") from None
        if not isinstance(data, dict) or data.pop("version", None) != JSON_VERSION:
            raise ValueError(f"text: not a GroupedGemmConfig of version {JSON_VERSION}; pass what to_json() returned")
        for name, found, kind in (("text", data, cls), ("text: epilogue", data.get("epilogue", {}), Epilogue)):
            names = {field.name for field in dataclasses.fields(kind)}
            if not isinstance(found, dict):
                raise ValueError(f"{name}: got {found!r}, wanted an object of the fields {', '.join(sorted(names))}")
            if found.keys() | {"rhs_listed", "out_listed"} & names != names:
                raise ValueError(f"{name}: missing fields {sorted(names - found.keys())}, unknown fields {sorted(found.keys() - names)}")
        try:
            data["ragged_mode"] = RaggedDotMode(data["ragged_mode"])
            data["epilogue"] = Epilogue(**data["epilogue"])
            return cls(**data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"text: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        return self._hash


def _distinct(*axes: tuple[int, int]) -> int:
    """How many elements axes of these (extent, stride) have apart from each other: a stride of 0 repeats one."""
    return math.prod(extent if stride else min(extent, 1) for extent, stride in axes)
