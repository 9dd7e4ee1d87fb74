"""What a store's file or its environment variable holds never makes a lookup, a plan or a tuning fail, whatever it is."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from store_reports import config_of, report, row

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import PlanSettings
from hipgroupgemm.cli import cli
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store import files
from hipgroupgemm.store.identity import DeviceKind, device_kind
from hipgroupgemm.store.store import TuningStore, store_directory, why_off
from hipgroupgemm.tuning.keep import keep

KEY = config_of().key()
ROUNDS = int(os.environ.get("HIPGROUPGEMM_TEST_FUZZ", "40"))

# values as JSON text: much of it Python's module reads, though no JSON writer should have written it
ODD = [
    *("null", "true", "false", "0", "-1", "1", "2", "1.5", "-0.0", "1e308", "5e-324", "1e999", "-1e999", "NaN", "Infinity", "-Infinity"),
    *(str(2**31), str(2**63), str(-(2**63) - 1), str(10**30), "9" * 400, "-" + "9" * 4000, "9" * 6000),
    *(
        '""',
        '"\\u0000"',
        '"\\ud800"',
        '"\\udfff\\ud800"',
        '"nan"',
        '"1e999"',
        '"-3"',
        f'"{"9" * 5000}"',
        f'"{"x" * 3000}"',
        '"../../x"',
        '"~"',
    ),
    *('"0001-01-01T00:00:00+14:00"', '"9999-12-31T23:00:00-10:00"', '"2099-01-01T00:00:00Z"', '"2099-01-01"', '"1"'),
    *("[]", "{}", "[[]]", "[null]", '{"": null}', '{"digest": []}', "[1e999]", '{"a": NaN}'),
    *("[" * depth + "]" * depth for depth in (40, 900, 5000, 100_000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (900, 5000)),
]

NAMES = [None, "", "\ud800", "x" * 3000, "\0", "config", "rows", "0"]


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


@pytest.fixture
def full(tuning_store, double):
    """A store with several configs, classes, origins and backends."""
    store = TuningStore(tuning_store)
    both = [row("double", 0, 1.0), row("double", 1, 2.0), row("reference", 0, 3.0)]
    keep(report(config_of(), both), store)
    keep(report(config_of(), both, origin="user", size_class="skewed", sizes=[[9, 3]]), store)
    keep(report(config_of(n=6), [row("reference", 0, 3.0)], versions={"numpy": "1.0"}), store)
    return store


def places(part, above=()):
    """The path of every value in parsed JSON."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, inner in items:
        yield (*above, name)
        yield from places(inner, (*above, name))


def put(document, path, text):
    """A document's JSON with the value at a path replaced by a text that need not be JSON."""
    document = copy.deepcopy(document)
    at = document
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = "@@here@@"
    return json.dumps(document).replace('"@@here@@"', text)


def without(document, path, name):
    """A document's JSON without the value at a path, or with it under another name."""
    document = copy.deepcopy(document)
    at = document
    for part in path[:-1]:
        at = at[part]
    value = at.pop(path[-1])
    if isinstance(at, dict) and name is not None:
        at[name] = value
    return json.dumps(document)


