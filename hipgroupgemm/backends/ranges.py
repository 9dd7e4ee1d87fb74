"""Named ranges for profilers around an executable's launches: nvtx on CUDA, roctx on ROCm.

A range around a launch costs a microsecond or so, so they are made only where a profiler is attached, or where HIPGROUPGEMM_RANGES=1 asks
for them. NVIDIA's tools say so in NVTX_INJECTION64_PATH, AMD's in ROCP_TOOL_LIBRARIES or HSA_TOOLS_LIB.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig

__all__ = ["ENVIRONMENT_VARIABLE", "range_functions", "with_ranges"]

ENVIRONMENT_VARIABLE = "HIPGROUPGEMM_RANGES"
_PROFILERS = {"cuda": ("NVTX_INJECTION64_PATH",), "rocm": ("ROCP_TOOL_LIBRARIES", "HSA_TOOLS_LIB")}
_ROCTX = ("librocprofiler-sdk-roctx.so", "libroctx64.so", "libroctx64.so.4")

RangeFunctions = tuple[Callable[[str], object], Callable[[], object]]


def range_functions(kind: str) -> RangeFunctions | None:
    """(push, pop) for a kind of device, or None where nobody would see the ranges, or nothing that makes them is installed.

    HIPGROUPGEMM_RANGES=1 asks for them and 0 forbids them, whatever profiler there is.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE, "")
    wanted = any(os.environ.get(name) for name in _PROFILERS.get(kind, ())) if asked == "" else asked not in ("0", "off")
    if not wanted:
        return None
    return _nvtx() if kind == "cuda" else _roctx() if kind == "rocm" else None


@functools.lru_cache(1)
def _nvtx() -> RangeFunctions | None:
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        return None
    return nvtx.push_range, nvtx.pop_range


@functools.lru_cache(1)
def _roctx() -> RangeFunctions | None:
    for name in _ROCTX:
        with contextlib.suppress(OSError, AttributeError):  # no such library, or one without ranges
            library = ctypes.CDLL(name)
            push, pop = library.roctxRangePushA, library.roctxRangePop
            push.argtypes, push.restype, pop.argtypes, pop.restype = [ctypes.c_char_p], ctypes.c_int, [], ctypes.c_int
            return lambda text, push=push: push(text.encode()), pop
    return None


def with_ranges(executable: Executable, config: GroupedGemmConfig, kind: str, what: str) -> Executable:
    """The executable; where a profiler looks on, each of its executes is a range.

    Args:
        executable: what runs. config: the plan's. kind: the device's, "cuda" or "rocm". what: backend and algorithm.
    """
    functions = range_functions(kind)
    if functions is not None:
        (push, pop), plain, c = functions, executable.execute, config
        text = f"hipgroupgemm {c.ragged_mode.name} m={c.m} n={c.n} k={c.k} groups={c.group_count}: {what}"

        def execute(arguments: Arguments) -> None:
            push(text)
            try:
                plain(arguments)
            finally:
                pop()

        executable.execute = execute  # type: ignore[method-assign]
    return executable
