"""The allocators, on a runtime that keeps account of every byte instead of having a device."""

from __future__ import annotations

import gc
import threading

import pytest
import runtime_kit as kit
from hypothesis import given
from hypothesis import strategies as st
from runtime_kit import MEMORY, Accounts, Pool

from hipgroupgemm.runtime import DeviceMemoryError, memory
from hipgroupgemm.runtime.memory import Buffer, StreamAllocator, size_class
from hipgroupgemm.runtime.scratch import Scratch, pack_sections

runtime, no_user_allocator = kit.accounts, kit.no_user_allocator


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
    block = Buffer(allocator, 0, 0, 5)
    assert block.ptr == 0
    block.release()
    assert allocator.trim() == 0 and not runtime.log


def test_what_is_kept_is_bounded(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime, limit_bytes=3000)
    blocks = [allocator(1000, 0, 5) for _ in range(5)]
    for block in blocks:
        block.release()
    assert allocator.kept_bytes(0) == 2048  # two of 1024
    assert len(runtime.live) == 2
    allocator = StreamAllocator(runtime)  # an eighth of the device's memory
    blocks = [allocator(MEMORY // 10, 0, 5) for _ in range(2)]
    for block in blocks:
        block.release()
    assert MEMORY // 10 <= allocator.kept_bytes(0) <= MEMORY // 8


def test_trim(runtime: Accounts) -> None:
    allocator = StreamAllocator(runtime)
    blocks = [allocator(1000, device, stream) for device in (0, 1) for stream in (5, 6)]
    in_use = allocator(5000, 0, 5)
    for block in blocks:
        block.release()
    assert allocator.trim(1) == 2048 and allocator.kept_bytes(1) == 0 and allocator.kept_bytes(0) == 2048
    assert allocator.trim() == 2048 and set(runtime.live) == {in_use.ptr}


class ContextOnly(Accounts):
    """Like CUDA's driver, it knows no stream in a thread that has no device current."""

    depth = 0

    def _enter_device(self, device: int) -> object:
        self.depth += 1
        return self

    def _leave_device(self, previous: object) -> None:
        self.depth -= 1

    def stream_key(self, stream: int) -> int:
        assert self.depth, "no context is current"
        return super().stream_key(stream)

    def is_capturing(self, stream: int) -> bool:
        assert self.depth, "no context is current"
        return super().is_capturing(stream)

    def capture_id(self, stream: int) -> int:
        assert self.depth, "no context is current"
        return super().capture_id(stream)


def test_a_thread_without_a_current_device() -> None:
    runtime = ContextOnly()
    block = Buffer(StreamAllocator(runtime), 1000, 0, 0)
    scratch = Scratch(runtime, 0, 0, 300)
    scratch.reserve()
    assert block.ptr and scratch.pointer(0) and runtime.depth == 0


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
    kept = memory.allocate(runtime, 5, 0, 5)
    assert kept.ptr in runtime.live and len(pool.calls) == len(other.calls) == 1
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
