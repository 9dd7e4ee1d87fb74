"""One benchmark from a request to its exit status: plans the jobs, shows progress, keeps what is finished, writes the files."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hipgroupgemm.benchmark.baselines import BASELINES
from hipgroupgemm.benchmark.plots import plot_both
from hipgroupgemm.benchmark.runner import FINE, Job, Row, Runner
from hipgroupgemm.benchmark.table import print_rows, write_csv, write_json
from hipgroupgemm.measure.distributions import group_size_vectors
from hipgroupgemm.measure.environment import describe, device_named, load_average
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.text import STDOUT, plain_width, stdout_console
from hipgroupgemm.measure.workloads import AUTO_PADDED_FLOPS, MoEShape, RaggedDotClass, scaled_shapes
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import Device

__all__ = ["INTERRUPTED", "Request", "Result", "measure", "plan_jobs", "plot_note", "print_machine", "run"]

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
    """What came of it: the rows of finished jobs, the roofline, what it ran on; `interrupted` when Ctrl-C stopped it.

    jobs are the finished ones; their group sizes go into the JSON. note is what a person should know of the times.
    """

    rows: list[Row]
    context: dict[str, Any]
    jobs: list[Job] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    roofline: Roofline | None = None
    note: str = ""

    def record(self) -> dict[str, Any]:
        """What the JSON has besides the rows: the context, and the group sizes of every problem that was run."""
        problems: dict[tuple[Any, ...], dict[str, Any]] = {}
        for job in self.jobs:  # the classes of a shape share the sizes
            m, k, n, e = job.shape.extents
            names = {"model": job.shape.label, "m": m, "k": k, "n": n, "e": e, "scale": job.shape.scale, "distribution": job.distribution}
            problems.setdefault(tuple(names.values()), {**names, "group_sizes": job.sizes.tolist()})
        return {**self.context, "interrupted": self.interrupted, "problems": list(problems.values())}

    def exit_code(self, named: Sequence[str] | None = None) -> int:
        """130 when interrupted; 1 when a row is wrong or failed, or a backend named by the caller ran nothing; else 0."""
        if any(row.status not in FINE for row in self.rows):
            return 1
        if self.interrupted:
            return INTERRUPTED
        ran = {row.backend for row in self.rows if row.status == "ok"}
        return 1 if any(name not in ran for name in named or ()) else 0


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
    # where a file goes to stdout, that is the file's alone
    console = Console(stderr=True, width=plain_width(sys.stderr)) if STDOUT in (request.csv, request.json) else stdout_console()
    result = measure(request)
    print_rows(console, result.rows)
    print_machine(console, result)
    _write(request, result, console)
    bad = [row for row in result.rows if row.status not in FINE]
    if bad:
        console.print(f"{len(bad)} of {len(result.rows)} rows are wrong or failed, see above.", style="bold red")
    if result.interrupted:
        console.print(f"Stopped. {len(result.rows)} finished rows were kept.", style="bold")
    return result.exit_code(request.backends)


def measure(request: Request, log: Callable[[str], None] | None = None) -> Result:
    """Runs a request with progress on stderr. Ctrl-C ends it early: the result then has the rows of finished jobs."""
    device = device_named(request.device)
    jobs, on_cpu = plan_jobs(request, device), device.kind == "cpu"
    say = log or (lambda line: print(line, file=sys.stderr, flush=True))
    for note in _long_notes(request, jobs) if on_cpu else ():
        say(note)
    dtype = DTYPES[request.dtype or ("float32" if on_cpu else "bfloat16")]
    limit = TIME_LIMIT if on_cpu and request.repetitions is None and request.scale is None else None
    with harness_for(device) as harness:
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
        result = Result([], context, note=harness.note)
        try:
            with _progress(jobs, log) as advance:
                roofline = result.roofline = harness.roofline(dtype)
                context["ceilings"] = None if roofline is None else dataclasses.asdict(roofline)
                context["time_limit_s"] = limit
                runner = Runner(
                    harness,
                    dtype,
                    roofline,
                    backends=request.backends,
                    baselines=request.baselines,
                    seed=request.seed,
                    repetitions=request.repetitions,
                    time_limit=limit,
                )
                for job, rows in zip(jobs, runner.run(jobs), strict=True):
                    result.rows += rows
                    result.jobs.append(job)
                    advance(rows)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def _long_notes(request: Request, jobs: Sequence[Job]) -> list[str]:
    """What to do about shapes that were asked for as they are and will take long on a CPU."""
    if "padded_dot" not in request.baselines or request.scale is not None:
        return []
    long = dict.fromkeys((job.shape.label, job.shape.padded_flops) for job in jobs if job.shape.padded_flops > 20 * AUTO_PADDED_FLOPS)
    return [
        f"{label} is run as given: a padded dot of it takes {flops:.1e} operations. --scale auto makes it small, "
        "--baseline loop or none leaves the padded dots out."
        for label, flops in long
    ]


@contextlib.contextmanager
def _progress(jobs: Sequence[Job], log: Callable[[str], None] | None) -> Iterator[Callable[[list[Row]], None]]:
    """A bar with the time left on a terminal, a line a job elsewhere; both on stderr, so that stdout is the result alone."""
    done = 0
    if log is None and sys.stderr is not None and sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("measuring the roofline", total=len(jobs))

            def advance(rows: list[Row]) -> None:
                following = jobs[min(int(bar.tasks[0].completed) + 1, len(jobs) - 1)]
                bar.update(task, advance=1, description=f"{following.shape.label} {following.kind.name}")

            yield advance
        return
    say = log or (lambda line: print(line, file=sys.stderr, flush=True))

    def line(rows: list[Row]) -> None:
        nonlocal done
        job = jobs[done]
        done += 1
        states = (f"{r.backend} {r.status if r.median_ms is None or r.status != 'ok' else f'{r.median_ms:.3g} ms'}" for r in rows)
        say(f"[{done}/{len(jobs)}] {job.shape.label} {job.kind.name} {job.distribution}: {'; '.join(states)}")

    yield line


def print_machine(console: Console, result: Result) -> None:
    """On what it was measured, what bounds it, and what to make of it."""
    if result.rows:
        roofline = "" if result.roofline is None else f"; roofline: {result.roofline.describe()}"
        console.print(f"device: {result.context['device']}{roofline}", highlight=False, soft_wrap=True)
    if any(row.scale != 1 for row in result.rows):
        console.print("Shapes are scaled, as their titles say; --scale 1 runs them in full.", highlight=False, soft_wrap=True)
    for note in filter(None, (_single_calls(result), result.note)):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)


def _single_calls(result: Result) -> str:
    """What to say where most times are of one call, though nobody asked for that; else ""."""
    timed = [row for row in result.rows if row.status == "ok" and row.repetitions]
    once = sum(row.repetitions == 1 for row in timed)
    limit = result.context.get("time_limit_s")  # without it there are three calls at least, or as many as were asked for
    if limit is None or result.context.get("requested_repetitions") is not None or 2 * once <= len(timed):
        return ""
    why = f"the time limit is {limit:.0f} s for the whole benchmark{', and the machine was busy' if result.note else ''}"
    return (
        f"{once} of {len(timed)} times are of one call and no median (column runs), since {why}; "
        "--repetitions 5, or fewer models and classes, gives medians."
    )


def _write(request: Request, result: Result, console: Console) -> None:
    written: list[Path] = []
    if request.csv is not None:
        write_csv(request.csv, result.rows, result.context)
        written.append(request.csv)
    if request.json is not None:
        write_json(request.json, result.rows, result.record())
        written.append(request.json)
    for plot in request.plots:
        if any(row.floor_fraction is not None and not row.baseline for row in result.rows):
            plot_both(result.rows, plot, plot_note(result))
            written.append(plot)
        else:
            console.print(f"{plot} was not written: no backend has a row to plot.", highlight=False, soft_wrap=True)
    for path in written:
        if path != STDOUT:
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def plot_note(result: Result) -> str:
    """What stands under a plot: on what it was measured, how often, and when; and that the machine was busy, where it was."""
    versions, counts = result.context["versions"], [row.repetitions for row in result.rows if row.status == "ok" and row.repetitions]
    low, high = min(counts, default=0), max(counts, default=0)
    calls = "times of one call each" if high <= 1 else f"medians of {low if low == high else f'{low} to {high}'} timed calls"
    line = (
        f"{result.context['device']} · {result.context['operand_dtype']} · {result.context['requested_distribution']} sizes · {calls} · "
        f"hipgroupgemm {versions['hipgroupgemm']}, NumPy {versions['numpy']} · {result.context['date'][:10]}"
    )
    return f"{line}\n{result.note}" if result.note else line
