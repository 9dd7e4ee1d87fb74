"""Device memory: who allocates it, and how it is used again.

An *allocator* is a function ``(nbytes, device, stream) -> allocation``; the allocation has ``ptr`` (device address) and, if it wants to be
told, ``release()``. CuPy's pool, torch's caching allocator or JAX's can stand behind one: :func:`set_allocator`. Without one,
:class:`StreamAllocator` keeps what is released for the next request on the same stream.

The drivers' own pools (cuMemAllocAsync, hipMallocAsync) are not used: memory goes back to one on its stream, which may be destroyed or
under capture by the time that the garbage collector finds the last array; and they hold 32 MiB after everything was given back.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hipgroupgemm.runtime.errors import DeviceMemoryError
from hipgroupgemm.runtime.forks import new_lock

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime

__all__ = ["ALIGNMENT", "Allocation", "Allocator", "Buffer", "StreamAllocator", "allocate", "default_allocator", "set_allocator"]

ALIGNMENT = 256
"""Bytes. Every scratch address is a multiple of this."""


class Allocation(Protocol):
    """What an allocator returns: memory that is the caller's until it is released, in the order of the stream that it was made for."""

    @property
    def ptr(self) -> int: ...  # noqa: D102

    def release(self) -> None: ...  # noqa: D102


Allocator = Callable[[int, int, int], Allocation]
"""``(nbytes, device, stream) -> Allocation``."""

_Place = tuple[int, int, int]  # (device, stream key, bytes)

_user_allocators: dict[str | None, Allocator] = {}


def set_allocator(allocator: Allocator | None, kind: str | None = None) -> Allocator | None:
    """Replace the function that allocates outputs and scratch.

    Args:
        allocator: ``(nbytes, device, stream) -> allocation``, with device and stream as ints; the allocation has the device address in
            ``ptr`` and may have ``release()`` (without one it is released by being forgotten, as CuPy's MemoryPointer is). None restores
            the built-in one.
        kind: "cuda" or "rocm", or None for both.

    Returns:
        What was set before under the same ``kind``, or None.

    Scratch of a graph capture never comes from here: a pool may hand it out again while the graph still lives.

    Raises:
        TypeError: ``allocator`` can't be called.
        ValueError: another kind.
    """
    if allocator is not None and not callable(allocator):
        raise TypeError(f"allocator: got a {type(allocator).__name__}; want a function (nbytes, device, stream) -> allocation")
    if kind not in (None, "cuda", "rocm"):
        raise ValueError(f"kind: got {kind!r}; want 'cuda', 'rocm' or None")
    before = _user_allocators.pop(kind, None)
    if allocator is not None:
        _user_allocators[kind] = allocator
    return before


def user_allocator(kind: str) -> Allocator | None:
    """The caller's allocator for a kind of device, where :func:`set_allocator` has named one."""
    return _user_allocators.get(kind) or _user_allocators.get(None)


class Buffer:
    """Device memory at ``ptr`` (0 for 0 bytes) from an allocator, given back once: by :meth:`release`, or when forgotten."""

    __slots__ = ("_allocation", "ptr")

    def __init__(self, allocator: Allocator, nbytes: int, device: int, stream: int) -> None:
        self._allocation: Allocation | None = None
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
        self.ptr = 0
        if nbytes:
            allocation = allocator(nbytes, device, stream)
            self.ptr = int(getattr(allocation, "ptr", 0) or 0)
            if not self.ptr:
                got = f"a {type(allocation).__name__} for {nbytes} bytes"
                raise TypeError(f"allocator: returned {got}; want an object whose ptr is a device address")
            self._allocation = allocation

    def release(self) -> None:
        """Give the memory back to its allocator. A second call does nothing."""
        allocation, self._allocation, self.ptr = self._allocation, None, 0
        release = getattr(allocation, "release", None)
        if release is not None:
            release()

    def __del__(self) -> None:
        if getattr(self, "_allocation", None) is not None:
            self.release()


def allocate(runtime: Runtime, nbytes: int, device: int, stream: int) -> Buffer:
    """Device memory from the allocator in force: the caller's, or the built-in one of the runtime."""
    return Buffer(user_allocator(runtime.kind) or default_allocator(runtime), nbytes, device, stream)


