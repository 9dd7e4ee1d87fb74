"""What the tuning store keeps: the answers of one tuning. Dataclasses, which msgspec reads and writes, so that they exist without it."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
from typing import Any

from hipgroupgemm.backends.base import NO_SETTINGS, MatmulAlgorithm, PlanSettings
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.store.identity import DeviceKind

__all__ = ["SEED", "USER", "StoredResult", "config_id"]

SEED, USER = "seed", "user"
"""Where group sizes come from, if not from a named distribution: the balanced partition that tuning makes itself, or the caller."""

_LARGEST = 1 << 63


@dataclasses.dataclass(frozen=True)
class StoredResult:
    """What one tuning of one config on one kind of device found best. All its algorithms were verified, and timed in the same rounds.

    Attributes:
        config: the key that was tuned. device: the kind of device. device_name: the product that it was tuned on.
        size_class: "balanced", "skewed" or "sparse". origin: where the sizes came from: "seed", "user", or a name such as "zipf".
        algorithms: the best of all backends, then of each backend the best and the best deterministic one, by time; each with its median
            `time` in milliseconds.
        versions: of each backend that was tried, the versions that decide its algorithms, by name. tuned: when, with a time zone.
        sizes: what is told of the group sizes: "digest", "samples", "groups", "ragged_extent", "rows", "largest", "empty".
        floor_ms: the least time by the device's roofline, milliseconds; None where that is not known.
        settings: what was asked for of all candidates; but for deterministic, results answer only plans that ask for the same.

    Raises ValueError for what no tuning gives.
    """

    config: GroupedGemmConfig
    device: DeviceKind
    device_name: str
    size_class: str
    origin: str
    algorithms: tuple[MatmulAlgorithm, ...]
    versions: dict[str, dict[str, str]]
    tuned: datetime.datetime
    sizes: dict[str, int | float | str] = dataclasses.field(default_factory=dict)
    floor_ms: float | None = None
    settings: PlanSettings = NO_SETTINGS

    def __post_init__(self) -> None:
        if not (self.algorithms and self.size_class and self.origin):
            raise ValueError("result: has no algorithm, size_class or origin")
        for one in self.algorithms:
            if not (one.time and 0 < one.time < math.inf and -_LARGEST <= one.index < _LARGEST and 0 <= one.workspace_size < _LARGEST):
                raise ValueError(f"algorithms: {one.name!r} has a time, index or workspace_size that can't be")
            if one.backend not in self.versions:
                raise ValueError(f"versions: has none of {one.backend!r}")
        if self.tuned.tzinfo is None or not 1 < self.tuned.year < datetime.MAXYEAR:
            raise ValueError(f"tuned={self.tuned}: wanted a date with a time zone")

    @property
    def slot(self) -> tuple[Any, ...]:
        """What the result is for: the store holds the last one of each slot."""
        versions = tuple(sorted((name, tuple(sorted(own.items()))) for name, own in self.versions.items()))
        return (self.id, self.device, self.device_name, self.size_class, self.origin, versions)

    @property
    def id(self) -> str:
        """Of its config with its settings, see `config_id`."""
        return config_id(self.config, self.settings)

    @property
    def algorithm(self) -> MatmulAlgorithm:
        """The algorithm to take."""
        return self.algorithms[0]

    @property
    def backend(self) -> str:
        """The name of its backend."""
        return self.algorithm.backend

    @property
    def median_ms(self) -> float:
        """Its median device time in milliseconds."""
        return self.algorithm.time or math.nan

    @property
    def fraction(self) -> float | None:
        """The floor over the median; None where that is not known."""
        return None if self.floor_ms is None else self.floor_ms / self.median_ms

    def describe(self) -> str:
        """When it was tuned and on what, for a person."""
        share = "" if self.fraction is None else f", {self.fraction:.2g} of the floor"
        known = {USER: f"{self.size_class} sizes of the user's", SEED: "balanced sizes"}
        sizes = known.get(self.origin, f"synthetic sizes ({self.origin}, {self.size_class})")
        date = self.tuned.astimezone(datetime.timezone.utc)
        return f"tuned {date:%Y-%m-%d %H:%M} UTC on {sizes}, {self.device_name}: {self.median_ms:.4g} ms{share}"


_OF_M = ("m", *(f"{role}_{name}" for role in ("lhs", "c", "output") for name in ("leading_dim_stride", "batch_stride")))


def config_id(key: GroupedGemmConfig, settings: PlanSettings = NO_SETTINGS) -> str:
    """The name of a config's key in the store, with the settings that results are kept apart by: 16 hexadecimal digits.

    Batch-invariant results are for every m, so their name tells neither m nor the strides that may depend on it.
    """
    asked = (settings.batch_invariant, settings.max_multiprocessors)
    cached = key.__dict__.get("_store_id")
    if cached is None or cached[0] != asked:
        data = json.loads(key.to_json())
        if settings.batch_invariant:
            of_m = {*_OF_M, *("lhs_alignment",) * key.trans_a, *("output_alignment", "c_alignment") * (not key.must_swap_operands)}
            data = {name: value for name, value in data.items() if name not in of_m}
        if asked != (False, None):
            data["settings"] = asked
        cached = asked, hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
        object.__setattr__(key, "_store_id", cached)
    return str(cached[1])
