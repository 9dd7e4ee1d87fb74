"""How far a sweep is, on stderr: bars with the time left on a terminal, a line a job elsewhere."""

from __future__ import annotations

import abc
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hipgroupgemm.measure.text import number_text
from hipgroupgemm.sweep.record import Record
from hipgroupgemm.sweep.workers import Progress

if TYPE_CHECKING:
    from hipgroupgemm.sweep.planning import Task

__all__ = ["Display", "display"]


_SHARES = {"check": (0.0, 0.6), "time": (0.6, 0.95)}
"""The part of a job that each phase of tuning is, about: compiling, which comes with checking, is the longest."""


class Display(abc.ABC):
    """What a sweep tells of its jobs while they run. Numbers are places in the list of tasks."""

    @abc.abstractmethod
    def started(self, device: str, number: int) -> None:
        """A device has begun a job."""

    @abc.abstractmethod
    def progress(self, device: str, progress: Progress) -> None:
        """A device's job has come so far."""

    @abc.abstractmethod
    def finished(self, device: str, number: int, record: Record) -> None:
        """A job has ended."""


def outcome_text(record: Record) -> str:
    """How a job ended, in a few words."""
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    verdicts = [row["verdict"] for row in record.rows]
    others = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts) if verdict != "ok")
    tried = f"{verdicts.count('ok')} ok{', ' if others else ''}{others}"
    if record.best is None:
        return f"no winner ({tried})"
    return f"{record.best['backend']} {record.best['name']} {number_text(record.best['median_ms'])} ms ({tried})"


class _Lines(Display):
    def __init__(self, tasks: Sequence[Task], say: Callable[[str], None]) -> None:
        self.tasks, self.say = tasks, say
        self.total = len(tasks)
        self.kept = self.done = sum(task.record is not None for task in tasks)
        self.begun = time.monotonic()

    def started(self, device: str, number: int) -> None:
        """Nothing: a job has one line, at its end."""

    def progress(self, device: str, progress: Progress) -> None:
        """Nothing."""

    def finished(self, device: str, number: int, record: Record) -> None:
        """The job's line."""
        self.done += 1
        left = (time.monotonic() - self.begun) / (self.done - self.kept) * (self.total - self.done)
        rest = f"; about {duration_text(left)} left" if self.done < self.total else ""
        self.say(f"[{self.done}/{self.total}] {device} {self.tasks[number].job.title}: {outcome_text(record)}{rest}")


def duration_text(seconds: float) -> str:
    """A length of time in one unit: "40 s", "12 min", "3.5 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


class _Bars(Display):
    """One bar for the sweep, in which a job that runs counts as far as it is, and one a device."""

    def __init__(self, bars: Any, tasks: Sequence[Task]) -> None:
        self.bars, self.tasks = bars, tasks
        self.done = sum(task.record is not None for task in tasks)
        self.running: dict[str, float] = {}
        self.whole = bars.add_task("all jobs", total=len(tasks), completed=self.done)
        self.rows: dict[str, Any] = {}

    def _moved(self) -> None:
        self.bars.update(self.whole, completed=self.done + sum(self.running.values()))

    def started(self, device: str, number: int) -> None:
        """The device's bar begins anew."""
        title = f"{device} {self.tasks[number].job.title}"
        if device not in self.rows:
            self.rows[device] = self.bars.add_task(title, total=None)
        self.bars.reset(self.rows[device], total=None, description=title, visible=True)
        self.running[device] = 0.0

    def progress(self, device: str, progress: Progress) -> None:
        """The device's bar moves, and the whole with it. Every phase is its own bar; the whole never goes back."""
        self.bars.update(self.rows[device], total=max(progress.total, 1), completed=progress.done)
        begin, end = _SHARES.get(progress.phase, (0.0, 0.0))
        share = begin + (end - begin) * min(progress.done / max(progress.total, 1), 1.0)
        self.running[device] = max(self.running.get(device, 0.0), share)
        self._moved()

    def finished(self, device: str, number: int, record: Record) -> None:
        """The whole moves on; a line stays of a job that did not end well."""
        self.running.pop(device, None)
        self.done += 1
        if device in self.rows:
            self.bars.update(self.rows[device], visible=False)
        self._moved()
        if record.status == "failed":
            self.bars.console.print(f"{device} {self.tasks[number].job.title}: {outcome_text(record)}", style="red", markup=False)


@contextlib.contextmanager
def display(tasks: Sequence[Task], log: Callable[[str], None] | None = None) -> Iterator[Display]:
    """Shows progress while the block runs; with `log`, or where stderr is no terminal, as lines."""
    if log is not None or not sys.stderr.isatty():
        yield _Lines(tasks, log or (lambda line: print(line, file=sys.stderr, flush=True)))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Bars(
        *columns, TimeRemainingColumn(elapsed_when_finished=True), console=Console(stderr=True), transient=True, speed_estimate_period=900
    ) as bars:
        yield _Bars(bars, tasks)
