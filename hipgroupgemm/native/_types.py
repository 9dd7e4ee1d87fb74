"""Plain data of the native layer; the names and numbers are `include/hipgroupgemm.h`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RECORD_SIZE = 196
"""Bytes of one device record, and the distance between two."""

WORKSPACE_ALIGNMENT = 16
"""Bytes; also the alignment of an array of records."""

DATA_TYPES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 14,
    "float8_e4m3fn": 28,
    "float8_e5m2": 29,
    "float8_e4m3fnuz": 1000,
    "float8_e5m2fnuz": 1001,
}
"""Element types by name; the numbers are hipDataType's."""

COMPUTE_TYPES = {"float32": 0, "tf32": 1, "float16": 2, "bfloat16": 3, "float64": 4}
"""What is multiplied in, accumulating in float32 (float64 for float64); alpha and beta have the accumulator's type."""

RAGGED = {"n": 0, "m": 1, "k": 2, "": 3}
"""Which size differs on the device from record to record; "": none, a record has its problem's sizes or zero extent."""


@dataclass(frozen=True)
class GemmProblem:
    """What a grouped GEMM is made for: types, and the sizes that the launch grid and the choice of kernels come from.

    Column-major: D (m x n) = alpha * op(A) op(B) + beta * C, `count` times (2 or more). The ragged size is its capacity: what all records
    together may have of it.

    Attributes:
        type_a, type_b, type_c, type_d, bias_type: names in `DATA_TYPES`; bias_type is None without a bias, a vector of m elements that is
            added to every column of D.
        compute: a name in `COMPUTE_TYPES`. ragged: a name in `RAGGED`.
        trans_a, trans_b: whether A is stored k x m, B n x k.
        lda, ldb, ldc, ldd: leading dimensions in elements. stride_a, stride_b, stride_c, stride_d: batch strides, likewise.
        alpha, beta: what the template record gets.
    """

    type_a: str
    type_b: str
    type_c: str
    type_d: str
    count: int
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    ldd: int
    batch: int = 1
    stride_a: int = 0
    stride_b: int = 0
    stride_c: int = 0
    stride_d: int = 0
    trans_a: bool = False
    trans_b: bool = False
    bias_type: str | None = None
    compute: str = "float32"
    ragged: str = "n"
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True)
class NativeAlgorithm:
    """One algorithm of hipBLASLt, for a grouped GEMM's problem.

    Attributes:
        index: hipBLASLt's solution index; another process may number differently: only good with `name`.
        name: the solution's name, with all its parameters.
        kernel_name: of the kernel that it launches; several solutions may share it.
        workspace_size: bytes that it needs (0 when not supported).
        supported: whether it takes the problem.
        verified: false if it divides k between workgroups, or the work by the sizes on the host: with records on the device it would be
            wrong, and `initialize` refuses it.
    """

    index: int
    name: str
    kernel_name: str
    workspace_size: int
    supported: bool
    verified: bool


class HandleInfo(NamedTuple):
    """What a handle is; versions are (major, minor, patch)."""

    device: int
    built_for: tuple[int, int, int]
    loaded: tuple[int, int, int]
    revision: str
    instances: int
