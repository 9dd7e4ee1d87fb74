"""The tuning store: what tuning found, kept on disk for later processes, and looked up when a plan is made.

It is a directory of JSON files, one for each kind of device (target and compute units), such as `rocm-gfx942-304cus.v2.json`.

HIPGROUPGEMM_TUNING_STORE names the directory, or is "off" ("0", "no", "false" and "none" mean that too); without it that is `tuning` in
the package's cache directory. Plans look at it when they are made, and only then: results that another process stores reach a process with
the next plan that it makes, those that it stores itself (`TuningStore.add`, `merge`, `remove`) reach `ragged_dot` with the next call.

A lookup raises nothing: whatever is wrong with the store costs one warning of the logger `hipgroupgemm.tuning`, and the plan is made as
if nothing were stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.backends import backend_names, get_backend, refusal_of, select_backend, selection, selection_changed
from hipgroupgemm.backends.base import NO_SETTINGS, MatmulAlgorithm, PlanSettings, versions_of
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime.directories import CACHE_VARIABLE, cache_directory
from hipgroupgemm.store.files import SCHEMA, VARIABLE, StoreFile, StoreWriteError, decode, msgspec, parse, render, warn_once
from hipgroupgemm.store.identity import DeviceKind, device_kind, device_name
from hipgroupgemm.store.records import SEED, USER, StoredResult, config_id

__all__ = ["VARIABLE", "Query", "StoreWriteError", "TuningStore", "default_store", "lookup_for_plan", "store_directory", "why_off"]

_UNITS = {"cuda": "sms", "rocm": "cus", "cpu": "cores"}
_MOST_ANSWERS = 4096
_OFF = ("off", "0", "no", "false", "none")
_Change = Callable[[list[StoredResult]], list[StoredResult]]


def store_directory() -> Path | None:
    """The directory of the store by the environment, absolute; None where it is off, or there is no such place, see `why_off`.

    Raises nothing: a variable that names no place (`~` of a user who has no home, a relative one where the current directory is gone)
    costs one warning, and there is no store.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in _OFF:
        return None
    try:
        base = cache_directory()
        place = Path(named).expanduser() if named else base / "tuning" if base is not None else None
        return None if place is None else Path(os.path.abspath(place))
    except (RuntimeError, OSError, ValueError) as error:
        warn_once(("place", named), "tuning store: %s=%s names no directory (%s); going on without it", VARIABLE, named, error)
        return None


def why_off() -> str:
    """Why a store's directory is None, where it is."""
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in _OFF:
        return f"{VARIABLE}={named}"
    if msgspec is None:
        return "msgspec is not installed: pip install msgspec"
    return f"{VARIABLE}={named}, which is no place that can be found" if named else f"there is no home; {VARIABLE} can name a place for it"


