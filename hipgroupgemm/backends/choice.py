"""What a plan's settings mean for its choice among a backend's algorithms."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

from hipgroupgemm.backends.base import AlgorithmLimits, Backend, MatmulAlgorithm, Multiprocessors, PlanSettings
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime import get_runtime

__all__ = ["best_guess", "find_pinned", "list_algorithms", "settings_on"]

_USUAL_ROWS = 128  # per group: what a guess goes by that has to be the same for every m


def settings_on(device: Device, deterministic: bool, batch_invariant: bool, max_multiprocessors: Any) -> tuple[PlanSettings, str]:
    """A caller's settings as far as they matter on a device, and what a person should know of that. Raises as `Multiprocessors.of`."""
    most = Multiprocessors.of(max_multiprocessors)
    everything = PlanSettings(deterministic, batch_invariant)
    if most is None:
        return everything, ""
    if device.kind == "cpu":
        return everything, f"max_multiprocessors={most} has no effect on a CPU"
    with contextlib.suppress(RuntimeError, ValueError):  # a device that cannot be asked: the backends say so
        count = get_runtime(device.kind).device_info(device.index).multiprocessors
        if most >= count:
            return everything, f"max_multiprocessors={most} is all: {device} has {count}"
    return dataclasses.replace(everything, max_multiprocessors=int(most)), ""


def list_algorithms(
    backend: Backend, key: GroupedGemmConfig, device: Device, settings: PlanSettings, limits: AlgorithmLimits
) -> list[MatmulAlgorithm]:
    """The algorithms of a key within the limits, the best guess first; where the settings ask for batch-invariant ones, those alone."""
    if not settings.batch_invariant:
        return backend.algorithms(key, device, limits)
    every = dataclasses.replace(limits, max_algorithm_count=sys.maxsize, batch_invariant=True)
    return [one for one in backend.algorithms(key, device, every) if one.batch_invariant][: limits.max_algorithm_count]


def best_guess(backend: Backend, key: GroupedGemmConfig, device: Device, settings: PlanSettings) -> MatmulAlgorithm:
    """The best guess that the settings admit; where they ask for a batch-invariant one, the same for every m.

    Raises NotImplementedError where there is none.
    """
    asked = key
    if settings.batch_invariant and key.m:
        asked = dataclasses.replace(key, m=_USUAL_ROWS * max(1, key.group_count))
    limits = AlgorithmLimits() if settings.deterministic else AlgorithmLimits(1)
    found = next(filter(settings.admit, list_algorithms(backend, asked, device, settings, limits)), None)
    if found is None:
        claims = f" {settings}" if settings.deterministic or settings.batch_invariant else ""
        raise NotImplementedError(f"{backend.name} has no{claims} algorithm for this config on {device}")
    if asked is not key and backend.find_algorithm(key, device, found.name, found.index) is None:
        raise NotImplementedError(
            f"batch_invariant=True: {backend.name} {found.name!r}, which has to serve every m, cannot run m={key.m}; pin another algorithm"
        )
    return found


def find_pinned(backend: Backend, key: GroupedGemmConfig, device: Device, settings: PlanSettings, name: str, index: int) -> MatmulAlgorithm:
    """The algorithm of that name and index together; raises ValueError where there is none, or it is not batch-invariant and has to be."""
    found = backend.find_algorithm(key, device, name, index)
    if found is not None and found.batch_invariant >= settings.batch_invariant:
        return found
    known = list_algorithms(backend, key, device, settings, AlgorithmLimits())
    same = [str(c.index) for c in known if c.name == name]
    some = ", ".join(f"{c.name!r} {c.index}" for c in known[:3])
    hint = f"that name has index {', '.join(same)} here" if same else f"it has {some}{', ...' if len(known) > 3 else ''}"
    what = f"batch-invariant {name!r}" if found is not None else f"{name!r}"
    raise ValueError(f"algorithm: {backend.name} has no {what} with index {index} for this config ({hint}); see get_algorithms()")
