"""Compiles many kernels at once, each core a few of them, into the cache on disk: tuning would wait for one after the other."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from hipgroupgemm.backends.triton.compiler import KernelSpec, compile_kernel, is_compiled
from hipgroupgemm.processes import Worker, available_cores
from hipgroupgemm.runtime.cache import default_cache
from hipgroupgemm.runtime.directories import private_directory

__all__ = ["compile_ahead", "compile_all"]

_log = logging.getLogger("hipgroupgemm.triton")
_MOST_PROCESSES = 16
_WORTH = 3  # a process takes a second or two to come up, about as long as a kernel


def compile_ahead(specs: Sequence[KernelSpec], seconds: float | None = None) -> int:
    """Compiles what is not in the cache yet, in processes of their own; how many kernels that were.

    What Triton refuses, or there was no time for, stays uncompiled: `compile_kernel` meets it again, and says so.

    Args:
        specs: the kernels, the most wanted first.
        seconds: to stop after; None for no limit.
    """
    missing = [spec for spec in dict.fromkeys(specs) if not is_compiled(spec)]
    count = min(len(missing), available_cores(), _MOST_PROCESSES)
    if len(missing) < _WORTH or count < 2 or not sys.executable or not _cache_is_usable():
        return 0
    began = time.monotonic()
    workers: list[Worker] = []
    try:
        with ThreadPoolExecutor(count) as threads:  # leaving it waits for the threads, which end with their workers
            try:
                calls = []
                for index in range(count):
                    workers.append(Worker("compiling"))
                    calls.append(threads.submit(workers[-1].call, f"{__name__}:compile_all", missing[index::count]))
                if wait(calls, seconds).not_done:
                    _log.info("compiling ahead: stopped after %.1f s", seconds)
            finally:
                for worker in workers:
                    worker.kill()
    except OSError as error:
        _log.info("compiling ahead: no process could be started (%s)", error)
    done = sum(is_compiled(spec) for spec in missing)
    _log.info("compiled %d of %d kernels ahead in %.1f s, by %d processes", done, len(missing), time.monotonic() - began, count)
    return done


def _cache_is_usable() -> bool:
    """Whether another process finds what a worker has compiled."""
    directory = default_cache().directory
    try:
        return directory is not None and os.access(private_directory(directory), os.W_OK)
    except OSError:
        return False


def compile_all(specs: Sequence[KernelSpec]) -> None:
    """Compiles kernels one after the other."""
    for spec in specs:
        with contextlib.suppress(Exception):  # who needs this one meets it again
            compile_kernel(spec)
