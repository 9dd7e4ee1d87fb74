"""hipBLASLt's grouped GEMM, through a C ABI of our own (``include/hipgroupgemm.h``).

Importing this loads nothing: the shim, hipBLASLt and the HIP runtime are found by the first :class:`Handle`,
or by :func:`load`. :func:`unavailable_reason` says what is missing, and what to install.
"""

from ._api import GroupedGemm, Handle
from ._errors import NativeError, NativeUnavailableError, NativeUnsupportedError, NativeValueError
from ._files import device_folder, include_folder
from ._loader import Library, load, shim_path, unavailable_reason
from ._types import (
    NO_LIMIT,
    RECORD_SIZE,
    WORKSPACE_ALIGNMENT,
    ComputeType,
    DataType,
    Epilogue,
    GroupedGemmInfo,
    HandleInfo,
    NativeAlgorithm,
    Ragged,
    TemplateRecord,
)

__all__ = [
    "NO_LIMIT",
    "RECORD_SIZE",
    "WORKSPACE_ALIGNMENT",
    "ComputeType",
    "DataType",
    "Epilogue",
    "GroupedGemm",
    "GroupedGemmInfo",
    "Handle",
    "HandleInfo",
    "Library",
    "NativeAlgorithm",
    "NativeError",
    "NativeUnavailableError",
    "NativeUnsupportedError",
    "NativeValueError",
    "Ragged",
    "TemplateRecord",
    "device_folder",
    "include_folder",
    "load",
    "shim_path",
    "unavailable_reason",
]
