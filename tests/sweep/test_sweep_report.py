"""`hipgroupgemm report`: ratios, changed winners, verdicts that changed, algorithms that came and went."""

import csv
import io
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from hipgroupgemm.benchmark import plots
from hipgroupgemm.cli import cli
from hipgroupgemm.measure.workloads import CLASSES
from hipgroupgemm.sweep.compare import compare, series_of
from hipgroupgemm.sweep.jobs import SweepJob, SweepRequest
from hipgroupgemm.sweep.report import comparison_panels
from hipgroupgemm.sweep.report import report as make_report
from hipgroupgemm.sweep.results import Header, Record, Row, SweepFile, read_sweep

DATA = Path(__file__).parent / "data"


def row(name: str, ms: float | None = None, verdict: str = "ok", index: int = 0, backend: str = "b", spread: float = 0.01) -> dict:
    return {
        "backend": backend,
        "index": index,
        "name": name,
        "workspace_size": 0,
        "deterministic": True,
        "verdict": verdict,
        "reason": "" if verdict in ("ok", "pruned") else f"it is {verdict}",
        "median_ms": ms,
        "p10_ms": None if ms is None else ms * (1 - spread),
        "p90_ms": None if ms is None else ms * (1 + spread),
        "tflops": None if ms is None else 10 / ms,
        "fraction": None if ms is None else 0.5 / ms,
        "error": 1e-3,
        "samples": 20,
    }


def record(
    rows: list[dict],
    kind: str = "fwd_wi",
    n: int = 10,
    status: str = "ok",
    versions: str = "1",
    device: str = "H",
    load: float | None = None,
    ceilings: float = 1.0,
    **job,
) -> Record:
    what = {"class": kind, "model": "qwen", "m": 30, "k": 8, "n": n, "e": 4, "scale": 1, "dtype": "float16", "distribution": "balanced"}
    target = {"kind": "cuda", "target": "sm_90"} if load is None else {"kind": "cpu", "target": "x86_64"}
    identity = {**target, "name": device, "compute_units": 132, "versions": {"b": versions}}
    right = [one for one in rows if one["verdict"] == "ok"]
    best = msgspec.convert(min(right, key=lambda one: one["median_ms"]), Row) if right else None
    report = {"rows": rows, "floor_ms": 0.5, "roofline": {"flops": ceilings, "bandwidth": 1.0}} if status == "ok" else None
    whole = msgspec.convert({**what, "group_sizes": None, **job}, SweepJob)
    reason = "" if status == "ok" else f"why {status}"
    return Record(whole, "cuda:0", identity, status, reason, best, report, load, 4, finished="2026-01-01")


def write(path: Path, *records: Record, jobs: int | None = None, commit: str | None = None, **request) -> Path:
    devices = {"cuda:0": records[0].identity} if records else {}
    machine = {"commit": commit or path.stem, "uncommitted_changes": False}
    head = Header(
        request=SweepRequest(**request), devices=devices, jobs=len(records) if jobs is None else jobs, machine=machine, started="2026-01-01"
    )
    file = SweepFile(path, head, overwrite=True)
    for one in records:
        file.append(one)
    file.close()
    return path


def series(tmp_path: Path, *sweeps: list[Record]) -> list:
    return series_of([read_sweep(write(tmp_path / f"s{place}.json", *records)) for place, records in enumerate(sweeps)])


def report(*arguments: object):
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


# ---- arithmetic ------------------------------------------------------------------------------------------------------------------


