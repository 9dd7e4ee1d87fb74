"""Tuning: every candidate of every backend that can run a config, checked, timed, and told of in a report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hipgroupgemm.backends import backend_kinds, get_backend
from hipgroupgemm.backends.base import Backend, MatmulAlgorithm, as_limits
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.environment import busy_note, load_average
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.sizes import origin_of, size_class_of, size_samples
from hipgroupgemm.measure.timer import Entry, close_entries, time_entries
from hipgroupgemm.measure.verify import Outcome, SizeSet, size_sets
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime.process import available_cores
from hipgroupgemm.store.identity import identity
from hipgroupgemm.tuning.report import TuningReport, TuningRow
from hipgroupgemm.tuning.runners import LocalRunner, Patience, Runner, WorkerRunner, WorkerUnavailable, pickled
from hipgroupgemm.tuning.session import NO_MEMORY, SessionError, Task, error_text

__all__ = ["TuningProgress", "tune"]

_log = logging.getLogger(__name__)

_HEURISTIC = 8
_WAVE = 8
_MOST_SECONDS = 1_000_000
_MOST_SEED = 2**62
_CHECKING_SHARE = 0.6  # of a time limit: what is not checked by then is not timed
_COMPILING_SHARE = 0.4
_SAFE = ("reference",)
"""Backends that run in the caller's process: they can do it no harm."""


@dataclasses.dataclass(frozen=True)
class TuningProgress:
    """How far tuning is.

    Attributes:
        phase: "check" or "time". done, total: steps of the phase; the total is the most that there may be.
        row: the row of a candidate that has just left the race, else None.
    """

    phase: str
    done: int
    total: int
    row: TuningRow | None = None


def tune(
    config: GroupedGemmConfig,
    device: Device | str,
    group_sizes: Any = None,
    *,
    backends: Sequence[str] | str | None = None,
    algorithms: str | Sequence[str] = "all",
    max_algorithms: int | None = None,
    max_workspace_size: int | None = None,
    deterministic: bool = False,
    warmup: int = 2,
    repetitions: int | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Callable[[TuningProgress], object] | None = None,
    isolate: bool | None = None,
    step_timeout: float = 60.0,
    ceilings: bool = True,
    origin: str | None = None,
) -> TuningReport:
    """Checks and times every candidate for a config on a device; changes and stores nothing.

    First each candidate is checked on the sizes that are tuned for and on hostile ones (`verify`), then the right ones are timed
    (`timing`). A candidate that is wrong, crashes, hangs or fails leaves the race, not the report, and never ends the tuning.

    Args:
        config: the problem, at its true ragged extent.
        device: where.
        group_sizes: what to tune for: one sample of integers or several, on the host or a device, `(group_total,)` each, or
            `(batch, group_total)` where the config has sizes a batch entry. A candidate's time is then its mean over the samples. None
            takes the balanced partition: R // G rows a group, the remainder one each to the first groups. End offsets are not taken.
        backends: names of backends, each of which has to be able to run the config; None for all that can.
        algorithms: "all", "heuristic" (each backend's best guesses, `max_algorithms` or 8 of them), or names.
        max_algorithms: at most so many a backend, the best guesses; None for all.
        max_workspace_size: only those that need at most so many bytes of workspace.
        deterministic: only those that claim equal bits for equal inputs.
        warmup: untimed calls ahead of a candidate's first timed one.
        repetitions: timed calls a candidate and sample; None for 5 to 20, as many as take about a second.
        time_limit: seconds for all of it, about; None for no limit. It ends tuning once there is a right candidate with a time; the
            best guesses come first, and what there was no time for is "untimed".
        seed: of operands, order and samples.
        progress: called with a `TuningProgress` now and then, in the calling thread.
        isolate: whether candidates run in a child process, where they can crash and hang without harm: None for all but those of the
            reference, as far as their backends can be pickled; a backend that can't then runs in this process, and a note says so.
        step_timeout: seconds, 1e6 at most, that one run of a candidate, or closing it, may take in the child process; its preparation may
            take ten times that.
        ceilings: whether to measure the device's ceilings, for the floor; takes about a second once a process.
        origin: the name of the synthetic distribution that `group_sizes` were drawn from, such as "zipf", which keeps them apart from
            real routing in the tuning store; None where they are real.

    Returns:
        The report. `report.best` is None where no candidate is right.

    Raises:
        TypeError, ValueError: arguments and group sizes that make no sense; the text says which.
        NotImplementedError: no backend, or not each of the named ones, can run this.
        RuntimeError: no workbench or no memory for operands on the device; with isolate=True, no child process.
    """
    where = Device.of(device)
    _validate(config, max_algorithms, warmup, repetitions, time_limit, step_timeout, seed)
    origin = origin_of(group_sizes, origin)
    samples = size_samples(group_sizes, config)
    clock, started = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
    patience = Patience(step_timeout, time_limit)
    notes: list[str] = []
    who = identity(where)
    found = _candidates(config, where, backends, algorithms, max_algorithms, max_workspace_size, deterministic, notes)
    sets = size_sets(config, samples, where)
    task = Task(config, where, sets, len(samples), seed, ceilings)
    load = load_average() if where.kind == "cpu" else None  # a GPU's times hardly depend on it
    lanes: list[Runner] = []
    told = _Told(progress)
    with contextlib.ExitStack() as opened:
        opened.push(lambda *error: _close(lanes, notes, abruptly=error[0] is not None))
        _compile(found, config, where, time_limit, notes)
        entries = _enter(found, task, patience, isolate, lanes, notes)
        _check_entries(entries, sets, patience, time_limit, told)
        right = [entry for entry in entries if not entry.verdict]
        told.phase("time", 0)
        while True:
            time_entries(
                right,
                len(samples),
                warmup=warmup,
                repetitions=repetitions,
                seed=seed,
                patience=patience,
                progress=lambda number, rounds, entry: told.timed(entry, len(right) * rounds),
            )
            if close_entries(right):
                break
        measured = next((lane.ceilings for lane in lanes if lane.ceilings is not None), None)
    floor, flops = _floor(config, sets[: len(samples)], measured)
    rows = sorted((entry.row(flops, floor) for entry in entries), key=_order)
    return TuningReport(
        config=config.key(),
        device=str(where),
        device_name=str(who.get("name", "")),
        identity=who,
        ragged_extent=config.ragged_extent,
        size_samples=[sample.tolist() for sample in samples],
        size_class=size_class_of(samples, config.ragged_extent),
        origin=origin,
        seed=seed,
        started=started.isoformat(timespec="microseconds"),
        seconds=time.monotonic() - clock,
        floor_ms=floor,
        ceilings=measured,
        rows=rows,
        notes=[*notes, *([busy] if (busy := busy_note(load, available_cores())) else [])],
    )


