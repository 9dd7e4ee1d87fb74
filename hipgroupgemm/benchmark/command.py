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
from hipgroupgemm.benchmark.ceilings import Ceilings, measure_ceilings
from hipgroupgemm.benchmark.environment import describe
from hipgroupgemm.benchmark.labs import Lab, lab_for
from hipgroupgemm.benchmark.runner import FINE, Job, Row, Runner
from hipgroupgemm.benchmark.table import print_rows, write_csv, write_json
from hipgroupgemm.dtypes import DTYPES
from hipgroupgemm.workloads import (
    DISTRIBUTIONS,
    MoEShape,
    RaggedDotClass,
    check_group_sizes,
    group_sizes_of,
    read_group_sizes,
    scale_group_sizes,
)

__all__ = ["AUTO_PADDED_FLOPS", "Request", "Result", "measure", "plan_jobs", "plot_note", "print_machine", "run", "stdout_console"]

AUTO_PADDED_FLOPS = 10**10
"""On a CPU a shape is scaled until a padded dot takes at most so many operations: a tenth of a second on two cores."""

TIME_LIMIT = 65.0
"""Seconds that a benchmark on a CPU with nothing said about scale or repetitions gives to its jobs: it ends within two minutes."""

INTERRUPTED = 130
_PLAIN_WIDTH = 144


@dataclasses.dataclass
class Request:
    """What to run. scale=None is automatic, dtype=None the device's own, backends=None all that can; paths are files to write."""

    shapes: Sequence[MoEShape]
    classes: Sequence[RaggedDotClass]
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
    plot: Path | None = None


@dataclasses.dataclass
class Result:
    """What came of it: the rows of finished jobs, the ceilings, what it ran on; `interrupted` when Ctrl-C stopped it."""

    rows: list[Row]
    context: dict[str, Any]
    interrupted: bool = False
    ceilings: Ceilings | None = None

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
        ValueError: the file of group sizes does not fit, or there is no distribution or file of that name.
    """
    jobs = []
    for published in request.shapes:
        if request.scale is not None:
            shape = published.scaled(request.scale) if request.scale > 1 else published
        else:
            shape = published.fitting(AUTO_PADDED_FLOPS) if scales else published
        for name, sizes in _distributions(request, published, shape):
            jobs += [Job(kind, shape, sizes, name) for kind in request.classes]
    return jobs


def _distributions(request: Request, published: MoEShape, shape: MoEShape) -> Iterator[tuple[str, Any]]:
    if request.distribution in DISTRIBUTIONS:
        yield request.distribution, group_sizes_of(request.distribution, shape, request.seed)
        return
    path = Path(request.distribution)
    if not path.exists():
        raise ValueError(f"--distribution {request.distribution}: wanted {', '.join(DISTRIBUTIONS)} or a file, and there is no such file")
    vectors = read_group_sizes(path)
    for index, vector in enumerate(vectors):
        name = path.name if len(vectors) == 1 else f"{path.name}[{index}]"
        sizes = check_group_sizes(vector, published, f"--distribution {name}")
        yield name, scale_group_sizes(sizes, shape.scale)


def run(request: Request) -> int:
    """Runs a request for a person at a terminal and returns the exit status.

    Raises:
        ValueError, OSError: the request can't be met; nothing was run.
        RuntimeError: no such device.
    """
    console = stdout_console()
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
        dtype = DTYPES[request.dtype or lab.default_dtype]
        result = Result([], _context(request, lab, dtype))
        try:
            with _progress(jobs, log) as advance:
                ceilings = result.ceilings = measure_ceilings(lab, dtype, request.seed)
                result.context["ceilings"] = dataclasses.asdict(ceilings)
                free_choice = lab.scales and request.repetitions is None and request.scale is None
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
                for rows in runner.run(jobs):
                    result.rows += rows
                    advance(rows)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def _context(request: Request, lab: Lab, dtype: np.dtype[Any]) -> dict[str, Any]:
    facts = describe(lab)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": request.seed,
        "requested_scale": "auto" if request.scale is None else request.scale,
        "operand_dtype": dtype.name,
        "requested_distribution": request.distribution,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
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
    if sys.stdout.isatty():
        return Console()
    columns = os.environ.get("COLUMNS", "")
    return Console(width=max(_PLAIN_WIDTH, int(columns) if columns.isdigit() else 0))


def print_machine(console: Console, result: Result) -> None:
    """On what it was measured, what bounds it, and what to make of it."""
    if result.ceilings is not None:
        console.print(f"device: {result.context['device']}; ceilings: {result.ceilings.describe()}", highlight=False, soft_wrap=True)
    if any(row.scale != 1 for row in result.rows):
        console.print("Shapes are scaled, as their titles say; --scale 1 runs the published ones.", highlight=False, soft_wrap=True)
    load, cores = result.context.get("load_average"), result.context["cores"]
    if load is not None and load > cores / 2:
        text = (
            f"The load average was {load:.1f} on {cores} cores before this began: others were at work, so the times are not to be trusted."
        )
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


def _write(request: Request, result: Result, console: Console) -> None:
    written: list[Path] = []
    if request.csv is not None:
        write_csv(request.csv, result.rows, result.context)
        written.append(request.csv)
    if request.json is not None:
        write_json(request.json, result.rows, {**result.context, "interrupted": result.interrupted})
        written.append(request.json)
    if request.plot is not None:
        from hipgroupgemm.benchmark.plots import plot_both

        if any(row.floor_fraction is not None and not row.baseline for row in result.rows):
            plot_both(result.rows, request.plot, plot_note(result))
            written.append(request.plot)
        else:
            console.print(f"{request.plot} was not written: no backend has a row to plot.", highlight=False, soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def plot_note(result: Result) -> str:
    """One line under a plot: on what it was measured, and when."""
    versions = result.context["versions"]
    return (
        f"{result.context['device']} · {result.context['operand_dtype']} · {result.context['requested_distribution']} sizes · "
        f"hipgroupgemm {versions['hipgroupgemm']}, NumPy {versions['numpy']} · {result.context['date'][:10]}"
    )
