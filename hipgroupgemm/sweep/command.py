"""One sweep from a request to its exit status: plans the jobs, spreads them over the devices, keeps what is finished."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.benchmark.command import INTERRUPTED
from hipgroupgemm.measure.environment import blas_name, commit_of, cpu_model, load_average
from hipgroupgemm.measure.text import STDOUT, stdout_console, write_text
from hipgroupgemm.runtime.process import available_cores
from hipgroupgemm.sweep.jobs import RequestError, SweepRequest, plan_jobs
from hipgroupgemm.sweep.output import noise_notes, print_sweep, write_csv
from hipgroupgemm.sweep.planning import Task, key_of, plan_sweep
from hipgroupgemm.sweep.progress import Display, display
from hipgroupgemm.sweep.record import Record, Sweep, SweepFile, document, read_sweep, stamp_of
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
        store: whether winners go to the tuning store. overwrite: whether json may replace what is there.
    """

    json: Path | None = None
    csv: Path | None = None
    plots: Sequence[Path] = ()
    resume: Path | None = None
    store: bool = True
    overwrite: bool = False

    @property
    def sweep_file(self) -> Path | None:
        """The file of the sweep, None for none or standard output, which is written at the end."""
        path = self.json or self.resume
        return path if path is not None and path != STDOUT and (path.is_file() or not path.exists()) else None


@dataclasses.dataclass
class SweepResult:
    """What came of a sweep.

    Attributes:
        tasks: a job and kind of device each, in the requests' order. carried: what the file has of other problems and devices.
        header: the file's. waiting: jobs of the file's other requests that have not ended.
        stored: the places in the tuning store that now hold a result of this run. replaced: results of this run that later ones replaced.
    """

    tasks: list[Task]
    header: dict[str, Any]
    carried: list[Record] = dataclasses.field(default_factory=list)
    waiting: int = 0
    stored: set[Any] = dataclasses.field(default_factory=set)
    replaced: int = 0
    interrupted: bool = False
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        """The records of the tasks that have ended."""
        return [task.record for task in self.tasks if task.record is not None]

    @property
    def in_file(self) -> list[Record]:
        """What the file has now: of tasks that have not ended the results of earlier sweeps that do not count any more."""
        return [*self.carried, *(old for task in self.tasks if task.record is None for old in task.earlier), *self.records]

    def exit_code(self, named: Sequence[str] | None = None) -> int:
        """1 when a candidate is not right or a job failed, or a backend that the caller named ran nothing; 130 when interrupted; else 0."""
        if any(record.status == "failed" or any(row["verdict"] in BAD for row in record.rows) for record in self.records):
            return 1
        if self.interrupted:
            return INTERRUPTED
        ran = {row["backend"] for record in self.records for row in record.rows}
        return 1 if any(name not in ran for name in named or ()) else 0


def run(requests: Sequence[SweepRequest], outputs: Outputs) -> int:
    """Runs a sweep for a person at a terminal and returns the exit status: one request, or those of a file that is taken up.

    Raises:
        ValueError, OSError, RuntimeError: the request can't be met, or a file can't be written.
    """
    to_stdout = STDOUT in (outputs.json, outputs.csv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 144) if to_stdout else stdout_console()
    result = sweep(requests, outputs)
    print_sweep(console, result.records)
    session = result.header["sessions"][-1]
    for warning in [*result.warnings, *noise_notes(result.records, session["load_average"], session["machine"]["cores"])]:
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    _write(outputs, result, console)
    _say_what_is_left(outputs, result, console)
    return result.exit_code([name for request in requests for name in request.backends or ()])


