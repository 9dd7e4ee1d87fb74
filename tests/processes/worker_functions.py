"""What tests of `processes` let a worker do: most of it ends badly."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from hipgroupgemm.processes import Worker, send, step

counts: dict[str, int] = {}


def count(name):
    """How often it was called in this process."""
    counts[name] = counts.get(name, 0) + 1
    return counts[name], os.getpid()


def double(value):
    return 2 * value


def directory():
    return [entry for entry in sys.path if not Path(entry).is_absolute()]


def variable(name):
    return os.environ.get(name)


def aborts():
    print("about to abort", file=sys.stderr, flush=True)
    os.abort()


def ends_by(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def prints():
    """Noise on both streams: none of it may get among the replies."""
    print("a" * 3000, flush=True)
    os.write(1, b"b" * 3000)
    os.write(2, b"c" * 100_000)
    return "done"


def raises(error):
    raise error


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("has a lambda")
        self.held = lambda: None


class Wordless(Exception):
    def __str__(self):
        raise ValueError("there are no words for it")

    def __reduce__(self):
        raise ValueError("nor a pickle")


def raises_unpicklable(kind):
    raise {"lambda": Unpicklable, "wordless": Wordless}[kind]()


def returns_unpicklable():
    return lambda: None


class Unreadable:
    """Can be sent, but not be read."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ImportError("this is not there")


def returns_unreadable():
    return Unreadable()


def steps(names, seconds=0.0, after="", end=None):
    """Goes through steps and sleeps in the last; or, having named all, ends."""
    for name in names:
        step(name, f"about {name}")
        send(name)
    if end is not None:
        os._exit(end)
    time.sleep(seconds)
    return after


def hangs_on(folder):
    """Ignores the signals that can be ignored, and has a child of its own."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    mark(folder, os.getpid())
    mark(folder, started.pid)
    while True:
        time.sleep(1e6)


def holds_the_lock(folder):
    """Hangs in C with the interpreter's lock held: no thread of this process runs any more."""
    mark(folder, os.getpid())
    ctypes.PyDLL(None).sleep(1_000_000)


def holds_the_lock_later(seconds):
    threading.Timer(seconds, ctypes.PyDLL(None).sleep, (1_000_000,)).start()


def forks():
    """There are two of it afterwards."""
    faulthandler.cancel_dump_traceback_later()
    os.fork()
    return "done"


def forks_and_dies():
    """Its copy lives on, and holds the connection open."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os._exit(4)


def starts_a_worker(folder):
    """A worker of its own, which is in the midst of something."""
    worker = Worker("nested")
    mark(folder, os.getpid())
    worker.call("worker_functions:hangs_on", folder)


def mark(folder, pid):
    with (Path(folder) / "marks").open("a") as file:
        file.write(f"{pid}\n")
