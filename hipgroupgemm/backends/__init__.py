"""The registry of backends: who can run a config on a device, and in which order they are asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from hipgroupgemm.backends.base import NO_SETTINGS, Backend, PlanSettings
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime.forks import new_rlock

__all__ = [
    "StoredWinner", "backend_kinds", "backend_names", "check_settings", "get_backend", "refusal_of", "register_backend", "select_backend",
    "selection", "selection_changed", "unregister_backend",
]  # fmt: skip

StoredWinner = Callable[[GroupedGemmConfig, Device], "str | None"]
"""Looks up the backend that tuning has found best for a key on a device; None where nothing is stored."""

_BUILTIN: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (module:class, the kinds of device it is asked for), in the order in which they are asked
    "hipblaslt": ("hipgroupgemm.backends.hipblaslt:HipblasltBackend", ("rocm",)),
    "triton": ("hipgroupgemm.backends.triton:TritonBackend", ("rocm", "cuda")),
    "reference": ("hipgroupgemm.backends.reference:ReferenceBackend", ("cpu",)),
}

_DEVICE_KINDS = ("cpu", "cuda", "rocm")
_lock = new_rlock()
_kinds: dict[str, tuple[str, ...]] = {name: kinds for name, (_, kinds) in _BUILTIN.items()}  # replaced, never changed: read without a lock
_loaded: dict[str, Backend] = {}


class _Selection:
    version = 0


selection = _Selection()
"""Its version changes when a backend comes or goes or tuning results are stored: the same call may be given to another backend then."""


def register_backend(backend: Backend, kinds: Iterable[str], *, first: bool = False) -> None:
    """Adds a backend, asked for devices of the given kinds ("cpu", "cuda", "rocm") after the others, or before them.

    Raises:
        TypeError: no instance of a backend, a name that is no string, or kinds that are no sequence of names.
        ValueError: an unknown kind of device, or a backend of that name is there already.
    """
    global _kinds
    if not isinstance(backend, Backend):
        raise TypeError(f"backend={backend!r}: wanted an instance of a subclass of backends.base.Backend")
    if not isinstance(getattr(backend, "name", None), str) or not backend.name:
        raise TypeError(f"backend={backend!r}: wanted a name that is a string, got {getattr(backend, 'name', None)!r}")
    if isinstance(kinds, str):
        raise TypeError(f"kinds={kinds!r}: wanted a sequence of kinds, such as ({kinds!r},)")
    kinds = tuple(kinds)
    for kind in kinds:
        if kind not in _DEVICE_KINDS:
            raise ValueError(f"kinds={kinds!r}: {kind!r} is no kind of device; wanted some of {', '.join(_DEVICE_KINDS)}")
    with _lock:
        if backend.name in _kinds:
            raise ValueError(f"backend {backend.name!r} is registered already; unregister it first")
        entry = {backend.name: kinds}
        _loaded[backend.name] = backend
        _kinds = {**entry, **_kinds} if first else {**_kinds, **entry}
        selection.version += 1


def unregister_backend(name: str) -> None:
    """Removes a backend that `register_backend` added; raises ValueError for any other name."""
    global _kinds
    with _lock:
        if name in _BUILTIN or name not in _kinds:
            raise ValueError(f"backend {name!r} was not added by register_backend")
        _kinds = {other: kinds for other, kinds in _kinds.items() if other != name}
        del _loaded[name]
        selection.version += 1


def selection_changed() -> None:
    """Makes `selection.version` another one: what `select_backend`'s `stored` answers has changed."""
    with _lock:
        selection.version += 1


def backend_names() -> tuple[str, ...]:
    """All backends by name, in the order in which they are asked."""
    return tuple(_kinds)


def backend_kinds() -> dict[str, tuple[str, ...]]:
    """All backends by name, and the kinds of device that each is asked for, in the order in which they are asked."""
    return _kinds.copy()


def check_settings(backend: object = None, **flags: object) -> None:
    """Raises TypeError for a backend that is no name, and for flags that are no bools: a text such as "no" is no false."""
    if not isinstance(backend, (str, type(None))):
        raise TypeError(f"backend: got {type(backend).__name__}, wanted a backend's name or None")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: must be True or False")


def get_backend(name: str, max_multiprocessors: int | None = None) -> Backend:
    """The backend of that name, loaded on first use, kept to so many CUs or SMs where that is given.

    Raises ValueError for a name that no backend has, TypeError for what is no name.
    """
    if not isinstance(name, str):
        raise TypeError(f"backend: got {type(name).__name__}, wanted a backend's name")
    with _lock:
        if name not in _kinds:
            raise ValueError(f"backend={name!r}: no such backend; there are {', '.join(_kinds)}")
        if name not in _loaded:
            module, _, cls = _BUILTIN[name][0].partition(":")
            _loaded[name] = getattr(importlib.import_module(module), cls)()
        found = _loaded[name]
    return found if max_multiprocessors is None else found.limited(max_multiprocessors)


def refusal_of(backend: Backend, config: GroupedGemmConfig, device: Device, settings: PlanSettings = NO_SETTINGS) -> str | None:
    """Why a backend cannot run a config on a device with these settings, or None."""
    return backend.can_handle(config, device) or backend.lacks(config, settings)


def select_backend(
    config: GroupedGemmConfig,
    device: Device,
    name: str | None = None,
    stored: StoredWinner | None = None,
    settings: PlanSettings = NO_SETTINGS,
) -> Backend:
    """The backend that runs `config` on `device` with these settings.

    A named one runs it or refuses. Otherwise the stored winner is taken, if it is there and can; else the first that can.

    Raises:
        ValueError: no backend has that name.
        NotImplementedError: refused; the text carries every reason.
    """
    winner = name or (stored(config.key(), device) if stored is not None else None)
    found: Backend | None = None
    if name is not None or winner in _kinds:
        found = get_backend(str(winner))
        reason = refusal_of(found, config, device, settings)
        if reason is not None and name is not None:
            raise NotImplementedError(f"backend {name!r} refuses: {reason}")
        found = found if reason is None else None
    if found is None:
        found, refusals = _first_that_can(config, device, settings)
        if found is None:
            raise NotImplementedError(f"no backend runs this grouped GEMM on {device}: " + "; ".join(refusals))
    return found if settings.max_multiprocessors is None else found.limited(settings.max_multiprocessors)


def passed_over(config: GroupedGemmConfig, device: Device, name: str, settings: PlanSettings = NO_SETTINGS) -> list[str]:
    """Why the backends that are asked ahead of `name` for this kind of device do not run `config`: "<backend>: <reason>" each."""
    found, refusals = _first_that_can(config, device, settings, only_kind=True)
    return refusals if found is not None and found.name == name else []


def _first_that_can(
    config: GroupedGemmConfig, device: Device, settings: PlanSettings, *, only_kind: bool = False
) -> tuple[Backend | None, list[str]]:
    """The first backend that can run a config, and the refusals of those asked before it."""
    refusals: list[str] = []
    for candidate, kinds in _kinds.items():
        if device.kind in kinds:
            try:
                backend = get_backend(candidate)
            except ValueError:  # another thread has just unregistered it
                continue
            reason = refusal_of(backend, config, device, settings)
            if reason is None:
                return backend, refusals
            refusals.append(f"{candidate}: {reason}")
        elif not only_kind:
            refusals.append(f"{candidate}: serves {' and '.join(kinds)}, the operands are on {device}")
    return None, refusals
