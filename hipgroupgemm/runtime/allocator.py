"""Device memory: who allocates it, and how it is used again.

An *allocator* is a function ``(nbytes, device, stream) -> allocation``; the allocation has ``ptr`` (device
address) and, if it wants to be told, ``release()``. CuPy's pool, torch's caching allocator or JAX's can stand
behind one: :func:`set_allocator`. Without one, :class:`StreamAllocator` allocates in stream order and keeps
what is released for the next request on the same stream.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .base import Runtime
from .errors import DeviceMemoryError

ALIGNMENT = 256
"""Bytes. Every scratch address is a multiple of this."""


@runtime_checkable
class Allocation(Protocol):
    """What an allocator returns: memory that is the caller's until it is released."""

    @property
    def ptr(self) -> int:
        """Device address; 0 for 0 bytes."""

    def release(self) -> None:
        """Give the memory back, in the order of the stream that it was allocated for."""


Allocator = Callable[[int, int, int], Allocation]
"""``(nbytes, device, stream) -> Allocation``."""

_user_allocators: dict[str | None, Allocator] = {}


def set_allocator(allocator: Allocator | None, kind: str | None = None) -> Allocator | None:
    """Replace the function that allocates outputs and scratch.

    Args:
        allocator: ``(nbytes, device, stream) -> allocation``, with device and stream as ints; the allocation
            has the device address in ``ptr`` and may have ``release()`` (without one it is released by being
            forgotten, as CuPy's MemoryPointer is). None restores the built-in one.
        kind: "cuda" or "rocm", or None for both.

    Returns:
        What was set before under the same ``kind``, or None.

    Memory that a graph capture uses never comes from here: a pool may hand it out again while the graph still
    lives.

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


def get_allocator(runtime: Runtime) -> Allocator:
    """The allocator that serves a runtime now: the caller's, or the built-in one of that runtime."""
    return user_allocator(runtime.kind) or default_allocator(runtime)


class Buffer:
    """Device memory from an allocator, given back once: by :meth:`release`, or when forgotten.

    Attributes:
        ptr: device address, 0 for 0 bytes.
        nbytes: size asked for.
        device: index of the device.
        stream: handle of the stream that it was allocated for.
    """

    __slots__ = ("_allocation", "device", "nbytes", "ptr", "stream")

    def __init__(self, allocator: Allocator, nbytes: int, device: int, stream: int) -> None:
        self._allocation: Allocation | None = None
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
        self.nbytes = nbytes
        self.device = device
        self.stream = stream
        self.ptr = 0
        if nbytes:
            allocation = allocator(nbytes, device, stream)
            ptr = getattr(allocation, "ptr", None)
            if ptr is None or int(ptr) == 0:
                raise TypeError(
                    f"allocator: returned a {type(allocation).__name__} for {nbytes} bytes; want an object whose ptr is a device address"
                )
            self._allocation = allocation
            self.ptr = int(ptr)

    def release(self) -> None:
        """Give the memory back to its allocator. A second call does nothing."""
        allocation, self._allocation = self._allocation, None
        self.ptr = 0
        if allocation is not None:
            release = getattr(allocation, "release", None)
            if release is not None:
                release()

    def __del__(self) -> None:
        if getattr(self, "_allocation", None) is not None:
            self.release()


def allocate(runtime: Runtime, nbytes: int, device: int, stream: int) -> Buffer:
    """Device memory from the allocator in force; see :func:`get_allocator`."""
    return Buffer(get_allocator(runtime), nbytes, device, stream)


class PinnedBuffer:
    """Pinned host memory, for copies that don't wait; freed by :meth:`release` or when forgotten.

    Copies from or to it must have finished by then: record an event behind them and wait for that.

    Attributes:
        ptr: host address, 0 for 0 bytes.
        nbytes: size.
        view: the memory as a writable memoryview of bytes (``numpy.frombuffer`` takes it); invalid after
            release.
    """

    __slots__ = ("device", "nbytes", "ptr", "runtime", "view")

    def __init__(self, runtime: Runtime, nbytes: int, device: int) -> None:
        self.ptr = 0
        self.runtime = runtime
        self.device = device
        self.nbytes = nbytes
        self.ptr = runtime.host_malloc(nbytes, device)
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.ptr) if nbytes else b"").cast("B")

    def release(self) -> None:
        """Free the memory. A second call does nothing."""
        ptr, self.ptr = self.ptr, 0
        if ptr and not self.runtime._forked:
            self.runtime.host_free(ptr, self.device)

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self.release()


