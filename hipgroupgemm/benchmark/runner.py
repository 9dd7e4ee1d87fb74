"""Runs workloads: every contender on the same operands, interleaved, cold, poisoned and checked."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.api import config_for_ragged_dot
from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.benchmark.baselines import BASELINES, PADDED, Operands
from hipgroupgemm.benchmark.judge import CheckResult, Judge
from hipgroupgemm.benchmark.labs import Lab
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass, Sizes
from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.plan import GroupedMatmulPlan

__all__ = ["FINE", "Job", "Row", "Runner", "make_operands", "usable_backends"]

FINE = ("ok", "refused", "out of memory")
"""The states of a row that are no failure of a backend."""

_BUDGET_MS = 250.0
_ROUNDS = (3, 15)


@dataclasses.dataclass(frozen=True)
class Job:
    """One problem to run: a class at a shape with group sizes.

    Attributes:
        kind, shape: the class and the shape, scaled already.
        sizes: (E,) int32, they sum to at most shape.m. distribution: their name.
    """

    kind: RaggedDotClass
    shape: MoEShape
    sizes: Sizes
    distribution: str


@dataclasses.dataclass
class Row:
    """One contender's result on one problem. Times are milliseconds, memory is bytes, None is what there is no value for.

    Attributes:
        model, ragged_dot_class, m, k, n, e, scale, distribution, rows, dtype: the problem; m, k and n are divided by scale already, rows
            is the sum of the group sizes.
        backend, algorithm: who ran it; baseline is whether that is one of the baselines.
        status: "ok", "wrong", "refused", "out of memory" or "failed". detail: why, where it is not ok.
        median_ms, min_ms, repetitions: of the timed calls.
        tflops: the operations that the group sizes ask for, by the median; the padded baselines' superfluous ones do not count.
        floor_ms, floor_fraction: the least time by the measured ceilings, and that over the median.
        speedup: the padded dot's median over this one's.
        peak_extra_bytes: most bytes held in a call beyond the operands and out, setting up included.
        error, error_limit, checked: relative Frobenius error against float64, what is right at the most, how much was compared.
    """

    model: str
    ragged_dot_class: str
    m: int
    k: int
    n: int
    e: int
    scale: int
    distribution: str
    rows: int
    dtype: str
    backend: str
    algorithm: str
    baseline: bool
    status: str = "ok"
    detail: str = ""
    median_ms: float | None = None
    min_ms: float | None = None
    repetitions: int = 0
    tflops: float | None = None
    floor_ms: float | None = None
    floor_fraction: float | None = None
    speedup: float | None = None
    peak_extra_bytes: int | None = None
    error: float | None = None
    error_limit: float | None = None
    checked: str = ""


class _Contender:
    """A backend or a baseline on one problem: set up on its first run, so that the memory of setting up is seen."""

    def __init__(self, row: Row, run: Callable[[], object], close: Callable[[], None]) -> None:
        self.row, self.run, self.close = row, run, close
        self.times: list[float] = []
        self.rounds = 0

    def fail(self, status: str, error: BaseException) -> None:
        self.row.status, self.row.detail = status, f"{error}" or type(error).__name__


def usable_backends(config: GroupedGemmConfig, lab: Lab) -> list[str]:
    """The registered backends that run a config on the lab's device, in their order."""
    usable = []
    for name in backend_names():
        try:
            select_backend(config, lab.device, name)
        except NotImplementedError:
            continue
        usable.append(name)
    return usable


