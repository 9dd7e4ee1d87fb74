"""The package's own kernels (`device/kernels.cpp`), compiled for a device at run time."""

from __future__ import annotations

import functools
import os
from typing import Any

from hipgroupgemm import native
from hipgroupgemm.backends.scan_arguments import SIZE
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.objects import PreparedLaunch
from hipgroupgemm.runtime.parameters import Blob, KernelParameters

__all__ = ["THREADS", "DeviceKernels", "kernel_headers", "scan_blocks"]

THREADS = 256  # HGG_THREADS
_FILL_SHARE = 32  # HGG_FILL_SHARE


@functools.lru_cache(1)
def kernel_headers() -> dict[str, str]:
    """The text of every header that device sources may include, by name."""
    folders = (native.device_folder(), native.include_folder())
    return {name: _read(folder, name) for folder in folders for name in sorted(os.listdir(folder)) if name.endswith(".h")}


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read()


def scan_blocks(places: int, tile_capacity: int = 0) -> int:
    """Blocks of a scan's grid, as `device/arguments.h` advises: `places` sizes, `tile_capacity` table entries (0: no table)."""
    if tile_capacity:
        return min(max(1, -(-tile_capacity // 1024)), 32)
    return min(max(1, -(-places // _FILL_SHARE)), 256)


class DeviceKernels:
    """hgg_fill and hgg_zero_uncovered on one device. Both take the 648 bytes of `ScanArguments` by value."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        source = _read(native.device_folder(), "kernels.cpp")
        module = runtime.module_from_source(source, "hipgroupgemm_kernels.cpp", ("-std=c++17",), device, kernel_headers())
        self._runtime = runtime
        self._fill, self._zero_uncovered = (module.get_function(name) for name in ("hgg_fill", "hgg_zero_uncovered"))
        self._parameters = KernelParameters([Blob(SIZE)])
        self._uncovered_grid = 2 * runtime.device_info(device).multiprocessors

    def fill(self, arguments: bytearray, places: int, stream: int) -> None:
        """Launches hgg_fill over `places` groups and surplus records."""
        self._launch(self._fill, arguments, scan_blocks(places), stream)

    def zero_uncovered(self, arguments: bytearray, stream: int) -> None:
        """Launches hgg_zero_uncovered."""
        self._launch(self._zero_uncovered, arguments, self._uncovered_grid, stream)

    def prepare(self, parameters: KernelParameters, places: int) -> tuple[PreparedLaunch, PreparedLaunch]:
        """Launches of hgg_fill and hgg_zero_uncovered with parameters of their own (one Blob of `ScanArguments`)."""
        grids = (self._fill, scan_blocks(places)), (self._zero_uncovered, self._uncovered_grid)
        fill, uncovered = (
            self._runtime.prepare_launch(function, (grid, 1, 1), (THREADS, 1, 1), 0, 0, parameters) for function, grid in grids
        )
        return fill, uncovered

    def _launch(self, function: Any, arguments: bytearray, grid: int, stream: int) -> None:
        self._parameters[0] = arguments
        self._runtime.launch(function, (grid, 1, 1), (THREADS, 1, 1), 0, stream, self._parameters)
