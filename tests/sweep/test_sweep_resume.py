"""A sweep's file, and sweeps that were cut short: killed, interrupted, taken up, or met by another."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hipgroupgemm.cli import cli
from hipgroupgemm.sweep import workers
from hipgroupgemm.sweep.record import Record, SweepFile, read_sweep

SHAPES = [part for n in (10, 11, 13) for part in ("--shape", f"30,8,{n},4")]
QUICK = ["--no-store", "--devices", "cpu"]


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "TUNE", "sweep_double:tune")
    monkeypatch.setattr(workers, "IDENTITY", "sweep_double:identity")
    monkeypatch.setattr(workers, "NAMES", "sweep_double:names")
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))

    def options(**values) -> None:
        monkeypatch.setenv("SWEEP_DOUBLE", json.dumps(values))

    options()
    return options


def sweep(*arguments: str):
    return CliRunner().invoke(cli, ["sweep", *QUICK, *arguments])


def results(path: Path) -> list[tuple]:
    """What a sweep found, without times of day."""
    return sorted(
        (json.dumps(r.job), r.device, json.dumps(r.identity), r.status, json.dumps(r.best), json.dumps(r.report))
        for r in read_sweep(path).records
    )


def some_record(number: int, status: str = "ok") -> Record:
    job = {"class": "fwd_wi", "model": "x\u00e9", "m": number, "k": 2, "n": 3, "e": 4, "scale": 1, "dtype": "float32"}
    row = {"backend": "b", "name": "a\n,]}", "index": 0, "verdict": "ok", "median_ms": 1.5 + number}
    job |= {"distribution": "zipf", "group_sizes": [[number, 0]]}
    return Record(job, {"seed": 0}, "cpu", {"kind": "cpu"}, status, "", row, {"rows": [row]}, False, "2026-01-01")


# ---- the file --------------------------------------------------------------------------------------------------------------------


def test_the_file_is_a_json_document_after_every_job(tmp_path) -> None:
    path = tmp_path / "s.json"
    file = SweepFile(path, {"jobs_wanted": 3})
    for number in range(3):
        data = json.loads(path.read_text())
        assert [job["job"]["m"] for job in data["jobs"]] == list(range(number))
        assert not read_sweep(path).finished
        file.append(some_record(number))
    file.close()
    found = read_sweep(path)
    assert found.records == [some_record(number) for number in range(3)]
    assert found.finished
    assert found.warnings == []
    assert found.header["jobs_wanted"] == 3


def test_jobs_are_added_behind_those_that_were_kept(tmp_path) -> None:
    path = tmp_path / "s.json"
    path.write_text("whatever was here")
    file = SweepFile(path, {"jobs_wanted": 3}, [some_record(0), some_record(1)])
    file.append(some_record(2))
    file.close()
    assert read_sweep(path).records == [some_record(number) for number in range(3)]
    assert len(json.loads(path.read_text())["jobs"]) == 3


def test_cut_anywhere_it_gives_the_jobs_before_the_cut(tmp_path) -> None:
    path, cut = tmp_path / "s.json", tmp_path / "cut.json"
    file = SweepFile(path, {"jobs_wanted": 3}, [some_record(0)])
    file.append(some_record(1))
    file.append(some_record(2))
    file.close()
    data = path.read_bytes()
    first, *jobs, _, _ = data.decode().split("\n")
    jobs = [job.removesuffix(",") for job in jobs]
    assert len(jobs) == 3
    counts = set()
    for length in range(len(first.encode()) + 1, len(data) + 1):
        cut.write_bytes(data[:length])
        found = read_sweep(cut)
        left = [part.removesuffix(",") for part in data[:length].decode(errors="replace").split("\n")[1:]]
        complete = sum(part in jobs for part in left)
        assert found.records == [some_record(number) for number in range(complete)], length
        assert bool(found.warnings) == (left[-1] not in ("", "]", "]}", *jobs)), length
        counts.add((complete, bool(found.warnings)))
    assert counts == {(0, False), (0, True), (1, False), (1, True), (2, False), (2, True), (3, False)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no file that hipgroupgemm sweep"),
        ("[1, 2]\n", "no file that hipgroupgemm sweep"),
        ('{"rows": []}', "no file that hipgroupgemm sweep"),
        ("\x00\xff\xfe\n", "no file that hipgroupgemm sweep"),
        ('{"format": "hipgroupgemm sweep", "version": 2, "jobs": [\n]}\n', r"is of version 2, this hipgroupgemm reads version 1"),
        (
            '{"format": "hipgroupgemm sweep", "version": 1, "jobs": [\n{"a": 1},\n{"b": 1}\n]}\n',
            r"jobs\[0\] is no job of a sweep \(lacks \['best'",
        ),
        ('{"format": "hipgroupgemm sweep", "version": 1, "jobs": [\n{"a": \n]}\n', r"line 2 is not JSON"),
    ],
)
def test_broken_files_say_where(tmp_path, text, message) -> None:
    path = tmp_path / "s.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_sweep(path)
    for arguments in (["sweep", *QUICK, "--resume", str(path)], ["report", str(path)]):
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 2, done.output
        assert "s.json" in done.output.replace("\n", "").replace("│", "").replace(" ", "")
    assert path.read_text(encoding="latin-1") == text


def test_a_file_that_another_sweep_writes_is_left_alone(tmp_path) -> None:
    path = tmp_path / "s.json"
    file = SweepFile(path, {"jobs_wanted": 1}, [some_record(0)])
    before = path.read_bytes()
    done = sweep(*SHAPES, "--json", str(path), "--overwrite")
    assert done.exit_code == 1
    assert "another sweep is writing to it" in done.output
    assert path.read_bytes() == before
    file.close()
    assert sweep(*SHAPES, "--json", str(path), "--overwrite").exit_code == 0


# ---- taking up -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "whole.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "TUNE", "sweep_double:tune")
        patch.setattr(workers, "IDENTITY", "sweep_double:identity")
        patch.setattr(workers, "NAMES", "sweep_double:names")
        patch.setenv("SWEEP_DOUBLE", "{}")
        assert sweep(*SHAPES, "--json", str(path)).exit_code == 0
    return path


@pytest.fixture
def whole(finished: Path, tmp_path: Path) -> Path:
    """A finished sweep of this test's own."""
    return Path(shutil.copy(finished, tmp_path / "whole.json"))


