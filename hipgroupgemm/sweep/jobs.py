"""What a sweep is asked for, and the jobs that this makes: one tuning run each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.benchmark.command import AUTO_PADDED_FLOPS, DistributionError
from hipgroupgemm.measure.workloads import (
    CLASSES,
    DISTRIBUTIONS,
    MoEShape,
    RaggedDotClass,
    check_group_sizes,
    group_sizes_of,
    read_group_sizes,
    scale_group_sizes,
)

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
    dtypes = request.dtypes or ("float32" if on_cpu else "bfloat16",)
    jobs = []
    for whole, exact in [(one, False) for one in request.shapes] + [(one, True) for one in request.exact_shapes]:
        if request.scale is not None:
            shape = whole.scaled(request.scale) if request.scale > 1 else whole
        else:
            shape = whole.fitting(AUTO_PADDED_FLOPS) if on_cpu and not exact else whole
        for dtype in dtypes:
            for distribution in request.distributions:
                try:
                    name, samples = _samples(distribution, whole, shape, request.seed)
                except (ValueError, OSError) as error:
                    raise DistributionError(str(error)) from error
                jobs += [SweepJob(CLASSES[kind], shape, dtype, name, samples) for kind in request.classes]
    return list(dict.fromkeys(jobs))


def _samples(distribution: str, whole: MoEShape, shape: MoEShape, seed: int) -> tuple[str, tuple[tuple[int, ...], ...] | None]:
    """The name and the vectors of a distribution for a scaled shape; None is the balanced seed, which tuning makes itself."""
    if distribution == "balanced":
        return distribution, None
    if distribution in DISTRIBUTIONS:
        return distribution, (tuple(group_sizes_of(distribution, shape, seed).tolist()),)
    path = Path(distribution)
    if not path.exists():
        raise ValueError(f"{distribution!r}: wanted {', '.join(DISTRIBUTIONS)} or a file, and there is no such file")
    vectors = []
    for index, vector in enumerate(read_group_sizes(path, whole.e)):
        sizes = check_group_sizes(vector, whole, f"{path.name}[{index}]")
        vectors.append(tuple(scale_group_sizes(sizes, shape.scale).tolist()))
    return f"./{path.name}" if path.name in DISTRIBUTIONS else path.name, tuple(vectors)  # real sizes are not to pass for drawn ones
