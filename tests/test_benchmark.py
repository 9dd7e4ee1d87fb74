"""The benchmark's parts: baselines that are right, a judge that finds what is wrong, runs in turns, files and plots."""

import csv
import dataclasses
import itertools
import json
import math
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from hipgroupgemm import ragged_dot_reference, register_backend, unregister_backend
from hipgroupgemm.backends.reference import ReferenceBackend, numpy_view
from hipgroupgemm.benchmark import labs
from hipgroupgemm.benchmark.baselines import BASELINES, Operands
from hipgroupgemm.benchmark.ceilings import Ceilings
from hipgroupgemm.benchmark.environment import describe
from hipgroupgemm.benchmark.judge import Judge
from hipgroupgemm.benchmark.labs import CuPyLab, NumPyLab, lab_for
from hipgroupgemm.benchmark.plots import plot_both, plot_floor, plot_speedup
from hipgroupgemm.benchmark.ratios import Ratio, bare_loop, bare_loop_ratio, padded_ratio
from hipgroupgemm.benchmark.runner import Job, Row, Runner, make_operands
from hipgroupgemm.benchmark.table import bytes_text, print_rows, write_csv, write_json
from hipgroupgemm.dtypes import DTYPES
from hipgroupgemm.tolerance import compare, tolerance_for
from hipgroupgemm.workloads import CLASSES, MoEShape

SHAPE = MoEShape(37, 19, 23, 5, label="odd")
SIZES = [[8, 8, 7, 7, 7], [0, 30, 0, 1, 0], [0, 0, 0, 0, 0], [3, 0, 11, 2, 5], [37, 0, 0, 0, 0]]
CEILINGS = Ceilings(1e11, 1e10, "a product", "a copy")
FLOAT32 = np.dtype(np.float32)


class SmallLab(NumPyLab):
    """NumPy with caches that are soon flushed: these problems are tiny."""

    def __init__(self) -> None:
        self._trash = np.zeros(1000, np.float32)


def job(name: str = "fwd_wi", sizes: list[int] | None = None, shape: MoEShape = SHAPE) -> Job:
    return Job(CLASSES[name], shape, np.array(sizes or SIZES[3], np.int32), "test")


def operands_of(a_job: Job, dtype: np.dtype = FLOAT32) -> Operands:
    return make_operands(SmallLab(), a_job, dtype, np.random.SeedSequence().entropy % 2**31)


def exact(o: Operands) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64 by the reference, and the bound of |A||B| where the product isn't zero."""
    wide = [x.astype(np.float64) for x in (o.lhs, o.rhs)]
    numbers = o.kind.dimension_numbers
    value = ragged_dot_reference(*wide, o.host_sizes, numbers, accumulate=np.float64)
    magnitude = np.sqrt(ragged_dot_reference(wide[0] ** 2, np.ones_like(wide[1]), o.host_sizes, numbers)) * np.sqrt(
        ragged_dot_reference(np.ones_like(wide[0]), wide[1] ** 2, o.host_sizes, numbers)
    )
    return value, magnitude


# ---- baselines -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_are_right(baseline: str, name: str, sizes: list[int]) -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        o = operands_of(job(name, sizes), DTYPES[dtype])
        assert np.isnan(o.out).all()
        BASELINES[baseline][1](SmallLab(), o)
        expected, magnitude = exact(o)
        length = o.kind.contraction_length(o.shape, sizes)
        tolerance = tolerance_for(dtype, length, "float64" if dtype == "float64" else "float32")
        assert compare(o.out, expected, magnitude, tolerance).verdict() == ""
        assert not o.out[magnitude == 0].any()


def test_padded_baselines_keep_nan_of_uncovered_rows_out() -> None:
    for name, baseline in itertools.product(CLASSES, BASELINES):
        o = operands_of(job(name))
        o.lhs[21:] = np.nan
        if o.contracting:
            o.rhs[21:] = 1
        BASELINES[baseline][1](SmallLab(), o)
        assert np.isfinite(o.out).all(), (name, baseline)