def make_operands(lab: Lab, job: Job, dtype: np.dtype[Any], seed: int) -> Operands:
    """Fresh random normal operands for a job, and an out full of NaN.

    8-bit operands' rhs is scaled by the contraction length ** -0.5: sums of products of unit numbers do not fit those types.

    Raises:
        MemoryError: the device has not room for the three.
    """
    lhs_shape, rhs_shape, out_shape = job.kind.shapes(job.shape)
    needed = sum(math.prod(shape) for shape in (lhs_shape, rhs_shape, out_shape)) * dtype.itemsize
    free = lab.free_bytes()
    if needed > free:  # said before the system is driven to kill the process
        raise MemoryError(f"lhs, rhs and out take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    rng = np.random.default_rng(seed)
    length = job.kind.contraction_length(job.shape, job.sizes)
    std = max(length, 1) ** -0.5 if dtype.itemsize == 1 else 1.0
    lhs, rhs = lab.normal(lhs_shape, dtype, rng), lab.normal(rhs_shape, dtype, rng, std)
    return Operands(job.kind, job.shape, lhs, rhs, lab.from_host(job.sizes), job.sizes, lab.empty_nan(out_shape, dtype))


class Runner:
    """Runs jobs on one lab.

    Args:
        lab: where.
        dtype: the operands' and the output's element type.
        ceilings: the machine's, for the floor.
        backends: names, which then run or have a refused row; None for all that can run a problem.
        baselines: names from `BASELINES`.
        seed: of operands and of the judge's sample.
        repetitions: timed calls of each contender; None for as many of 3 to 15 as fit a quarter of a second.
        time_limit: seconds that `run` may take, about; with repetitions=None, calls are left out where it would take longer, but one.
    """

    def __init__(
        self,
        lab: Lab,
        dtype: np.dtype[Any],
        ceilings: Roofline,
        *,
        backends: Sequence[str] | None = None,
        baselines: Sequence[str] = tuple(BASELINES),
        seed: int = 0,
        repetitions: int | None = None,
        time_limit: float | None = None,
    ) -> None:
        self.lab, self.dtype, self.ceilings = lab, dtype, ceilings
        self.backends, self.baselines = backends, tuple(baselines)
        self.seed, self.repetitions, self.time_limit = seed, repetitions, time_limit
        self._budget_ms = _BUDGET_MS

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """The rows of each job as it is finished. Stopping the iteration leaves nothing behind."""
        started = time.monotonic()
        works = [1.0 + job.shape.padded_flops / 1e10 for job in jobs]
        for index, job in enumerate(jobs):
            if self.time_limit is not None:
                left = max(self.time_limit - (time.monotonic() - started), 0.0)
                share = left * works[index] / sum(works[index:])
                # half of a job's share is for timed calls, the rest for making, warming up and judging
                self._budget_ms = min(_BUDGET_MS, 500.0 * share / (2 + len(self.baselines)))
            yield self.run_job(job, self.seed + index)

    def run_job(self, job: Job, seed: int) -> list[Row]:
        """One job's rows: backends first, then baselines; all "out of memory" where the operands themselves do not fit."""
        try:
            operands = make_operands(self.lab, job, self.dtype, seed)
        except MemoryError as error:
            return self._without_operands(job, error)
        config = config_for_ragged_dot(operands.lhs, operands.rhs, operands.sizes, job.kind.dimension_numbers, out=operands.out)
        floor_ms = self.ceilings.floor_ms(config.flops(job.sizes), config.min_bytes(job.sizes))
        judge = Judge(self.lab, operands, seed)
        contenders = [self._backend(job, operands, config, name) for name in self.backends or usable_backends(config, self.lab)]
        contenders += [self._baseline(job, operands, name) for name in self.baselines]
        try:
            for contender in contenders:
                if contender.row.status == "ok":
                    self._first_run(contender, operands, judge)
            self._timed_runs(contenders, operands, judge)
        finally:
            for contender in contenders:
                contender.close()
        rows = [contender.row for contender in contenders]
        for contender in contenders:
            _fill(contender, config.flops(job.sizes), floor_ms)
        padded = next((row.median_ms for row in rows if row.backend == PADDED and row.status == "ok"), None)
        for row in rows:
            if padded is not None and row.median_ms is not None:
                row.speedup = padded / row.median_ms
        return rows

    def _without_operands(self, job: Job, error: MemoryError) -> list[Row]:
        lhs, rhs, _ = (ArraySpec(shape, self.dtype, device=self.lab.device) for shape in job.kind.shapes(job.shape))
        config = config_for_ragged_dot(lhs, rhs, ArraySpec(job.sizes.shape, job.sizes.dtype), job.kind.dimension_numbers)
        rows = [self._row(job, name, "", baseline=False) for name in self.backends or usable_backends(config, self.lab)]
        rows += [self._row(job, name, BASELINES[name][0], baseline=True) for name in self.baselines]
        for row in rows:
            row.status, row.detail = "out of memory", f"the operands: {error}"
        return rows

    # ---- contenders ----------------------------------------------------------------------------------------------------------

    def _row(self, job: Job, backend: str, algorithm: str, baseline: bool) -> Row:
        s = job.shape
        total = int(job.sizes.sum(dtype=np.int64))
        return Row(
            model=s.label,
            ragged_dot_class=job.kind.name,
            m=s.m,
            k=s.k,
            n=s.n,
            e=s.e,
            scale=s.scale,
            distribution=job.distribution,
            rows=total,
            dtype=self.dtype.name,
            backend=backend,
            algorithm=algorithm,
            baseline=baseline,
        )

    def _backend(self, job: Job, operands: Operands, config: GroupedGemmConfig, name: str) -> _Contender:
        row = self._row(job, name, "", baseline=False)
        plans: list[GroupedMatmulPlan] = []

        def run() -> None:
            if not plans:
                plans.append(GroupedMatmulPlan(config, name, self.lab.device, use_store=False))  # the backend's own guess
                row.algorithm = plans[0].algorithm.name
            plans[0].execute(operands.lhs, operands.rhs, operands.sizes, out=operands.out)

        def close() -> None:
            for plan in plans:
                plan.close()

        contender = _Contender(row, run, close)
        reason = get_backend(name).can_handle(config, self.lab.device)
        if reason is not None:
            contender.fail("refused", NotImplementedError(reason))
        return contender

    def _baseline(self, job: Job, operands: Operands, name: str) -> _Contender:
        note, function = BASELINES[name]
        return _Contender(self._row(job, name, note, baseline=True), lambda: function(self.lab, operands), lambda: None)

    # ---- runs ----------------------------------------------------------------------------------------------------------------

    def _guarded(self, contender: _Contender, call: Callable[[], Any]) -> Any:
        """`call`'s value; an exception becomes the row's status."""
        try:
            return call()
        except MemoryError as error:
            contender.fail("out of memory", error)
        except NotImplementedError as error:
            contender.fail("refused", error)
        except Exception as error:  # a broken backend is a row of the table, not the end of it
            contender.fail("failed", error)
        return None

    def _first_run(self, contender: _Contender, operands: Operands, judge: Judge) -> None:
        """Warms up, sees the memory, checks the result."""
        lab, row = self.lab, contender.row
        lab.fill_nan(operands.out)
        row.peak_extra_bytes = self._guarded(contender, lambda: lab.peak_extra(contender.run))
        if row.status == "ok":
            self._judge(contender, judge.check(operands.out))

    def _judge(self, contender: _Contender, verdict: CheckResult) -> None:
        row = contender.row
        row.error = verdict.error if row.error is None else max(row.error, verdict.error)
        row.error_limit, row.checked = verdict.limit, verdict.checked
        if verdict.fault:
            row.status, row.detail = "wrong", verdict.fault

    def _timed_runs(self, contenders: Sequence[_Contender], operands: Operands, judge: Judge) -> None:
        """Rounds in which the contenders take turns, the first of them another each time, so that drift hits all alike.

        Slow contenders leave early: their share is smaller, not their place. Each one's last result is checked again. A contender whose
        first result was wrong is not timed: what a wrong result costs is no news.
        """
        runners = [contender for contender in contenders if contender.row.status == "ok"]
        for contender in runners:
            contender.rounds = self.repetitions or _ROUNDS[1]
        done = 0
        while any(done < contender.rounds for contender in runners):
            turn = done % max(len(runners), 1)
            for contender in runners[turn:] + runners[:turn]:
                if done < contender.rounds and contender.row.status == "ok":
                    self._timed_run(contender, operands, judge)
            done += 1

    def _timed_run(self, contender: _Contender, operands: Operands, judge: Judge) -> None:
        lab = self.lab
        started = time.perf_counter()
        lab.fill_nan(operands.out)
        lab.flush()
        prepared_ms = (time.perf_counter() - started) * 1e3
        took = self._guarded(contender, lambda: lab.time(contender.run))
        if took is None:
            return
        contender.times.append(took)
        if self.repetitions is None:
            fitting = int(self._budget_ms // max(took + prepared_ms, 1e-3))
            least = _ROUNDS[0] if self._budget_ms == _BUDGET_MS else 1
            contender.rounds = min(contender.rounds, max(fitting, least))
        if len(contender.times) >= contender.rounds:
            self._judge(contender, judge.check(operands.out))


def _fill(contender: _Contender, flops: int, floor_ms: float) -> None:
    row = contender.row
    row.floor_ms = floor_ms
    row.repetitions = len(contender.times)
    if row.status == "ok" and contender.times:
        row.median_ms, row.min_ms = statistics.median(contender.times), min(contender.times)
        row.tflops = flops / row.median_ms / 1e9
        row.floor_fraction = floor_ms / row.median_ms