def sweep(requests: Sequence[SweepRequest], outputs: Outputs, log: Callable[[str], None] | None = None) -> SweepResult:
    """Runs a sweep with progress on stderr. Ctrl-C ends it early: the result then has the jobs that had ended.

    Args:
        log: takes the lines about progress instead of stderr.

    Raises:
        RequestError, DistributionError: nothing was run. ValueError, RuntimeError, OSError: as `run`.
    """
    say = log or (lambda line: print(line, file=sys.stderr, flush=True))
    old, stamp = _old_sweep(outputs, say)
    devices = list(dict.fromkeys(device for request in requests for device in request.devices))
    for request in requests:
        for kind in dict.fromkeys(device.partition(":")[0] for device in request.devices):
            plan_jobs(request, kind)  # what is wrong with a request is said before drivers are started
    load = load_average()
    with WorkerPool(devices) as pool:
        for worker in pool.workers:
            reason = worker.wait_ready()
            if reason:
                elsewhere = "; --devices names others to go on with" if old is not None else ""
                raise RequestError(f"{worker.device} is of no use: {reason}{elsewhere}")
        plan = plan_sweep(requests, {worker.device: worker.identity or {} for worker in pool.workers}, old)
        _check_names(plan.tasks, pool.workers)
        session = {
            "started": _now(),
            "machine": _machine(),
            "load_average": load,
            "devices": {worker.device: worker.identity for worker in pool.workers},
            "jobs_kept": plan.kept,
        }
        sessions = old.header.get("sessions", []) if old is not None else []
        header = {"requests": plan.requests, "jobs_wanted": plan.wanted, "sessions": [*sessions, session]}
        result = SweepResult(plan.tasks, header, plan.carried, plan.waiting)
        if plan.kept:
            say(f"{outputs.resume}: {plan.kept} of {len(plan.tasks)} jobs are done")
        if plan.replaced:
            say(f"{outputs.resume}: {plan.replaced} jobs in it failed, or are of other versions or settings: they are run again")
        if plan.waiting:
            say(f"{outputs.resume}: it waits for jobs that are not asked for now, which stay to be done: {plan.waiting}")
        file = None
        if outputs.sweep_file is not None:
            file = SweepFile(outputs.sweep_file, header, result.in_file, stamp)
        try:
            with display(result.tasks, log) as shown:
                _drive(outputs, pool, result, file, shown)
        except KeyboardInterrupt:
            result.interrupted = True
        finally:
            if file is not None:
                file.close()
                if result.interrupted or any(task.earlier for task in result.tasks):  # maybe in the middle of a line, or with old results
                    write_text(file.path, document(header, result.in_file))
    return result


def _check_names(tasks: Sequence[Task], workers: Sequence[Worker]) -> None:
    """Names of algorithms that no job has anywhere are an error before anything is run."""
    asked: dict[str, bool] = {}
    for worker in {key_of(worker.identity): worker for worker in workers}.values():
        own = [task for task in tasks if task.identity == worker.identity and not isinstance(task.settings["algorithms"], str)]
        for settings in {key_of(task.settings): task.settings for task in own}.values():
            missing = worker.missing([task.job for task in own if task.settings == settings], settings)
            asked.update({name: asked.get(name, False) or name not in missing for name in settings["algorithms"]})
    unknown = [name for name, found in asked.items() if not found]
    if unknown:
        raise RequestError(
            f"--algorithms {','.join(unknown)}: no backend has {'that' if len(unknown) == 1 else 'those'} for any of these problems and "
            "devices; hipgroupgemm list --shape M,K,N,E --device DEVICE prints the names there are"
        )


def _old_sweep(outputs: Outputs, say: Callable[[str], None]) -> tuple[Sweep | None, Any]:
    """The sweep that is to be taken up, and the stamp of what may be replaced.

    What another file to write holds already is not overwritten unless that was asked for.
    """
    old = None
    if outputs.resume is not None:
        if outputs.resume.exists():
            old = read_sweep(outputs.resume)
            for warning in old.warnings:
                say(warning)
        else:
            say(f"{outputs.resume}: is not there yet, the sweep starts anew")
    path = outputs.sweep_file
    taken_up = outputs.resume is not None and path is not None and os.path.realpath(path) == os.path.realpath(outputs.resume)
    stamp = stamp_of(path) if path is not None else None
    if taken_up:
        return old, old.stamp if old is not None else None
    if path is not None and stamp is not None and not outputs.overwrite:
        raise RequestError(f"{path}: {_what_is_there(path)}, --overwrite to lose that, or another name for a new sweep")
    return old, stamp


