"""One benchmark from a request to its exit status: plans the jobs, shows progress, keeps what is finished, writes the files."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hipgroupgemm.benchmark.baselines import BASELINES
from hipgroupgemm.benchmark.labs import Lab, lab_for
from hipgroupgemm.benchmark.runner import FINE, Job, Row, Runner
from hipgroupgemm.benchmark.table import STDOUT, print_rows, write_csv, write_json
from hipgroupgemm.measure.environment import busy_note, describe, load_average
from hipgroupgemm.measure.roofline import Roofline, measure_ceilings
from hipgroupgemm.measure.workloads import (
    DISTRIBUTIONS,
    MoEShape,
    RaggedDotClass,
    check_group_sizes,
    group_sizes_of,
    read_group_sizes,
    scale_group_sizes,
)
from hipgroupgemm.operands.dtypes import DTYPES

__all__ = [
    "AUTO_PADDED_FLOPS",
    "DistributionError",
    "Request",
    "Result",
    "measure",
    "plan_jobs",
    "plot_note",
    "print_machine",
    "run",
    "stdout_console",
]

AUTO_PADDED_FLOPS = 10**10
"""On a CPU a shape is scaled until a padded dot takes at most so many operations: a tenth of a second on two cores."""

TIME_LIMIT = 65.0
"""Seconds that a benchmark on a CPU with nothing said about scale or repetitions gives to its jobs: it ends within two minutes."""

INTERRUPTED = 130
_PLAIN_WIDTH = 144


class DistributionError(ValueError):
    """The distribution has no such name, its file can't be read, or what it holds does not fit a shape."""


@dataclasses.dataclass
class Request:
    """What to run. scale=None is automatic, dtype=None the device's own, backends=None all that can; paths are files to write.

    With scale=None `shapes` are scaled on a CPU, and `exact_shapes`, run after them, are not: someone asked for just these.
    """

    shapes: Sequence[MoEShape]
    classes: Sequence[RaggedDotClass]
    exact_shapes: Sequence[MoEShape] = ()
    dtype: str | None = None
    distribution: str = "balanced"
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
    """What came of it: the rows of finished jobs, the ceilings, what it ran on; `interrupted` when Ctrl-C stopped it.

    jobs are the finished ones; their group sizes go into the JSON.
    """

    rows: list[Row]
    context: dict[str, Any]
    jobs: list[Job] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    ceilings: Roofline | None = None

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


def plan_jobs(request: Request, scales: bool) -> list[Job]:
    """The jobs of a request, the classes of a shape together.

    Args:
        scales: whether scale=None means that shapes are scaled (on a CPU) or left alone.

    Raises:
        DistributionError: the file of group sizes does not fit, or there is no distribution or file of that name.
    """
    jobs = []
    for whole, exact in [(one, False) for one in request.shapes] + [(one, True) for one in request.exact_shapes]:
        if request.scale is not None:
            shape = whole.scaled(request.scale) if request.scale > 1 else whole
        else:
            shape = whole.fitting(AUTO_PADDED_FLOPS) if scales and not exact else whole
        try:
            for name, sizes in _distributions(request, whole, shape):
                jobs += [Job(kind, shape, sizes, name) for kind in request.classes]
        except (ValueError, OSError) as error:
            raise DistributionError(str(error)) from error
    return jobs


def _distributions(request: Request, whole: MoEShape, shape: MoEShape) -> Iterator[tuple[str, Any]]:
    if request.distribution in DISTRIBUTIONS:
        yield request.distribution, group_sizes_of(request.distribution, shape, request.seed)
        return
    path = Path(request.distribution)
    if not path.exists():
        raise ValueError(f"{request.distribution!r}: wanted {', '.join(DISTRIBUTIONS)} or a file, and there is no such file")
    vectors = read_group_sizes(path, whole.e)
    for index, vector in enumerate(vectors):
        name = path.name if len(vectors) == 1 else f"{path.name}[{index}]"
        sizes = check_group_sizes(vector, whole, name)
        yield name, scale_group_sizes(sizes, shape.scale)


def run(request: Request) -> int:
    """Runs a request for a person at a terminal and returns the exit status.

    Raises:
        ValueError, OSError: the request can't be met; nothing was run.
        RuntimeError: no such device.
    """
    # where a file goes to stdout, that is the file's alone
    console = Console(stderr=True, width=_plain_width(sys.stderr)) if STDOUT in (request.csv, request.json) else stdout_console()
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
    with lab_for(request.device) as lab:
        jobs = plan_jobs(request, lab.scales)
        say = log or (lambda line: print(line, file=sys.stderr, flush=True))
        for note in _long_notes(request, jobs) if lab.scales else ():
            say(note)
        dtype = DTYPES[request.dtype or lab.default_dtype]
        result = Result([], _context(request, lab, dtype))
        try:
            with _progress(jobs, log) as advance:
                ceilings = result.ceilings = measure_ceilings(lab, dtype, request.seed)
                result.context["ceilings"] = dataclasses.asdict(ceilings)
                free_choice = lab.scales and request.repetitions is None and request.scale is None
                result.context["time_limit_s"] = TIME_LIMIT if free_choice else None
                runner = Runner(
                    lab,
                    dtype,
                    ceilings,
                    backends=request.backends,
                    baselines=request.baselines,
                    seed=request.seed,
                    repetitions=request.repetitions,
                    time_limit=TIME_LIMIT if free_choice else None,
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


def _context(request: Request, lab: Lab, dtype: np.dtype[Any]) -> dict[str, Any]:
    facts = describe(lab)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": request.seed,
        "requested_scale": request.scale if request.scale is not None else "auto" if request.shapes else 1,
        "requested_repetitions": request.repetitions,
        "operand_dtype": dtype.name,
        "requested_distribution": request.distribution,
        "load_average": load_average(),
        **facts,
    }


