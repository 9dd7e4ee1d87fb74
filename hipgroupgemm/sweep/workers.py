"""What a sweep calls in its devices' processes: a device that goes away takes down one job, not the sweep."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import as_limits
from hipgroupgemm.measure.distributions import DISTRIBUTIONS
from hipgroupgemm.measure.workloads import CLASSES, config_of
from hipgroupgemm.operands.views import Device
from hipgroupgemm.processes import send
from hipgroupgemm.store.identity import identity
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.report import TuningReport
from hipgroupgemm.tuning.session import NO_MEMORY

__all__ = ["Outcome", "algorithm_names", "device_identity", "known_names", "run_job"]

_PACE = 0.1
"""Seconds between two messages about progress, at least."""


class Outcome(NamedTuple):
    """How a job ended: "ok" with a report, "refused", "out of memory", or "failed".

    The reason of an "ok" is why backends that were named are not in the report, if there are such.
    """

    status: str
    reason: str = ""
    report: TuningReport | None = None


def device_identity(device: str) -> dict[str, Any]:
    """What results on a device hold for: its kind, target, compute units and the versions of what runs there."""
    return identity(Device.of(device))


def algorithm_names(job: SweepJob, device: Device, backends: Sequence[str], max_workspace_size: int | None = None) -> set[str]:
    """The names of the backends' algorithms that can run a job."""
    config, limits = config_of(CLASSES[job.kind], job.shape, job.dtype), as_limits(None, max_workspace_size)
    listed = [one for name in backends for one in get_backend(name).algorithms(config.key(), device, limits)]
    return {algorithm.name for algorithm in listed if algorithm.workspace_size <= limits.max_workspace_size}


def usable_backends(job: SweepJob, device: Device, names: Sequence[str] | None) -> tuple[list[str], str]:
    """Those of the backends that run a job, and why the others do not."""
    usable, refusals = [], []
    for name in backend_names() if names is None else names:
        try:
            select_backend(config_of(CLASSES[job.kind], job.shape, job.dtype), device, name)
            usable.append(name)
        except NotImplementedError as error:
            refusals.append(_text(error))
    return usable, "; ".join(refusals)


def known_names(device: str, jobs: Sequence[SweepJob], settings: Mapping[str, Any]) -> set[str]:
    """Those of the named algorithms that one of the jobs has on this device; all of them where that can't be told."""
    where, wanted = Device.of(device), set(settings["algorithms"])
    found: set[str] = set()
    for job in jobs:
        if found >= wanted:
            break
        try:
            found |= algorithm_names(
                job, where, usable_backends(job, where, settings.get("backends"))[0], settings.get("max_workspace_size")
            )
        except Exception:  # a broken backend is a row of the sweep
            return wanted
    return found & wanted


def run_job(device: str, job: SweepJob, settings: dict[str, Any]) -> Outcome:
    """Tunes one job and sends (phase, done, total) meanwhile."""
    said = 0.0

    def progress(event: Any) -> None:
        nonlocal said
        if time.monotonic() - said >= _PACE:
            said = time.monotonic()
            send((str(event.phase), int(event.done), int(event.total)))

    try:
        where, names, refusals = Device.of(device), settings["algorithms"], ""
        config = config_of(CLASSES[job.kind], job.shape, job.dtype)
        if "backends" in settings or not isinstance(names, str):
            usable, told = usable_backends(job, where, settings.get("backends"))
            if "backends" in settings:
                settings["backends"], refusals = usable, told
            if not usable:
                return Outcome("refused", told)
            if not isinstance(names, str):  # a list for all jobs, not each of them has them all
                there = algorithm_names(job, where, usable, settings.get("max_workspace_size"))
                settings["algorithms"] = [name for name in names if name in there]
            if not settings["algorithms"]:
                return Outcome("refused", f"no backend has {', '.join(map(repr, names))} for this problem")
        if job.group_sizes is not None and job.distribution in DISTRIBUTIONS:
            settings["origin"] = job.distribution  # a file's sizes are real ones
        samples = None if job.group_sizes is None else [list(sizes) for sizes in job.group_sizes]
        return Outcome("ok", refusals, tune(config, where, samples, progress=progress, **settings))
    except BrokenPipeError:  # the sweep is gone
        raise
    except NotImplementedError as error:
        return Outcome("refused", _text(error))
    except Exception as error:  # a broken backend or a lost device is a row of the sweep, not the end of it
        full = isinstance(error, MemoryError) or str(error).startswith(NO_MEMORY)
        return Outcome("out of memory" if full else "failed", _text(error))


def _text(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
