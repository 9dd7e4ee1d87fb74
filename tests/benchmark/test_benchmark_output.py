"""What the benchmark leaves behind: tables, CSV and JSON, plots."""

import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import sys

import pytest
from ratios import Ratio
from rich.console import Console

from hipgroupgemm.benchmark.plots import row_panels, save_panels, write_panels
from hipgroupgemm.benchmark.rows import Row, print_rows, write_rows
from hipgroupgemm.measure.text import bytes_text
from hipgroupgemm.measure.workloads import CLASSES

QUIET = Console(file=io.StringIO())


def plot_rows(rows, path, note="", **fields) -> None:
    save_panels(row_panels(rows, **fields), path, note)


plot_speedup = functools.partial(plot_rows, fields=["speedup"])
plot_floor = functools.partial(plot_rows, fields=["floor_fraction"])


def _rows() -> list[Row]:
    rows = []
    for (model, e, scale), (index, name) in itertools.product([("qwen3-30b-a3b", 128, 8), ("mixtral-8x7b", 32, 32)], enumerate(CLASSES)):
        base = Row(model, name, 1280, 256, 96, e, scale, "balanced", 1280, "float32", "reference", "numpy_matmul_a_group", False)
        values = {"median_ms": 1.2345, "min_ms": 1.1, "repetitions": 5, "tflops": 0.0123, "floor_ms": 0.5, "floor_fraction": 0.4}
        rows.append(dataclasses.replace(base, **values, speedup=20.0 + index, peak_extra_bytes=3 << 20, error=2e-7, error_limit=1e-6))
        padded = dataclasses.replace(base, backend="padded_dot", algorithm="all rows, masked", baseline=True)
        rows.append(dataclasses.replace(padded, **values, speedup=1.0, peak_extra_bytes=160 << 20, error=3e-7, error_limit=1e-6))
    rows[0].status, rows[0].detail, rows[0].median_ms, rows[0].error = "wrong", "group 3: 1 of 9 elements wrong [0, 1]", None, math.nan
    return rows


@pytest.mark.parametrize("width", [80, 144])
def test_tables_fit_and_say_everything(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w") if sys.platform != "win32" else None)  # noqa: SIM115
    print_rows(console, _rows())
    text = console.export_text()
    table = [line for line in text.splitlines() if not line.startswith("reference, ")]
    assert max(len(line.rstrip()) for line in table) <= width
    header = next(line for line in table if "TFLOP/s" in line)
    row = next(line for line in table if "21.0x" in line)
    assert row[header.index("runs") : header.index("runs") + 4] == "   5"
    for word in ("WRONG", "1/8 of the model's", "E=128", "160 MiB", "1.23", "21.0x", "2.0e-07", "0.4", "padded_dot", "wgrad_wo"):
        assert word in text, word
    assert "…" not in text
    assert "reference, qwen3-30b-a3b fwd_wi: wrong: group 3: 1 of 9 elements wrong [0, 1]" in text
    assert ("numpy_matmul_a_group" in text) == (width > 80)
    console.file.close()


@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_narrow_terminals_lose_columns_and_no_cell_is_cut(width: int) -> None:
    rows = [dataclasses.replace(row, backend="padded_batch", tflops=0.00123, median_ms=0.0841, repetitions=15) for row in _rows()]
    console = Console(width=width, record=True, file=io.StringIO())
    print_rows(console, rows)
    text = console.export_text()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines() if "0.0841" in line) <= width
    for word in ("wgrad_wo", "padded_batch", "0.0841", "1.00x"):
        assert word in text, word


def test_states_and_counts_fit_narrow_terminals() -> None:
    rows = [dataclasses.replace(row, repetitions=15, tflops=0.00123, floor_fraction=0.098, peak_extra_bytes=31_000) for row in _rows()[:12]]
    for row, status in zip(rows, ("refused", "out of memory", "failed", "wrong"), strict=False):
        row.status, row.detail, row.backend = status, "it says why", "padded_batch"
    console = Console(width=80, record=True, file=io.StringIO())
    print_rows(console, rows)
    text = console.export_text()
    assert "…" not in text
    for word in ("refused", "no room", "failed", "WRONG", "out of memory: it says why", "0.00123", "30.3 KiB", "3.0e-07"):
        assert word in text, word


