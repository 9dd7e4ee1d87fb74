"""Scratch memory and what is kept alive, on a runtime that keeps account of every byte instead of having a device."""

from __future__ import annotations

import gc
import os

import pytest
import runtime_kit as kit
from hypothesis import given
from hypothesis import strategies as st
from runtime_kit import Accounts, Pool

from hipgroupgemm.runtime import DeviceMemoryError, memory
from hipgroupgemm.runtime.memory import StreamAllocator
from hipgroupgemm.runtime.scratch import PerCapture, Scratch, ScratchMemory

runtime, no_user_allocator = kit.accounts, kit.no_user_allocator


@pytest.mark.parametrize("offset", [0, 8, 200])
def test_scratch_is_aligned_and_zeroed(runtime: Accounts, offset: int) -> None:
    memory.set_allocator(Pool(runtime, offset))
    scratch = Scratch(runtime, 0, 5, 1000)
    assert not runtime.log  # it may be made during a capture
    address = scratch.pointer(0)
    assert address % 256 == 0 and ("fill", 5, address, 0, 1000) in runtime.log
    assert scratch.pointer(0) == address and scratch.addresses() == [address] and not scratch.in_graph()
    assert Scratch(runtime, 0, 5, 0).pointer(0) == 0


def test_scratch_comes_from_the_callers_allocator_and_goes_back(runtime: Accounts) -> None:
    pool = Pool(runtime)
    memory.set_allocator(pool)
    scratch = Scratch(runtime, 0, 5, 1000)
    scratch.reserve()
    scratch.reserve()
    assert len(pool.calls) == 1 and not pool.released
    scratch.close()
    scratch.close()
    assert len(pool.released) == 1