def _close(lanes: list[Runner], notes: list[str], *, abruptly: bool) -> None:
    """Closes all lanes, whatever comes between: an interrupt is no reason to leave a worker behind."""
    while lanes:
        lane = lanes[-1]
        try:
            lane.close(abruptly=abruptly)
        except BaseException:
            abruptly = True
            raise
        finally:
            notes += lane.notes
            lanes.pop()
            if abruptly:
                _close(lanes, notes, abruptly=True)


def _validate(config: Any, max_algorithms: Any, warmup: Any, repetitions: Any, time_limit: Any, step_timeout: Any, seed: Any) -> None:
    if not isinstance(config, GroupedGemmConfig):
        raise TypeError(f"config: got {type(config).__name__}, wanted a GroupedGemmConfig")
    counts = (("max_algorithms", max_algorithms, 1), ("warmup", warmup, 0), ("repetitions", repetitions, 1), ("seed", seed, 0))
    for name, value, least in counts:
        if value is None and name in ("max_algorithms", "repetitions"):
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}={value!r}: wanted an int")
        if value < least:
            raise ValueError(f"{name}={value}: wanted at least {least}")
    for name, value in (("time_limit", time_limit), ("step_timeout", step_timeout)):
        if value is None and name == "time_limit":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r}: wanted seconds")
        if not value > 0:
            raise ValueError(f"{name}={value}: wanted more than 0 seconds")
    if step_timeout > _MOST_SECONDS:
        raise ValueError(f"step_timeout={step_timeout}: wanted at most {_MOST_SECONDS} seconds")
    if seed > _MOST_SEED:
        raise ValueError(f"seed={seed}: wanted at most {_MOST_SEED}")


# ---- candidates ----------------------------------------------------------------------------------------------------------------


