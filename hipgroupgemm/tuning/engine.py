"""Tuning: every candidate of every backend that can run a config, checked, timed, and told of in a report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import logging
import math
import operator
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hipgroupgemm.backends import check_settings
from hipgroupgemm.backends.base import Backend
from hipgroupgemm.backends.choice import settings_on
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.sizes import origin_of, size_class_of, size_samples
from hipgroupgemm.measure.verify import SizeSet, size_sets
from hipgroupgemm.operands.views import Device
from hipgroupgemm.processes import error_text
from hipgroupgemm.store.identity import identity
from hipgroupgemm.tuning.candidates import compile_candidates, find_candidates
from hipgroupgemm.tuning.race import Entry, Race
from hipgroupgemm.tuning.report import VERDICTS, TuningReport, TuningRow
from hipgroupgemm.tuning.runners import Deadlines, Runner
from hipgroupgemm.tuning.session import NO_MEMORY, SessionError, Task

__all__ = ["TuningProgress", "tune"]

_log = logging.getLogger(__name__)

_WAVE = 8
_MOST_SECONDS = 1_000_000
_MOST_SEED = 2**62
_CHECKING_SHARE = 0.6  # of a time limit: what is not checked by then is not timed
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
    batch_invariant: bool = False,
    max_multiprocessors: int | None = None,
    warmup: int = 2,
    repetitions: int | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Callable[[TuningProgress], object] | None = None,
    isolate: bool | None = None,
    step_timeout: float = 60.0,
    roofline: bool = True,
    origin: str | None = None,
) -> TuningReport:
    """Checks and times every candidate for a config on a device; changes and stores nothing.

    First each candidate is checked on the sizes that are tuned for and on adversarial ones, then the right ones are timed in rounds. Those
    far behind the leader of their rounds are pruned, and the winner is confirmed against the runner-up in rounds of their own. A candidate
    that is wrong, crashes, hangs or fails leaves the race, not the report, and never ends the tuning.

    Args:
        config: the problem, at its true ragged extent.
        device: where.
        group_sizes: what to tune for: one sample of integers or several, on the host or a device, `(group_total,)` each, or
            `(batch, group_total)` where the config has sizes per batch entry. A candidate's time is then its mean over the samples. None
            takes the balanced partition: R // G rows per group, the remainder one each to the first groups. End offsets are not taken.
        backends: names of backends, each of which has to be able to run the config; None for all that can.
        algorithms: "all", "heuristic" (each backend's best guesses, `max_algorithms` or 8 of them), or names.
        max_algorithms: at most so many per backend, the best guesses; None for all.
        max_workspace_size: only those that need at most so many bytes of workspace.
        deterministic, batch_invariant: only those that claim this, see `MatmulAlgorithm`.
        max_multiprocessors: the most CUs or SMs that a candidate may occupy; None for all.
        warmup: untimed calls ahead of a candidate's first timed one.
        repetitions: timed calls per candidate and sample; None for 5 to 20, as many as take about a second. The winner and the runner-up
            get up to 5 more.
        time_limit: seconds for all of it, about; None for no limit. It ends tuning once there is a right candidate with a time; the
            best guesses come first, and what there was no time for is "untimed".
        seed: of operands, order and samples.
        progress: called with a `TuningProgress` now and then, in the calling thread.
        isolate: whether candidates run in a worker process, where they can crash and hang without harm: None for all but those of the
            reference, as far as their backends can be pickled; a backend that can't then runs in this process, and a note says so.
        step_timeout: seconds, 1e6 at most, that one run of a candidate, or closing it, may take in the worker; its preparation may take
            ten times that.
        roofline: whether to measure the device's roofline, for the floor; takes about a second once per process.
        origin: the name of the synthetic distribution that `group_sizes` were drawn from, such as "zipf", which keeps them apart from
            real routing in the tuning store; None where they are real.

    Returns:
        The report. `report.best` is None where no candidate is right.

    Raises:
        TypeError, ValueError: arguments and group sizes that make no sense; the text says which.
        NotImplementedError: no backend, or not each of the named ones, can run this.
        RuntimeError: no harness or no memory for operands on the device; with isolate=True, no worker.
    """
    where = Device.of(device)
    check_settings(
        deterministic=deterministic, batch_invariant=batch_invariant, roofline=roofline, isolate=False if isolate is None else isolate
    )
    if not isinstance(config, GroupedGemmConfig):
        raise TypeError(f"config: got {type(config).__name__}, wanted a GroupedGemmConfig")
    max_algorithms = None if max_algorithms is None else _integer("max_algorithms", max_algorithms, 1)
    repetitions = None if repetitions is None else _integer("repetitions", repetitions, 1)
    warmup, seed = _integer("warmup", warmup, 0), _integer("seed", seed, 0)
    limit = math.inf if time_limit is None else _seconds("time_limit", time_limit)
    deadlines = Deadlines(_seconds("step_timeout", step_timeout, _MOST_SECONDS), limit)
    origin = origin_of(group_sizes, origin)
    samples = size_samples(group_sizes, config)
    clock, started = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
    settings, remark = settings_on(where, deterministic, batch_invariant, max_multiprocessors)
    notes: list[str] = [remark] if remark else []
    facts = identity(where)
    found = find_candidates(config, where, notes, backends, algorithms, max_algorithms, max_workspace_size, settings)
    sets = size_sets(config, samples, where)
    entries: dict[tuple[str, int, str], Entry] = {}
    runners: list[Runner] = []
    done: collections.Counter[str] = collections.Counter()

    def say(phase: str, entry: Entry, total: int, steps: int = 1) -> None:
        """A candidate has gone so many steps of a phase."""
        done[phase] = min(done[phase] + steps, total)
        if progress is not None:
            progress(TuningProgress(phase, done[phase], total, entry.row(None, 0.0, None) if entry.verdict else None))

    def make(backends: Mapping[str, Backend], isolate: bool) -> Runner:
        task = Task(config, where, sets, seed, roofline, settings.max_multiprocessors)
        runners.append(Runner(task, backends, lambda one, outcome: entries[one.key].record_failure(outcome), deadlines, isolate=isolate))
        return runners[-1]

    with contextlib.ExitStack() as opened:
        opened.push(lambda *error: _close(runners, notes, abruptly=error[0] is not None))
        compile_candidates(found, config, where, limit, notes)
        by_backend = _runners({backend.name: backend for backend, _ in found}, make, isolate, notes)
        entries |= {algorithm.key: Entry(algorithm, by_backend[backend.name]) for backend, algorithm in found}
        for note in notes:
            _log.warning("%s", note)
        ordered = list(entries.values())
        _check_entries(ordered, sets, deadlines, lambda entry, steps: say("check", entry, len(entries) * len(sets), steps))
        right = [entry for entry in ordered if not entry.verdict]
        race = Race(right, len(samples), warmup, repetitions, seed, deadlines, lambda entry, total: say("time", entry, total))
        race.finish(notes)
    measured = next((runner.roofline for runner in runners if runner.roofline is not None), None)
    flops = [config.flops(one.sizes) for one in sets[: len(samples)]]
    floor = None
    if measured is not None:
        least = [measured.floor_ms(count, config.min_bytes(one.sizes)) for count, one in zip(flops, sets, strict=False)]
        floor = sum(least) / len(least)
    leader = race.leader()
    rows = [entry.row(leader, sum(flops) / len(flops), floor) for entry in ordered]
    return TuningReport(
        config=config.key(),
        device=str(where),
        device_name=str(facts.get("name", "")),
        identity=facts,
        ragged_extent=config.ragged_extent,
        size_samples=[sample.tolist() for sample in samples],
        size_class=size_class_of(samples, config.ragged_extent),
        origin=origin,
        seed=seed,
        started=started.isoformat(timespec="microseconds"),
        seconds=time.monotonic() - clock,
        floor_ms=floor,
        roofline=None if measured is None else dataclasses.asdict(measured),
        settings=settings,
        rows=sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), row.ratio or row.median_ms or 0.0)),
        notes=list(dict.fromkeys([*notes, *(runner.remark for runner in runners if runner.remark)])),
    )


def _close(runners: list[Runner], notes: list[str], *, abruptly: bool) -> None:
    """Closes all runners, whatever comes between: an interrupt is no reason to leave a worker behind."""
    with contextlib.ExitStack() as closing:
        for runner in runners:
            closing.callback(notes.extend, runner.notes)
            closing.push(lambda *error, runner=runner: runner.close(abruptly=abruptly or error[0] is not None))


def _integer(name: str, value: Any, least: int) -> int:
    try:
        if isinstance(value, bool):  # no number here
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {type(value).__name__}, wanted an int") from None
    if not least <= number <= _MOST_SEED:
        raise ValueError(f"{name}={number}: wanted at least {least} and at most 2**62")
    return number


def _seconds(name: str, value: Any, most: float = math.inf) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted seconds")
    if not 0 < value <= most:
        raise ValueError(f"{name}={value}: wanted more than 0 and at most {most} seconds")
    return value


def _runners(
    backends: Mapping[str, Backend], make: Callable[[Mapping[str, Backend], bool], Runner], isolate: bool | None, notes: list[str]
) -> dict[str, Runner]:
    """The runner of each backend: a worker's as far as `isolate` wants one and it can be had, else one in this process."""
    found: dict[str, Runner] = {}
    if isolate or (isolate is None and backends.keys() - _SAFE):
        sent, reasons = {}, {}
        for name, backend in backends.items():
            try:
                if not type(backend).__module__.startswith("hipgroupgemm.backends."):  # those a worker finds by their names
                    sent[name] = _portable(backend)
            except Exception as error:
                reasons[name] = error_text(error)
        if reasons and isolate:
            words = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise RuntimeError(
                f"isolate=True: backends that cannot be pickled: {words}; define their class in a module that can be imported"
            )
        words = "ran in this process, where {} can take it down"
        try:
            if len(reasons) < len(backends):
                found = dict.fromkeys(backends.keys() - reasons, make(sent, True))
            notes += [f"{name} {words.format('it')}, since it cannot be pickled ({reason})" for name, reason in reasons.items()]
        except SessionError as error:  # a GPU that serves one process only, say
            if str(error).startswith(NO_MEMORY):
                raise
            if isolate:
                raise RuntimeError(f"isolate=True: {error}") from error
            notes.append(f"candidates {words.format('they')}: {error}")
    local = {name: backend for name, backend in backends.items() if name not in found}
    return found | (dict.fromkeys(local, make(local, False)) if local else {})


def _portable(backend: Backend) -> Backend:
    """The backend, if a worker can have it."""
    if type(backend).__module__ == "__main__":
        raise TypeError("its class is defined in __main__")
    pickle.loads(pickle.dumps(backend))
    return backend


def _check_entries(
    entries: Sequence[Entry], sets: Sequence[SizeSet], deadlines: Deadlines, progress: Callable[[Entry, int], object]
) -> None:
    """Checks all candidates on all size sets.

    The loop over size sets is outside, so that one set's operands serve all candidates. Under a time limit the best guesses come first, at
    first one and then a few at a time, until 60 % of it is over and at least one is right.
    """
    limit, first = deadlines.time_limit, 0
    size = len(entries) if limit == math.inf else 1
    while first < len(entries):
        wave = entries[first : first + size]
        if deadlines.found and deadlines.left() < (1 - _CHECKING_SHARE) * limit:
            for entry in entries[first:]:
                entry.verdict, entry.reason = "untimed", "the time limit came before it was checked"
            return
        for index in range(len(sets)):
            for entry in wave:
                if entry.verdict:
                    continue
                if deadlines.over():
                    entry.verdict, entry.reason = "untimed", "the time limit came before it was checked in full"
                    continue
                going_on = entry.take(entry.runner.check(entry.algorithm, index))
                progress(entry, 1 if going_on else len(sets) - index)
        deadlines.found = deadlines.found or any(not entry.verdict for entry in wave)
        first, size = first + size, min(2 * size, _WAVE)
