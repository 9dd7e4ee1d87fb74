"""Which algorithms of which backends take part in a tuning."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Collection, Sequence

from hipgroupgemm.backends import backend_kinds, get_backend
from hipgroupgemm.backends.base import NO_SETTINGS, Backend, MatmulAlgorithm, PlanSettings, as_limits
from hipgroupgemm.backends.choice import list_algorithms
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.processes import error_text

__all__ = ["Candidate", "compile_candidates", "find_candidates"]

_HEURISTIC = 8
_COMPILING_SHARE = 0.4  # of a time limit

Candidate = tuple[Backend, MatmulAlgorithm]


def find_candidates(
    config: GroupedGemmConfig,
    device: Device,
    notes: list[str],
    backends: Sequence[str] | str | None,
    algorithms: str | Sequence[str],
    max_algorithms: int | None,
    max_workspace_size: int | None,
    settings: PlanSettings,
) -> list[Candidate]:
    """All candidates as `tune` takes its arguments, each backend's best guess first, then each one's second, and so on.

    A backend that was not named and raises when it is asked is left out, and a note says so.
    """
    named = algorithms
    if isinstance(named, str):
        named = () if named in ("all", "heuristic") else [named]
    count = _HEURISTIC if algorithms == "heuristic" and max_algorithms is None else max_algorithms
    limits = as_limits(count, max_workspace_size)
    if named or settings.deterministic:  # the count is of those that are left
        limits = dataclasses.replace(limits, max_algorithm_count=sys.maxsize)
    kinds = backend_kinds()
    names = [backends] if isinstance(backends, str) else backends
    if names is not None and not (isinstance(names, Collection) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"backends={backends!r}: must be a backend's name, several, or None")
    if names is not None and not names:
        raise ValueError("backends: got none; leave it out for all that can")
    lists, refusals = [], []
    for name in kinds if names is None else dict.fromkeys(names):
        if names is None and device.kind not in kinds[name]:
            refusals.append(f"{name}: serves {' and '.join(kinds[name])}")
            continue
        asked = "can_handle"
        try:
            backend = get_backend(name)
            reason = backend.can_handle(config, device) or backend.lacks(config, settings)
            asked = "algorithms"
            if reason is None:
                backend = get_backend(name, settings.max_multiprocessors)
                listed = list_algorithms(backend, config.key(), device, settings, limits)
        except Exception as error:
            if names is not None:
                raise
            notes.append(f"{name} was left out, since its {asked}() raised {error_text(error)}")
            continue
        if reason and names is not None:
            raise NotImplementedError(f"backend {name!r} refuses: {reason}")
        if reason:
            refusals.append(f"{name}: {reason}")
            continue
        listed = [a for a in listed if (not named or a.name in named) and settings.admit(a)]
        lists.append([(backend, algorithm) for algorithm in listed[:count]])
    if not lists:
        raise NotImplementedError(f"no backend runs this grouped GEMM on {device}: " + "; ".join([*refusals, *notes]))
    found = [pair for rank in itertools.zip_longest(*lists) for pair in rank if pair is not None]
    missing = [name for name in named if name not in {algorithm.name for _, algorithm in found}]
    if missing:
        raise ValueError(f"algorithms: no backend has {', '.join(map(repr, missing))} for this config on {device}; see get_algorithms()")
    if not found:
        within = f" within {max_workspace_size} bytes of workspace" if max_workspace_size is not None else ""
        kind = f" {settings}" if settings != NO_SETTINGS else ""
        raise NotImplementedError(f"there is no{kind} algorithm{within} for this config on {device}{''.join(f'; {n}' for n in notes)}")
    return found


def compile_candidates(found: Sequence[Candidate], config: GroupedGemmConfig, device: Device, time_limit: float, notes: list[str]) -> None:
    """Lets backends that can compile for all their candidates at once. What raises there raises again when a candidate is prepared."""
    seconds = None if time_limit == float("inf") else _COMPILING_SHARE * time_limit
    for backend in dict.fromkeys(backend for backend, _ in found):
        try:
            backend.compile_ahead(config.key(), device, [algorithm for one, algorithm in found if one is backend], seconds)
        except Exception as error:
            notes.append(f"{backend.name}: compiling ahead raised {error_text(error)}")