def _candidates(
    config: GroupedGemmConfig,
    device: Device,
    backends: Sequence[str] | str | None,
    algorithms: str | Sequence[str],
    max_algorithms: int | None,
    max_workspace_size: int | None,
    deterministic: bool,
    notes: list[str],
) -> list[tuple[Backend, MatmulAlgorithm]]:
    """All candidates, each backend's best guess first, then each one's second, and so on.

    A backend that was not named and raises when it is asked is left out, and a note says so.
    """
    named = [algorithms] if isinstance(algorithms, str) and algorithms not in ("all", "heuristic") else algorithms
    count = max_algorithms
    if algorithms == "heuristic" and count is None:
        count = _HEURISTIC
    by_names = not isinstance(named, str)
    limits = as_limits(count, max_workspace_size)
    if by_names or deterministic:  # the count is of those that are left
        limits = dataclasses.replace(limits, max_algorithm_count=sys.maxsize)
    lists = []
    for backend in _backends(config, device, backends, notes):
        try:
            listed = backend.algorithms(config.key(), device, limits)
        except Exception as error:
            if backends is not None:
                raise
            _left_out(notes, backend.name, "algorithms", error)
            continue
        wanted = [a for a in listed if (not by_names or a.name in named) and (a.deterministic or not deterministic)]
        listed = wanted[:count]
        lists.append([(backend, algorithm) for algorithm in listed])
    found = [pair for rank in itertools.zip_longest(*lists) for pair in rank if pair is not None]
    if by_names:
        missing = [name for name in named if name not in {algorithm.name for _, algorithm in found}]
        if missing:
            raise ValueError(
                f"algorithms: no backend has {', '.join(map(repr, missing))} for this config on {device}; see get_algorithms()"
            )
    if not found:
        within = f" within {max_workspace_size} bytes of workspace" if max_workspace_size is not None else ""
        more = "".join(f"; {note}" for note in notes)
        kind = " deterministic" if deterministic else ""
        raise NotImplementedError(f"there is no{kind} algorithm{within} for this config on {device}{more}")
    return found


def _left_out(notes: list[str], name: str, asked: str, error: Exception) -> str:
    notes.append(f"{name} was left out, since its {asked}() raised {error_text(error)}")
    _log.warning("%s", notes[-1])
    return notes[-1]


def _backends(config: GroupedGemmConfig, device: Device, names: Sequence[str] | str | None, notes: list[str]) -> list[Backend]:
    if isinstance(names, str):
        names = [names]
    if names is not None and not names:
        raise ValueError("backends: got none; leave it out for all that can")
    usable, refusals, kinds = [], [], backend_kinds()
    for name in kinds if names is None else dict.fromkeys(names):
        if names is None and device.kind not in kinds[name]:
            refusals.append(f"{name}: serves {' and '.join(kinds[name])}")
            continue
        try:
            backend = get_backend(name)
            reason = backend.can_handle(config, device)
        except Exception as error:
            if names is not None:
                raise
            refusals.append(_left_out(notes, name, "can_handle", error))
            continue
        if reason is None:
            usable.append(backend)
        elif names is None:
            refusals.append(f"{name}: {reason}")
        else:
            raise NotImplementedError(f"backend {name!r} refuses: {reason}")
    if not usable:
        raise NotImplementedError(f"no backend runs this grouped GEMM on {device}: " + "; ".join(refusals))
    return usable


def _compile(
    found: Sequence[tuple[Backend, MatmulAlgorithm]],
    config: GroupedGemmConfig,
    device: Device,
    time_limit: float | None,
    notes: list[str],
) -> None:
    """Lets backends that can compile for all their candidates at once. What raises there raises again when a candidate is prepared."""
    by_backend: dict[str, tuple[Backend, list[MatmulAlgorithm]]] = {}
    for backend, algorithm in found:
        by_backend.setdefault(backend.name, (backend, []))[1].append(algorithm)
    for backend, algorithms in by_backend.values():
        ahead = getattr(backend, "compile_ahead", None)
        if ahead is not None:
            try:
                ahead(config.key(), device, algorithms, None if time_limit is None else _COMPILING_SHARE * time_limit)
            except Exception as error:
                notes.append(f"{backend.name}: compiling ahead raised {error_text(error)}")
                _log.warning("%s", notes[-1])


def _enter(
    found: Sequence[tuple[Backend, MatmulAlgorithm]],
    task: Task,
    patience: Patience,
    isolate: bool | None,
    lanes: list[Runner],
    notes: list[str],
) -> list[Entry]:
    """Entries with lanes; the lanes are appended to `lanes` as soon as they are there, so that they are closed whatever happens."""
    backends = {backend.name: backend for backend, _ in found}
    wanted = isolate if isolate is not None else any(name not in _SAFE for name in backends)
    local: dict[str, Backend] = dict(backends)
    worker: WorkerRunner | None = None
    told_of: list[str] = []
    if wanted:
        sent, refused = pickled({name: backend for name, backend in backends.items() if not _built_in(backend)})
        try:
            if len(refused) < len(backends):
                worker = WorkerRunner(task, sent, patience)
                lanes.append(worker)  # before there is a process
                worker.open()
                refused = {**refused, **worker.refused}
                local = {name: backends[name] for name in refused}
        except (WorkerUnavailable, SessionError) as error:  # a GPU that serves one process only, say
            if str(error).startswith(NO_MEMORY):
                raise
            if isolate:
                raise RuntimeError(f"isolate=True: {error}") from error
            told_of.append(f"candidates ran in this process, where they can take it down: {error}")
            refused = {}
        if refused and isolate:
            told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise RuntimeError(
                f"isolate=True: backends that cannot be pickled: {told}; define their class in a module that can be imported"
            )
        told_of += [
            f"{name} ran in this process, where it can take it down, since it cannot be pickled ({reason})"
            for name, reason in refused.items()
        ]
        for note in told_of:
            _log.warning("%s", note)
        notes += told_of
    here = LocalRunner(task, local) if local else None
    if here is not None:
        lanes.append(here)
    entries = []
    for backend, algorithm in found:
        lane = here if backend.name in local else worker
        if lane is not None:
            entries.append(Entry(algorithm, lane))
    for each in lanes:
        each.blame = _blaming(entries)
    return entries


