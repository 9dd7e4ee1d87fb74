"""The group sizes that tuning runs with: the balanced seed or the user's own; and the size sets that candidates have to be right on.

Random integers are never used: they mostly sum past the ragged extent, and a kernel tuned on them is tuned on nothing that a router does.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode, capacity_of
from hipgroupgemm.measure.check import host_integers
from hipgroupgemm.measure.layouts import layouts_of
from hipgroupgemm.operands.arrays import view_of
from hipgroupgemm.operands.views import CPU, Device, host_array
from hipgroupgemm.problem.groups import scan
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.store.records import SEED, USER

__all__ = [
    "SizeSet", "adversarial_sizes", "origin_of", "per_batch", "seed_sizes", "size_class", "size_class_of", "size_samples", "size_sets",
]  # fmt: skip

Sizes = np.ndarray[Any, np.dtype[Any]]

_BALANCED = 1.25
_BORDERS = (1, 17, 127, 65, 3, 129, 31, 255)
"""Sizes about the tiles' borders: one row, one more than a tile, one less than two."""


def seed_sizes(config: GroupedGemmConfig) -> Sizes:
    """The balanced partition of a config's rows: R // G rows a group, the remainder one each to the first groups.

    `(group_total,)` int32 (int64 where they are larger), or `(batch, group_total)` where the config has sizes a batch
    entry. Zeros in BATCH, whose sizes are never read.
    """
    groups, rows = config.group_total, 0 if config.ragged_mode is RaggedDotMode.BATCH else config.ragged_extent
    each, left = divmod(rows, max(groups, 1))
    balanced: Sizes = np.broadcast_to(_narrow(each + (np.arange(groups) < left)), _shape(config)).copy()
    return balanced


def size_samples(group_sizes: Any, config: GroupedGemmConfig) -> list[Sizes]:
    """The samples that a caller's group sizes are, validated; the balanced seed alone where there are none.

    Args:
        group_sizes: one sample or several (a list, or an array with one more axis in front): `(group_total,)`, or `(batch, group_total)`
            where the config has sizes a batch entry; host or device, any integer type. None for the balanced seed.
        config: what they are sizes of.

    Raises TypeError or ValueError, saying what is wrong with them.
    """
    if group_sizes is None:
        return [seed_sizes(config)]
    wanted, read = _shape(config), config.ragged_mode is not RaggedDotMode.BATCH
    given = _host(group_sizes, "group_sizes")
    parts = list(given) if _depth(given) > len(wanted) else [given]
    if not parts:
        raise ValueError("group_sizes: got no sample at all; leave it out to tune on balanced sizes")
    samples = []
    for index, part in enumerate(parts):
        name = f"group_sizes[{index}]" if len(parts) > 1 else "group_sizes"
        array = host_integers(part, name)
        if array.shape != wanted:
            several = "" if len(parts) > 1 else ", or several of that shape"
            raise TypeError(f"{name}: got shape {array.shape}, wanted {wanted}{several}: one size for each of the config's groups")
        fault = scan(array, config.ragged_extent).fault if read else None
        if fault is not None:
            raise ValueError(f"{name}: {fault.describe(config.ragged_extent).partition(': ')[2]}")
        samples.append(_narrow(array))
    if read and not any(sample.any() for sample in samples):
        raise ValueError("group_sizes: all groups are empty, there is nothing to time; leave it out to tune on balanced sizes")
    return samples


def origin_of(group_sizes: Any, named: Any = None) -> str:
    """Where sizes come from, as `TuningReport.origin` says it; `named` is the distribution that they were drawn from, None for none.

    Raises TypeError or ValueError for a name that is none, or that the sizes do not have.
    """
    if named is None:
        return SEED if group_sizes is None else USER
    if not isinstance(named, str):
        raise TypeError(f"origin: got {type(named).__name__}, wanted the name of a distribution, or None for real sizes")
    if not named.strip():
        raise ValueError("origin: got an empty name, wanted that of a distribution, or None for real sizes")
    if (named == SEED) != (group_sizes is None):
        wanted = "without group_sizes only the balanced seed is tuned for" if group_sizes is None else f"{SEED!r} is for no group_sizes"
        raise ValueError(f"origin={named!r}: {wanted}; leave it out")
    return named


def _narrow(array: np.ndarray[Any, Any]) -> Sizes:
    """As int32 where the values fit, as routers give them; else as int64."""
    wide = array.astype(np.int64)
    narrow = wide.astype(np.int32)
    return narrow if (narrow == wide).all() else wide


