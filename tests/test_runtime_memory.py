"""Allocator and scratch, on a runtime that keeps account of every byte instead of having a device."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipgroupgemm.runtime import DeviceMemoryError, memory
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.memory import Buffer, StreamAllocator, size_class
from hipgroupgemm.runtime.objects import DeviceInfo
from hipgroupgemm.runtime.scratch import Scratch, pack_sections

MEMORY = 1 << 30


class Accounts(Runtime):
    """Allocates addresses, and refuses what a driver would refuse or should never see."""

    kind = "cuda"

    def __init__(self, alignment: int = 256, memory_bytes: int = MEMORY) -> None:
        super().__init__()
        self.alignment = alignment
        self.memory_bytes = memory_bytes
        self.live: dict[int, int] = {}
        self.log: list[tuple[object, ...]] = []
        self.captures: dict[int, int] = {}
        self.relaxed = 0
        self.streams = {0, 5, 6}
        self.stream_ids: dict[int, int] = {}
        self.next = 1 << 20
        self.lock = threading.Lock()

    def device_count(self) -> int:
        return 2

    def _read_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(
            device, "accounts", "sm_90", "", 1, 32, 1024, 48 << 10, 228 << 10, 0, self.memory_bytes, True
        )

    def _enter_device(self, device: int) -> object:
        return None

    def stream_key(self, stream: int) -> int:
        return self.stream_ids.get(stream, stream)

    def is_capturing(self, stream: int) -> bool:
        return stream in self.captures

    def capture_id(self, stream: int) -> int:
        return self.captures.get(stream, 0)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self.relaxed += 1
        yield
        self.relaxed -= 1

    def _new(self, nbytes: int, what: tuple[object, ...]) -> int:
        with self.lock:
            if sum(self.live.values()) + nbytes > self.memory_bytes:
                raise DeviceMemoryError("malloc", 2, "out of memory")
            ptr = self.next
            self.next += -(-nbytes // self.alignment) * self.alignment
            self.live[ptr] = nbytes
            self.log.append((*what, ptr))
        return ptr

    def malloc(self, nbytes: int, device: int, stream: int = 0) -> int:
        assert not self.captures.get(stream), "recorded into the graph"
        assert nbytes > 0 and stream in self.streams
        return self._new(nbytes, ("malloc", stream))

    def free(self, ptr: int, device: int, stream: int = 0) -> None:
        assert stream in self.streams and stream not in self.captures
        self.log.append(("free", stream, ptr))
        del self.live[ptr]

    def malloc_plain(self, nbytes: int, device: int) -> int:
        assert nbytes > 0
        return self._new(nbytes, ("malloc_plain",))

    def free_plain(self, ptr: int, device: int) -> None:
        assert not self.captures or self.relaxed, "would wait for a stream that is being captured"
        self.log.append(("free_plain", ptr))
        del self.live[ptr]

    def _inside(self, ptr: int, nbytes: int) -> None:
        assert any(start <= ptr and ptr + nbytes <= start + size for start, size in self.live.items()), (
            "wild access"
        )

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        self._inside(dst, nbytes)
        self._inside(src, nbytes)
        self.log.append(("copy", stream, dst, src, nbytes))

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        assert stream not in self.captures, "recorded into the graph"
        self._inside(dst, nbytes)
        self.log.append(("fill", stream, dst, value, nbytes))

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        assert non_blocking
        self.streams.add(99)
        return 99

    def destroy_stream(self, stream: int) -> None:
        self.streams.remove(stream)

    def synchronize_stream(self, stream: int = 0) -> None:
        assert stream not in self.captures
        self.log.append(("wait", stream))


Accounts.__abstractmethods__ = frozenset()


@pytest.fixture
def runtime() -> Iterator[Accounts]:
    runtime = Accounts()
    yield runtime
    memory._defaults.pop(id(runtime), None)


@pytest.fixture(autouse=True)
def no_user_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_user_allocators", {})


# ---- sizes


@given(st.integers(1, 1 << 44))
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size < max(nbytes + 512, nbytes * 9 / 8 + 1)
    assert size_class(size) == size and size % 512 == 0


def test_size_classes_are_few() -> None:
    assert len({size_class(n) for n in range(1 << 20, 1 << 21, 997)}) <= 9


@given(st.lists(st.integers(0, 5000), max_size=8))
def test_sections(sizes: list[int]) -> None:
    offsets, total = pack_sections(sizes)
    assert len(offsets) == len(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
    assert all(offset % 256 == 0 for offset in offsets) and total % 256 == 0
    assert max(ends, default=0) <= total < max(ends, default=0) + 256


def test_negative_sections() -> None:
    with pytest.raises(ValueError, match="sizes: got"):
        pack_sections([3, -1])


# ---- the built-in allocator


def test_blocks_are_used_again_on_their_stream_only(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime)
    first = allocator(10_000, 0, 5)
    ptr = first.ptr
    first.release()
    first.release()  # once only
    assert allocator(10_000, 0, 6).ptr != ptr
    assert allocator(10_000, 1, 5).ptr != ptr
    assert allocator(20_000, 0, 5).ptr != ptr
    again = allocator(9_990, 0, 5)
    assert again.ptr == ptr
    assert allocator(10_000, 0, 5).ptr != ptr  # it is in use
    assert not any(entry[0].startswith("free") for entry in runtime.log)  # type: ignore[attr-defined]


def test_a_new_stream_under_an_old_handle_gets_nothing(runtime: Accounts) -> None:
    runtime.stream_ids[5] = -11
    allocator = StreamAllocator(runtime)
    block = allocator(1000, 0, 5)
    ptr = block.ptr
    block.release()
    runtime.stream_ids[5] = -12  # destroyed, and another created
    assert allocator(1000, 0, 5).ptr != ptr


def test_no_bytes(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime)
    block = allocator(0, 0, 5)
    assert block.ptr == 0
    block.release()
    assert allocator.trim() == 0 and not runtime.log
    with pytest.raises(ValueError, match="nbytes: got -1"):
        allocator(-1, 0, 5)


def test_what_is_kept_is_bounded(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime, limit_bytes=3000)
    blocks = [allocator(1000, 0, 5) for _ in range(5)]
    for block in blocks:
        block.release()
    assert allocator.kept_bytes(0) == 2048  # two of 1024
    assert len(runtime.live) == 2
    assert StreamAllocator(runtime)._limit(0) == MEMORY // 8


def test_trim(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime)
    blocks = [allocator(1000, device, stream) for device in (0, 1) for stream in (5, 6)]
    in_use = allocator(5000, 0, 5)
    for block in blocks:
        block.release()
    assert allocator.trim(1) == 2048 and allocator.kept_bytes(1) == 0 and allocator.kept_bytes(0) == 2048
    assert allocator.trim() == 2048 and set(runtime.live) == {in_use.ptr}


def test_out_of_memory_gives_back_what_is_kept() -> None:
    runtime = Accounts(memory_bytes=100_000)
    allocator = StreamAllocator(runtime, limit_bytes=100_000)
    allocator(60_000, 0, 5).release()
    large = allocator(80_000, 0, 6)
    assert large.ptr in runtime.live and len(runtime.live) == 1
    with pytest.raises(DeviceMemoryError):
        allocator(80_000, 0, 6)
    large.release()
    assert allocator(80_000, 0, 6).ptr == large.ptr


def test_captured_blocks_are_never_used_again(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime)
    before = allocator(1000, 0, 5)
    old = before.ptr
    before.release()
    runtime.captures[5] = 1
    block = allocator(1000, 0, 5)
    assert block.ptr != old and ("malloc_plain", block.ptr) in runtime.log
    block.release()
    second = allocator(1000, 0, 5)
    assert second.ptr not in (block.ptr, old) and block.ptr in runtime.live  # nothing is freed meanwhile
    del runtime.captures[5]
    assert allocator(1000, 0, 5).ptr == old
    assert block.ptr not in runtime.live and second.ptr in runtime.live


def test_release_inside_an_allocation(runtime: Accounts) -> None:
    # the garbage collector may run a release at any point, also while the allocator holds its lock
    allocator = StreamAllocator(runtime)
    block = allocator(1000, 0, 5)
    with allocator._lock:
        block.release()
    assert allocator.kept_bytes(0) == 1024


def test_threads(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime)
    taken: set[int] = set()
    guard = threading.Lock()
    failures: list[str] = []

    def body(stream: int) -> None:
        for i in range(300):
            block = allocator(1000 + 400 * (i % 3), 0, stream)
            ptr = block.ptr
            with guard:
                if ptr in taken:
                    failures.append(f"{ptr} twice")
                taken.add(ptr)
            with guard:
                taken.discard(ptr)
            block.release()

    threads = [threading.Thread(target=body, args=(stream,)) for stream in (5, 5, 6, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(runtime.live) <= 12  # 4 threads, 3 sizes, one block each at a time
    allocator.trim()
    assert not runtime.live


# ---- the caller's allocator


class Pool:
    """A caller's allocator."""

    def __init__(self, runtime: Accounts, offset: int = 0) -> None:
        self.runtime = runtime
        self.offset = offset
        self.calls: list[tuple[int, int, int]] = []
        self.released: list[int] = []

    def __call__(self, nbytes: int, device: int, stream: int) -> Allocated:
        self.calls.append((nbytes, device, stream))
        return Allocated(self, self.runtime._new(nbytes + self.offset, ("pool",)) + self.offset)


