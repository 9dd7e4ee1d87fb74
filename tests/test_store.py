"""What the tuning store keeps and answers: preferences, staleness, what two results become, export, import and removal."""

from __future__ import annotations

import dataclasses
import json
import logging
import os

import pytest
from backend_double import DoubleBackend
from store_reports import config_of, report, row

import hipgroupgemm as hgg
from hipgroupgemm.backends import backend_names, register_backend, registry_version, unregister_backend
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.tuning import files
from hipgroupgemm.tuning.identity import DeviceKind, device_kind, identity, versions_here
from hipgroupgemm.tuning.records import StoredRecord
from hipgroupgemm.tuning.store import TuningStore, default_store, store_directory
from hipgroupgemm.views import CPU, Device

KEY = config_of().key()


@pytest.fixture
def store(tuning_store):
    return TuningStore(tuning_store)


@pytest.fixture
def double():
    """A backend with the algorithms kernel_0, kernel_1 (the deterministic one) and kernel_2, asked after the reference."""
    backend = DoubleBackend()
    register_backend(backend, ["cpu"])
    yield backend
    if backend.name in backend_names():
        unregister_backend(backend.name)
    hgg.clear_plan_cache()


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


def name_of(record):
    return None if record is None else f"{record.backend} {record.algorithm.name}"


# ---- identity ------------------------------------------------------------------------------------------------------------------


def test_identity_is_json_and_says_what_each_backend_depends_on(double):
    double.versions = lambda device: {"double_library": f"7 for {device.kind}"}
    found = identity(CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["kind"] == "cpu" and found["compute_units"] == len(os.sched_getaffinity(0)) and found["name"] and found["target"]
    assert found["versions"]["double_library"] == "7 for cpu" and found["versions"]["hipgroupgemm"] == hgg.__version__
    assert found["backends"]["double"] == ["hipgroupgemm", "double_library"]
    assert found["backends"]["reference"] == ["hipgroupgemm", "numpy"]
    assert "triton" not in found["backends"], "it does not serve CPUs"

    def fails(device):
        raise OSError("its library is broken")

    double.versions = fails
    assert "double" not in identity(CPU)["backends"]
    assert versions_here(device_kind(CPU), "double") is None and versions_here(device_kind(CPU), "nobody") is None
    assert versions_here(DeviceKind("cpu", "sparc", 3), "reference") is None
    assert set(versions_here(device_kind(CPU), "reference")) == {"hipgroupgemm", "numpy"}
    with pytest.raises(ValueError, match="kind='tpu': must be"):
        DeviceKind("tpu", "v5", 1)


# ---- directories ---------------------------------------------------------------------------------------------------------------


def test_where_the_store_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(tmp_path / "named"))
    first = default_store()
    assert store_directory() == first.directory == tmp_path / "named" and default_store() is first
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store().directory == tmp_path / "mine"
    for off in ("off", " OFF "):
        monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", off)
        assert default_store().directory is None
    monkeypatch.delenv("HIPGROUPGEMM_TUNING_STORE")
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path / "cache"))
    assert default_store().directory == tmp_path / "cache" / "tuning"
    monkeypatch.delenv("HIPGROUPGEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_store().directory == tmp_path / "xdg" / "hipgroupgemm" / "tuning"


def test_off_holds_nothing_and_takes_nothing(monkeypatch):
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    store = TuningStore()
    assert store.add(report(config_of(), [row("reference", 0, 1.0)])) == 0
    assert store.lookup(KEY, CPU) is None and store.records() == [] and store.path(device_kind(CPU)) is None
    with pytest.raises(RuntimeError, match="the tuning store is off: HIPGROUPGEMM_TUNING_STORE is 'off'"):
        store.merge(
            {
                "format": "hipgroupgemm tuning export",
                "documents": [
                    {
                        "format": "hipgroupgemm tuning store",
                        "schema": 1,
                        "configs": {},
                        "device": {"kind": "cpu", "target": "x", "compute_units": 1},
                    }
                ],
            }
        )


def test_a_lookup_where_nothing_is_stored_makes_nothing_and_costs_one_stat(store, monkeypatch):
    assert store.lookup(KEY, CPU) is None
    assert not store.directory.exists()
    stats = []
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda *a, **k: (stats.append(a), real(*a, **k))[1])
    for name in ("open", "listdir", "mkdir", "scandir"):
        monkeypatch.setattr(os, name, lambda *_, **__: pytest.fail("the file system was asked for more"))
    assert store.lookup(KEY, CPU) is None
    assert len(stats) == 1


