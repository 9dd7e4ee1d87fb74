"""What two results of one thing become, what is struck, and what export, merge and remove do."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from store_reports import config_of, report, row

from hipgroupgemm.backends import registry_version
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store.identity import device_kind
from hipgroupgemm.store.records import results_of
from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.tuning.report import best_row

KEY = config_of().key()
pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def store(tuning_store):
    return TuningStore(tuning_store)


def name_of(record):
    return None if record is None else f"{record.backend} {record.algorithm.name}"


# ---- two results of one thing --------------------------------------------------------------------------------------------------


def test_backends_tuned_one_after_the_other_on_the_same_sizes_compete(store, double):
    store.add(report(config_of(), [row("double", 0, 2.0)]))
    store.add(report(config_of(), [row("reference", 0, 1.0)]))
    assert name_of(store.lookup(KEY, CPU)) == "reference numpy_matmul_a_group"
    store.add(report(config_of(), [row("double", 2, 0.5)]))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_2"


def test_on_other_sizes_the_newest_alone_counts_but_a_named_backend_keeps_its_own(store, double):
    store.add(report(config_of(), [row("double", 0, 1.0)], sizes=[[6, 6]]))
    store.add(report(config_of(), [row("reference", 0, 50.0)], sizes=[[7, 5]]))
    assert name_of(store.lookup(KEY, CPU)) == "reference numpy_matmul_a_group"
    assert name_of(store.lookup(KEY, CPU, backend="double")) == "double kernel_0"
    store.add(report(config_of(), [row("double", 2, 60.0)], sizes=[[7, 5]]))
    assert name_of(store.lookup(KEY, CPU, backend="double")) == "double kernel_2", "60 ms of other work say nothing against 1 ms"


def test_a_later_run_over_few_algorithms_does_not_undo_a_thorough_one(store, double):
    store.add(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0)]))
    store.add(report(config_of(), [row("double", 2, 1.5)]))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_0", "same sizes, faster, and not looked at since"
    store.add(report(config_of(), [row("double", 2, 1.5), row("double", 0, 1.8)]))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_2", "the later measurement of kernel_0 counts"
    store.add(report(config_of(), [row("double", 1, 1.9), row("double", 2, None, "behind")]))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_0"
    old = report(config_of(), [row("double", 2, 0.1)], started="2001-01-01T00:00:00+00:00")
    store.add(old)
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_2", "an older run on the same sizes has an algorithm to offer"


@pytest.mark.parametrize("verdict", ["wrong", "nondeterministic", "crashed", "hung"])
def test_an_algorithm_that_was_found_wrong_is_struck_whatever_it_was_tuned_on(store, double, verdict):
    store.add(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0)], origin="user", size_class="skewed"))
    store.add(report(config_of(), [row("double", 0, 1.0)]))
    store.add(report(config_of(n=6), [row("double", 0, 1.0)]))
    before = registry_version()
    assert store.add(report(config_of(), [row("double", 0, None, verdict, reason="bad")])) == []
    assert registry_version() != before
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_1"
    assert [one.size_class for one in store.records() if one.config == KEY] == ["skewed"]
    assert name_of(store.lookup(config_of(n=6).key(), CPU)) == "double kernel_0", "another config is another matter"
    store.add(report(config_of(), [row("double", 1, None, verdict)]))
    assert store.lookup(KEY, CPU) is None
    assert len(json.loads(store.path(device_kind(CPU)).read_text())["configs"]) == 1


def test_what_was_found_wrong_with_these_versions_says_nothing_of_others(store):
    store.add(report(config_of(), [row("reference", 0, 1.0)], versions={"numpy": "1.0"}))
    store.add(report(config_of(), [row("reference", 0, 1.0)]))
    store.add(report(config_of(), [row("reference", 0, None, "wrong")]))
    assert [record.versions["numpy"] for record in store.records()] == ["1.0"]


def test_a_report_without_a_right_algorithm_stores_nothing(store, double):
    assert store.add(report(config_of(), [row("double", 0, None, "failed"), row("double", 1, None, "untimed")])) == []
    assert store.add(report(config_of(), [])) == []
    assert not store.directory.exists()
    with pytest.raises(ValueError, match=r"identity: is none that identity\(\) gave"):
        store.add(dataclasses.replace(report(config_of(), [row("reference", 0, 1.0)]), identity={"kind": "cpu"}))


def test_the_rows_that_are_kept_decide_as_the_whole_report_does(rng):
    """Also where dozens tie; ties go by the fastest of all, which must be kept too."""
    few = 0
    for _ in range(200):
        medians = 1 + 0.03 * rng.random(40)
        rows = [dataclasses.replace(row("a" if i % 2 else "b", i, float(medians[i])), samples=0) for i in range(40)]
        deterministic = [bool(rng.integers(2)) for _ in rows]
        rows = [
            dataclasses.replace(one, algorithm=dataclasses.replace(one.algorithm, workspace_size=int(rng.integers(9)), deterministic=flag))
            for one, flag in zip(rows, deterministic, strict=True)
        ]
        told = report(config_of(), rows)
        kept = [one for record in results_of(told) for one in record.rows]
        assert best_row(kept) == told.best
        for backend in "ab":
            own = [one for one in rows if one.algorithm.backend == backend]
            assert best_row(one for one in kept if one.algorithm.backend == backend) == best_row(own)
            own = [one for one in own if one.algorithm.deterministic]
            assert best_row(one for one in kept if one.algorithm.backend == backend and one.algorithm.deterministic) == best_row(own)
        few += len(kept) <= 24
    assert few == 200


# ---- export, merge, remove -----------------------------------------------------------------------------------------------------


def test_export_and_merge_into_an_empty_store(store, double, tmp_path):
    store.add(report(config_of(), [row("double", 0, 1.0), row("reference", 0, 2.0)]))
    store.add(report(config_of(n=6), [row("reference", 0, 3.0)], device={"target": "sparc"}))
    data = json.loads(json.dumps(store.export()))
    other = TuningStore(tmp_path / "other")
    counts = other.merge(data, dry_run=True)
    assert (counts.added, other.records(), other.directory.exists()) == (3, [], False)
    before = registry_version()
    counts = other.merge(data)
    assert dataclasses.asdict(counts) == {"added": 3, "updated": 0, "kept": 0, "conflicts": 0, "skipped": 0}
    assert registry_version() != before
    assert other.records() == store.records() and other.export() == store.export()
    again = other.merge(data)
    assert dataclasses.asdict(again) == {"added": 0, "updated": 0, "kept": 3, "conflicts": 0, "skipped": 0}
    (only,) = store.export(lambda record: record.device.target == "sparc")["documents"]
    assert only["device"]["target"] == "sparc" and len(only["configs"]) == 1
    third = TuningStore(tmp_path / "third")
    third.merge(json.loads(store.path(device_kind(CPU)).read_text()))  # a file of a store, as it lies there
    assert len(third.records()) == 2


def test_merging_newer_and_faster(store, double, tmp_path):
    def both(own, incoming):
        """(counts, name, median) after merging `incoming` into a store with `own`; each (index, median, sizes, date)."""
        stores = [TuningStore(tmp_path / f"{os.urandom(6).hex()}") for _ in range(2)]
        for one, (index, median, sizes, date) in zip(stores, (own, incoming), strict=True):
            one.add(report(config_of(), [row("double", index, median)], sizes=sizes, started=date))
        counts = dataclasses.asdict(stores[0].merge(stores[1].export()))
        found = stores[0].lookup(KEY, CPU)
        (kept,) = stores[0].records()
        assert kept.algorithm == found.algorithm
        return {name for name, count in counts.items() if count}, found.algorithm.name, found.median_ms

    old, new = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00Z"
    same, other = [[6, 6]], [[7, 5]]
    assert both((0, 1.0, same, old), (0, 1.0, same, old)) == ({"kept"}, "kernel_0", 1.0)
    assert both((0, 1.0, same, old), (0, 1.2, same, new)) == ({"updated"}, "kernel_0", 1.2)
    assert both((0, 1.0, same, new), (0, 0.2, same, old)) == ({"kept"}, "kernel_0", 1.0)
    assert both((0, 1.0, same, old), (2, 2.0, same, new)) == ({"updated", "conflicts"}, "kernel_0", 1.0)
    assert both((0, 1.0, same, new), (2, 0.5, same, old)) == ({"updated", "conflicts"}, "kernel_2", 0.5)
    assert both((0, 1.0, same, old), (2, 2.0, other, new)) == ({"updated", "conflicts"}, "kernel_2", 2.0)
    assert both((0, 1.0, same, new), (2, 0.1, other, old)) == ({"kept", "conflicts"}, "kernel_0", 1.0)
    assert both((0, 1.0, same, old), (2, 0.5, other, old)) == ({"updated", "conflicts"}, "kernel_2", 0.5)
    assert both((0, 1.0, same, old), (2, 1.5, other, old)) == ({"kept", "conflicts"}, "kernel_0", 1.0)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, "is no tuning store"),
        ([], "is no tuning store"),
        ({"format": "hipgroupgemm tuning export", "schema": 1}, "an export without documents"),
        ({"format": "hipgroupgemm tuning export", "documents": []}, "an export of schema None, this version of hipgroupgemm knows 1"),
        ({"format": "hipgroupgemm tuning export", "schema": 99, "documents": []}, "an export of schema 99, this version"),
        ({"format": "hipgroupgemm tuning export", "schema": True, "documents": []}, "an export of schema True"),
        ({"format": "hipgroupgemm tuning store", "schema": 2}, "has schema 2, this version of hipgroupgemm knows 1"),
        ({"format": "hipgroupgemm tuning store", "schema": True}, "has schema True"),
        ({"format": "hipgroupgemm tuning store", "schema": 1, "device": {"kind": "tpu", "target": "a", "compute_units": 1}}, "has device"),
        (
            {"format": "hipgroupgemm tuning store", "schema": 1, "device": {"kind": "cpu", "target": "a", "compute_units": 1}},
            "has no configs",
        ),
    ],
)
def test_what_is_no_store_is_not_merged(store, source, text):
    with pytest.raises(ValueError, match=text):
        store.merge(source)
    assert not store.directory.exists()


def test_what_is_not_understood_is_skipped_in_a_merge_and_kept_in_a_file(store, double, caplog):
    store.add(report(config_of(), [row("double", 0, 1.0)]))
    store.add(report(config_of(n=6), [row("double", 0, 1.0)]))
    path = store.path(device_kind(CPU))
    data = json.loads(path.read_text())
    first, second = data["configs"].values()
    strange = {**json.loads(json.dumps(first["results"][0])), "rows": "many"}
    first["results"].insert(0, strange)
    first["results"][1]["colour"] = "blue"
    second["config"]["m"] = "twelve"
    data["note"] = "by hand"
    path.write_text(json.dumps(data))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_0"
    assert store.lookup(config_of(n=6).key(), CPU) is None
    assert caplog.text.count("has a result that is not understood") == caplog.text.count("has a config that is not understood") == 1
    store.add(report(config_of(), [row("double", 2, 0.5)]))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_2"
    after = json.loads(path.read_text())
    assert after["note"] == "by hand" and next(iter(after["configs"].values()))["results"][0] == strange
    assert next(iter(after["configs"].values()))["results"][1]["colour"] == "blue", "a later version's field outlives this one's writing"
    counts = TuningStore(store.directory / "other").merge(data)
    assert (counts.added, counts.skipped) == (1, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", []),
        ("versions", None),
        ("tuned", "yesterday"),
        ("tuned", 3),
        ("backend", "reference"),
        ("sizes", 4),
        ("rows", [{}]),
        ("rows", [{**row("double", 0, 1.0).to_dict(), "median_ms": "nan"}]),
        ("rows", [{**row("double", 0, 1.0).to_dict(), "median_ms": 0}]),
        ("rows", [row("double", 0, 1.0, "behind").to_dict()]),
        ("rows", [row("double", 0, None, "wrong").to_dict()]),
    ],
)
def test_damaged_results_are_no_answers(store, double, field, value):
    store.add(report(config_of(), [row("double", 0, 1.0)]))
    path = store.path(device_kind(CPU))
    data = json.loads(path.read_text())
    (entry,) = data["configs"].values()
    entry["results"][0][field] = value
    path.write_text(json.dumps(data))
    assert store.lookup(KEY, CPU) is None and store.records() == []


def test_a_config_under_anothers_name_is_no_answer(store):
    store.add(report(config_of(), [row("reference", 0, 1.0)]))
    path = store.path(device_kind(CPU))
    data = json.loads(path.read_text())
    (entry,) = data["configs"].values()
    entry["config"] = json.loads(config_of(n=6).key().to_json())
    path.write_text(json.dumps(data))
    assert store.lookup(KEY, CPU) is None


def test_remove(store, double):
    for n in (5, 6, 7):
        store.add(report(config_of(n=n), [row("double", 0, 1.0), row("reference", 0, 2.0)]))
    dry = store.remove(lambda record: record.config.n == 6, dry_run=True)
    assert len(dry) == 2 and len(store.records()) == 6
    before = registry_version()
    removed = store.remove(lambda record: record.config.n == 6 or (record.config.n == 5 and record.backend == "double"))
    assert len(removed) == 3 and registry_version() != before
    assert store.lookup(config_of(n=6).key(), CPU) is None
    assert name_of(store.lookup(KEY, CPU)) == "reference numpy_matmul_a_group"
    assert store.remove(lambda record: False) == [] and len(store.records()) == 3