def _shape(config: GroupedGemmConfig) -> tuple[int, ...]:
    return (config.batch_count, config.group_total) if config.sizes_per_batch else (config.group_total,)


def _depth(value: Any) -> int:
    """How many axes nested sequences of integers or arrays have."""
    if isinstance(value, (list, tuple)):
        return 1 + max((_depth(part) for part in value), default=0)
    return int(np.ndim(value))


def _host(value: Any, name: str) -> Any:
    """The caller's sizes with all arrays as NumPy arrays; waits for a device."""
    if isinstance(value, (list, tuple)):
        return [_host(part, f"{name}[{index}]") for index, part in enumerate(value)]
    if not hasattr(value, "shape") or isinstance(value, (np.ndarray, np.generic)):
        return value
    view = view_of(value, name)
    if view.device.kind == "cpu":
        return host_array(view).copy()
    runtime, raw = get_runtime(view.device.kind), np.empty(max(view.reach, 1), np.uint8)
    with runtime.use_device(view.device.index):
        runtime.synchronize_device(view.device.index)
        if view.reach:
            runtime.memcpy_async(raw.ctypes.data, view.pointer, view.reach)
            runtime.synchronize_stream()
    return np.ndarray(view.shape, view.dtype, raw.data, 0, view.strides).copy()


