"""The two ratios that say whether the reference backend is worth its name, on NumPy: against the bare loop, against the padded dot."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.benchmark.baselines import BASELINES, PADDED, Baseline
from hipgroupgemm.benchmark.runner import Job, Runner
from hipgroupgemm.measure.base import Harness
from hipgroupgemm.measure.distributions import balanced_sizes
from hipgroupgemm.measure.environment import blas_threads
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.timer import ratio_to
from hipgroupgemm.measure.workloads import CLASSES, PRESETS, MoEShape, geometric_mean

__all__ = ["Ratio", "bare_loop_ratio", "measure_ratios", "padded_ratio"]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One time over another, for each of the six classes.

    Attributes:
        name: what over what, on which shape. medians, best: class to the median of the ratios of equal rounds, and of the shortest times.
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
        """The geometric mean over the classes."""
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "value": self.value, "met": self.met}


def bare_loop(p: Baseline) -> None:
    """The products of a problem's groups and nothing else: what any implementation on NumPy has to do."""
    for group, (start, end) in enumerate(itertools.pairwise([0, *np.cumsum(p.host_sizes).tolist()])):
        if p.contracting:
            np.matmul(p.lhs[:, start:end], p.rhs[start:end], out=p.out[group])
        else:
            np.matmul(p.lhs[start:end], p.rhs[group], out=p.out[start:end])


def bare_loop_ratio(harness: Harness, seconds: float, seed: int = 0, divisor: int = 4) -> Ratio:
    """The reference backend's time over the bare loop's: float32, qwen3-30b-a3b with M, K and N divided by `divisor`."""
    shape = PRESETS["qwen3-30b-a3b"].scaled(divisor)
    name = f"reference over the bare loop of NumPy products, {_words(shape)}"
    return _ratio(harness, name, shape, bare_loop, seconds, seed, limit=1.1, larger=False)


def padded_ratio(harness: Harness, seconds: float, seed: int = 0, divisor: int = 2) -> Ratio:
    """The padded dot's time over the reference backend's for 32 experts: float32, deepseek3-test (MI300) divided by `divisor`."""
    shape = PRESETS["deepseek3-test-mi300"].scaled(divisor)
    return _ratio(
        harness, f"padded dot over reference, {_words(shape)}", shape, BASELINES[PADDED][1], seconds, seed, limit=10.0, larger=True
    )


def _words(shape: MoEShape) -> str:
    return f"{shape.label} 1/{shape.scale} (M={shape.m} K={shape.k} N={shape.n} E={shape.e}), float32"


def _ratio(
    harness: Harness,
    name: str,
    shape: MoEShape,
    function: Callable[[Baseline], None],
    seconds: float,
    seed: int,
    *,
    limit: float,
    larger: bool,
) -> Ratio:
    medians, best, faults = {}, {}, []
    settings = {"seed": seed, "rounds": (3, 40), "budget": seconds / len(CLASSES) / 2}
    runner = Runner(harness, np.dtype(np.float32), None, ["reference"], {"the other": ("", function)}, **settings)
    for kind in CLASSES.values():
        pair = runner.measure(Job(kind, shape, balanced_sizes(shape.m, shape.e), "balanced"))
        faults += [f"{name}: {kind.name}: {one.row.backend}: {one.row.detail}" for one in pair if one.row.status != "ok"]
        bottom, top = pair if larger else pair[::-1]
        medians[kind.name] = ratio_to(top, bottom) or float("nan")
        best[kind.name] = min(top.times.values(), default=float("nan")) / min(bottom.times.values(), default=float("nan"))
    return Ratio(name, medians, best, limit, larger, tuple(faults))


def measure_ratios(seconds: float, seed: int = 0) -> list[Ratio]:
    """Both ratios with BLAS's own threads, and with one where that can be had.

    BLAS threads wait for each other at the end of every product, however small. Where other work keeps a core busy, the ratios with all
    threads measure that work; those with one do not.
    """
    with harness_for("cpu") as harness:
        ratios = [measure(harness, seconds, seed) for measure in (bare_loop_ratio, padded_ratio)]
        if harness.note:  # it has given BLAS one thread already, or cannot
            return ratios
        with blas_threads(1) as done:
            alone = [measure(harness, seconds, seed) for measure in (bare_loop_ratio, padded_ratio)] if done else []
    return ratios + [dataclasses.replace(ratio, name=f"{ratio.name}, one BLAS thread") for ratio in alone]
