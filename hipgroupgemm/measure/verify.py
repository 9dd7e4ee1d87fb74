"""Verification of a candidate: which size sets it must be right on, and one check of it.

Every candidate that is timed has been checked on every size set: on the sizes that are tuned for and on hostile ones, on outputs full of
NaN and full of numbers, with poison where nothing may be read, by a judge that shares no code with any backend. Each set has inputs of its
own at the addresses of the one before, and what a run changes in them is seen. A backend's promise counts for nothing.

beta other than 0 (1 among them) is checked where the config's is: plans for beta = 0 never read c, cannot be given another beta, and have
a key and tuning results of their own, as those for beta != 0 have.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode, capacity_of
from hipgroupgemm.measure.harness import CheckResult, Harness, OperandSet, layouts_of
from hipgroupgemm.measure.inputs import Inputs
from hipgroupgemm.measure.poison import Spoiled
from hipgroupgemm.measure.sizes import hostile_sizes, per_batch
from hipgroupgemm.operands.views import CPU, Device

__all__ = ["Outcome", "SizeSet", "Stage", "check", "judge", "size_sets"]

_SCALARS = {  # name -> (alpha, beta where there is one); all are exact in every type
    "borders": (1.0, 1.0),
    "short": (-1.5, 0.5),
    "many_empty": (0.5, 1.0),
    "all_empty": (2.0, -1.5),
    "one_group": (1.0, 1.0),
}
_IN_PLACE = ("borders", "many_empty")
"""Sets that are run with c = out, where c's layout is out's: a kernel that writes a part before it has read all of c gives itself away."""
_NUMBERS = 0x42
"""Elements whose bytes are all this are finite and not small in any type (2.3 to 1.6e11)."""


@dataclasses.dataclass(frozen=True, eq=False)
class SizeSet:
    """Group sizes and scalars that candidates are checked with, and how they get them.

    Attributes:
        name: for a person. sizes: host integers. alpha, beta: of the calls; beta is 0 exactly where the config's is.
        hostile: poison goes where these sizes read nothing; they are for checking only.
        group_offset: the first group that is computed. in_place: whether c is out.
        config: the problem where it is not the tuning's own, but one of the same key. None else.
        tail: of the calls. ends: whether they get end offsets. spaced: whether they get int64, with other numbers in between.
        device_offset: whether the group offset lies on the device. filled: whether out holds numbers before the run, not NaN.
        spoiled: a group, counted from `group_offset` on, whose rows and weights are NaN; the others' results are judged. None: none is.
        wrong_sizes: what the device is given where those are wrong: `sizes` are these limited, and the fault is to be reported. None else.
        once: whether equal bits of two runs are not asked for here.
    """

    name: str
    sizes: np.ndarray[Any, Any]
    alpha: float
    beta: float
    hostile: bool
    group_offset: int = 0
    in_place: bool = False
    config: GroupedGemmConfig | None = None
    tail: str = "zero"
    ends: bool = False
    spaced: bool = False
    device_offset: bool = False
    filled: bool = False
    spoiled: int | None = None
    wrong_sizes: np.ndarray[Any, Any] | None = None
    once: bool = False

    def describe(self) -> str:
        """The set in a few words."""
        words = [f"alpha={self.alpha:g}"]
        if self.beta:
            words.append(f"beta={self.beta:g}{', c is out' if self.in_place else ''}")
        if self.group_offset:
            words.append(f"group_offset={self.group_offset}{' on the device' if self.device_offset else ''}")
        if self.tail != "zero":
            words.append(f"tail={self.tail!r}")
        if self.ends:
            words.append("end offsets")
        if self.spaced:
            words.append("strided int64 sizes")
        if self.filled:
            words.append("out full of numbers")
        if self.spoiled is not None:
            words.append(f"group {self.spoiled} full of NaN")
        return f"{self.name} ({', '.join(words)})"

    def integers(self) -> np.ndarray[Any, Any]:
        """What lies in the device's memory."""
        values = self.sizes if self.wrong_sizes is None else self.wrong_sizes
        if self.ends:
            ends = np.cumsum(values, axis=-1, dtype=np.int64)
            fits = ends.size == 0 or int(ends.max()) <= np.iinfo(np.int32).max
            values = ends.astype(np.int32) if fits else ends
        return values.astype(np.int64) if self.spaced else values


