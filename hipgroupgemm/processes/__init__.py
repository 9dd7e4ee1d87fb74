"""Worker processes: code that may crash or hang runs in one, and its parent gets an exception instead of dying or waiting.

A `Worker` is one Python process in a session of its own. `call` runs an importable function there and returns what it returns; what the
function keeps in its module's globals is there for the next call::

    from hipgroupgemm.processes import Worker, WorkerDied, WorkerTimedOut

    with Worker("an example") as worker:
        print(worker.call("math:sqrt", 9.0))
        try:
            worker.call("os:_exit", 3)  # a crash: the worker is gone, this process is not
        except WorkerDied as error:
            print(error.how)
    with Worker("another") as worker:
        try:
            worker.call("time:sleep", 60.0, deadlines={"run": 0.2})  # killed, with all that it has started
        except WorkerTimedOut as error:
            print(error.step, error.seconds)

A function that does several things names each with `step`, and each name has a deadline of its own. `send` gives the parent's `on_message`
something before the function returns. Several workers at once: one thread per worker makes the calls; `kill`, from any thread, ends a call.

`acquire` and `release` keep idle workers, since starting one takes a second and opening a GPU in it as long again.
"""

from __future__ import annotations

from hipgroupgemm.processes.serve import error_text, send, step
from hipgroupgemm.processes.worker import Worker, WorkerDied, WorkerTimedOut, acquire, close_workers, release
from hipgroupgemm.runtime.process import available_cores, import_path

__all__ = [
    "Worker",
    "WorkerDied",
    "WorkerTimedOut",
    "acquire",
    "available_cores",
    "close_workers",
    "error_text",
    "import_path",
    "release",
    "send",
    "step",
]
