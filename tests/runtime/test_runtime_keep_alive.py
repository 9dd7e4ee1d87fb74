"""Operands that stay alive until the device has passed the call, and locks after a fork."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import runtime_kit as kit
from runtime_kit import Accounts

from hipgroupgemm.runtime import forks
from hipgroupgemm.runtime.keep_alive import LIMIT

runtime = kit.accounts


class Operand:
    pass


class Timeline(Accounts):
    """Its streams pass events when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[int, int] = {}  # event: stream
        self.passed: set[int] = set()
        self.made: set[int] = set()
        self.waited: list[int] = []

    def create_event(self, device: int, *, timing: bool = False) -> int:
        assert not timing
        event = 1000 + len(self.made)
        self.made.add(event)
        return event

    def record_event(self, event: int, stream: int = 0) -> None:
        assert event in self.made and (event not in self.recorded or event in self.passed), "an event is recorded twice"
        self.recorded[event] = stream
        self.passed.discard(event)

    def query_event(self, event: int) -> bool:
        assert self.relaxed, "would spoil a capture in the strictest mode"
        return event in self.passed

    def synchronize_event(self, event: int) -> None:
        self.waited.append(event)
        self.passed.add(event)

    def pass_stream(self, stream: int) -> None:
        self.passed |= {event for event, on in self.recorded.items() if on == stream}


Timeline.__abstractmethods__ = frozenset()


def kept(runtime: Timeline) -> int:
    return sum(map(len, runtime._kept._pending.values()))


def test_operands_live_until_their_stream_has_passed() -> None:
    runtime = Timeline()
    first, second = Operand(), Operand()
    seen = weakref.ref(first), weakref.ref(second)
    runtime.keep_alive(0, 5, (first,))
    runtime.keep_alive(0, 6, (second,))
    del first, second
    gc.collect()
    assert all(each() is not None for each in seen)
    runtime.pass_stream(6)
    runtime.keep_alive(0, 5, ())
    assert seen[0]() is not None and seen[1]() is None and not runtime.waited
    runtime.pass_stream(5)
    runtime.keep_alive(1, 5, ())  # another device's call looks as well
    assert seen[0]() is None and kept(runtime) == 1


def test_calls_that_are_kept_are_bounded() -> None:
    runtime = Timeline()
    operands = [Operand() for _ in range(3 * LIMIT)]
    seen = [weakref.ref(operand) for operand in operands]
    while operands:
        runtime.keep_alive(0, 5, operands.pop(0))
    gc.collect()
    alive = sum(each() is not None for each in seen)
    assert alive == kept(runtime) == LIMIT
    assert len(runtime.waited) == 2 * LIMIT and len(runtime.made) <= LIMIT + 1  # events are used again
    assert seen[-1]() is not None


def test_what_is_let_go_may_call_again() -> None:
    runtime = Timeline()

    class Reentrant:
        def __del__(self) -> None:
            runtime.keep_alive(0, 6, ())

    runtime.keep_alive(0, 5, Reentrant())
    runtime.pass_stream(5)
    runtime.keep_alive(0, 5, ())
    assert kept(runtime) == 2


@pytest.mark.parametrize("make", [forks.new_lock, forks.new_rlock])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_locks_are_free_in_a_forked_child(make) -> None:  # type: ignore[no-untyped-def]
    lock, held, done = make(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=10) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    assert status == 0
    with lock:
        assert not lock.acquire(blocking=False) or make is forks.new_rlock