def test_padded_baselines_say_when_memory_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallLab, "free_bytes", lambda self: 1000)
    for name in ("padded_dot", "padded_batch"):
        with pytest.raises(MemoryError, match=r"the (masked|padded) operand takes 0\.0 GiB, 0\.0 GiB are free"):
            BASELINES[name][1](SmallLab(), operands_of(job()))


# ---- the judge -------------------------------------------------------------------------------------------------------------------


def _solved(a_job: Job) -> Operands:
    o = operands_of(a_job)
    BASELINES["loop"][1](SmallLab(), o)
    return o


@pytest.mark.parametrize("name", CLASSES)
def test_judge_finds_every_single_wrong_element(name: str) -> None:
    o = _solved(job(name))
    judge = Judge(SmallLab(), o)
    good = judge.check(o.out)
    assert (good.fault, good.checked) == ("", "all of 4 groups")
    assert 0 < good.error < good.limit
    rng = np.random.default_rng()
    for _ in range(40):
        at = tuple(rng.integers(0, o.out.shape))
        for wrong in (o.out[at] + 1e-2, np.nan):
            spoilt = o.out.copy()
            spoilt[at] = wrong
            assert judge.check(spoilt).fault, at


def test_judge_names_the_place() -> None:
    o = _solved(job("fwd_wi"))
    judge = Judge(SmallLab(), o)
    spoilt = o.out.copy()
    spoilt[4, 2] = 50  # group 2 starts at row 3
    assert judge.check(spoilt).fault.startswith("group 2: 1 of 253 elements wrong, the first at (1, 2): got 50, wanted ")
    spoilt = o.out.copy()
    spoilt[30, 0] = 1e-30
    assert judge.check(spoilt).fault.startswith("rows that no group covers: 1 of")
    o = _solved(job("wgrad_wo"))
    spoilt = o.out.copy()
    spoilt[1] = np.nan
    assert Judge(SmallLab(), o).check(spoilt).fault.startswith("the slab of empty group 1: 437 of 437 elements wrong")


def test_judge_samples_large_problems() -> None:
    shape = MoEShape(200, 8, 6, 40)
    sizes = [4] * 40
    sizes[7], sizes[9], sizes[11], sizes[20] = 30, 1, 0, 2
    for name in ("fwd_wi", "wgrad_wi"):
        o = _solved(job(name, sizes, shape))
        judge = Judge(SmallLab(), o, seed=3, limit=100)
        assert judge.checked == "3 of 39 groups"
        groups = {group for group, *_ in judge._expected}
        assert {7, 9} < groups
        assert judge.check(o.out).fault == ""
        starts = np.cumsum(sizes) - sizes
        unseen = next(g for g in range(40) if g not in groups and sizes[g])
        for group in (7, unseen):
            spoilt = o.out.copy()
            part = spoilt[group] if o.contracting else spoilt[starts[group] : starts[group] + sizes[group]]
            part[0, 0] = np.nan  # what is left unwritten shows in groups that were not picked, too
            assert judge.check(spoilt).fault


def test_judge_samples_rows_of_a_very_large_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hipgroupgemm.benchmark.judge._GROUP_FLOPS", 0)
    o = _solved(job("fwd_wi", [0, 37, 0, 0, 0]))
    judge = Judge(SmallLab(), o, limit=1)
    ((group, rows, expected, _),) = judge._expected
    assert (group, rows.size, expected.shape) == (1, 16, (16, 23))
    assert judge.check(o.out).fault == ""
    spoilt = o.out.copy()
    spoilt[rows[5]] += 1
    assert judge.check(spoilt).fault


# ---- the runner ------------------------------------------------------------------------------------------------------------------


