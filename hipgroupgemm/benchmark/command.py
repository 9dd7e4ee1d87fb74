"""One benchmark from a request to its exit status: plans the jobs, shows progress, keeps what is finished, writes the files."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.benchmark.baselines import BASELINES, PADDED
from hipgroupgemm.benchmark.plots import row_panels, write_panels
from hipgroupgemm.benchmark.rows import FINE, Row, print_rows, write_rows
from hipgroupgemm.benchmark.runner import Job, Runner
from hipgroupgemm.measure.distributions import group_size_vectors
from hipgroupgemm.measure.environment import describe, device_named, load_average
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.text import console_for, progress, say
from hipgroupgemm.measure.workloads import AUTO_PADDED_FLOPS, MoEShape, RaggedDotClass, scaled_shapes
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import Device

__all__ = ["INTERRUPTED", "Request", "Result", "measure", "plan_jobs", "plot_note", "print_result", "run"]

TIME_LIMIT = 65.0
"""Seconds that a benchmark on a CPU with nothing said about scale or repetitions gives to its jobs: it ends within two minutes."""

INTERRUPTED = 130


@dataclasses.dataclass
class Request:
    """What to run. scale=None is automatic, dtype=None the device's own, backends=None all that can; paths are files to write.

    With scale=None `shapes` are scaled on a CPU, and `exact_shapes`, run after them, are not: someone asked for just these.
    """

    shapes: Sequence[MoEShape]
    classes: Sequence[RaggedDotClass]
    exact_shapes: Sequence[MoEShape] = ()
    dtype: str | None = None
    distributions: Sequence[str] = ("balanced",)
    seed: int = 0
    backends: Sequence[str] | None = None
    baselines: Sequence[str] = tuple(BASELINES)
    scale: int | None = None
    repetitions: int | None = None
    device: str = "auto"
    csv: Path | None = None
    json: Path | None = None
    plots: Sequence[Path] = ()


@dataclasses.dataclass
class Result:
    """What came of it: the rows of finished jobs and those, what it ran on; `interrupted` when Ctrl-C stopped it.

    context is plain data for CSV and JSON. roofline: in words. note: what a person should know of the times.
    """

    context: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    jobs: list[Job] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    roofline: str = ""
    note: str = ""

    def record(self) -> dict[str, Any]:
        """What the JSON has besides context and rows: whether it was interrupted, and the group sizes of every problem that was run."""
        problems = {}  # the classes of a shape share the sizes
        for job in self.jobs:
            extents = dict(zip("mkne", job.shape.extents, strict=True))
            names = {"model": job.shape.label, **extents, "scale": job.shape.scale, "distribution": job.distribution}
            problems[tuple(names.values())] = {**names, "group_sizes": job.sizes.tolist()}
        return {"interrupted": self.interrupted, "problems": list(problems.values())}

    def exit_code(self, named: Sequence[str] | None = None) -> int:
        """130 when interrupted; 1 when a row is wrong or failed, or a backend named by the caller ran nothing; else 0."""
        if any(row.status not in FINE for row in self.rows):
            return 1
        if self.interrupted:
            return INTERRUPTED
        return int(not {row.backend for row in self.rows if row.status == "ok"}.issuperset(named or ()))

    @property
    def counts(self) -> list[int]:
        """How many calls the times are of."""
        return [row.repetitions for row in self.rows if row.status == "ok" and row.repetitions]


def plan_jobs(request: Request, device: Device) -> list[Job]:
    """The jobs of a request for a device, the classes of a shape together.

    Raises:
        DistributionError: the file of group sizes does not fit, or there is no distribution or file of that name.
    """
    jobs = []
    for whole, shape in scaled_shapes(request.shapes, request.exact_shapes, request.scale, device.kind == "cpu"):
        for distribution in request.distributions:
            name, vectors = group_size_vectors(distribution, whole, shape, request.seed)
            for index, sizes in enumerate(vectors):
                jobs += [Job(kind, shape, sizes, name if len(vectors) == 1 else f"{name}[{index}]") for kind in request.classes]
    return jobs


def run(request: Request) -> int:
    """Runs a request for a person at a terminal and returns the exit status.

    Raises:
        ValueError, OSError: the request can't be met; nothing was run.
        RuntimeError: no such device.
    """
    console = console_for(request.csv, request.json)
    result = measure(request)
    print_result(console, result)
    write_rows(result.rows, result.context, request.csv, request.json, result.record(), console)
    write_panels(request.plots, row_panels(result.rows), plot_note(result), console)
    return result.exit_code(request.backends)


def measure(request: Request) -> Result:
    """Runs a request with progress on stderr. Ctrl-C ends it early: the result then has the rows of finished jobs."""
    device = device_named(request.device)
    jobs, on_cpu = plan_jobs(request, device), device.kind == "cpu"
    long = on_cpu and PADDED in request.baselines and request.scale is None
    for label, flops in dict.fromkeys((job.shape.label, job.shape.padded_flops) for job in jobs if long):
        if flops > 20 * AUTO_PADDED_FLOPS:
            hint = "--scale auto makes it small, --baseline loop or none leaves the padded dots out."
            say(f"{label} is run as given: a padded dot of it takes {flops:.1e} operations. {hint}")
    dtype = DTYPES[request.dtype or ("float32" if on_cpu else "bfloat16")]
    limit = TIME_LIMIT if on_cpu and request.repetitions is None and request.scale is None else None
    context = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": request.seed,
        "requested_scale": request.scale if request.scale is not None else "auto" if request.shapes else 1,
        "requested_repetitions": request.repetitions,
        "operand_dtype": dtype.name,
        "requested_distribution": ",".join(request.distributions),
        "load_average": load_average(),
        **describe(device),
    }
    console = Console(stderr=True)
    with harness_for(device) as harness, progress(console) as bar:
        task = bar.add_task("measuring the roofline", total=len(jobs))
        result = Result(context, note=harness.note)
        try:
            roofline = harness.roofline(dtype)
            result.roofline = "" if roofline is None else roofline.describe()
            context |= {"ceilings": None if roofline is None else dataclasses.asdict(roofline), "time_limit_s": limit}
            baselines = {name: BASELINES[name] for name in request.baselines}
            settings: dict[str, Any] = {"seed": request.seed, "repetitions": request.repetitions, "time_limit": limit}
            runner = Runner(harness, dtype, roofline, request.backends, baselines, **settings)
            for done, (job, rows) in enumerate(zip(jobs, runner.run(jobs), strict=True), 1):
                result.rows += rows
                result.jobs.append(job)
                following = jobs[min(done, len(jobs) - 1)]
                bar.update(task, completed=done, description=f"{following.shape.label} {following.kind.name}")
                if not console.is_terminal:
                    states = (f"{r.backend} {r.status if r.median_ms is None else f'{r.median_ms:.3g} ms'}" for r in rows)
                    say(f"[{done}/{len(jobs)}] {job.shape.label} {job.kind.name} {job.distribution}: {'; '.join(states)}")
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def print_result(console: Console, result: Result) -> None:
    """The tables; on what it was measured, what bounds it, and what to make of it."""
    print_rows(console, result.rows)
    if result.rows:
        say(f"device: {result.context['device']}{f'; roofline: {result.roofline}' if result.roofline else ''}", console=console)
    if any(row.scale != 1 for row in result.rows):
        say("Shapes are scaled, as their titles say; --scale 1 runs them in full.", console=console)
    once, timed, limit = result.counts.count(1), len(result.counts), result.context.get("time_limit_s")
    if limit is not None and 2 * once > timed:  # without a limit there are three, or as many as were asked for
        busy = ", and the machine was busy" if result.note else ""
        why = f"the time limit is {limit:.0f} s for the whole benchmark{busy}; --repetitions 5, or fewer models and classes, gives medians."
        say(f"{once} of {timed} times are of one call and no median (column runs), since {why}", "yellow", console)
    if result.note:
        say(result.note, "yellow", console)
    if bad := sum(row.status not in FINE for row in result.rows):
        say(f"{bad} of {len(result.rows)} rows are wrong or failed, see above.", "bold red", console)
    if result.interrupted:
        say(f"Stopped. {len(result.rows)} finished rows were kept.", "bold", console)


def plot_note(result: Result) -> str:
    """What stands under a plot: on what it was measured, how often, and when; and that the machine was busy, where it was."""
    context, low, high = result.context, min(result.counts, default=0), max(result.counts, default=0)
    calls = "times of one call each" if high <= 1 else f"medians of {low if low == high else f'{low} to {high}'} timed calls"
    line = (
        f"{context['device']} · {context['operand_dtype']} · {context['requested_distribution']} sizes · {calls} · "
        f"hipgroupgemm {context['versions']['hipgroupgemm']}, NumPy {context['versions']['numpy']} · {context['date'][:10]}"
    )
    return f"{line}\n{result.note}" if result.note else line