def size_class(nbytes: int) -> int:
    """The size that a request is rounded up to: at most an eighth more, in steps of at least 512 bytes.

    Eight steps an octave, so that outputs whose row count changes a little from call to call share a class.
    """
    step = max(512, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class _Block:
    """One allocation of a :class:`StreamAllocator`, in the hands of a caller."""

    __slots__ = ("_owner", "captured", "place", "ptr")

    def __init__(self, owner: StreamAllocator, ptr: int, place: _Place, *, captured: bool = False) -> None:
        self._owner: StreamAllocator | None = owner
        self.ptr, self.place, self.captured = ptr, place, captured

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._returned.append(self)  # no lock and no driver call: a finaliser may run this anywhere, within an allocation too


class StreamAllocator:
    """Keeps released blocks for requests of their size on their stream.

    That is safe without waiting: what the stream does next comes after what it did with the block. Memory that other streams still use
    must be synchronised with its own stream before it is released, as with any stream-ordered allocator. What is allocated while its
    stream is being captured is never used again for something else; it must outlive the graph.

    For each device ``limit_bytes`` are kept at most; an eighth of its memory when left out.
    """

    def __init__(self, runtime: Runtime, limit_bytes: int | None = None) -> None:
        self.runtime, self.limit_bytes = runtime, limit_bytes
        self._lock = new_lock()
        self._free: dict[_Place, list[int]] = {}  # addresses
        self._kept: collections.Counter[int] = collections.Counter()  # bytes by device
        self._returned: collections.deque[_Block] = collections.deque()

    def __call__(self, nbytes: int, device: int, stream: int) -> Allocation:
        """Memory for use on ``stream``; DeviceMemoryError when none is left, even after giving back what is kept."""
        runtime = self.runtime
        with runtime.use_device(device):  # CUDA cannot say anything about a stream in a thread without a context
            if runtime.is_capturing(stream):
                return _Block(self, runtime.malloc_plain(nbytes, device), (device, 0, nbytes), captured=True)
            place = (device, runtime.stream_key(stream), size_class(nbytes))
        ptr, surplus = 0, []
        with self._lock:
            if self._returned:
                surplus = self._take_returned()
            blocks = self._free.get(place)
            if blocks:
                ptr = blocks.pop()
                self._kept[device] -= place[2]
        self._give_back(surplus)
        return _Block(self, ptr or self.allocate(place[2], device), place)

    def allocate(self, nbytes: int, device: int) -> int:
        """Memory of the driver's; what is kept goes back to it where none is left."""
        try:
            return self.runtime.malloc_plain(nbytes, device)
        except DeviceMemoryError:
            if not self.trim(device):
                raise
        return self.runtime.malloc_plain(nbytes, device)

    def kept_bytes(self, device: int) -> int:
        """Bytes that are kept for later requests on a device."""
        with self._lock:
            surplus = self._take_returned()
            kept = self._kept[device]
        self._give_back(surplus)
        return kept

    def trim(self, device: int | None = None) -> int:
        """Give what is kept back to the driver (waits for the device); how many bytes that were."""
        with self._lock:
            surplus = self._take_returned()
            for place in [p for p in self._free if device is None or p[0] == device]:
                surplus += [(ptr, place) for ptr in self._free.pop(place)]
                self._kept[place[0]] = 0
        self._give_back(surplus)
        return sum(nbytes for _, (_, _, nbytes) in surplus)

    def _take_returned(self) -> list[tuple[int, _Place]]:
        """Sort released blocks in; those to free. Holds the lock."""
        surplus: list[tuple[int, _Place]] = []
        while self._returned:
            block = self._returned.popleft()
            device, _, nbytes = block.place
            limit = self.runtime.device_info(device).memory_bytes // 8 if self.limit_bytes is None else self.limit_bytes
            if block.captured or self._kept[device] + nbytes > limit:
                surplus.append((block.ptr, block.place))
            else:
                self._free.setdefault(block.place, []).append(block.ptr)
                self._kept[device] += nbytes
        return surplus

    def _give_back(self, blocks: list[tuple[int, _Place]]) -> None:
        for ptr, (device, _, _) in blocks:
            self.runtime.free_plain(ptr, device)


@functools.cache
def default_allocator(runtime: Runtime) -> StreamAllocator:
    """The built-in allocator of a runtime; one object per runtime, which in a forked child is as dead as that."""
    return StreamAllocator(runtime)
