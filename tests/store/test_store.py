"""What the tuning store keeps and answers: preferences, staleness, one result a slot, what is struck, export, import and removal."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from store_reports import config_of, report, row

import hipgroupgemm as hgg
from hipgroupgemm.backends import selection, unregister_backend
from hipgroupgemm.backends.base import PlanSettings
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.store import files
from hipgroupgemm.store.identity import DeviceKind, device_kind, device_of, identity
from hipgroupgemm.store.records import StoredResult
from hipgroupgemm.store.store import StoreWriteError, TuningStore, default_store, store_directory
from hipgroupgemm.tuning.keep import keep, stored_result

KEY = config_of().key()
ROOT = os.path.dirname(os.path.dirname(hgg.__file__))


@pytest.fixture
def store(tuning_store):
    return TuningStore(tuning_store)


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


def name_of(result):
    return None if result is None else f"{result.backend} {result.algorithm.name}"


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
    assert device_of(device_kind(CPU)) == CPU and device_of(DeviceKind("cpu", "sparc", 3)) is None
    with pytest.raises(ValueError, match=r"'tpu'.*must be"):
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


def test_off_holds_nothing_and_takes_nothing(store, monkeypatch, tmp_path):
    keep(report(config_of(), [row("reference", 0, 1.0)]), TuningStore(tmp_path / "other"))
    data = TuningStore(tmp_path / "other").export()
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    store = TuningStore()
    assert not keep(report(config_of(), [row("reference", 0, 1.0)]))
    assert store.lookup(KEY, CPU) is None and store.results() == [] and store.path(device_kind(CPU)) is None
    with pytest.raises(StoreWriteError, match=r"the tuning store is off \(HIPGROUPGEMM_TUNING_STORE=off\)"):
        store.merge(data)


def test_without_msgspec_the_store_is_off_and_all_else_works(tuning_store):
    """In a process of its own, as on a machine that lacks it; nothing of the package but the store needs it."""
    code = """
import logging, sys
sys.modules["msgspec"] = None
said = []
logging.getLogger("hipgroupgemm.tuning").addHandler(type("H", (logging.Handler,), {"emit": lambda self, r: said.append(r.getMessage())})())
import numpy as np
import hipgroupgemm as hgg
from store_reports import config_of
out = hgg.ragged_dot(np.ones((4, 3), np.float32), np.ones((2, 3, 2), np.float32), np.array([1, 3]))
assert out.sum() == 24
for _ in range(2):
    with hgg.GroupedMatmulPlan(config_of(), device="cpu") as plan:
        assert "tuning store not used: it is off (msgspec is not installed: pip install msgspec)" in plan.explain()
        plan.autotune(repetitions=1, isolate=False)
assert said == ["tuning store: it is off (msgspec is not installed: pip install msgspec)"], said
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((ROOT, os.path.join(ROOT, "tests")))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not tuning_store.exists()


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
    keep(report(config_of(), [row("reference", 0, 1.0)]), store)
    reads = []
    real = files.parse
    monkeypatch.setattr(files, "parse", lambda data: (reads.append(len(data)), real(data))[1])
    for _ in range(3):
        assert store.lookup(KEY, CPU).median_ms == 1.0
    assert len(reads) == 1
    keep(report(config_of(), [row("reference", 0, 0.5)]), TuningStore(store.directory))
    assert store.lookup(KEY, CPU).median_ms == 0.5


def test_a_device_that_cannot_be_asked_has_no_answer(store):
    why = []
    assert store.lookup(KEY, Device("rocm", 93), why_not=why.append) is None and "can't be asked what it is" in why[0]


# ---- a round trip --------------------------------------------------------------------------------------------------------------


