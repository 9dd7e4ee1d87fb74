"""The package's own kernels (`device/kernels.cpp`), compiled for a device at run time, and pinned memory for host values."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.scan_arguments import SIZE
from hipgroupgemm.operands.views import ArrayView, packed_strides
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.parameters import Blob, KernelParameters

__all__ = ["THREADS", "DeviceKernels", "PinnedRing", "kernel_headers", "scan_blocks"]

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
    """hgg_fill and hgg_finish on one device. Both take the 648 bytes of `ScanArguments` by value."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        source = _read(native.device_folder(), "kernels.cpp")
        module = runtime.module_from_source(source, "hipgroupgemm_kernels.cpp", ("-std=c++17",), device, kernel_headers())
        self._runtime = runtime
        self._fill, self._finish = (module.get_function(name) for name in ("hgg_fill", "hgg_finish"))
        self._parameters = KernelParameters([Blob(SIZE)])
        self._finish_grid = 2 * runtime.multiprocessor_count(device)

    def fill(self, arguments: bytearray, places: int, stream: int) -> None:
        """Launches hgg_fill over `places` groups and surplus records."""
        self._launch(self._fill, arguments, scan_blocks(places), stream)

    def finish(self, arguments: bytearray, stream: int) -> None:
        """Launches hgg_finish."""
        self._launch(self._finish, arguments, self._finish_grid, stream)

    def _launch(self, function: Any, arguments: bytearray, grid: int, stream: int) -> None:
        self._parameters[0] = arguments
        self._runtime.launch(function, (grid, 1, 1), (THREADS, 1, 1), 0, stream, self._parameters)


class PinnedRing:
    """A few pieces of pinned host memory, used in turn; a piece is used again once the copy from it has ended.

    Args:
        runtime, device: whose copies it serves. nbytes: the largest copy. depth: pieces.
    """

    def __init__(self, runtime: Runtime, device: int, nbytes: int, depth: int = 4) -> None:
        self._runtime, self._device, self._nbytes, self._depth = runtime, device, max(nbytes, 64), depth
        self._pieces: list[tuple[int, int]] = []  # (address, event)
        self._next = 0

    def _piece(self) -> tuple[int, int]:
        if len(self._pieces) < self._depth:
            made = (self._runtime.host_malloc(self._nbytes, self._device), self._runtime.create_event(self._device))
            self._pieces.append(made)
            return made
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % self._depth
        self._runtime.synchronize_event(piece[1])
        return piece

    def copy(self, view: ArrayView, address: int, stream: int) -> ArrayView:
        """Copies host integers, packed, to a device address in the order of the stream; returns their view there."""
        from hipgroupgemm.backends.reference import numpy_view

        self.put(numpy_view(view.pointer, view.shape, view.strides, view.dtype), address, stream)
        strides = packed_strides(view.shape, view.dtype.itemsize)
        return ArrayView(address, view.shape, strides, view.dtype, view.device, view.framework, owner=view.owner)

    def put(self, values: np.ndarray[Any, Any], address: int, stream: int) -> None:
        """Copies an array, packed, to a device address in the order of the stream."""
        host = np.ascontiguousarray(values)
        if host.nbytes:
            piece, event = self._piece()
            ctypes.memmove(piece, host.ctypes.data, host.nbytes)
            self._runtime.memcpy_async(address, piece, host.nbytes, stream)
            self._runtime.record_event(event, stream)

    def read(self, address: int, nbytes: int, stream: int) -> bytes:
        """Bytes of device memory, once the stream has come to them. Waits."""
        piece, event = self._piece()
        self._runtime.memcpy_async(piece, address, nbytes, stream)
        self._runtime.record_event(event, stream)
        self._runtime.synchronize_event(event)
        return ctypes.string_at(piece, nbytes)

    def close(self) -> None:
        """Frees the pieces, once the copies from them have ended."""
        pieces, self._pieces = self._pieces, []
        for address, event in pieces:
            self._runtime.synchronize_event(event)
            self._runtime.destroy_event(event)
            self._runtime.host_free(address, self._device)
