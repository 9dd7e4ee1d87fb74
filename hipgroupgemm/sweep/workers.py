"""One process a device: what a device takes down when it goes away is one job, not the sweep."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hipgroupgemm.sweep.jobs import HEURISTIC, SweepJob

__all__ = ["Outcome", "Progress", "Question", "Worker", "WorkerPool", "algorithm_names", "device_facts"]

TUNE = "hipgroupgemm.tuning.engine:tune"
IDENTITY = "hipgroupgemm.store.identity:identity"
NAMES = "hipgroupgemm.sweep.workers:algorithm_names"
"""What a worker calls; names, because a worker imports them itself."""

_GRACE = 10.0
"""Seconds that a worker has to stop its own children and go."""

_START = 300.0
"""Seconds that a worker has to say what its device is."""

_PACE = 0.1
"""Seconds between two messages about progress, at least."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a worker's job is: done of total in one phase of tuning."""

    phase: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a worker's job ended: its report, or a status ("refused", "out of memory", "failed") with a reason.

    The reason of an "ok" is why backends that were named are not in the report, if there are such.
    """

    status: str
    reason: str = ""
    report: Any = None


@dataclasses.dataclass(frozen=True)
class Question:
    """Which of the algorithms that are named in the settings no job has; the answer is a list of names."""

    jobs: Sequence[SweepJob]
    settings: Mapping[str, Any]


class Worker:
    """One device's process, in the eyes of the sweep.

    Attributes:
        device: its name. identity: what it is, once it has said so. job: what it is working on, or None.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.identity: dict[str, Any] | None = None
        self.job: int | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a driver that is initialised does not outlive a fork
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self.device, TUNE, IDENTITY, NAMES), name=f"hipgroupgemm-sweep {self.device}"
        )
        self._process.start()
        theirs.close()

    def wait_ready(self) -> str:
        """Waits until the worker knows its device and has filled `identity`; returns "", or why the device is of no use."""
        if not self.connection.poll(_START):
            return f"its driver has not answered within {_START:.0f} s"
        message = self.receive()
        if isinstance(message, Outcome):
            return message.reason
        self.identity = message
        return ""

    def missing(self, jobs: Sequence[SweepJob], settings: Mapping[str, Any]) -> list[str]:
        """The named algorithms that none of the jobs has on this device; empty, too, where that can't be told."""
        with contextlib.suppress(OSError):
            self.connection.send(Question(jobs, dict(settings)))
        answer = self.receive()
        if isinstance(answer, list):
            return answer
        reason = self.restart()  # listing took the process down: the jobs will tell
        if reason:
            raise RuntimeError(f"{self.device} is of no use: {reason}")
        return []

    def send(self, number: int, job: SweepJob, settings: Mapping[str, Any]) -> None:
        """Gives it a job; `receive` has what comes of it."""
        self.job = number
        with contextlib.suppress(OSError):  # it has just died: receive says so
            self.connection.send((job, dict(settings)))

    def receive(self) -> Any:
        """The next message: the identity first, then `Progress` and, at a job's end, `Outcome`. A dead worker's is an Outcome too."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_GRACE)
            return Outcome("failed", f"the worker process of {self.device} {_how(self._process.exitcode)}")

    def restart(self) -> str:
        """A new process for the device, so that nothing of a failure is left in it; returns what `wait_ready` returns."""
        self.stop()
        self._start()
        return self.wait_ready()

    def interrupt(self) -> None:
        """Asks it to stop what it does, as Ctrl-C would."""
        with contextlib.suppress(OSError):
            self.connection.close()
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGINT)

    def stop(self) -> None:
        """Ends the process, by force if need be."""
        if self.job is not None:
            self.interrupt()
        with contextlib.suppress(OSError):
            self.connection.close()  # an idle worker ends with its connection
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class WorkerPool:
    """The workers of a sweep, by device. A context manager: leaving it ends all of them."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.workers: list[Worker] = []
        self._devices = devices

    def __enter__(self) -> WorkerPool:
        """Starts them, all at once; `wait_ready` of each is the caller's."""
        try:
            for device in self._devices:
                self.workers.append(Worker(device))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        self.close()

    def close(self) -> None:
        """Ends all workers: those at work are interrupted first, all at once."""
        for worker in self.workers:
            if worker.job is not None:
                worker.interrupt()
        for worker in self.workers:
            worker.stop()

    def messages(self, timeout: float = 0.5) -> Iterator[tuple[Worker, Any]]:
        """What has come from workers at work; waits for at most so many seconds."""
        busy = {worker.connection: worker for worker in self.workers if worker.job is not None}
        for connection in multiprocessing.connection.wait(list(busy), timeout):
            worker = busy[connection]  # type: ignore[index]
            yield worker, worker.receive()


