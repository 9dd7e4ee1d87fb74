"""What a sweep is asked for, and the jobs that this makes: one tuning run each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hipgroupgemm.measure.distributions import DistributionError, group_size_vectors
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, RaggedDotClass, scaled_shapes

__all__ = ["HEURISTIC", "DistributionError", "RequestError", "SweepJob", "SweepRequest", "plan_jobs"]

HEURISTIC = "heuristic"
"""The algorithms that a backend's own ranking puts first."""


class RequestError(ValueError):
    """A sweep can't begin as it was asked for; nothing was run, no file was touched."""


@dataclasses.dataclass
class SweepRequest:
    """What to tune, and how. Every combination of shape, element type, distribution and class is a job.

    Attributes:
        shapes: with scale=None they are scaled on a CPU, as a benchmark's. exact_shapes: with scale=None they are not.
        classes: names from `workloads.CLASSES`.
        dtypes: names; empty for the device's own, float32 on a CPU and bfloat16 on a GPU.
        distributions: names from `workloads.DISTRIBUTIONS`, or files of group sizes, whose vectors are samples of one job.
        devices: "cpu", "cuda:0" and so on. Equal devices share the jobs, every other kind of device runs them all.
        backends: names, or None for all that can.
        algorithms: "heuristic", "all", or names of algorithms.
        max_algorithms, max_workspace, repetitions, time_limit: what `tuning.engine.tune` takes; bytes and seconds a job.
        scale: divisor of M, K and N, or None.
        seed: of drawn group sizes, operands and order.
    """

    shapes: Sequence[MoEShape] = ()
    exact_shapes: Sequence[MoEShape] = ()
    classes: Sequence[str] = tuple(CLASSES)
    dtypes: Sequence[str] = ()
    distributions: Sequence[str] = ("balanced",)
    devices: Sequence[str] = ("cpu",)
    backends: Sequence[str] | None = None
    algorithms: str | Sequence[str] = HEURISTIC
    max_algorithms: int | None = None
    max_workspace: int | None = None
    repetitions: int | None = None
    time_limit: float | None = None
    scale: int | None = None
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What a job's result depends on besides the problem and the device; plain data."""
        names = ("backends", "algorithms", "max_algorithms", "max_workspace", "repetitions", "time_limit", "seed")
        return {name: _plain(getattr(self, name)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` makes an equal request of."""
        data = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        for name in ("shapes", "exact_shapes"):
            data[name] = [[*shape.extents, shape.label] for shape in getattr(self, name)]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SweepRequest:
        """The request that `to_dict` wrote; raises ValueError for anything else."""
        try:
            values = {field.name: data[field.name] for field in dataclasses.fields(cls)}
            for name in ("shapes", "exact_shapes"):
                values[name] = [MoEShape(m, k, n, e, label) for m, k, n, e, label in values[name]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"request: is none that a sweep wrote ({type(error).__name__}: {error})") from None
        return cls(**values)


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@dataclasses.dataclass(frozen=True)
class SweepJob:
    """One problem to tune.

    Attributes:
        kind, shape, dtype: the problem; the shape is scaled already.
        distribution: the group sizes' name.
        samples: vectors of group sizes, or None for the balanced seed.
    """

    kind: RaggedDotClass
    shape: MoEShape
    dtype: str
    distribution: str
    samples: tuple[tuple[int, ...], ...] | None

    @property
    def title(self) -> str:
        """The problem in a few words."""
        return f"{self.shape.label} {self.kind.name} {self.dtype} {self.distribution}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what a sweep's file says of the job."""
        s = self.shape
        return {
            "class": self.kind.name,
            "model": s.label,
            "m": s.m,
            "k": s.k,
            "n": s.n,
            "e": s.e,
            "scale": s.scale,
            "dtype": self.dtype,
            "distribution": self.distribution,
            "group_sizes": None if self.samples is None else [list(sizes) for sizes in self.samples],
        }


def plan_jobs(request: SweepRequest, device_kind: str) -> list[SweepJob]:
    """The jobs of a request for one kind of device ("cpu", "cuda", "rocm"): shapes, element types, distributions and classes in turn.

    Raises:
        DistributionError: there is no distribution or file of that name, or the file's group sizes do not fit a shape.
    """
    on_cpu = device_kind == "cpu"
    jobs = []
    for whole, shape in scaled_shapes(request.shapes, request.exact_shapes, request.scale, on_cpu):
        for dtype in request.dtypes or ("float32" if on_cpu else "bfloat16",):
            for distribution in request.distributions:
                name, vectors = group_size_vectors(distribution, whole, shape, request.seed)
                samples = None if distribution == "balanced" else tuple(tuple(sizes.tolist()) for sizes in vectors)  # the balanced seed
                jobs += [SweepJob(CLASSES[kind], shape, dtype, name, samples) for kind in request.classes]
    return list(dict.fromkeys(jobs))