class Allocated:
    def __init__(self, pool: Pool, ptr: int) -> None:
        self.pool = pool
        self.ptr = ptr

    def release(self) -> None:
        self.pool.released.append(self.ptr)
        self.pool.runtime.log.append(("release", self.ptr))


def test_set_allocator(runtime: Accounts) -> None:
    pool, other = Pool(runtime), Pool(runtime)
    assert memory.set_allocator(pool) is None
    buffer = memory.allocate(runtime, 1000, 1, 5)
    assert pool.calls == [(1000, 1, 5)] and buffer.ptr in runtime.live
    assert memory.set_allocator(other, "cuda") is None
    memory.allocate(runtime, 7, 0, 0)
    assert other.calls == [(7, 0, 0)]
    assert memory.set_allocator(None, "cuda") is other
    assert memory.set_allocator(None) is pool
    assert memory.get_allocator(runtime) is memory.default_allocator(runtime)
    buffer.release()
    buffer.release()
    assert len(pool.released) == 1
    with pytest.raises(TypeError, match="allocator: got a int"):
        memory.set_allocator(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind: got 'metal'"):
        memory.set_allocator(pool, "metal")


def test_forgotten_buffers_are_released(runtime: Accounts) -> None:
    pool = Pool(runtime)
    buffer = Buffer(pool, 100, 0, 5)
    ptr = buffer.ptr
    del buffer
    gc.collect()
    assert pool.released == [ptr]
    assert Buffer(pool, 0, 0, 5).ptr == 0 and len(pool.calls) == 1


def test_allocations_without_release(runtime: Accounts) -> None:
    class Plain:  # as CuPy's MemoryPointer: freed when forgotten
        ptr = 4096

    Buffer(lambda *_: Plain(), 10, 0, 0).release()  # type: ignore[arg-type, return-value]
    for wrong in (None, object(), type("P", (), {"ptr": 0})()):
        with pytest.raises(TypeError, match="allocator: returned a"):
            Buffer(lambda *_: wrong, 10, 0, 0)  # type: ignore[arg-type, return-value]  # noqa: B023
    with pytest.raises(ValueError, match="nbytes: got -5"):
        Buffer(Pool(runtime), -5, 0, 0)


# ---- scratch


@pytest.mark.parametrize("offset", [0, 8, 200])
def test_scratch_is_aligned_and_zeroed(runtime: Accounts, offset: int) -> None:
    memory.set_allocator(Pool(runtime, offset))
    scratch = Scratch(runtime, 0, 5)
    assert scratch.pointer(0) == 0 and scratch.nbytes == 0
    address = scratch.pointer(1000)
    assert address % 256 == 0 and ("fill", 5, address, 0, 1000) in runtime.log
    assert scratch.pointer(1000) == scratch.pointer(1) == address and scratch.nbytes == 1000
    assert scratch.pointer(0) == 0


def test_scratch_grows_in_order(runtime: Accounts) -> None:
    pool = Pool(runtime)
    scratch = Scratch(runtime, 0, 5, allocator=pool, preserve=24)
    first = scratch.pointer(1000)
    runtime.log.clear()
    second = scratch.pointer(5000)
    assert second != first
    kinds = [entry[0] for entry in runtime.log]
    assert kinds == ["pool", "copy", "fill", "release"]  # the copy is given before the old memory goes back
    assert runtime.log[1] == ("copy", 5, second, first, 24)
    assert runtime.log[2] == ("fill", 5, second + 24, 0, 5000 - 24)
    scratch.close()
    assert len(pool.released) == 2


def test_failed_growth_changes_nothing() -> None:
    runtime = Accounts(memory_bytes=10_000)
    scratch = Scratch(runtime, 0, 5, allocator=Pool(runtime))
    address = scratch.pointer(1000)
    with pytest.raises(DeviceMemoryError):
        scratch.pointer(20_000)
    assert scratch.pointer(1000) == address and scratch.nbytes == 1000


def test_scratch_does_not_free_what_a_graph_holds(runtime: Accounts) -> None:
    scratch = Scratch(runtime, 0, 5)
    outside = scratch.pointer(1000)
    pieces = []
    for number in (7, 8):
        runtime.captures[5] = number
        first = scratch.pointer(1000)
        assert first == scratch.pointer(500) and first % 256 == 0
        larger = scratch.pointer(3000)
        assert scratch.pointer(1000) == larger
        assert ("fill", 99, larger, 0, 3000) in runtime.log and 99 not in runtime.streams
        pieces += [first, larger]
        del runtime.captures[5]
        assert scratch.pointer(1000) == outside
        scratch.pointer(100_000 * number)  # growing outside the capture
        outside = scratch.pointer(1000)
    assert len(set(pieces)) == 4 and all(piece in runtime.live for piece in pieces)
    assert scratch.captured_bytes == 6000
    scratch.close()
    assert not any(piece in runtime.live for piece in pieces)
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        scratch.pointer(1)
    scratch.close()


def test_scratch_takes_the_capture_from_its_caller(runtime: Accounts) -> None:
    scratch = Scratch(runtime, 0, 5)
    outside = scratch.pointer(100, 0)
    inside = scratch.pointer(100, 3)
    assert outside != inside and scratch.pointer(100, 3) == inside
    assert scratch.pointer(0, 3) == 0
    scratch.close()


def test_captured_memory_never_comes_from_a_pool(runtime: Accounts) -> None:
    pool = Pool(runtime)
    memory.set_allocator(pool)
    scratch = Scratch(runtime, 0, 5)
    runtime.captures[5] = 1
    scratch.pointer(1000)
    assert not pool.calls
    del runtime.captures[5]
    scratch.close()


def test_captured_memory_outlives_a_forgotten_scratch(runtime: Accounts) -> None:
    scratch = Scratch(runtime, 0, 5)
    runtime.captures[5] = 1
    piece = scratch.pointer(1000)
    del runtime.captures[5], scratch
    gc.collect()
    assert piece in runtime.live  # the graph may still be launched


def test_two_streams_never_share(runtime: Accounts) -> None:
    first, second = Scratch(runtime, 0, 5), Scratch(runtime, 0, 6)
    assert first.pointer(1000) != second.pointer(1000)
    first.close()
    third = Scratch(runtime, 0, 6)
    assert third.pointer(1000) not in (0, second.pointer(1000))


def test_scratch_arguments(runtime: Accounts) -> None:
    with pytest.raises(ValueError, match="preserve: got -1"):
        Scratch(runtime, 0, 5, preserve=-1)
    with pytest.raises(ValueError, match="nbytes: got -1"):
        Scratch(runtime, 0, 5).pointer(-1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "begin", "end", "close"]), st.integers(0, 5000)),
        min_size=1,
        max_size=40,
    )
)
def test_scratch_in_any_order(steps: list[tuple[str, int]]) -> None:
    """Whatever is asked for lies in live memory, is aligned, and no graph's piece is ever anybody else's."""
    runtime = Accounts()
    scratch = Scratch(runtime, 0, 5, allocator=StreamAllocator(runtime), preserve=16)
    graphs: dict[int, set[int]] = {}
    ordinary: set[int] = set()
    number = 0
    for step, nbytes in steps:
        if step == "begin":
            number += 1
            runtime.captures[5] = number
        elif step == "end":
            runtime.captures.pop(5, None)
        elif step == "close" and 5 not in runtime.captures:
            scratch.close()
            scratch = Scratch(runtime, 0, 5, allocator=StreamAllocator(runtime), preserve=16)
            graphs.clear()
            ordinary.clear()
        else:
            ptr = scratch.pointer(nbytes)
            assert (ptr == 0) == (nbytes == 0) and ptr % 256 == 0
            if nbytes:
                runtime._inside(ptr, nbytes)
                capture = runtime.captures.get(5, 0)
                (graphs.setdefault(capture, set()) if capture else ordinary).add(ptr)
        held = [*graphs.values(), ordinary]
        assert len(set().union(*held)) == sum(map(len, held))
        assert all(ptr in runtime.live for pieces in graphs.values() for ptr in pieces)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_frees_nothing(runtime: Accounts) -> None:
    scratch = Scratch(runtime, 0, 5)
    scratch.pointer(1000)
    runtime.captures[5] = 1
    scratch.pointer(1000)
    del runtime.captures[5]
    buffer = memory.allocate(runtime, 1000, 0, 5)
    kept = memory.allocate(runtime, 3000, 0, 5)
    kept.release()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            runtime.disable_after_fork()  # the registry does this for runtimes that it made
            runtime.log.clear()
            scratch.close()
            buffer.release()
            del buffer, scratch
            gc.collect()
            status = 0 if not runtime.log and runtime not in [r for r, _ in memory._defaults.values()] else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    scratch.close()