def command(*arguments, text=None):
    """Runs a command of `hipgroupgemm store`; it may refuse, and must not break down."""
    result = CliRunner().invoke(cli, ["store", *map(str, arguments)], input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output
    result.output.encode("utf-8")


def survives(directory, text):
    """Does all that can be done with a store whose file holds `text`; what is tuned must be found afterwards."""
    path = TuningStore(directory).path(device_kind(CPU))

    def fresh():
        for left in directory.iterdir():
            if not left.is_dir():
                left.unlink()
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return TuningStore(directory)

    store = fresh()
    for backend in (None, "double", "reference"):
        for deterministic in (False, True):
            found = store.lookup(KEY, CPU, backend=backend, settings=PlanSettings(deterministic=deterministic))
            assert found is None or (found.describe() and found.algorithm.backend in ("double", "reference"))
    for result in store.results():
        assert result.describe() and result.slot and result.median_ms > 0
    exported = fresh().export()
    json.loads(exported, parse_constant=lambda name: pytest.fail(f"{name} was written"))
    with tempfile.TemporaryDirectory() as empty:
        assert TuningStore(empty).merge(exported)[1] == 0, "what was read can be read again"
    for dry_run in (True, False):
        with contextlib.suppress(ValueError):
            TuningStore(directory / f"of {dry_run}").merge(path.read_bytes(), dry_run=dry_run)
    fresh().remove(lambda result: result.backend == "double")
    for arguments in (["ls"], ["ls", "--json"], ["prune", "--older-than", "1d", "--dry-run"], ["prune", "--backend", "double"], ["export"]):
        fresh()
        command(*arguments)
    (directory / "source").write_bytes(text.encode("utf-8", "surrogatepass"))
    command("import", directory / "source", "--directory", directory / "imported")
    store = fresh()
    told = report(config_of(), [row("double", 2, 7.0), row("reference", 0, 9.0)], origin="user", sizes=[[5, 7]], size_class="sparse")
    assert keep(told, store)
    found = TuningStore(directory).lookup(KEY, CPU, size_class="sparse")
    assert found is not None and found.algorithm.name == "kernel_2" and found.median_ms == 7.0


def test_any_value_in_a_file(full, rng):
    """Random places, random odd values, and some that are missing or have another name; the seed is in the test's output."""
    data = json.loads(full.path(device_kind(CPU)).read_text())
    found = list(places(data))
    for turn in range(ROUNDS):
        path, value = found[rng.integers(len(found))], ODD[rng.integers(len(ODD))]
        text = put(data, path, value)
        if turn % 5 == 4:
            text = without(data, path, NAMES[rng.integers(len(NAMES))])
        try:
            survives(full.directory, text)
        except BaseException:
            print("at", path, "value", value[:80])
            raise


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "9" * 400),
        (("unknown",), "[" * 5000 + "]" * 5000),
        ((0, "config", "m"), "NaN"),
        ((0, "config"), "1e999"),
        ((0,), "[" * 5000 + "]" * 5000),
        ((0, "device", "compute_units"), "-3"),
        ((0, "device", "target"), '"\\ud800"'),
        ((0, "tuned"), '"0001-01-01T00:00:00+14:00"'),
        ((0, "tuned"), '"9999-12-31T23:00:00-10:00"'),
        ((0, "tuned"), '"2026-01-01"'),
        ((0, "floor_ms"), "0"),
        ((0, "floor_ms"), "-1e308"),
        ((0, "sizes", "ragged_extent"), "9" * 4000),
        ((0, "algorithms", 0, "index"), "9" * 4000),
        ((0, "algorithms", 0, "time"), "1" + "0" * 400),
        ((0, "algorithms", 0, "time"), "5e-324"),
        ((0, "algorithms", 0, "name"), '"\\ud800"'),
        ((0, "versions", "double"), "null"),
    ],
)
def test_values_that_break_things(full, path, value):
    data = json.loads(full.path(device_kind(CPU)).read_text())
    if path[0] == 0:
        path = ("results", next(iter(data["results"])), *path)
    else:
        data.setdefault(path[0], None)
    survives(full.directory, put(data, path, value))


