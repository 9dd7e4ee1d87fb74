"""What the command line understands and keeps: names said otherwise or twice, standard output, group sizes, commits, counts of calls."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import hipgroupgemm
from hipgroupgemm.benchmark import command
from hipgroupgemm.cli import bench as bench_command
from hipgroupgemm.cli import cli
from hipgroupgemm.cli import sweep as sweep_command
from hipgroupgemm.measure import environment
from hipgroupgemm.measure.distributions import zipf_sizes
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.workloads import CLASSES, PRESETS, MoEShape

SHAPE = ["--shape", "48,12,10,4"]


@pytest.fixture(autouse=True)
def given_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second to measure."""
    monkeypatch.setattr(HostHarness, "roofline", lambda *_: Roofline(1e11, 1e10, "a product", "a copy"))


def invoke(*arguments: str):
    return CliRunner().invoke(cli, list(arguments))


def bench(*arguments: str, repetitions: tuple[str, ...] = ("--repetitions", "2")):
    return invoke("bench", "--device", "cpu", *repetitions, *arguments)


# ---- standard output -------------------------------------------------------------------------------------------------------------


def test_json_and_csv_to_standard_output_are_alone_there() -> None:
    result = bench(*SHAPE, "--json", "-", "--class", "fwd_wi")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["rows"]) == 4
    assert "M=48 K=12 N=10 E=4" in result.stderr
    assert "wrote" not in result.stderr
    result = bench(*SHAPE, "--csv", "-", "--class", "fwd_wi")
    assert [row["status"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["ok"] * 4


def test_a_file_may_be_called_dash(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench(*SHAPE, "--json", "./-", "--class", "fwd_wi").exit_code == 0
    assert len(json.loads((tmp_path / "-").read_text())["rows"]) == 4


def test_python_m_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hipgroupgemm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"hipgroupgemm {hipgroupgemm.__version__}\n"


# ---- names -----------------------------------------------------------------------------------------------------------------------


def test_what_is_said_twice_is_run_once(tmp_path) -> None:
    twice = ["--class", "fwd_wi", "--backend", "reference", "--baseline", "loop", *SHAPE]
    plots = [tmp_path / "a.png", tmp_path / "a.svg"]
    result = bench(*twice, *twice, "--plot", str(plots[0]), "--plot", str(plots[1]), "--plot", str(plots[0]), "--json", "-")
    assert result.exit_code == 0, result.output
    assert [row["backend"] for row in json.loads(result.stdout)["rows"]] == ["reference", "loop"]
    assert [path.stat().st_size > 1000 for path in plots] == [True, True]
    assert result.stderr.count("wrote ") == 2
    listed = json.loads(invoke("list", *twice[:4], *twice[:4], *SHAPE, *SHAPE, "--device", "cpu", "--json").output)
    assert [len(one["algorithms"]) for one in listed] == [1]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")])
def test_element_types_have_short_names(name: str, dtype: str) -> None:
    rows = json.loads(bench(*SHAPE, "--class", "fwd_wo", "--dtype", name, "--baseline", "none", "--json", "-").stdout)["rows"]
    assert [(row["dtype"], row["status"]) for row in rows] == [(dtype, "ok")]
    listed = json.loads(invoke("list", *SHAPE, "--class", "fwd_wo", "--dtype", name, "--device", "cpu", "--json").output)
    assert listed[0]["dtype"] == dtype


def a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """As the runtime finds them, whether an array library is there or not."""
    monkeypatch.setattr(environment, "default_device", lambda: (kinds[0], 1) if kinds else None)
    monkeypatch.setattr(environment, "find_devices", lambda: [(kind, index) for kind in kinds for index in (0, 1)])


def test_every_command_takes_the_same_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    a_machine_with_gpus(monkeypatch, "cuda", "rocm")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(bench_command, "run", lambda request: seen.append(request.device) or 0)
    monkeypatch.setattr(sweep_command, "run_sweep", lambda request, outputs: seen.append(",".join(request.devices)) or 0)
    wanted = {"auto": "cuda:1", "cpu": "cpu", "gpu": "cuda:1", "cuda": "cuda:0", "cuda:1": "cuda:1", "rocm:0": "rocm:0", "1": "cuda:1"}
    for option in ("--device", "--devices"):
        for name, device in wanted.items():
            for one in ("bench", "sweep"):
                assert invoke(one, *SHAPE, option, name).exit_code == 0
            listed = json.loads(invoke("list", *SHAPE, option, name, "--class", "fwd_wi", "--backend", "reference", "--json").output)
            assert [*seen, listed[0]["device"]] == [device] * 3
            seen.clear()
    assert invoke("sweep", *SHAPE, "--device", "cpu,0", "--devices", "1").exit_code == 0 and seen == ["cpu,cuda:0,cuda:1"]
    for one in ("bench", "sweep"):
        for name in ("rocm:7", "9", "tpu"):
            assert invoke(one, *SHAPE, "--device", name).exit_code == 2
    done = invoke("bench", *SHAPE, "--device", "cpu,gpu")
    assert done.exit_code == 2 and "bench takes one" in done.output
    a_machine_with_gpus(monkeypatch)
    seen.clear()
    assert invoke("bench", *SHAPE).exit_code == 0 and seen == ["cpu"]
    assert invoke("bench", *SHAPE, "--device", "gpu").exit_code == 2


def test_every_command_takes_the_same_types_and_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(bench_command, "run", lambda request: seen.append((request.dtype, *request.distributions)) or 0)
    monkeypatch.setattr(sweep_command, "run_sweep", lambda request, outputs: seen.append((*request.dtypes, *request.distributions)) or 0)
    for one in ("bench", "sweep"):
        arguments = ["--dtype", "half", "--distribution", "balanced,zipf", "--distribution", "dirichlet", "--device", "cpu"]
        done = invoke(one, *SHAPE, *arguments)
        assert done.exit_code == 0, done.output
    assert seen == [("float16", "balanced", "zipf", "dirichlet")] * 2
    listed = json.loads(invoke("list", *SHAPE, "--class", "fwd_wi", "--dtype", "half,bf16,double", "--device", "cpu", "--json").output)
    assert [one["dtype"] for one in listed] == ["float16", "bfloat16", "float64"]
    for name, dtype in (("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("double", "float64")):
        spec = hipgroupgemm.ArraySpec((4, 4), name)
        assert (
            hipgroupgemm.config_for_ragged_dot(spec, hipgroupgemm.ArraySpec((2, 4, 4), name), hipgroupgemm.ArraySpec((2,), "int32")).type_a
            == dtype
        )


def test_models_are_listed() -> None:
    text = invoke("list", "--models").output
    for name, preset in PRESETS.items():
        line = next(line.split() for line in text.splitlines() if line.split()[:1] == [name])
        assert line[1:5] == [str(extent) for extent in preset.extents]
    found = {one["model"]: one for one in json.loads(invoke("list", "--models", "--json").output)}
    assert list(found) == list(PRESETS)
    assert found["deepseek3-test-mi300"]["aliases"] == ["deepseek3-test"]
    assert found["mixtral-8x7b"] == {"model": "mixtral-8x7b", "M": 15360, "K": 6144, "N": 20480, "E": 32, "aliases": []}


# ---- what is kept ----------------------------------------------------------------------------------------------------------------


def test_json_has_the_group_sizes_that_were_run(tmp_path) -> None:
    data = json.loads(bench(*SHAPE, "--shape", "96,4,4,8", "--distribution", "zipf", "--seed", "7", "--json", "-").stdout)
    assert [one["group_sizes"] for one in data["problems"]] == [zipf_sizes(48, 4, 7).tolist(), zipf_sizes(96, 8, 7).tolist()]
    keys = ("model", "m", "k", "n", "e", "scale", "distribution")
    problems = {tuple(one[key] for key in keys) for one in data["problems"]}
    assert {tuple(row[key] for key in keys) for row in data["rows"]} == problems
    path = tmp_path / "sizes.txt"
    path.write_text("20\n0\n8\n20\n")  # a group a line
    data = json.loads(bench(*SHAPE, "--scale", "2", "--distribution", str(path), "--json", "-").stdout)
    assert [one["group_sizes"] for one in data["problems"]] == [[10, 0, 4, 10]]


def test_distributions_are_a_list_as_in_sweep() -> None:
    one = [*SHAPE, "--class", "fwd_wi", "--baseline", "none", "--json", "-"]
    rows = json.loads(bench(*one, "--distribution", "balanced,zipf").stdout)["rows"]
    assert [row["distribution"] for row in rows] == ["balanced", "zipf"]
    again = ["--distribution", "zipf", "--distribution", "balanced"]
    data = json.loads(bench(*one, *again).stdout)
    assert [row["distribution"] for row in data["rows"]] == ["zipf", "balanced"]
    assert data["requested_distribution"] == "zipf,balanced"


@pytest.mark.parametrize("name", ["a.npz", "folder", "whole.npy"])
def test_files_that_are_no_group_sizes_are_usage_errors(name: str, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "a.npz", sizes=[1, 2, 3, 4])
    np.save(tmp_path / "whole.npy", [1.0, 2.0, 3.0, 4.0])
    result = bench(*SHAPE, "--distribution", str(tmp_path / name))
    assert result.exit_code == 2
    assert "Invalid value for --distribution" in result.output


def _git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *names, "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_of_a_checkout_and_of_nothing_else(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.commit_of(tmp_path) == (None, None)
    _git(tmp_path, "init", "-q")
    assert environment.commit_of(tmp_path) == (None, None)  # nothing is committed
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-q", "-m", "one")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert environment.commit_of(tmp_path) == (head, False)
    (tmp_path / "a").write_text("2")
    assert environment.commit_of(tmp_path) == (head, True)
    (tmp_path / "site-packages").mkdir()
    assert environment.commit_of(tmp_path / "site-packages") == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit_of(tmp_path) == (None, None)  # there is no git


def test_rows_carry_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "commit_of", lambda checkout: ("abc", True))
    data = json.loads(bench(*SHAPE, "--class", "fwd_wi", "--json", "-").stdout)
    assert (data["commit"], data["uncommitted_changes"]) == ("abc", True)
    row = next(csv.DictReader(io.StringIO(bench(*SHAPE, "--class", "fwd_wi", "--csv", "-").stdout)))
    assert (row["commit"], row["uncommitted_changes"]) == ("abc", "True")


# ---- counts of calls -------------------------------------------------------------------------------------------------------------


def _output(*arguments: str, **options) -> str:
    return " ".join(bench(*SHAPE, *arguments, **options).output.split())


@pytest.mark.parametrize("busy", [False, True])
def test_single_calls_are_told_with_their_reason(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIME_LIMIT", 0.0)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0 if busy else 0.0, 0.0, 0.0), raising=False)
    text = _output(repetitions=())
    assert "24 of 24 times are of one call and no median (column runs), since the time limit is 0 s for the whole benchmark" in text
    assert (", and the machine was busy;" in text) == busy
    assert "no median" not in _output("--repetitions", "1", repetitions=())  # as was asked for


def test_medians_are_not_called_single_calls() -> None:
    assert "no median" not in _output(repetitions=())


@pytest.mark.parametrize(
    ("counts", "note"),
    [([1, 1], "times of one call each"), ([5, 5], "medians of 5 timed calls"), ([1, 15], "medians of 1 to 15 timed calls")],
)
def test_the_note_of_a_plot_says_what_its_times_are(counts: list[int], note: str) -> None:
    shapes = [MoEShape(8, 4, 4, 2)]
    result = command.measure(command.Request(shapes, [CLASSES["fwd_wi"], CLASSES["wgrad_wo"]], device="cpu", baselines=(), repetitions=1))
    for row, count in zip(result.rows, counts, strict=True):
        row.repetitions = count
    assert f" · {note} · " in command.plot_note(result)


def test_a_large_shape_is_run_as_given_with_a_word_on_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "AUTO_PADDED_FLOPS", 100)
    result = bench(*SHAPE, "--class", "fwd_wi")
    assert "48,12,10,4 is run as given: a padded dot of it takes 4.6e+04 operations. --scale auto makes it small" in result.stderr
    assert "run as given" not in bench(*SHAPE, "--class", "fwd_wi", "--baseline", "loop").stderr
    assert "run as given" not in bench(*SHAPE, "--class", "fwd_wi", "--scale", "1").stderr


@pytest.mark.parametrize("command", ["bench", "list"])
def test_lists_have_commas_in_every_command(command) -> None:
    """As in sweep: names with commas between them, or options that are repeated, or both."""
    device = ["--device", "cpu"]
    if command == "bench":
        done = invoke("bench", *SHAPE, *device, "--class", "fwd_wi,wgrad_wo", "--class", "fwd_wi", "--baseline", "none", "--json", "-")
        assert done.exit_code == 0, done.output
        assert [row["ragged_dot_class"] for row in json.loads(done.stdout)["rows"]] == ["fwd_wi", "wgrad_wo"]
    else:
        options = ["--class", "fwd_wi,wgrad_wo", "--model", "qwen3-30b-a3b,gemma4-26b", "--backend", "reference,triton"]
        listed = json.loads(invoke("list", *options, *device, "--json").output)
        assert [(one["class"], one["model"]) for one in listed] == [
            (kind, model) for model in ("qwen3-30b-a3b", "gemma4-26b") for kind in ("fwd_wi", "wgrad_wo")
        ]
        assert set(listed[0]["refusals"]) == {"triton"}
    for bad, words in (("fwd_wi,", "nothing between two commas"), ("fwd_wi,bwd", "'bwd' is not one of")):
        done = invoke(command, *SHAPE, *device, "--class", bad)
        assert done.exit_code == 2
        assert words in " ".join(done.output.replace("│", " ").split())
