"""`hipgroupgemm store ...`: what it prints, writes, removes, refuses and exits with."""

from __future__ import annotations

import datetime
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from store_reports import config_of, report, row

import hipgroupgemm as hgg
from hipgroupgemm.cli import cli
from hipgroupgemm.measure.workloads import CLASSES, MoEShape
from hipgroupgemm.measure.workloads import config_of as problem_of
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store.identity import device_kind
from hipgroupgemm.store.records import config_id
from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.tuning.keep import keep, stored_result


@pytest.fixture
def store(tuning_store):
    return TuningStore(tuning_store)


@pytest.fixture
def full(store):
    """Three results of this machine, one of them of other versions, and one of an accelerator that is not here."""
    now = datetime.datetime.now(datetime.timezone.utc)
    keep(report(config_of(), [row("reference", 0, 1.25)], started=now.isoformat()), store)
    keep(report(config_of(n=6), [row("reference", 0, 2.0)], started=(now - datetime.timedelta(days=10)).isoformat(), origin="user"), store)
    keep(report(config_of(n=7), [row("reference", 0, 3.0)], versions={"numpy": "1.0"}, started="2025-01-01T00:00:00Z"), store)
    mi300 = {"kind": "rocm", "target": "gfx942", "compute_units": 304}
    keep(report(config_of(n=8), [row("hipblaslt", 4, 4.0)], device=mi300, name="AMD [bold] MI300X", size_class="skewed"), store)
    return store


def run(*arguments, code=0, text=None):
    result = CliRunner().invoke(cli, ["store", *map(str, arguments)], input=text, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.output


def words(text):
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def left(store):
    return sorted(record.config.n for record in TuningStore(store.directory).results())


def test_path_and_an_empty_store(store, monkeypatch, tmp_path):
    assert run("path") == f"{store.directory}\n"
    assert run("path", "--directory", tmp_path) == f"{tmp_path}\n"
    assert run("ls") == f"{store.directory}: no results\n"
    assert json.loads(run("ls", "--json")) == []
    assert json.loads(run("export"))["results"] == {}
    assert run("prune", "--all").startswith("0 results removed")
    assert not store.directory.exists()
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    for command in (["path"], ["ls"], ["export"], ["prune", "--all"]):
        assert "The tuning store is off (HIPGROUPGEMM_TUNING_STORE=off" in words(run(*command, code=2))
    assert run("path", "--directory", tmp_path) == f"{tmp_path}\n", "a directory that is named is no matter of the environment"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(tmp_path / "file"))
    assert "is no directory" in words(run("ls", code=2))


def test_ls(full):
    text = run("ls")
    assert f"{device_kind(CPU)}: " in text and "rocm gfx942, 304 CUs: AMD [bold] MI300X" in text
    lines = {line.split()[0]: line for line in text.splitlines() if re.match(r"^ ?[0-9a-f]{8} ", line)}
    assert len(lines) == 4 and f"4 results in {full.directory}" in text
    first = lines[config_id(config_of().key())[:8]]
    assert "fwd_wi M,K,N,E=12,7,5,2 float32->float32 " in first and "reference 0 numpy_matmul_a_group" in first and "1.25" in first
    assert first.rstrip().endswith("yes") and "balanced seed" in first
    assert lines[config_id(config_of(n=7).key())[:8]].rstrip().endswith("other versions")
    assert lines[config_id(config_of(n=8).key())[:8]].rstrip().endswith("?")
    assert "balanced seed" not in lines[config_id(config_of(n=6).key())[:8]]
    assert run("ls", "--device", "GFX942").count("hipblaslt") == 1 and "numpy" not in run("ls", "--device", "MI300")
    assert "hipblaslt" not in run("ls", "--backend", "reference")
    assert "1 results" in run("ls", "--config", config_id(config_of().key())[:6])
    assert "'nobody': no such backend; there are hipblaslt, triton, reference" in words(run("ls", "--backend", "nobody", code=2))
    assert run("ls", "--backend", "triton").endswith("no results that fit\n")
    assert "1 results" in run("ls", "--origin", "user") and "4 results" in run("ls", "--origin", "user", "--origin", "seed")