def test_ratios_by_hand(tmp_path, rng: np.random.Generator) -> None:
    """Every ratio, mean and mean of a class against NumPy, on random times."""
    before = rng.lognormal(size=(6, 3, 4))  # class, shape, algorithm
    after = rng.lognormal(size=(6, 3, 4))

    def sweep(times) -> list[Record]:
        return [
            record([row(f"tile_{index}", float(times[c, s, index]), index=index) for index in range(4)], kind, n=s + 1)
            for c, kind in enumerate(CLASSES)
            for s in range(3)
        ]

    old, new = series(tmp_path, sweep(before), sweep(after))
    found = compare(old, new)
    ratios = before.min(axis=2) / after.min(axis=2)
    np.testing.assert_allclose([ratio for _, ratio in found.pairs], ratios.ravel(), rtol=1e-12)
    np.testing.assert_allclose(found.means["all"], np.exp(np.log(ratios).mean()), rtol=1e-12)
    by_class = np.exp(np.log(ratios).mean(axis=1))
    assert list(found.means) == ["all", *CLASSES]
    np.testing.assert_allclose([found.means[name] for name in CLASSES], by_class, rtol=1e-12)
    same = np.exp(np.log(before / after).mean(axis=2))
    np.testing.assert_allclose([pair.same_algorithms_ratio for pair, _ in found.pairs], same.ravel(), rtol=1e-12)
    changed = (before.argmin(axis=2) != after.argmin(axis=2)).ravel()
    assert [pair.changed for pair, _ in found.pairs] == changed.tolist()
    overlap = (np.abs(before.min(axis=2) - after.min(axis=2)) <= 0.01 * (before.min(axis=2) + after.min(axis=2))).ravel()
    assert [pair.within_noise for pair, _ in found.pairs] == overlap.tolist()
    swapped = compare(new, old)
    np.testing.assert_allclose(found.means["all"] * swapped.means["all"], 1, rtol=1e-12)


def test_only_algorithms_that_are_right_in_both_make_the_same_ratio(tmp_path) -> None:
    old = record([row("a", 1.0), row("b", 2.0), row("c", 4.0), row("d", 50.0, "pruned"), row("e", 3.0)])
    new = record([row("a", 0.5), row("b", 8.0), row("c", None, "wrong"), row("d", 5.0), row("f", 3.0)])
    ((pair, _),) = compare(*series(tmp_path, [old], [new])).pairs
    np.testing.assert_allclose(pair.same_algorithms_ratio, np.sqrt((1.0 / 0.5) * (2.0 / 8.0)))


@pytest.mark.parametrize(("spread", "noise"), [(0.04, False), (0.06, True)])
def test_noise_is_an_overlap_of_the_ranges(tmp_path, spread, noise) -> None:
    old, new = record([row("a", 1.0, spread=spread)]), record([row("a", 1.1, spread=spread)])
    ((pair, _),) = compare(*series(tmp_path, [old], [new])).pairs
    assert pair.within_noise == noise
    ((pair, _),) = compare(*series(tmp_path, [new], [old])).pairs
    assert pair.within_noise == noise


def test_kernels_of_one_name_are_told_apart_by_their_order(tmp_path) -> None:
    """Two processes number kernels differently: the first of that name stays the first."""
    old = record([row("k", 1.0, index=7), row("k", 2.0, index=9), row("other", 3.0, index=8)])
    new = record([row("other", 3.0, index=1), row("k", 2.0, index=40), row("k", 1.5, index=41)])
    found = compare(*series(tmp_path, [old], [new]))
    assert not found.new
    assert not found.missing
    ((pair, _),) = found.pairs
    assert pair.changed
    assert pair.old_winner_now == "1.33 times the new winner's time"
    np.testing.assert_allclose(pair.same_algorithms_ratio, (1 / 2 * 2 / 1.5 * 1) ** (1 / 3))


# ---- what changed ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "fate"),
    [
        ([row("old", 3.0), row("new", 2.0)], "1.5 times the new winner's time"),
        ([row("new", 2.0)], "not among the candidates now"),
        ([row("old", None, "crashed"), row("new", 2.0)], "crashed now"),
        ([row("old", 90.0, "pruned"), row("new", 2.0)], "pruned now"),
        ([row("old", 1.0, backend="c"), row("old", 2.0)], "2 times the new winner's time"),
    ],
)
def test_changed_winners_tell_the_old_ones_fate(tmp_path, now, fate) -> None:
    ((pair, _),) = compare(*series(tmp_path, [record([row("old", 1.0), row("new", 2.0)])], [record(now)])).pairs
    assert pair.old_winner_now == fate


