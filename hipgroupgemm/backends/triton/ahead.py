"""Compiles many kernels at once, each core a few of them, into the cache on disk: tuning would wait for one after the other."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from hipgroupgemm.backends.triton.compiler import KernelSpec, compile_kernel, is_compiled
from hipgroupgemm.runtime.cache import default_cache
from hipgroupgemm.runtime.process import available_cores, import_path

__all__ = ["compile_ahead", "main"]

_log = logging.getLogger("hipgroupgemm.triton")
_MOST_PROCESSES = 16
_WORTH = 3  # a process takes a second or two to come up, about as long as a kernel
_START = "import sys; sys.path[:] = {path!r}; from hipgroupgemm.backends.triton.ahead import main; main()"


def compile_ahead(specs: Sequence[KernelSpec], seconds: float | None = None) -> int:
    """Compiles what is not in the cache yet, in processes of their own; how many kernels that were.

    What Triton refuses, or there was no time for, stays uncompiled: `compile_kernel` meets it again, and says so.

    Args:
        specs: the kernels, the most wanted first.
        seconds: to stop after; None for no limit.
    """
    missing = [spec for spec in dict.fromkeys(specs) if not is_compiled(spec)]
    count = min(len(missing), available_cores(), _MOST_PROCESSES)
    if len(missing) < _WORTH or count < 2 or default_cache().directory is None or not sys.executable:
        return 0
    began = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            running.append(_start(missing[index::count]))
        for process in running:
            left = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
            process.wait(left)
    except subprocess.TimeoutExpired:
        _log.info("compiling ahead: stopped after %.1f s", seconds or 0.0)
    except OSError as error:
        _log.info("compiling ahead: no process could be started (%s)", error)
    finally:
        for process in running:
            _end(process)
    done = sum(is_compiled(spec) for spec in missing)
    _log.info("compiled %d of %d kernels ahead in %.1f s, by %d processes", done, len(missing), time.monotonic() - began, count)
    return done


def _start(specs: Sequence[KernelSpec]) -> subprocess.Popen[bytes]:
    """A process, in a session of its own since compilers start others, that compiles some kernels one after the other."""
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-c", _START.format(path=import_path())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            pickle.dump(list(specs), process.stdin)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Compiles the kernels that come pickled on standard input."""
    for spec in pickle.load(sys.stdin.buffer):
        with contextlib.suppress(Exception):  # who needs this one meets it again
            compile_kernel(spec)
