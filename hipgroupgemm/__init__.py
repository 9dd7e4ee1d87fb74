"""Grouped GEMM (ragged dot) for mixture-of-experts layers, on AMD Instinct and NVIDIA GPUs and on CPUs.

`ragged_dot` and `ragged_dot_general` are JAX's functions of these names for NumPy, CuPy, torch, JAX and Numba arrays.
`GroupedMatmulPlan` runs one `GroupedGemmConfig` many times and shows, pins, tunes and explains its algorithms; its `autotune` returns a
`TuningReport`.
"""

from typing import TYPE_CHECKING

from hipgroupgemm import hooks
from hipgroupgemm.api import (
    clear_plan_cache,
    config_for_ragged_dot,
    ragged_dot,
    ragged_dot_general,
    ragged_dot_reference,
)
from hipgroupgemm.backends import backend_names, register_backend, unregister_backend
from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.config import Epilogue, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.arrays import ArraySpec, as_array
from hipgroupgemm.operands.device_array import DeviceArray, set_allocator
from hipgroupgemm.operands.views import Device
from hipgroupgemm.plan import GroupedMatmulPlan
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers
from hipgroupgemm.version import __version__

if TYPE_CHECKING:
    from hipgroupgemm.tuning.report import TuningReport

__all__ = [
    "ArraySpec",
    "Device",
    "DeviceArray",
    "Epilogue",
    "GroupedGemmConfig",
    "GroupedMatmulPlan",
    "MatmulAlgorithm",
    "RaggedDotDimensionNumbers",
    "RaggedDotMode",
    "TuningReport",
    "__version__",
    "as_array",
    "backend_names",
    "clear_plan_cache",
    "config_for_ragged_dot",
    "ragged_dot",
    "ragged_dot_general",
    "ragged_dot_reference",
    "register_backend",
    "set_allocator",
    "unregister_backend",
]


def __getattr__(name: str) -> object:
    if name == "TuningReport":  # a plan's autotune() returns one; nothing else needs it
        found: object = hooks.resolve(name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
