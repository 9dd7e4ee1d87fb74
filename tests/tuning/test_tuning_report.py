"""Tuning reports: who wins, what JSON and CSV keep, what a terminal and a picture show."""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import math
import pydoc
import sys

import numpy as np
import pytest
from rich.console import Console

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.tuning.report import VERDICTS, TuningReport, TuningRow
from hipgroupgemm.tuning.tables import shorten


def row(index, median=None, *, verdict=None, workspace=0, spread=0.0, samples=9, **values):
    algorithm = MatmulAlgorithm("double", index, f"kernel_{index}", workspace, True)
    verdict = verdict or ("ok" if median is not None else "wrong")
    if median is not None:
        values = {"p10_ms": median - spread, "p90_ms": median + spread, "tflops": 0.1 / median, **values}
    return TuningRow(algorithm, verdict, median_ms=median, samples=samples if median is not None else 0, **values)


def report(rows, **changes):
    a = np.zeros((40, 8), np.float32)
    config = hgg.config_for_ragged_dot(a, np.zeros((3, 8, 5), np.float32), np.zeros(3, np.int32))
    values = {
        "config": config.key(),
        "device": "cpu",
        "device_name": "a CPU",
        "identity": {"kind": "cpu", "target": "x86_64", "compute_units": 2, "versions": {"hipgroupgemm": "0.1"}},
        "ragged_extent": 40,
        "size_samples": [[14, 13, 13]],
        "size_class": "balanced",
        "origin": "seed",
        "seed": 3,
        "started": "2026-11-30T01:02:03+00:00",
        "seconds": 1.25,
        "floor_ms": 0.01,
        "roofline": {"flops": 1e12, "bandwidth": 2e10, "product": "a product", "copy": "a copy"},
        "rows": rows,
        "notes": ["something to know"],
    }
    return TuningReport(**{**values, **changes})


def full_report():
    rows = [row(0, 1.5, fraction=0.2, error=1e-7, error_limit=3e-7, checked=9), row(1, 1.7, spread=0.1)]
    rows += [TuningRow(row(9).algorithm, "pruned", "3 times the leader's time in the same 3 rounds", ratio=3.1, samples=3)]
    for index, verdict in enumerate(VERDICTS[2:], 2):  # those that have no time
        rows.append(row(index, verdict=verdict, reason=f'because, "of" {verdict}', error=(math.inf, math.nan, 0.1, None)[index % 4]))
    return report(rows)


def test_the_smallest_median_wins_whatever_the_order():
    rows = [row(0, 3.0), row(1, 1.0), row(2, 2.0)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        assert report([rows[i] for i in order]).best is rows[1]


@pytest.mark.parametrize("verdict", [v for v in VERDICTS if v != "ok"])
def test_only_right_rows_win(verdict):
    slow = row(1, 9.0)
    assert report([row(0, 0.1, verdict=verdict), slow]).best is slow
    assert report([row(0, 0.1, verdict=verdict)]).best is None


def test_ties_go_to_the_smaller_workspace():
    big, small = row(0, 1.0, workspace=500), row(1, 1.009, workspace=10)
    assert report([big, small]).best is small
    assert report([big, row(1, 1.011, workspace=10)]).best is big
    same = row(2, 1.005, workspace=10)
    assert report([big, small, same]).best is same  # equal workspaces: the faster one


def test_noise_makes_a_tie_and_many_samples_break_it():
    """0.2 ms of spread over 4 samples are 0.1 ms of uncertainty, over 400 samples 0.01 ms."""
    big = row(0, 1.0, workspace=500)
    noisy = row(1, 1.08, workspace=10, spread=0.2, samples=4)
    assert report([big, noisy]).best is noisy
    assert report([big, row(1, 1.08, workspace=10, spread=0.2, samples=400)]).best is big
    assert row(1, 2.0, spread=0.2, samples=4).uncertainty == pytest.approx(0.05)


def test_a_row_tells_its_algorithm_time_and_verdict():
    assert (row(0, 2.5).algorithm.time, row(0, 2.5).algorithm.verdict) == (2.5, "ok")
    assert (row(0).algorithm.time, row(0).algorithm.verdict) == (None, "wrong")


def test_rows_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="verdict='good'"):
        row(0, verdict="good")
    with pytest.raises(ValueError, match="median_ms"):
        row(0, verdict="ok")