def start(path: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "sweep_double", "sweep", *QUICK, *SHAPES, "--json", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_jobs(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and len(read_sweep(path).records) >= count:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no {count} jobs: {process.communicate()}")


def group_is_gone(group: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("torn", [False, True])
def test_killed_and_taken_up_is_as_never_killed(double, tmp_path, whole, torn) -> None:
    path, log = tmp_path / "killed.json", tmp_path / "log"
    double(seconds=0.2)
    process = start(path)
    wait_for_jobs(path, 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert group_is_gone(process.pid), "the worker outlived its sweep"
    kept = read_sweep(path).records
    assert 4 <= len(kept) < 18
    assert not read_sweep(path).finished
    if torn:
        data = path.read_bytes()
        path.write_bytes(data[: -len(data.splitlines()[-2]) // 2])
        kept = kept[:-1]
    double(log=str(log))
    done = sweep("--resume", str(path))
    assert done.exit_code == 0, done.output
    assert f"{len(kept)} of 18 jobs are done" in done.output
    assert ("ends in the middle of a job" in done.output) == torn
    assert len(log.read_text().splitlines()) == 18 - len(kept)
    assert results(path) == results(whole)
    assert [r.finished for r in read_sweep(path).records[: len(kept)]] == [r.finished for r in kept]
    data = json.loads(path.read_text())
    assert [session["jobs_kept"] for session in data["sessions"]] == [0, len(kept)]


def test_ctrl_c_keeps_what_is_done(double, tmp_path, whole) -> None:
    path = tmp_path / "stopped.json"
    double(seconds=0.2)
    process = start(path, "--csv", str(tmp_path / "stopped.csv"))
    wait_for_jobs(path, 3, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and its worker
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    kept = len(read_sweep(path).records)
    assert 3 <= kept < 18
    assert f"Stopped. Jobs kept: {kept}, left: {18 - kept}; go on with hipgroupgemm sweep --resume {path}" in out
    assert len((tmp_path / "stopped.csv").read_text().splitlines()) == 1 + 3 * kept
    assert group_is_gone(process.pid)
    double()
    assert sweep("--resume", str(path)).exit_code == 0
    assert results(path) == results(whole)


def test_ctrl_c_to_the_command_alone_ends_its_worker(double, tmp_path) -> None:
    double(seconds=30)
    process = start(tmp_path / "s.json")
    deadline = time.monotonic() + 30
    while not (tmp_path / "s.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    begun = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - begun < 8
    assert group_is_gone(process.pid)


def test_a_finished_sweep_has_nothing_left(double, tmp_path, whole) -> None:
    log = tmp_path / "log"
    double(log=str(log))
    before = results(whole)
    done = sweep("--resume", str(whole))
    assert done.exit_code == 0
    assert "18 of 18 jobs are done" in done.output
    assert "tile_128" in done.output
    assert not log.exists()
    assert results(whole) == before


def test_options_beside_resume_change_what_they_name(double, tmp_path, whole) -> None:
    log = tmp_path / "log"
    double(log=str(log))
    done = sweep("--resume", str(whole), "--dtype", "float32,float64", "--class", "fwd_wi")  # float32 is done
    assert done.exit_code == 0, done.output
    assert "3 of 6 jobs are done" in done.output
    assert len(log.read_text().splitlines()) == 3
    assert len(read_sweep(whole).records) == 18 + 3  # the other classes' results stay
    log.unlink()
    sweep("--resume", str(whole), "--seed", "1", "--class", "fwd_wi", "--dtype", "float64")  # other settings: measured again
    assert len(log.read_text().splitlines()) == 3
    assert len(read_sweep(whole).records) == 18 + 3


def test_other_versions_and_failures_are_run_again(double, tmp_path, whole) -> None:
    log = tmp_path / "log"
    double(log=str(log), version="2", **{"raise": [13]})
    done = sweep("--resume", str(whole))
    assert done.exit_code == 1
    assert "18 jobs in it failed, or are of other versions or settings: they are run again" in done.output
    assert len(log.read_text().splitlines()) == 18
    records = read_sweep(whole).records
    assert len(records) == 18
    assert {record.identity["versions"]["double"] for record in records} == {"2"}
    assert sum(record.status == "failed" for record in records) == 3  # the classes whose out is n wide
    log.unlink()
    double(log=str(log), version="2")
    assert sweep("--resume", str(whole)).exit_code == 0
    assert [json.loads(line)["n"] for line in log.read_text().splitlines()] == [13] * 3


def test_another_device_adds_its_results(double, whole) -> None:
    before = results(whole)
    double(device="Another")
    done = sweep("--resume", str(whole), "--class", "fwd_wi")
    assert done.exit_code == 0, done.output
    after = results(whole)
    assert len(after) == 18 + 3
    assert set(before) < set(after)


def test_resume_into_another_file_leaves_the_first(double, tmp_path, whole) -> None:
    before, other = whole.read_bytes(), tmp_path / "other.json"
    assert sweep("--resume", str(whole), "--json", str(other), "--class", "fwd_wi,fwd_wo", "--dtype", "float64,float32").exit_code == 0
    assert whole.read_bytes() == before
    assert len(read_sweep(other).records) == 18 + 6


def test_resume_of_a_file_that_is_not_there_starts_it(tmp_path, whole) -> None:
    path = tmp_path / "new.json"
    done = sweep("--resume", str(path))
    assert done.exit_code == 2
    assert "Which problems?" in done.output
    done = sweep("--resume", str(path), *SHAPES)
    assert done.exit_code == 0
    assert "is not there yet, the sweep starts anew" in done.output
    assert results(path) == results(whole)


def test_an_unfinished_sweep_is_not_overwritten(tmp_path, whole) -> None:
    lines = whole.read_text().splitlines(keepends=True)
    part = tmp_path / "part.json"
    part.write_text("".join(lines[:5]))
    before = part.read_bytes()
    done = sweep(*SHAPES, "--json", str(part))
    assert done.exit_code == 2
    assert "holds an unfinished sweep with 4 jobs" in done.output
    assert part.read_bytes() == before
    again = tmp_path / "again.json"
    shutil.copy(whole, again)
    assert sweep(*SHAPES, "--json", str(again)).exit_code == 2  # nor is a finished one
    assert sweep(*SHAPES, "--json", str(again), "--overwrite").exit_code == 0


def test_the_order_of_jobs_in_the_file_is_no_matter(tmp_path, whole, rng: np.random.Generator) -> None:
    first, *jobs, last = whole.read_text().splitlines()
    jobs = [job.rstrip(",") for job in jobs]
    keep = rng.permutation(len(jobs))[:11]
    part = tmp_path / "part.json"
    part.write_text("\n".join([first, ",\n".join(jobs[place] for place in keep), last, ""]))
    done = sweep("--resume", str(part))
    assert "11 of 18 jobs are done" in done.output
    assert results(part) == results(whole)
