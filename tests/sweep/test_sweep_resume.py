"""A sweep's file, and sweeps that were cut short: killed, interrupted, taken up, or met by another."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from hipgroupgemm.cli import cli
from hipgroupgemm.measure.environment import ONE_THREAD
from hipgroupgemm.measure.workloads import MoEShape
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.sweep import running, workers
from hipgroupgemm.sweep.jobs import RequestError, SweepRequest, plan_jobs
from hipgroupgemm.sweep.results import FORMAT, Header, Record, Row, SweepFile, read_sweep

SHAPE = ("--shape", "30,8,10,4")
TWO = (*SHAPE, "--class", "fwd_wi,fwd_wo")
SHAPES = [part for n in (10, 11, 13) for part in ("--shape", f"30,8,{n},4")]
QUICK = ["--no-store", "--devices", "cpu"]
REQUEST = SweepRequest(exact_shapes=(MoEShape(30, 8, 10, 4, "x\u00e9"),))
pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def log(double, tmp_path: Path):
    """What has been tuned since it was last asked: the n of the configs."""
    path = tmp_path / "log"

    def since(**values) -> list[int]:
        seen = [json.loads(line)["n"] for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        double(log=str(path), **values)
        return seen

    since()
    return since


def sweep(*arguments: object):
    return CliRunner().invoke(cli, ["sweep", "--no-store", *map(str, arguments)])


def words(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def results(path: Path) -> list[tuple]:
    """What a sweep found, without times of day."""
    return sorted(
        (json.dumps(msgspec.to_builtins(r.job)), r.device, json.dumps(r.identity), r.status, str(r.best), json.dumps(r.report))
        for r in read_sweep(path).records
    )


def header(jobs: int) -> Header:
    return Header(request=REQUEST, devices={"cpu": {"kind": "cpu"}}, jobs=jobs, machine={}, started="2026-01-01")


def some_record(number: int, status: str = "ok") -> Record:
    job = plan_jobs(REQUEST, "cpu")[number]
    row = {"backend": "b", "name": "a\n,]}", "index": 0, "verdict": "ok", "median_ms": 1.5 + number}
    return Record(job, "cpu", {"kind": "cpu"}, status, "a lost letter: \udc80", Row(**row), {"rows": [row]}, finished="2026-01-01")


# ---- the file --------------------------------------------------------------------------------------------------------------------


def test_every_job_is_a_line_on_the_disk_at_once(tmp_path, monkeypatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (real(number), synced.append(number)))
    path = tmp_path / "s.jsonl"
    file = SweepFile(path, header(3))
    for number in range(3):
        first, *jobs = map(json.loads, path.read_text().splitlines())
        assert (first["format"], first["jobs"]) == (FORMAT, 3)
        assert [job["job"]["class"] for job in jobs] == ["fwd_wi", "fwd_wo", "dgrad_wi"][:number]
        assert len(synced) == number + 1
        assert read_sweep(path).done == number
        file.append(some_record(number))
    file.close()
    found = read_sweep(path)
    assert found.records == [some_record(number) for number in range(3)]
    assert not found.torn


def test_cut_anywhere_it_gives_the_jobs_before_the_cut_and_goes_on(tmp_path) -> None:
    path, cut = tmp_path / "s.jsonl", tmp_path / "cut.jsonl"
    file = SweepFile(path, header(3))
    for number in range(3):
        file.append(some_record(number))
    file.close()
    data = path.read_bytes()
    seen = set()
    for length in range(data.index(b"\n") + 1, len(data) + 1):
        cut.write_bytes(data[:length])
        found = read_sweep(cut)
        complete = data[:length].count(b"\n") - 1
        assert found.records == [some_record(number) for number in range(complete)], length
        assert found.torn == (data[length - 1 : length] != b"\n")
        seen.add((complete, found.torn))
        if length % 97 == 0:
            again = SweepFile(cut)
            assert cut.read_bytes() == data[:length]  # nothing is lost by looking
            for number in range(complete, 3):
                again.append(some_record(number))
            again.close()
            assert cut.read_bytes() == data
    assert seen == {(n, torn) for n in range(3) for torn in (False, True)} | {(3, False)}


def test_the_last_result_of_a_job_counts(tmp_path) -> None:
    file = SweepFile(tmp_path / "s.jsonl", header(2))
    for record in (some_record(0, "failed"), some_record(1), some_record(0)):
        file.append(record)
    file.close()
    found = read_sweep(tmp_path / "s.jsonl")
    assert [(r.job.kind, r.status) for r in found.records] == [("fwd_wi", "ok"), ("fwd_wo", "ok")]
    assert found.done == 2


HEADER = json.dumps(msgspec.to_builtins(header(2))) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n", "no file that hipgroupgemm sweep"),
        ('{"rows": []}', "no file that hipgroupgemm sweep"),
        ("\x00\xff\xfe\n", "no file that hipgroupgemm sweep"),
        ('{"format": "hipgroupgemm sweep", "version": 1, "jobs": [\n]}\n', r"line 1 can't be read .* wanted JSON Lines of version 2"),
        (json.dumps(msgspec.to_builtins(header(2)), indent=1) + "\n", r"line 1 can't be read .* wanted JSON Lines of version 2"),
        (HEADER[:-9], r"line 1 can't be read"),
        ('{"format": "hipgroupgemm sweep", "version": 9}\n', r"it is of version 9.*wanted JSON Lines of version 2"),
        ('{"format": "hipgroupgemm sweep", "version": 2}\n', r"line 1 can't be read .*missing required field `request`"),
        (HEADER + '{"a": 1}\n', r"line 2 can't be read .*missing required field"),
        (HEADER + '{"a": \n{"a": 1}\n', r"line 2 can't be read"),
        (HEADER + "\n", r"line 2 can't be read"),
    ],
)
def test_files_that_can_not_be_read_say_where_and_are_not_written_to(tmp_path, text, message) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_sweep(path)
    for arguments in (["sweep", *QUICK, "--resume", path], ["sweep", *QUICK, *TWO, "--resume", path], ["report", path]):
        done = CliRunner().invoke(cli, list(map(str, arguments)))
        assert done.exit_code == 2, done.output
        assert "s.jsonl" in done.output.replace("\n", "").replace("│", "").replace(" ", "")
    assert sweep(*QUICK, *TWO, "--json", path).exit_code == 2
    assert path.read_text(encoding="latin-1") == text


def test_a_file_that_another_sweep_writes_is_left_alone(tmp_path) -> None:
    path = tmp_path / "s.jsonl"
    file = SweepFile(path, header(1))
    file.append(some_record(0))
    before = path.read_bytes()
    for arguments in ([*QUICK, *SHAPES, "--json", path, "--overwrite"], ["--resume", path]):
        done = sweep(*arguments)
        assert done.exit_code == 1, done.output
        assert "another sweep is writing to it" in words(done)
    assert path.read_bytes() == before
    file.close()
    assert sweep(*QUICK, *SHAPES, "--json", path, "--overwrite").exit_code == 0


def test_a_new_sweep_overwrites_nothing_unless_told_to(tmp_path, log) -> None:
    path, other, empty = tmp_path / "s.jsonl", tmp_path / "other.json", tmp_path / "empty"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    before = path.read_bytes()
    log()
    done = sweep(*TWO, "--devices", "cpu", "--json", path)
    assert done.exit_code == 2
    for text in ("holds a sweep with 2 jobs", "--overwrite", "--resume"):
        assert text in words(done)
    other.write_text("somebody's notes")
    assert sweep(*TWO, "--devices", "cpu", "--json", other).exit_code == 2
    assert other.read_text() == "somebody's notes"
    assert (log(), path.read_bytes()) == ([], before)
    assert sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--json", path, "--overwrite").exit_code == 0
    assert len(read_sweep(path).records) == 1
    assert "--overwrite goes with --json" in words(sweep(*TWO, "--overwrite"))
    empty.touch()  # as mktemp makes
    assert sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--json", empty).exit_code == 0
    assert len(read_sweep(empty).records) == 1


def test_an_unfinished_sweep_is_not_overwritten(tmp_path, whole) -> None:
    part_of(whole, 4)
    before = whole.read_bytes()
    done = sweep(*SHAPES, "--json", whole)
    assert done.exit_code == 2
    assert "holds an unfinished sweep with 4 jobs" in words(done)
    assert whole.read_bytes() == before


# ---- taking up -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "whole.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "WORKERS", "sweep_double")
        patch.setenv("SWEEP_DOUBLE", "{}")
        assert sweep(*QUICK, *SHAPES, "--json", path).exit_code == 0
    return path


@pytest.fixture
def whole(finished: Path, tmp_path: Path) -> Path:
    """A finished sweep of this test's own."""
    return Path(shutil.copy(finished, tmp_path / "whole.jsonl"))


