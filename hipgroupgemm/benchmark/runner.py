"""Runs workloads: every candidate on the same operands, in turns, cold, poisoned and checked, by the harness and the timer of tuning."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends import backend_names, get_backend
from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Backend, Executable
from hipgroupgemm.benchmark.baselines import BASELINES, PADDED, Baseline
from hipgroupgemm.benchmark.rows import Row
from hipgroupgemm.measure.base import Harness
from hipgroupgemm.measure.check import Outcome
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.timer import Timed, time_rounds
from hipgroupgemm.measure.verify import SizeSet, Verifier
from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass, Sizes, config_of

__all__ = ["Candidate", "Job", "Runner"]

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


@dataclasses.dataclass(eq=False)
class Candidate(Timed, Executable):
    """A backend or a baseline on one problem. `make` is called in its first run, so that the memory of that is seen.

    Attributes:
        row: where its result goes. harness: where it runs. rounds: in which it takes part at the most.
    """

    row: Row
    make: Callable[[], Executable]
    harness: Harness
    rounds: int
    executable: Executable | None = None

    @property
    def racing(self) -> bool:
        """Whether it is right so far and has rounds left."""
        return self.row.status == "ok" and len(self.times) < self.rounds

    def execute(self, arguments: Arguments) -> None:
        """Runs it; the first time its memory is looked at."""
        if self.executable is not None:
            return self.executable.execute(arguments)

        def first() -> None:
            self.executable = self.executable or self.make()  # a device's memory is looked at in a second call
            self.executable.execute(arguments)

        self.row.peak_extra_bytes = self.harness.peak_bytes(first)

    def check(self) -> Any:
        """The executable's."""
        return None if self.executable is None else self.executable.check()

    def explain(self) -> str:
        """The algorithm's name."""
        return self.row.algorithm

    def close(self) -> None:
        """Closes the executable."""
        if self.executable is not None:
            self.executable.close()

    def take(self, step: Callable[..., Outcome], *arguments: Any, **options: Any) -> Outcome:
        """Takes a verifier's step with it; the outcome, or what is raised, goes into the row."""
        row = self.row
        try:
            outcome = step(*arguments, lambda: self, **options)
        except Exception as error:  # a broken backend is a row of the table, not the end of it
            kinds = ((MemoryError, "out of memory"), (NotImplementedError, "refused"), (Exception, "failed"))
            row.status = next(status for kind, status in kinds if isinstance(error, kind))
            row.detail = f"{error}" or type(error).__name__
            return Outcome(row.status, row.detail)
        if outcome.error is not None:
            row.error, row.error_limit, row.checked = max(outcome.error, row.error or 0.0), outcome.error_limit, outcome.amount
        if outcome.verdict:
            row.status, row.detail = "wrong", outcome.reason
        return outcome


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs jobs on one harness.

    Attributes:
        harness: where. dtype: the operands' and the output's element type. roofline: the machine's, for the floor.
        backends: names, which then run or have a refused row; None for all that can run a problem. Each runs its own best guess: what
            tuning has stored is left out of account.
        baselines: as in `BASELINES`. seed: of operands and of the check's sample.
        repetitions: timed calls of each candidate; None for as many of `rounds` as fit `budget` seconds.
        time_limit: seconds that `run` may take, about; with repetitions=None, calls are left out where it would take longer, but one.
    """

    harness: Harness
    dtype: np.dtype[Any]
    roofline: Roofline | None
    backends: Sequence[str] | None = None
    baselines: Mapping[str, tuple[str, Callable[[Baseline], None]]] = dataclasses.field(default_factory=BASELINES.copy)
    seed: int = 0
    repetitions: int | None = None
    rounds: tuple[int, int] = (3, 15)
    budget: float = 0.25
    time_limit: float | None = None

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """The rows of each job as it is finished. Stopping the iteration leaves nothing behind."""
        started, works = time.monotonic(), [1.0 + job.shape.padded_flops / 1e10 for job in jobs]
        for index, job in enumerate(jobs):
            runner = dataclasses.replace(self, seed=self.seed + index)
            if self.time_limit is not None:
                share = max(self.time_limit - (time.monotonic() - started), 0.0) * works[index] / sum(works[index:])
                # half of a job's share is for timed calls, the rest for making, warming up and checking
                if (budget := 0.5 * share / (2 + len(self.baselines))) < self.budget:
                    runner = dataclasses.replace(runner, budget=budget, rounds=(1, self.rounds[1]))
            yield runner.run_job(job)

    def run_job(self, job: Job) -> list[Row]:
        """One job's rows: backends first, then baselines; all "out of memory" where the operands themselves do not fit."""
        try:
            candidates = self.measure(job)
        except MemoryError as error:
            return [dataclasses.replace(row, status="out of memory", detail=f"the operands: {error}") for row, _ in self._entrants(job)]
        config = config_of(job.kind, job.shape, self.dtype.name)
        flops, least_bytes = config.flops(job.sizes), config.min_bytes(job.sizes)
        floor_ms = None if self.roofline is None else self.roofline.floor_ms(flops, least_bytes)
        right = {one.row.backend: one for one in candidates if one.row.status == "ok" and one.times}
        for one in candidates:
            one.row.floor_ms, one.row.repetitions = floor_ms, len(one.times)
        for one in right.values():
            row, median = one.row, one.median
            row.median_ms, row.min_ms, row.tflops = median, min(one.times.values()), flops / median / 1e9
            row.floor_fraction = None if floor_ms is None else floor_ms / median
            row.speedup = right[PADDED].median / median if PADDED in right else None
        return [one.row for one in candidates]

    def measure(self, job: Job) -> list[Candidate]:
        """A job's candidates, checked, and timed in turns where they are right; closed.

        Slow ones leave early: their share is smaller, not their place. Each one's last result is checked once more.

        Raises:
            MemoryError: the device has not room for the operands.
        """
        config = config_of(job.kind, job.shape, self.dtype.name)
        one = SizeSet(f"{job.distribution} sizes", job.sizes)
        budget = _CHECK_FLOPS if self.harness.device.kind == "cpu" else None
        verifier = Verifier(self.harness, config, [one], seed=self.seed, watch=False, budget=budget)
        most = self.repetitions or self.rounds[1]
        candidates = [Candidate(row, functools.partial(make, verifier), self.harness, most) for row, make in self._entrants(job)]
        try:
            for candidate in candidates:
                if candidate.racing:
                    candidate.take(verifier.check, 0)
            time_rounds(candidates, functools.partial(self._time, verifier), rounds=(most, most), seed=self.seed)
        finally:
            for candidate in candidates:
                candidate.close()
            verifier.close()
        return candidates

    def _time(self, verifier: Verifier, candidate: Candidate, number: int) -> float | None:
        started = time.perf_counter()

        def is_last(took: float) -> bool:
            if self.repetitions is None:
                spent = max(1e3 * (time.perf_counter() - started), took, 1e-3)
                candidate.rounds = min(candidate.rounds, max(int(1e3 * self.budget // spent), self.rounds[0]))
            return len(candidate.times) + 1 >= candidate.rounds

        outcome = candidate.take(verifier.time, 0, number, checked=is_last)
        return outcome.ms if candidate.row.status == "ok" else None

    def _entrants(self, job: Job) -> Iterator[tuple[Row, Callable[[Verifier], Executable]]]:
        """Who takes part: the rows, and what makes the executables."""
        s, config = job.shape, config_of(job.kind, job.shape, self.dtype.name)
        problem = (s.label, job.kind.name, *s.extents, s.scale, job.distribution, int(job.sizes.sum(dtype=np.int64)), self.dtype.name)
        for name in self.backends or backend_names():
            backend = get_backend(name)
            reason = backend.can_handle(config, self.harness.device)
            if reason is None or self.backends is not None:
                row = Row(*problem, name, "", baseline=False, status="refused" if reason else "ok", detail=reason or "")
                yield row, functools.partial(self._prepare, backend, row)
        for name, (note, function) in self.baselines.items():
            yield Row(*problem, name, note, baseline=True), functools.partial(Baseline, function)

    def _prepare(self, backend: Backend, row: Row, verifier: Verifier) -> Executable:
        key, device = verifier.config.key(), self.harness.device
        algorithm = backend.algorithms(key, device, AlgorithmLimits(max_algorithm_count=1))[0]
        row.algorithm = algorithm.name
        return backend.prepare(key, device, algorithm, self.harness.stream)