@dataclasses.dataclass
class Query:
    """One look-up: what is wanted, what this process has for it, and why results were passed over.

    Attributes:
        key, device: the config's key and the device that is to run it.
        backend: only algorithms of this one; None for those of all. settings: what they have to be tuned for, and claim.
        size_class: the class of group sizes where it is known.
        reasons: why there is no answer. stale: (backend, reason) of results that would have answered and hold no more.
    """

    key: GroupedGemmConfig
    device: Device
    backend: str | None = None
    settings: PlanSettings = NO_SETTINGS
    size_class: str | None = None
    reasons: list[str] = dataclasses.field(default_factory=list)
    stale: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    _versions: dict[str, dict[str, str] | None] = dataclasses.field(default_factory=dict)

    def choose(self, results: Sequence[StoredResult]) -> StoredResult | None:
        """The result to go by, with the algorithm to take as its only one; None where there is none.

        Preferred are results of the class that was asked for, then of this device's own product, then of sizes that the user gave, of the
        balanced seed, of synthetic distributions; then those of the versions that are here; then the last. A result is passed over as
        stale when its answer was tuned with other versions, or is no longer found by name and index together. Where no backend is named
        it is passed over, too, when its answer was not compared to the backend that comes first without it.
        """
        ranked = []
        fitting: set[str] = set()
        for position, result in enumerate(results):
            wanted = [one for one in result.algorithms if self.backend in (None, one.backend) and self.settings.admit(one)]
            fitting.update(one.backend for one in wanted)
            found = next((one for one in wanted if self.versions(one.backend) is not None), None)
            if found is not None:
                origin = {USER: 0, SEED: 1}.get(result.origin, 2)
                rank = (result.size_class != self.size_class, result.device_name != device_name(self.device), origin)
                ranked.append(((*rank, bool(self._change(result, found)), -position), result, found))
        for _, result, found in sorted(ranked, key=lambda entry: entry[0]):
            answer = self._checked(result, found)
            if answer is not None:
                return dataclasses.replace(result, algorithms=(answer,))
        if not fitting:
            of = f" of backend {self.backend}" * bool(self.backend) + " with a deterministic algorithm" * self.settings.deterministic
            self.reasons.append(f"nothing is stored for this config{of}")
        refusing = sorted(name for name in fitting if self.versions(name) is None)
        if refusing:
            self.reasons.append(f"what is stored for this config is of {' and '.join(refusing)}, which can't run it here")
        return None

    def versions(self, backend: str) -> dict[str, str] | None:
        """The versions that a backend's results depend on; None where it is not here or can't run the config."""
        if backend not in self._versions:
            usable = backend in backend_names() and refusal_of(get_backend(backend), self.key, self.device, self.settings) is None
            self._versions[backend] = versions_of(get_backend(backend), self.device) if usable else None
        return self._versions[backend]

    def _change(self, result: StoredResult, found: MatmulAlgorithm) -> str:
        """The versions that differ, in words; "" where none do."""
        then, now = result.versions[found.backend], self.versions(found.backend) or {}
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return ", ".join(f"{name} is {now.get(name, 'not here')} now and was {then.get(name, 'not known')}" for name in names)

    def _checked(self, result: StoredResult, found: MatmulAlgorithm) -> MatmulAlgorithm | None:
        """The algorithm as it is here, None where the result is passed over."""
        reason = self._change(result, found)
        if not reason:
            first = None
            with contextlib.suppress(NotImplementedError):  # no backend runs it unnamed
                first = select_backend(self.key, self.device, settings=self.settings).name if self.backend is None else None
            if first not in (None, found.backend, *result.versions):
                alone = f"what is stored for this config is of {found.backend}, and was not compared to {first}, which comes first"
                self.reasons.append(f"{alone}; tune both, or name backend={found.backend!r}")
                return None
            here = get_backend(found.backend).find_algorithm(self.key, self.device, found.name, found.index)
            if here is not None:
                return dataclasses.replace(here, time=found.time, verdict="ok")
            reason = f"there is no algorithm {found.name!r} with index {found.index} now"
        self.stale.append((found.backend, reason))
        self.reasons.append(f"the stored result of backend {found.backend} is stale: {reason}")
        return None