@pytest.mark.parametrize("before", ["ok", "pruned"])
@pytest.mark.parametrize("after", ["wrong", "nondeterministic", "crashed", "timed out", "failed"])
def test_newly_wrong(tmp_path, before, after) -> None:
    old = record([row("a", 1.0), row("x", 9.0, before)])
    new = record([row("a", 1.0), row("x", None, after)])
    found = compare(*series(tmp_path, [old], [new]))
    assert [(f.backend, f.algorithm, f.before, f.after, f.reason) for f in found.newly_wrong] == [
        ("b", "x", before, after, f"it is {after}")
    ]
    assert not found.newly_right
    back = compare(*series(tmp_path, [new], [old]))
    assert not back.newly_wrong
    assert [(f.algorithm, f.before, f.after) for f in back.newly_right] == [("x", after, before)]


@pytest.mark.parametrize(("before", "after"), [("untimed", "wrong"), ("ok", "untimed"), ("wrong", "crashed"), ("ok", "pruned")])
def test_what_is_no_news(tmp_path, before, after) -> None:
    old, new = record([row("a", 1.0), row("x", 9.0, before)]), record([row("a", 1.0), row("x", 9.0, after)])
    found = compare(*series(tmp_path, [old], [new]))
    assert not found.newly_wrong
    assert not found.newly_right


def test_jobs_that_end_no_more(tmp_path) -> None:
    old = [record([row("a", 1.0)], n=n) for n in (1, 2, 3)]
    new = [record([row("a", 1.0)], n=1), record([], n=2, status="failed"), record([], n=3, status="refused")]
    found = compare(*series(tmp_path, old, new))
    assert [(f.job.n, f.algorithm, f.after, f.reason) for f in found.newly_wrong] == [
        (2, "", "failed", "why failed"),
        (3, "", "refused", "why refused"),
    ]
    assert not found.missing  # of a job that did not end nothing is known
    assert len(found.pairs) == 1
    assert len(compare(*series(tmp_path, new, old)).newly_right) == 2


def test_new_and_missing_algorithms_and_problems(tmp_path) -> None:
    old = [record([row("a", 1.0), row("gone", 2.0)], n=n) for n in (1, 2)] + [record([row("a", 1.0)], n=3)]
    new = [record([row("a", 1.0), row("fresh", 2.0), row("x", 2.0, backend="c")], n=n) for n in (1, 2)] + [record([row("a", 1.0)], n=4)]
    found = compare(*series(tmp_path, old, new))
    assert found.missing == {"b gone": 2}
    assert found.new == {"b fresh": 2, "c x": 2}
    assert [(pair.job.n, pair.base, pair.other) for pair in found.problems[2:]] == [(3, "ok", None), (4, None, "ok")]


def test_problems_are_matched_by_their_sizes_not_their_names(tmp_path) -> None:
    old = [record([row("a", 1.0)], distribution="zipf", group_sizes=[[30, 0, 0, 0]], model="x")]
    same = [record([row("a", 1.0)], distribution="routing.json", group_sizes=[[30, 0, 0, 0]], model="y")]
    other = [record([row("a", 1.0)], distribution="zipf", group_sizes=[[29, 1, 0, 0]], model="x")]
    assert len(compare(*series(tmp_path, old, same)).pairs) == 1
    assert len(compare(*series(tmp_path, old, other)).pairs) == 0


def test_one_file_with_two_devices_is_two_series(tmp_path) -> None:
    one = [record([row("a", 1.0)], device=device) for device in ("H100", "H200")]
    first, second = series(tmp_path, one)
    assert (first.label, second.label) == ("s0.json [cuda: H100]", "s0.json [cuda: H200]")


def test_one_file_twice_has_two_labels(tmp_path) -> None:
    path = write(tmp_path / "s.json", record([row("a", 1.0)]))
    found = series_of([read_sweep(path), read_sweep(path)])
    assert len({one.label for one in found}) == 2
    assert f"{path} (2) against {path} (1)" in report(path, path).output.replace("\n", "")