def test_what_is_added_is_looked_up(store, double):
    config = config_of()
    before = selection.version
    rows = [row("double", 2, 0.8), row("double", 1, 1.0), row("reference", 0, 3.0), row("double", 0, None, "wrong", reason="off by 3")]
    told = report(config, rows, sizes=[[12, 0], [7, 4]], size_class="skewed", origin="user", started="2026-02-03T04:05:06Z")
    assert keep(told, store)
    assert selection.version != before, "plans that are kept must be made anew"
    found = TuningStore(store.directory).lookup(KEY, CPU)
    assert isinstance(found, StoredResult)
    assert (found.backend, found.algorithm.index, found.algorithm.name) == ("double", 2, "kernel_2")
    assert (found.algorithm.workspace_size, found.algorithm.deterministic, found.algorithm.time) == (2000, False, 0.8)
    assert (found.median_ms, found.fraction, found.size_class, found.origin) == (0.8, 0.01 / 0.8, "skewed", "user")
    assert found.config == KEY and found.device == device_kind(CPU) and found.device_name == told.device_name
    sizes = dict(found.sizes)
    assert len(sizes.pop("digest")) == 16
    assert sizes == {"samples": 2, "groups": 2, "ragged_extent": 12, "rows": 11.5, "largest": 12, "empty": 0.5}
    text = found.describe()
    assert "tuned 2026-02-03 04:05 UTC on skewed sizes of the user's" in text and "0.8 ms, 0.012 of the floor" in text
    # every R, alpha and beta of one key
    assert store.lookup(config_of(alpha=3).key(), CPU) is not None and store.lookup(config_of(m=13).key(), CPU) is None
    assert store.lookup(config_of(n=6).key(), CPU) is None
    (result,) = store.results()
    assert result == stored_result(told)
    assert [one.name for one in result.algorithms] == ["kernel_2", "kernel_1", "numpy_matmul_a_group"], "of each backend its best ones"
    assert json.loads(store.path(device_kind(CPU)).read_text())["schema"] == 2


def test_named_backend_and_deterministic_find_the_best_they_can(store, double):
    rows = [row("double", 0, 0.5), row("double", 2, 0.8), row("double", 1, 1.0), row("reference", 0, 0.9)]
    keep(report(config_of(), rows), store)
    ask = store.lookup
    assert name_of(ask(KEY, CPU)) == "double kernel_0"
    assert name_of(ask(KEY, CPU, backend="reference")) == "reference numpy_matmul_a_group"
    assert name_of(ask(KEY, CPU, backend="double")) == "double kernel_0"
    assert name_of(ask(KEY, CPU, settings=PlanSettings(deterministic=True))) == "reference numpy_matmul_a_group"
    assert name_of(ask(KEY, CPU, backend="double", settings=PlanSettings(deterministic=True))) == "double kernel_1"
    assert ask(KEY, CPU, backend="triton") is None
    double.reason = "no time"
    assert name_of(ask(KEY, CPU)) == "reference numpy_matmul_a_group", "the next best of those that can"
    unregister_backend("double")
    assert name_of(ask(KEY, CPU)) == "reference numpy_matmul_a_group"
    assert ask(KEY, CPU, backend="double") is None


def test_the_winner_of_a_report_is_the_one_looked_up_ties_included(store, double, rng):
    """Ties go to the smaller workspace, over backends too."""
    for trial in range(40):
        config = config_of(n=20 + trial)
        medians = 1 + 0.012 * rng.random(4)
        rows = [row("double", index, float(medians[index])) for index in range(3)] + [row("reference", 0, float(medians[3]))]
        rng.shuffle(rows)
        told = report(config, rows)
        keep(told, store)
        assert store.lookup(config.key(), CPU).algorithm == told.best.algorithm, medians
        found = store.lookup(config.key(), CPU, settings=PlanSettings(deterministic=True)).algorithm
        assert found.deterministic and found.time <= 1.011 * min(one.median_ms for one in rows if one.algorithm.deterministic)


def test_a_backend_that_was_tuned_alone_answers_for_itself(store, double):
    """Whether it is the faster one nobody has measured. The reference comes first here, the double after it."""
    why = []
    config = config_of()
    keep(report(config, [row("double", 0, 1.0), row("double", 1, 2.0)], alone=True), store)
    assert store.lookup(KEY, CPU, why_not=why.append) is None and store.lookup(KEY, CPU, settings=PlanSettings(deterministic=True)) is None
    (text,) = why
    assert "is of double, and was not compared to reference, which comes first; tune both, or name backend='double'" in text
    assert name_of(store.lookup(KEY, CPU, backend="double")) == "double kernel_0"
    # the one that comes first anyway is no change
    keep(report(config, [row("reference", 0, 5.0)], alone=True), store)
    assert name_of(store.lookup(KEY, CPU)) == "reference numpy_matmul_a_group"
    # both in one tuning: they are compared
    keep(report(config, [row("reference", 0, 3.0), row("double", 1, 2.0)]), store)
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_1"
    # alone again, later, and it is no answer for calls that name none
    keep(report(config, [row("double", 2, 0.5)], alone=True), store)
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_1"
    assert name_of(store.lookup(KEY, CPU, backend="double")) == "double kernel_2"