def test_ls_in_the_words_of_the_command_line(store):
    """A row can be found by the --class and --shape that were swept."""
    shape = MoEShape(100, 48, 32, 4)
    swapped = {"fwd_wo": "fwd_wi", "dgrad_wo": "dgrad_wi", "wgrad_wo": "wgrad_wi"}
    for name, kind in CLASSES.items():
        told = report(problem_of(kind, shape, "float32"), [row("reference", 0, 1.0)], origin="zipf", size_class="skewed")
        keep(told, store)
        held = stored_result(told)
        (one,) = json.loads(run("ls", "--json", "--config", config_id(held.config)))
        assert held.config.ragged_extent == 104, "the key is rounded up"
        assert (one["class"], one["shape"]) == ((name, [100, 48, 32, 4]) if name not in swapped else (swapped[name], [100, 32, 48, 4]))
        assert f"{one['class']} M,K,N,E={','.join(map(str, one['shape']))} " in run("ls", "--config", config_id(held.config))
        assert "skewed zipf" in run("ls", "--config", config_id(held.config))
    lhs, rhs = hgg.ArraySpec((12, 7), "float32"), hgg.ArraySpec((2, 7, 5), "float32")
    transposed = hgg.ArraySpec((12, 7), "float32", strides=(4, 48))
    for config in (hgg.config_for_ragged_dot(one, rhs, hgg.ArraySpec((2,), "int32")) for one in (lhs, transposed)):
        keep(report(config, [row("reference", 0, 1.0)], origin="user", size_class="sparse"), store)
    assert "fwd_wi M,K,N,E=12,7,5,2 " in run("ls") and "m=12 n=5 k=7 groups=2 " in run("ls") and "sparse user's" in run("ls")
    assert [one["shape"] for one in json.loads(run("ls", "--json")) if one["config"]["k"] == 7].count(None) == 1


def test_ls_json(full):
    data = json.loads(run("ls", "--json"))
    assert [one["config"]["n"] for one in data if one["backend"] == "reference"] == [5, 6, 7]
    one = next(one for one in data if one["config"]["n"] == 5)
    assert one["usable"] == "yes" and one["versions"]["reference"] == {"hipgroupgemm": hgg.__version__, "numpy": np.__version__}
    assert one["algorithms"][0]["name"] == "numpy_matmul_a_group" and one["device"]["kind"] == "cpu"
    assert {one["usable"] for one in data} == {"yes", "other versions", "?"}