def same(a, b):
    """Equal, NaN to NaN included, which == denies."""
    return a.to_dict() == b.to_dict() and a.config == b.config and [r.algorithm for r in a.rows] == [r.algorithm for r in b.rows]


def test_json_round_trip(tmp_path):
    before = full_report()
    path = tmp_path / "report.json"
    text = before.to_json(path)
    for after in (TuningReport.from_json(text), TuningReport.from_json(path), TuningReport.from_dict(before.to_dict())):
        assert same(before, after)
        assert after.best == before.best
        assert [r.verdict for r in after.rows] == [r.verdict for r in before.rows]
        errors = [r.error for r in after.rows if r.error is not None]
        assert any(math.isnan(e) for e in errors)
        assert math.inf in errors
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("write", [TuningReport.to_json, TuningReport.to_csv])
def test_a_file_that_cannot_be_written_is_named_itself(tmp_path, write):
    path = tmp_path / "no" / "report"
    with pytest.raises(FileNotFoundError) as caught:
        write(full_report(), path)
    assert caught.value.filename == str(path) and f"there is no directory {tmp_path / 'no'}; make it first" in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as caught:
        write(full_report(), tmp_path / "file" / "report")
    assert caught.value.filename == str(tmp_path / "file" / "report") and not list(tmp_path.glob(".*"))


def test_without_floor_and_roofline_and_rows():
    before = report([], floor_ms=None, roofline=None)
    assert TuningReport.from_json(before.to_json()) == before


def test_sizes_a_batch_entry_keep_their_shape():
    before = report([], size_samples=[[[1, 2, 3], [4, 5, 6]]])
    assert TuningReport.from_json(before.to_json()).size_samples == [[[1, 2, 3], [4, 5, 6]]]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda d: d.update(schema=99), "schema 2, got 99"),
        (lambda d: d.pop("rows"), "missing fields ['rows']"),
        (lambda d: d.update(extra=1), "unknown fields ['extra']"),
        (lambda d: d["rows"][0].pop("index"), "index"),
        (lambda d: d["rows"][0].update(verdict="splendid"), "splendid"),
        (lambda d: d["config"].pop("m"), "['m']"),
    ],
)
def test_what_is_no_report_is_refused(spoil, word):
    data = json.loads(full_report().to_json())
    spoil(data)
    with pytest.raises(ValueError) as caught:
        TuningReport.from_json(json.dumps(data))
    assert word in str(caught.value)
    with pytest.raises(ValueError, match="not JSON"):
        TuningReport.from_json("[1, 2")
    with pytest.raises(ValueError, match="schema 2, got list"):
        TuningReport.from_json("[1, 2]")


def test_csv_has_every_value(tmp_path):
    before = full_report()
    path = tmp_path / "report.csv"
    text = before.to_csv(path)
    assert path.read_text("utf-8") == text
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == len(before.rows)
    for line, wanted in zip(lines, before.rows, strict=True):
        cells = {name: value for name, value in line.items() if name in wanted.to_dict()}
        texts = {"backend", "name", "verdict", "reason", "error"}
        values = {name: (None if value == "" else ast.literal_eval(value)) for name, value in cells.items() if name not in texts}
        again = TuningRow.from_dict({**cells, **values, "error": cells["error"] or None})
        assert again.to_dict() == {**wanted.to_dict(), "error": again.to_dict()["error"]}
        assert again.error == wanted.error or (math.isnan(again.error) and math.isnan(wanted.error))
        assert (line["m"], line["k"], line["groups"], line["type_a"], line["mode"]) == ("40", "8", "3", "float32", "NON_CONTRACTING")