@pytest.mark.parametrize("verdict", ["failed", "wrong", "untimed"])
def test_a_backend_that_was_tried_and_lost_was_compared(store, double, verdict):
    keep(report(config_of(), [row("double", 0, 1.0), row("reference", 0, None, verdict, reason="because")]), store)
    assert name_of(store.lookup(KEY, CPU)) == (None if verdict == "untimed" else "double kernel_0"), "untimed: it was not tried"
    (result,) = store.results()
    assert tuple(result.versions) == (("double",) if verdict == "untimed" else ("double", "reference"))


def test_a_backend_that_cannot_run_the_config_need_not_be_compared(store, double, monkeypatch):
    keep(report(config_of(), [row("double", 0, 1.0)], alone=True), store)
    reference = hgg.backends.get_backend("reference")
    monkeypatch.setattr(type(reference), "can_handle", lambda *_: "not today")
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_0"


def test_size_classes_in_the_order_of_preference(store):
    def add(**settings):
        keep(report(config_of(), [row("reference", 0, settings.pop("median"))], **settings), store)

    def asked(size_class=None):
        return store.lookup(KEY, CPU, size_class=size_class).median_ms

    add(median=1.0)
    assert asked() == asked("skewed") == 1.0
    add(median=2.0, size_class="sparse", origin="user", sizes=[[12, 0]])
    assert asked() == 2.0 and asked("balanced") == 1.0
    add(median=3.0, size_class="skewed", origin="user", sizes=[[9, 3]])
    assert asked() == 3.0, "the last of the user's"
    add(median=4.0)  # the seed, later than all: the user's still come first
    assert asked() == 3.0 and asked("balanced") == 4.0 and asked("sparse") == 2.0
    add(median=5.0, size_class="balanced", origin="user", sizes=[[6, 6]])
    assert asked() == 5.0 and asked("balanced") == 5.0 and asked("skewed") == 3.0


def test_real_routing_comes_first_then_the_seed_then_synthetic_sizes_and_none_replaces_another(store):
    def add(median, origin):
        assert keep(report(config_of(), [row("reference", 0, median)], origin=origin, size_class="skewed", sizes=[[9, 3]]), store)

    def found():
        return store.lookup(KEY, CPU)

    add(1.0, "zipf")
    assert found().median_ms == 1.0 and "on synthetic sizes (zipf, skewed)" in found().describe()
    add(2.0, "dirichlet")
    assert found().median_ms == 2.0
    add(3.0, "seed")
    assert found().median_ms == 3.0 and "on balanced sizes" in found().describe()
    add(4.0, "user")
    for number, origin in enumerate(("zipf", "dirichlet", "seed"), 5):  # later than the user's, of the same class, on the same sizes
        add(float(number), origin)
        assert found().median_ms == 4.0 and store.lookup(KEY, CPU, size_class="skewed").median_ms == 4.0
        assert "on skewed sizes of the user's" in found().describe()
    kept = sorted((one.origin, one.median_ms) for one in store.results())
    assert kept == [("dirichlet", 6.0), ("seed", 7.0), ("user", 4.0), ("zipf", 5.0)]


@pytest.mark.parametrize("started", ["2026-03-01T00:00:00+00:00", "2001-01-01T00:00:00Z", "2099-01-01T00:00:00Z"])
def test_the_last_result_of_a_slot_stays_whatever_its_date(store, started):
    """Slower, on other sizes, by a clock that is wrong: what was verified last counts."""
    for number, sizes in enumerate(([[9, 3]], [[9, 3]], [[10, 2]])):
        keep(report(config_of(), [row("reference", 0, 1.0 + number)], origin="user", sizes=sizes, started=started), store)
        assert store.lookup(KEY, CPU).median_ms == 1.0 + number
        assert len(store.results()) == 1
    keep(report(config_of(), [row("reference", 0, 9.0)], origin="user", size_class="sparse", sizes=[[12, 0]]), store)
    assert store.lookup(KEY, CPU).median_ms == 9.0, "also over one of the future, of another class"


