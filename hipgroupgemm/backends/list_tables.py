"""Device tables of the addresses of operands that are lists, one array per group. Kernels find a group's array in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.pinned import PinnedRing

__all__ = ["ListTables"]

MAP_BYTES = 128  # of a tensor map
_ALIGNMENT = 64  # of one

Lists = dict[str, tuple[int, ...]]


class ListTables:
    """The tables of one plan on one stream, in memory of the plan's scratch.

    They are written in the order of the stream, from pinned memory, when an address is another than the one that they hold. The tables of a
    graph capture are written by the graph itself, at every launch, with the addresses of the capture.

    Args:
        runtime, device, stream: where.
        key: the plan's config. maps: whether a table of tensor maps goes with that of rhs or out.

    Attributes:
        nbytes: that they take, at a multiple of 64. offsets: by role, and by "rhs_maps" or "out_maps".
        held: the addresses that are in the tables of plain calls.
    """

    def __init__(self, runtime: Runtime, device: int, stream: int, key: GroupedGemmConfig, *, maps: bool = False) -> None:
        self._runtime, self._device, self._stream = runtime, device, stream
        self._roles = ["rhs"] if key.rhs_listed else [] if not key.out_listed else ["out", "c"] if key.beta else ["out"]
        self.maps = f"{self._roles[0]}_maps" if maps and self._roles else ""
        self.offsets = {self.maps: 0} if self.maps else {}
        self.nbytes = MAP_BYTES * key.group_count if self.maps else 0
        for role in self._roles:
            self.offsets[role], self.nbytes = self.nbytes, self.nbytes + 8 * key.group_count
        self.held: Lists = {}
        self._held: dict[int, Lists] = {}  # by capture
        self._ring = PinnedRing(runtime, device, self.nbytes)
        self._pinned: list[int] = []  # what graphs copy from

    def write(self, lists: Lists, base: int, capture: int, write_maps: Callable[[Sequence[int], int], None] | None = None) -> None:
        """Brings the tables at a device address up to date, for the stream's later work.

        Args:
            lists: the addresses, by role. base: where the tables of this capture lie. capture: its number, 0 for plain calls.
            write_maps: writes tensor maps of arrays at these addresses to a host address.
        """
        if self._held.get(capture) == lists:
            return
        lists = dict(lists)  # the caller may change his own
        self._held[capture] = {}
        self.held = self.held if capture else {}
        storage = np.empty(self.nbytes + _ALIGNMENT, np.uint8)
        start = -storage.ctypes.data % _ALIGNMENT
        tables = storage[start : start + self.nbytes]
        for role in self._roles:
            at = self.offsets[role]
            tables[at : at + 8 * len(lists[role])] = np.array(lists[role], np.uint64).view(np.uint8)
        if write_maps is not None and self.maps:
            write_maps(lists[self._roles[0]], tables.ctypes.data)
        if capture:
            self._pinned.append(self._runtime.host_malloc(self.nbytes, self._device))
            ctypes.memmove(self._pinned[-1], tables.ctypes.data, self.nbytes)
            self._runtime.memcpy_async(base, self._pinned[-1], self.nbytes, self._stream)
        else:
            self._ring.put(tables, base, self._stream)
            self.held = lists
        self._held[capture] = lists

    def close(self) -> None:
        """Frees the pinned memory; graphs that were captured must not be launched any more."""
        self._held.clear()
        self._ring.close()
        while self._pinned:
            pinned = self._pinned.pop()
            if not self._runtime._forked:
                self._runtime.host_free(pinned, self._device)