def test_a_file_is_parsed_once_until_it_changes(store, monkeypatch):
    config = config_of()
    store.add(report(config, [row("reference", 0, 1.0)]))
    reads = []
    real = files.json.loads
    monkeypatch.setattr(files.json, "loads", lambda text, **k: (reads.append(len(text)), real(text, **k))[1])
    size = store.path(device_kind(CPU)).stat().st_size
    for _ in range(3):
        assert store.lookup(KEY, CPU).median_ms == 1.0
    assert reads.count(size) == 1
    TuningStore(store.directory).add(report(config, [row("reference", 0, 0.5)]))
    assert store.lookup(KEY, CPU).median_ms == 0.5


def test_a_device_that_cannot_be_asked_has_no_answer(store, fake_runtime):
    assert store.lookup(KEY, Device("rocm", 3)) is None


# ---- a round trip --------------------------------------------------------------------------------------------------------------


def test_what_is_added_is_looked_up(store, double):
    config = config_of()
    before = registry_version()
    rows = [row("double", 2, 0.8), row("double", 1, 1.0), row("reference", 0, 3.0), row("double", 0, None, "wrong", reason="off by 3")]
    told = report(config, rows, sizes=[[12, 0], [7, 4]], size_class="skewed", seeded=False, started="2026-02-03T04:05:06Z")
    assert store.add(told) == 2
    assert registry_version() != before, "plans that are kept must be made anew"
    found = TuningStore(store.directory).lookup(KEY, CPU)
    assert isinstance(found, StoredRecord)
    assert (found.backend, found.algorithm.index, found.algorithm.name) == ("double", 2, "kernel_2")
    assert (found.algorithm.workspace_size, found.algorithm.deterministic, found.algorithm.time) == (2000, False, 0.8)
    assert (found.median_ms, found.fraction, found.size_class, found.seeded) == (0.8, 0.01 / 0.8, "skewed", False)
    assert found.config == KEY and found.device == device_kind(CPU) and found.device_name == told.device_name
    sizes = dict(found.sizes)
    assert len(sizes.pop("digest")) == 16
    assert sizes == {"samples": 2, "groups": 2, "ragged_extent": 12, "rows": 11.5, "largest": 12, "empty": 0.5}
    assert [f"{one.algorithm.backend} {one.algorithm.name}" for one in found.rows[1:]] == [
        "double kernel_1",
        "reference numpy_matmul_a_group",
    ]
    assert "tuned 2026-02-03 04:05 UTC on skewed sizes of the user's" in found.describe() and "0.8 ms, 1% of the floor" in found.describe()
    # every R, alpha and beta of one key
    assert store.lookup(config_of(alpha=3).key(), CPU) is not None and store.lookup(config_of(m=13).key(), CPU) is None
    assert store.lookup(config_of(n=6).key(), CPU) is None
    # what is on the disk
    data = json.loads(store.path(device_kind(CPU)).read_text())
    assert data["schema"] == 1 and next(iter(data["configs"].values()))["config"] == json.loads(KEY.to_json())
    assert [one["backend"] for one in next(iter(data["configs"].values()))["results"]] == ["double", "reference"]


def test_named_backend_and_deterministic_find_the_best_they_can(store, double):
    rows = [row("double", 0, 0.5), row("double", 2, 0.8), row("double", 1, 1.0), row("reference", 0, 0.9)]
    store.add(report(config_of(), rows))
    ask = store.lookup
    assert name_of(ask(KEY, CPU)) == "double kernel_0"
    assert name_of(ask(KEY, CPU, backend="reference")) == "reference numpy_matmul_a_group"
    assert name_of(ask(KEY, CPU, backend="double")) == "double kernel_0"
    assert name_of(ask(KEY, CPU, deterministic=True)) == "reference numpy_matmul_a_group"
    assert name_of(ask(KEY, CPU, backend="double", deterministic=True)) == "double kernel_1"
    assert ask(KEY, CPU, backend="triton") is None
    double.reason = "no time"
    assert name_of(ask(KEY, CPU)) == "reference numpy_matmul_a_group", "the next best of those that can"
    unregister_backend("double")
    assert name_of(ask(KEY, CPU)) == "reference numpy_matmul_a_group"
    assert ask(KEY, CPU, backend="double") is None