class TuningStore:
    """The results in one directory. Any number of threads and processes may use a directory at a time.

    Args:
        directory: where the files are; made when the first result is stored. None takes that of the environment, see `store_directory`;
            where that is None, too, the store is off, holds nothing and takes nothing.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self.directory = Path(os.path.abspath(directory)) if directory is not None else store_directory()
        if msgspec is None and self.directory is not None:
            self.directory = None
            warn_once(("msgspec",), "tuning store: it is off (%s)", why_off())
        self._files: dict[str, StoreFile] = {}

    def path(self, device: DeviceKind) -> Path | None:
        """The file for a kind of device, whether it exists or not; None where the store is off."""
        target = urllib.parse.quote(device.target, safe="")
        name = f"{device.kind}-{target}-{device.compute_units}{_UNITS[device.kind]}.v{SCHEMA}.json"
        return None if self.directory is None else self.directory / name

    def _file(self, path: Path | None) -> StoreFile:
        if path is None:
            raise StoreWriteError(f"the tuning store is off ({why_off()}); name a directory")
        return self._files.get(path.name) or self._files.setdefault(path.name, StoreFile(path))

    # ---- looking up --------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        key: GroupedGemmConfig,
        device: Device,
        *,
        backend: str | None = None,
        settings: PlanSettings = NO_SETTINGS,
        size_class: str | None = None,
        why_not: Callable[[str], object] = lambda _: None,
    ) -> StoredResult | None:
        """The stored answer for a config's key on a device, checked against what the backend has now, see `Query.choose`; None without one.

        Only algorithms of `backend`, where one is named, are answers, and only those that were tuned with these settings and claim what
        they ask for; results of `size_class` come first. `why_not` is told why there is no answer. Raises nothing.
        """
        try:
            return self._answer(Query(key.key(), device, backend, settings, size_class), why_not)
        except Exception as error:  # a plan can do without
            text = f"{type(error).__name__}: {error}"
            warn_once(("lookup", self.directory, type(error)), "tuning store: %s is not used (%s)", self.directory, text)
            why_not(text)
            return None

    def _answer(self, query: Query, why_not: Callable[[str], object]) -> StoredResult | None:
        if self.directory is None:
            why_not(f"it is off ({why_off()})")
            return None
        try:
            kind = device_kind(query.device)
        except Exception as error:  # a GPU that can't be asked: whoever makes the plan will say so
            why_not(f"{query.device} can't be asked what it is ({error})")
            return None
        file = self._file(self.path(kind))
        results = [result for result in file.results(config_id(query.key, query.settings)) if result.device == kind]
        if not results:
            what = "" if file.empty else "this config on "
            why_not(file.trouble or f"nothing is stored for {what}{kind} in {self.directory}")
            return None
        found = query.choose(results)
        for backend, reason in query.stale:  # once for each cause, not for each of the many results that it may make stale
            text = "tuning store: a result of backend %s for %s is stale and not used: %s. Tune again"
            warn_once(("stale", file.path, backend, reason), text, backend, kind, reason)
        if found is None:
            why_not("; ".join(dict.fromkeys(query.reasons)))
        return found

    def results(self) -> list[StoredResult]:
        """All results of all devices that can be understood. A directory that can't be read has none and costs one warning."""
        return [result for file in self._all_files() for result in file.results()]

    def ignored(self) -> list[str]:
        """The names of files that an earlier version of this package wrote, in a form that this one does not read."""
        return [name for name in self._names() if name.endswith(".v1.json")]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.directory)) if self.directory is not None else []
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            warn_once(("list", self.directory), "tuning store: can't read %s (%s); going on without it", self.directory, error)
            return []

    def _all_files(self) -> list[StoreFile]:
        names = [name for name in self._names() if name.endswith(f".v{SCHEMA}.json") and not name.startswith(".")]
        return [self._file(Path(self.directory or "", name)) for name in names]

    # ---- storing -----------------------------------------------------------------------------------------------------------

    def add(self, result: StoredResult) -> bool:
        """Stores a result, in the place of the one of its `slot`. Whether the store holds it now.

        A store that is off takes nothing; one that can't be written costs one warning.
        """
        change: _Change = lambda held: [*(one for one in held if one.slot != result.slot), result]  # noqa: E731
        return self._tried(result.device, result.id, change)

    def strike(
        self,
        key: GroupedGemmConfig,
        device: DeviceKind,
        wrong: Collection[MatmulAlgorithm],
        versions: Mapping[str, Mapping[str, str]],
        settings: PlanSettings = NO_SETTINGS,
    ) -> bool:
        """Takes algorithms that were found wrong with these versions of their backends out of all results of a config with these settings.

        Raises as `add`.
        """
        keys = {one.key for one in wrong}

        def change(held: list[StoredResult]) -> list[StoredResult]:
            left = []
            for one in held:
                right = tuple(a for a in one.algorithms if a.key not in keys or one.versions[a.backend] != versions.get(a.backend))
                if right:
                    left.append(one if right == one.algorithms else dataclasses.replace(one, algorithms=right))
            return left

        return self._tried(device, config_id(key, settings), change)

    def _tried(self, device: DeviceKind, name: str, change: _Change) -> bool:
        try:
            return self.directory is not None and self._update(self._file(self.path(device)), change, name)
        except StoreWriteError as error:
            warn_once(("write", self.path(device)), "tuning store: what was tuned is not stored: %s", error)
            return False

    def _update(self, file: StoreFile, change: _Change, name: str | None = None) -> bool:
        written = file.update(change, name)
        if written:
            selection_changed()
        return written

    def merge(self, data: bytes, *, dry_run: bool = False) -> tuple[int, int]:
        """Merges an export, or a file of another store. Of two results of one slot the one that was tuned later stays.

        Returns how many results were taken (with `dry_run`: would be), and how many were not. Raises ValueError, before anything is
        merged, for other data, and StoreWriteError.
        """
        incoming: dict[DeviceKind, list[StoredResult]] = {}
        taken, parsed = 0, parse(data)
        count = sum(map(len, parsed.values()))
        for result in (one for name, raws in parsed.items() for one in decode(name, raws, "what is imported")[0]):
            incoming.setdefault(result.device, []).append(result)
        for device, new in incoming.items():

            def change(held: list[StoredResult], new: list[StoredResult] = new) -> list[StoredResult]:
                nonlocal taken
                by_slot = {one.slot: one for one in held}
                later = {one.slot: one for one in new if one.slot not in by_slot or by_slot[one.slot].tuned < one.tuned}
                taken += len(later)
                return sorted({**by_slot, **later}.values(), key=lambda one: one.tuned) if later else held

            file = self._file(self.path(device))
            if dry_run:
                change(file.results())
            else:
                self._update(file, change)
        return taken, count - taken

    def export(self, wanted: Callable[[StoredResult], bool] = lambda _: True) -> bytes:
        """The results that `wanted` picks, as JSON that `merge` takes; in the form of a file of the store."""
        return render(filter(wanted, self.results()), {})

    def remove(self, unwanted: Callable[[StoredResult], bool], *, dry_run: bool = False) -> list[StoredResult]:
        """Removes the results that `unwanted` picks, and returns them; with `dry_run` they stay. Raises StoreWriteError."""
        removed = []
        for file in self._all_files():
            gone = list(filter(unwanted, file.results()))
            removed += gone
            if gone and not dry_run:
                self._update(file, lambda held: [one for one in held if not unwanted(one)])
        return removed


