"""`hipgroupgemm sweep` with real tuning, in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweep_engine

from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.sweep.compare import compare, series_of
from hipgroupgemm.sweep.results import read_sweep
from hipgroupgemm.tuning.report import TuningReport

SHAPE = ["--devices", "cpu", "--backend", "double", "--shape", "45,16,12,5"]


def environment(options: dict, store: str = "off") -> dict[str, str]:
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "tuning"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "SWEEP_ENGINE": json.dumps(options), "HIPGROUPGEMM_TUNING_STORE": store}


def run(options: dict, *arguments: str, store: str = "off") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sweep_engine", "sweep", *SHAPE, *arguments]
    return subprocess.run(command, env=environment(options, store), capture_output=True, text=True, check=False, timeout=120)


def test_verdicts_and_winners_of_a_sweep(tmp_path) -> None:
    """A wrong and a crashing candidate are in the report and never win; the sweep goes on and says so with its status."""
    out = tmp_path / "s.jsonl"
    options = {"version": "3", "kernels": {"fast": "wrong", "down": "exits:3", "slow": "good:9", "good": "good:3"}}
    done = run(options, "--class", "fwd_wi,wgrad_wo", "--dtype", "float32", "--no-store", "--json", str(out))
    assert done.returncode == 1, done.stderr
    for record in read_sweep(out).records:
        assert record.best.name == "good"
        verdicts = {row.name: row.verdict for row in record.rows}
        assert verdicts.pop("slow") in ("ok", "pruned")
        assert verdicts == {"fast": "wrong", "down": "crashed", "good": "ok"}
        report = TuningReport.from_dict(record.report)
        assert report.best.algorithm.name == "good"
        assert report.seeded
        assert record.identity["versions"]["double"] == "3"
    assert "down: crashed: " in done.stdout


def test_winners_go_to_the_store_unless_told_not_to(tmp_path) -> None:
    store = tmp_path / "store"
    options = {"version": "1", "kernels": {"slow": "good:6", "good": "good:2"}}
    done = run(options, "--class", "fwd_wi", "--no-store", store=str(store))
    assert done.returncode == 0, done.stderr
    assert not list(store.glob("*.json"))
    out = tmp_path / "s.jsonl"
    done = run(options, "--class", "fwd_wi", "--json", str(out), store=str(store))
    assert done.returncode == 0, done.stderr
    (file,) = store.glob("*.json")
    assert '"good"' in file.read_text()
    assert f"Jobs whose results went to the tuning store: 1, in {store}" in done.stdout
    assert [record.stored for record in read_sweep(out).records] == [True]
    done = run(options, "--class", "fwd_wi", "--json", str(out), "--overwrite", store="off")
    assert done.returncode == 0, done.stderr
    assert [record.stored for record in read_sweep(out).records] == [False]


def test_drawn_sizes_take_the_place_of_no_real_ones_in_the_store(tmp_path) -> None:
    store, real, same = tmp_path / "store", tmp_path / "real.txt", tmp_path / "same.txt"
    real.write_text("35 5 3 1 1")
    same.write_text("34 6 3 1 1")
    options = {"version": "1", "kernels": {"good": "good:2"}}
    done = run(options, "--class", "fwd_wi", "--distribution", f"{real},dirichlet,zipf,balanced", store=str(store))
    assert done.returncode == 0, done.stderr
    assert f"Jobs whose results went to the tuning store: 4, in {store}\n" in done.stdout
    assert {record.origin for record in TuningStore(store).results()} == {"user", "dirichlet", "zipf", "seed"}
    done = run(options, "--class", "fwd_wi", "--distribution", f"{real},{same}", store=str(store))
    assert f"Jobs whose results went to the tuning store: 2, in {store}\n" in done.stdout
    assert len(TuningStore(store).results()) == 4


@pytest.mark.parametrize("backend", ["double", "reference"])  # in a process of its candidates' own, and in the worker
def test_operands_that_do_not_fit(tmp_path, backend) -> None:
    out = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "sweep_engine", "sweep", "--devices", "cpu", "--class", "fwd_wi", "--no-store", "--backend", backend]
    options = {"version": "1", "kernels": {"good": "good"}}
    shapes = ["--shape", "2000000000,1000000,8,4", "--shape", "40,8,6,4", "--json", str(out)]
    done = subprocess.run([*command, *shapes], env=environment(options), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [record.status for record in read_sweep(out).records] == ["out of memory", "ok"]
    assert "the operands take" in done.stdout


def test_two_versions_compared(tmp_path) -> None:
    """What data/ holds still comes about: two sweeps by the real command, then their comparison."""
    paths = []
    for name, options in (("old", sweep_engine.OLD), ("new", sweep_engine.NEW)):
        paths.append(tmp_path / f"{name}.jsonl")
        run(options, "--class", "fwd_wi", "--no-store", "--json", str(paths[-1]))
    found = compare(*series_of([read_sweep(path) for path in paths]))
    assert {(f.algorithm, f.after) for f in found.newly_wrong} == {("stream_k", "crashed")}
    assert {f.algorithm for f in found.newly_right} == {"tile_256"}
    assert (set(found.new), set(found.missing)) == ({"double tile_512"}, {"double tile_32"})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_behind(tmp_path, number) -> None:
    """A sweep that is killed or interrupted while a candidate hangs leaves neither its worker nor the worker's child."""
    options = {"version": "1", "kernels": {"stuck": "hangs"}, "marks": str(tmp_path)}
    command = [sys.executable, "-m", "sweep_engine", "sweep", *SHAPE, "--class", "fwd_wi", "--no-store"]
    process = subprocess.Popen(command, env=environment(options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    marks, deadline = tmp_path / "marks", time.monotonic() + 60
    while not marks.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stuck = int(marks.read_text().split()[0])
    assert alive(stuck)
    assert stuck != process.pid
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 20
    while alive(stuck):
        assert time.monotonic() < deadline, "the hanging candidate outlived its sweep"
        time.sleep(0.05)
