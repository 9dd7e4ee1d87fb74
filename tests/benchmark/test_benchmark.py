"""The benchmark's parts: baselines that are right, a check that finds what is wrong, runs in turns, ratios."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from ratios import bare_loop, bare_loop_ratio, measure_ratios, padded_ratio

from hipgroupgemm import GroupedMatmulPlan, register_backend, unregister_backend
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.benchmark.baselines import BASELINES, Baseline, array_library
from hipgroupgemm.benchmark.rows import Row
from hipgroupgemm.benchmark.runner import Job, Runner
from hipgroupgemm.measure.harness import HostHarness, harness_for
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.verify import SizeSet, Verifier
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import Device, numpy_view
from hipgroupgemm.store.store import TuningStore

SHAPE = MoEShape(37, 19, 23, 5, label="odd")
SIZES = [[8, 8, 7, 7, 7], [0, 30, 0, 1, 0], [0, 0, 0, 0, 0], [3, 0, 11, 2, 5], [37, 0, 0, 0, 0]]
ROOFLINE = Roofline(1e11, 1e10, "a product", "a copy")
FLOAT32 = np.dtype(np.float32)


class SmallHarness(HostHarness):
    """One with caches that are soon flushed: these problems are tiny."""

    def __init__(self) -> None:
        super().__init__()
        self._trash = np.zeros(1000, np.float32)


def job(name: str = "fwd_wi", sizes: list[int] | None = None, shape: MoEShape = SHAPE) -> Job:
    return Job(CLASSES[name], shape, np.array(sizes or SIZES[3], np.int32), "test")


def verdict_of(function, a_job: Job, dtype: str = "float32", *, poison: bool = False, memory: int | None = None) -> str:
    """What the check says of a function on a job's operands; with NaN in rows that no group covers, where they are wanted."""
    harness = SmallHarness()
    config = config_of(a_job.kind, a_job.shape, dtype)
    one = SizeSet("test", a_job.sizes, adversarial=poison)
    verifier = Verifier(harness, config, [one], seed=int(np.random.SeedSequence().entropy % 2**31))
    if memory is not None:
        harness.free_bytes = lambda: memory
    return verifier.check(0, lambda: Baseline(function, verifier)).reason


# ---- baselines -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_are_right(baseline: str, name: str, sizes: list[int]) -> None:
    """NaN in rows that no group covers does not come through; what it does in weights of empty groups is the padded dot's own affair."""
    for dtype in ("float32", "bfloat16", "float64"):
        assert verdict_of(BASELINES[baseline][1], job(name, sizes), dtype) == ""
    assert verdict_of(lambda p: None, job(name, sizes)) != ""


@pytest.mark.parametrize("name", [name for name in CLASSES if name.startswith("wgrad")])
def test_baselines_keep_nan_of_uncovered_rows_out(name: str) -> None:
    for baseline in ("loop", "padded_batch"):
        assert verdict_of(BASELINES[baseline][1], job(name), poison=True) == ""


def test_padded_baselines_say_when_memory_lacks() -> None:
    for name in ("padded_dot", "padded_batch"):
        with pytest.raises(MemoryError, match=r"the padded operand takes 0\.0 GiB, 0\.0 GiB are free"):
            verdict_of(BASELINES[name][1], job(), memory=1000)


def test_a_gpu_without_cupy_refuses_baselines_and_falls_to_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotImplementedError, match="the baselines need CuPy on cuda:0"):
        array_library(Device("cuda"))


def test_operands_that_can_not_fit_are_not_made() -> None:
    harness = SmallHarness()
    harness.free_bytes = lambda: 1000
    rows = Runner(harness, FLOAT32, ROOFLINE).run_job(job())
    assert {row.status for row in rows} == {"out of memory"}
    assert rows[0].detail == "the operands: the operands take 0.0 GiB, 0.0 GiB are free on cpu"


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
                    outer.spoil(numpy_view(arguments.pointers["out"], (exact.m * exact.n,), (4,), FLOAT32))

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
    options = {"repetitions": 2, "baselines": {"padded_dot": BASELINES["padded_dot"]}, **options}
    rows = Runner(SmallHarness(), FLOAT32, ROOFLINE, **options).run_job(a_job)
    return {row.backend: row for row in rows}


def test_rows_are_complete() -> None:
    rows = run(job("wgrad_wi"), baselines=BASELINES, repetitions=4)
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
        assert row.checked == "all 76 rows of products"  # of four slabs of 19 rows
        assert row.baseline == (row.backend in BASELINES)
    assert rows["reference"].algorithm == "numpy_matmul_a_group"
    assert rows["padded_dot"].peak_extra_bytes >= 4 * 5 * 37 * 19