@contextlib.contextmanager
def _progress(jobs: Sequence[Job], log: Callable[[str], None] | None) -> Iterator[Callable[[list[Row]], None]]:
    """A bar with the time left on a terminal, a line a job elsewhere; both on stderr, so that stdout is the result alone."""
    if log is None and sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("measuring the ceilings", total=len(jobs))

            def advance(rows: list[Row]) -> None:
                done = int(bar.tasks[0].completed) + 1
                following = f"{jobs[done].shape.label} {jobs[done].kind.name}" if done < len(jobs) else "done"
                bar.update(task, advance=1, description=following)

            yield advance
        return
    done = 0
    say = log or (lambda line: print(line, file=sys.stderr, flush=True))

    def line(rows: list[Row]) -> None:
        nonlocal done
        done += 1
        first = rows[0] if rows else None
        states = "; ".join(f"{row.backend} {_state(row)}" for row in rows)
        name = f"{first.model} {first.ragged_dot_class} {first.distribution}" if first else ""
        say(f"[{done}/{len(jobs)}] {name}: {states}")

    yield line


def _state(row: Row) -> str:
    return f"{row.median_ms:.3g} ms" if row.status == "ok" and row.median_ms is not None else row.status


def stdout_console() -> Console:
    """A console on stdout; where that is no terminal, wide enough for the whole table, whatever COLUMNS says of some other window."""
    return Console(width=_plain_width(sys.stdout))


def _plain_width(stream: Any) -> int | None:
    if stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    return max(_PLAIN_WIDTH, int(columns) if columns.isdigit() else 0)


def print_machine(console: Console, result: Result) -> None:
    """On what it was measured, what bounds it, and what to make of it."""
    if result.ceilings is not None:
        console.print(f"device: {result.context['device']}; ceilings: {result.ceilings.describe()}", highlight=False, soft_wrap=True)
    if any(row.scale != 1 for row in result.rows):
        console.print("Shapes are scaled, as their titles say; --scale 1 runs them in full.", highlight=False, soft_wrap=True)
    load, cores = result.context.get("load_average"), result.context["cores"]
    busy = busy_note(load, cores)
    once = _single_calls(result, bool(busy))
    if once:
        console.print(once, style="yellow", highlight=False, soft_wrap=True)
    if busy:
        console.print(busy, style="yellow", highlight=False, soft_wrap=True)


def _single_calls(result: Result, busy: bool) -> str:
    """What to say where most times are of one call, though nobody asked for that; else ""."""
    timed = [row for row in result.rows if row.status == "ok" and row.repetitions]
    once = sum(row.repetitions == 1 for row in timed)
    limit = result.context.get("time_limit_s")  # without it there are three calls at least, or as many as were asked for
    if limit is None or result.context.get("requested_repetitions") is not None or 2 * once <= len(timed):
        return ""
    why = f"the time limit is {limit:.0f} s for the whole benchmark"
    also = ", and the machine was busy" if busy else ""
    return (
        f"{once} of {len(timed)} times are of one call and no median (column runs), since {why}{also}; "
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
    if request.plots:
        from hipgroupgemm.benchmark.plots import plot_both

        plottable = any(row.floor_fraction is not None and not row.baseline for row in result.rows)
        for plot in request.plots:
            if plottable:
                plot_both(result.rows, plot, plot_note(result))
                written.append(plot)
            else:
                console.print(f"{plot} was not written: no backend has a row to plot.", highlight=False, soft_wrap=True)
    for path in written:
        if path != STDOUT:
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def plot_note(result: Result) -> str:
    """One line under a plot: on what it was measured, how often, and when."""
    versions = result.context["versions"]
    return (
        f"{result.context['device']} · {result.context['operand_dtype']} · {result.context['requested_distribution']} sizes · "
        f"{_calls_note(result.rows)} · "
        f"hipgroupgemm {versions['hipgroupgemm']}, NumPy {versions['numpy']} · {result.context['date'][:10]}"
    )


def _calls_note(rows: Sequence[Row]) -> str:
    counts = [row.repetitions for row in rows if row.status == "ok" and row.repetitions]
    low, high = min(counts, default=0), max(counts, default=0)
    if high <= 1:
        return "times of one call each"
    return f"medians of {low if low == high else f'{low} to {high}'} timed calls"
