"""Tuning reports as a run of tuning would make them, for the tests of the store."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store.identity import identity
from hipgroupgemm.tuning.report import TuningReport, TuningRow

Spec = hgg.ArraySpec
_minutes = itertools.count()


def config_of(m: int = 12, n: int = 5, k: int = 7, groups: int = 2, **settings: Any) -> GroupedGemmConfig:
    return hgg.config_for_ragged_dot(Spec((m, k), "float32"), Spec((groups, k, n), "float32"), Spec((groups,), "int32"), **settings)


def row(backend: str, index: int, median: float | None, verdict: str = "ok", **fields: Any) -> TuningRow:
    """A row for the double's algorithm `index`: kernel_<index>, 1000 * index bytes, only 1 deterministic; or the reference's only one."""
    algorithm = (
        MatmulAlgorithm("reference", 0, "numpy_matmul_a_group", 0, True)
        if backend == "reference"
        else MatmulAlgorithm(backend, index, f"kernel_{index}", 1000 * index, index == 1)
    )
    spread = {} if median is None else {"p10_ms": median * 0.999, "p90_ms": median * 1.001, "fraction": 0.01 / median}
    return TuningRow(algorithm, verdict, median_ms=median, samples=20 if median else 0, **{**spread, **fields})


def report(
    config: GroupedGemmConfig,
    rows: list[TuningRow],
    *,
    sizes: list[Any] | None = None,
    size_class: str = "balanced",
    origin: str = "seed",
    started: str | None = None,
    versions: dict[str, str] | None = None,
    name: str | None = None,
    device: dict[str, Any] | None = None,
    alone: bool = False,
) -> TuningReport:
    """A report of the CPU. Each is a minute younger than the one before it, unless `started` is given.

    The reference, which comes first for an unnamed call, was tried as well (and failed, if it is not among `rows`), unless `alone` is true.
    """
    if not alone and not any(one.algorithm.backend == "reference" for one in rows):
        rows = [*rows, row("reference", 0, None, "failed", reason="out of memory")]
    about = identity(CPU)
    for backend in {one.algorithm.backend for one in rows}:
        about["backends"].setdefault(backend, ["hipgroupgemm"])
    about["versions"].update(versions or {})
    about.update(device or {})
    about["name"] = name or about["name"]
    if started is None:
        date = datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(minutes=next(_minutes))
        started = date.isoformat()
    return TuningReport(
        config=config.key(),
        device="cpu",
        device_name=about["name"],
        identity=about,
        ragged_extent=config.ragged_extent,
        size_samples=[[6, 6]] if sizes is None else sizes,
        size_class=size_class,
        origin=origin,
        seed=0,
        started=started,
        seconds=1.5,
        floor_ms=0.01,
        rows=rows,
    )