def test_what_has_not_ended_is_said(tmp_path) -> None:
    path = write(tmp_path / "s.json", record([row("a", 1.0)]), record([], n=11, status="failed"), jobs=8)
    done = report(path, "--json", tmp_path / "r.json")
    assert done.exit_code == 0
    assert "jobs: 1 ok, 1 failed" in done.output
    assert f"1 of 8 jobs of the file are done; hipgroupgemm sweep --resume {path} goes on" in done.output
    assert json.loads((tmp_path / "r.json").read_text())["series"][0]["file"] == {"path": str(path), "jobs_done": 1, "jobs_wanted": 8}


# ---- what can be compared --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("doubt", "text"),
    [
        ("busy", "others were at work on the machine: 1"),
        ("few", "fewer than 5 timed calls: 1"),
        ("drift", "the device's measured roofline differs by more than 10%: 1"),
    ],
)
def test_times_that_can_not_be_compared_make_no_mean_and_are_said_on_pictures(tmp_path, monkeypatch, which, doubt, text) -> None:
    """4.04x between two sweeps on one machine, one of them while others were at work: no claim is made of it."""
    sweeps = [[record([row("a", ms)], load=0.5), record([row("a", 2.0)], "wgrad_wi", load=0.5)] for ms in (4.04, 1.0)]
    spoilt = row("a", (4.04, 1.0)[which])
    spoilt["samples"] = 4 if doubt == "few" else 20
    sweeps[which][0] = record([spoilt], load=3.5 if doubt == "busy" else 0.5, ceilings=1.2 if doubt == "drift" else 1.0)
    comparison = compare(*series(tmp_path, *sweeps))
    (first, ratio), (second, _) = comparison.pairs
    assert (first.not_comparable, second.not_comparable, ratio) == (doubt, "", 4.04)
    assert comparison.means == {"all": 1.0, "wgrad_wi": 1.0}
    (warning,) = comparison.warnings
    assert warning == f"Ratios that can't be compared (?), left out of the means: 1 of 2 ({text})."
    paths = [tmp_path / f"s{place}.json" for place in (0, 1)]
    texts: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: texts.extend(t.get_text() for t in _all_texts(figure)))
    done = report(*paths, "--plot", tmp_path / "r.png", "--json", tmp_path / "r.json")
    assert "? 4.040" in done.output
    assert "geometric mean of 1 ratios: 1 (wgrad_wi 1.000)" in done.output
    assert warning in done.output
    drawn = " ".join(" ".join(texts).split())
    assert warning in drawn
    assert "?4.04x" in drawn
    assert "geometric mean 1x" in drawn
    assert json.loads((tmp_path / "r.json").read_text())["comparisons"][0]["warnings"] == [warning]


def _all_texts(figure) -> list:
    import matplotlib.text

    return figure.findobj(matplotlib.text.Text)


def test_one_build_on_one_machine_differs_by_noise_alone(tmp_path) -> None:
    old = write(tmp_path / "a.json", record([row("a", 4.04)]), commit="one")
    new = write(tmp_path / "b.json", record([row("a", 1.0)]), commit="one")
    comparison = compare(*series_of([read_sweep(old), read_sweep(new)]))
    assert comparison.same_build
    assert comparison.pairs[0][0].within_noise
    done = report(old, new)
    assert "~ 4.040" in done.output
    assert "Both are of one build on one machine: the ratios, up to 4.04, are the noise between two runs." in done.output
    for other in (
        write(tmp_path / "c.json", record([row("a", 1.0)]), commit="two"),
        write(tmp_path / "d.json", record([row("a", 1.0)]), commit="one", algorithms="all"),
        write(tmp_path / "e.json", record([row("a", 1.0)], versions="2"), commit="one"),
    ):
        assert not compare(*series_of([read_sweep(old), read_sweep(other)])).pairs[0][0].within_noise


def test_two_devices_may_have_other_ceilings(tmp_path) -> None:
    old, new = series(tmp_path, [record([row("a", 2.0)], device="A")], [record([row("a", 1.0)], device="B", ceilings=2.0)])
    assert compare(old, new).means["all"] == 2.0


