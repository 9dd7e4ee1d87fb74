"""The tuning store: what tuning found, kept on disk for later processes, and looked up when a plan is made.

It is a directory of JSON files, one for each kind of device (target and compute units), such as `rocm-gfx942-304cus.v1.json`. A result is
found by the config's key, the class of the group sizes, and the versions that its backend's algorithms depend on; it names an algorithm by
index and name, and both are checked against what the backend has before it is used.

HIPGROUPGEMM_TUNING_STORE names the directory, or is "off" ("0", "no", "false" and "none" mean that too); without it that is `tuning` in
the package's cache directory. Plans look at it when they are made, and only then: results that another process stores reach a process with
the next plan that it makes, those that it stores itself (`TuningStore.add`, `merge`, `remove`) reach `ragged_dot` with the next call.

A lookup raises nothing: whatever is wrong with the store costs one warning of the logger `hipgroupgemm.tuning`, and the plan is made as
if nothing were stored.
"""

from __future__ import annotations

import logging
import os
import re
import reprlib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hipgroupgemm.backends import backend_names, get_backend, select_backend, selection_changed
from hipgroupgemm.backends.base import MatmulAlgorithm, versions_of
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime.directories import CACHE_VARIABLE, cache_directory
from hipgroupgemm.store.entries import (
    MergeCounts,
    checked_kind,
    drop_empty,
    entries_of,
    insert_result,
    record_of,
    records_of,
    results_at,
    strike,
)
from hipgroupgemm.store.files import StoreFile, StoreWriteError, warn_once
from hipgroupgemm.store.identity import DeviceKind, device_kind, device_name
from hipgroupgemm.store.lookup import Asked, answer
from hipgroupgemm.store.records import (
    SCHEMA,
    StoredRecord,
    condemned_by,
    config_id,
    date_back,
    dated_after,
    kind_of,
    new_document,
    results_of,
)
from hipgroupgemm.tuning.report import TuningReport, printable

__all__ = ["MergeCounts", "StoreWriteError", "StoredRecord", "TuningStore", "default_store", "store_directory", "why_off"]

VARIABLE = "HIPGROUPGEMM_TUNING_STORE"
EXPORT_FORMAT = "hipgroupgemm tuning export"

_log = logging.getLogger("hipgroupgemm.tuning")
_UNITS = {"cuda": "sms", "rocm": "cus", "cpu": "cores"}
_NAME = re.compile(rf"(cpu|cuda|rocm)-(.+)-(\d+)(?:{'|'.join(_UNITS.values())})\.v{SCHEMA}\.json")
_OFF = ("off", "0", "no", "false", "none")
_JUDGED = ("ok", "behind", "wrong", "nondeterministic", "crashed", "hung")


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
        return None if place is None else _absolute(place)
    except (RuntimeError, OSError, ValueError) as error:
        warn_once(("place", named), "tuning store: %s=%s names no directory (%s); going on without it", VARIABLE, named, error)
        return None


def why_off() -> str:
    """Why `store_directory` is None, where it is."""
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        return f"{VARIABLE}={named}{'' if named.lower() in _OFF else ', which is no place that can be found'}"
    return f"there is no home directory; {VARIABLE} can name one for it"


def _absolute(path: Path) -> Path:
    """A relative one is of the directory that is the current one now, not of what it may be later."""
    return Path(os.path.abspath(path))


def _told(error: Exception) -> str:
    try:
        return printable(f"{type(error).__name__}: {error}")
    except Exception:  # a backend's, which can't tell what it is
        return type(error).__name__


