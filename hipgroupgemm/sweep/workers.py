"""What a sweep calls in its devices' processes: a device that goes away takes down one job, not the sweep."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import as_limits
from hipgroupgemm.measure.distributions import DISTRIBUTIONS
from hipgroupgemm.measure.workloads import CLASSES, config_of
from hipgroupgemm.operands.views import Device
from hipgroupgemm.processes import send
from hipgroupgemm.store.identity import identity
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.sweep.results import Record
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.session import NO_MEMORY

__all__ = ["algorithm_names", "device_identity", "known_names", "run_job"]

_PACE = 0.1
"""Seconds between two messages about progress, at least."""


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


def run_job(device: str, identity: dict[str, Any], job: SweepJob, settings: dict[str, Any]) -> Record:
    """Tunes one job and sends (phase, done, total) meanwhile."""
    said = 0.0

    def progress(event: Any) -> None:
        nonlocal said
        if time.monotonic() - said >= _PACE:
            said = time.monotonic()
            send((str(event.phase), int(event.done), int(event.total)))

    record = Record(job, device, identity, "refused")
    try:
        where, names = Device.of(device), settings["algorithms"]
        if "backends" in settings or not isinstance(names, str):
            usable, record.reason = usable_backends(job, where, settings.get("backends"))
            if not usable:
                return record
            if not isinstance(names, str):  # a list for all jobs, not each of them has them all
                there = algorithm_names(job, where, usable, settings.get("max_workspace_size"))
                settings["algorithms"] = [name for name in names if name in there]
                if not settings["algorithms"]:
                    record.reason = f"no backend has {', '.join(map(repr, names))} for this problem"
                    return record
            if "backends" in settings:
                settings["backends"] = usable
            else:
                record.reason = ""
        if job.group_sizes is not None and job.distribution in DISTRIBUTIONS:
            settings["origin"] = job.distribution  # a file's sizes are real ones
        samples = None if job.group_sizes is None else [list(sizes) for sizes in job.group_sizes]
        report = tune(config_of(CLASSES[job.kind], job.shape, job.dtype), where, samples, progress=progress, **settings)
        record.status, record.report = "ok", report.to_dict()
        best = None if report.best is None else report.best.algorithm.key
        record.best = next((row for row in record.rows if (row.backend, row.index, row.name) == best), None)
    except BrokenPipeError:  # the sweep is gone
        raise
    except NotImplementedError as error:
        record.reason = _text(error)
    except Exception as error:  # a broken backend or a lost device is a row of the sweep, not the end of it
        full = isinstance(error, MemoryError) or str(error).startswith(NO_MEMORY)
        record.status, record.reason = "out of memory" if full else "failed", _text(error)
    return record


def _text(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
