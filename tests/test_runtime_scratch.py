"""Scratch memory, on a runtime that keeps account of every byte instead of having a device."""

from __future__ import annotations

import gc
import os

import pytest
import test_runtime_kit as kit
from hypothesis import given
from hypothesis import strategies as st
from test_runtime_kit import Accounts, Pool

from hipgroupgemm.runtime import DeviceMemoryError, allocator, memory
from hipgroupgemm.runtime.memory import StreamAllocator
from hipgroupgemm.runtime.scratch import Scratch

runtime, no_user_allocator = kit.accounts, kit.no_user_allocator


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
            status = 0 if not runtime.log and runtime not in [r for r, _ in allocator._defaults.values()] else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    scratch.close()
