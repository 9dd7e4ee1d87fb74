"""The scratch memory of one plan on one stream."""

from __future__ import annotations

from collections.abc import Sequence

from .allocator import ALIGNMENT, Allocator, Buffer, get_allocator
from .base import Runtime


def pack_sections(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of sections of the given sizes (bytes), each 256-byte aligned; and the size of them all."""
    offsets, end = [], 0
    for size in sizes:
        if size < 0:
            raise ValueError(f"sizes: got {list(sizes)}; want 0 bytes or more each")
        offsets.append(end)
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class Scratch:
    """Device memory that belongs to one plan and one stream, and is used by one execute after the other.

    Addresses are multiples of 256. New memory is filled with zeros. It grows when more is asked for; the old
    memory is released in stream order, so that work under way still finds it. A graph capture gets memory of
    its own, one piece a capture, because the graph uses its address at every later launch: it is never grown
    in place, never released before :meth:`close`, and never comes from a pool.

    The plan's lock protects it: not two threads at once.

    Args:
        runtime: the device's runtime.
        device: index of the device.
        stream: handle of the stream.
        allocator: who allocates; whoever :func:`.set_allocator` names when left
            out.
        preserve: bytes at the start that keep their contents when the memory grows.

    Raises:
        ValueError: preserve is negative.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        stream: int,
        *,
        allocator: Allocator | None = None,
        preserve: int = 0,
    ) -> None:
        if preserve < 0:
            raise ValueError(f"preserve: got {preserve}; want 0 or more bytes")
        self.runtime = runtime
        self.device = device
        self.stream = stream
        self.preserve = preserve
        self._allocator = allocator
        self._buffer: Buffer | None = None
        self._address = 0
        self._size = 0
        self._captures: dict[int, tuple[int, int]] = {}  # capture: (address, bytes) in use
        self._captured: list[int] = []  # addresses of all memory that captures hold
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Size of the memory that executes outside captures use."""
        return self._size

    @property
    def captured_bytes(self) -> int:
        """Size of the memory that the captures now under way, or ended, use."""
        return sum(size for _, size in self._captures.values())

    def reserve(self, nbytes: int) -> None:
        """Allocate ahead, so that later calls of :meth:`pointer` for at most ``nbytes`` allocate nothing."""
        self.pointer(nbytes)

    def pointer(self, nbytes: int, capture: int | None = None) -> int:
        """Address of at least ``nbytes`` bytes, the same until more is asked for; 0 for 0 bytes.

        Args:
            nbytes: bytes needed.
            capture: ``runtime.capture_id(stream)``, when the caller has asked already.

        Raises:
            RuntimeError: the scratch was closed.
            DeviceMemoryError: out of memory; what was there before stays.
        """
        if self._closed:
            raise RuntimeError("scratch: used after close(); make a new plan")
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
        if capture is None:
            with self.runtime.use_device(self.device):
                capture = self.runtime.capture_id(self.stream)
        if capture:
            return self._capture_pointer(nbytes, capture)
        if nbytes > self._size:
            self._grow(nbytes)
        return self._address if nbytes else 0

    def _grow(self, nbytes: int) -> None:
        runtime = self.runtime
        allocator = self._allocator or get_allocator(runtime)
        with runtime.use_device(self.device):
            # an allocator of the caller's need not align to 256 bytes, so there is room to
            buffer = Buffer(allocator, nbytes + ALIGNMENT - 1, self.device, self.stream)
            address = -(-buffer.ptr // ALIGNMENT) * ALIGNMENT
            kept = min(self.preserve, self._size)
            if kept:
                runtime.memcpy_async(address, self._address, kept, self.stream)
            runtime.memset_async(address + kept, 0, nbytes - kept, self.stream)
            old, self._buffer, self._address, self._size = self._buffer, buffer, address, nbytes
            if old is not None:
                old.release()

    def _capture_pointer(self, nbytes: int, capture: int) -> int:
        address, size = self._captures.get(capture, (0, 0))
        if nbytes > size:
            # the former piece stays: kernels already recorded in this capture use it
            address = self._allocate_zeroed(nbytes)
            self._captured.append(address)
            self._captures[capture] = (address, nbytes)
        return address if nbytes else 0

    def _allocate_zeroed(self, nbytes: int) -> int:
        """Memory that no stream or pool owns, zeroed on a stream of its own, so that nothing is recorded."""
        runtime = self.runtime
        with runtime.relaxed_capture(), runtime.use_device(self.device):
            address = runtime.malloc_plain(nbytes, self.device)
            try:
                stream = runtime.create_stream(self.device)
                try:
                    runtime.memset_async(address, 0, nbytes, stream)
                    runtime.synchronize_stream(stream)
                finally:
                    runtime.destroy_stream(stream)
            except BaseException:
                runtime.free_plain(address, self.device)
                raise
        return address

    def close(self) -> None:
        """Release everything; graphs captured with this scratch must not be launched any more.

        The ordinary memory goes back in stream order, that of captures once the device has finished. Further
        calls do nothing.
        """
        if self._closed:
            return
        self._closed = True
        buffer, self._buffer = self._buffer, None
        captured, self._captured = self._captured, []
        self._captures.clear()
        self._address = self._size = 0
        if self.runtime._forked:
            return  # the memory is the parent's
        if buffer is not None:
            buffer.release()
        for address in captured:
            self.runtime.free_plain(address, self.device)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self._captured:
            self.close()
