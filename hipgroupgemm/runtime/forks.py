"""Locks that a forked child finds open: a thread of the parent that held one does not exist in the child.

Make every lock that outlives a call with :func:`new_lock` or :func:`new_rlock`. They are plain ``threading`` locks, so taking one costs
nothing more; in a child they are made anew in place before anything else runs there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["new_lock", "new_rlock"]

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """A ``threading.Lock`` that is free in a forked child."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    """A ``threading.RLock`` that is free in a forked child."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # what threading and logging call on their own locks


os.register_at_fork(after_in_child=_renew)