def test_a_backend_is_prepared_once_where_memory_is_looked_at_in_a_second_call(registered) -> None:
    """As on a device, whose first call loads code."""
    made = []

    class Counting(ReferenceBackend):
        name = "counting"

        def prepare(self, *rest):
            made.append(1)
            return super().prepare(*rest)

    registered(Counting())
    harness = SmallHarness()
    harness.peak_bytes = lambda call: (call(), call()) and 7
    (row,) = Runner(harness, FLOAT32, ROOFLINE, ["counting"], {}, repetitions=2).run_job(job())
    assert (row.status, row.peak_extra_bytes, made) == ("ok", 7, [1])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_baselines_are_right_on_a_gpu(dtype: str) -> None:
    pytest.importorskip("cupy")
    with harness_for("cuda") as harness:
        for name in CLASSES:
            for sizes in SIZES:
                for row in Runner(harness, DTYPES[dtype], None, repetitions=2).run_job(job(name, sizes)):
                    assert (row.status, row.detail) == ("ok", ""), (row.backend, name, sizes)


def test_without_a_roofline_there_is_no_floor() -> None:
    (row,) = Runner(SmallHarness(), FLOAT32, None, baselines={}).run_job(job())
    assert (row.status, row.floor_ms, row.floor_fraction) == ("ok", None, None)


def test_what_tuning_has_stored_is_left_out_of_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is of the backends' own guesses, on whatever machine."""
    asked = []
    monkeypatch.setattr(TuningStore, "lookup", lambda *_, **__: asked.append(1))
    assert run(job("fwd_wi"))["reference"].status == "ok" and not asked
    GroupedMatmulPlan(config_of(CLASSES["fwd_wi"], SHAPE, "float32"), device="cpu").close()
    assert asked


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


class ClockHarness(SmallHarness):
    """One whose clock says what a test wants; keeps the order of the calls."""

    def __init__(self, took: float) -> None:
        super().__init__()
        self.took, self.order, self.poisoned = took, [], 0

    def time(self, call) -> float:
        self.order.append(call.__closure__[1].cell_contents if call.__closure__ else call)
        call()
        return self.took

    def poison(self, operands, fill=None) -> None:
        self.poisoned += 1
        super().poison(operands, fill)


def test_candidates_take_turns_each_on_a_poisoned_output() -> None:
    harness = ClockHarness(1.0)
    Runner(harness, FLOAT32, ROOFLINE, repetitions=6).run_job(job())
    assert len(harness.order) == 24
    rounds = [[id(one) for one in harness.order[start : start + 4]] for start in range(0, 24, 4)]
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds) and len(set(rounds[0])) == 4
    assert len({tuple(one) for one in rounds}) > 2
    assert harness.poisoned == 1 + 4 + 24


@pytest.mark.parametrize(("took", "repetitions"), [(0.1, 15), (50.0, 5), (10_000.0, 3)])
def test_slow_candidates_leave_early(took: float, repetitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("hipgroupgemm.benchmark.runner.time", clock)
    rows = Runner(ClockHarness(took), FLOAT32, ROOFLINE).run_job(job())
    assert [row.repetitions for row in rows] == [repetitions] * 4


def test_a_time_limit_leaves_one_call() -> None:
    rows = list(Runner(ClockHarness(100.0), FLOAT32, ROOFLINE, time_limit=0.0).run([job(), job("wgrad_wi")]))
    assert [[row.repetitions for row in part] for part in rows] == [[1] * 4] * 2
    assert all(row.status == "ok" for part in rows for row in part)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_other_types_run_and_are_right(dtype: str) -> None:
    for name in CLASSES:
        for row in Runner(SmallHarness(), DTYPES[dtype], ROOFLINE, repetitions=1).run_job(job(name)):
            assert (row.status, row.detail) == ("ok", ""), row.backend


# ---- ratios ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_bare_loop_computes_the_same(name: str) -> None:
    assert verdict_of(bare_loop, job(name, [8, 8, 7, 7, 7])) == ""


def test_ratios_are_of_right_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio in (bare_loop_ratio(SmallHarness(), 0.0, divisor=32), padded_ratio(SmallHarness(), 0.0, divisor=16)):
        assert not ratio.faults
        assert list(ratio.medians) == list(CLASSES)
        assert min(ratio.medians.values()) > 0
        assert ratio.name in ratio.describe()
    monkeypatch.setattr("ratios.bare_loop", lambda p: p.out.fill(0))
    assert len(bare_loop_ratio(SmallHarness(), 0.0, divisor=32).faults) == 6


@pytest.mark.parametrize("busy", [False, True])
def test_ratios_with_one_thread_come_where_the_machine_is_idle(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "ratios"
    for name in ("bare_loop_ratio", "padded_ratio"):
        monkeypatch.setattr(f"{module}.{name}", lambda *_, name=name: __import__(module).Ratio(name, {}, {}, 1.0, False))
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0 if busy else 0.0, 0.0, 0.0), raising=False)
    alone = ["bare_loop_ratio, one BLAS thread", "padded_ratio, one BLAS thread"]
    assert [ratio.name for ratio in measure_ratios(0.0)] == ["bare_loop_ratio", "padded_ratio", *(alone if not busy else [])]