def size_class(nbytes: int) -> int:
    """The size that a request is rounded up to: at most an eighth more, in steps of at least 512 bytes.

    Eight steps an octave, so that outputs whose row count changes a little from call to call share a class.
    """
    step = max(512, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class _Block:
    """One allocation of a :class:`StreamAllocator`, in the hands of a caller."""

    __slots__ = ("_owner", "captured", "place", "ptr")

    def __init__(self, owner: StreamAllocator, ptr: int, place: tuple[int, int, int], *, captured: bool = False) -> None:
        self._owner: StreamAllocator | None = owner
        self.ptr = ptr
        self.place = place  # (device, stream key, bytes)
        self.captured = captured

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None and self.ptr:
            # no lock and no driver call: a finaliser may run this anywhere, within an allocation too
            owner._returned.append(self)


class StreamAllocator:
    """Allocates in stream order, and keeps released blocks for requests of their size on their stream.

    That is safe without waiting: what the stream does next comes after what it did with the block. Memory
    that other streams still use must be synchronised with its own stream before it is released, as with any
    stream-ordered allocator. What is allocated while its stream is being captured is never used again for
    something else; it must outlive the graph.

    Args:
        runtime: where the memory comes from.
        limit_bytes: kept a device at most; an eighth of its memory when left out.
    """

    def __init__(self, runtime: Runtime, limit_bytes: int | None = None) -> None:
        self.runtime = runtime
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[tuple[int, int, int], list[int]] = {}  # addresses by (device, stream key, bytes)
        self._kept: dict[int, int] = {}  # bytes a device
        self._limits: dict[int, int] = {}
        self._returned: deque[_Block] = deque()

    def __call__(self, nbytes: int, device: int, stream: int) -> Allocation:
        """Memory for use on ``stream``.

        Raises:
            DeviceMemoryError: none is left, even after giving back what is kept.
        """
        if nbytes <= 0:
            if nbytes:
                raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
            return _Block(self, 0, (device, 0, 0))
        runtime = self.runtime
        with runtime.use_device(device):  # CUDA cannot say anything about a stream in a thread without a context
            if runtime.is_capturing(stream):
                return _Block(self, runtime.malloc_plain(nbytes, device), (device, 0, nbytes), captured=True)
            place = (device, runtime.stream_key(stream), size_class(nbytes))
        ptr = 0
        surplus = None
        with self._lock:
            if self._returned:
                surplus = self._take_returned()
            blocks = self._free.get(place)
            if blocks:
                ptr = blocks.pop()
                self._kept[device] -= place[2]
        if surplus:
            self._give_back(surplus)
        if not ptr:
            ptr = self._malloc(place[2], device, stream)
        return _Block(self, ptr, place)

    def _malloc(self, nbytes: int, device: int, stream: int) -> int:
        try:
            return self.runtime.malloc(nbytes, device, stream)
        except DeviceMemoryError:
            if not self.trim(device):
                raise
        return self.runtime.malloc(nbytes, device, stream)

    def kept_bytes(self, device: int) -> int:
        """Bytes that are kept for later requests on a device."""
        with self._lock:
            surplus = self._take_returned()
            kept = self._kept.get(device, 0)
        self._give_back(surplus)
        return kept

    def trim(self, device: int | None = None) -> int:
        """Give what is kept back to the driver (waits for the device); how many bytes that were."""
        with self._lock:
            surplus = self._take_returned()
            freed = sum(nbytes for _, _, nbytes in surplus)
            for place in [p for p in self._free if device is None or p[0] == device]:
                for ptr in self._free.pop(place):
                    surplus.append((ptr, place[0], place[2]))
                    freed += place[2]
            for index in [i for i in self._kept if device is None or i == device]:
                self._kept[index] = 0
        self._give_back(surplus)
        return freed

    def _limit(self, device: int) -> int:
        limit = self._limits.get(device, self.limit_bytes)
        if limit is None:
            limit = self._limits[device] = self.runtime.device_info(device).memory_bytes // 8
        return limit

    def _take_returned(self) -> list[tuple[int, int, int]]:
        """Sort released blocks in; (address, device, bytes) of those to free. Holds the lock."""
        surplus: list[tuple[int, int, int]] = []
        while self._returned:
            block = self._returned.popleft()
            device, _, nbytes = block.place
            kept = self._kept.get(device, 0) + nbytes
            if block.captured or kept > self._limit(device):
                surplus.append((block.ptr, device, nbytes))
            else:
                self._free.setdefault(block.place, []).append(block.ptr)
                self._kept[device] = kept
        return surplus

    def _give_back(self, blocks: list[tuple[int, int, int]]) -> None:
        # not in stream order: the stream may have been destroyed since. free_plain waits for the device
        # instead
        for ptr, device, _ in blocks:
            self.runtime.free_plain(ptr, device)

    def forget(self) -> None:
        """Called in a forked child: the addresses mean nothing here."""
        self._lock = threading.Lock()
        self._free.clear()
        self._kept.clear()
        self._returned.clear()


_defaults: dict[int, tuple[Runtime, StreamAllocator]] = {}
_defaults_lock = threading.Lock()


def default_allocator(runtime: Runtime) -> StreamAllocator:
    """The built-in allocator of a runtime; one object a runtime."""
    pair = _defaults.get(id(runtime))
    if pair is None:
        with _defaults_lock:
            pair = _defaults.setdefault(id(runtime), (runtime, StreamAllocator(runtime)))
    return pair[1]


def _after_fork_in_child() -> None:
    global _defaults_lock
    _defaults_lock = threading.Lock()
    for _, allocator in _defaults.values():
        allocator.forget()
    _defaults.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