def test_a_name_that_utf8_has_no_bytes_for(tmp_path):
    odd = dataclasses.replace(full_report(), device_name="a \ud800 b", notes=["\udfff"])
    odd.rows[0] = TuningRow(MatmulAlgorithm("double", 0, "kernel_\ud800", 0, True), "failed", "it said \udc80")
    text = odd.to_csv(tmp_path / "report.csv")
    assert "kernel_\\ud800" in text and "it said \\udc80" in text and (tmp_path / "report.csv").read_text("utf-8") == text
    with open(tmp_path / "table", "w", encoding="utf-8") as file:
        Console(file=file, width=160).print(odd)
    assert "kernel_\\ud800" in (tmp_path / "table").read_text("utf-8")
    str(odd).encode("utf-8")
    assert TuningReport.from_json(odd.to_json(tmp_path / "report.json")).rows[0].algorithm.name == "kernel_\ud800", "JSON keeps it"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("index", 10**400),
        ("index", 1.5),
        ("index", float("inf")),
        ("workspace_size", -1),
        ("samples", -4),
        ("median_ms", 10**400),
        ("median_ms", True),
        ("deterministic", 1),
        ("name", 7),
        ("reason", []),
    ],
)
def test_a_row_of_values_that_are_none_is_refused(where, value):
    data = {**full_report().rows[0].to_dict(), where: value}
    with pytest.raises(ValueError, match="row: is none that to_dict"):
        TuningRow.from_dict(data)
    whole = json.loads(full_report().to_json())
    for name in ("rows", "seconds", "config"):
        with pytest.raises(ValueError):
            TuningReport.from_dict({**whole, name: value if name == "config" else [[[]]]})
    with pytest.raises(ValueError, match="not JSON"):
        TuningReport.from_json("[" * 100_000)


@pytest.mark.parametrize("width", [60, 76, 80, 104, 105, 115, 135, 143, 220])
def test_long_names_lose_their_middle_and_nothing_else_is_cut(width):
    long = MatmulAlgorithm("hipblaslt", 123456, "Cijk_Ailk_Bljk_" + "x" * 200 + "_the_end", 1023 * 10**6, False)
    rows = [
        TuningRow(long, verdict, "why", 12345.6, 12345.6, 12345.6, 1234.5, 0.123, 1.2e-9, samples=1, ratio=1.0)
        for verdict in ("ok", "pruned")
    ]
    rows.append(TuningRow(long, "nondeterministic", "why"))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report(rows))
    lines = [line for line in console.export_text().splitlines() if "…" in line]
    assert len(lines) == 3
    assert all("Cijk_A" in line and "end" in line and len(line.rstrip()) <= width for line in lines)
    shown = {"hipblaslt": 0, "12346": 0, "1.000": 76, "1234 ": 85, "  1  ": 91, "0.12": 115, "1.2e-09": 124, "976 MiB": 135, "123456": 143}
    for words, least in shown.items():
        assert (words in lines[0]) == (width >= least), words
    assert lines[0].count("12346") == (3 if width >= 105 else 1)  # p10 and p90 come and go together
    assert lines[2].rstrip().endswith("nondeterministic")


@pytest.mark.parametrize("width", [100, 160])
def test_the_table_marks_the_winner_and_tells_reasons(width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(full_report())
    text = console.export_text()
    winner = next(line for line in text.splitlines() if line.strip().startswith("*"))
    assert "double" in winner
    assert "1.50" in winner
    assert 'double 3 kernel_3: wrong: because, "of" wrong' in text
    assert "something to know" in text
    assert "balanced seed" in " ".join(text.split())
    assert all(verdict in text for verdict in VERDICTS)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_plot(tmp_path):
    path = tmp_path / "report.png"
    full_report().plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    many = report([row(i, 1.0 + i, spread=0.2) for i in range(50)])
    many.plot(tmp_path / "many.svg", 12)
    assert (tmp_path / "many.svg").read_text("utf-8").count("<path") > 12
    with pytest.raises(ValueError, match="no candidate was timed"):
        report([row(0)]).plot(tmp_path / "none.png")
    for count in (0, -3, True, 1.5):
        with pytest.raises(ValueError, match=f"count={count}: wanted an int of at least 1"):
            many.plot(tmp_path / "none.png", count)
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("width", [60, 72, 80])
def test_names_of_common_length_are_whole_on_narrow_terminals(width):
    algorithm = MatmulAlgorithm("reference", 0, "numpy_gemm_per_group_x", 0, True)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report([TuningRow(algorithm, "ok", "", 0.123, 0.12, 0.133, 1.5, 0.4, 1e-7, samples=9)]))
    text = console.export_text()
    assert "reference  numpy_gemm_per_group_x" in text
    assert " ok " in text
    assert "…" not in text