def test_the_winner_of_a_report_is_the_one_looked_up_ties_included(store, double, rng):
    """Ties go to the smaller workspace, over backends too; the store keeps what that takes."""
    for trial in range(60):
        config = config_of(n=20 + trial)
        medians = 1 + 0.012 * rng.random(4)
        rows = [row("double", index, float(medians[index])) for index in range(3)] + [row("reference", 0, float(medians[3]))]
        rng.shuffle(rows)
        told = report(config, rows)
        store.add(told)
        for deterministic in (False, True):
            best = dataclasses.replace(told, rows=[one for one in rows if one.algorithm.deterministic or not deterministic]).best
            assert store.lookup(config.key(), CPU, deterministic=deterministic).algorithm == best.algorithm, medians


def test_size_classes_in_the_order_of_preference(store):
    def add(**settings):
        store.add(report(config_of(), [row("reference", 0, settings.pop("median"))], **settings))

    def asked(size_class=None):
        return store.lookup(KEY, CPU, size_class=size_class).median_ms

    add(median=1.0)
    assert asked() == asked("skewed") == 1.0
    add(median=2.0, size_class="sparse", seeded=False, sizes=[[12, 0]])
    assert asked() == 2.0 and asked("balanced") == 1.0
    add(median=3.0, size_class="skewed", seeded=False, sizes=[[9, 3]])
    assert asked() == 3.0, "the newest of the user's"
    add(median=4.0)  # the seed, younger than all: the user's still come first
    assert asked() == 3.0 and asked("balanced") == 4.0 and asked("sparse") == 2.0
    add(median=5.0, size_class="balanced", seeded=False, sizes=[[6, 6]])
    assert asked() == 5.0 and asked("balanced") == 5.0 and asked("skewed") == 3.0


def test_another_product_of_the_same_kind_comes_second(store):
    store.add(report(config_of(), [row("reference", 0, 1.0)], seeded=False, name="another product"))
    assert store.lookup(KEY, CPU).device_name == "another product"
    store.add(report(config_of(), [row("reference", 0, 2.0)]))
    assert store.lookup(KEY, CPU).median_ms == 2.0
    other = {"kind": "cpu", "target": "sparc-v9", "compute_units": 64}
    store.add(report(config_of(n=6), [row("reference", 0, 3.0)], device=other))
    assert store.lookup(config_of(n=6).key(), CPU) is None
    assert {str(one.device) for one in store.records()} == {str(device_kind(CPU)), "cpu sparc-v9, 64 cores"}
    assert store.path(DeviceKind("rocm", "gfx942", 304)).name == "rocm-gfx942-304cus.v1.json"


# ---- stale ---------------------------------------------------------------------------------------------------------------------


def test_other_versions_are_passed_over_with_one_warning(store, caplog):
    for n in (5, 6):
        store.add(report(config_of(n=n), [row("reference", 0, 1.0)], versions={"numpy": "1.0.2"}))
    with caplog.at_level(logging.WARNING, "hipgroupgemm.tuning"):
        for _ in range(2):
            assert store.lookup(KEY, CPU) is None and store.lookup(config_of(n=6).key(), CPU) is None
    (text,) = [entry.getMessage() for entry in caplog.records]
    import numpy as np

    assert f"numpy is {np.__version__} now and was 1.0.2" in text and "backend reference" in text and "Tune again" in text
    store.add(report(config_of(), [row("reference", 0, 2.0)]))  # for these versions, beside the other
    assert store.lookup(KEY, CPU).median_ms == 2.0 and len(store.records()) == 3
    assert len(caplog.records) == 1


def test_versions_that_do_not_matter_to_a_backend_do_not_count(store, double):
    double.versions = lambda _: {"library": "2"}
    store.add(report(config_of(), [row("double", 0, 1.0), row("reference", 0, 2.0)], versions={"numpy": "1.0", "triton": "0.1"}))
    found = store.lookup(KEY, CPU)
    assert name_of(found) == "double kernel_0" and dict(found.versions) == {"hipgroupgemm": hgg.__version__, "library": "2"}


def test_a_faster_backend_that_has_changed_makes_the_comparison_stale(store, double, caplog):
    """The reference was the slower one; whether it is slower than the new library nobody has measured."""
    double.versions = lambda _: {"library": "1"}
    store.add(report(config_of(), [row("double", 0, 1.0), row("reference", 0, 2.0)]))
    store.add(report(config_of(n=6), [row("double", 0, 2.0), row("reference", 0, 1.0)]))
    double.versions = lambda _: {"library": "2"}
    assert store.lookup(KEY, CPU) is None and "library is 2 now and was 1" in caplog.text
    assert name_of(store.lookup(KEY, CPU, backend="reference")) == "reference numpy_matmul_a_group"
    assert store.lookup(KEY, CPU, backend="double") is None
    assert name_of(store.lookup(config_of(n=6).key(), CPU)) == "reference numpy_matmul_a_group", "a slower one that changed is no matter"
    double.reason = "not on this machine"
    assert name_of(store.lookup(KEY, CPU)) == "reference numpy_matmul_a_group", "nor one that can't run"