class TuningStore:
    """The results in one directory. Any number of threads and processes may use a directory at a time.

    Args:
        directory: where the files are; made when the first result is stored. None takes that of the environment, see `store_directory`.

    Attributes:
        directory: where the files are, or None: the store is off, holds nothing and takes nothing.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self.directory = _absolute(Path(directory)) if directory is not None else store_directory()
        self._files: dict[DeviceKind, StoreFile] = {}
        self._of_device: dict[Device, StoreFile] = {}

    def path(self, device: DeviceKind) -> Path | None:
        """The file for a kind of device, whether it exists or not; None where the store is off."""
        if self.directory is None:
            return None
        target = urllib.parse.quote(device.target, safe="")
        return self.directory / f"{device.kind}-{target}-{device.compute_units}{_UNITS[device.kind]}.v{SCHEMA}.json"

    def _file(self, device: DeviceKind) -> StoreFile:
        found = self._files.get(device)
        if found is None:
            path = self.path(device)
            if path is None:
                raise StoreWriteError(f"the tuning store is off ({why_off()}); name a directory")
            found = self._files.setdefault(device, StoreFile(path, device))
        return found

    # ---- looking up --------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        key: GroupedGemmConfig,
        device: Device,
        *,
        size_class: str | None = None,
        backend: str | None = None,
        deterministic: bool = False,
        why_not: Callable[[str], object] = lambda _: None,
    ) -> StoredRecord | None:
        """The stored answer for a config's key on a device, checked against what the backend has now; None where there is none.

        Preferred are results of `size_class` where it is given, then those tuned on sizes that the user gave, the newest first, then
        those of the balanced seed, then those of synthetic distributions. Costs one stat as long as nothing is stored for this kind of
        device.

        Args:
            key: `config.key()`.
            device: the device that is to run it.
            size_class: "balanced", "skewed" or "sparse"; None where it is not known.
            backend: only algorithms of this one; None for the fastest of all.
            deterministic: only algorithms that give equal bits for equal inputs.
            why_not: is told why there is no answer, where there is none.

        Returns:
            A record whose `algorithm` is the one to take. A stale one is passed over with one warning. Raises nothing.

        Without `backend` the answer may change the backend that a plan would have. So it must have been compared: the algorithm is of the
        backend that comes first anyway, or that backend was tried in the same tuning, or on the same sizes. What was tuned for one backend
        alone (`backends="triton"`) always answers for that one by name.
        """
        if self.directory is None:
            why_not(f"it is off ({why_off()})")
            return None
        key = key.key()
        try:
            return self._answer(key, device, Asked(size_class, backend, deterministic), why_not)
        except Exception as error:  # a plan can do without
            told = _told(error)
            warn_once(("lookup", self.directory, type(error)), "tuning store: %s is not used (%s)", self.directory, told)
            why_not(told)
            return None

    def _answer(self, key: GroupedGemmConfig, device: Device, asked: Asked, why_not: Callable[[str], object]) -> StoredRecord | None:
        file = self._of_device.get(device)
        if file is None:
            try:
                file = self._of_device[device] = self._file(device_kind(device))
            except Exception as error:  # a GPU that can't be asked: whoever makes the plan will say so
                _log.debug("tuning store: %s can't be asked what it is (%s)", device, error)
                why_not(f"{device} can't be asked what it is ({error})")
                return None
        document = file.document()
        if document is None:
            why_not(file.trouble or f"nothing is stored for {file.device} in {self.directory}")
            return None
        name = config_id(key)
        entry = document["configs"].get(name)
        if entry is None:
            why_not(f"nothing is stored for this config on {file.device} in {self.directory}")
            return None
        memo = file.memo(document)
        records = memo.get(name)
        if records is None:
            records = memo[name] = list(records_of(entry, file, key))
        if not records:
            why_not(f"what is stored for this config in {file.path} is not understood")
            return None
        here = _Here(key, device, file)
        found = answer(records, asked, here)
        if found is None:
            why_not("; ".join(dict.fromkeys(here.reasons)) or "what is stored for this config can't be used")
        return found

    def records(self) -> list[StoredRecord]:
        """All results of all devices that can be understood. A directory that can't be read has none and costs one warning."""
        return [record for file in self._all_files() for _, record in entries_of(file.document(), file)]

    def _all_files(self) -> list[StoreFile]:
        if self.directory is None:
            return []
        try:
            names = sorted(os.listdir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            warn_once(("list", self.directory), "tuning store: can't read %s (%s); going on without it", self.directory, error)
            return []
        found = []
        for match in filter(None, map(_NAME.fullmatch, names)):
            try:
                file = self._file(DeviceKind(match[1], urllib.parse.unquote(match[2]), int(match[3])))
            except ValueError:  # no device has that
                continue
            if file.path.name == match[0]:  # else it is no name that is looked up
                found.append(file)
        return found

    # ---- storing -----------------------------------------------------------------------------------------------------------

    def add(self, report: TuningReport) -> list[StoredRecord]:
        """Stores what a report found: for each backend the algorithms that answer later lookups.

        Results of an earlier tuning with the same versions on sizes of the same class and origin: on equal sizes they stay in competition,
        as far as this report did not look at their algorithms; on other sizes the later report replaces them. An algorithm that the
        report found wrong is struck from all results of this config. Plans that `ragged_dot` keeps are made anew.

        Returns the results that the store now holds with something of this report in them, at most one a backend: none where no algorithm
        was right, where a later report's are there already, and where the store is off or can't be written, which costs one warning.
        Each has a `place`; a later result of the same place takes it over.
        """
        if self.directory is None:
            return []
        results, condemned = results_of(report), condemned_by(report)
        if not results and not condemned:
            return []
        judged = [row.algorithm for row in report.rows if row.verdict in _JUDGED]
        key, file = report.config.key(), self._file(kind_of(report.identity))
        held: list[StoredRecord] = []

        def change(document: dict[str, Any]) -> bool:
            stored = results_at(document, key, create=bool(results))
            if results:
                date_back(stored, results[0].date)
            struck = strike(stored, condemned, report, file)
            for result in dated_after(results, stored):
                own = [algorithm for algorithm in judged if algorithm.backend == result.backend]
                merged = insert_result(stored, result, file, MergeCounts(), own)
                if merged is not None:
                    held.append(merged)
            drop_empty(document, key)
            return struck or bool(held)

        try:
            written = file.update(change)
        except StoreWriteError as error:
            warn_once(("write", file.path), "tuning store: what was tuned is not stored: %s", error)
            return []
        if written:
            selection_changed()
        return held

    def merge(self, source: Any, *, dry_run: bool = False) -> MergeCounts:
        """Merges an export, or a file of another store, into this one.

        Of two results for one thing (device, config, class and origin of the sizes, backend and versions) that were tuned on the same
        sizes, the later measurement of each algorithm counts, and the fastest wins; on other sizes the later one wins, of equally old
        ones the faster.

        Args:
            source: what `export` returned, or a file's contents, as parsed JSON.
            dry_run: counts without writing.

        Raises:
            ValueError: neither of these, or of a later version of this package; nothing is merged then.
            StoreWriteError: a file can't be written; files of other devices may have been merged.
        """
        documents: Any = [source]
        if isinstance(source, dict) and source.get("format") == EXPORT_FORMAT:
            documents, schema = source.get("documents"), source.get("schema")
            if type(schema) is not int or schema != SCHEMA:
                raise ValueError(f"source: is an export of schema {reprlib.repr(schema)}, this version of hipgroupgemm knows {SCHEMA}")
        if not isinstance(documents, list):
            raise ValueError("source: is an export without documents")
        kinds = [checked_kind(document) for document in documents]
        counts = MergeCounts()
        for kind, document in zip(kinds, documents, strict=True):
            file = self._file(kind)
            incoming: list[StoredRecord] = []
            for entry in document["configs"].values():
                before = len(incoming)
                incoming += records_of(entry, file, None)
                counts.skipped += len(entry["results"]) - (len(incoming) - before)

            def change(target: dict[str, Any], file: StoreFile = file, incoming: list[StoredRecord] = incoming) -> bool:
                before = counts.added + counts.updated
                for record in incoming:
                    stored = results_at(target, record.config, create=True)
                    date_back(stored, record.date)
                    insert_result(stored, record, file, counts)
                return not dry_run and counts.added + counts.updated > before

            if dry_run:
                there = file.document() or new_document(kind)
                copies = {name: {**entry, "results": list(entry["results"])} for name, entry in there["configs"].items()}
                change({**there, "configs": copies})  # which puts results in the places of others, and changes none
            elif file.update(change):
                selection_changed()
        return counts

    def export(self, wanted: Callable[[StoredRecord], bool] = lambda _: True) -> dict[str, Any]:
        """The results for which `wanted` is true, as plain data for JSON that `merge` takes."""
        documents = []
        for file in self._all_files():
            document = new_document(file.device)
            for key, record in entries_of(file.document(), file):
                if wanted(record):
                    results_at(document, key, create=True).append(record.to_dict())
            if document["configs"]:
                documents.append(document)
        return {"format": EXPORT_FORMAT, "schema": SCHEMA, "documents": documents}

    def remove(self, unwanted: Callable[[StoredRecord], bool], *, dry_run: bool = False) -> list[StoredRecord]:
        """Removes the results for which `unwanted` is true, and returns them; `dry_run` only returns them.

        Raises StoreWriteError where a file can't be written; results of other files may have been removed.
        """
        removed: list[StoredRecord] = []
        for file in self._all_files():
            if dry_run:
                removed += [record for _, record in entries_of(file.document(), file) if unwanted(record)]
                continue
            if not any(unwanted(record) for _, record in entries_of(file.document(), file)):
                continue
            gone: list[StoredRecord] = []

            def change(document: dict[str, Any], file: StoreFile = file, gone: list[StoredRecord] = gone) -> bool:
                for name, entry in list(document["configs"].items()):
                    left = []
                    for result in entry["results"]:
                        record = record_of(entry, result, file)
                        if record is not None and unwanted(record):
                            gone.append(record)
                        else:
                            left.append(result)
                    entry["results"] = left
                    if not left:
                        del document["configs"][name]
                return bool(gone)

            if file.update(change):
                selection_changed()
                removed += gone
        return removed


class _Here:
    """What this process has for a config on a device. Implements `answer.Here`."""

    def __init__(self, key: GroupedGemmConfig, device: Device, file: StoreFile) -> None:
        self._key, self._device, self._file = key, device, file
        self.device_name = device_name(device)
        self.reasons: list[str] = []
        self._versions: dict[str, Mapping[str, str]] = {}

    def usable(self, backend: str) -> bool:
        return backend in backend_names() and get_backend(backend).can_handle(self._key, self._device) is None

    def versions(self, backend: str) -> Mapping[str, str]:
        found = self._versions.get(backend)
        if found is None:
            found = self._versions[backend] = versions_of(get_backend(backend), self._device)
        return found

    def find(self, algorithm: MatmulAlgorithm) -> MatmulAlgorithm | None:
        return get_backend(algorithm.backend).find_algorithm(self._key, self._device, algorithm.name, algorithm.index)

    def unanswered(self, reason: str) -> None:
        self.reasons.append(reason)

    def otherwise(self) -> str | None:
        try:
            return select_backend(self._key, self._device).name
        except NotImplementedError:
            return None

    def stale(self, record: StoredRecord, reason: str) -> None:
        self.reasons.append(f"the stored result of backend {record.backend} is stale: {reason}")
        # once for each cause, not for each of the many results that it may make stale
        warn_once(
            ("stale", self._file.path, record.backend, reason),
            "tuning store: a result of backend %s for %s is stale and not used: %s. Tune again; `hipgroupgemm store prune "
            "--other-versions` removes results of other versions",
            record.backend,
            record.device,
            reason,
        )


# ---- the store of this process -------------------------------------------------------------------------------------------------

_default: tuple[tuple[str | None, ...], TuningStore] | None = None


def default_store() -> TuningStore:
    """The store of the environment; found anew when its variables have changed."""
    global _default
    read = os.environ.get
    environment = (read(VARIABLE), read(CACHE_VARIABLE), read("XDG_CACHE_HOME"), read("HOME"))
    known = _default
    if known is None or known[0] != environment:
        _default = known = (environment, TuningStore())
    return known[1]


def lookup_for_plan(key: GroupedGemmConfig, device: Device, backend: str | None, deterministic: bool) -> tuple[MatmulAlgorithm | None, str]:
    """What a plan begins with: the algorithm that tuning has stored and where it comes from, or None and why. Raises nothing."""
    why: list[str] = []
    found = default_store().lookup(key, device, backend=backend, deterministic=deterministic, why_not=why.append)
    return (found.algorithm, found.describe()) if found is not None else (None, "".join(why))