def adversarial_sizes(m: int, groups: int) -> dict[str, Sizes]:
    """Group sizes for `m` rows, `(groups,)` int32 each (int64 where they are larger), that wrong kernels give themselves away with.

    By name: "borders": all rows, in groups of one row, of one more than a tile and of one less than two, the rest in the last group;
    "short": the same for five eighths of the rows, so that no group covers the tail; "many_empty": about three of four groups empty, the
    first and the last among them, and the tail uncovered; "all_empty"; "one_group": the middle group takes all rows.
    """
    short = min(5 * m // 8 | 1, max(m - 1, 0))
    sparse, one = np.zeros((2, groups), np.int64)
    some = np.arange(1, max(groups - 1, 2), 4) if groups > 1 else np.arange(groups)
    sparse[some] = _borders(short, some.size)
    one[groups // 2 : groups // 2 + 1] = m
    found = {"borders": _borders(m, groups), "short": _borders(short, groups), "many_empty": sparse, "all_empty": 0 * one, "one_group": one}
    return {name: _narrow(sizes) for name, sizes in found.items()}


def _borders(m: int, groups: int) -> Sizes:
    """Uneven sizes that sum to m; every group has a row where there are enough."""
    sizes, left = np.zeros(groups, np.int64), m
    for group in range(groups - 1):
        behind = groups - 1 - group  # groups that want a row each
        sizes[group] = min(_BORDERS[group % len(_BORDERS)], max(left - behind, min(left, 1)))
        left -= int(sizes[group])
    sizes[-1:] = left
    return sizes


def per_batch(sizes: Sizes, config: GroupedGemmConfig) -> Sizes:
    """Adversarial sizes for a config: where it has sizes a batch entry, each entry's are turned on by one group more."""
    if not config.sizes_per_batch:
        return sizes
    return np.array([np.roll(sizes, entry) for entry in range(config.batch_count)], sizes.dtype).reshape(_shape(config))


def size_class(sizes: Any, m: int) -> str:
    """The class of a distribution: what a result that was tuned on one vector of group sizes holds for.

    "balanced": no group has more than 1.25 times the mean and one row, and the sizes sum to `m`, the ragged extent (0 in BATCH, where all
    is balanced). "sparse": otherwise, and more than half of the groups are empty. "skewed": all others. `(batch, g)` sizes are classed by
    the entry that is least balanced ("sparse" before "skewed").
    """
    array = np.asarray(sizes, np.int64)
    if array.size == 0 or m == 0:
        return "balanced"
    if array.ndim > 1:
        classes = {size_class(entry, m) for entry in array}
        return next((name for name in ("sparse", "skewed") if name in classes), "balanced")
    if array.sum() == m and array.max() <= _BALANCED * m / array.size + 1:
        return "balanced"
    return "sparse" if 2 * np.count_nonzero(array <= 0) > array.size else "skewed"


def size_class_of(samples: Sequence[Any], m: int) -> str:
    """The class of several samples: what most of them are; of equally many the less balanced one."""
    counts = collections.Counter(size_class(sample, m) for sample in samples)
    return max(("sparse", "skewed", "balanced"), key=lambda name: counts[name])


@dataclasses.dataclass(frozen=True, eq=False)
class SizeSet:
    """Group sizes and scalars that candidates are checked with, and how they get them.

    Attributes:
        name: for a person. sizes: host integers. alpha, beta: of the calls; beta is 0 exactly where the config's is.
        adversarial: for checking only; poison goes where these sizes read nothing.
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
    on, on_device, mode = (1.0 if config.beta else 0.0), device.kind != "cpu", config.ragged_mode
    names = ["tuning sizes"] if len(samples) == 1 else [f"tuning sizes, sample {index}" for index in range(len(samples))]
    found = [SizeSet(name, sizes, beta=on) for name, sizes in zip(names, samples, strict=True)]

    def add(name: str, sizes: Sizes, alpha: float = 1.0, beta: float = 1.0, **how: Any) -> None:  # scalars are exact in every type
        found.append(SizeSet(name, sizes, alpha, beta * on, adversarial=True, **how))

    if mode is RaggedDotMode.BATCH:
        garbage = np.where(np.arange(samples[0].size) % 2, np.iinfo(np.int32).max, -9).astype(np.int32).reshape(samples[0].shape)
        add("sizes that are not read", garbage, -1.5, 0.5, filled=True)
        return found
    sizes = {name: per_batch(one, config) for name, one in adversarial_sizes(config.ragged_extent, config.group_total).items()}
    layouts, rest = layouts_of(config), config.group_total - config.group_count
    # a kernel that writes a part of out before it has read all of c gives itself away where c is out
    in_place = bool(config.beta) and layouts["c"] == layouts["out"]
    middle = (rest + 1) // 2
    add("borders", sizes["borders"], group_offset=rest, in_place=in_place, device_offset=rest > 0 and on_device)
    add("short", sizes["short"], -1.5, 0.5)
    add("many_empty", sizes["many_empty"], 0.5, group_offset=middle, in_place=in_place)
    add("all_empty", sizes["all_empty"], 2.0, -1.5, group_offset=rest)
    add("one_group", sizes["one_group"], spaced=True)
    # one group is full of NaN, which must not come through to the others; end offsets, a kept tail, an out full of numbers
    filled = np.flatnonzero(np.atleast_2d(sizes["short"])[:, middle : middle + config.group_count].any(axis=0))
    spoiled = int(filled[filled.size // 2]) if filled.size > 1 else None
    name, tail = "kept tail" if spoiled is None else "one_spoiled", "zero" if mode is RaggedDotMode.CONTRACTING else "undefined"
    add(name, sizes["short"], group_offset=middle, tail=tail, ends=True, filled=True, spoiled=spoiled, once=True)
    if on_device and config.group_total and config.ragged_extent:
        limited, wrong = _wrong_sizes(sizes["short"], config.ragged_extent)
        add("wrong sizes, which are limited", limited, wrong_sizes=wrong, once=True)
    for name, other in _other_extents(config):
        borders = adversarial_sizes(other.ragged_extent, config.group_total)["borders"]
        add(f"{name} of the same key, {other.ragged_extent}", per_batch(borders, config), config=other, once=True)
    return found


def _wrong_sizes(sizes: Sizes, extent: int) -> tuple[Sizes, Sizes]:
    """A negative size and one that runs past the end: as they are to be limited, and as they are."""
    given = sizes.astype(np.int64)
    given[..., -1] = extent + 9
    if given.shape[-1] > 2:
        given[..., 1] = -7
    ends = np.minimum(np.cumsum(np.maximum(given, 0), axis=-1), extent)
    narrow = np.int32 if extent + 9 <= np.iinfo(np.int32).max else np.int64
    return np.diff(ends, axis=-1, prepend=0).astype(narrow), given.astype(narrow)


def _other_extents(config: GroupedGemmConfig) -> Iterator[tuple[str, GroupedGemmConfig]]:
    """The smallest and the largest problem that a plan for this config's key serves, where they are not this one."""
    capacity = config.capacity
    least = bisect.bisect_left(range(capacity + 1), capacity, key=capacity_of)
    ragged = "m" if config.ragged_mode is RaggedDotMode.NON_CONTRACTING else "k"
    with contextlib.suppress(ValueError):  # a layout that has no such neighbour
        smallest = dataclasses.replace(config, **{ragged: least})  # type: ignore[arg-type]
        if least != config.ragged_extent and smallest.key() == config.key():
            yield "the smallest extent", smallest
    if capacity != config.ragged_extent:
        yield "the largest extent", config.key()
