"""Which jobs a sweep has: those that are asked for now, what an earlier sweep's file has of them, and what it waits for besides."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hipgroupgemm.sweep.jobs import DistributionError, SweepJob, SweepRequest, plan_jobs
from hipgroupgemm.sweep.record import Record, Sweep, model_of, place_of

__all__ = ["Plan", "Task", "key_of", "plan_sweep", "requests_of"]


@dataclasses.dataclass
class Task:
    """A job on one kind of device.

    Attributes:
        settings: what it is tuned with. record: its result, None where it has not ended.
        earlier: results that do not count any more, since they failed or are of other versions or settings; kept until there is a new one.
    """

    job: SweepJob
    identity: dict[str, Any]
    settings: dict[str, Any]
    record: Record | None = None
    earlier: list[Record] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Plan:
    """What is to be run, and what the file has besides.

    Attributes:
        tasks: in the requests' order. carried: results of other problems and other devices.
        requests: what the file asks for: all requests that were ever made of it, as far as later ones do not replace them; plain data.
        wanted: how many jobs there are when all of them have ended. kept, replaced: tasks with a result in the file, that counts or not.
        waiting: jobs of the file's other requests that have no result.
    """

    tasks: list[Task]
    carried: list[Record]
    requests: list[dict[str, Any]]
    wanted: int
    kept: int
    replaced: int
    waiting: int


@dataclasses.dataclass
class _Wish:
    """A request, and the kinds of devices that it has been made for."""

    request: SweepRequest
    models: list[list[Any]]

    def places(self) -> dict[str, dict[str, Any]]:
        """Its jobs on all its devices, with their settings. Raises DistributionError."""
        settings = self.request.settings()
        jobs = {str(model[0]): plan_jobs(self.request, str(model[0])) for model in self.models}
        return {_place(job, model): settings for model in self.models for job in jobs[str(model[0])]}


def requests_of(sweep: Sweep) -> list[SweepRequest]:
    """What a sweep's file asks for, the first request first. Raises ValueError where that can't be read."""
    return [wish.request for wish in _wishes(sweep)]


def _wishes(sweep: Sweep) -> list[_Wish]:
    listed = sweep.header.get("requests")
    if listed is None:
        listed = [sweep.header.get("request", {})]
    if not isinstance(listed, list) or not listed or not all(isinstance(data, Mapping) for data in listed):
        raise ValueError(f"{sweep.path}: requests: wanted a list of what the sweep was asked for")
    devices = {name: facts for session in sweep.header.get("sessions", []) for name, facts in dict(session.get("devices", {})).items()}
    wishes = []
    for data in listed:
        try:
            request = SweepRequest.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{sweep.path}: {error}") from None
        models = data.get("made_for", [model_of(devices[name]) for name in request.devices if name in devices])
        wishes.append(_Wish(request, [list(model) for model in models]))
    return wishes


def _place(job: SweepJob, model: Sequence[Any]) -> str:
    return place_of(job.to_dict(), dict(zip(("kind", "target", "name", "compute_units"), model, strict=True)))


def plan_sweep(requests: Sequence[SweepRequest], identities: Mapping[str, dict[str, Any]], old: Sweep | None) -> Plan:
    """The jobs of some requests on devices (their identities by name), given what a file has and waits for.

    A job that several requests ask for is tuned with the settings of the last. Requests that add nothing to the others are left out.

    Raises:
        DistributionError: a request's group sizes can't be had.
    """
    tasks: dict[tuple[str, str], Task] = {}
    now = []
    for request in requests:
        facts = list({key_of(identities[name]): identities[name] for name in request.devices}.values())
        settings = request.settings()
        for identity in facts:
            for job in plan_jobs(request, str(identity["kind"])):
                task = tasks.setdefault((key_of(job.to_dict()), key_of(identity)), Task(job, identity, settings))
                task.settings = settings
        now.append(_Wish(request, [model_of(identity) for identity in facts]))
    wishes, places = _united(_wishes(old) if old is not None else [], now)
    plan = Plan(list(tasks.values()), [], [{**w.request.to_dict(), "made_for": w.models} for w in wishes], 0, 0, 0, 0)
    _match(plan, old.records if old is not None else [])
    ended = {record.place for record in plan.carried}
    asked = {place_of(task.job.to_dict(), task.identity) for task in plan.tasks}
    plan.waiting = len(places.keys() - ended - asked)
    plan.wanted = len(places.keys() | ended | asked)
    return plan


def key_of(data: Any) -> str:
    """Plain data as a key: equal for equal data."""
    return json.dumps(data, sort_keys=True)


def _united(earlier: Iterable[_Wish], now: Iterable[_Wish]) -> tuple[list[_Wish], dict[str, dict[str, Any]]]:
    """What is wished for altogether, and all its jobs with the settings that hold for them: those of the last wish."""
    wishes: list[_Wish] = []
    for wish in [*earlier, *now]:
        same = next((one for one in wishes if one.request.to_dict() == wish.request.to_dict()), None)
        models = [] if same is None else same.models
        wishes = [one for one in wishes if one is not same]
        wishes.append(_Wish(wish.request, [*models, *(model for model in wish.models if model not in models)]))
    owner: dict[str, tuple[_Wish, dict[str, Any]]] = {}
    unknown = []
    for wish in wishes:
        try:
            jobs = wish.places()
        except DistributionError:  # a file of group sizes that is not here any more: nobody can say which jobs these are
            unknown.append(wish)
            continue
        for place, settings in jobs.items():
            if place not in owner or owner[place][1] != settings:
                owner[place] = (wish, settings)
    owners = [wish for wish, _ in owner.values()]
    left = [wish for wish in wishes if any(wish is one for one in [*owners, *unknown])]
    return left or wishes, {place: settings for place, (_, settings) in owner.items()}


def _match(plan: Plan, records: Sequence[Record]) -> None:
    """Gives the tasks what the file has of them."""
    homes: dict[str, list[Task]] = {}
    for one in plan.tasks:
        homes.setdefault(place_of(one.job.to_dict(), one.identity), []).append(one)
    rest: list[tuple[Record, list[Task]]] = []
    for record in records:
        own = homes.get(record.place, [])
        task = next((t for t in own if t.record is None and record.answers(t.job.to_dict(), t.settings, t.identity)), None)
        if task is not None:
            record.superseded = False
            task.record = record
            plan.kept += 1
        elif own:
            rest.append((record, own))
        else:
            plan.carried.append(record)  # another problem or another device: its result is still good
    for record, own in rest:
        task = next((t for t in own if t.record is None), None)
        if task is not None:
            plan.replaced += not task.earlier
            record.superseded = True
            task.earlier.append(record)
