"""What sweeps must not lose: jobs in files of any layout, earlier results and requests on --resume, files that are there already."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from hipgroupgemm.cli import cli
from hipgroupgemm.sweep import workers
from hipgroupgemm.sweep.record import read_sweep

SHAPE = ("--shape", "30,8,10,4")
TWO = (*SHAPE, "--class", "fwd_wi,fwd_wo")
QUICK = ("--no-store", "--devices", "cpu")


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


def jobs(path: Path) -> list[tuple]:
    records = read_sweep(path).records
    return [(r.job["class"], r.job["dtype"], r.job["distribution"], json.dumps(r.best, sort_keys=True), r.finished) for r in records]


def text_of(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


# ---- the file in any layout ------------------------------------------------------------------------------------------------------


def one_line(data: dict) -> str:
    return json.dumps(data)


def indented(data: dict) -> str:
    return json.dumps(data, indent=2, sort_keys=True)


def windows(data: dict) -> str:
    return "\ufeff" + json.dumps(data, indent=1).replace("\n", "\r\n")


def unescaped(data: dict) -> str:
    data["jobs"][0]["reason"] = "a lost letter: \ufffd, and \u00e9"
    return json.dumps(data, ensure_ascii=False)


@pytest.mark.parametrize("layout", [one_line, indented, windows, unescaped])
def test_no_job_of_a_file_in_another_layout_is_lost(tmp_path, log, layout) -> None:
    path = tmp_path / "s.json"
    assert sweep(*SHAPE, "--devices", "cpu", "--json", path).exit_code == 0
    before = jobs(path)
    assert len(before) == 6
    path.write_text(layout(json.loads(path.read_text())), encoding="utf-8", newline="")
    assert jobs(path) == before
    assert read_sweep(path).finished
    shown = CliRunner().invoke(cli, ["report", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "jobs: 6 ok" in shown.output
    log()
    done = sweep("--resume", path, "--class", "fwd_wi", "--distribution", "balanced,zipf")
    assert done.exit_code == 0, done.output
    assert log() == [10]  # zipf alone
    assert set(before) < set(jobs(path))
    assert len(jobs(path)) == 7


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),  # cut short, and no job a line
        (lambda text: text.replace('"winner"', '"w"').replace('"best"', '"bast"', 1), "jobs[0] is no job of a sweep (lacks ['best'])"),
        (lambda text: text.replace('"jobs": [', '"jobs": [[], ', 1), "jobs[0] is no job of a sweep"),
        (lambda text: text.replace('"jobs": [', '"results": [', 1), 'has no list "jobs"'),
        (lambda text: text.replace('"seed": 0', '"seed": NaN', 1), "NaN"),
    ],
)
def test_a_file_whose_jobs_can_not_all_be_read_is_not_rewritten(tmp_path, spoil, words) -> None:
    path = tmp_path / "s.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    spoilt = spoil(json.dumps(json.loads(path.read_text())))
    path.write_text(spoilt)
    for arguments in (["--resume", path], ["--resume", path, *TWO], [*TWO, "--devices", "cpu", "--json", path]):
        done = sweep(*arguments)
        assert done.exit_code == 2, done.output
        assert path.read_text() == spoilt
    assert words.replace(" ", "") in sweep("--resume", path).output.replace("│", "").replace("\n", "").replace(" ", "")
    assert CliRunner().invoke(cli, ["report", str(path)]).exit_code == 2


# ---- what is there already -------------------------------------------------------------------------------------------------------


def test_a_new_sweep_overwrites_nothing_unless_told_to(tmp_path, log) -> None:
    path, other = tmp_path / "s.json", tmp_path / "other.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    before = path.read_bytes()
    log()
    done = sweep(*TWO, "--devices", "cpu", "--json", path)
    assert done.exit_code == 2
    assert "holds a sweep with 2 jobs" in text_of(done)
    assert "--overwrite" in done.output
    assert "--resume" in done.output
    other.write_text("somebody's notes")
    for arguments in ([*TWO, "--devices", "cpu", "--json", other], ["--resume", path, "--json", other]):
        done = sweep(*arguments)
        assert done.exit_code == 2
        assert other.read_text() == "somebody's notes"
    assert (log(), path.read_bytes()) == ([], before)
    assert sweep(*SHAPE, "--class", "fwd_wi", "--devices", "cpu", "--json", path, "--overwrite").exit_code == 0
    assert len(jobs(path)) == 1
    assert sweep("--resume", path, "--json", path).exit_code == 0  # the file that is taken up is no other file
    assert "--overwrite goes with --json" in text_of(sweep(*TWO, "--overwrite"))


def test_what_another_sweep_has_written_meanwhile_is_not_lost(tmp_path, monkeypatch) -> None:
    """Two that take up one file: the second has read it before the first was done with it."""
    path = tmp_path / "s.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    ready, after = workers.Worker.wait_ready, []

    def wait_ready(self) -> str:
        if not after:
            after.append(None)
            assert sweep("--resume", path, "--dtype", "float64").exit_code == 0
            after.append(path.read_bytes())
        return ready(self)

    monkeypatch.setattr(workers.Worker, "wait_ready", wait_ready)
    done = sweep("--resume", path, "--class", "wgrad_wi")
    assert done.exit_code == 1
    assert "has been written to since this sweep began" in text_of(done)
    assert path.read_bytes() == after[1]
    assert len(jobs(path)) == 4


# ---- what the file waits for -----------------------------------------------------------------------------------------------------


def part_of(path: Path, count: int) -> None:
    """Leaves the first jobs of a file, as an interruption does."""
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, ",\n".join(line.rstrip(",") for line in rest[:count]), "]}", ""]))


def test_other_options_on_resume_forget_nothing_that_was_asked_for(tmp_path, log) -> None:
    path = tmp_path / "s.json"
    assert sweep(*SHAPE, "--dtype", "float32,float64", "--class", "fwd_wi,fwd_wo", "--devices", "cpu", "--json", path).exit_code == 0
    part_of(path, 2)
    log()
    done = sweep("--resume", path, "--class", "fwd_wi")  # float32 is done
    assert "1 of 2 jobs are done" in text_of(done)
    assert "waits for jobs that are not asked for now, which stay to be done: 1" in text_of(done)
    assert "other jobs that wait: 1" in text_of(done)
    assert len(log()) == 1
    assert not read_sweep(path).finished
    assert read_sweep(path).wanted == 4
    assert "jobs: 3 of 4 in the file, unfinished: 3 ok" in CliRunner().invoke(cli, ["report", str(path)]).output
    done = sweep("--resume", path)
    assert "3 of 4 jobs are done" in text_of(done)
    assert len(log()) == 1
    assert read_sweep(path).finished
    assert len({job[:2] for job in jobs(path)}) == 4


def test_requests_of_a_file_add_up(tmp_path, log) -> None:
    path = tmp_path / "s.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    assert sweep("--resume", path, "--dtype", "float64").exit_code == 0
    assert sweep("--resume", path, "--shape", "30,8,12,4", "--class", "wgrad_wi").exit_code == 0
    assert len(json.loads(path.read_text())["requests"]) == 3
    part_of(path, 1)
    log()
    done = sweep("--resume", path)
    assert "1 of 5 jobs are done" in text_of(done)
    assert len(log()) == 4
    assert read_sweep(path).finished
    assert sweep("--resume", path).exit_code == 0
    assert log() == []


def test_the_last_settings_hold_and_are_asked_for_no_more_twice(tmp_path, log) -> None:
    path = tmp_path / "s.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    assert sweep("--resume", path, "--repetitions", "7", "--class", "fwd_wo").exit_code == 0
    assert {r.job["class"]: r.settings["repetitions"] for r in read_sweep(path).records} == {"fwd_wi": None, "fwd_wo": 7}
    log()
    assert sweep("--resume", path).exit_code == 0
    assert log() == []
    assert sweep("--resume", path, "--repetitions", "9").exit_code == 0
    assert len(log()) == 2
    assert len(json.loads(path.read_text())["requests"]) == 1  # the others are wholly replaced


def test_results_stay_until_there_are_new_ones(double, tmp_path) -> None:
    path = tmp_path / "s.json"
    assert sweep(*SHAPE, "--devices", "cpu", "--json", path).exit_code == 0
    before = jobs(path)
    double(seconds=0.5)
    command = [sys.executable, "-m", "sweep_double", "sweep", *QUICK[:1], "--resume", str(path), "--seed", "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(read_sweep(path).records) < 8 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert set(before) <= set(jobs(path))
    new = [r for r in read_sweep(path).records if r.settings["seed"] == 3]
    assert 2 <= len(new) < 6
    assert read_sweep(path).done == len(new)
    assert not read_sweep(path).finished
    double()
    done = sweep("--resume", path)
    assert f"{len(new)} of 6 jobs are done" in text_of(done)
    assert [r.settings["seed"] for r in read_sweep(path).records] == [3] * 6
    assert read_sweep(path).finished


def test_old_files_are_taken_up(tmp_path, log) -> None:
    """Those of a version that wrote one request, whose devices are in its sessions."""
    path = tmp_path / "s.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    data = json.loads(path.read_text())
    (request,) = data.pop("requests")
    del request["made_for"]
    for job in data["jobs"]:
        del job["superseded"]
    path.write_text(json.dumps({**data, "request": request}))
    log()
    done = sweep("--resume", path, "--class", "wgrad_wi")
    assert done.exit_code == 0, done.output
    assert log() == [10]
    assert len(jobs(path)) == 3
    assert read_sweep(path).wanted == 3


def test_devices_alone_take_everything(double, tmp_path, log) -> None:
    path = tmp_path / "s.json"
    assert sweep(*TWO, "--devices", "cpu", "--json", path).exit_code == 0
    assert sweep("--resume", path, "--dtype", "float64", "--class", "fwd_wi").exit_code == 0
    log(device="Another")
    done = sweep("--resume", path, "--devices", "cpu")
    assert done.exit_code == 0, done.output
    assert len(log(device="Another")) == 3
    assert len(jobs(path)) == 6
    assert read_sweep(path).finished


# ---- names of algorithms ---------------------------------------------------------------------------------------------------------


def test_names_that_no_algorithm_has_are_an_error_before_anything_runs(tmp_path, log) -> None:
    path = tmp_path / "s.json"
    done = sweep(*TWO, "--devices", "cpu", "--algorithms", "tile_64,nope", "--json", path)
    assert done.exit_code == 2
    assert "--algorithms nope: no backend has that" in text_of(done)
    assert "hipgroupgemm list" in text_of(done)
    assert log() == []
    assert not path.exists()


def test_names_that_some_problems_have_are_for_those(tmp_path, log) -> None:
    path = tmp_path / "s.json"
    log(only={"12": ["tall"]})
    shapes = [*SHAPE, "--shape", "30,8,12,4", "--class", "fwd_wi", "--devices", "cpu"]
    assert sweep(*shapes, "--algorithms", "tall", "--json", path).exit_code == 0
    assert log() == [12]
    assert [(r.job["n"], r.status) for r in read_sweep(path).records] == [(10, "refused"), (12, "ok")]
    assert "no backend has 'tall'" in read_sweep(path).records[0].reason


def test_the_reference_backends_names_are_known(monkeypatch) -> None:
    from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of
    from hipgroupgemm.operands.views import CPU

    names = workers.algorithm_names(config_of(CLASSES["fwd_wi"], MoEShape(30, 8, 10, 4, "a"), "float32"), CPU)
    assert names
    monkeypatch.setattr(workers, "NAMES", "hipgroupgemm.sweep.workers:algorithm_names")
    assert sweep(*TWO, "--devices", "cpu", "--algorithms", names[0]).exit_code == 0
    assert sweep(*TWO, "--devices", "cpu", "--algorithms", "nope").exit_code == 2


# ---- noise -----------------------------------------------------------------------------------------------------------------------


def test_what_makes_times_doubtful_is_said(double, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (77.25, 0.0, 0.0))
    path = tmp_path / "s.json"
    done = sweep(*TWO, "--devices", "cpu", "--json", path)
    assert "The load average was 77.2 on" in text_of(done)
    assert "fewer than" not in done.output
    assert json.loads(path.read_text())["sessions"][0]["load_average"] == 77.25
    assert "The load average was 77.2 on" in CliRunner().invoke(cli, ["report", str(path)]).output
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    double(samples=2)
    done = sweep(*TWO, "--devices", "cpu")
    assert "Winners with fewer than 5 timed calls: 2" in text_of(done)
    assert "load average" not in done.output
    double(spread=0.5)
    assert "spread by more than 20% from p10 to p90: 2" in text_of(sweep(*TWO, "--devices", "cpu"))