def test_any_bytes_in_a_file(full, rng):
    """Bytes changed, cut out and put in."""
    good = full.path(device_kind(CPU)).read_bytes()
    for _ in range(ROUNDS // 5):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at, length = int(rng.integers(len(bad))), int(rng.integers(0, 40))
            bad[at : at + length] = rng.bytes(int(rng.integers(0, 3)))
        text = bytes(bad).decode("utf-8", "surrogateescape").encode("utf-8", "surrogateescape").decode("latin-1")
        survives(full.directory, text)


def test_one_absurd_result_costs_itself_and_one_warning(full, caplog):
    path = full.path(device_kind(CPU))
    data = json.loads(path.read_text())
    first = next(iter(data["results"]))
    path.write_text(put(data, ("results", first, 0, "algorithms", 0, "time"), "1e999"))
    store = TuningStore(full.directory)
    for _ in range(3):
        assert store.lookup(KEY, CPU) is not None and len(store.results()) == 2
    (text,) = [entry.getMessage() for entry in caplog.records]
    assert "has a result that is not understood" in text
    keep(report(config_of(), [row("reference", 0, 3.0)], origin="zipf"), store)
    assert "1e999" in path.read_text(), "a later version may know what it is"
    assert not list(full.directory.glob("*.broken-*")), "the others are good"


@pytest.mark.parametrize("change", [{"m": 16}, {"colour": "blue"}])
def test_a_result_under_anothers_name_is_no_answer(full, change):
    """Its config is not the one of its id, or has a field that a later version knows: it would be taken for another problem."""
    path = full.path(device_kind(CPU))
    data = json.loads(path.read_text())
    first = next(iter(data["results"]))
    data["results"][first] = [{**one, "config": {**one["config"], **change}} for one in data["results"][first]]
    if "colour" in change:
        config = GroupedGemmConfig.from_json(config_of().key().to_json())
        text = json.dumps({**json.loads(config.to_json()), **change}, sort_keys=True)
        data["results"][hashlib.sha256(text.encode()).hexdigest()[:16]] = data["results"].pop(first)
    path.write_text(json.dumps(data))
    store = TuningStore(full.directory)
    assert store.lookup(KEY, CPU) is None and len(store.results()) == 1
    assert keep(report(config_of(), [row("reference", 0, 4.0)]), store) and store.lookup(KEY, CPU).median_ms == 4.0


# ---- the environment variable --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["~nosuchuser/x", "x" * 300, "/" + "y/" * 3000, "/dev/null/x", "\udcff\udcfe", "~", "*?\n"])
def test_no_value_of_the_variable_stops_anything(value, tmp_path):
    """In a process of its own, in a directory of its own, with a home of its own."""
    code = """
import logging, sys
logging.raiseExceptions = True
import numpy as np
import hipgroupgemm as hgg
from store_reports import config_of, report, row
from hipgroupgemm.store.store import default_store
from hipgroupgemm.cli.doctor import store_state
from hipgroupgemm.tuning.keep import keep
from hipgroupgemm.operands.views import CPU
rng = np.random.default_rng(1)
lhs, rhs = rng.random((12, 7), np.float32), rng.random((2, 7, 5), np.float32)
out = hgg.ragged_dot(lhs, rhs, np.array([5, 7], np.int32))
np.testing.assert_allclose(out[:5], lhs[:5] @ rhs[0], rtol=1e-5)
keep(report(config_of(), [row("reference", 0, 1.0)]))
default_store().results(); default_store().export(); default_store().remove(lambda _: False)
with hgg.GroupedMatmulPlan(config_of(), device="cpu") as plan:
    plan.explain()
    assert plan.autotune(repetitions=1, isolate=False).best is not None
store_state()
"""
    root = Path(hgg.__file__).parent.parent
    environment = {
        **os.environ,
        "HIPGROUPGEMM_TUNING_STORE": value,
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"))),
    }
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Logging error" not in done.stderr


@pytest.mark.parametrize("variable", ["HIPGROUPGEMM_TUNING_STORE", "HIPGROUPGEMM_CACHE_DIR"])
def test_a_home_that_nobody_has(monkeypatch, caplog, variable):
    monkeypatch.delenv("HIPGROUPGEMM_TUNING_STORE")
    monkeypatch.setenv(variable, "~nosuchuser/x")
    for _ in range(2):
        assert store_directory() is None and TuningStore().lookup(KEY, CPU) is None
    if variable == "HIPGROUPGEMM_TUNING_STORE":
        (text,) = [entry.getMessage() for entry in caplog.records]
        assert "HIPGROUPGEMM_TUNING_STORE=~nosuchuser/x names no directory" in text and "which is no place that can be found" in why_off()
        command("ls")


def test_the_commands_print_what_is_no_text(monkeypatch, full):
    """Bytes that are not UTF-8 in the directory's name, and control characters in a result."""
    odd = full.directory / os.fsdecode(b"caf\xe9")
    odd.mkdir(mode=0o700)
    path = odd / full.path(device_kind(CPU)).name
    path.write_bytes(full.path(device_kind(CPU)).read_bytes().replace(b"kernel_0", b"kernel\\u0007\\u001b[31m"))
    os.chmod(path, 0o600)
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(odd))
    shown = CliRunner().invoke(cli, ["store", "ls"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "3 results in" in shown.output and "\x1b" not in shown.output and "\x07" not in shown.output
    assert CliRunner().invoke(cli, ["store", "path"]).stdout_bytes == os.fsencode(odd) + b"\n"
    for arguments in (["ls", "--json"], ["export"], ["prune", "--all", "--dry-run"], ["prune", "--all"], ["ls"]):
        command(*arguments)


def test_a_current_directory_that_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "relative")
    assert store_directory() is None
    lhs, rhs = np.ones((4, 3), np.float32), np.ones((2, 3, 2), np.float32)
    assert hgg.ragged_dot(lhs, rhs, np.array([1, 3], np.int32)).sum() == 24


# ---- directories and files that are none ---------------------------------------------------------------------------------------


def test_directories_that_cannot_be_read(tmp_path, caplog, monkeypatch):
    for directory in ("d" * 300, "null\0inside"):
        store = TuningStore(tmp_path / directory)
        assert store.results() == [] and store.lookup(KEY, CPU) is None and json.loads(store.export())["results"] == {}
        assert not keep(report(config_of(), [row("reference", 0, 1.0)]), store) and store.remove(lambda _: True) == []
    assert all(entry.name == "hipgroupgemm.tuning" for entry in caplog.records) and 2 <= len(caplog.records) <= 6
    store = TuningStore(tmp_path / "closed")
    keep(report(config_of(), [row("reference", 0, 1.0)]), store)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert store.results() == [] and "Permission denied" in caplog.text


def test_a_pipe_in_the_place_of_the_file(tuning_store, caplog):
    store = TuningStore(tuning_store)
    tuning_store.mkdir(mode=0o700)
    os.mkfifo(store.path(device_kind(CPU)), 0o600)
    for _ in range(2):
        assert store.lookup(KEY, CPU) is None and store.results() == []
        assert not keep(report(config_of(), [row("reference", 0, 1.0)]), store)
    assert "is no regular file" in caplog.text and len(caplog.records) == 2


def test_names_that_are_no_names_of_files(full):
    for name in ("cpu-x-0cores", "cpu-%-1cores", "cpu-%ff-1cores", "rocm-a-1cores", "cpu-\udcff-1cores", ".cpu-a-1cores"):
        os.symlink("nowhere", os.fsencode(str(full.directory / f"{name}.v2.json")))
    assert len(full.results()) == 3 and len(full.remove(lambda _: True)) == 3


def test_a_link_is_written_through(tmp_path, tuning_store):
    real = TuningStore(tmp_path / "real")
    keep(report(config_of(), [row("reference", 0, 1.0)]), real)
    target = real.path(device_kind(CPU))
    target = target.rename(target.with_name("kept in version control.json"))
    store = TuningStore(tuning_store)
    tuning_store.mkdir(mode=0o700)
    link = store.path(device_kind(CPU))
    link.symlink_to(target)
    assert store.lookup(KEY, CPU).median_ms == 1.0
    keep(report(config_of(n=6), [row("reference", 0, 2.0)]), store)
    assert link.is_symlink() and len(json.loads(target.read_text())["results"]) == 2 and len(store.results()) == 2
    target.write_text("{")
    assert store.lookup(KEY, CPU) is None
    keep(report(config_of(), [row("reference", 0, 3.0)]), store)
    assert target.with_name(f"{target.name}.broken-1").read_text() == "{"
    assert link.is_symlink() and store.lookup(KEY, CPU).median_ms == 3.0 and len(json.loads(target.read_text())["results"]) == 1
    loop = tuning_store / "loop"
    loop.mkdir(mode=0o700)
    other = TuningStore(loop)
    other.path(device_kind(CPU)).symlink_to(other.path(device_kind(CPU)).name)
    assert other.lookup(KEY, CPU) is None and other.results() == []
    assert not keep(report(config_of(), [row("reference", 0, 1.0)]), other)


@pytest.mark.parametrize(
    "device",
    [
        *(("cpu", "", 1), ("cpu", "a\n", 1), ("cpu", "é", 1), ("cpu", "x" * 65, 1), ("cpu", 3, 1), ("cpu", "x", 0)),
        *(("rocm", "gfx942", -3), ("rocm", "gfx942", True), ("tpu", "v5", 1)),
    ],
)
def test_a_device_that_is_none_is_not_merged(full, tmp_path, device):
    """Files are named by devices."""
    with pytest.raises(ValueError, match="must be"):
        DeviceKind(*device)
    data = json.loads(full.export())
    for own in data["results"].values():
        for one in own:
            one["device"] = dict(zip(("kind", "target", "compute_units"), device, strict=True))
    store = TuningStore(tmp_path / "other")
    assert store.merge(json.dumps(data).encode()) == (0, 3) and not store.directory.exists()
