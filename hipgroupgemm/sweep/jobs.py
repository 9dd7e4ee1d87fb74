"""What a sweep is asked for, and the jobs that this makes: one tuning run each."""

from __future__ import annotations

from typing import Any

import msgspec

from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.distributions import DistributionError, group_size_vectors
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of, scaled_shapes

__all__ = ["DistributionError", "RequestError", "SweepJob", "SweepRequest", "plan_jobs"]


class RequestError(ValueError):
    """A sweep can't begin as it was asked for; nothing was run, no file was touched."""


class SweepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to tune, and how. Every combination of shape, element type, distribution and class is a job.

    Attributes:
        shapes: with scale=None they are scaled on a CPU, as a benchmark's. exact_shapes: with scale=None they are not.
        dtypes: names; empty for the device's own, float32 on a CPU and bfloat16 on a GPU.
        distributions: those of `measure.distributions`, or files of group sizes, whose vectors are samples of one job.
        devices: "cpu", "cuda:0" and so on. Equal devices share the jobs, every other kind of device runs them all.
        backends: names, or None for all that can. algorithms: "heuristic" (those that a backend ranks first), "all", or names.
        max_algorithms, max_workspace, repetitions, time_limit: what `tuning.engine.tune` takes; bytes and seconds a job.
        scale: divisor of M, K and N, or None. seed: of drawn group sizes, operands and order.
    """

    shapes: tuple[MoEShape, ...] = ()
    exact_shapes: tuple[MoEShape, ...] = ()
    classes: tuple[str, ...] = tuple(CLASSES)
    dtypes: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ("balanced",)
    devices: tuple[str, ...] = ("cpu",)
    backends: tuple[str, ...] | None = None
    algorithms: str | tuple[str, ...] = "heuristic"
    max_algorithms: int | None = None
    max_workspace: int | None = None
    repetitions: int | None = None
    time_limit: float | None = None
    scale: int | None = None
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """The arguments of `tune` that every job has; what was not asked for is left to it."""
        names = ("backends", "algorithms", "max_algorithms", "repetitions", "time_limit", "seed")
        found = {name: getattr(self, name) for name in names} | {"max_workspace_size": self.max_workspace}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items() if value is not None}


class SweepJob(msgspec.Struct, frozen=True):
    """One problem to tune; two are equal where all of this is.

    Attributes:
        kind: the class, from `workloads.CLASSES`; "class" in files. model, m, k, n, e, scale: the shape, scaled already.
        group_sizes: the vectors that are tuned for, or None for the balanced seed, which tuning makes itself.
    """

    kind: str = msgspec.field(name="class")
    model: str
    m: int
    k: int
    n: int
    e: int
    scale: int
    dtype: str
    distribution: str
    group_sizes: tuple[tuple[int, ...], ...] | None

    @property
    def shape(self) -> MoEShape:
        """The extents."""
        return MoEShape(self.m, self.k, self.n, self.e, self.model, self.scale)

    @property
    def config(self) -> GroupedGemmConfig:
        """The problem without its group sizes."""
        return config_of(CLASSES[self.kind], self.shape, self.dtype)

    @property
    def problem(self) -> tuple[Any, ...]:
        """What makes two jobs the same problem: class, extents, element type and group sizes. Names take no part."""
        return (self.kind, self.m, self.k, self.n, self.e, self.dtype, self.group_sizes)

    @property
    def title(self) -> str:
        """The problem in a few words."""
        return f"{self.model} {self.kind} {self.dtype} {self.distribution}"

    @property
    def full_title(self) -> str:
        """The class, and `problem_title`."""
        return f"{self.kind} {self.problem_title}"

    @property
    def problem_title(self) -> str:
        """Shape, element type and distribution: what the classes of a table have in common."""
        label = "" if self.model.count(",") == 3 else f"{self.model}  "
        scaled = f", scaled: M, K and N are 1/{self.scale}" if self.scale != 1 else ""
        return f"{label}M={self.m} K={self.k} N={self.n} E={self.e}, {self.dtype}, {self.distribution}{scaled}"


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
                samples = None if distribution == "balanced" else tuple(tuple(sizes.tolist()) for sizes in vectors)
                jobs += [SweepJob(kind, shape.label, *shape.extents, shape.scale, dtype, name, samples) for kind in request.classes]
    return list(dict.fromkeys(jobs))