def test_export_and_import(full, tmp_path):
    file = tmp_path / "tuned.json"
    assert run("export", file) == f"4 results written to {file}\n"
    assert json.loads(run("export")) == json.loads(file.read_text()) == json.loads(run("export", "-"))
    other = tmp_path / "other"
    text = run("import", "--directory", other, "--dry-run", file)
    assert "4 results taken" in text and "dry run" in text and not other.exists()
    assert run("import", "--directory", other, file) == f"{file}: 4 results taken\n"
    assert "-: 0 results taken, 4 not" in run("import", "--directory", other, "-", text=file.read_text())
    assert json.loads(TuningStore(other).export()) == json.loads(full.export())
    assert "No result has all that is asked for" in words(run("export", "--config", "nope", tmp_path / "none.json", code=2))
    assert not (tmp_path / "none.json").exists()
    (part,) = json.loads(run("export", "--device", "gfx942"))["results"].values()
    assert [one["device"]["target"] for one in part] == ["gfx942"]
    assert "3 results taken" in run("import", "--directory", tmp_path / "third", full.path(device_kind(CPU)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not.json: is no tuning store (Input data was truncated"),
        ("[" * 100_000, "not.json: "),
        ("{}", "(Object missing required field `format`); wanted what `hipgroupgemm store export` wrote"),
        ('{"format": "hipgroupgemm tuning store", "schema": 99, "results": {}}', "of schema 99, this version of hipgroupgemm knows"),
    ],
)
def test_files_that_cannot_be_imported(full, tmp_path, content, text):
    (tmp_path / "not.json").write_text(content)
    before = full.export()
    assert text in words(run("import", tmp_path / "not.json", code=1))
    assert TuningStore(full.directory).export() == before
    (tmp_path / "not.json").write_bytes(b"\xff\xfe\x00")
    run("import", tmp_path / "not.json", code=1)


def test_arguments_that_cannot_be_met(full, tmp_path):
    assert "does not exist" in words(run("import", tmp_path / "nothing", code=2))
    run("import", code=2)
    assert "Which? Give --all alone, or --older-than" in words(run("prune", code=2))
    assert "--all alone" in words(run("prune", "--all", "--device", "cpu", code=2))
    for age in ("soon", "-3d", "3 parsecs", "9999999d"):
        assert "wanted an age" in words(run("prune", f"--older-than={age}", code=2))
    assert "0 results removed" in run("prune", "--older-than", "999999y")
    assert "there is no directory" in words(run("export", tmp_path / "no" / "file", code=2))
    assert left(full) == [5, 6, 7, 8]


def test_prune(full):
    text = run("prune", "--older-than", "9d", "--backend", "reference", "--dry-run")
    assert "2 results would be removed" in text and text.count("numpy_matmul_a_group") == 2 and left(full) == [5, 6, 7, 8]
    text = run("prune", "--other-versions")
    assert "1 results removed" in text and "1 are of devices or backends that are not on this machine, and were kept" in text
    assert left(full) == [5, 6, 8]
    assert "1 results removed" in run("prune", "--older-than", "1w", "--backend", "reference") and left(full) == [5, 8]
    assert "0 results removed" in run("prune", "--older-than", "12h", "--device", "cpu") and left(full) == [5, 8]
    assert "1 results removed" in run("prune", "--config", config_id(config_of(n=8).key())) and left(full) == [5]
    assert "1 results removed" in run("prune", "--all") and left(full) == []


def test_a_store_that_cannot_be_written(full, monkeypatch):
    import os

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    data = full.export().decode()
    monkeypatch.setattr(os, "replace", full_disk)
    assert "can't be written (No space left on device)" in words(run("prune", "--all", code=1))
    run("prune", "--other-versions", "--dry-run")
    data = data.replace('"2025-01-01T00:00:00Z"', '"2025-06-01T00:00:00Z"')
    assert "can't be written" in words(run("import", "-", code=1, text=data))
    assert left(full) == [5, 6, 7, 8]


def test_help_names_every_command():
    text = run("--help")
    for name in ("path", "ls", "export", "import", "prune"):
        assert f"  {name} " in text
        assert "Usage:" in run(name, "--help")


def test_ls_says_what_a_plan_would(store, double):
    """A kernel that has another index now is passed over by plans, though all versions are the same."""
    keep(report(config_of(), [row("double", 2, 1.0)]), store)

    def usable():
        return [one["usable"] for one in json.loads(run("ls", "--json"))]

    assert usable() == ["yes"] and store.lookup(config_of().key(), CPU, backend="double") is not None
    double.found.reverse()
    double.found[:] = [type(one)(one.backend, index, one.name, one.workspace_size, False) for index, one in enumerate(double.found)]
    assert usable() == ["stale"] and store.lookup(config_of().key(), CPU, backend="double") is None
    double.reason = "not today"
    assert usable() == ["?"]


def test_ls_names_the_files_of_an_earlier_version(store):
    keep(report(config_of(), [row("reference", 0, 1.0)]), store)
    old = store.path(device_kind(CPU)).name.replace(".v2.", ".v1.")
    (store.directory / old).write_text("{}")
    assert f"Ignored, of an earlier version of hipgroupgemm: {old}; tune again" in run("ls")