@functools.lru_cache(1)
def _store_of(*environment: str | None) -> TuningStore:
    return TuningStore()


def default_store() -> TuningStore:
    """The store of the environment; found anew when its variables have changed."""
    return _store_of(*map(os.environ.get, (VARIABLE, CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME")))


_invariant: dict[Any, tuple[MatmulAlgorithm | None, str]] = {}


def lookup_for_plan(
    key: GroupedGemmConfig, device: Device, backend: str | None, settings: PlanSettings
) -> tuple[MatmulAlgorithm | None, str]:
    """What a plan begins with: the algorithm that tuning has stored and where it comes from, or None and why. Raises nothing.

    Plans that have to be batch-invariant get one answer for every m, until this process stores something: what other processes store
    meanwhile would tell plans apart by when they were made.
    """
    why: list[str] = []
    store = default_store()
    known = (store.directory, config_id(key, settings), device, backend, settings, selection.version)
    if settings.batch_invariant and known in _invariant:
        return _invariant[known]
    found = store.lookup(key, device, backend=backend, settings=settings, why_not=why.append)
    answer = (found.algorithm, found.describe()) if found is not None else (None, "".join(why))
    if settings.batch_invariant:
        if len(_invariant) >= _MOST_ANSWERS:
            _invariant.clear()
        _invariant[known] = answer
    return answer
