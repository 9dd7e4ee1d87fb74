"""Idle workers, kept for whoever needs one of their name next."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping

from hipgroupgemm.processes.worker import Worker, start_environment

__all__ = ["acquire", "close_workers", "release"]

_idle: dict[str, list[Worker]] = {}
_lock = threading.Lock()


def acquire(name: str, *, fresh: bool = False, environment: Mapping[str, str] | None = None) -> Worker:
    """A worker of that name; it is the caller's until `release` or `kill`. One that has not served anybody yet has `calls` 0.

    Args:
        name: what it serves, "cuda:0" say. fresh: whether it must be a new one.
        environment: as `Worker` takes it. A worker that was started with other variables or another import path is not taken.

    Raises:
        OSError: it cannot be started.
    """
    wanted = start_environment(environment)
    while not fresh:
        worker = None
        try:
            with _lock:
                waiting = _idle.get(name)
                worker = waiting.pop() if waiting else None
            if worker is None:
                break
            if worker.environment == wanted and worker.alive():
                return worker
            worker.kill()
        except BaseException:
            if worker is not None:
                worker.kill()
            raise
    return Worker(name, environment=environment)


def release(worker: Worker) -> None:
    """Gives a healthy worker back. It ends by itself when nobody takes it for a while.

    Not one that has run code of the caller's: the caller may edit it, and the worker would not see that.
    """
    with _lock:
        _idle.setdefault(worker.name, []).append(worker)


def close_workers() -> None:
    """Ends all idle workers: each may hold a device's context, some hundred MiB of the device's memory."""
    with _lock:
        workers = [worker for waiting in _idle.values() for worker in waiting]
        _idle.clear()
    for worker in workers:
        worker.kill()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for waiting in _idle.values():
        for worker in waiting:
            worker.kill()  # lets go of it: it is the parent's
    _idle.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_after_fork_in_child)