def test_print_says_what_matters_in_a_few_lines():
    text = str(full_report())
    assert f"{full_report()}" == text
    lines = text.splitlines()
    assert lines[0].startswith("NON_CONTRACTING m=40 n=5 k=8 groups=3, float32 x float32 -> float32 on a CPU")
    assert lines[1] == "best: double kernel_0, 1.50 ms (p10 1.50, p90 1.50, runs 9), 0.0667 TFLOP/s, 0.2 of the floor"
    assert lines[2] == "candidates: 2 ok, 1 pruned, 1 nondeterministic, 1 wrong, 1 crashed, 1 timed out, 1 failed, 1 untimed"
    assert lines[3:] == ["something to know"]
    assert "no winner" in str(report([row(0)]))
    assert "candidates: none" in str(report([]))


@pytest.mark.parametrize(("changes", "words"), [({"samples": 1}, "is of 1 timed call,"), ({"spread": 0.4}, "spread widely"), ({}, "")])
def test_doubtful_times_are_called_so(changes, words):
    found = report([row(0, 1.5, **changes)], notes=[])
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(found)
    for text in (str(found), console.export_text()):
        assert words in text
        assert ("winner's" in text) == bool(words)


def test_a_picture_needs_an_ending_that_says_what_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"picture': wanted a name that ends in \.png, \.svg, \.pdf"):
        full_report().plot(tmp_path / "picture")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_plot_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hipgroupgemm\[bench\]'"):
        full_report().plot(tmp_path / "p.png")


def test_help_finds_what_is_loaded_on_first_use():
    import hipgroupgemm.tuning

    assert hgg.TuningReport is hipgroupgemm.tuning.TuningReport is TuningReport
    assert "TuningReport" in hgg.__all__
    for module in (hgg, hipgroupgemm.tuning):
        assert set(module.__all__) <= set(dir(module))
    text = pydoc.render_doc(hipgroupgemm.tuning, renderer=pydoc.plaintext)
    for words in ("class TuningReport", "class TuningRow", "tune(config", "close_workers(", "autotune", "from_json", "to_csv", "plot"):
        assert words in text, words


def test_reports_are_plain_data():
    with pytest.raises(dataclasses.FrozenInstanceError):
        full_report().rows = []


NAMES = [
    f"Cijk_Ailk_Bjlk_BBS_BH_UserArgs_MT{tile}_MI16x16x1_SN_LDSB0_AFC0_GRPM1_GSUAMB_ISA942_LBSPPA128_WG{wave}"
    for tile, wave in (("128x128x64", "32_4_1"), ("256x256x64", "32_4_1"), ("256x128x32", "16_16_1"))
]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_part_of_a_name_that_tells_candidates_apart_is_shown(width):
    rows = [
        TuningRow(MatmulAlgorithm("hipblaslt", i, name, 0, True), "ok", "", 1.0 + i, 1.0 + i, 1.0 + i, 1.0, samples=9)
        for i, name in enumerate(NAMES)
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report(rows))
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    for tile in ("MT128x128x64", "MT256x256x64", "MT256x128x32"):
        assert sum(tile in line and " ok" in line for line in lines) == 1, (tile, lines)


@pytest.mark.parametrize("width", range(3, 150, 7))
def test_shortened_names_fit_and_stay_apart(width):
    short = shorten(NAMES, width)
    assert all(len(name) <= width for name in short)
    if width >= 24:
        assert len(set(short)) == 3
    assert shorten(["numpy_gemm_per_group"], width) == ["numpy_gemm_per_group"] or width < 20
    assert shorten(["same_name_here_and_there"] * 2, 11) == ["same_…there"] * 2


def test_times_of_other_rounds_are_not_shown():
    """A pruned candidate was timed in the first rounds only: it has a ratio, and no time that could look faster than the winner's."""
    pruned = TuningRow(MatmulAlgorithm("double", 1, "kernel_1", 0, True), "pruned", "2.1 times", samples=3, ratio=2.1)
    found = report([row(0, 1.5), pruned])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(found)
    line = next(line for line in console.export_text().splitlines() if "kernel_1" in line)
    assert "2.100" in line
    assert found.best.algorithm.name == "kernel_0"
