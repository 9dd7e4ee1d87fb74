"""Runs workloads: every candidate on the same operands, in turns, cold, poisoned and checked, by the harness and the timer of tuning."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Executable
from hipgroupgemm.benchmark.baselines import BASELINES, PADDED, Baseline
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.base import Harness
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.timer import Timed, time_rounds
from hipgroupgemm.measure.verify import Outcome, SizeSet, Verifier
from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass, Sizes, config_of

__all__ = ["FINE", "Candidate", "Job", "Row", "Runner", "usable_backends"]

FINE = ("ok", "refused", "out of memory")
"""The states of a row that are no failure of a backend."""

_BUDGET_SECONDS = 0.25
_ROUNDS = (3, 15)
_CHECK_FLOPS = 2e8  # of a check on a CPU: it is done twice for each row


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
    """One candidate's result on one problem. Times are milliseconds, memory is bytes, None is what there is no value for.

    Attributes:
        model, ragged_dot_class, m, k, n, e, scale, distribution, rows, dtype: the problem; m, k and n are divided by scale already, rows
            is the sum of the group sizes.
        backend, algorithm: who ran it; baseline is whether that is one of the baselines.
        status: "ok", "wrong", "refused", "out of memory" or "failed". detail: why, where it is not ok.
        median_ms, min_ms, repetitions: of the timed calls.
        tflops: the operations that the group sizes ask for, by the median; the padded baselines' superfluous ones do not count.
        floor_ms, floor_fraction: the least time by the measured roofline, and that over the median.
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


class Candidate(Executable, Timed):
    """A backend, a baseline or another's call on one problem. It is prepared in its first run, so that the memory of that is seen.

    Args:
        row: where its result goes. prepare: makes its executable.
    """

    def __init__(self, row: Row, prepare: Callable[[], Executable], harness: Harness) -> None:
        Timed.__init__(self)
        self.row, self.rounds = row, 0
        self._prepare, self._harness = prepare, harness
        self._executable: Executable | None = None

    @property
    def racing(self) -> bool:
        """Whether it is right so far and has rounds left."""
        return self.row.status == "ok" and len(self.times) < self.rounds

    def itself(self) -> Executable:
        """What a `Verifier` is given to prepare it."""
        return self

    def execute(self, arguments: Arguments) -> None:
        """Runs it; the first time its memory is looked at."""
        if self._executable is None:
            self.row.peak_extra_bytes = self._harness.peak_bytes(lambda: self._first(arguments))
        else:
            self._executable.execute(arguments)

    def _first(self, arguments: Arguments) -> None:
        self._executable = self._executable or self._prepare()
        self._executable.execute(arguments)

    def check(self) -> Any:
        """The executable's."""
        return None if self._executable is None else self._executable.check()

    def explain(self) -> str:
        """The executable's."""
        return "" if self._executable is None else self._executable.explain()

    def close(self) -> None:
        """Closes the executable."""
        if self._executable is not None:
            self._executable.close()

    def take(self, step: Callable[[], Outcome]) -> Outcome:
        """A step's outcome, which goes into the row; what is raised becomes the row's status."""
        try:
            outcome = step()
        except MemoryError as error:
            return self._fail("out of memory", error)
        except NotImplementedError as error:
            return self._fail("refused", error)
        except Exception as error:  # a broken backend is a row of the table, not the end of it
            return self._fail("failed", error)
        row = self.row
        if outcome.error is not None:
            row.error = outcome.error if row.error is None else max(row.error, outcome.error)
            row.error_limit, row.checked = outcome.error_limit, outcome.amount
        if outcome.verdict:
            row.status, row.detail = "wrong", outcome.reason
        return outcome

    def _fail(self, status: str, error: BaseException) -> Outcome:
        self.row.status, self.row.detail = status, f"{error}" or type(error).__name__
        return Outcome(status, self.row.detail)


def usable_backends(config: GroupedGemmConfig, harness: Harness) -> list[str]:
    """The registered backends that run a config on the harness's device, in their order."""
    usable = []
    for name in backend_names():
        try:
            select_backend(config, harness.device, name)
        except NotImplementedError:
            continue
        usable.append(name)
    return usable


