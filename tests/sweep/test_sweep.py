"""`hipgroupgemm sweep`: the products of its lists, what tuning is asked for, what is written, and what failures become."""

import contextlib
import csv
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sweep_double
from click.testing import CliRunner

from hipgroupgemm.cli import cli
from hipgroupgemm.measure import environment
from hipgroupgemm.measure.distributions import dirichlet_sizes, zipf_sizes
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, presets_of
from hipgroupgemm.sweep.jobs import DistributionError, SweepJob, SweepRequest, plan_jobs
from hipgroupgemm.sweep.results import read_sweep

SHAPE = ("--shape", "30,8,10,4")
pytestmark = pytest.mark.usefixtures("double")


def sweep(*arguments: str):
    return CliRunner().invoke(cli, ["sweep", "--no-store", *arguments])


def calls(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


# ---- jobs ------------------------------------------------------------------------------------------------------------------------


def test_jobs_are_the_product_of_the_lists() -> None:
    shapes = [MoEShape(30, 8, 10, 4, "30,8,10,4"), MoEShape(21, 6, 5, 3, "21,6,5,3")]
    request = SweepRequest(
        exact_shapes=tuple(shapes),
        classes=("fwd_wi", "wgrad_wo"),
        dtypes=("float16", "float32"),
        distributions=("balanced", "zipf"),
        seed=3,
    )
    jobs = plan_jobs(request, "cuda")
    wanted = list(itertools.product(shapes, ["float16", "float32"], ["balanced", "zipf"], ["fwd_wi", "wgrad_wo"]))
    assert [(job.shape, job.dtype, job.distribution, job.kind) for job in jobs] == wanted
    for job in jobs:
        drawn = None if job.distribution == "balanced" else (tuple(zipf_sizes(job.shape.m, job.shape.e, 3).tolist()),)
        assert job.group_sizes == drawn
    assert len(set(jobs)) == 16


def test_what_is_given_twice_counts_once() -> None:
    shape = MoEShape(30, 8, 10, 4, "a")
    request = SweepRequest(shapes=[shape], exact_shapes=[shape], classes=["fwd_wi"], dtypes=["float32", "float32"])
    assert len(plan_jobs(request, "cuda")) == 1


def test_types_and_scale_follow_the_device() -> None:
    whole = presets_of("mixtral-8x7b")[0]
    exact = MoEShape(4096, 4096, 4096, 8, "exact")
    request = SweepRequest(shapes=[whole], exact_shapes=[exact], classes=["fwd_wi"])
    gpu, cpu = plan_jobs(request, "rocm"), plan_jobs(request, "cpu")
    assert [(job.dtype, job.shape) for job in gpu] == [("bfloat16", whole), ("bfloat16", exact)]
    assert [job.dtype for job in cpu] == ["float32"] * 2
    assert cpu[0].shape.scale > 1
    assert cpu[1].shape == exact
    for kind in ("rocm", "cpu"):
        assert [job.shape for job in plan_jobs(msgspec.structs.replace(request, scale=4), kind)] == [whole.scaled(4), exact.scaled(4)]


def test_a_file_does_not_pass_for_a_distribution_by_its_name(tmp_path) -> None:
    (tmp_path / "zipf").write_text("3 4 0 9\n")
    request = SweepRequest(exact_shapes=[MoEShape(30, 8, 10, 4)], classes=["fwd_wi"], distributions=["zipf", str(tmp_path / "zipf")])
    drawn, real = plan_jobs(request, "cpu")
    assert (drawn.distribution, real.distribution, real.group_sizes) == ("zipf", "./zipf", ((3, 4, 0, 9),))


def test_vectors_of_a_file_are_samples_of_one_job(tmp_path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps([[8, 0, 12, 8], [4, 4, 4, 4]]))
    shape = MoEShape(28, 8, 10, 4, "a")
    (job,) = plan_jobs(SweepRequest(exact_shapes=[shape], classes=["dgrad_wi"], distributions=[str(path)]), "cpu")
    assert job.distribution == "sizes.json"
    assert job.group_sizes == ((8, 0, 12, 8), (4, 4, 4, 4))
    (job,) = plan_jobs(SweepRequest(exact_shapes=[shape], classes=["dgrad_wi"], distributions=[str(path)], scale=4), "cpu")
    assert job.group_sizes == ((2, 0, 3, 2), (1, 1, 1, 1))
    path.write_text("[1, 2, 3]")
    with pytest.raises(DistributionError, match=r"has 3 sizes.*E = 4"):
        plan_jobs(SweepRequest(exact_shapes=[shape], distributions=[str(path)]), "cpu")


def test_a_request_and_its_jobs_survive_json() -> None:
    request = SweepRequest(
        shapes=(MoEShape(9, 8, 7, 6, "x"),), classes=("fwd_wi",), dtypes=("float16",), distributions=("zipf",), backends=("triton",),
        algorithms=("a", "b"), max_algorithms=3, max_workspace=4, repetitions=5, time_limit=6.5, scale=2, seed=7,
    )  # fmt: skip
    again = msgspec.convert(json.loads(msgspec.json.encode(request)), SweepRequest)
    assert again == request
    assert again.shapes[0].label == "x"
    (job,) = plan_jobs(request, "cpu")
    assert msgspec.convert(json.loads(msgspec.json.encode(job)), SweepJob) == job


# ---- the command -----------------------------------------------------------------------------------------------------------------


def test_lists_with_commas_and_repeated_options(double, tmp_path) -> None:
    log, out = tmp_path / "log", tmp_path / "s.json"
    double(log=str(log))
    done = sweep(
        *SHAPE, "--shape", "21,6,5,3", "--class", "fwd_wi,dgrad_wo", "--class", "wgrad_wi", "--dtype", "fp16,float32", "--dtype", "fp32",
        "--distribution", "balanced,dirichlet", "--devices", "cpu", "--json", str(out), "--seed", "5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = read_sweep(out).records
    wanted = itertools.product([30, 21], ["float16", "float32"], ["balanced", "dirichlet"], ["fwd_wi", "dgrad_wo", "wgrad_wi"])
    assert [(r.job.m, r.job.dtype, r.job.distribution, r.job.kind) for r in records] == list(wanted)
    sizes = {(call["n"], json.dumps(call["sizes"])) for call in calls(log)}
    assert (10, "null") in sizes
    assert (5, json.dumps([dirichlet_sizes(21, 3, 5).tolist()])) in sizes


def test_models_are_a_list_too(tmp_path) -> None:
    out = tmp_path / "s.json"
    models = ["--model", "qwen3-30b-a3b,deepseek3-test", "--model", "gemma4-26b"]
    done = sweep(*models, *SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--json", str(out))
    assert done.exit_code == 0, done.output
    names = ["qwen3-30b-a3b", "deepseek3-test-mi300", "deepseek3-test-mi350", "gemma4-26b", "30,8,10,4"]
    jobs = [record.job for record in read_sweep(out).records]
    assert [job.model for job in jobs] == names
    assert [job.scale > 1 for job in jobs] == [True] * 4 + [False]
    assert sweep("--model", "gpt,qwen3-30b-a3b").exit_code == 2


def test_what_tuning_is_asked_for(double, tmp_path) -> None:
    log = tmp_path / "log"
    double(log=str(log), names=["a", "b", "c"])
    sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu")
    done = sweep(
        *SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--backend", "reference,triton", "--algorithms", "a,b", "--algorithms", "c",
        "--max-algorithms", "3", "--max-workspace", "2KiB", "--repetitions", "9", "--time-limit", "1.5", "--seed", "4",
    )  # fmt: skip
    sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--algorithms", "all")
    plain, full, every = calls(log)
    assert plain == {"n": 10, "device": "cpu", "sizes": None, "algorithms": "heuristic", "seed": 0}
    settings = {"max_algorithms": 3, "max_workspace_size": 2048, "repetitions": 9, "time_limit": 1.5, "seed": 4}
    assert full == {"n": 10, "device": "cpu", "sizes": None, "backends": ["reference"], "algorithms": ["a", "b", "c"], **settings}
    assert every["algorithms"] == "all"
    assert "backend 'triton' refuses: " in words(done.output)


def test_what_is_written(double, tmp_path) -> None:
    double(verdicts={"tile_256": "pruned"})
    outputs = [tmp_path / name for name in ("s.json", "s.csv", "s.png", "s.svg")]
    names = [part for pair in zip(("--json", "--csv", "--plot", "--plot"), map(str, outputs), strict=True) for part in pair]
    done = sweep(*SHAPE, "--shape", "21,6,5,3", "--class", "fwd_wi", "--devices", "cpu", *names)
    assert done.exit_code == 0, done.output
    assert all(f"wrote {path}" in done.output for path in outputs)
    for word in ("M=30 K=8 N=10 E=4, float32, balanced on cpu: A cpu", "tile_64", "tile_128", "2 ok, 1 pruned"):
        assert word in done.output
    header, *data = map(json.loads, outputs[0].read_text().splitlines())
    assert [shape["label"] for shape in header["request"]["exact_shapes"]] == ["30,8,10,4", "21,6,5,3"]
    assert header["devices"]["cpu"]["versions"] == {"hipgroupgemm": "0.1.0", "double": "1"}
    assert [job["best"]["name"] for job in data] == ["tile_64", "tile_128"]
    assert all(len(job["report"]["rows"]) == 3 for job in data)
    with outputs[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n"], row["name"], row["verdict"], row["winner"]) for row in rows] == [
        ("10", "tile_64", "ok", "True"),
        ("10", "tile_128", "ok", "False"),
        ("10", "tile_256", "pruned", "False"),
        ("5", "tile_64", "ok", "False"),
        ("5", "tile_128", "ok", "True"),
        ("5", "tile_256", "pruned", "False"),
    ]
    assert rows[0]["versions"] == "hipgroupgemm 0.1.0; double 1"
    assert float(rows[0]["median_ms"]) == data[0]["best"]["median_ms"]
    assert outputs[2].read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in outputs[3].read_text()


def test_standard_output_is_the_files_alone() -> None:
    command = [sys.executable, "-m", "sweep_double", "sweep", "--no-store", *SHAPE, "--class", "fwd_wi", "--devices", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["status"] for line in done.stdout.splitlines()[1:]] == ["ok"]
    assert "tile_64" in done.stderr
    assert "[1/1] cpu 30,8,10,4 fwd_wi float32 balanced: double tile_64" in done.stderr
    done = subprocess.run([*command, "--csv", "-"], capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert len(list(csv.DictReader(done.stdout.splitlines()))) == 3


def test_bars_on_a_terminal(double) -> None:
    """On a terminal stderr has a bar, which tells how far a job is, and stdout still the results alone."""
    pty = pytest.importorskip("pty")
    double(seconds=1.0, **{"raise": [11]})
    shapes = ["--shape", "30,8,11,4", *SHAPE, "--class", "fwd_wi"]
    command = [sys.executable, "-m", "sweep_double", "sweep", "--no-store", *shapes, "--devices", "cpu"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(ours, 4096):
            seen += data
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    text = seen.decode(errors="replace")
    assert process.returncode == 1
    for word in ("all jobs", "0/2", "1/2", "cpu 30,8,10,4 fwd_wi float32 balanced: time", "left", "failed: the driver has failed"):
        assert word in text, word
    assert "tile_64" in out
    assert "all jobs" not in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Which problems?"),
        (["--shape", "1,2,3"], "wanted four integers"),
        ([*SHAPE, "--class", "fwd_wi,bwd"], "'bwd' is not one of 'fwd_wi'"),
        ([*SHAPE, "--class", "fwd_wi,"], "nothing between two commas"),
        ([*SHAPE, "--dtype", "int8"], "no such element type"),
        ([*SHAPE, "--backend", "cutlass"], "no such backend; there are hipblaslt, triton, reference"),
        ([*SHAPE, "--distribution", "normal"], "wanted balanced, zipf, dirichlet or a file"),
        ([*SHAPE, "--algorithms", "all,tile_64"], "heuristic and all stand alone"),
        ([*SHAPE, "--time-limit", "0"], "0"),
        ([*SHAPE, "--max-workspace", "much"], "wanted a number of bytes"),
        ([*SHAPE, "--devices", "tpu"], 'must be "cpu", "cuda"'),
        ([*SHAPE, "--devices", "cpu", "--json", "nowhere/s.json"], "there is no directory"),
        ([*SHAPE, "--devices", "cpu", "--csv", "-", "--json", "-"], "given for two outputs"),
        ([*SHAPE, "--devices", "cpu", "--plot", "s.txt"], "ends in .png"),
    ],
)
def test_usage_errors(arguments, text) -> None:
    done = sweep(*arguments)
    assert done.exit_code == 2, done.output
    assert text in words(done.output)


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch, gpus) -> None:
    monkeypatch.setattr(environment, "default_device", lambda: ("cuda", 1))
    done = sweep(*SHAPE, "--devices", "0,7")
    assert done.exit_code == 2
    assert "there is no cuda:7 here, only cuda:0, cuda:1" in words(done.output)
    done = sweep(*SHAPE, "--class", "fwd_wi", "--devices", "auto,1,0")  # auto is the current one, and 1 the same again
    assert done.exit_code == 0, done.output
    monkeypatch.setattr(environment, "default_device", lambda: None)
    done = sweep(*SHAPE, "--devices", "0")
    assert done.exit_code == 2
    assert "no GPU was found" in words(done.output)
    assert "cpu: A cpu" in sweep(*SHAPE, "--class", "fwd_wi").output  # auto


# ---- devices ---------------------------------------------------------------------------------------------------------------------


def test_equal_devices_share_and_other_kinds_run_everything(double, gpus, tmp_path) -> None:
    log, out = tmp_path / "log", tmp_path / "s.json"
    double(log=str(log), seconds=0.2)
    done = sweep(*SHAPE, "--dtype", "float32", "--devices", "cuda:0,cuda:1,cpu", "--json", str(out))
    assert done.exit_code == 0, done.output
    by_device = {device: [call for call in calls(log) if call["device"] == device] for device in ("cuda:0", "cuda:1", "cpu")}
    assert len(by_device["cpu"]) == 6
    assert len(by_device["cuda:0"]) + len(by_device["cuda:1"]) == 6
    assert by_device["cuda:0"]
    assert by_device["cuda:1"]
    kinds = {(record.identity["kind"], record.job.kind) for record in read_sweep(out).records}
    assert kinds == set(itertools.product(("cuda", "cpu"), CLASSES))
    assert "on cuda: A cuda" in done.output
    assert "on cpu: A cpu" in done.output


def test_failures_are_rows_and_the_sweep_goes_on(double, tmp_path) -> None:
    out, table = tmp_path / "s.json", tmp_path / "s.csv"
    double(refuse=[11], memory=[12], **{"raise": [13]}, die=[14])
    shapes = [part for n in (11, 12, 13, 14, 15) for part in ("--shape", f"30,8,{n},4")]
    done = sweep(*shapes, "--class", "fwd_wi", "--devices", "cpu", "--json", str(out), "--csv", str(table))
    assert done.exit_code == 1, done.output
    records = read_sweep(out).records
    assert [(record.job.n, record.status) for record in records] == [
        (11, "refused"),
        (12, "out of memory"),
        (13, "failed"),
        (14, "failed"),
        (15, "ok"),
    ]
    reasons = ["no backend takes this", "too large", "the driver has failed", "the worker process was killed by SIGKILL", ""]
    assert [record.reason for record in records] == reasons
    assert all(f"M=30 K=8 N={n} E=4" in done.output for n in range(11, 16))
    assert "the worker process was killed by SIGKILL" in done.output
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] != "ok"]
    assert [row["reason"] for row in rows] == reasons[:4]