def _what_is_there(path: Path) -> str:
    try:
        there = read_sweep(path)
    except (ValueError, OSError):
        return "is there already, and is no sweep that can be read; give"
    state = "a sweep" if there.finished else "an unfinished sweep"
    return f"holds {state} with {len(there.records)} jobs; give --resume {path} to go on with it"


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


def _drive(outputs: Outputs, pool: WorkerPool, result: SweepResult, file: SweepFile | None, shown: Display) -> None:
    """Gives workers jobs until all have ended. Devices that are alike share theirs."""
    waiting: dict[str, deque[int]] = {}
    for number, task in enumerate(result.tasks):
        queue = waiting.setdefault(key_of(task.identity), deque())
        if task.record is None:
            queue.append(number)

    def finish(number: int, device: str, outcome: Outcome) -> None:
        task = result.tasks[number]
        task.record = record = _record(task, device, outcome)
        if outputs.store and outcome.report is not None:
            places = _keep(outcome.report)
            record.stored = bool(places)
            result.replaced += len(result.stored & places)
            result.stored |= places
        if file is not None:
            file.append(record)
        shown.finished(device, number, record)

    def next_job(worker: Worker) -> None:
        queue = waiting[key_of(worker.identity)]
        worker.job = None
        if queue:
            number = queue.popleft()
            shown.started(worker.device, number)
            worker.send(number, result.tasks[number].job, result.tasks[number].settings)

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
                    key = key_of(worker.identity)
                    while waiting[key] and not any(key_of(other.identity) == key for other in pool.workers):
                        finish(waiting[key].popleft(), worker.device, left_over)
                    continue
            next_job(worker)


def _record(task: Task, device: str, outcome: Outcome) -> Record:
    report = outcome.report
    best = report.best if report is not None else None
    return Record(
        job=task.job.to_dict(),
        settings=task.settings,
        device=device,
        identity=task.identity,
        status=outcome.status,
        reason=outcome.reason,
        best=None if best is None else best.to_dict(),
        report=None if report is None else report.to_dict(),
        finished=_now(),
    )


def _keep(report: TuningReport) -> set[Any]:
    """Stores a report's winners, and what is wrong, which must not be an answer any more; returns the store's places that hold them now.

    A store that is off or can't be written to does not end a sweep: it has said so itself.
    """
    from hipgroupgemm.store.store import TuningStore

    return {record.place for record in TuningStore().add(report)}


# ---- what is left of it --------------------------------------------------------------------------------------------------------


def _write(outputs: Outputs, result: SweepResult, console: Console) -> None:
    written = [outputs.sweep_file] if outputs.sweep_file is not None else []
    if outputs.json is not None and outputs.sweep_file is None:  # a pipe, or standard output
        write_text(outputs.json, document(result.header, result.in_file))
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
        from hipgroupgemm.store.store import TuningStore

        replaced = f"; {result.replaced} more were replaced by these" if result.replaced else ""
        text = f"Results of this run in the tuning store: {len(result.stored)}, in {TuningStore().directory}{replaced}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    bad = sum(row["verdict"] in BAD for record in result.records for row in record.rows)
    failed = sum(record.status == "failed" for record in result.records)
    if bad or failed:
        console.print(f"Candidates that are not right: {bad}; jobs that failed: {failed}; see above.", style="bold red", highlight=False)
    path = outputs.sweep_file
    if result.waiting and not result.interrupted and path is not None:
        text = f"{path}: other jobs that wait: {result.waiting}; hipgroupgemm sweep --resume {path} runs all that are left"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if result.interrupted:
        left = len(result.tasks) - len(result.records)
        how = f"; go on with hipgroupgemm sweep --resume {path}" if path is not None else ""
        text = f"Stopped. Jobs kept: {len(result.records)}, left: {left}{how}."
        console.print(text, style="bold", markup=False, highlight=False, soft_wrap=True)