def test_bars_of_one_sweep_have_its_warnings(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "s.json", record([row("a", 1.0)], load=4.0), record([row("a", 1.0, spread=0.3)], "wgrad_wi", load=4.0))
    texts: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: texts.extend(t.get_text() for t in _all_texts(figure)))
    done = report(path, "--plot", tmp_path / "r.png")
    for text in ("The load average was 4.0 on 4 cores", "spread by more than 20% from p10 to p90: 1"):
        assert text in " ".join(done.output.split())
        assert text in " ".join(" ".join(texts).split())


def test_ratio_bars_have_their_values_and_bands_and_noise_is_pale(tmp_path) -> None:
    from matplotlib.figure import Figure

    old, new = series(
        tmp_path,
        [record([row("a", 2.0)]), record([row("a", 1.0, spread=0.2)], n=11, model="b"), record([row("a", 1.0)], "wgrad_wi")],
        [record([row("a", 1.0)]), record([row("a", 0.9, spread=0.2)], n=11, model="b"), record([row("a", 1.6)], "wgrad_wi")],
    )
    (panel,) = comparison_panels([compare(old, new)])
    axis = Figure().subplots()
    plots.draw_panel(axis, panel, list(dict.fromkeys(cluster for cluster, _ in panel.values)))
    assert sorted(text.get_text() for text in axis.texts) == ["0.625x", "2x", "~1.11x"]
    pale = [bar for container in axis.containers for bar in container if bar.get_alpha() is not None]
    assert [round(bar.get_height(), 2) for bar in pale] == [0.11]
    bands = sorted(tuple(line.get_ydata()) for line in axis.lines if len(set(line.get_ydata())) > 1)
    np.testing.assert_allclose(
        bands, [(0.625 * 0.99 / 1.01, 0.625 * 1.01 / 0.99), (0.8 / 1.08, 1.2 / 0.72), (2 * 0.99 / 1.01, 2 * 1.01 / 0.99)]
    )