def test_refused_and_too_large_is_no_failure(double) -> None:
    double(refuse=[11], memory=[12])
    assert sweep("--shape", "30,8,11,4", "--shape", "30,8,12,4", "--class", "fwd_wi", "--devices", "cpu").exit_code == 0


def test_a_lost_device_leaves_its_jobs_to_the_others(double, tmp_path) -> None:
    out = tmp_path / "s.json"
    double(lose=[11], lost=str(tmp_path / "lost"))
    shapes = [part for n in (11, 12, 13) for part in ("--shape", f"30,8,{n},4")]
    done = sweep(*shapes, "--class", "fwd_wi", "--devices", "cpu", "--json", str(out))
    assert done.exit_code == 1
    records = read_sweep(out).records
    assert [(record.job.n, record.status, record.reason) for record in records] == [
        (11, "failed", "the device fell off the bus"),
        (12, "failed", "cpu is gone: cpu does not answer"),
        (13, "failed", "cpu is gone: cpu does not answer"),
    ]
    assert "cpu is gone (cpu does not answer); the sweep went on without it" in words(done.output)
    done = sweep("--resume", str(out))  # it is not back
    assert done.exit_code == 2
    assert "cpu is of no use: cpu does not answer" in words(done.output)
    (tmp_path / "lost").unlink()
    double()
    done = sweep("--resume", str(out))
    assert done.exit_code == 0
    assert [record.status for record in read_sweep(out).records] == ["ok"] * 3