def _how(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


# ---- in the worker's process ---------------------------------------------------------------------------------------------------


def device_facts(device: str, identity: str = IDENTITY) -> dict[str, Any]:
    """What results on a device hold for: its kind, target, compute units and the versions of what runs there."""
    from hipgroupgemm.operands.views import Device

    facts: dict[str, Any] = _resolve(identity)(Device.of(device))
    return facts


def _resolve(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def _serve(connection: Any, device: str, tune: str, identity: str, names: str) -> None:
    """A worker's life: says what its device is, then tunes what it is sent until the connection ends."""
    _end_with_parent()
    signal.signal(signal.SIGINT, _interrupt_once)
    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        try:
            connection.send(device_facts(device, identity))
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            connection.send(Outcome("failed", _text(error)))
            return
        while True:
            message = connection.recv()
            if isinstance(message, Question):
                connection.send(_missing(device, names, message))
            else:
                job, settings = message
                connection.send(_tune(connection, device, tune, names, job, settings))


def algorithm_names(config: Any, device: Any, backends: Sequence[str] | None = None, max_workspace_size: int | None = None) -> list[str]:
    """The names of the algorithms that can run a config on a device."""
    from hipgroupgemm.backends import backend_names, get_backend, select_backend
    from hipgroupgemm.backends.base import as_limits

    found = []
    for name in backend_names() if backends is None else backends:
        with contextlib.suppress(NotImplementedError):
            select_backend(config, device, name)
            limits = as_limits(None, max_workspace_size)
            listed = get_backend(name).algorithms(config.key(), device, limits)
            found += [algorithm.name for algorithm in listed if algorithm.workspace_size <= limits.max_workspace_size]
    return found


def _missing(device: str, names: str, question: Question) -> list[str]:
    missing = list(question.settings["algorithms"])
    for job in question.jobs:
        try:
            there = _names(device, names, job, question.settings)
        except Exception:  # a broken backend is a row of the sweep
            return []
        missing = [name for name in missing if name not in there]
        if not missing:
            break
    return missing


def _names(device: str, names: str, job: SweepJob, settings: Mapping[str, Any]) -> set[str]:
    from hipgroupgemm.measure.workloads import config_of
    from hipgroupgemm.operands.views import Device

    config, backends = config_of(job.kind, job.shape, job.dtype), settings.get("backends")
    return set(_resolve(names)(config, Device.of(device), backends, settings.get("max_workspace")))


def _tune(connection: Any, device: str, tune: str, names: str, job: SweepJob, settings: dict[str, Any]) -> Outcome:
    from hipgroupgemm.measure.distributions import DISTRIBUTIONS
    from hipgroupgemm.measure.workloads import config_of
    from hipgroupgemm.operands.views import Device
    from hipgroupgemm.tuning.session import NO_MEMORY

    said = 0.0

    def progress(event: Any) -> None:
        nonlocal said
        if time.monotonic() - said >= _PACE:
            said = time.monotonic()
            connection.send(Progress(str(event.phase), int(event.done), int(event.total)))

    try:
        config, where = config_of(job.kind, job.shape, job.dtype), Device.of(device)
        arguments = _arguments(settings)
        refusals = ""
        if "backends" in arguments:
            arguments["backends"], refusals = _usable(arguments["backends"], config, where)
            if not arguments["backends"]:
                return Outcome("refused", refusals)
        if not isinstance(arguments["algorithms"], str):  # names are a list for all jobs, not each of them has them all
            there = _names(device, names, job, settings)
            wanted = list(arguments["algorithms"])
            arguments["algorithms"] = [name for name in wanted if name in there]
            if not arguments["algorithms"]:
                return Outcome("refused", f"no backend has {', '.join(map(repr, wanted))} for this problem")
        samples = None if job.samples is None else [list(sizes) for sizes in job.samples]
        if samples is not None and job.distribution in DISTRIBUTIONS:
            arguments["origin"] = job.distribution  # a file's sizes are real ones
        report = _resolve(tune)(config, where, samples, progress=progress, **arguments)
    except BrokenPipeError:  # the sweep is gone
        raise
    except NotImplementedError as error:
        return Outcome("refused", _text(error))
    except MemoryError as error:
        return Outcome("out of memory", _text(error))
    except Exception as error:  # a broken backend or a lost device is a row of the sweep, not the end of it
        return Outcome("out of memory" if str(error).startswith(NO_MEMORY) else "failed", _text(error))
    return Outcome("ok", refusals, report)


def _usable(names: Sequence[str], config: Any, device: Any) -> tuple[list[str], str]:
    """Those of the named backends that run a config, and why the others do not."""
    from hipgroupgemm.backends import select_backend

    usable, refusals = [], []
    for name in names:
        try:
            select_backend(config, device, name)
        except NotImplementedError as error:
            refusals.append(_text(error))
        else:
            usable.append(name)
    return usable, "; ".join(refusals)


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a sweep as the arguments of `tune`; what was not asked for is left to it."""
    names = {"max_workspace": "max_workspace_size"}
    arguments = {names.get(name, name): value for name, value in settings.items() if value is not None}
    arguments.setdefault("algorithms", HEURISTIC)
    return arguments


def _text(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


def _interrupt_once(*_: object) -> None:
    """Ctrl-C reaches a worker from the terminal and from the sweep; the second must not disturb what the first has begun to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """A sweep that is killed leaves no worker: its end is a Ctrl-C here, and by force where that does not help."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_GRACE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="hipgroupgemm-sweep-parent").start()
