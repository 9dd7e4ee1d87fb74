"""One sweep from a request to its exit status: plans the jobs, spreads them over the devices, keeps what is finished."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.benchmark.command import INTERRUPTED, stdout_console
from hipgroupgemm.benchmark.environment import blas_name, commit_of, cpu_model
from hipgroupgemm.benchmark.labs import available_cores
from hipgroupgemm.benchmark.table import STDOUT, write_text
from hipgroupgemm.sweep.jobs import RequestError, SweepJob, SweepRequest, plan_jobs
from hipgroupgemm.sweep.output import print_sweep, write_csv
from hipgroupgemm.sweep.progress import Display, display
from hipgroupgemm.sweep.record import Record, Sweep, SweepFile, document, read_sweep
from hipgroupgemm.sweep.workers import Outcome, Progress, Worker, WorkerPool
from hipgroupgemm.tuning.report import TuningReport

__all__ = ["BAD", "Outputs", "SweepResult", "run", "sweep"]

BAD = ("wrong", "nondeterministic", "crashed", "hung", "failed")
"""The verdicts on a candidate that make a sweep's exit status 1."""


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where a sweep's results go.

    Attributes:
        json: the sweep's file, kept up to date while it runs. csv: a line a candidate. plots: pictures.
        resume: a sweep's file to take up; where json is None, it is the file that is written, too.
        store: whether winners go to the tuning store.
    """

    json: Path | None = None
    csv: Path | None = None
    plots: Sequence[Path] = ()
    resume: Path | None = None
    store: bool = True

    @property
    def sweep_file(self) -> Path | None:
        """The file of the sweep, None for none or standard output, which is written at the end."""
        path = self.json or self.resume
        return path if path is not None and path != STDOUT and (path.is_file() or not path.exists()) else None


@dataclasses.dataclass
class Task:
    """A job on one kind of device. record is None until it has ended."""

    job: SweepJob
    identity: dict[str, Any]
    record: Record | None = None


@dataclasses.dataclass
class SweepResult:
    """What came of a sweep: a task a job and kind of device, in the request's order; and what the file has besides.

    kept: tasks that an earlier sweep has done. replaced: results of it that do not count any more. stored: winners that were stored.
    """

    tasks: list[Task]
    header: dict[str, Any]
    carried: list[Record] = dataclasses.field(default_factory=list)
    kept: int = 0
    replaced: int = 0
    stored: int = 0
    interrupted: bool = False
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        """The records of the tasks that have ended."""
        return [task.record for task in self.tasks if task.record is not None]

    def exit_code(self, named: Sequence[str] | None = None) -> int:
        """1 when a candidate is not right or a job failed, or a backend that the caller named ran nothing; 130 when interrupted; else 0."""
        if any(record.status == "failed" or any(row["verdict"] in BAD for row in record.rows) for record in self.records):
            return 1
        if self.interrupted:
            return INTERRUPTED
        ran = {row["backend"] for record in self.records for row in record.rows}
        return 1 if any(name not in ran for name in named or ()) else 0


def run(request: SweepRequest, outputs: Outputs) -> int:
    """Runs a sweep for a person at a terminal and returns the exit status.

    Raises:
        ValueError, OSError, RuntimeError: the request can't be met, or a file can't be written.
    """
    to_stdout = STDOUT in (outputs.json, outputs.csv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 144) if to_stdout else stdout_console()
    result = sweep(request, outputs)
    print_sweep(console, result.records)
    for warning in result.warnings:
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    _write(request, outputs, result, console)
    _say_what_is_left(outputs, result, console)
    return result.exit_code(request.backends)


def sweep(request: SweepRequest, outputs: Outputs, log: Callable[[str], None] | None = None) -> SweepResult:
    """Runs a sweep with progress on stderr. Ctrl-C ends it early: the result then has the jobs that had ended.

    Args:
        log: takes the lines about progress instead of stderr.

    Raises:
        RequestError, DistributionError: nothing was run. ValueError, RuntimeError, OSError: as `run`.
    """
    say = log or (lambda line: print(line, file=sys.stderr, flush=True))
    old = _old_sweep(outputs, say)
    jobs = {kind: plan_jobs(request, kind) for kind in dict.fromkeys(device.partition(":")[0] for device in request.devices)}
    with WorkerPool(request.devices) as pool:
        for worker in pool.workers:
            reason = worker.wait_ready()
            if reason:
                raise RequestError(f"{worker.device} is of no use: {reason}")
        result = _plan(request, outputs, pool.workers, jobs, old)
        if result.kept:
            say(f"{outputs.resume}: {result.kept} of {len(result.tasks)} jobs are done")
        if result.replaced:
            say(f"{outputs.resume}: {result.replaced} jobs in it failed, or are of other versions or settings: they are run again")
        file = None
        if outputs.sweep_file is not None:
            file = SweepFile(outputs.sweep_file, result.header, [*result.carried, *result.records])
        try:
            with display(result.tasks, log) as shown:
                _drive(request, outputs, pool, result, file, shown)
        except KeyboardInterrupt:
            result.interrupted = True
        finally:
            if file is not None:
                file.close()
                if result.interrupted:  # maybe in the middle of a line
                    write_text(file.path, document(result.header, [*result.carried, *result.records]))
    return result


def _old_sweep(outputs: Outputs, say: Callable[[str], None]) -> Sweep | None:
    """The sweep that is to be taken up. A file of an unfinished sweep is not overwritten by a new one."""
    path = outputs.sweep_file
    if outputs.resume is not None:
        if not outputs.resume.exists():
            say(f"{outputs.resume}: is not there yet, the sweep starts anew")
            return None
        old = read_sweep(outputs.resume)
        for warning in old.warnings:
            say(warning)
        return old
    if path is not None and path.exists():
        try:
            there = read_sweep(path)
        except (ValueError, OSError):
            return None  # some other file, which --json replaces as every output does
        if not there.finished:
            raise RequestError(
                f"{path}: holds an unfinished sweep with {len(there.records)} jobs; take it up with --resume {path}, or remove the file"
            )
    return None


def _plan(
    request: SweepRequest, outputs: Outputs, workers: Sequence[Worker], jobs: Mapping[str, Sequence[SweepJob]], old: Sweep | None
) -> SweepResult:
    """The tasks, those that an earlier sweep has done with their records, and what the file says besides."""
    identities: dict[str, dict[str, Any]] = {}
    for worker in workers:
        identities.setdefault(_key(worker.identity), worker.identity or {})
    tasks = [Task(job, identity) for identity in identities.values() for job in jobs[str(identity["kind"])]]
    settings = request.settings()
    carried, used = [], set()
    for record in old.records if old is not None else []:
        match = next((t for t in tasks if t.record is None and record.answers(t.job.to_dict(), settings, t.identity)), None)
        if match is not None:
            match.record = record
            used.add(id(record))
        elif not any(record.job == t.job.to_dict() and _model(record.identity) == _model(t.identity) for t in tasks):
            carried.append(record)  # another problem or another device: its result is still good
    session = {
        "started": _now(),
        "machine": _machine(),
        "devices": {worker.device: worker.identity for worker in workers},
        "jobs_kept": len(used),
    }
    header = {
        "request": request.to_dict(),
        "jobs_wanted": len(tasks) + len(carried),
        "sessions": [*(old.header.get("sessions", []) if old is not None else []), session],
    }
    replaced = len(old.records) - len(used) - len(carried) if old is not None else 0
    return SweepResult(tasks, header, carried, len(used), replaced)


def _key(identity: Any) -> str:
    return json.dumps(identity, sort_keys=True)


def _model(identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a device is, whatever versions run on it."""
    return tuple(identity.get(name) for name in ("kind", "target", "name", "compute_units"))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _machine() -> dict[str, Any]:
    import platform

    import hipgroupgemm

    commit, changed = commit_of(Path(hipgroupgemm.__file__).resolve().parent.parent)
    return {
        "cpu": cpu_model(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "blas": blas_name(),
        "commit": commit,
        "uncommitted_changes": changed,
    }


# ---- running -------------------------------------------------------------------------------------------------------------------


def _drive(request: SweepRequest, outputs: Outputs, pool: WorkerPool, result: SweepResult, file: SweepFile | None, shown: Display) -> None:
    """Gives workers jobs until all have ended. Devices that are alike share theirs."""
    settings = request.settings()
    waiting: dict[str, deque[int]] = {}
    for number, task in enumerate(result.tasks):
        queue = waiting.setdefault(_key(task.identity), deque())
        if task.record is None:
            queue.append(number)

    def finish(number: int, device: str, outcome: Outcome) -> None:
        task = result.tasks[number]
        task.record = record = _record(task, settings, device, outcome)
        if outputs.store and outcome.report is not None:
            record.stored = _keep(outcome.report)
            result.stored += record.stored
        if file is not None:
            file.append(record)
        shown.finished(device, number, record)

    def next_job(worker: Worker) -> None:
        queue = waiting[_key(worker.identity)]
        worker.job = None
        if queue:
            number = queue.popleft()
            shown.started(worker.device, number)
            worker.send(number, result.tasks[number].job, settings)

    for worker in list(pool.workers):
        next_job(worker)
    while any(worker.job is not None for worker in pool.workers):
        for worker, message in pool.messages():
            if isinstance(message, Progress):
                shown.progress(worker.device, message)
                continue
            at_work = worker.job
            if at_work is None:  # pragma: no cover - messages() listens to workers at work
                continue
            finish(at_work, worker.device, message)
            if message.status == "failed":
                worker.job = None
                gone = worker.restart()
                if gone:
                    result.warnings.append(f"{worker.device} is gone ({gone}); the sweep went on without it")
                    worker.stop()
                    pool.workers.remove(worker)
                    left_over = Outcome("failed", f"{worker.device} is gone: {gone}")
                    key = _key(worker.identity)
                    while waiting[key] and not any(_key(other.identity) == key for other in pool.workers):
                        finish(waiting[key].popleft(), worker.device, left_over)
                    continue
            next_job(worker)


def _record(task: Task, settings: dict[str, Any], device: str, outcome: Outcome) -> Record:
    report = outcome.report
    best = report.best if report is not None else None
    return Record(
        job=task.job.to_dict(),
        settings=settings,
        device=device,
        identity=task.identity,
        status=outcome.status,
        reason=outcome.reason,
        best=None if best is None else best.to_dict(),
        report=None if report is None else report.to_dict(),
        finished=_now(),
    )


def _keep(report: TuningReport) -> bool:
    """Stores a report's winner, and what is wrong, which must not be an answer any more; whether there was a winner to store.

    A store that is off or can't be written to does not end a sweep: it has said so itself.
    """
    from hipgroupgemm.tuning.store import TuningStore

    return bool(TuningStore().add(report))


# ---- what is left of it --------------------------------------------------------------------------------------------------------


def _write(request: SweepRequest, outputs: Outputs, result: SweepResult, console: Console) -> None:
    written = [outputs.sweep_file] if outputs.sweep_file is not None else []
    if outputs.json is not None and outputs.sweep_file is None:  # a pipe, or standard output
        write_text(outputs.json, document(result.header, result.records))
    if outputs.csv is not None:
        write_csv(outputs.csv, result.records)
        written.append(outputs.csv)
    if outputs.plots:
        from hipgroupgemm.sweep.plots import plot_sweep

        for path in outputs.plots:
            try:
                plot_sweep(result.records, path)
            except ValueError as error:
                console.print(f"{path} was not written: {error}", markup=False, highlight=False, soft_wrap=True)
                continue
            written.append(path)
    for path in written:
        if path != STDOUT:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _say_what_is_left(outputs: Outputs, result: SweepResult, console: Console) -> None:
    if result.stored:
        from hipgroupgemm.tuning.store import TuningStore

        text = f"Winners that went to the tuning store: {result.stored}, in {TuningStore().directory}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    bad = sum(row["verdict"] in BAD for record in result.records for row in record.rows)
    failed = sum(record.status == "failed" for record in result.records)
    if bad or failed:
        console.print(f"Candidates that are not right: {bad}; jobs that failed: {failed}; see above.", style="bold red", highlight=False)
    if result.interrupted:
        left = len(result.tasks) - len(result.records)
        path = outputs.sweep_file
        how = f"; go on with hipgroupgemm sweep --resume {path}" if path is not None else ""
        text = f"Stopped. Jobs kept: {len(result.records)}, left: {left}{how}."
        console.print(text, style="bold", markup=False, highlight=False, soft_wrap=True)