def test_csv_and_json_come_back(tmp_path) -> None:
    context = {"seed": 3, "device": "cpu: x", "versions": {"numpy": "2", "python": "3"}}
    rows = _rows()
    write_rows(rows, context, tmp_path / "a.csv", tmp_path / "a.json", {"more": math.inf}, QUIET)
    with open(tmp_path / "a.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    assert found[0]["detail"] == "group 3: 1 of 9 elements wrong [0, 1]"
    assert found[0]["median_ms"] == ""
    assert (float(found[2]["speedup"]), found[2]["seed"], found[2]["versions"]) == (21.0, "3", "numpy 2; python 3")
    data = json.loads((tmp_path / "a.json").read_text())
    assert (data["versions"], data["more"]) == (context["versions"], "inf")
    assert data["rows"][0]["error"] == "nan"
    assert {**data["rows"][0], "error": None} == {**dataclasses.asdict(rows[0]), "error": None}
    assert data["rows"][5] == dataclasses.asdict(rows[5])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_rows(_rows(), {}, None, path, {}, QUIET)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (160 << 20, "160 MiB"), (3 << 40, "3 TiB")]
)
def test_bytes_text(value: int | None, text: str) -> None:
    assert bytes_text(value) == text


def test_plots_hold_their_words_and_bars(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    rows = [row for row in _rows() if row.status == "ok"]
    for plot in (plot_speedup, plot_floor, plot_rows):
        plot(rows, tmp_path / "a.png", "a note")
        with Image.open(tmp_path / "a.png") as image:
            assert min(image.size) >= 600
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20
        plot(rows, tmp_path / "a.svg", "a note")
        assert (tmp_path / "a.svg").read_text().count("<path") > 12
    assert row_panels([row for row in rows if row.baseline]) == []
    write_panels([tmp_path / "b.png"], [], "", QUIET)
    assert not (tmp_path / "b.png").exists()


def _drawn(monkeypatch: pytest.MonkeyPatch, plot, rows: list[Row], path):
    """The axes of a plot."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **options: (figures.append(self), save(self, *rest, **options)))
    plot(rows, path)
    return figures[0].axes[0]


@pytest.mark.parametrize("fraction", [0.001, 0.4, 0.98, 1.3])
def test_the_floor_plot_has_its_ceiling_and_short_bars_their_value(fraction: float, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    row = dataclasses.replace(_rows()[2], floor_fraction=fraction)
    axis = _drawn(monkeypatch, plot_floor, [row], tmp_path / "a.png")
    assert [list(line.get_ydata()) for line in axis.lines] == [[1, 1]]
    assert axis.get_ylim()[1] > max(1, fraction)
    assert [text.get_text() for text in axis.texts] == (["0.001"] if fraction < 0.05 else [])
    bar = axis.containers[0][0]
    left, right = axis.get_xlim()
    assert bar.get_width() < 0.25 * (right - left)


@pytest.mark.parametrize("fraction", [0.9, 1.19])
def test_a_bar_above_the_measured_floor_is_explained(fraction: float, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is what was measured, no ceiling: a result that stays in a cache beats it."""
    pytest.importorskip("matplotlib")
    axis = _drawn(monkeypatch, plot_floor, [dataclasses.replace(_rows()[2], floor_fraction=fraction)], tmp_path / "a.png")
    assert "ceiling" not in axis.get_ylabel() and "measured floor" in axis.get_ylabel()
    assert ("stayed in a cache" in axis.get_ylabel()) == (fraction > 1)


@pytest.mark.parametrize("plot", [plot_speedup, plot_floor, plot_rows])
def test_pictures_carry_the_warning_and_no_legend_hides_a_bar(plot, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    warning = "The load average was 9.0 on 2 cores before this began: " + "others were at work, and the times are not to be trusted. " * 3
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *rest, **options: (figures.append(self), save(self, *rest, **options)))
    plot([row for row in _rows() if row.status == "ok"], tmp_path / "a.png", f"a device\n{warning}")
    (figure,) = figures
    figure.canvas.draw()
    assert " ".join(figure.get_supxlabel().split()) == f"a device {' '.join(warning.split())}"
    note = figure._supxlabel.get_window_extent()
    assert note.x0 >= 0 and note.x1 <= figure.bbox.width, "the note is cut off"
    legend = figure.legends[0].get_window_extent()
    assert not any(axis.get_legend() for axis in figure.axes)
    assert all(legend.y0 >= axis.get_window_extent().y1 for axis in figure.axes), "the legend lies over bars"


def test_speedups_near_one_carry_their_value(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    rows = [dataclasses.replace(_rows()[2], ragged_dot_class=name, speedup=value) for name, value in [("fwd_wi", 1.01), ("fwd_wo", 30.0)]]
    axis = _drawn(monkeypatch, plot_speedup, rows, tmp_path / "a.png")
    assert [text.get_text() for text in axis.texts] == ["1.01x"]


def test_ratio_sides() -> None:
    slower = Ratio("a", {"x": 1.0, "y": 1.44}, {"x": 1.0}, 1.1, larger=False)
    assert slower.value == pytest.approx(1.2)
    assert not slower.met
    assert "NOT met" in slower.describe()
    assert dataclasses.replace(slower, larger=True).met
    assert dataclasses.replace(slower, limit=1.3).met
