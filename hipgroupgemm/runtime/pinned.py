"""Pinned host memory: host values brought to a device, and small answers fetched from it."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import ArrayLike

from hipgroupgemm.runtime.base import Runtime

__all__ = ["PinnedRing"]


class PinnedRing:
    """``depth`` pieces of ``nbytes`` of pinned host memory, used in turn; a piece is used again once the copy from it has ended."""

    def __init__(self, runtime: Runtime, device: int, nbytes: int, depth: int = 4) -> None:
        self._runtime, self._device, self._nbytes, self._depth = runtime, device, max(nbytes, 64), depth
        self._pieces: list[tuple[int, int]] = []  # (host address, event)
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

    def put(self, values: ArrayLike, address: int, stream: int) -> None:
        """Copies an array, packed, to a device address in the order of the stream; returns at once."""
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
        if self._runtime._forked:
            return  # the memory is the parent's
        for address, event in pieces:
            self._runtime.synchronize_event(event)
            self._runtime.destroy_event(event)
            self._runtime.host_free(address, self._device)
