"""Sizes that lie on the host: brought to the device from pinned memory, in the stream's order."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.backends.reference import numpy_view
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.views import ArrayView, packed_strides

__all__ = ["HostSizes"]

_SLOTS = 4


class HostSizes:
    """A ring of pinned copies; a slot is written again only when the device has read it."""

    def __init__(self, runtime: Runtime, device: int, stream: int) -> None:
        self._runtime, self._device, self._stream = runtime, device, stream
        self._slots: list[tuple[int, int]] = []  # (pinned address, event)
        self._bytes = 0
        self._next = 0

    def copy(self, sizes: ArrayView, destination: int) -> int:
        """Starts copying host sizes to `destination` on the device, packed as int64; returns it."""
        host = np.ascontiguousarray(self._wide(sizes))
        if host.nbytes == 0:
            return destination
        if host.nbytes > self._bytes:
            self._release()
            self._bytes = host.nbytes
        if len(self._slots) < _SLOTS:
            slot = (self._runtime.host_malloc(self._bytes, self._device), self._runtime.create_event(self._device))
            self._slots.append(slot)
        else:
            slot = self._slots[self._next]
            self._next = (self._next + 1) % _SLOTS
            self._runtime.synchronize_event(slot[1])
        ctypes.memmove(slot[0], host.ctypes.data, host.nbytes)
        self._runtime.memcpy_async(destination, slot[0], host.nbytes, self._stream)
        self._runtime.record_event(slot[1], self._stream)
        return destination

    @staticmethod
    def _wide(sizes: ArrayView) -> Any:
        values = numpy_view(sizes.pointer, sizes.shape, sizes.strides, sizes.dtype)
        return values.astype(np.int64)  # validated already, so nothing is cut

    @staticmethod
    def described(arguments: Arguments) -> Arguments:
        """The call with its sizes as they lie on the device after `copy`."""
        view = arguments.group_sizes
        packed = ArrayView(0, view.shape, packed_strides(view.shape, 8), np.dtype(np.int64), view.device, view.framework)
        return dataclasses.replace(arguments, group_sizes=packed)

    def _release(self) -> None:
        for pinned, event in self._slots:
            self._runtime.synchronize_event(event)
            self._runtime.host_free(pinned, self._device)
            self._runtime.destroy_event(event)
        self._slots, self._next = [], 0

    def close(self) -> None:
        """Frees the pinned memory once the device has read it."""
        self._release()
