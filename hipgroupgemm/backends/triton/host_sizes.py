"""Sizes that lie on the host: brought to the device from pinned memory, in the stream's order."""

from __future__ import annotations

import dataclasses

import numpy as np

from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.operands.views import ArrayView, numpy_view, packed_strides
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.pinned import PinnedRing

__all__ = ["HostSizes"]


class HostSizes:
    """Sizes of up to `count` groups on one stream. They become int64, for which the scan has a kernel of its own."""

    def __init__(self, runtime: Runtime, device: int, stream: int, count: int) -> None:
        self._ring, self._stream = PinnedRing(runtime, device, 8 * count), stream

    def copy(self, sizes: ArrayView, destination: int) -> int:
        """Starts copying host sizes to `destination` on the device, packed as int64; returns it."""
        values = numpy_view(sizes.pointer, sizes.shape, sizes.strides, sizes.dtype)
        self._ring.put(values.astype(np.int64), destination, self._stream)  # validated already, so nothing is cut
        return destination

    @staticmethod
    def described(arguments: Arguments) -> Arguments:
        """The call with its sizes as they lie on the device after `copy`."""
        view = arguments.group_sizes
        packed = ArrayView(0, view.shape, packed_strides(view.shape, 8), np.dtype(np.int64), view.device, view.framework)
        return dataclasses.replace(arguments, group_sizes=packed)

    def close(self) -> None:
        """Frees the pinned memory once the device has read it."""
        self._ring.close()