@pytest.mark.parametrize("records", [1, 40])
def test_the_legend_hides_no_bar(tmp_path, records) -> None:
    """It stands above the axes: on every picture its box and theirs are apart."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    many = [record([row("a", 1.0 + n)], kind, n=n, model=f"model-{n}") for n in range(records) for kind in CLASSES]
    paths = [write(tmp_path / f"{name}.json", *many) for name in "ab"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        assert report(*paths, "--plot", tmp_path / "r.png").exit_code == 0
        assert report(paths[0], "--plot", tmp_path / "r.png").exit_code == 0
    assert len(figures) == 2
    for figure in figures:
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert all(not box.overlaps(axis.get_window_extent()) for axis in figure.axes)
        assert [text.get_text() for text in legend.get_texts()] == list(CLASSES)


@pytest.mark.parametrize("width", [60, 80])
def test_tables_of_narrow_terminals_keep_their_lines_and_the_tile(tmp_path, width) -> None:
    """No column is broken, and what tells two kernels apart stays to be seen."""
    names = [f"Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT{tile}x64_MI16x16x1_SN_LDSB1_AFC1_AG0_WGM8" for tile in ("128x256", "256x16")]
    paths = [
        write(tmp_path / f"{place}.json", record([row(name, 1.0 + place)]), record([row(name, 123.0)], "wgrad_wo"))
        for place, name in enumerate(names)
    ]
    for files in (paths[:1], paths):
        done = CliRunner(env={"COLUMNS": str(width)}).invoke(cli, ["report", *map(str, files)], color=False)
        assert done.exit_code == 0, done.output
    console = Console(width=width, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hipgroupgemm.sweep.report.console_for", lambda *_: console)
        make_report(paths)
        make_report(paths[1:])
    lines = console.file.getvalue().splitlines()
    rows = [line for line in lines if line.lstrip().startswith(("fwd_wi ", "wgrad_wo "))]
    tables = [line for line in rows if "M=30" not in line]
    assert len(tables) == 4
    assert all(len(line) <= width for line in tables)
    assert all("MT128x256" in line or "MT256x16" in line for line in tables), tables


def test_pictures_of_many_problems_are_no_wider_than_a_page(tmp_path) -> None:
    from matplotlib.image import imread

    many = [record([row("a", 1.0 + n)], kind, n=n, model=f"model-{n}") for n in range(30) for kind in ("fwd_wi", "wgrad_wo")]
    path = write(tmp_path / "s.json", *many)
    assert report(path, path, "--plot", tmp_path / "r.png").exit_code == 0
    assert report(path, "--plot", tmp_path / "f.png").exit_code == 0
    for name in ("r.png", "f.png"):
        height, width, _ = imread(tmp_path / name).shape
        assert width <= 13 * 150
        assert height > 4 * 3.9 * 150  # four lines


def test_files_of_one_name_are_told_apart(tmp_path) -> None:
    paths = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name / "s.json", record([row("a", 1.0)])))
    assert [s.label for s in series_of([read_sweep(path) for path in paths])] == [str(path) for path in paths]


def test_summary_by_hand(tmp_path) -> None:
    records = [
        record([row("a", 1.0), row("x", None, "timed out", backend="c")]),
        record([row("a", 2.0), row("x", 1.25, backend="c")], "wgrad_wi"),
        record([], n=7, status="refused"),
    ]
    report(write(tmp_path / "s.json", *records), "--json", tmp_path / "r.json")
    (facts,) = json.loads((tmp_path / "r.json").read_text())["series"]
    assert facts["jobs"] == {"ok": 2, "refused": 1}
    assert facts["winners by backend"] == {"b": 1, "c": 1}
    assert facts["candidates"] == {"ok": 3, "timed out": 1}
    assert facts["fraction_of_floor"] == pytest.approx({"all": math.sqrt(0.5 * 0.4), "fwd_wi": 0.5, "wgrad_wi": 0.4})


# ---- the command -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    old = [record([row("a", 1.0), row("b", 2.0), row("x", 3.0)]), record([row("a", 1.0)], "dgrad_wo"), record([row("a", 1.0)], n=3)]
    new = [record([row("a", 4.0), row("b", 0.5), row("x", None, "wrong"), row("y", 9.0)], versions="2")]
    new += [record([row("a", 1.0)], "dgrad_wo", versions="2"), record([row("a", 1.0)], n=4, versions="2")]
    return write(tmp_path / "old.json", *old), write(tmp_path / "new.json", *new)


def test_two_sweeps(two, tmp_path) -> None:
    outputs = [tmp_path / name for name in ("r.csv", "r.json", "r.svg")]
    names = [part for pair in zip(("--csv", "--json", "--plot"), outputs, strict=True) for part in pair]
    done = report(*two, *names)
    assert done.exit_code == 1, done.output
    for text in (
        "new.json against old.json",
        "geometric mean of 2 ratios: 1.414 (fwd_wi 2.000, dgrad_wo 1.000)",
        "~ 1.000",
        "b a -> b b",
        "changed winners: 1",
        "b a -> b b, ratio 2.000; the old one: 8 times the new winner's time",
        "newly wrong: 1",
        "b x: ok -> wrong: it is wrong",
        "new algorithms: 1\n  b y (1 problem)",
        "only in old.json: 1\n  fwd_wi qwen  M=30 K=8 N=3",
        "only in new.json: 1\n  fwd_wi qwen  M=30 K=8 N=4",
    ):
        assert text in done.output, text
    with outputs[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["class"], r["n"], r["ratio"], r["changed"], r["within_noise"]) for r in rows] == [
        ("fwd_wi", "10", "2.0", "True", "False"),
        ("dgrad_wo", "10", "1.0", "False", "True"),
        ("fwd_wi", "3", "", "False", "False"),
        ("fwd_wi", "4", "", "False", "False"),
    ]
    assert (rows[2]["base_winner"], rows[2]["other_winner"]) == ("b a", "")
    (comparison,) = json.loads(outputs[1].read_text())["comparisons"]
    assert comparison["ratio"]["all"] == pytest.approx(math.sqrt(2))
    assert comparison["newly_wrong"][0]["algorithm"] == "x"
    assert comparison["missing_algorithms"] == {}
    assert [pair["changed"] for pair in comparison["problems"]] == [True, False, False, False]
    text = outputs[2].read_text()
    assert "<svg" in text
    swapped = report(two[1], two[0])
    assert swapped.exit_code == 0
    assert "newly right: 1" in swapped.output
    assert "missing algorithms: 1" in swapped.output


def test_three_sweeps_are_compared_with_the_first(two, tmp_path) -> None:
    third = write(tmp_path / "third.json", record([row("a", 0.25)]))
    done = report(*two, third, "--plot", tmp_path / "r.png")
    assert "new.json against old.json" in done.output
    assert "third.json against old.json" in done.output
    assert "geometric mean of 1 ratios: 4" in done.output
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_one_sweep_is_summed_up(two, tmp_path) -> None:
    done = report(two[1], "--csv", "-", "--plot", tmp_path / "r.png")
    assert done.exit_code == 0
    assert "jobs: 3 ok; candidates: 5 ok, 1 wrong; winners by backend: 3 b" in done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [(r["name"], r["median_ms"]) for r in rows if r["winner"] == "True"] == [("b", "0.5"), ("a", "1.0"), ("a", "1.0")]


def test_nothing_in_common(tmp_path) -> None:
    paths = [write(tmp_path / f"{n}.json", record([row("a", 1.0)], n=n)) for n in (1, 2)]
    done = report(*paths)
    assert done.exit_code == 0
    assert "no problem has a winner in both" in done.output
    done = report(*paths, "--plot", tmp_path / "r.png")
    assert done.exit_code == 0
    assert "there is nothing to plot" in done.output


def test_files_that_are_no_use(two, tmp_path) -> None:
    assert report().exit_code == 2
    assert report(tmp_path / "nothing.json").exit_code == 2
    empty = write(tmp_path / "empty.json")
    done = report(two[0], empty)
    assert done.exit_code == 2
    assert "holds no finished job" in done.output
    torn = tmp_path / "torn.json"
    torn.write_bytes(two[0].read_bytes()[:-40])
    done = report(torn)
    assert done.exit_code == 0
    assert "ends in the middle of a job" in done.output
    assert "2 of 3 jobs of the file are done" in done.output
    assert f"hipgroupgemm sweep --resume {torn} goes on" in done.output


# ---- recorded sweeps -------------------------------------------------------------------------------------------------------------


def test_recorded_sweeps_of_two_versions() -> None:
    """Both were made by the real command; `sweep_engine` says how. Their times are their own, so they are read here a second way."""
    paths = [DATA / "old.jsonl", DATA / "new.jsonl"]
    old, new = ([json.loads(line) for line in path.read_text().splitlines()[1:]] for path in paths)
    found = compare(*series_of([read_sweep(path) for path in paths]))
    names = ("class", "m", "k", "n", "e")
    times = [{tuple(job["job"][name] for name in names): job["best"] for job in jobs} for jobs in (old, new)]
    assert len(times[0]) == 4
    ratios = {problem: best["median_ms"] / times[1][problem]["median_ms"] for problem, best in times[0].items()}
    assert {pair.job.problem[:5]: ratio for pair, ratio in found.pairs} == pytest.approx(ratios)
    assert {pair.not_comparable for pair, _ in found.pairs} == {"drift"}  # the machine was busier once: its ceilings were others
    assert all(pair.changed and (pair.base_winner, pair.other_winner) == ("double tile_64", "double tile_128") for pair, _ in found.pairs)
    assert {(f.algorithm, f.before, f.after) for f in found.newly_wrong} == {("stream_k", "ok", "crashed")}
    assert {(f.algorithm, f.before, f.after) for f in found.newly_right} == {("tile_256", "wrong", "ok")}
    assert (found.new, found.missing) == ({"double tile_512": 4}, {"double tile_32": 4})
    done = report(*paths)
    assert done.exit_code == 1
    assert "cpu: AMD EPYC; hipgroupgemm 0.1.0, numpy 2.4.6, double 1" in done.output
    assert "newly wrong: 4" in done.output
    assert report(DATA / "new.jsonl").exit_code == 0


def test_recorded_sweeps_are_whole_files() -> None:
    for name in ("old.jsonl", "new.jsonl"):
        found = read_sweep(DATA / name)
        assert found.done == found.header.jobs == 4
        assert not found.torn
