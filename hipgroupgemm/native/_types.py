"""Constants, codes and plain data of the native layer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RECORD_SIZE = 196
"""Bytes of one device record, and the distance between two."""

WORKSPACE_ALIGNMENT = 16
"""Bytes; also the alignment of an array of records."""

NO_LIMIT = 2**64 - 1
"""As a limit on workspaces: none."""

Sizes = int | Sequence[int] | npt.NDArray[np.integer[Any]]


class DataType(enum.IntEnum):
    """Element types; the numbers are hipDataType's."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 14
    FLOAT8_E4M3FN = 28
    FLOAT8_E5M2 = 29
    FLOAT8_E4M3FNUZ = 1000
    FLOAT8_E5M2FNUZ = 1001


class ComputeType(enum.IntEnum):
    """Accumulation; alpha and beta have the same type (float32 for all but FLOAT64)."""

    FLOAT32 = 0
    FLOAT32_FAST_TF32 = 1
    FLOAT32_FAST_FLOAT16 = 2
    FLOAT32_FAST_BFLOAT16 = 3
    FLOAT64 = 4


class Ragged(enum.IntEnum):
    """Which of the sizes differ on the device from those that ``set_problem`` is given."""

    N = 0
    M = 1
    K = 2
    FIXED = 3
    """None: a record has its problem's sizes, or zero extent."""


class Epilogue(enum.IntEnum):
    """What follows the product."""

    DEFAULT = 0
    BIAS = 1
    """A vector of m elements, added to every column of D."""


@dataclass(frozen=True)
class NativeAlgorithm:
    """One algorithm of hipBLASLt, for the problem that its grouped GEMM had when it was asked.

    Attributes:
        index: hipBLASLt's solution index; another process may number differently: only good with ``name``.
        name: the solution's name, with all its parameters.
        kernel_name: of the kernel that it launches; several solutions may share it.
        workspace_size: bytes that it needs (0 when not supported).
        supported: whether it takes the problem.
        splits: it divides k between workgroups, by a second kernel that does not read device records as its
            own.
        stream_k: it divides the work by the sizes that were set, not by those on the device.
    """

    index: int
    name: str
    kernel_name: str
    workspace_size: int
    supported: bool
    splits: bool
    stream_k: bool

    @property
    def verified(self) -> bool:
        """Whether ``initialize`` takes it without being told so."""
        return not (self.splits or self.stream_k)


class TemplateRecord(NamedTuple):
    """hipBLASLt's own first record for a problem.

    Attributes:
        data: RECORD_SIZE bytes. The addresses in it mean nothing.
        bias_type: hipBLASLt's code for the bias's type, as records hold it.
        activation_type: its code for no activation.
    """

    data: bytes
    bias_type: int
    activation_type: int


class HandleInfo(NamedTuple):
    """What a handle is; versions are (major, minor, patch)."""

    device: int
    stream: int
    built_for: tuple[int, int, int]
    loaded: tuple[int, int, int]
    revision: str
    instances: int


@dataclass(frozen=True)
class GroupedGemmInfo:
    """State of a grouped GEMM: problems set, the algorithm's index or -1, the workspace's address and
    bytes."""

    count: int
    initialized: bool
    algorithm_index: int
    workspace: int
    workspace_size: int
    workspace_needed: int