def test_another_product_of_the_same_kind_comes_second(store):
    keep(report(config_of(), [row("reference", 0, 1.0)], origin="user", name="another product"), store)
    assert store.lookup(KEY, CPU).device_name == "another product"
    keep(report(config_of(), [row("reference", 0, 2.0)]), store)
    assert store.lookup(KEY, CPU).median_ms == 2.0
    other = {"kind": "cpu", "target": "sparc-v9", "compute_units": 64}
    keep(report(config_of(n=6), [row("reference", 0, 3.0)], device=other), store)
    assert store.lookup(config_of(n=6).key(), CPU) is None
    assert {str(one.device) for one in store.results()} == {str(device_kind(CPU)), "cpu sparc-v9, 64 cores"}
    assert store.path(DeviceKind("rocm", "gfx942", 304)).name == "rocm-gfx942-304cus.v2.json"


# ---- stale ---------------------------------------------------------------------------------------------------------------------


def test_other_versions_are_passed_over_with_one_warning(store, caplog):
    for n in (5, 6):
        keep(report(config_of(n=n), [row("reference", 0, 1.0)], versions={"numpy": "1.0.2"}), store)
    with caplog.at_level(logging.WARNING, "hipgroupgemm.tuning"):
        for _ in range(2):
            assert store.lookup(KEY, CPU) is None and store.lookup(config_of(n=6).key(), CPU) is None
    (text,) = [entry.getMessage() for entry in caplog.records]
    assert f"numpy is {np.__version__} now and was 1.0.2" in text and "backend reference" in text and "Tune again" in text
    keep(report(config_of(), [row("reference", 0, 2.0)]), store)  # for these versions, beside the other
    keep(report(config_of(), [row("reference", 0, 1.0)], versions={"numpy": "1.0.2"}), store)  # in the other environment, later
    assert store.lookup(KEY, CPU).median_ms == 2.0 and len(store.results()) == 3
    assert len(caplog.records) == 1, "what holds here answers, without a word of the other"


def test_versions_that_do_not_matter_to_a_backend_do_not_count(store, double):
    double.versions = lambda _: {"library": "2"}
    keep(report(config_of(), [row("double", 0, 1.0), row("reference", 0, 2.0)], versions={"numpy": "1.0", "triton": "0.1"}), store)
    found = store.lookup(KEY, CPU)
    assert name_of(found) == "double kernel_0" and found.versions["double"] == {"hipgroupgemm": hgg.__version__, "library": "2"}


def test_a_faster_backend_that_has_changed_makes_the_comparison_stale(store, double, caplog):
    """The reference was the slower one; whether it is slower than the new library nobody has measured."""
    double.versions = lambda _: {"library": "1"}
    keep(report(config_of(), [row("double", 0, 1.0), row("reference", 0, 2.0)]), store)
    keep(report(config_of(n=6), [row("double", 0, 2.0), row("reference", 0, 1.0)]), store)
    double.versions = lambda _: {"library": "2"}
    assert store.lookup(KEY, CPU) is None and "library is 2 now and was 1" in caplog.text
    assert name_of(store.lookup(KEY, CPU, backend="reference")) == "reference numpy_matmul_a_group"
    assert store.lookup(KEY, CPU, backend="double") is None
    assert name_of(store.lookup(config_of(n=6).key(), CPU)) == "reference numpy_matmul_a_group", "a slower one that changed is no matter"
    double.reason = "not on this machine"
    assert name_of(store.lookup(KEY, CPU)) == "reference numpy_matmul_a_group", "nor one that can't run"


@pytest.mark.parametrize("change", [{"index": 7}, {"name": "kernel_renamed"}, None])
def test_index_and_name_are_both_checked(store, double, change, caplog):
    keep(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0), row("reference", 0, 3.0)], origin="user"), store)
    keep(report(config_of(), [row("reference", 0, 9.0)]), store)
    double.found[0:1] = [] if change is None else [dataclasses.replace(double.found[0], **change)]
    with caplog.at_level(logging.WARNING, "hipgroupgemm.tuning"):
        for _ in range(2):
            found = store.lookup(KEY, CPU)
            assert (name_of(found), found.median_ms) == ("reference numpy_matmul_a_group", 9.0), "the next result"
    (text,) = [entry.getMessage() for entry in caplog.records]
    assert "there is no algorithm 'kernel_0' with index 0 now" in text and "backend double" in text
    assert name_of(store.lookup(KEY, CPU, settings=PlanSettings(deterministic=True), backend="double")) == "double kernel_1"


