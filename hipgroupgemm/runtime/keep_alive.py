"""Objects that the device still needs: kept until their stream has passed the call that uses them.

For operands of frameworks whose allocator does not know our stream. JAX, say, hands the memory of a dropped array to its next operation
on its own stream, while our kernel may still wait on another.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hipgroupgemm.runtime.forks import new_lock

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime

__all__ = ["LIMIT", "KeptObjects"]

LIMIT = 16
"""Calls of one stream that may be pending; one more waits for the oldest. Enough to keep a device busy, and no more memory than that."""


class KeptObjects:
    """What one runtime's calls keep alive, by device and stream. Looked through at each :meth:`keep`; nothing waits for a device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = new_lock()
        self._pending: dict[tuple[int, int], deque[tuple[int, object]]] = {}  # (event, objects), the oldest first
        self._events: dict[int, list[int]] = {}  # to be used again, by device

    def keep(self, device: int, stream: int, objects: object) -> None:
        """Keeps ``objects`` until ``stream`` has done what it was given so far."""
        runtime = self._runtime
        passed: list[object] = []  # let go once the lock is free: that may run anything
        with self._lock, runtime.use_device(device), runtime.relaxed_capture():  # asking for an event would spoil a capture elsewhere
            events = self._events.setdefault(device, [])
            event = events.pop() if events else runtime.create_event(device)
            runtime.record_event(event, stream)
            calls = self._pending.setdefault((device, stream), deque())
            calls.append((event, objects))
            if len(calls) > LIMIT:
                runtime.synchronize_event(calls[0][0])
            for place in list(self._pending):
                self._sweep(place, passed)

    def _sweep(self, place: tuple[int, int], passed: list[object]) -> None:
        calls = self._pending[place]
        while calls and self._runtime.query_event(calls[0][0]):
            event, objects = calls.popleft()
            self._events[place[0]].append(event)
            passed.append(objects)
        if not calls:
            del self._pending[place]
