"""The two ratios that say whether the reference backend is worth its name, on NumPy: against the bare loop, against the padded dot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.api import config_for_ragged_dot
from hipgroupgemm.benchmark.baselines import BASELINES, PADDED, Operands
from hipgroupgemm.benchmark.judge import Judge
from hipgroupgemm.benchmark.labs import NumPyLab
from hipgroupgemm.benchmark.runner import Job, make_operands
from hipgroupgemm.measure.workloads import CLASSES, PRESETS, MoEShape, balanced_sizes, geometric_mean
from hipgroupgemm.plan import GroupedMatmulPlan

__all__ = ["Ratio", "bare_loop", "bare_loop_ratio", "on_one_thread", "padded_ratio"]

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One time over another, for each of the six classes.

    Attributes:
        name: what over what, on which shape. medians, best: class to ratio of the medians, and of the shortest times.
        limit: what the ratio is to be compared with. larger: whether it has to be larger than that, or at most that.
        faults: wrong results, for a person.
    """

    name: str
    medians: dict[str, float]
    best: dict[str, float]
    limit: float
    larger: bool
    faults: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        """The geometric mean over the classes of the ratios of medians."""
        return geometric_mean(list(self.medians.values()))

    @property
    def met(self) -> bool:
        """Whether `value` is on the wanted side of the limit."""
        return self.value > self.limit if self.larger else self.value <= self.limit

    def describe(self) -> str:
        """Two lines for a person."""
        wanted = f"wanted {'more than' if self.larger else 'at most'} {self.limit:g}"
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.medians.items())
        best = geometric_mean(list(self.best.values()))
        return (
            f"{self.name}: {self.value:.4g} ({wanted}: {'met' if self.met else 'NOT met'}), of the shortest times {best:.4g}\n"
            f"  by class: {parts}"
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ratio:
        """What `as_dict` gave."""
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**fields, "faults": tuple(fields["faults"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "value": self.value, "met": self.met}


def bare_loop(operands: Operands, bounds: Sequence[tuple[int, int]]) -> None:
    """The products of a problem's groups and nothing else: what any implementation on NumPy has to do. Bounds are host ints."""
    lhs, rhs, out = operands.lhs, operands.rhs, operands.out
    if operands.contracting:
        for group, (start, end) in enumerate(bounds):
            np.matmul(lhs[start:end].T, rhs[start:end], out=out[group])
    else:
        weights = operands.weights
        for group, (start, end) in enumerate(bounds):
            np.matmul(lhs[start:end], weights[group], out=out[start:end])


def bare_loop_ratio(lab: NumPyLab, seconds: float, seed: int = 0, divisor: int = 4) -> Ratio:
    """The reference backend's time over the bare loop's: float32, qwen3-30b-a3b with M, K and N divided by `divisor`."""
    shape = PRESETS["qwen3-30b-a3b"].shape.scaled(divisor)

    def other(operands: Operands) -> Callable[[], None]:
        ends = np.cumsum(operands.host_sizes).tolist()
        bounds = list(itertools.pairwise([0, *ends]))
        return lambda: bare_loop(operands, bounds)

    name = f"reference over the bare loop of NumPy products, {_words(shape)}"
    return _ratio(lab, name, shape, other, seconds, seed, limit=1.1, larger=False)


def padded_ratio(lab: NumPyLab, seconds: float, seed: int = 0, divisor: int = 2) -> Ratio:
    """The padded dot's time over the reference backend's for 32 experts: float32, deepseek3-test (MI300) divided by `divisor`."""
    shape = PRESETS["deepseek3-test-mi300"].shape.scaled(divisor)
    function = BASELINES[PADDED][1]

    def other(operands: Operands) -> Callable[[], None]:
        return lambda: function(lab, operands)

    return _ratio(lab, f"padded dot over reference, {_words(shape)}", shape, other, seconds, seed, limit=10.0, larger=True)


def _words(shape: MoEShape) -> str:
    return f"{shape.label} 1/{shape.scale} (M={shape.m} K={shape.k} N={shape.n} E={shape.e}), float32"


def _ratio(
    lab: NumPyLab,
    name: str,
    shape: MoEShape,
    make_other: Callable[[Operands], Callable[[], None]],
    seconds: float,
    seed: int,
    *,
    limit: float,
    larger: bool,
) -> Ratio:
    medians, best, faults = {}, {}, []
    for kind in CLASSES.values():
        job = Job(kind, shape, balanced_sizes(shape.m, shape.e), "balanced")
        operands = make_operands(lab, job, np.dtype(np.float32), seed)
        config = config_for_ragged_dot(operands.lhs, operands.rhs, operands.sizes, kind.dimension_numbers, out=operands.out)
        judge, other = Judge(lab, operands, seed), make_other(operands)
        with GroupedMatmulPlan(config, "reference", "cpu", use_store=False) as plan:

            def reference(plan: GroupedMatmulPlan = plan, o: Operands = operands) -> None:
                plan.execute(o.lhs, o.rhs, o.sizes, out=o.out)

            for call in (other, reference):  # warm-up and check
                lab.fill_nan(operands.out)
                call()
                fault = judge.check(operands.out).fault
                if fault:
                    faults.append(f"{name}: {kind.name}: {'reference' if call is reference else 'the other'}: {fault}")
            first, second = _alternate(lab, reference, other, seconds / len(CLASSES))
        pair = (second, first) if larger else (first, second)
        medians[kind.name] = statistics.median(pair[0]) / statistics.median(pair[1])
        best[kind.name] = min(pair[0]) / min(pair[1])
    return Ratio(name, medians, best, limit, larger, tuple(faults))


def _alternate(lab: NumPyLab, one: Callable[[], None], two: Callable[[], None], seconds: float) -> tuple[list[float], list[float]]:
    """Times both in turns, who is first alternating, 3 to 40 times as the seconds allow."""
    times: tuple[list[float], list[float]] = ([], [])
    spent, rounds = 0.0, 0
    while rounds < 3 or (rounds < 40 and spent < seconds * 1e3):
        for index in (0, 1) if rounds % 2 else (1, 0):
            spent += lab.time(lab.flush)
            took = lab.time((one, two)[index])
            times[index].append(took)
            spent += took
        rounds += 1
    return times


def on_one_thread(seconds: float, seed: int = 0) -> list[Ratio]:
    """Both ratios in a process of its own, in which BLAS has one thread: how many it has is settled when NumPy is imported.

    BLAS threads wait for each other at the end of every product, however small. Where other work keeps a core busy, the ratios with all
    threads measure that work; these do not.

    Raises:
        RuntimeError: the process failed; the text has its last words.
    """
    command = [sys.executable, "-m", "hipgroupgemm.benchmark.ratios", str(seconds), str(seed)]
    done = subprocess.run(command, env={**os.environ, **_ONE_THREAD}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.strip()[-500:]}")
    ratios = [Ratio.from_dict(data) for data in json.loads(done.stdout)]
    return [dataclasses.replace(ratio, name=f"{ratio.name}, one BLAS thread") for ratio in ratios]


def _main(seconds: str, seed: str) -> None:
    lab = NumPyLab()
    print(json.dumps([measure(lab, float(seconds), int(seed)).as_dict() for measure in (bare_loop_ratio, padded_ratio)]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