def size_sets(config: GroupedGemmConfig, samples: Sequence[np.ndarray[Any, Any]], device: Device = CPU) -> list[SizeSet]:
    """The samples that are timed, then the hostile sets of a config. In BATCH, whose sizes are never read, they hold garbage.

    Host integers never reach a backend unchecked, and group offsets are then known: those on a device only where the device is one.
    """
    on = 1.0 if config.beta else 0.0
    found = []
    for index, sizes in enumerate(samples):
        name = "tuning sizes" if len(samples) == 1 else f"tuning sizes, sample {index}"
        found.append(SizeSet(name, sizes, 1.0, on, hostile=False))
    if config.ragged_mode is RaggedDotMode.BATCH:
        garbage = np.where(np.arange(samples[0].size) % 2, np.iinfo(np.int32).max, -9).astype(np.int32).reshape(samples[0].shape)
        return [*found, SizeSet("sizes that are not read", garbage, -1.5, 0.5 * on, hostile=True, filled=True)]
    in_place = bool(config.beta) and _same_layout(config)
    rest = config.group_total - config.group_count
    offsets = itertools.cycle((rest, 0, (rest + 1) // 2))
    on_device = rest > 0 and device.kind != "cpu"
    hostile = hostile_sizes(config.ragged_extent, config.group_total)
    for name, sizes in hostile.items():
        alpha, beta = _SCALARS[name]
        one = SizeSet(name, per_batch(sizes, config), alpha, beta * on, hostile=True, spaced=name == "one_group")
        offset = next(offsets)
        found.append(
            dataclasses.replace(
                one,
                group_offset=offset,
                in_place=in_place and name in _IN_PLACE,
                device_offset=on_device and name == "borders",
            )
        )
    short = per_batch(hostile["short"], config)
    found.append(_one_spoiled(config, short, on, next(offsets)))
    if device.kind != "cpu" and config.group_total and config.ragged_extent:
        found.append(_wrong_sizes(config, short, on))
    found += _other_extents(config, on)
    return found


def _one_spoiled(config: GroupedGemmConfig, sizes: np.ndarray[Any, Any], on: float, offset: int) -> SizeSet:
    """One group is full of NaN, which must not come through to the others; end offsets, a kept tail, an out full of numbers."""
    chosen = np.atleast_2d(sizes)[:, offset : offset + config.group_count].any(axis=0)
    filled = np.flatnonzero(chosen)
    group = int(filled[filled.size // 2]) if filled.size > 1 else None
    tail = "undefined" if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else "zero"
    name = "one_spoiled" if group is not None else "kept tail"
    extra: dict[str, Any] = {"tail": tail, "ends": True, "filled": True, "spoiled": group, "once": True}
    return SizeSet(name, sizes, 1.0, on, True, group_offset=offset, **extra)


def _wrong_sizes(config: GroupedGemmConfig, sizes: np.ndarray[Any, Any], on: float) -> SizeSet:
    """A negative size and one that runs past the end: limited, and reported."""
    given = sizes.astype(np.int64).reshape(-1, config.group_total).copy()
    given[:, -1] = config.ragged_extent + 9
    if config.group_total > 2:
        given[:, 1] = -7
    limited = np.zeros_like(given)
    for row, wanted in zip(limited, given, strict=True):
        left = config.ragged_extent
        for group, size in enumerate(wanted.tolist()):
            row[group] = min(max(size, 0), left)
            left -= int(row[group])
    narrow = np.int32 if config.ragged_extent + 9 <= np.iinfo(np.int32).max else np.int64
    given, limited = (part.reshape(sizes.shape).astype(narrow) for part in (given, limited))
    return SizeSet("wrong sizes, which are limited", limited, 1.0, on, True, wrong_sizes=given, once=True)


def _other_extents(config: GroupedGemmConfig, on: float) -> Iterator[SizeSet]:
    """The smallest and the largest problem that a plan for this config's key serves, where they are not this one."""
    extent, capacity = config.ragged_extent, config.capacity
    least = bisect.bisect_left(range(capacity + 1), capacity, key=capacity_of)
    for name, other in (("the smallest extent", least), ("the largest extent", capacity)):
        if other == extent:
            continue
        smaller: dict[str, Any] = {"m" if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else "k": other}
        try:
            problem = config.key() if other > extent else dataclasses.replace(config, **smaller)
        except ValueError:  # a layout that has no such neighbour
            continue
        if problem.key() == config.key():
            sizes = per_batch(hostile_sizes(other, config.group_total)["borders"], config)
            yield SizeSet(f"{name} of the same key, {other}", sizes, 1.0, on, True, config=problem, once=True)


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


@dataclasses.dataclass(frozen=True)
class Stage:
    """Where a check takes place.

    Attributes:
        bench, operands, inputs: ready for the size set. spoiled: the group that is full of NaN, where one is.
        note: see `Note`. seed: of the judge's sample.
    """

    bench: Harness
    operands: OperandSet
    inputs: Inputs
    note: Note
    seed: int
    spoiled: Spoiled | None = None


def check(stage: Stage, size_set: SizeSet, executable: Executable, algorithm: MatmulAlgorithm) -> Outcome:
    """Runs a candidate on a poisoned out and judges the result; where it claims to be deterministic, runs it again on an out full of
    numbers and compares bits.

    Returns:
        verdict "", "wrong" or "nondeterministic". What the candidate raises is raised.
    """
    bench, operands, where = stage.bench, stage.operands, size_set.describe()
    fill = _NUMBERS if size_set.filled else None
    fault = run(stage, size_set, executable, fill)
    stage.note("judge")
    changed = stage.inputs.changed([operands])
    if changed:  # what it has computed cannot be judged any more
        return Outcome("wrong", f"{where}: {changed}")
    verdict = judge(stage, size_set, fill)
    if fault and not verdict.fault:
        verdict = dataclasses.replace(verdict, fault=fault)
    if verdict.fault:
        return Outcome("wrong", f"{where}: {verdict.fault}", verdict.error, verdict.limit)
    if not algorithm.deterministic or size_set.once:
        return Outcome(error=verdict.error, error_limit=verdict.limit)
    try:
        first = bench.snapshot(operands)
    except MemoryError:  # without room for a copy of out the bits go unseen; values are judged nonetheless
        return Outcome(error=verdict.error, error_limit=verdict.limit)
    again = _NUMBERS if fill is None else None
    try:
        run(stage, size_set, executable, again)
        stage.note("judge")
        differing = bench.same(operands, first)
    finally:
        first.release()
    changed = stage.inputs.changed([operands])
    if changed:
        return Outcome("wrong", f"{where}, second run: {changed}")
    if differing:
        second = judge(stage, size_set, again)
        if second.fault:
            holding = "numbers" if again is not None else "NaN"
            reason = f"{where}, second run, on an out full of {holding}: {second.fault}"
            return Outcome("wrong", reason, second.error, second.limit)
        reason = f"{where}: {differing} elements differ between two runs on equal inputs, though it claims to be deterministic"
        return Outcome("nondeterministic", reason, verdict.error, verdict.limit)
    return Outcome(error=verdict.error, error_limit=verdict.limit)


def run(stage: Stage, size_set: SizeSet, executable: Executable, fill: int | None) -> str:
    """One run on an out full of NaN or of a byte, waited for; returns what is wrong with the fault that the executable reports, or ""."""
    bench, operands, one, given = stage.bench, stage.operands, size_set, stage.inputs.given
    bench.poison(operands, fill)
    arguments = bench.arguments(
        operands, given.sizes, alpha=one.alpha, beta=one.beta, tail=one.tail, group_offset=given.group_offset, ends=one.ends
    )
    if one.in_place and operands.c:
        bench.copy_bytes(operands.out, operands.c, operands.layouts["c"].reach)
        arguments.pointers["c"] = operands.out
    bench.synchronize()
    stage.note("run")
    executable.execute(arguments)
    bench.synchronize()
    fault = executable.check()
    if one.wrong_sizes is not None:
        return "" if fault is not None else "it does not report that sizes are wrong"
    return "" if fault is None else f"it reports wrong sizes where they are right: {fault.describe(operands.config.ragged_extent)}"


def judge(
    stage: Stage, size_set: SizeSet, fill: int | None = None, operands: OperandSet | None = None, seed: int | None = None
) -> CheckResult:
    """The verdict on what lies in out, which was full of NaN or of a byte before the run."""
    one = size_set
    stage.note("judge")
    if stage.spoiled is not None:
        stage.spoiled.cover(_NUMBERS)
    return stage.bench.check(
        stage.operands if operands is None else operands,
        one.sizes,
        alpha=one.alpha,
        beta=one.beta,
        seed=stage.seed if seed is None else seed,
        tail=one.tail,
        group_offset=one.group_offset,
        fill=fill,
        without=one.spoiled,
    )