class Runner:
    """Runs jobs on one harness.

    Args:
        harness: where. dtype: the operands' and the output's element type. roofline: the machine's, for the floor.
        backends: names, which then run or have a refused row; None for all that can run a problem. Each runs its own best guess: what
            tuning has stored is left out of account.
        baselines: names from `BASELINES`.
        seed: of operands and of the check's sample.
        repetitions: timed calls of each candidate; None for as many of 3 to 15 as fit a quarter of a second.
        time_limit: seconds that `run` may take, about; with repetitions=None, calls are left out where it would take longer, but one.
    """

    def __init__(
        self,
        harness: Harness,
        dtype: np.dtype[Any],
        roofline: Roofline | None,
        *,
        backends: Sequence[str] | None = None,
        baselines: Sequence[str] = tuple(BASELINES),
        seed: int = 0,
        repetitions: int | None = None,
        time_limit: float | None = None,
    ) -> None:
        self.harness, self.dtype, self.roofline = harness, dtype, roofline
        self.backends, self.baselines = backends, tuple(baselines)
        self.seed, self.repetitions, self.time_limit = seed, repetitions, time_limit
        self._budget = _BUDGET_SECONDS

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """The rows of each job as it is finished. Stopping the iteration leaves nothing behind."""
        started = time.monotonic()
        works = [1.0 + job.shape.padded_flops / 1e10 for job in jobs]
        for index, job in enumerate(jobs):
            if self.time_limit is not None:
                left = max(self.time_limit - (time.monotonic() - started), 0.0)
                share = left * works[index] / sum(works[index:])
                # half of a job's share is for timed calls, the rest for making, warming up and checking
                self._budget = min(_BUDGET_SECONDS, 0.5 * share / (2 + len(self.baselines)))
            yield self.run_job(job, self.seed + index)

    def run_job(self, job: Job, seed: int) -> list[Row]:
        """One job's rows: backends first, then baselines; all "out of memory" where the operands themselves do not fit."""
        config = config_of(job.kind, job.shape, self.dtype.name)
        candidates = [self.backend_candidate(job, config, name) for name in self.backends or usable_backends(config, self.harness)]
        candidates += [self._baseline(job, config, name) for name in self.baselines]
        rows = [candidate.row for candidate in candidates]
        budget = _CHECK_FLOPS if self.harness.device.kind == "cpu" else None
        one = SizeSet(f"{job.distribution} sizes", job.sizes)
        try:
            verifier = Verifier(self.harness, config, [one], seed=seed, copies=1, watch=False, budget=budget)
        except MemoryError as error:
            for row in rows:
                row.status, row.detail = "out of memory", f"the operands: {error}"
            return rows
        try:
            for candidate in candidates:
                if candidate.row.status == "ok":
                    candidate.take(functools.partial(verifier.check, 0, candidate.itself))
            self.time(candidates, verifier, seed)
        finally:
            for candidate in candidates:
                candidate.close()
            verifier.close()
        floor_ms = None if self.roofline is None else self.roofline.floor_ms(config.flops(job.sizes), config.min_bytes(job.sizes))
        for candidate in candidates:
            _fill(candidate, config.flops(job.sizes), floor_ms)
        padded = next((row.median_ms for row in rows if row.backend == PADDED and row.status == "ok"), None)
        for row in rows:
            if padded is not None and row.median_ms is not None:
                row.speedup = padded / row.median_ms
        return rows

    # ---- candidates ----------------------------------------------------------------------------------------------------------

    def _row(self, job: Job, backend: str, algorithm: str, baseline: bool) -> Row:
        s = job.shape
        names = (s.label, job.kind.name, s.m, s.k, s.n, s.e, s.scale, job.distribution, int(job.sizes.sum(dtype=np.int64)))
        return Row(*names, self.dtype.name, backend, algorithm, baseline)

    def backend_candidate(self, job: Job, config: GroupedGemmConfig, name: str) -> Candidate:
        """A backend with its own best guess."""
        row, backend, device = self._row(job, name, "", baseline=False), get_backend(name), self.harness.device

        def prepare() -> Executable:
            algorithm = backend.algorithms(config.key(), device, AlgorithmLimits(max_algorithm_count=1))[0]
            row.algorithm = algorithm.name
            return backend.prepare(config.key(), device, algorithm, self.harness.stream)

        reason = backend.can_handle(config, device)
        if reason is not None:
            row.status, row.detail = "refused", reason
        return Candidate(row, prepare, self.harness)

    def _baseline(self, job: Job, config: GroupedGemmConfig, name: str) -> Candidate:
        note, function = BASELINES[name]
        return Candidate(
            self._row(job, name, note, baseline=True), lambda: Baseline(self.harness, config, job.sizes, function), self.harness
        )

    # ---- times ---------------------------------------------------------------------------------------------------------------

    def time(self, candidates: Sequence[Candidate], verifier: Verifier, seed: int) -> None:
        """Times candidates in turns. Slow ones leave early: their share is smaller, not their place. Each one's last result is checked.

        A candidate whose first result was wrong is not timed: what a wrong result costs is no news.
        """
        least = _ROUNDS[0] if self._budget == _BUDGET_SECONDS else 1
        for candidate in candidates:
            candidate.rounds = self.repetitions or _ROUNDS[1]
        turn = 0

        def once(candidate: Candidate, number: int) -> float | None:
            nonlocal turn
            turn += 1
            started = time.perf_counter()

            def last(took: float) -> bool:
                if self.repetitions is None:
                    spent = max(1e3 * (time.perf_counter() - started), took, 1e-3)
                    candidate.rounds = min(candidate.rounds, max(int(1e3 * self._budget // spent), least))
                return len(candidate.times) + 1 >= candidate.rounds

            outcome = candidate.take(lambda: verifier.time(0, turn, candidate.itself, checked=last))
            return outcome.ms if candidate.row.status == "ok" else None

        most = self.repetitions or _ROUNDS[1]
        time_rounds(candidates, once, rounds=(most, most), seed=seed)


def _fill(candidate: Candidate, flops: int, floor_ms: float | None) -> None:
    row, times = candidate.row, list(candidate.times.values())
    row.floor_ms, row.repetitions = floor_ms, len(times)
    if row.status == "ok" and times:
        row.median_ms, row.min_ms = candidate.median, min(times)
        row.tflops = flops / row.median_ms / 1e9 if math.isfinite(row.median_ms) else None
        row.floor_fraction = None if floor_ms is None else floor_ms / row.median_ms
