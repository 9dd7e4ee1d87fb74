"""A sweep from a request to its exit status: spreads jobs over the devices, keeps what is finished."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console

from hipgroupgemm.benchmark.plots import write_panels
from hipgroupgemm.measure.environment import describe, load_average
from hipgroupgemm.measure.text import STDOUT, console_for, number_text, progress, say
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.processes import Worker, WorkerTimedOut, available_cores
from hipgroupgemm.store.store import default_store
from hipgroupgemm.sweep.jobs import RequestError, SweepJob, SweepRequest, plan_jobs
from hipgroupgemm.sweep.report import counts_text, print_sweep, sweep_lines, sweep_panels, warnings_of, write_csv
from hipgroupgemm.sweep.results import BAD, DONE, Header, Record, SweepFile, check_free, identity_text, kind_of
from hipgroupgemm.tuning.keep import keep
from hipgroupgemm.tuning.report import TuningReport

__all__ = ["Outputs", "resume", "run_sweep"]

INTERRUPTED = 130  # the exit status after Ctrl-C
WORKERS = "hipgroupgemm.sweep.workers"
"""The module whose functions a device's process runs."""

_START = {"start": 300.0, "run": 300.0}
"""Seconds that a device's process has to start and to say what its device is."""


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where results go: json is the sweep's file, which `overwrite` lets replace what is there; csv has a line per candidate; plots are
    pictures; store: whether results go to the tuning store."""

    json: Path | None = None
    csv: Path | None = None
    plots: Sequence[Path] = ()
    store: bool = True
    overwrite: bool = False


def run_sweep(request: SweepRequest, outputs: Outputs) -> int:
    """Runs a sweep for a person at a terminal, with progress on stderr, and returns the exit status.

    That is 1 when a candidate is not right, a job failed, or a backend or algorithm that was named ran nothing; 130 after Ctrl-C; else 0.

    Raises:
        RequestError: nothing was run, no file was touched. ValueError, RuntimeError, OSError: a file can't be written.
    """
    if outputs.json is not None:
        check_free(outputs.json, outputs.overwrite)
    return _Run(request, outputs, None, request.devices).run()


def resume(path: Path, outputs: Outputs, given: Mapping[str, Any] | None = None) -> int:
    """Goes on with a sweep's file: runs what it was asked for and has no result of. Else as `run_sweep`.

    Args:
        given: fields of `SweepRequest` that were said anew. They have to be those of the file, but for `devices`: other devices of the
            same kinds do as well.

    Raises:
        RequestError: the file is of another request, device or version. ValueError: it can't be read.
    """
    file, fields = SweepFile(path), dict(given or {})
    try:
        request = file.sweep.header.request
        devices = fields.pop("devices", request.devices)
        for name, value in fields.items():
            if value != (before := getattr(request, name)):
                raise RequestError(f"{path}: was begun with {name} {before!r}, and not {value!r}; give another sweep its own file")
        return _Run(request, dataclasses.replace(outputs, json=path), file, devices).run()
    finally:
        file.close()


class _Device:
    """A device, its process, and what it is."""

    def __init__(self, name: str) -> None:
        self.name, self.kind, self.ended = name, "", False
        self.identity: dict[str, Any] = {}
        self.process: Worker | None = None

    def start(self) -> str:
        """Starts a process anew, so that nothing of a failure is left in it; returns "", or why the device is of no use."""
        if self.process is not None:
            self.process.kill()
        try:
            self.identity = self.call("device_identity", deadlines=_START)
        except WorkerTimedOut as error:
            return f"its driver has not answered within {error.seconds:.0f} s"
        except Exception as error:
            return " ".join(str(error).split())
        self.kind = kind_of(self.identity)
        return ""

    def call(self, function: str, *arguments: Any, **settings: Any) -> Any:
        """Calls a function of `workers` there. A process that had nothing to do for a while has ended; a new one takes its place."""
        if self.process is None or not (self.ended or self.process.alive()):
            self.process = Worker(f"sweep {self.name}")
        return self.process.call(f"{WORKERS}:{function}", self.name, *arguments, **settings)

    def end(self) -> None:
        """Ends the process and what it has started."""
        self.ended = True
        if self.process is not None:
            self.process.kill()


class _Run:
    """One start of a sweep."""

    def __init__(self, request: SweepRequest, outputs: Outputs, file: SweepFile | None, devices: Sequence[str]) -> None:
        self.request, self.outputs, self.file, self.settings = request, outputs, file, request.settings()
        self.devices = [_Device(name) for name in dict.fromkeys(devices)]
        self.jobs: list[tuple[SweepJob, str]] = []
        self.results: dict[tuple[SweepJob, str], Record] = {}
        self.waiting: dict[str, collections.deque[SweepJob]] = collections.defaultdict(collections.deque)
        self.warnings: list[str] = []
        self.stored = 0
        self.stopped = self.interrupted = False
        self.lock = threading.RLock()
        self.load = load_average()
        self.console = Console(stderr=True)  # progress: a bar on a terminal, else a line a job
        self.bars = progress(self.console)

    def run(self) -> int:
        """Runs, and says what came of it; the exit status."""
        for kind in dict.fromkeys(device.name.partition(":")[0] for device in self.devices):
            plan_jobs(self.request, kind)  # what is wrong with a request is said before drivers are started
        everyone, pool = list(self.devices), ThreadPoolExecutor(len(self.devices))
        try:
            self._prepare(list(pool.map(_Device.start, self.devices)))
            self.done = self.kept = len(self.jobs) - sum(map(len, self.waiting.values()))
            self.begun = time.monotonic()
            self.bar = self.bars.add_task("all jobs", total=len(self.jobs), completed=self.done)
            with self.bars:
                done, _ = wait([pool.submit(self._serve, device) for device in everyone], return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.stopped = True
            for device in everyone:
                device.end()
            pool.shutdown()
            if self.file is not None:
                self.file.close()
        return self._finish()

    def _prepare(self, reasons: Sequence[str]) -> None:
        """Plans the jobs for the devices that are here, and makes the file."""
        path, old = self.outputs.json, self.file.sweep if self.file is not None else None
        here = {device.name: device.identity for device in self.devices}
        identities = {kind_of(identity): identity for identity in (here if old is None else old.header.devices).values()}
        for device, reason in zip(self.devices, reasons, strict=True):
            if reason:
                elsewhere = "" if old is None else "; --devices names others to go on with"
                raise RequestError(f"{device.name} is of no use: {reason}{elsewhere}")
            if device.kind not in identities:
                raise RequestError(
                    f"{path}: is of {' and '.join(map(identity_text, identities.values()))}, and {device.name} is "
                    f"{identity_text(device.identity)}. A file has results of one set of versions: begin another, and compare the two"
                )
        self.jobs = [(job, kind) for kind, identity in identities.items() for job in plan_jobs(self.request, str(identity["kind"]))]
        self.results = {} if old is None else dict(old.results)
        if not self.results.keys() <= set(self.jobs):
            raise RequestError(f"{path}: has jobs that its request does not make any more; has a file of group sizes changed?")
        for job, kind in self.jobs:
            if (job, kind) not in self.results or self.results[job, kind].status not in DONE:
                self.waiting[kind].append(job)
        if old is not None and self.file is not None:
            absent = sum(len(jobs) for kind, jobs in self.waiting.items() if kind not in {device.kind for device in self.devices})
            torn = "it ended in the middle of " + ("another, which is run again" if self.waiting else "a line, which is removed")
            failed = len(old.results) - old.done
            notes = [
                f"{path}: {old.done} of {len(self.jobs)} jobs are done",
                torn if old.torn else "",
                f"failed, and run again: {failed}" if failed else "",
                f"left to devices that were not named now: {absent}" if absent else "",
            ]
            say("; ".join(filter(None, notes)))
            if old.torn:
                self.file.mend()
        elif path is not None:
            header = Header(request=self.request, devices=here, jobs=len(self.jobs), machine=describe(CPU), started=_now())
            self.file = SweepFile(path, header, overwrite=self.outputs.overwrite)

    def _serve(self, device: _Device) -> None:
        """Gives a device jobs of its kind until there are no more, or it is gone. Devices that are alike share theirs."""
        queue, gone = self.waiting[device.kind], ""
        while not gone:
            try:
                job = queue.popleft()
            except IndexError:
                return
            tell = functools.partial(self._progress, f"{device.name} {job.title}")
            try:
                record = device.call("run_job", device.identity, job, dict(self.settings), on_message=tell)
            except Exception as error:  # the process is gone, or what it found can't be sent
                record = Record(job, device.name, device.identity, "failed", str(error))
            self._keep(record, device)
            if self.stopped:
                return
            gone = device.start() if record.status == "failed" else ""
        with self.lock:
            self.devices.remove(device)
            self.warnings.append(f"{device.name} is gone ({gone}); the sweep went on without it")
            while queue and all(other.kind != device.kind for other in self.devices):
                self._keep(Record(queue.popleft(), device.name, device.identity, "failed", f"{device.name} is gone: {gone}"), device)

    def _progress(self, title: str, told: tuple[str, int, int]) -> None:
        self.bars.update(self.bar, description=f"{title}: {told[0]} {told[1]}/{told[2]}; all jobs")

    def _keep(self, record: Record, device: _Device) -> None:
        """Takes in a result; it is in the store and on the disk before the device's next job begins.

        The bar moves on; a line stays of a job that did not end well, and of each where there is no terminal.
        """
        with self.lock:
            if self.stopped:
                return
            record.load_average, record.cores, record.finished = self.load, available_cores(), _now()
            record.stored = self.outputs.store and record.report is not None and keep(TuningReport.from_dict(record.report))
            self.stored += record.stored
            self.results[record.job, device.kind] = record
            if self.file is not None:
                self.file.append(record)
            self.done += 1
            self.bars.update(self.bar, completed=self.done)
            if self.console.is_terminal and record.status != "failed":
                return
            best, text = record.best, f"{record.status}: {record.reason}"
            if record.status == "ok":
                winner = "no winner" if best is None else f"{best.backend} {best.name} {number_text(best.median_ms)} ms"
                text = f"{winner} ({counts_text(row.verdict for row in record.rows)})"
            seconds = (time.monotonic() - self.begun) / (self.done - self.kept) * (len(self.jobs) - self.done)
            left = f"; about {datetime.timedelta(seconds=round(seconds))} left" if round(seconds) else ""
            say(f"[{self.done}/{len(self.jobs)}] {record.device} {record.job.title}: {text}{left}", console=self.console)

    def _finish(self) -> int:
        """Tables, files, what is left; the exit status."""
        path = None if self.outputs.json == STDOUT else self.outputs.json
        records = [self.results[key] for key in self.jobs if key in self.results]
        warnings = [*self.warnings, *warnings_of(records)]
        console = console_for(self.outputs.json, self.outputs.csv)
        print_sweep(console, records)
        for warning in warnings:
            say(warning, "yellow", console)
        write_csv(self.outputs.csv, sweep_lines(records), console)
        notes = dict.fromkeys([*(identity_text(record.identity) for record in records), *warnings])
        write_panels(self.outputs.plots, sweep_panels(records), "\n".join(notes), console)
        if path is not None and self.file is not None and self.file.written:
            say(f"wrote {path}", console=console)
        if self.stored:
            say(f"Jobs whose results went to the tuning store: {self.stored}, in {default_store().directory}", console=console)
        rows = [row for record in records for row in record.rows]
        bad, failed = sum(row.verdict in BAD for row in rows), sum(record.status == "failed" for record in records)
        if bad or failed:
            say(f"Candidates that are not right: {bad}; jobs that failed: {failed}; see above.", "bold red", console)
        if self.interrupted:
            how = "" if path is None else f"; go on with hipgroupgemm sweep --resume {path}"
            say(f"Stopped. Jobs kept: {len(records)}, left: {len(self.jobs) - len(records)}{how}.", "bold", console)
            return 1 if bad or failed else INTERRUPTED
        named = self.request.algorithms
        unknown = set() if isinstance(named, str) else set(named) - {row.name for row in rows}
        if unknown:
            where = "hipgroupgemm list --shape M,K,N,E --device DEVICE prints the names there are"
            say(f"Algorithms that no backend has for any of these problems: {', '.join(sorted(unknown))}; {where}.", "bold red", console)
        idle = set(self.request.backends or ()) - {row.backend for row in rows}
        return int(bool(bad or failed or idle or unknown))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