def _blaming(entries: Sequence[Entry]) -> Callable[[MatmulAlgorithm, Outcome], None]:
    """Finds the entry of an algorithm that comes from a worker."""
    known = {(entry.algorithm.backend, entry.algorithm.index, entry.algorithm.name): entry for entry in entries}

    def blame(algorithm: MatmulAlgorithm, outcome: Outcome) -> None:
        entry = known.get((algorithm.backend, algorithm.index, algorithm.name))
        if entry is not None:
            entry.blame(outcome)

    return blame


def _built_in(backend: Backend) -> bool:
    """Whether a worker finds the backend by its name."""
    return type(backend).__module__.startswith("hipgroupgemm.backends.")


# ---- checking ------------------------------------------------------------------------------------------------------------------


class _Told:
    """Counts steps for `progress`."""

    def __init__(self, progress: Callable[[TuningProgress], object] | None) -> None:
        self._progress, self._phase, self._done, self._total = progress, "check", 0, 0

    def phase(self, name: str, total: int) -> None:
        """Begins a phase."""
        self._phase, self._done, self._total = name, 0, total

    def step(self, entry: Entry, steps: int = 1) -> None:
        """Some steps are done."""
        self._done = min(self._done + steps, self._total)
        if self._progress is not None:
            row = entry.row(0.0, None) if entry.verdict else None
            self._progress(TuningProgress(self._phase, self._done, self._total, row))

    def timed(self, entry: Entry, total: int) -> None:
        """One candidate was timed once."""
        self._total = total
        self.step(entry)


def _check_entries(entries: Sequence[Entry], sets: Sequence[SizeSet], patience: Patience, time_limit: float | None, told: _Told) -> None:
    """Checks all candidates on all size sets.

    The loop over size sets is outside, so that one set's operands serve all candidates. Under a time limit the best guesses come first, at
    first one and then a few at a time, until 60 % of it is over and at least one is right.
    """
    told.phase("check", len(entries) * len(sets))
    size, first = len(entries) if time_limit is None else 1, 0
    while first < len(entries):
        wave = entries[first : first + size]
        if patience.found and time_limit is not None and patience.left() < (1 - _CHECKING_SHARE) * time_limit:
            for entry in entries[first:]:
                entry.verdict, entry.reason = "untimed", "the time limit came before it was checked"
            return
        for index in range(len(sets)):
            for entry in wave:
                if entry.verdict:
                    continue
                if patience.over():
                    entry.verdict, entry.reason = "untimed", "the time limit came before it was checked in full"
                    continue
                going_on = entry.take(entry.lane.check(entry.algorithm, index))
                told.step(entry, 1 if going_on else len(sets) - index)
        patience.found = patience.found or any(not entry.verdict for entry in wave)
        first, size = first + size, min(2 * size, _WAVE)


# ---- the report ----------------------------------------------------------------------------------------------------------------


def _floor(config: GroupedGemmConfig, sets: Sequence[SizeSet], measured: dict[str, Any] | None) -> tuple[float | None, float]:
    """The mean floor (ms) and operations over the size samples."""
    flops = [config.flops(one.sizes) for one in sets]
    mean = sum(flops) / len(flops)
    if measured is None:
        return None, mean
    ceilings = Roofline(**measured)
    floors = [ceilings.floor_ms(count, config.min_bytes(one.sizes)) for count, one in zip(flops, sets, strict=True)]
    return sum(floors) / len(floors), mean


def _order(row: TuningRow) -> tuple[int, float]:
    order = ("ok", "behind", "nondeterministic", "wrong", "crashed", "hung", "failed", "untimed")
    return order.index(row.verdict), row.median_ms if row.median_ms is not None else 0.0
