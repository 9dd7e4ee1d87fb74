"""What the tuning store keeps and answers: preferences, staleness, what two results become, export, import and removal."""

from __future__ import annotations

import dataclasses
import json
import logging
import os

import pytest
from store_reports import config_of, report, row

import hipgroupgemm as hgg
from hipgroupgemm.backends import registry_version, unregister_backend
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.store import files
from hipgroupgemm.store.identity import DeviceKind, device_kind, identity, versions_here
from hipgroupgemm.store.records import StoredRecord
from hipgroupgemm.store.store import TuningStore, default_store, store_directory

KEY = config_of().key()


@pytest.fixture
def store(tuning_store):
    return TuningStore(tuning_store)


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
    for off in ("off", " OFF ", "0", "no", "False", "none"):
        monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", off)
        assert default_store().directory is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "there/../here")
    assert default_store().directory == TuningStore("here").directory == tmp_path / "here"
    monkeypatch.delenv("HIPGROUPGEMM_TUNING_STORE")
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path / "cache"))
    assert default_store().directory == tmp_path / "cache" / "tuning"
    monkeypatch.delenv("HIPGROUPGEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_store().directory == tmp_path / "xdg" / "hipgroupgemm" / "tuning"


def test_off_holds_nothing_and_takes_nothing(monkeypatch):
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    store = TuningStore()
    assert store.add(report(config_of(), [row("reference", 0, 1.0)])) == []
    assert store.lookup(KEY, CPU) is None and store.records() == [] and store.path(device_kind(CPU)) is None
    with pytest.raises(RuntimeError, match=r"the tuning store is off \(HIPGROUPGEMM_TUNING_STORE=off\)"):
        store.merge(
            {
                "format": "hipgroupgemm tuning export",
                "schema": 1,
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
    told = report(config, rows, sizes=[[12, 0], [7, 4]], size_class="skewed", origin="user", started="2026-02-03T04:05:06Z")
    assert [one.backend for one in store.add(told)] == ["double", "reference"]
    assert registry_version() != before, "plans that are kept must be made anew"
    found = TuningStore(store.directory).lookup(KEY, CPU)
    assert isinstance(found, StoredRecord)
    assert (found.backend, found.algorithm.index, found.algorithm.name) == ("double", 2, "kernel_2")
    assert (found.algorithm.workspace_size, found.algorithm.deterministic, found.algorithm.time) == (2000, False, 0.8)
    assert (found.median_ms, found.fraction, found.size_class, found.origin) == (0.8, 0.01 / 0.8, "skewed", "user")
    assert found.config == KEY and found.device == device_kind(CPU) and found.device_name == told.device_name
    sizes = dict(found.sizes)
    assert len(sizes.pop("digest")) == 16
    assert sizes == {"samples": 2, "groups": 2, "ragged_extent": 12, "rows": 11.5, "largest": 12, "empty": 0.5}
    assert [f"{one.algorithm.backend} {one.algorithm.name}" for one in found.rows[1:]] == [
        "double kernel_1",
        "reference numpy_matmul_a_group",
    ]
    assert (
        "tuned 2026-02-03 04:05 UTC on skewed sizes of the user's" in found.describe() and "0.8 ms, 0.012 of the floor" in found.describe()
    )
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


def test_a_backend_that_was_tuned_alone_answers_for_itself(store, double):
    """Whether it is the faster one nobody has measured. The reference comes first here, the double after it."""
    why = []
    config = config_of()
    store.add(report(config, [row("double", 0, 1.0), row("double", 1, 2.0)], alone=True))
    assert store.lookup(KEY, CPU, why_not=why.append) is None and store.lookup(KEY, CPU, deterministic=True) is None
    (text,) = why
    assert "is of double, and was not compared to reference, which comes first; tune both, or name backend='double'" in text
    assert name_of(store.lookup(KEY, CPU, backend="double")) == "double kernel_0"
    # the one that comes first anyway is no change
    store.add(report(config_of(n=6), [row("reference", 0, 1.0)], alone=True))
    assert name_of(store.lookup(config_of(n=6).key(), CPU)) == "reference numpy_matmul_a_group"
    # on the same sizes later: they are compared now
    store.add(report(config, [row("reference", 0, 3.0)], alone=True))
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_0"
    # on other sizes they are not
    store.add(report(config, [row("double", 2, 0.5)], alone=True, origin="user", sizes=[[3, 9]], size_class="skewed"))
    found = store.lookup(KEY, CPU)
    assert name_of(found) == "double kernel_0" and found.seeded, "the next in order, which was compared"
    assert name_of(store.lookup(KEY, CPU, backend="double")) == "double kernel_2"


@pytest.mark.parametrize("verdict", ["failed", "wrong", "behind", "untimed"])
def test_a_backend_that_was_tried_and_lost_was_compared(store, double, verdict):
    lost = row("reference", 0, 5.0 if verdict == "behind" else None, verdict, reason="because")
    store.add(report(config_of(), [row("double", 0, 1.0), lost]))
    assert name_of(store.lookup(KEY, CPU)) == (None if verdict == "untimed" else "double kernel_0"), "untimed: it was not tried"
    (record,) = store.records()
    assert record.compared == (("double",) if verdict == "untimed" else ("double", "reference"))
    other = TuningStore(store.directory / "other")
    other.merge(store.export())
    assert other.records() == [record]


def test_a_backend_that_cannot_run_the_config_need_not_be_compared(store, double, monkeypatch):
    store.add(report(config_of(), [row("double", 0, 1.0)], alone=True))
    reference = hgg.backends.get_backend("reference")
    monkeypatch.setattr(type(reference), "can_handle", lambda *_: "not today")
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_0"


def test_size_classes_in_the_order_of_preference(store):
    def add(**settings):
        store.add(report(config_of(), [row("reference", 0, settings.pop("median"))], **settings))

    def asked(size_class=None):
        return store.lookup(KEY, CPU, size_class=size_class).median_ms

    add(median=1.0)
    assert asked() == asked("skewed") == 1.0
    add(median=2.0, size_class="sparse", origin="user", sizes=[[12, 0]])
    assert asked() == 2.0 and asked("balanced") == 1.0
    add(median=3.0, size_class="skewed", origin="user", sizes=[[9, 3]])
    assert asked() == 3.0, "the newest of the user's"
    add(median=4.0)  # the seed, younger than all: the user's still come first
    assert asked() == 3.0 and asked("balanced") == 4.0 and asked("sparse") == 2.0
    add(median=5.0, size_class="balanced", origin="user", sizes=[[6, 6]])
    assert asked() == 5.0 and asked("balanced") == 5.0 and asked("skewed") == 3.0


def test_real_routing_comes_first_then_the_seed_then_synthetic_sizes_and_none_replaces_another(store):
    def add(median, origin):
        (held,) = store.add(report(config_of(), [row("reference", 0, median)], origin=origin, size_class="skewed", sizes=[[9, 3]]))
        assert (held.origin, held.median_ms) == (origin, median)

    def found():
        return store.lookup(KEY, CPU)

    add(1.0, "zipf")
    assert found().median_ms == 1.0 and "on synthetic sizes (zipf, skewed)" in found().describe()
    add(2.0, "dirichlet")
    assert found().median_ms == 2.0
    add(3.0, "seed")
    assert found().median_ms == 3.0 and "on balanced sizes" in found().describe()
    add(4.0, "user")
    for number, origin in enumerate(("zipf", "dirichlet", "seed"), 5):  # younger than the user's, of the same class, on the same sizes
        add(float(number), origin)
        assert found().median_ms == 4.0 and store.lookup(KEY, CPU, size_class="skewed").median_ms == 4.0
        assert "on skewed sizes of the user's" in found().describe()
    assert sorted((one.origin, one.median_ms) for one in store.records()) == [
        ("dirichlet", 6.0),
        ("seed", 7.0),
        ("user", 4.0),
        ("zipf", 5.0),
    ]
    assert len({one.place for one in store.records()}) == 4
    other = TuningStore(store.directory / "other")
    other.merge(store.export())
    assert other.records() == store.records()


@pytest.mark.parametrize("started", ["2026-03-01T00:00:00+00:00", "2026-03-01T00:00:00.999999Z"])
def test_of_tunings_that_began_at_one_time_the_one_added_later_wins(store, started):
    for number, (size_class, sizes) in enumerate(
        [("skewed", [[9, 3]]), ("sparse", [[12, 0]]), ("skewed", [[10, 2]]), ("sparse", [[0, 12]])]
    ):
        told = report(config_of(), [row("reference", 0, 1.0 + number)], origin="user", size_class=size_class, sizes=sizes, started=started)
        (held,) = store.add(told)
        assert store.lookup(KEY, CPU) == held and held.median_ms == 1.0 + number
    assert sorted(one.median_ms for one in store.records()) == [3.0, 4.0]


def test_what_add_returns_is_what_the_store_holds(store, double):
    def add(*rows, **settings):
        return store.add(report(config_of(), list(rows), **settings))

    first = add(row("double", 0, 1.0), row("reference", 0, 2.0))
    assert first == store.records()
    again = add(row("double", 1, 3.0), sizes=[[7, 5]])
    assert [one.place for one in again] == [first[0].place] and again[0] in store.records() and first[0] not in store.records()
    assert add(row("double", 2, 0.1), sizes=[[8, 4]], started="2001-01-01T00:00:00Z") == [], "a later result on other sizes stays"
    assert add(row("double", 0, None, "failed")) == []
    assert len(store.records()) == 2


def test_another_product_of_the_same_kind_comes_second(store):
    store.add(report(config_of(), [row("reference", 0, 1.0)], origin="user", name="another product"))
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
    store.add(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0), row("reference", 0, 3.0)], origin="user"))
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
