"""A config in hipBLASLt's terms: column-major, D = alpha * op(A) op(B) + beta * C.

A row-major out (m x n) is a column-major n x m matrix, so there the operands trade places: hipBLASLt's A is rhs, its B is lhs, its m is
our n and its n is our m. In NON_CONTRACTING that makes the ragged extent hipBLASLt's n, in CONTRACTING it is k either way.
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from hipgroupgemm.backends.scan_arguments import RAGGED_K, RAGGED_N
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode

__all__ = ["Matrix", "Refused", "Terms", "patch_record", "terms_of"]

LARGEST = 2**32 - 1  # records hold extents, leading dimensions and batch strides in 32 bits
TYPES = {"bfloat16": 14, "float16": 2, "float32": 0, "float64": 1}  # hipDataType
COMPUTE = {"float32": 0, "tf32": 1, "float64": 4}  # hgg_compute_type

_EXTENTS = struct.Struct("<4I")
_STRIDES = struct.Struct("<8I")
_AT_STRIDES = 48


class Refused(Exception):
    """hipBLASLt's grouped GEMM cannot express the config; the text says why."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One column-major operand: leading dimension and strides in elements.

    Attributes:
        name: as the caller knows it, for texts.
        leading: leading dimension.
        row: elements from one ragged row to the next.
        group: elements from one group's matrix to the next; 0 where all share one.
        batch: elements from one batch entry to the next.
    """

    name: str
    leading: int
    row: int
    group: int
    batch: int


@dataclasses.dataclass(frozen=True)
class Terms:
    """A config in hipBLASLt's terms.

    Attributes:
        m, n, k, batch: of one problem. The ragged one is the ragged extent.
        ragged: RAGGED_N or RAGGED_K, which of them that is; RAGGED_N for BATCH too, where nothing is.
        fixed: whether nothing is ragged (BATCH).
        trans_a, trans_b: whether A is stored k x m, B n x k.
        a, b, c, d: the operands.
        groups: records that the groups need (one a group, or one a batch entry and group where the sizes differ by batch entry).
        totals: how many times the ragged extent is spread over the records: once, or once a batch entry.
        swapped: whether A is rhs.
        empty: whether there is no product to compute at all, for any sizes.
    """

    m: int
    n: int
    k: int
    batch: int
    ragged: int
    fixed: bool
    trans_a: bool
    trans_b: bool
    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    groups: int
    totals: int
    swapped: bool
    empty: bool

    @property
    def records(self) -> int:
        """Records written: at least two, since with a single problem hipBLASLt would offer kernels that demand sizes in multiples."""
        return max(2, self.groups)

    def problem_sizes(self) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Sizes for hgg_set_problem whose launch grid covers every distribution of the ragged rows: all in one group, 1 in the others."""
        spread = np.full(self.records, self.n if self.fixed else 1, np.int64)
        spread[0] = max(1, (self.n if self.ragged == RAGGED_N else self.k) * self.totals)
        fixed = np.ones(self.records, np.int64)
        return {
            "m": fixed * self.m,
            "n": spread if self.ragged == RAGGED_N else fixed * self.n,
            "k": spread if self.ragged == RAGGED_K else fixed * max(1, self.k),
            "batch": fixed * self.batch,
        }


def _matrix(
    name: str, strides: tuple[int, int], inner_extent: int, outer_extent: int, *, row: int, group: int, batch: int, batches: int
) -> Matrix:
    """Checks one operand: `strides` are (leading, inner) in elements."""
    leading, inner = strides
    if inner != 1:
        raise Refused(f"{name}'s inner stride is {inner}; hipBLASLt's matrices have inner stride 1")
    if outer_extent > 1 and leading < inner_extent:
        raise Refused(f"{name}'s rows overlap (leading dimension {leading}, {inner_extent} elements a row); hipBLASLt needs them apart")
    leading = max(leading, inner_extent, 1)
    if leading > LARGEST:
        raise Refused(f"{name}'s leading dimension is {leading}; hipBLASLt's records hold 32 bits")
    if batches > 1 and batch > LARGEST:
        raise Refused(f"{name}'s batch stride is {batch}; hipBLASLt's records hold 32 bits")
    return Matrix(name, leading, row, group, batch)


