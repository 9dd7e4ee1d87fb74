"""A config as hipBLASLt's grouped problem: column-major, D = alpha * op(A) op(B) + beta * C.

A row-major out (m x n) is a column-major n x m matrix, so there the operands trade places: hipBLASLt's A is rhs, its B is lhs, its m is
our n and its n is our m. In NON_CONTRACTING that makes the ragged extent hipBLASLt's n, in CONTRACTING it is k either way.
"""

from __future__ import annotations

import dataclasses
import struct

from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.native import GemmProblem

__all__ = ["HipblasltProblem", "Matrix", "Refused", "patched_record", "problem_of"]

LARGEST = 2**32 - 1  # records hold extents, leading dimensions and batch strides in 32 bits

_EXTENTS = struct.Struct("<4I")
_STRIDES = struct.Struct("<8I")
_AT_STRIDES = 48


class Refused(Exception):
    """hipBLASLt's grouped GEMM cannot express the config; the text says why."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One column-major operand.

    Attributes:
        role: of the operand that it is, a key of `Arguments.pointers`.
        leading: leading dimension, elements.
        row, group, batch: bytes from one ragged row, group and batch entry to the next; 0 where all share one.
    """

    role: str
    leading: int
    row: int
    group: int
    batch: int


@dataclasses.dataclass(frozen=True)
class HipblasltProblem:
    """A config as hipBLASLt sees it.

    Attributes:
        gemm: types and sizes, the ragged one as large as all records together may need.
        matrices: the operands by hipBLASLt's letter, "a" to "d".
        scans: how many times the ragged extent is spread over the records: once, or once a batch entry.
        groups: records that the groups need. There are `gemm.count` records, two or more.
        swapped: whether A is rhs.
        empty: whether there is no product to compute at all, for any sizes.
    """

    gemm: GemmProblem
    matrices: dict[str, Matrix]
    scans: int
    groups: int
    swapped: bool
    empty: bool


def problem_of(config: GroupedGemmConfig) -> HipblasltProblem:
    """The config as hipBLASLt's problem; raises `Refused` with the reason where it has none."""
    c, mode = config, config.ragged_mode
    contracting, non_contracting = mode is RaggedDotMode.CONTRACTING, mode is RaggedDotMode.NON_CONTRACTING
    swapped = c.must_swap_operands
    if non_contracting and not swapped:
        raise Refused("out is column-major, which makes hipBLASLt's m ragged; few of its kernels take that, and none by contract")
    scans = c.batch_count if c.sizes_per_batch else 1
    batch = 1 if c.sizes_per_batch else c.batch_count
    groups = 1 if mode is RaggedDotMode.BATCH else c.group_count * scans

    def matrix(role: str, leading: int, extents: tuple[int, int], row: int, group: int, batch_stride: int) -> Matrix:
        """`extents`: along the inner axis, and along the other."""
        inner, outer = extents
        if outer > 1 and leading < inner:
            raise Refused(f"{role}'s rows overlap (leading dimension {leading}, {inner} elements a row); hipBLASLt needs them apart")
        leading = max(leading, inner, 1)
        for what, value in (("leading dimension", leading), ("batch stride", batch_stride if batch > 1 else 0)):
            if value > LARGEST:
                raise Refused(f"{role}'s {what} is {value}; hipBLASLt's records hold 32 bits")
        size = FLOAT_BYTES[{"lhs": c.type_a, "rhs": c.type_b}.get(role, c.type_d)]
        return Matrix(role, leading, row * size, group * size, batch_stride * size)

    def output(role: str, leading: int, stride: int, batch_stride: int) -> Matrix:
        extents = (c.n, c.m) if swapped else (c.m, c.n)
        return matrix(role, leading, extents, stride if non_contracting else 0, stride if contracting else 0, batch_stride)

    lhs_row = 0 if mode is RaggedDotMode.BATCH else c.stride_ragged_dim
    lhs = matrix("lhs", c.lhs_leading_dim_stride, (c.m, c.k) if c.trans_a else (c.k, c.m), lhs_row, 0, c.lhs_batch_stride)
    rhs_row, rhs_group = c.stride_group_dim if contracting else 0, c.stride_group_dim if non_contracting else 0
    rhs = matrix("rhs", c.rhs_leading_dim_stride, (c.k, c.n) if c.trans_b else (c.n, c.k), rhs_row, rhs_group, c.rhs_batch_stride)
    d = output("out", c.output_leading_dim_stride, c.output_stride_ragged_dim, c.output_batch_stride)
    other = output("c", c.c_leading_dim_stride, c.c_stride_ragged_dim, c.c_batch_stride) if c.beta else d
    # not transposed: A is stored with m inside, B with k inside
    if swapped:
        m, n, a, b, trans_a, trans_b = c.n, c.m, rhs, lhs, c.trans_b, c.trans_a
    else:
        m, n, a, b, trans_a, trans_b = c.m, c.n, lhs, rhs, not c.trans_a, not c.trans_b
    k = c.k
    if contracting:
        k *= scans
    elif non_contracting:
        n *= scans

    def between(matrix: Matrix, dtype: str) -> int:
        return matrix.batch // FLOAT_BYTES[dtype] if batch > 1 else 0

    gemm = GemmProblem(
        c.type_a,
        c.type_b,
        c.type_d,
        c.type_d,
        # at least two: with a single problem hipBLASLt would offer kernels that demand sizes in multiples
        count=max(2, groups),
        m=m,
        n=max(1, n),
        k=max(1, k),
        lda=a.leading,
        ldb=b.leading,
        ldc=other.leading,
        ldd=d.leading,
        batch=batch,
        stride_a=between(a, c.type_a),
        stride_b=between(b, c.type_b),
        stride_c=between(other, c.type_d),
        stride_d=between(d, c.type_d),
        trans_a=trans_a,
        trans_b=trans_b,
        bias_type=c.type_d if c.epilogue.bias else None,
        compute=c.compute_type,
        ragged="n" if non_contracting else "k" if contracting else "",
        # neither 1: a kernel made for one value must not be offered, since records bring any
        alpha=2.0,
        beta=2.0 if c.beta else 0.0,
    )
    empty = 0 in (c.m, c.n, c.batch_count) or groups == 0 or (contracting and c.k == 0)
    return HipblasltProblem(gemm, {"a": a, "b": b, "c": other, "d": d}, scans, groups, swapped, empty)


def patched_record(template: bytes, problem: HipblasltProblem, *, product: bool) -> bytes:
    """The record that all of a call's start from: the template with the extents and strides of exactly this call.

    Args:
        template: 196 bytes, hipBLASLt's own, which has its codes for the bias and the activation.
        problem: of the call's config. Its ragged extent does not matter: each record gets its own.
        product: false gives k = 0, so that A and B are not read.
    """
    record, g = bytearray(template), problem.gemm
    _EXTENTS.pack_into(record, 0, g.m, g.n & LARGEST, g.batch, g.k & LARGEST if product else 0)
    strides = (g.ldd, g.stride_d, g.ldc, g.stride_c, g.lda, g.stride_a, g.ldb, g.stride_b)
    _STRIDES.pack_into(record, _AT_STRIDES, *strides)
    return bytes(record)