class Broken(ReferenceBackend):
    """A backend that does as it is told to `out`, after or instead of computing."""

    name = "broken"

    def __init__(self, spoil, compute: bool = True, from_call: int = 0) -> None:
        self.spoil, self.compute, self.from_call, self.calls = spoil, compute, from_call, 0

    def prepare(self, config, device, algorithm, stream):
        inner = super().prepare(config, device, algorithm, stream)
        outer = self

        class Executable(type(inner)):
            def execute(self, arguments) -> None:
                outer.calls += 1
                if outer.compute:
                    inner.execute(arguments)
                if outer.calls > outer.from_call:
                    exact = arguments.config  # this call's extents; config is the plan's key, which reaches further
                    outer.spoil(numpy_view(arguments.out, (exact.m * exact.n,), (4,), FLOAT32))

        return Executable(config, algorithm)


@pytest.fixture
def registered():
    """Registers backends for one test."""
    names = []

    def register(backend):
        register_backend(backend, ("cpu",))
        names.append(backend.name)
        return backend

    yield register
    for name in names:
        unregister_backend(name)


def run(a_job: Job, **options) -> dict[str, Row]:
    options = {"repetitions": 2, "baselines": ("padded_dot",), **options}
    rows = Runner(SmallLab(), FLOAT32, CEILINGS, **options).run_job(a_job, 0)
    return {row.backend: row for row in rows}


def test_rows_are_complete() -> None:
    rows = run(job("wgrad_wi"), baselines=tuple(BASELINES), repetitions=4)
    assert list(rows) == ["reference", *BASELINES]
    for row in rows.values():
        assert (row.status, row.detail, row.repetitions) == ("ok", "", 4)
        assert (row.ragged_dot_class, row.m, row.k, row.n, row.e, row.rows, row.dtype) == ("wgrad_wi", 37, 19, 23, 5, 21, "float32")
        flops, nbytes = 2 * 21 * 19 * 23, 4 * (21 * 19 + 21 * 23 + 5 * 19 * 23)
        assert row.floor_ms == pytest.approx(max(flops / 1e11, nbytes / 1e10) * 1e3)
        assert row.tflops == pytest.approx(flops / row.median_ms / 1e9)
        assert row.floor_fraction == pytest.approx(row.floor_ms / row.median_ms)
        assert row.speedup == pytest.approx(rows["padded_dot"].median_ms / row.median_ms)
        assert 0 < row.min_ms <= row.median_ms
        assert 0 < row.error < row.error_limit
        assert row.checked == "all of 4 groups"
        assert row.baseline == (row.backend in BASELINES)
    assert rows["reference"].algorithm == "numpy_matmul_a_group"
    assert rows["padded_dot"].peak_extra_bytes >= 4 * 5 * 37 * 19


@pytest.mark.parametrize(
    "backend",
    [
        Broken(lambda out: out.__setitem__(0, out[0] + 0.1)),
        Broken(lambda out: None, compute=False),
        Broken(lambda out: out.__setitem__(-1, 1e-20)),
        Broken(lambda out: out.__imul__(1.001)),
        Broken(lambda out: out.__setitem__(3, np.nan), from_call=2),
    ],
    ids=["one element", "writes nothing", "the tail", "all a little", "right only at first"],
)
def test_wrong_backends_are_found(backend: Broken, registered) -> None:
    registered(backend)
    backend.calls = 0
    row = run(job(sizes=[9, 9, 9, 9, 0]), backends=["broken"])["broken"]
    assert row.status == "wrong"
    assert row.detail
    assert row.median_ms is None
    assert row.speedup is None
    assert backend.calls == (1 if not backend.from_call else 3)


class Refusing(ReferenceBackend):
    name = "refusing"

    def can_handle(self, config, device):
        return "not on a Sunday"


class Raising(ReferenceBackend):
    name = "raising"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def prepare(self, config, device, algorithm, stream):
        raise self.error


