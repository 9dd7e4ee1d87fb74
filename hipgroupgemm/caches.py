"""The caches of calls and of plans, and what they know of a plan: both are bounded and forgotten in a forked child."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from hipgroupgemm.backends import selection
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.runtime.forks import new_rlock

__all__ = ["CallCache", "Plan", "PlanCache", "ticks"]

_MOST_CALLS = 512
ticks = itertools.count(1)


class Plan(Protocol):
    """What a call needs of a plan: `GroupedMatmulPlan` is one."""

    def launch(self, arguments: Arguments, pointers: dict[str, int] | None = None, lists: dict[str, tuple[int, ...]] | None = None) -> bool:
        """Runs arguments that are checked, with operands at `pointers` where they are given; false where the plan is closed."""

    def retire(self) -> None:
        """Closes it as soon as no call uses it; does not wait."""

    @property
    def captured(self) -> bool:
        """Whether a graph capture used it."""

    last_use: int
    """`ticks` at the latest use."""


class CallCache:
    """Prepared calls (`dispatch.PreparedCall`) by key, bounded: all are forgotten when there are too many."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, Any] = {}
        _caches.add(self)

    def __len__(self) -> int:
        return len(self.calls)

    def get(self, key: Hashable) -> Any:
        """The call of that key, unless backends or stored results have changed since."""
        found = self.calls.get(key)
        return None if found is None or found.version != selection.version else found

    def put(self, key: Hashable, prepared: Any) -> None:
        """Keeps a call."""
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
        self.calls[key] = prepared

    def clear(self) -> None:
        """Forgets all."""
        self.calls.clear()


_P = TypeVar("_P", bound=Plan)


class PlanCache(Generic[_P]):
    """The plans that functions keep, by key: bounded, the least recently used goes first and is closed.

    A plan that a graph capture used is never evicted: the graph writes through its scratch memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = new_rlock()
        self._version = selection.version
        self._plans: dict[Hashable, _P] = {}
        _caches.add(self)

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], _P]) -> _P:
        """The plan of that key, made where there is none yet."""
        with self._lock:
            if self._version != selection.version:  # each plan has to be made by the backends and stored results that are there now
                self._version = selection.version
                dropped = self._drop(list(self._plans))
            else:
                dropped = []
            found, version = self._plans.get(key), self._version
        for plan in dropped:
            plan.retire()
        if found is not None:
            found.last_use = next(ticks)
            return found
        plan = make()
        plan.last_use = next(ticks)
        with self._lock:
            if key in self._plans or version != selection.version:  # another thread was faster, or the choice may be another now
                again = True
            else:
                again, self._plans[key] = False, plan
                unused = sorted((k for k in self._plans if k != key), key=lambda k: self._plans[k].last_use)
                dropped = self._drop(unused[: max(0, len(self._plans) - self._limit)])
        if again:
            plan.retire()
            return self.get(key, make)
        for old in dropped:
            old.retire()
        return plan

    def _drop(self, keys: list[Hashable]) -> list[_P]:
        """Forgets plans, but for those that graphs use; whoever holds them closes them, without the lock."""
        return [self._plans.pop(key) for key in keys if not self._plans[key].captured]

    def clear(self) -> int:
        """Forgets and closes all plans but those that a graph capture used; how many those are."""
        with self._lock:
            dropped, kept = self._drop(list(self._plans)), len(self._plans)
        for plan in dropped:
            plan.retire()
        return kept

    def forget(self) -> None:
        """Drops everything without touching a device: for a forked child, which has none."""
        self._plans = {}


_caches: weakref.WeakSet[CallCache | PlanCache[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        if isinstance(cache, PlanCache):
            cache.forget()
        else:
            cache.clear()


os.register_at_fork(after_in_child=_after_fork)