def test_an_algorithm_is_found_by_the_backends_own_means(store, double):
    keep(report(config_of(), [row("double", 2, 1.0)]), store)
    asked = []

    def find(config, device, name, index):
        asked.append((config, device, name, index))
        return dataclasses.replace(double.found[2], workspace_size=12345)

    double.find_algorithm = find
    found = store.lookup(KEY, CPU)
    assert found.algorithm.workspace_size == 12345, "what it needs now counts"
    assert asked == [(KEY, CPU, "kernel_2", 2)] and double.asked == []


def test_a_backend_that_fails_costs_a_warning(store, double, caplog):
    keep(report(config_of(), [row("double", 2, 1.0)]), store)

    def fails(*_):
        raise OSError("driver gone")

    double.can_handle = fails
    assert store.lookup(KEY, CPU) is None and store.lookup(KEY, CPU) is None
    assert caplog.text.count("is not used (OSError: driver gone)") == 1


def test_a_config_is_told_from_all_others(store):
    """Every field of the key counts, those with equal JSON values of another field included."""
    configs = [config_of(m=16), config_of(n=16), config_of(k=16), config_of(groups=3)]
    configs.append(config_of(beta=2, c=hgg.ArraySpec((12, 5), "float32")))
    configs.append(GroupedGemmConfig.from_json(config_of(m=16).to_json().replace('"lhs_alignment": 4', '"lhs_alignment": 2')))
    for number, config in enumerate(configs):
        keep(report(config, [row("reference", 0, 1.0 + number)]), store)
    for number, config in enumerate(configs):
        assert store.lookup(config.key(), CPU).median_ms == 1.0 + number


# ---- struck --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", ["wrong", "nondeterministic", "crashed"])
def test_an_algorithm_that_was_found_wrong_is_struck_whatever_it_was_tuned_on(store, double, verdict):
    keep(report(config_of(), [row("double", 0, 1.0), row("double", 1, 2.0)], origin="user", size_class="skewed"), store)
    keep(report(config_of(), [row("double", 0, 1.0)]), store)
    keep(report(config_of(n=6), [row("double", 0, 1.0)]), store)
    before = selection.version
    assert not keep(report(config_of(), [row("double", 0, None, verdict, reason="bad")]), store)
    assert selection.version != before
    assert name_of(store.lookup(KEY, CPU)) == "double kernel_1"
    assert [one.size_class for one in store.results() if one.config == KEY] == ["skewed"]
    assert name_of(store.lookup(config_of(n=6).key(), CPU)) == "double kernel_0", "another config is another matter"
    keep(report(config_of(), [row("double", 1, None, verdict)]), store)
    assert store.lookup(KEY, CPU) is None
    assert len(store.results()) == 1


def test_what_was_found_wrong_with_these_versions_says_nothing_of_others(store):
    keep(report(config_of(), [row("reference", 0, 1.0)], versions={"numpy": "1.0"}), store)
    keep(report(config_of(), [row("reference", 0, 1.0)]), store)
    keep(report(config_of(), [row("reference", 0, None, "wrong")]), store)
    assert [result.versions["reference"]["numpy"] for result in store.results()] == ["1.0"]


def test_a_report_without_a_right_algorithm_stores_nothing(store, double, caplog):
    assert not keep(report(config_of(), [row("double", 0, None, "failed"), row("double", 1, None, "untimed")]), store)
    assert not keep(report(config_of(), []), store)
    assert not store.directory.exists() and not caplog.records
    assert not keep(dataclasses.replace(report(config_of(), [row("reference", 0, 1.0)]), identity={"kind": "cpu"}), store)
    assert "what was tuned is not stored" in caplog.text


# ---- export, merge, remove -----------------------------------------------------------------------------------------------------


