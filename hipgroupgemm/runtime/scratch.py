"""The scratch memory of a plan: what its executes on one stream use, and what each graph capture uses.

A graph uses the addresses that it was captured with at every launch. So a capture gets memory of its own, which stays until the plan is
closed; `close()` then gives all of it back. How a backend's executable (one for each plan and stream) uses it::

    self.scratch = Scratch(runtime, device, stream, nbytes)   # allocates nothing yet, so it may be made during a capture
    self.scratch.reserve()                                    # in prepare(): allocates ahead; nothing during a capture

    capture = runtime.capture_id(stream)                      # once a call; 0 outside captures
    base = self.scratch.pointer(capture)                      # zeros when it is new; one address for each capture

    for base in self.scratch.addresses(): ...                 # check(): every address that may hold a fault
    self.scratch.in_graph()                                   # whether a capture used it
    self.scratch.close()

An executable that needs more for each capture than memory, a GroupedGemm say, makes it with :class:`PerCapture`::

    self.slots = PerCapture(make)                             # make(capture) -> anything with close()
    slot = self.slots.get(capture)

and its memory with :class:`ScratchMemory`. What `make` does during a capture it does inside ``runtime.relaxed_capture()``.

The plan's lock protects all of this: not two threads at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.memory import ALIGNMENT, Buffer, default_allocator, user_allocator

__all__ = ["PerCapture", "Scratch", "ScratchMemory", "pack_sections"]


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)


def pack_sections(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of sections of the given sizes (bytes), each 256-byte aligned; and the size of them all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class ScratchMemory:
    """One piece of device memory, 256-byte aligned and zeroed.

    It is memory of the driver's own, or of the allocator that :func:`.set_allocator` named. A graph's always is the driver's: a pool
    could not know how long the graph lives. It is zeroed on a stream of its own, so that a capture records nothing of it.

    Args:
        runtime, device: where. stream: handle of the stream that it is used on. nbytes: its size.
        graph: whether graphs may hold its address; then only :meth:`close` frees it, and forgetting it does not.
    """

    def __init__(self, runtime: Runtime, device: int, stream: int, nbytes: int, *, graph: bool = False) -> None:
        self.runtime, self.device, self.nbytes, self.graph = runtime, device, nbytes, graph
        self.address = self._plain = 0
        self._buffer: Buffer | None = None
        if not nbytes:
            return
        allocator = None if graph else user_allocator(runtime.kind)
        with runtime.use_device(device):
            if allocator is not None:
                # it need not align to 256 bytes, so there is room to
                self._buffer = Buffer(allocator, nbytes + ALIGNMENT - 1, device, stream)
                self.address = -(-self._buffer.ptr // ALIGNMENT) * ALIGNMENT
            else:
                self.address = self._plain = default_allocator(runtime).allocate(nbytes, device)
            try:
                self._fill(stream)
            except BaseException:
                self.close()
                raise

    def _fill(self, stream: int) -> None:
        runtime = self.runtime
        if not self.graph:
            runtime.memset_async(self.address, 0, self.nbytes, stream)
            return
        with runtime.relaxed_capture():
            own = runtime.create_stream(self.device)
            try:
                runtime.memset_async(self.address, 0, self.nbytes, own)
                runtime.synchronize_stream(own)
            finally:
                runtime.destroy_stream(own)

    def close(self) -> None:
        """Gives the memory back: the driver's once the device has finished, an allocator's in the order of the stream."""
        plain, self._plain, buffer, self._buffer, self.address = self._plain, 0, self._buffer, None, 0
        if self.runtime._forked:
            return  # the memory is the parent's
        if buffer is not None:
            buffer.release()
        if plain:
            self.runtime.free_plain(plain, self.device)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be gone by then
        if getattr(self, "_plain", 0) and not self.graph and not is_finalizing():
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self.close()


class PerCapture(Generic[_T]):
    """One thing for the plain calls of a stream and one for each capture, made when it is first asked for.

    ``make`` is called with the capture's number, 0 for plain calls; what it returns has ``close()``.
    """

    def __init__(self, make: Callable[[int], _T]) -> None:
        self._make = make
        self._made: dict[int, _T] = {}
        self._closed = False

    def get(self, capture: int) -> _T:
        """What belongs to a capture (``runtime.capture_id``); RuntimeError once this is closed."""
        found = self._made.get(capture)
        if found is None:
            if self._closed:
                raise RuntimeError("scratch: used after close(); make a new plan")
            found = self._made[capture] = self._make(capture)
        return found

    def all(self) -> list[_T]:
        """What was made so far."""
        return list(self._made.values())

    def in_graph(self) -> bool:
        """Whether a capture has asked."""
        return any(self._made)

    def close(self) -> None:
        """Closes all; graphs that were captured must not be launched any more. A second call does nothing."""
        self._closed = True
        while self._made:
            self._made.popitem()[1].close()


class Scratch(PerCapture[ScratchMemory]):
    """Scratch memory of ``nbytes`` bytes on one stream, and as much again for each capture; see the top of this file."""

    def __init__(self, runtime: Runtime, device: int, stream: int, nbytes: int) -> None:
        super().__init__(lambda capture: ScratchMemory(runtime, device, stream, nbytes, graph=bool(capture)))
        self.runtime, self.device, self.stream, self.nbytes = runtime, device, stream, nbytes

    def reserve(self) -> None:
        """Allocates ahead what plain calls use; does nothing while the stream is captured."""
        with self.runtime.use_device(self.device):
            if not self.runtime.capture_id(self.stream):
                self.get(0)

    def pointer(self, capture: int) -> int:
        """The address for a call, a multiple of 256; ``capture`` is ``runtime.capture_id(stream)``. RuntimeError after :meth:`close`."""
        return self.get(capture).address

    def addresses(self) -> list[int]:
        """The addresses of all memory that is in use."""
        return [piece.address for piece in self.all()]
