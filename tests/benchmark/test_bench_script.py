"""bench/run.py, what `make bench` runs, on smaller problems."""

import functools
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

from hipgroupgemm.benchmark import command, labs, plots, ratios
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
    monkeypatch.setattr(command, "AUTO_PADDED_FLOPS", 10**7)
    monkeypatch.setattr(labs.NumPyLab, "flush", lambda self: None)
    monkeypatch.setattr(command, "measure_ceilings", lambda *_: Roofline(1e11, 1e10, "a product", "a copy"))
    monkeypatch.setattr(ratios, "bare_loop_ratio", functools.partial(ratios.bare_loop_ratio, divisor=32))
    monkeypatch.setattr(ratios, "padded_ratio", functools.partial(ratios.padded_ratio, divisor=16))
    monkeypatch.setattr(ratios, "on_one_thread", lambda seconds, seed: [])
    monkeypatch.setattr(script, "RATIO_SECONDS", 0.0)
    monkeypatch.setattr(script, "settle_threads", lambda: False)
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
    monkeypatch.setattr(plots, "plot_speedup", lambda *_: None)
    monkeypatch.setattr(plots, "plot_floor", lambda *_: None)
    monkeypatch.setattr(ratios, "bare_loop", lambda operands, bounds: None)  # leaves NaN
    assert script.main() == 1


def test_unknown_models_are_refused(small: Path, script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", "gpt"])
    with pytest.raises(SystemExit) as info:
        script.main()
    assert info.value.code == 2
    assert not small.exists()


@pytest.mark.skipif(not hasattr(os, "getloadavg"), reason="the system has no load average")
def test_blas_gets_one_thread_only_where_the_machine_is_busy(script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    for load, preset, wanted in [(cores * 0.4, None, None), (cores * 0.6, None, "1"), (cores * 9.0, "3", "3")]:
        for name in script.THREADS:
            monkeypatch.delenv(name, raising=False)
        if preset:
            monkeypatch.setenv("OMP_NUM_THREADS", preset)
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert script.settle_threads() == (wanted == "1")
        assert os.environ.get("OMP_NUM_THREADS") == wanted
        for name in script.THREADS:
            monkeypatch.delenv(name, raising=False)


def test_one_thread_process_gives_both_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def run(arguments, env, **options):
        seen.update(env)
        medians = dict.fromkeys(CLASSES, 1.0)
        found = [ratios.Ratio("one", medians, medians, 1.1, False).as_dict(), ratios.Ratio("two", medians, medians, 10.0, True).as_dict()]
        return types.SimpleNamespace(returncode=0, stdout=json.dumps(found), stderr="")

    monkeypatch.setattr(ratios.subprocess, "run", run)
    assert [ratio.name for ratio in ratios.on_one_thread(1.0)] == ["one, one BLAS thread", "two, one BLAS thread"]
    assert seen["OPENBLAS_NUM_THREADS"] == "1"
    monkeypatch.setattr(ratios.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=1, stdout="", stderr="no NumPy"))
    with pytest.raises(RuntimeError, match="exited with 1: no NumPy"):
        ratios.on_one_thread(1.0)
