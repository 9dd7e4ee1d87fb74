"""The results in a document of the tuning store: found, read, put in, struck. What is not understood is skipped and left where it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.store.files import StoreFile, warn_once
from hipgroupgemm.store.identity import DeviceKind
from hipgroupgemm.store.records import StoredRecord, check_document, config_id, merge_result, versions_in
from hipgroupgemm.tuning.report import TuningReport

__all__ = [
    "MergeCounts",
    "checked_kind",
    "drop_empty",
    "entries_of",
    "insert_result",
    "record_of",
    "records_of",
    "results_at",
    "strike",
]


@dataclasses.dataclass
class MergeCounts:
    """What became of the results that were merged in.

    Attributes:
        added: new ones. updated: ones that were there in an older or slower form. kept: ones whose present form won, or that are equal.
        conflicts: how many of the updated and kept name another best algorithm than the result that was there.
        skipped: ones that this version does not understand.
    """

    added: int = 0
    updated: int = 0
    kept: int = 0
    conflicts: int = 0
    skipped: int = 0


def checked_kind(document: Any) -> DeviceKind:
    """The device of a document that is to be merged."""
    try:
        return check_document(document)
    except ValueError as error:
        raise ValueError(f"source: {error}; wanted what `hipgroupgemm store export` wrote, or a file of a tuning store") from None


def _key_of(entry: Mapping[str, Any]) -> GroupedGemmConfig:
    """The key that an entry is for; raises ValueError for a config that this version does not know."""
    return GroupedGemmConfig.from_json(json.dumps(entry["config"])).key()


def records_of(entry: Mapping[str, Any], file: StoreFile, key: GroupedGemmConfig | None) -> Iterator[StoredRecord]:
    """An entry's results that can be understood, those of `key` where one is given."""
    try:
        own = _key_of(entry)
        if key is not None and own != key:
            raise ValueError("config: is not the one that its name says")
    except Exception as error:  # whatever a file holds costs no more than the result
        warn_once(("config", file.path), "tuning store: %s has a config that is not understood (%s); it is skipped", file.path, error)
        return
    for result in entry["results"]:
        try:
            yield StoredRecord.from_dict(own, file.device, result)
        except Exception as error:
            warn_once(("result", file.path), "tuning store: %s has a result that is not understood (%s); it is skipped", file.path, error)


def record_of(entry: Mapping[str, Any], result: Any, file: StoreFile) -> StoredRecord | None:
    """One result of an entry, None where it is not understood."""
    return next(records_of({**entry, "results": [result]}, file, None), None)


def entries_of(document: Mapping[str, Any] | None, file: StoreFile) -> Iterator[tuple[GroupedGemmConfig, StoredRecord]]:
    """All results of a document that can be understood, with their config's key."""
    for entry in document["configs"].values() if document is not None else ():
        for record in records_of(entry, file, None):
            yield record.config, record


def results_at(document: dict[str, Any], key: GroupedGemmConfig, *, create: bool) -> list[Any]:
    """The list of a config's results in a document.

    What is there in its name for another config can't be found by anybody, and makes room where the list is to be created.
    """
    configs, name = document["configs"], config_id(key)
    if name not in configs or not _is_of(configs[name], key):
        if not create:
            return []
        configs[name] = {"config": json.loads(key.to_json()), "results": []}
    results: list[Any] = configs[name]["results"]
    return results


def _is_of(entry: Mapping[str, Any], key: GroupedGemmConfig) -> bool:
    try:
        return _key_of(entry) == key
    except Exception:  # no config at all
        return False


def drop_empty(document: dict[str, Any], key: GroupedGemmConfig) -> None:
    """Takes a config without results out of a document."""
    if document["configs"].get(config_id(key), {}).get("results") == []:
        del document["configs"][config_id(key)]


def insert_result(
    results: list[Any], record: StoredRecord, file: StoreFile, counts: MergeCounts, judged: Sequence[MatmulAlgorithm] = ()
) -> StoredRecord | None:
    """Puts a result among those of its config, in the place of the one that stands for the same thing.

    Returns what stands there now, None where that is what was there.
    """
    for place, result in enumerate(results):
        try:
            old = StoredRecord.from_dict(record.config, file.device, result)
        except ValueError:  # not understood, and not ours to drop
            continue
        if old.slot != record.slot:
            continue
        merged = merge_result(old, record, judged)
        if merged == old:
            counts.kept += 1
        else:
            counts.updated += 1
            results[place] = {**result, **merged.to_dict()}
        if (old.algorithm.index, old.algorithm.name) != (record.algorithm.index, record.algorithm.name):
            counts.conflicts += 1
        return None if merged == old else merged
    results.append(record.to_dict())
    counts.added += 1
    return record


def strike(results: list[Any], condemned: set[tuple[str, int, str]], report: TuningReport, file: StoreFile) -> bool:
    """Takes algorithms that a report found wrong out of a config's results, whatever sizes they were tuned on. Whether there were any."""
    if not condemned:
        return False
    struck = False
    key = report.config.key()
    kept: list[Any] = []
    for result in results:
        try:
            old = StoredRecord.from_dict(key, file.device, result)
        except ValueError:
            kept.append(result)
            continue
        left = tuple(row for row in old.rows if (old.backend, row.algorithm.index, row.algorithm.name) not in condemned)
        if left == old.rows or old.versions != versions_in(report.identity, old.backend):
            kept.append(result)
            continue
        struck = True
        if left:
            kept.append({**result, **dataclasses.replace(old, rows=left).to_dict()})
    results[:] = kept
    return struck