def test_scratch_that_cannot_be_made_leaves_nothing(runtime: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Accounts(memory_bytes=10_000)
    with pytest.raises(DeviceMemoryError):
        Scratch(small, 0, 5, 20_000).pointer(0)

    def fail(*_: object) -> None:
        raise RuntimeError("the fill failed")

    monkeypatch.setattr(runtime, "memset_async", fail)
    scratch = Scratch(runtime, 0, 5, 1000)
    for capture in (0, 3):
        with pytest.raises(RuntimeError, match="the fill failed"):
            scratch.pointer(capture)
    assert not runtime.live and not scratch.in_graph() and runtime.streams == {0, 5, 6}


def test_scratch_takes_what_the_allocator_keeps(runtime: Accounts) -> None:
    tight = Accounts(memory_bytes=100_000)
    memory.default_allocator(tight)(60_000, 0, 5).release()
    assert ScratchMemory(tight, 0, 5, 80_000).address in tight.live
    memory.default_allocator.cache_clear()


def test_close_gives_back_what_captures_used(runtime: Accounts) -> None:
    """However often graphs are captured: nothing is given back before, everything by close()."""
    scratch = Scratch(runtime, 0, 5, 3000)
    outside = scratch.pointer(0)
    pieces = []
    for number in range(7, 20):
        runtime.captures[5] = number
        scratch.reserve()
        inside = scratch.pointer(number)
        assert inside == scratch.pointer(number) and inside % 256 == 0
        assert ("fill", 99, inside, 0, 3000) in runtime.log and 99 not in runtime.streams  # nothing of it was recorded
        pieces.append(inside)
        del runtime.captures[5]
        assert scratch.pointer(0) == outside
    assert len({outside, *pieces}) == 14 and sorted(scratch.addresses()) == sorted([outside, *pieces])
    assert scratch.in_graph() and all(piece in runtime.live for piece in pieces)
    scratch.close()
    assert not runtime.live
    for capture in (0, 7, 99):
        with pytest.raises(RuntimeError, match=r"after close\(\)"):
            scratch.pointer(capture)


def test_a_capture_on_a_stream_that_was_never_used(runtime: Accounts) -> None:
    runtime.captures[6] = 11
    scratch = Scratch(runtime, 0, 6, 1000)
    scratch.reserve()
    assert not runtime.live  # plain memory would be filled in the recording
    inside = scratch.pointer(11)
    assert scratch.addresses() == [inside]
    del runtime.captures[6]
    scratch.reserve()
    assert scratch.pointer(0) != inside
    scratch.close()
    assert not runtime.live


def test_captured_memory_never_comes_from_a_pool(runtime: Accounts) -> None:
    pool = Pool(runtime)
    memory.set_allocator(pool)
    runtime.captures[5] = 1
    scratch = Scratch(runtime, 0, 5, 1000)
    scratch.pointer(1)
    assert not pool.calls
    del runtime.captures[5]
    scratch.close()
    assert not runtime.live


def test_a_forgotten_scratch_frees_what_no_graph_holds(runtime: Accounts) -> None:
    scratch = Scratch(runtime, 0, 5, 1000)
    scratch.pointer(0)
    inside = scratch.pointer(1)
    del scratch
    gc.collect()
    assert set(runtime.live) == {inside}  # the graph may still be launched


def test_two_streams_never_share(runtime: Accounts) -> None:
    first, second = Scratch(runtime, 0, 5, 1000), Scratch(runtime, 0, 6, 1000)
    assert first.pointer(0) != second.pointer(0) and first.pointer(3) != second.pointer(3)


def test_one_thing_for_each_capture() -> None:
    made: list[int] = []
    closed: list[int] = []

    class Thing:
        def __init__(self, capture: int) -> None:
            self.capture = capture
            if capture == 13:
                raise RuntimeError("no more of these")
            made.append(capture)

        def close(self) -> None:
            closed.append(self.capture)

    things = PerCapture(Thing)
    assert things.get(0) is things.get(0) and not things.in_graph()
    assert things.get(4).capture == 4 and things.get(4) in things.all() and things.in_graph()
    with pytest.raises(RuntimeError, match="no more"):
        things.get(13)
    things.close()
    things.close()
    assert made == [0, 4] and sorted(closed) == [0, 4]
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        things.get(0)


@given(st.lists(st.sampled_from(["use", "reserve", "begin", "end", "close"]), min_size=1, max_size=40))
def test_scratch_in_any_order(steps: list[str]) -> None:
    """Whatever is asked for lies in live memory, is aligned, and no graph's piece is ever anybody else's."""
    runtime = Accounts()
    scratch = Scratch(runtime, 0, 5, 1000)
    held: dict[int, int] = {}
    number = 0
    for step in steps:
        if step == "begin":
            number += 1
            runtime.captures[5] = number
        elif step == "end":
            runtime.captures.pop(5, None)
        elif step == "reserve":
            scratch.reserve()
        elif step == "close":
            if 5 not in runtime.captures:
                scratch.close()
                assert not runtime.live
                scratch = Scratch(runtime, 0, 5, 1000)
                held.clear()
        else:
            ptr = scratch.pointer(runtime.captures.get(5, 0))
            assert ptr % 256 == 0
            runtime._inside(ptr, 1000)
            assert held.setdefault(runtime.captures.get(5, 0), ptr) == ptr
        assert len(set(held.values())) == len(held) and all(ptr in runtime.live for ptr in held.values())
    scratch.close()
    assert not runtime.live


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_frees_nothing(runtime: Accounts) -> None:
    scratch = Scratch(runtime, 0, 5, 1000)
    scratch.pointer(0)
    scratch.pointer(1)
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
            status = 0 if not runtime.log else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    scratch.close()


def test_allocations_of_a_capture_outlive_nothing(runtime: Accounts) -> None:
    """An output that was made during a capture goes back to the driver once it is forgotten and something else is allocated."""
    allocate = StreamAllocator(runtime)
    runtime.captures[5] = 1
    blocks = [allocate(1000, 0, 5) for _ in range(3)]
    del runtime.captures[5]
    for block in blocks:
        block.release()
    assert allocate.trim() == 3000 and not runtime.live
