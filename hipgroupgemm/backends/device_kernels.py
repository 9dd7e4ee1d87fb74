"""The package's own kernels (`device/kernels.cpp`), compiled for a device at run time, and pinned memory for host values."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.scan_arguments import SIZE
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.parameters import Blob, KernelParameters
from hipgroupgemm.views import ArrayView, packed_strides

__all__ = ["DeviceKernels", "PinnedRing", "kernel_sources"]

THREADS = 256  # HGG_THREADS
_FILL_SHARE = 32  # HGG_FILL_SHARE
_HEADERS = ("arguments.h", "finish.h", "numbers.h", "portable.h", "records.h", "scan.h", "tiles.h")


def kernel_sources() -> tuple[str, dict[str, str]]:
    """The text of kernels.cpp, and of every header that it includes, by name."""

    def read(folder: str, name: str) -> str:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read()

    device = native.device_folder()
    headers = {name: read(device, name) for name in _HEADERS}
    headers["user_arguments.h"] = read(native.include_folder(), "user_arguments.h")
    return read(device, "kernels.cpp"), headers


class DeviceKernels:
    """hgg_fill, hgg_scan and hgg_finish on one device. All take the 648 bytes of `ScanArguments` by value."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        source, headers = kernel_sources()
        module = runtime.module_from_source(source, "hipgroupgemm_kernels.cpp", ("-std=c++17",), device, headers)
        self._runtime = runtime
        self._fill, self._scan, self._finish = (module.get_function(name) for name in ("hgg_fill", "hgg_scan", "hgg_finish"))
        self._parameters = KernelParameters([Blob(SIZE)])
        self._finish_grid = 2 * runtime.multiprocessor_count(device)

    def fill(self, arguments: bytearray, places: int, stream: int) -> None:
        """Launches hgg_fill over `places` groups and surplus records."""
        self._launch(self._fill, arguments, min(max(1, -(-places // _FILL_SHARE)), 256), stream)

    def scan(self, arguments: bytearray, places: int, tile_capacity: int, stream: int) -> None:
        """Launches hgg_scan over `places` groups; `tile_capacity` 0 where no tile table is written."""
        grid = min(max(1, -(-tile_capacity // 1024)), 32) if tile_capacity else min(max(1, -(-places // _FILL_SHARE)), 256)
        self._launch(self._scan, arguments, grid, stream)

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

        host = np.ascontiguousarray(numpy_view(view.pointer, view.shape, view.strides, view.dtype))
        if host.nbytes:
            piece, event = self._piece()
            ctypes.memmove(piece, host.ctypes.data, host.nbytes)
            self._runtime.memcpy_async(address, piece, host.nbytes, stream)
            self._runtime.record_event(event, stream)
        strides = packed_strides(view.shape, view.dtype.itemsize)
        return ArrayView(address, view.shape, strides, view.dtype, view.device, view.framework, owner=view.owner)

    def read(self, address: int, nbytes: int, stream: int) -> bytes:
        """Bytes of device memory, once the stream has come to them. Waits."""
        piece, event = self._piece()
        self._runtime.memcpy_async(piece, address, nbytes, stream)
        self._runtime.record_event(event, stream)
        self._runtime.synchronize_event(event)
        return ctypes.string_at(piece, nbytes)

    def close(self) -> None:
        """Frees the pieces."""
        pieces, self._pieces = self._pieces, []
        for address, event in pieces:
            self._runtime.destroy_event(event)
            self._runtime.host_free(address, self._device)
