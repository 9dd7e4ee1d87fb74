"""The benchmark's parts: baselines that are right, a judge that finds what is wrong, runs in turns, files and plots."""

import itertools
import json
import types

import numpy as np
import pytest
from hipgroupgemm.benchmark.judge import Judge
from hipgroupgemm.benchmark.labs import NumPyLab

from hipgroupgemm import GroupedMatmulPlan, ragged_dot_reference, register_backend, unregister_backend
from hipgroupgemm.backends.reference import ReferenceBackend, numpy_view
from hipgroupgemm.benchmark.baselines import BASELINES, Operands
from hipgroupgemm.benchmark.ratios import Ratio, bare_loop, bare_loop_ratio, padded_ratio
from hipgroupgemm.benchmark.runner import Job, Row, Runner, make_operands
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.tolerance import compare, tolerance_for
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.store.store import TuningStore

SHAPE = MoEShape(37, 19, 23, 5, label="odd")
SIZES = [[8, 8, 7, 7, 7], [0, 30, 0, 1, 0], [0, 0, 0, 0, 0], [3, 0, 11, 2, 5], [37, 0, 0, 0, 0]]
CEILINGS = Roofline(1e11, 1e10, "a product", "a copy")
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
    operands = operands_of(job())
    monkeypatch.setattr(SmallLab, "free_bytes", lambda self: 1000)
    for name in ("padded_dot", "padded_batch"):
        with pytest.raises(MemoryError, match=r"the (masked|padded) operand takes 0\.0 GiB, 0\.0 GiB are free"):
            BASELINES[name][1](SmallLab(), operands)


def test_operands_that_can_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 4 * (37 * 19 + 5 * 19 * 23 + 37 * 23)
    monkeypatch.setattr(SmallLab, "free_bytes", lambda self: needed)
    assert operands_of(job()).lhs.shape == (37, 19)
    monkeypatch.setattr(SmallLab, "free_bytes", lambda self: needed - 1)
    rows = Runner(SmallLab(), FLOAT32, CEILINGS).run_job(job(), 0)
    assert {row.status for row in rows} == {"out of memory"}
    assert rows[0].detail == "the operands: lhs, rhs and out take 0.0 GiB, 0.0 GiB are free"


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
def test_slow_contenders_leave_early(took: float, repetitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hipgroupgemm.benchmark.runner.time", types.SimpleNamespace(perf_counter=lambda: 0.0))
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
