"""What a sweep calls in its devices' processes: a device that goes away takes down one job, not the sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import as_limits
from hipgroupgemm.measure.distributions import DISTRIBUTIONS
from hipgroupgemm.operands.views import Device
from hipgroupgemm.processes import send
from hipgroupgemm.store.identity import identity
from hipgroupgemm.sweep.jobs import SweepJob
from hipgroupgemm.sweep.results import Record
from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.session import NO_MEMORY

__all__ = ["algorithm_names", "device_identity", "run_job"]

_PACE = 0.1
"""Seconds between two messages about progress, at least."""


def device_identity(device: str) -> dict[str, Any]:
    """What results on a device hold for: its kind, target, compute units and the versions of what runs there."""
    return identity(Device.of(device))


def algorithm_names(job: SweepJob, device: Device, backends: Sequence[str], max_workspace_size: int | None = None) -> set[str]:
    """The names of the backends' algorithms that can run a job."""
    limits = as_limits(None, max_workspace_size)
    listed = [one for name in backends for one in get_backend(name).algorithms(job.config.key(), device, limits)]
    return {algorithm.name for algorithm in listed if algorithm.workspace_size <= limits.max_workspace_size}


def _fitting(job: SweepJob, device: Device, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The settings with those of the named backends and algorithms that a job has, and why others are left out.

    Lists are for all jobs, and not each of them has them all. Raises NotImplementedError where it has none.
    """
    backends, names = settings.get("backends"), settings["algorithms"]
    if backends is None and isinstance(names, str):
        return settings, ""
    usable, refusals = [], []
    for name in backends or backend_names():
        try:
            select_backend(job.config, device, name)
            usable.append(name)
        except NotImplementedError as error:
            refusals.append(_text(error))
    reasons = "; ".join(refusals)
    if not usable:
        raise NotImplementedError(reasons)
    if not isinstance(names, str):
        there = algorithm_names(job, device, usable, settings.get("max_workspace_size"))
        names = [name for name in names if name in there]
        if not names:
            raise NotImplementedError(f"no backend has {', '.join(map(repr, settings['algorithms']))} for this problem")
    return {**settings, "algorithms": names, **({} if backends is None else {"backends": usable})}, reasons if backends else ""


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
        settings, record.reason = _fitting(job, Device.of(device), settings)
        if job.group_sizes is not None and job.distribution in DISTRIBUTIONS:
            settings = {**settings, "origin": job.distribution}  # a file's sizes are real ones
        samples = None if job.group_sizes is None else [list(sizes) for sizes in job.group_sizes]
        report = tune(job.config, Device.of(device), samples, progress=progress, **settings)
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
