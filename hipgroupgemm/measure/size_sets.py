"""The size sets that candidates have to be right on: the sizes that are timed, and adversarial ones.

beta other than 0 (1 among them) is checked where the config's is: plans for beta = 0 never read c, cannot be given another beta, and have
a key and tuning results of their own.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode, capacity_of
from hipgroupgemm.measure.layouts import layouts_of
from hipgroupgemm.measure.sizes import adversarial_sizes, per_batch
from hipgroupgemm.operands.views import CPU, Device

__all__ = ["SizeSet", "size_sets"]

Sizes = np.ndarray[Any, Any]

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
    """Group sizes and scalars that candidates are checked with, and how they get them.

    Attributes:
        name: for a person. sizes: host integers. alpha, beta: of the calls; beta is 0 exactly where the config's is.
        adversarial: poison goes where these sizes read nothing; they are for checking only.
        group_offset: the first group that is computed. in_place: whether c is out.
        config: the problem where it is not the tuning's own, but one of the same key. None else.
        tail: of the calls. ends: whether they get end offsets. spaced: whether they get int64, with other numbers in between.
        device_offset: whether the group offset lies on the device. filled: whether out holds numbers before the run, not NaN.
        spoiled: a group, counted from `group_offset` on, whose rows and weights are NaN; the others' results are checked. None: none is.
        wrong_sizes: what the device is given where those are wrong: `sizes` are these limited, and the fault is to be reported. None else.
        once: whether equal bits of two runs are not asked for here.
    """

    name: str
    sizes: Sizes
    alpha: float = 1.0
    beta: float = 0.0
    adversarial: bool = False
    group_offset: int = 0
    in_place: bool = False
    config: GroupedGemmConfig | None = None
    tail: str = "zero"
    ends: bool = False
    spaced: bool = False
    device_offset: bool = False
    filled: bool = False
    spoiled: int | None = None
    wrong_sizes: Sizes | None = None
    once: bool = False

    def describe(self) -> str:
        """The set in a few words."""
        said = (
            (True, f"alpha={self.alpha:g}"),
            (self.beta, f"beta={self.beta:g}{', c is out' if self.in_place else ''}"),
            (self.group_offset, f"group_offset={self.group_offset}{' on the device' if self.device_offset else ''}"),
            (self.tail != "zero", f"tail={self.tail!r}"),
            (self.spoiled is not None, f"group {self.spoiled} full of NaN"),
            (self.ends, "end offsets"),
            (self.spaced, "strided int64 sizes"),
            (self.filled, "out full of numbers"),
        )
        return f"{self.name} ({', '.join(text for is_so, text in said if is_so)})"

    def integers(self) -> Sizes:
        """What lies in the device's memory."""
        values = self.sizes if self.wrong_sizes is None else self.wrong_sizes
        if self.ends:
            ends = np.cumsum(values, axis=-1, dtype=np.int64)
            values = ends.astype(np.int32) if (ends <= np.iinfo(np.int32).max).all() else ends
        return values.astype(np.int64) if self.spaced else values


def size_sets(config: GroupedGemmConfig, samples: Sequence[Sizes], device: Device = CPU) -> list[SizeSet]:
    """The samples that are timed, then the adversarial sets of a config. In BATCH, whose sizes are never read, they hold garbage.

    Host integers never reach a backend unchecked, and group offsets are then known: those on a device only where the device is one.
    """
    on, on_device = (1.0 if config.beta else 0.0), device.kind != "cpu"
    names = ["tuning sizes"] if len(samples) == 1 else [f"tuning sizes, sample {index}" for index in range(len(samples))]
    found = [SizeSet(name, sizes, beta=on) for name, sizes in zip(names, samples, strict=True)]
    if config.ragged_mode is RaggedDotMode.BATCH:
        garbage = np.where(np.arange(samples[0].size) % 2, np.iinfo(np.int32).max, -9).astype(np.int32).reshape(samples[0].shape)
        return [*found, SizeSet("sizes that are not read", garbage, -1.5, 0.5 * on, adversarial=True, filled=True)]
    layouts = layouts_of(config)
    in_place = bool(config.beta) and layouts["c"] == layouts["out"]
    rest = config.group_total - config.group_count
    offsets = itertools.cycle((rest, 0, (rest + 1) // 2))
    adversarial = {name: per_batch(sizes, config) for name, sizes in adversarial_sizes(config.ragged_extent, config.group_total).items()}
    for name, sizes in adversarial.items():
        alpha, beta = _SCALARS[name]
        how: dict[str, Any] = {"spaced": name == "one_group", "in_place": in_place and name in _IN_PLACE}
        how["device_offset"] = rest > 0 and on_device and name == "borders"
        found.append(SizeSet(name, sizes, alpha, beta * on, adversarial=True, group_offset=next(offsets), **how))
    found.append(_one_spoiled(config, adversarial["short"], on, next(offsets)))
    if on_device and config.group_total and config.ragged_extent:
        found.append(_wrong_sizes(config, adversarial["short"], on))
    return [*found, *_other_extents(config, on)]


def _one_spoiled(config: GroupedGemmConfig, sizes: Sizes, on: float, offset: int) -> SizeSet:
    """One group is full of NaN, which must not come through to the others; end offsets, a kept tail, an out full of numbers."""
    filled = np.flatnonzero(np.atleast_2d(sizes)[:, offset : offset + config.group_count].any(axis=0))
    group = int(filled[filled.size // 2]) if filled.size > 1 else None
    tail = "undefined" if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else "zero"
    name = "one_spoiled" if group is not None else "kept tail"
    how: dict[str, Any] = {"tail": tail, "ends": True, "filled": True, "spoiled": group, "once": True}
    return SizeSet(name, sizes, 1.0, on, True, group_offset=offset, **how)


def _wrong_sizes(config: GroupedGemmConfig, sizes: Sizes, on: float) -> SizeSet:
    """A negative size and one that runs past the end: limited, and reported."""
    given, extent = sizes.astype(np.int64), config.ragged_extent
    given[..., -1] = extent + 9
    if config.group_total > 2:
        given[..., 1] = -7
    ends = np.minimum(np.cumsum(np.maximum(given, 0), axis=-1), extent)
    limited = np.diff(ends, axis=-1, prepend=0)
    narrow = np.int32 if extent + 9 <= np.iinfo(np.int32).max else np.int64
    wrong = given.astype(narrow)
    return SizeSet("wrong sizes, which are limited", limited.astype(narrow), 1.0, on, True, wrong_sizes=wrong, once=True)


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
            sizes = per_batch(adversarial_sizes(other, config.group_total)["borders"], config)
            yield SizeSet(f"{name} of the same key, {other}", sizes, 1.0, on, True, config=problem, once=True)