@pytest.mark.parametrize("change", [{"index": 7}, {"name": "kernel_renamed"}, None])
def test_index_and_name_are_both_checked(store, double, change, caplog):
    store.add(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0), row("reference", 0, 3.0)], seeded=False))
    store.add(report(config_of(), [row("reference", 0, 9.0)]))
    double.found[0:1] = [] if change is None else [dataclasses.replace(double.found[0], **change)]
    with caplog.at_level(logging.WARNING, "hipgroupgemm.tuning"):
        for _ in range(2):
            found = store.lookup(KEY, CPU)
            assert (name_of(found), found.median_ms) == ("reference numpy_matmul_a_group", 9.0), "the next record"
    (text,) = [entry.getMessage() for entry in caplog.records]
    assert "there is no algorithm 'kernel_0' with index 0 now" in text and "backend double" in text
    assert name_of(store.lookup(KEY, CPU, deterministic=True, backend="double")) == "double kernel_1"


def test_an_algorithm_is_found_by_the_backends_own_means_where_it_has_some(store, double):
    store.add(report(config_of(), [row("double", 2, 1.0)]))
    asked = []

    def find(config, device, name, index):
        asked.append((config, device, name, index))
        return dataclasses.replace(double.found[2], workspace_size=12345)

    double.find_algorithm = find
    found = store.lookup(KEY, CPU)
    assert found.algorithm.workspace_size == 12345, "what it needs now counts"
    assert asked == [(KEY, CPU, "kernel_2", 2)] and double.asked == []


def test_a_backend_that_fails_costs_a_warning(store, double, caplog):
    store.add(report(config_of(), [row("double", 2, 1.0)]))

    def fails(*_):
        raise OSError("driver gone")

    double.can_handle = fails
    assert store.lookup(KEY, CPU) is None and store.lookup(KEY, CPU) is None
    assert caplog.text.count("is not used (OSError: driver gone)") == 1


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
    store.add(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0)], seeded=False, size_class="skewed"))
    store.add(report(config_of(), [row("double", 0, 1.0)]))
    store.add(report(config_of(n=6), [row("double", 0, 1.0)]))
    before = registry_version()
    assert store.add(report(config_of(), [row("double", 0, None, verdict, reason="bad")])) == 0
    assert registry_version() != before
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_1"
    assert [one.size_class for one in store.records() if one.config == KEY] == ["skewed"]
    assert name_of(store.lookup(config_of(n=6).key(), CPU)) == "double kernel_0", "another config is another matter"
    store.add(report(config_of(), [row("double", 1, None, verdict)]))
    assert store.lookup(KEY, CPU) is None
    assert len(json.loads(store.path(device_kind(CPU)).read_text())["configs"]) == 1


def test_a_report_without_a_right_algorithm_stores_nothing(store, double):
    assert store.add(report(config_of(), [row("double", 0, None, "failed"), row("double", 1, None, "untimed")])) == 0
    assert store.add(report(config_of(), [])) == 0
    assert not store.directory.exists()
    with pytest.raises(ValueError, match=r"identity: is none that identity\(\) gave"):
        store.add(dataclasses.replace(report(config_of(), [row("reference", 0, 1.0)]), identity={"kind": "cpu"}))


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
        ({"format": "hipgroupgemm tuning export"}, "an export without documents"),
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


def test_a_config_is_told_from_all_others(store):
    """Every field of the key counts, those with equal JSON values of another field included."""
    configs = [
        config_of(m=16),
        config_of(n=16),
        config_of(k=16),
        config_of(groups=3),
        config_of(beta=2, c=hgg.ArraySpec((12, 5), "float32")),
    ]
    configs.append(GroupedGemmConfig.from_json(config_of(m=16).to_json().replace('"lhs_alignment": 4', '"lhs_alignment": 2')))
    for number, config in enumerate(configs):
        store.add(report(config, [row("reference", 0, 1.0 + number)]))
    for number, config in enumerate(configs):
        assert store.lookup(config.key(), CPU).median_ms == 1.0 + number
