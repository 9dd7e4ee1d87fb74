"""Every example as a newcomer runs it, here on the CPU; they check their results themselves."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.py"))


@pytest.fixture
def run(tmp_path: Path):
    def example(number: int, *arguments: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "HIPGROUPGEMM_TUNING_STORE": str(tmp_path / "store"), "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-W", "error", str(EXAMPLES[number - 1]), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)

    return example


def test_they_are_numbered_and_short() -> None:
    assert [path.name[:2] for path in EXAMPLES] == [f"{number:02}" for number in range(1, len(EXAMPLES) + 1)]
    assert len(EXAMPLES[4].read_text().splitlines()) <= 30  # it promises that
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 52
        assert path.read_text().startswith('"""')


def test_ragged_dot(run) -> None:
    done = run(1)
    assert done.returncode == 0, done.stderr
    error = re.search(r"float16 \(2048, 256\), relative error (\S+)\n", done.stdout)
    assert 0 < float(error[1]) < 1e-3


def test_plan_and_algorithms(run) -> None:
    done = run(2)
    assert done.returncode == 0, done.stderr
    for text in ("backend ", "workspace ", "1024 rows with the plan for 2048"):
        assert text in done.stdout


def test_autotune_and_the_store(run, tmp_path) -> None:
    done = run(3)
    assert done.returncode == 0, done.stderr
    tuned, again = (re.search(rf"{words} (\S+) of (\S+)", done.stdout) for words in ("the plan runs", "a new plan starts with"))
    assert tuned.groups() == again.groups()
    assert list((tmp_path / "store").glob("*.json"))


def test_pin_an_algorithm(run, tmp_path) -> None:
    pin = tmp_path / "pin.json"
    assert run(4, str(pin)).returncode == 0
    before = pin.read_text()
    done = run(4, str(pin))  # in production: nothing is tuned
    assert done.returncode == 0, done.stderr
    assert f"pinned: {json.loads(before)['backend']} {json.loads(before)['index']} {json.loads(before)['name']}" in done.stdout
    assert pin.read_text() == before
    assert not (tmp_path / "store").exists()
    pin.write_text(json.dumps({**json.loads(before), "index": 977}))
    done = run(4, str(pin))
    assert done.returncode == 1
    assert "with index 977" in done.stderr


def test_sweep_of_ones_own(run) -> None:
    done = run(5)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = list(csv.DictReader(lines[next(place for place, line in enumerate(lines) if line.startswith("tokens,")) :]))
    for tokens in ("128", "512", "2048"):
        (winner,) = [row for row in rows if row["tokens"] == tokens and row["wins"] == "True"]
        assert winner["verdict"] == "ok"
        assert float(winner["median_ms"]) > 0


@pytest.mark.torch
def test_training_in_torch(run) -> None:
    done = run(6)
    assert done.returncode == 0, done.stderr
    ours, loop = re.findall(r"(\S+) -> (\S+?)(?:,|\n)", done.stdout)
    assert ours == loop


@pytest.mark.torch
def test_captured_graph(run) -> None:
    done = run(7)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("experts trained") == 3


def test_training_in_jax(run) -> None:
    done = run(8)
    assert done.returncode == 0, done.stderr
    assert "ragged dots" in done.stdout


def test_expert_parallel(run) -> None:
    done = run(9)
    assert done.returncode == 0, done.stderr
    assert "differ by 0.0" in done.stdout