def terms_of(config: GroupedGemmConfig) -> Terms:
    """The config in hipBLASLt's terms; raises `Refused` with the reason where it has none."""
    c = config
    mode = c.ragged_mode
    swapped = c.must_swap_operands
    if mode is RaggedDotMode.NON_CONTRACTING and not swapped:
        raise Refused("out is column-major, which makes hipBLASLt's m ragged; few of its kernels take that, and none by contract")
    if c.epilogue.bias and c.bias_inner_stride != 1:
        raise Refused(f"bias's inner stride is {c.bias_inner_stride}; hipBLASLt reads it contiguously")
    for name, extent in (("m", c.m), ("n", c.n), ("k", c.k), ("batch_count", c.batch_count)):
        if extent > LARGEST:
            raise Refused(f"{name}={extent}; hipBLASLt's records hold 32 bits")
    per_batch = c.sizes_per_batch
    batch = 1 if per_batch else c.batch_count
    groups = 1 if mode is RaggedDotMode.BATCH else c.group_count * (c.batch_count if per_batch else 1)
    contracting, non_contracting = mode is RaggedDotMode.CONTRACTING, mode is RaggedDotMode.NON_CONTRACTING
    lhs = _matrix(
        "lhs",
        (c.lhs_leading_dim_stride, c.lhs_inner_stride),
        *((c.m, c.k) if c.trans_a else (c.k, c.m)),
        row=c.stride_ragged_dim if mode is not RaggedDotMode.BATCH else 0,
        group=0,
        batch=c.lhs_batch_stride,
        batches=batch,
    )
    rhs = _matrix(
        "rhs",
        (c.rhs_leading_dim_stride, c.rhs_inner_stride),
        *((c.k, c.n) if c.trans_b else (c.n, c.k)),
        row=c.stride_group_dim if contracting else 0,
        group=c.stride_group_dim if non_contracting else 0,
        batch=c.rhs_batch_stride,
        batches=batch,
    )
    out_extents = (c.n, c.m) if swapped else (c.m, c.n)
    out = _matrix(
        "out",
        (c.output_leading_dim_stride, c.output_inner_stride),
        *out_extents,
        row=c.output_stride_ragged_dim if non_contracting else 0,
        group=c.output_stride_ragged_dim if contracting else 0,
        batch=c.output_batch_stride,
        batches=batch,
    )
    other = out
    if c.beta:
        other = _matrix(
            "c",
            (c.c_leading_dim_stride, c.c_inner_stride),
            *out_extents,
            row=c.c_stride_ragged_dim if non_contracting else 0,
            group=c.c_stride_ragged_dim if contracting else 0,
            batch=c.c_batch_stride,
            batches=batch,
        )
    # not transposed: A is stored with m inside, B with k inside
    if swapped:
        m, n, a, b, trans_a, trans_b = c.n, c.m, rhs, lhs, c.trans_b, c.trans_a
    else:
        m, n, a, b, trans_a, trans_b = c.m, c.n, lhs, rhs, not c.trans_a, not c.trans_b
    empty = 0 in (c.m, c.n, c.batch_count) or groups == 0 or (contracting and c.k == 0)
    return Terms(
        m=m,
        n=n,
        k=c.k,
        batch=batch,
        ragged=RAGGED_K if contracting else RAGGED_N,
        fixed=mode is RaggedDotMode.BATCH,
        trans_a=trans_a,
        trans_b=trans_b,
        a=a,
        b=b,
        c=other,
        d=out,
        groups=groups,
        totals=c.batch_count if per_batch else 1,
        swapped=swapped,
        empty=empty,
    )


def patch_record(record: bytes, terms: Terms, *, product: bool) -> bytes:
    """The template record with the extents and strides of exactly this call; `product` false gives it k = 0, so that A and B are not read.

    Args:
        record: 196 bytes, hipBLASLt's own template, which knows the codes for the bias and the activation.
        terms: of the call's config.
        product: whether alpha * op(A) op(B) is wanted.
    """
    patched = bytearray(record)
    _EXTENTS.pack_into(patched, 0, terms.m, terms.n, terms.batch, terms.k if product else 0)
    pairs = [(matrix.leading, matrix.batch if terms.batch > 1 else 0) for matrix in (terms.d, terms.c, terms.a, terms.b)]
    _STRIDES.pack_into(patched, _AT_STRIDES, *(value for pair in pairs for value in pair))
    return bytes(patched)