def part_of(path: Path, count: int) -> None:
    """Leaves the first jobs of a file, as an interruption does."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[: count + 1]))


def start(path: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "sweep_double", "sweep", *QUICK, *SHAPES, "--json", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_jobs(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size and len(read_sweep(path).records) >= count:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no {count} jobs: {process.communicate()}")


def workers_are_gone() -> bool:
    """Whether no process is left that tunes with the stand-in of this test: each has its log's name in its environment."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not list(processes_of(os.environ["SWEEP_DOUBLE"])):
            return True
        time.sleep(0.05)
    return False


def processes_of(options: str):
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"SWEEP_DOUBLE={options}".encode() in variables and state != "Z":
            yield int(path.name)


@pytest.mark.parametrize("torn", [False, True])
def test_killed_and_taken_up_is_as_never_killed(double, tmp_path, whole, torn) -> None:
    path, log = tmp_path / "killed.jsonl", tmp_path / "log"
    double(seconds=0.2, test=str(tmp_path))
    process = start(path)
    wait_for_jobs(path, 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert workers_are_gone(), "the worker outlived its sweep"
    kept = read_sweep(path).records
    assert 4 <= len(kept) < 18
    if torn:
        data = path.read_bytes()
        path.write_bytes(data[: -len(data.splitlines()[-1]) // 2])
        kept = kept[:-1]
    before = path.read_bytes()
    double(log=str(log))
    done = sweep("--resume", path)
    assert done.exit_code == 0, done.output
    assert f"{len(kept)} of 18 jobs are done" in done.output
    assert ("ended in the middle of another" in done.output) == torn
    assert len(log.read_text().splitlines()) == 18 - len(kept)
    assert results(path) == results(whole)
    assert path.read_bytes().startswith(before[: before.rindex(b"\n") + 1])  # added to, and nothing else


def test_ctrl_c_keeps_what_is_done(double, tmp_path, whole) -> None:
    path = tmp_path / "stopped.jsonl"
    double(seconds=0.2, test=str(tmp_path))
    process = start(path, "--csv", str(tmp_path / "stopped.csv"))
    wait_for_jobs(path, 3, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    kept = len(read_sweep(path).records)
    assert 3 <= kept < 18
    assert f"Stopped. Jobs kept: {kept}, left: {18 - kept}; go on with hipgroupgemm sweep --resume {path}" in out
    assert len((tmp_path / "stopped.csv").read_text().splitlines()) == 1 + 3 * kept
    assert workers_are_gone()
    double()
    assert sweep("--resume", path).exit_code == 0
    assert results(path) == results(whole)


def test_ctrl_c_in_the_middle_of_a_job_ends_its_worker(double, tmp_path) -> None:
    double(seconds=30, test=str(tmp_path))
    process = start(tmp_path / "s.jsonl")
    deadline = time.monotonic() + 30
    while not (tmp_path / "s.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    begun = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begun < 8
    assert workers_are_gone()


def test_a_finished_sweep_has_nothing_left(tmp_path, whole, log) -> None:
    before = whole.read_bytes()
    done = sweep("--resume", whole)
    assert done.exit_code == 0
    assert "18 of 18 jobs are done" in done.output
    assert "tile_128" in done.output
    assert (log(), whole.read_bytes()) == ([], before)


def test_a_torn_line_behind_a_finished_sweep_is_removed_and_no_rerun_is_claimed(whole, log) -> None:
    before = whole.read_bytes()
    whole.write_bytes(before + b'{"job": {"class": "fw')
    done = sweep("--resume", whole)
    assert done.exit_code == 0
    assert "18 of 18 jobs are done; it ended in the middle of a line, which is removed" in words(done)
    assert "run again" not in words(done)
    assert f"wrote {whole}" in done.output
    assert (log(), whole.read_bytes()) == ([], before)
    assert f"wrote {whole}" not in sweep("--resume", whole).output


def test_failures_are_run_again(whole, log) -> None:
    part_of(whole, 5)
    log(**{"raise": [13]})
    assert sweep("--resume", whole).exit_code == 1
    assert len(log()) == 13
    assert [r.job.n for r in read_sweep(whole).records if r.status == "failed"] == [13] * 3  # the classes whose out is n wide
    done = sweep("--resume", whole)
    assert done.exit_code == 0
    assert "15 of 18 jobs are done; failed, and run again: 3" in words(done)
    assert log() == [13] * 3
    assert read_sweep(whole).done == 18


@pytest.mark.parametrize(
    ("options", "words_of_it"),
    [
        (["--class", "fwd_wi"], "was begun with classes"),
        (["--dtype", "float64"], "was begun with dtypes"),
        (["--shape", "30,8,12,4"], "was begun with exact_shapes"),
        (["--seed", "1"], "was begun with seed 0, and not 1"),
        (["--repetitions", "7"], "was begun with repetitions None, and not 7"),
        (["--algorithms", "all"], "was begun with algorithms 'heuristic'"),
    ],
)
def test_two_sweeps_never_mix(whole, log, options, words_of_it) -> None:
    before = whole.read_bytes()
    done = sweep("--resume", whole, *options)
    assert done.exit_code == 2
    assert words_of_it in words(done)
    assert "its own file" in words(done)
    assert (log(), whole.read_bytes()) == ([], before)


def test_the_options_that_a_file_was_begun_with_may_be_said_again(whole, log) -> None:
    part_of(whole, 17)
    assert sweep(*QUICK, *SHAPES, "--seed", "0", "--resume", whole).exit_code == 0
    assert len(log()) == 1


@pytest.mark.parametrize("change", [{"version": "2"}, {"device": "Another"}])
def test_other_versions_and_devices_do_not_mix(double, whole, log, change) -> None:
    part_of(whole, 5)
    before = whole.read_bytes()
    double(**change)
    done = sweep("--resume", whole)
    assert done.exit_code == 2
    assert "is of cpu: A cpu; hipgroupgemm 0.1.0, double 1, and cpu is" in words(done)
    assert whole.read_bytes() == before


def test_devices_of_one_kind_can_take_each_others_place(gpus, tmp_path, log) -> None:
    path = tmp_path / "s.jsonl"
    assert sweep(*TWO, "--dtype", "float32", "--devices", "cuda:0,cpu", "--json", path).exit_code == 0
    part_of(path, 0)
    log()
    done = sweep("--resume", path, "--devices", "cuda:1")
    assert done.exit_code == 0
    assert "0 of 4 jobs are done; left to devices that were not named now: 2" in words(done)
    assert [r.device for r in read_sweep(path).records] == ["cuda:1"] * 2
    assert sweep("--resume", path, "--devices", "cpu").exit_code == 0
    assert len(log()) == 4
    assert read_sweep(path).done == 4


def test_group_sizes_that_have_changed_do_not_mix(tmp_path, log) -> None:
    sizes, path = tmp_path / "sizes.txt", tmp_path / "s.jsonl"
    sizes.write_text("8 9 4 9\n")
    arguments = [*TWO, "--devices", "cpu", "--distribution", sizes]
    assert sweep(*arguments, "--json", path).exit_code == 0
    sizes.write_text("8 9 9 4\n")
    done = sweep("--resume", path)
    assert done.exit_code == 2
    assert "has a file of group sizes changed?" in words(done)


def test_resume_of_a_file_that_is_not_there_starts_it(tmp_path, whole) -> None:
    path = tmp_path / "new.jsonl"
    done = sweep(*QUICK, "--resume", path)
    assert done.exit_code == 2
    assert "Which problems?" in done.output
    done = sweep(*QUICK, "--resume", path, *SHAPES)
    assert done.exit_code == 0
    assert results(path) == results(whole)
    assert "--json is for a new sweep" in words(sweep("--resume", path, "--json", tmp_path / "other.jsonl"))


def test_the_order_of_jobs_in_the_file_is_no_matter(tmp_path, whole, rng: np.random.Generator) -> None:
    first, *jobs = whole.read_text().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_text("".join([first, *(jobs[place] for place in rng.permutation(len(jobs))[:11])]))
    done = sweep("--resume", part)
    assert "11 of 18 jobs are done" in done.output
    assert results(part) == results(whole)


def test_a_request_error_leaves_no_process(double, whole, tmp_path) -> None:
    double(version="3", test=str(tmp_path))
    with pytest.raises(RequestError):
        running.resume(whole, running.Outputs())
    options = os.environ["SWEEP_DOUBLE"]
    assert set(processes_of(options)) <= {os.getpid()}


def test_a_process_that_ended_for_want_of_work_is_replaced() -> None:
    device = running._Device("cpu")
    try:
        assert device.start() == ""
        device.process.kill()  # as it does by itself after a minute without a call
        assert device.call("device_identity")["name"] == "A cpu"
    finally:
        device.end()
    with pytest.raises(Exception, match="worker process"):
        device.call("device_identity")  # but not once the sweep has ended


# ---- names of algorithms ---------------------------------------------------------------------------------------------------------


def test_names_that_no_algorithm_has_are_said_and_make_the_status_1(tmp_path, log) -> None:
    path = tmp_path / "s.jsonl"
    done = sweep(*TWO, "--devices", "cpu", "--algorithms", "tile_64,nope", "--json", path)
    assert done.exit_code == 1
    assert "Algorithms that no backend has for any of these problems: nope; hipgroupgemm list" in words(done)
    assert [(r.status, r.best.name) for r in read_sweep(path).records] == [("ok", "tile_64")] * 2
    done = sweep(*TWO, "--devices", "cpu", "--algorithms", "nope")
    assert done.exit_code == 1
    assert "no backend has 'nope' for this problem" in words(done)
    assert len(log()) == 2


def test_names_that_some_problems_have_are_for_those(tmp_path, log) -> None:
    path = tmp_path / "s.jsonl"
    log(only={"12": ["tall"]})
    shapes = [*SHAPE, "--shape", "30,8,12,4", "--class", "fwd_wi", "--devices", "cpu"]
    assert sweep(*shapes, "--algorithms", "tall", "--json", path).exit_code == 0
    assert log() == [12]
    assert [(r.job.n, r.status) for r in read_sweep(path).records] == [(10, "refused"), (12, "ok")]
    assert "no backend has 'tall'" in read_sweep(path).records[0].reason


def test_the_reference_backends_names_are_known(monkeypatch) -> None:
    (name,) = workers.algorithm_names(plan_jobs(REQUEST, "cpu")[0], CPU, ["reference"])
    monkeypatch.setattr(running, "WORKERS", "hipgroupgemm.sweep.workers")
    assert sweep(*TWO, "--devices", "cpu", "--algorithms", name).exit_code == 0
    assert sweep(*TWO, "--devices", "cpu", "--algorithms", "nope").exit_code == 1


# ---- noise -----------------------------------------------------------------------------------------------------------------------


def test_what_makes_times_doubtful_is_said(double, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (77.25, 0.0, 0.0))
    path = tmp_path / "s.jsonl"
    done = sweep(*TWO, "--devices", "cpu", "--json", path)
    assert "The load average was 77.2 on" in words(done)
    assert "fewer than" not in done.output
    assert [record.load_average for record in read_sweep(path).records] == [77.25] * 2
    assert "The load average was 77.2 on" in words(CliRunner().invoke(cli, ["report", str(path)]))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    double(samples=2)
    done = sweep(*TWO, "--devices", "cpu")
    assert "Winners with fewer than 5 timed calls: 2" in words(done)
    assert "load average" not in done.output
    double(notes=[f"The load average was 9.0. {ONE_THREAD} for that reason."])
    path.unlink()
    done = sweep(*TWO, "--devices", "cpu", "--json", path)
    assert "BLAS was given one thread in 2 of 2 jobs" in words(done)
    assert "BLAS was given one thread in 2 of 2 jobs" in words(CliRunner().invoke(cli, ["report", str(path)]))
    double(spread=0.5)
    assert "spread by more than 20% from p10 to p90: 2" in words(sweep(*TWO, "--devices", "cpu"))
