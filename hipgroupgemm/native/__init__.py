"""hipBLASLt's grouped GEMM, through a C ABI of our own (`include/hipgroupgemm.h`).

Importing this loads nothing: the shim, hipBLASLt and the HIP runtime are found by the first :class:`Handle`, or by :func:`load`.
:func:`unavailable_reason` says what is missing, and what to install; :func:`missing_kernel_files` which kernels hipBLASLt lists but lacks.
"""

from hipgroupgemm.native._api import GroupedGemm, Handle
from hipgroupgemm.native._errors import NativeError, NativeUnavailableError, NativeUnsupportedError, NativeValueError
from hipgroupgemm.native._files import device_folder, include_folder
from hipgroupgemm.native._loader import Library, load, missing_kernel_files, shim_path, unavailable_reason
from hipgroupgemm.native._types import (
    COMPUTE_TYPES,
    DATA_TYPES,
    RAGGED,
    RECORD_SIZE,
    WORKSPACE_ALIGNMENT,
    GemmProblem,
    HandleInfo,
    NativeAlgorithm,
)

__all__ = [
    "COMPUTE_TYPES",
    "DATA_TYPES",
    "RAGGED",
    "RECORD_SIZE",
    "WORKSPACE_ALIGNMENT",
    "GemmProblem",
    "GroupedGemm",
    "Handle",
    "HandleInfo",
    "Library",
    "NativeAlgorithm",
    "NativeError",
    "NativeUnavailableError",
    "NativeUnsupportedError",
    "NativeValueError",
    "device_folder",
    "include_folder",
    "load",
    "missing_kernel_files",
    "shim_path",
    "unavailable_reason",
]