@pytest.mark.parametrize("verdict", ["wrong", "nondeterministic", "crashed", "timed out", "failed"])
def test_a_candidate_that_is_not_right_makes_the_status_1(double, verdict) -> None:
    double(verdicts={"tile_64": verdict})
    done = sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu")
    assert done.exit_code == 1
    assert f"double 0 tile_64: {verdict}: it is {verdict}" in done.output
    assert f"1 {verdict}, 2 ok" in done.output
    assert "Candidates that are not right: 1; jobs that failed: 0" in done.output


def test_no_winner_at_all(double, tmp_path) -> None:
    double(verdicts=dict.fromkeys(sweep_double.NAMES, "untimed"))
    out, plot = tmp_path / "s.json", tmp_path / "s.png"
    done = sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--json", str(out), "--plot", str(plot))
    assert done.exit_code == 0
    assert "no winner" in done.output
    assert f"{plot} was not written: there is no winner" in done.output
    assert read_sweep(out).records[0].best is None


def test_a_named_backend_that_ran_nothing_makes_the_status_1() -> None:
    assert sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--backend", "reference").exit_code == 1


def test_the_winners_median_is_the_stand_ins(double, tmp_path) -> None:
    out = tmp_path / "s.json"
    sweep(*SHAPE, "--devices", "cpu", "--json", str(out))
    for record in read_sweep(out).records:
        job, report = record.job, record.report
        np.testing.assert_allclose(record.best.median_ms, min(row["median_ms"] for row in report["rows"]))
        assert {report["config"]["m"], report["config"]["k"], report["config"]["n"]} <= {job.m, job.k, job.n, 32, 30}
