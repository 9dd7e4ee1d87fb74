"""bench/run.py, what `make bench` runs, on smaller problems."""

import functools
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import ratios

from hipgroupgemm.benchmark import plots
from hipgroupgemm.measure import workloads
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.workloads import CLASSES

SCRIPT = Path(__file__).resolve().parent.parent.parent / "bench" / "run.py"


@pytest.fixture
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("bench_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, script: types.ModuleType, tmp_path) -> Path:
    """Shapes scaled far down, three rounds a ratio; the script's arguments name tmp_path."""
    monkeypatch.setattr(workloads, "AUTO_PADDED_FLOPS", 10**7)
    monkeypatch.setattr(HostHarness, "flush", lambda self: None)
    monkeypatch.setattr(HostHarness, "roofline", lambda *_: Roofline(1e11, 1e10, "a product", "a copy"))
    monkeypatch.setattr(ratios, "bare_loop_ratio", functools.partial(ratios.bare_loop_ratio, divisor=32))
    monkeypatch.setattr(ratios, "padded_ratio", functools.partial(ratios.padded_ratio, divisor=16))
    monkeypatch.setattr(script, "RATIO_SECONDS", 0.0)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0), raising=False)  # so that no ratio is measured with one thread besides
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out"), "--model", "deepseek3-test", "--model", "llama4-17b-16e"])
    return tmp_path / "out"


def test_writes_rows_ratios_and_plots(small: Path, script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main() == 0
    names = {path.name for path in small.iterdir()}
    assert names == {"ragged_dot.csv", "ragged_dot.json", "speedup.png", "speedup.svg", "floor.png", "floor.svg"}
    data = json.loads((small / "ragged_dot.json").read_text())
    assert len(data["rows"]) == 3 * 6 * 4
    assert {row["status"] for row in data["rows"]} == {"ok"}
    assert {row["ragged_dot_class"] for row in data["rows"]} == set(CLASSES)
    assert [(ratio["limit"], ratio["larger"], ratio["faults"]) for ratio in data["ratios"]] == [(1.1, False, []), (10.0, True, [])]
    text = capsys.readouterr().out
    for word in (
        "deepseek3-test-mi350",
        "over the bare loop of NumPy products, qwen3-30b-a3b 1/32",
        "padded dot over reference",
        "72 of 72 rows",
    ):
        assert word in text


def test_a_wrong_ratio_run_fails(small: Path, script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv[:3], "--model", "llama4-17b-16e"])
    monkeypatch.setattr(plots, "save_panels", lambda *_: None)
    monkeypatch.setattr(ratios, "bare_loop", lambda problem: None)  # leaves NaN
    assert script.main() == 1


def test_unknown_models_are_refused(small: Path, script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", "gpt"])
    with pytest.raises(SystemExit) as info:
        script.main()
    assert info.value.code == 2
    assert not small.exists()
