"""Verification of a candidate: which size sets it must be right on, and one check of it.

Every candidate that is timed has been checked on every size set: on the sizes that are tuned for and on hostile ones, on outputs full of
NaN, with poison where nothing may be read, by a judge that shares no code with any backend. A backend's promise counts for nothing.

beta other than 0 (1 among them) is checked where the config's is: plans for beta = 0 never read c, cannot be given another beta, and have
a key and tuning results of their own, as those for beta != 0 have.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.tuning.sizes import hostile_sizes, per_batch
from hipgroupgemm.tuning.unread import copy_bytes
from hipgroupgemm.tuning.workbench import OperandSet, Verdict, Workbench, layouts_of
from hipgroupgemm.views import ArrayView

__all__ = ["Outcome", "SizeSet", "check", "judge", "size_sets"]

_SCALARS = {  # name -> (alpha, beta where there is one); all are exact in every type
    "borders": (1.0, 1.0),
    "short": (-1.5, 0.5),
    "many_empty": (0.5, 1.0),
    "all_empty": (2.0, -1.5),
    "one_group": (1.0, 1.0),
}
_IN_PLACE = ("borders", "many_empty")
"""Sets that are run with c = out, where c's layout is out's: a kernel that writes a part before it has read all of c gives itself away."""


@dataclasses.dataclass(frozen=True, eq=False)
class SizeSet:
    """Group sizes and scalars that candidates are checked with.

    Attributes:
        name: for a person. sizes: host integers. alpha, beta: of the calls; beta is 0 exactly where the config's is.
        hostile: poison goes where these sizes read nothing; they are for checking only.
        group_offset: the first group that is computed. in_place: whether c is out.
    """

    name: str
    sizes: np.ndarray[Any, Any]
    alpha: float
    beta: float
    hostile: bool
    group_offset: int = 0
    in_place: bool = False

    def describe(self) -> str:
        """The set in a few words."""
        beta = f", beta={self.beta:g}{', c is out' if self.in_place else ''}" if self.beta else ""
        offset = f", group_offset={self.group_offset}" if self.group_offset else ""
        return f"{self.name} (alpha={self.alpha:g}{beta}{offset})"


def size_sets(config: GroupedGemmConfig, samples: Sequence[np.ndarray[Any, Any]]) -> list[SizeSet]:
    """The samples that are timed, then the hostile sets of a config. In BATCH, whose sizes are never read, they hold garbage."""
    on = 1.0 if config.beta else 0.0
    found = []
    for index, sizes in enumerate(samples):
        name = "tuning sizes" if len(samples) == 1 else f"tuning sizes, sample {index}"
        found.append(SizeSet(name, sizes, 1.0, on, hostile=False))
    if config.ragged_mode is RaggedDotMode.BATCH:
        garbage = np.where(np.arange(samples[0].size) % 2, np.iinfo(np.int32).max, -9).astype(np.int32).reshape(samples[0].shape)
        return [*found, SizeSet("sizes that are not read", garbage, -1.5, 0.5 * on, hostile=True)]
    in_place = bool(config.beta) and _same_layout(config)
    offsets = itertools.cycle((config.group_total - config.group_count, 0, (config.group_total - config.group_count + 1) // 2))
    for name, sizes in hostile_sizes(config.ragged_extent, config.group_total).items():
        alpha, beta = _SCALARS[name]
        one = SizeSet(name, per_batch(sizes, config), alpha, beta * on, hostile=True)
        found.append(dataclasses.replace(one, group_offset=next(offsets), in_place=in_place and name in _IN_PLACE))
    return found


def _same_layout(config: GroupedGemmConfig) -> bool:
    """Whether c may be out itself."""
    layouts = layouts_of(config)
    return layouts["c"] == layouts["out"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one step with one candidate.

    Attributes:
        verdict: "" where nothing is wrong with it so far, else one of `report.VERDICTS`.
        reason: why. error, error_limit: of the result, where it was judged. ms: where it was timed.
    """

    verdict: str = ""
    reason: str = ""
    error: float | None = None
    error_limit: float | None = None
    ms: float | None = None


Note = Callable[[str], None]
"""Called before each step with what comes: "operands", "prepare", "run" or "judge". What it is told decides how long a step may take."""


def check(
    bench: Workbench,
    operands: OperandSet,
    sizes: ArrayView,
    size_set: SizeSet,
    executable: Executable,
    algorithm: MatmulAlgorithm,
    note: Note,
    seed: int,
) -> Outcome:
    """Runs a candidate on a poisoned out and judges the result; runs it again and compares bits where it claims to be deterministic.

    Returns:
        verdict "", "wrong" or "nondeterministic". What the candidate raises is raised.
    """
    where = size_set.describe()
    verdict = run_judged(bench, operands, sizes, size_set, executable, note, seed)
    if verdict.fault:
        return Outcome("wrong", f"{where}: {verdict.fault}", verdict.error, verdict.limit)
    if algorithm.deterministic:
        try:
            first = bench.snapshot(operands)
        except MemoryError:  # without room for a copy of out the bits go unseen; values are judged nonetheless
            return Outcome(error=verdict.error, error_limit=verdict.limit)
        try:
            run(bench, operands, sizes, size_set, executable, note)
            note("judge")
            differing = bench.same(operands, first)
        finally:
            first.release()
        if differing:
            again = judge(bench, operands, size_set, seed)
            if again.fault:
                return Outcome("wrong", f"{where}, second run: {again.fault}", again.error, again.limit)
            reason = f"{where}: {differing} elements differ between two runs on equal inputs, though it claims to be deterministic"
            return Outcome("nondeterministic", reason, verdict.error, verdict.limit)
    return Outcome(error=verdict.error, error_limit=verdict.limit)


def run(bench: Workbench, operands: OperandSet, sizes: ArrayView, size_set: SizeSet, executable: Executable, note: Note) -> str:
    """One run on a poisoned out, waited for; returns a fault that the executable reports though the sizes are right, or ""."""
    one = size_set
    bench.poison(operands)
    arguments = bench.arguments(operands, sizes, alpha=one.alpha, beta=one.beta, group_offset=one.group_offset)
    if one.in_place and operands.c:
        copy_bytes(bench, operands.out, operands.c, operands.layouts["c"].reach)
        arguments.c = operands.out
    bench.synchronize()
    note("run")
    executable.execute(arguments)
    bench.synchronize()
    fault = executable.check()
    return "" if fault is None else fault.describe(operands.config.ragged_extent)


def run_judged(
    bench: Workbench, operands: OperandSet, sizes: ArrayView, size_set: SizeSet, executable: Executable, note: Note, seed: int
) -> Verdict:
    """One run and its verdict."""
    fault = run(bench, operands, sizes, size_set, executable, note)
    note("judge")
    verdict = judge(bench, operands, size_set, seed)
    if fault and not verdict.fault:
        verdict = dataclasses.replace(verdict, fault=f"it reports wrong sizes where they are right: {fault}")
    return verdict


def judge(bench: Workbench, operands: OperandSet, size_set: SizeSet, seed: int) -> Verdict:
    """The verdict on what lies in out."""
    one = size_set
    return bench.judge(operands, one.sizes, alpha=one.alpha, beta=one.beta, seed=seed, group_offset=one.group_offset)