def test_export_and_merge(store, double, tmp_path):
    keep(report(config_of(), [row("double", 0, 1.0), row("reference", 0, 2.0)]), store)
    keep(report(config_of(n=6), [row("reference", 0, 3.0)], device={"target": "sparc"}), store)
    other = TuningStore(tmp_path / "other")
    assert other.merge(store.export(), dry_run=True) == (2, 0)
    assert other.results() == [] and not other.directory.exists()
    before = selection.version
    assert other.merge(store.export()) == (2, 0) and selection.version != before
    assert other.results() == store.results() and other.export() == store.export()
    assert other.merge(store.export()) == (0, 2)
    (only,) = json.loads(store.export(lambda result: result.device.target == "sparc"))["results"].values()
    assert [one["device"]["target"] for one in only] == ["sparc"]
    third = TuningStore(tmp_path / "third")
    assert third.merge(store.path(device_kind(CPU)).read_bytes()) == (1, 0), "a file of a store, as it lies there"


def test_of_two_results_of_one_slot_a_merge_keeps_the_later_tuned(store, tmp_path):
    for own, incoming, wanted in (("2026-01-01", "2026-02-01", 2.0), ("2026-02-01", "2026-01-01", 1.0), ("2026-01-01", "2026-01-01", 1.0)):
        stores = [TuningStore(tmp_path / os.urandom(6).hex()) for _ in range(2)]
        for one, date, median in zip(stores, (own, incoming), (1.0, 2.0), strict=True):
            keep(report(config_of(), [row("reference", 0, median)], started=f"{date}T00:00:00+00:00"), one)
        assert stores[0].merge(stores[1].export()) == ((1, 0) if wanted == 2.0 else (0, 1))
        assert [one.median_ms for one in stores[0].results()] == [wanted]


def test_an_older_result_that_is_merged_is_not_taken_for_the_last(store, tmp_path):
    other = TuningStore(tmp_path / "other")
    keep(report(config_of(), [row("reference", 0, 1.0)], origin="user", size_class="sparse", started="2025-01-01T00:00:00Z"), other)
    keep(report(config_of(), [row("reference", 0, 2.0)], origin="user", size_class="skewed"), store)
    assert store.merge(other.export()) == (1, 0) and len(store.results()) == 2
    assert store.lookup(KEY, CPU).median_ms == 2.0 and store.lookup(KEY, CPU, size_class="sparse").median_ms == 1.0


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{}", "is no tuning store"),
        ("[]", "is no tuning store"),
        ("{", "is no tuning store"),
        (
            '{"format": "hipgroupgemm tuning export", "schema": 2, "results": {}}',
            "is 'hipgroupgemm tuning export' of schema 2",
        ),
        ('{"format": "hipgroupgemm tuning store", "schema": 99, "results": {}}', "of schema 99, this version of hipgroupgemm knows"),
        ('{"format": "hipgroupgemm tuning store", "schema": true, "results": {}}', "is no tuning store"),
        ('{"format": "hipgroupgemm tuning store", "schema": 2, "results": []}', "is no tuning store"),
        ('{"format": "hipgroupgemm tuning store", "schema": 1, "device": {}, "configs": {}}', "is no tuning store"),
    ],
)
def test_what_is_no_store_is_not_merged(store, source, text):
    with pytest.raises(ValueError, match=text):
        store.merge(source.encode())
    assert not store.directory.exists()


def test_remove(store, double):
    for n in (5, 6, 7):
        keep(report(config_of(n=n), [row("double", 0, 1.0), row("reference", 0, 2.0)]), store)
    dry = store.remove(lambda result: result.config.n == 6, dry_run=True)
    assert len(dry) == 1 and len(store.results()) == 3
    before = selection.version
    removed = store.remove(lambda result: result.config.n == 6)
    assert len(removed) == 1 and selection.version != before
    assert store.lookup(config_of(n=6).key(), CPU) is None and name_of(store.lookup(KEY, CPU)) == "double kernel_0"
    assert store.remove(lambda result: False) == [] and len(store.results()) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"algorithms": ()},
        {"origin": ""},
        {"versions": {}},
        {"tuned": datetime.datetime(2026, 1, 1)},
        {"tuned": datetime.datetime(1, 1, 1, tzinfo=datetime.timezone.utc)},
    ],
)
def test_results_that_no_tuning_gives_are_refused(change):
    good = stored_result(report(config_of(), [row("reference", 0, 1.0)]))
    with pytest.raises(ValueError):
        dataclasses.replace(good, **change)
    for time in (None, 0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="time"):
            dataclasses.replace(good, algorithms=(dataclasses.replace(good.algorithm, time=time),))