def test_refusals_are_rows_only_where_named(registered) -> None:
    registered(Refusing())
    assert "refusing" not in run(job())
    row = run(job(), backends=["refusing"])["refusing"]
    assert (row.status, row.detail, row.median_ms, row.error) == ("refused", "not on a Sunday", None, None)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("call 7"), "failed"), (MemoryError("call 7"), "out of memory"), (NotImplementedError("call 7"), "refused")],
)
def test_exceptions_become_rows(error: Exception, status: str, registered) -> None:
    registered(Raising(error))
    rows = run(job(), backends=["raising", "reference"])
    assert (rows["raising"].status, rows["raising"].detail) == (status, "call 7")
    assert rows["reference"].status == "ok"


def test_ctrl_c_goes_through(registered) -> None:
    registered(Raising(KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run(job(), backends=["raising"])


class ClockLab(SmallLab):
    """A lab whose clock says what a test wants; keeps the order of the calls."""

    def __init__(self, took: float) -> None:
        super().__init__()
        self.took, self.order, self.poisoned = took, [], 0

    def time(self, call) -> float:
        self.order.append(call)
        call()
        return self.took

    def fill_nan(self, array) -> None:
        self.poisoned += 1
        super().fill_nan(array)


def test_contenders_take_turns_each_on_a_poisoned_output() -> None:
    lab = ClockLab(1.0)
    Runner(lab, FLOAT32, CEILINGS, repetitions=6).run_job(job(), 0)
    rounds = [lab.order[start : start + 4] for start in range(0, 24, 4)]
    assert len(lab.order) == 24
    assert all(len(set(one)) == 4 for one in rounds)
    assert len({one[0] for one in rounds}) == 4
    assert lab.poisoned == 1 + 4 + 24


@pytest.mark.parametrize(("took", "repetitions"), [(0.1, 15), (50.0, 5), (10_000.0, 3)])
def test_slow_contenders_leave_early(took: float, repetitions: int) -> None:
    lab = ClockLab(took)
    rows = Runner(lab, FLOAT32, CEILINGS).run_job(job(), 0)
    assert [row.repetitions for row in rows] == [repetitions] * 4


def test_a_time_limit_leaves_one_call() -> None:
    rows = list(Runner(ClockLab(100.0), FLOAT32, CEILINGS, time_limit=0.0).run([job(), job("wgrad_wi")]))
    assert [[row.repetitions for row in part] for part in rows] == [[1] * 4] * 2
    assert all(row.status == "ok" for part in rows for row in part)


def test_operands_are_fresh_and_follow_the_seed() -> None:
    one, same, other = (make_operands(SmallLab(), job(), FLOAT32, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.lhs, same.lhs)
    assert (one.lhs != other.lhs).any()
    assert abs(one.rhs.std() - 1) < 0.1
    assert abs(make_operands(SmallLab(), job(), DTYPES["float8_e4m3fn"], 0).rhs.astype(float).std() - 19**-0.5) < 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_other_types_run_and_are_right(dtype: str) -> None:
    for name in CLASSES:
        for row in Runner(SmallLab(), DTYPES[dtype], CEILINGS, repetitions=1).run_job(job(name), 0):
            assert (row.status, row.detail) == ("ok", ""), row.backend


# ---- labs ------------------------------------------------------------------------------------------------------------------------


def test_numpy_lab_measures_memory_and_time() -> None:
    lab = SmallLab()
    assert 8e6 <= lab.peak_extra(lambda: np.ones(10**6)) < 8.1e6
    assert lab.peak_extra(lambda: None) < 10_000
    assert 19 < lab.time(lambda: __import__("time").sleep(0.02)) < 2000
    assert lab.free_bytes() > 2**20
    assert lab.copy_rate(2**20) > 1e6
    array = lab.empty_nan((3, 2), DTYPES["bfloat16"])
    assert np.isnan(array.astype(np.float32)).all()


def test_describe_names_machine_and_versions() -> None:
    facts = describe(SmallLab())
    assert facts["device"].startswith("cpu: ")
    assert facts["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__
    assert {"hipgroupgemm", "python"} <= set(facts["versions"])
    assert isinstance(facts["blas"], str)


class FakeEvent:
    clock = 0.0

    def record(self) -> None:
        FakeEvent.clock += 1.5
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        pass


def fake_cupy(hip: bool, devices: int = 1) -> types.ModuleType:
    """A module with CuPy's names over NumPy: enough to run the lab's own code."""
    module = types.ModuleType("cupy")
    for name in (
        "empty",
        "zeros",
        "zeros_like",
        "ones",
        "asarray",
        "matmul",
        "copyto",
        "where",
        "arange",
        "cumsum",
        "searchsorted",
        "minimum",
    ):
        setattr(module, name, getattr(np, name))
    module.asnumpy = np.asarray
    module.__version__ = "14.0.0"
    hooks = []

    class MemoryHook:
        def __enter__(self):
            hooks.append(self)
            return self

        def __exit__(self, *_) -> None:
            hooks.remove(self)

    class RandomState(np.random.RandomState):
        def standard_normal(self, size, dtype):
            return super().standard_normal(size).astype(dtype)

    device = types.SimpleNamespace(id=0, attributes={"L2CacheSize": 4096})
    runtime = types.SimpleNamespace(
        is_hip=hip,
        getDeviceCount=lambda: devices,
        memGetInfo=lambda: (10**9, 2 * 10**9),
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
        getDeviceProperties=lambda index: {"name": b"Accelerator", "gcnArchName": b"gfx942:sramecc+" if hip else b""},
    )
    stream = types.SimpleNamespace(synchronize=lambda: None)
    module.cuda = types.SimpleNamespace(
        runtime=runtime,
        Device=lambda: device,
        Event=FakeEvent,
        MemoryHook=MemoryHook,
        get_elapsed_time=lambda start, end: end.at - start.at,
        get_current_stream=lambda: stream,
    )
    module.random = types.SimpleNamespace(RandomState=RandomState)
    module.get_default_memory_pool = lambda: types.SimpleNamespace(free_bytes=lambda: 5, free_all_blocks=lambda: None)
    module.hooks = hooks
    return module


@pytest.mark.parametrize("hip", [False, True])
def test_cupy_lab_by_a_stand_in(hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(hip)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(labs, "_MEBI", 1024)
    with lab_for("auto") as lab:
        assert isinstance(lab, CuPyLab)
        assert str(lab.device) == ("rocm:0" if hip else "cuda:0")
        assert not lab.scales
        assert lab.default_dtype == "bfloat16"
        assert lab.time(lambda: None) == 1.5
        lab.flush()
        assert lab.free_bytes() == 10**9 + 5
        assert lab.copy_rate(4000) == pytest.approx(2 * 4000 / 1.5e-3)
        facts = describe(lab)
        assert facts["device"].endswith(": Accelerator")
        assert facts.get("architecture") == ("gfx942:sramecc+" if hip else None)

        def allocate() -> None:
            (hook,) = cupy.hooks
            hook.malloc_postprocess(device_id=0, size=90, mem_size=100, mem_ptr=1, pmem_id=1)
            hook.malloc_postprocess(device_id=0, size=90, mem_size=200, mem_ptr=2, pmem_id=2)
            hook.free_postprocess(device_id=0, mem_size=100, mem_ptr=1, pmem_id=1)
            hook.free_postprocess(device_id=0, mem_size=999, mem_ptr=7, pmem_id=7)  # older than the hook
            hook.malloc_postprocess(device_id=0, size=90, mem_size=50, mem_ptr=3, pmem_id=3)

        assert lab.peak_extra(allocate) == 300
        for name in CLASSES:
            o = make_operands(lab, job(name), FLOAT32, 1)
            judge = Judge(lab, o)
            for baseline in BASELINES.values():
                lab.fill_nan(o.out)
                baseline[1](lab, o)
                assert judge.check(o.out).fault == ""


def test_labs_say_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy is not usable .*hipgroupgemm\[rocm\]"), lab_for("gpu"):
        pass
    with lab_for("auto") as lab:
        assert isinstance(lab, NumPyLab)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(True, devices=0))
    with pytest.raises(RuntimeError, match="CuPy finds no device"), lab_for("gpu"):
        pass


# ---- tables, files, plots --------------------------------------------------------------------------------------------------------


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
    for word in ("WRONG", "1/8", "E=128", "160 MiB", "1.23", "21.0x", "2.0e-07", "0.4", "padded_dot", "wgrad_wo"):
        assert word in text, word
    assert "…" not in text
    assert "reference, qwen3-30b-a3b fwd_wi: wrong: group 3: 1 of 9 elements wrong [0, 1]" in text
    assert ("numpy_matmul_a_group" in text) == (width > 80)
    console.file.close()


def test_csv_and_json_come_back(tmp_path) -> None:
    context = {"seed": 3, "device": "cpu: x", "versions": {"numpy": "2", "python": "3"}}
    rows = _rows()
    write_csv(tmp_path / "a.csv", rows, context)
    with open(tmp_path / "a.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    assert found[0]["detail"] == "group 3: 1 of 9 elements wrong [0, 1]"
    assert found[0]["median_ms"] == ""
    assert (float(found[2]["speedup"]), found[2]["seed"], found[2]["versions"]) == (21.0, "3", "numpy 2; python 3")
    write_json(tmp_path / "a.json", rows, context)
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["versions"] == context["versions"]
    assert data["rows"][0]["error"] == "nan"
    assert {**data["rows"][0], "error": None} == {**dataclasses.asdict(rows[0]), "error": None}
    assert data["rows"][5] == dataclasses.asdict(rows[5])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, _rows(), {})
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
    for plot in (plot_speedup, plot_floor, plot_both):
        plot(rows, tmp_path / "a.png", "a note")
        with Image.open(tmp_path / "a.png") as image:
            assert min(image.size) >= 600
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20
        plot(rows, tmp_path / "a.svg", "a note")
        assert (tmp_path / "a.svg").read_text().count("<path") > 12
    with pytest.raises(ValueError, match="none has the value to plot"):
        plot_speedup([row for row in rows if row.baseline], tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


# ---- ratios ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_bare_loop_computes_the_same(name: str) -> None:
    sizes = [8, 8, 7, 7, 7]
    o = operands_of(job(name, sizes))
    bare_loop(o, list(itertools.pairwise([0, *np.cumsum(sizes).tolist()])))
    assert Judge(SmallLab(), o).check(o.out).fault == ""


def test_ratios_are_of_right_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio in (bare_loop_ratio(SmallLab(), 0.0, divisor=32), padded_ratio(SmallLab(), 0.0, divisor=16)):
        assert not ratio.faults
        assert list(ratio.medians) == list(CLASSES)
        assert min(ratio.medians.values()) > 0
        assert Ratio.from_dict(json.loads(json.dumps(ratio.as_dict()))) == ratio
        assert ratio.name in ratio.describe()
    monkeypatch.setattr("hipgroupgemm.benchmark.ratios.bare_loop", lambda o, bounds: o.out.fill(0))
    assert len(bare_loop_ratio(SmallLab(), 0.0, divisor=32).faults) == 6


def test_ratio_sides() -> None:
    slower = Ratio("a", {"x": 1.0, "y": 1.44}, {"x": 1.0}, 1.1, larger=False)
    assert slower.value == pytest.approx(1.2)
    assert not slower.met
    assert "NOT met" in slower.describe()
    assert dataclasses.replace(slower, larger=True).met
    assert dataclasses.replace(slower, limit=1.3).met
