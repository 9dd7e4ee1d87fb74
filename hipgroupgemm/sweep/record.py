"""The file of a sweep: one JSON document, a job a line, written as the jobs end and readable wherever a process was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hipgroupgemm.measure.text import write_text

__all__ = ["DONE", "Record", "Sweep", "SweepFile", "model_of", "place_of", "read_sweep", "stamp_of"]

FORMAT = "hipgroupgemm sweep"
VERSION = 1
DONE = ("ok", "refused")
"""The states that are not run again when a sweep is taken up."""

_END = b"\n]}\n"
_ANY = object()


def model_of(identity: Mapping[str, Any]) -> list[Any]:
    """What a device is, whatever versions run on it."""
    return [identity.get(name) for name in ("kind", "target", "name", "compute_units")]


def place_of(job: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """What a sweep has one result of: a job on a kind of device."""
    return json.dumps([job, model_of(identity)], sort_keys=True)


@dataclasses.dataclass
class Record:
    """What came of one job on one device; plain data, so that files of other versions can be compared.

    Attributes:
        job: what `SweepJob.to_dict` gives. settings: what `SweepRequest.settings` gives.
        device: "cuda:0". identity: the device's target, compute units and library versions.
        status: "ok" when tuning ended, "refused" where no backend can, "out of memory", or "failed". reason: why, where it is not ok, and
            why backends that were named took no part.
        best: the winning row of the report, None where there is none.
        report: what `TuningReport.to_dict` gives, None where tuning did not end.
        stored: whether the winner went to the tuning store.
        finished: ISO 8601, UTC.
        superseded: it is of other versions or settings than were asked for later, or failed; it stays until its job is run again.
    """

    job: dict[str, Any]
    settings: dict[str, Any]
    device: str
    identity: dict[str, Any]
    status: str
    reason: str = ""
    best: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    stored: bool = False
    finished: str = ""
    superseded: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The candidates' rows; empty where tuning did not end."""
        return list(self.report["rows"]) if self.report else []

    @property
    def problem(self) -> tuple[Any, ...]:
        """What makes two jobs the same problem: class, extents, element type and group sizes. Names take no part."""
        sizes = self.job["group_sizes"]
        vectors = None if sizes is None else tuple(tuple(vector) for vector in sizes)
        return (*(self.job[name] for name in ("class", "m", "k", "n", "e", "dtype")), vectors)

    @property
    def place(self) -> str:
        """The job on this kind of device, whatever versions ran on it."""
        return place_of(self.job, self.identity)

    def answers(self, job: Mapping[str, Any], settings: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
        """Whether this is the finished result of a job with these settings on such a device."""
        return self.status in DONE and self.job == job and self.settings == settings and self.identity == identity

    @classmethod
    def from_dict(cls, data: Any) -> Record:
        """The record of a line; raises ValueError where it is none."""
        names = {field.name for field in dataclasses.fields(cls)}
        needed = names - {"superseded"}
        if not isinstance(data, Mapping) or not needed <= data.keys():
            missing = sorted(needed - data.keys()) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"is no job of a sweep (lacks {missing})")
        record = cls(**{name: data[name] for name in names & data.keys()})
        try:
            hash(record.problem)
            for row in record.rows + ([record.best] if record.best else []):
                _ = row["backend"], row["name"], row["index"], row["verdict"], row["median_ms"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no job of a sweep ({type(error).__name__}: {error})") from None
        return record


@dataclasses.dataclass
class Sweep:
    """What a sweep's file holds.

    Attributes:
        path: the file. header: request, machine, and how many jobs were wanted. records: the jobs that ended, in that order.
        warnings: what was wrong with the file and could be left out. stamp: of the file as it was read, see `stamp_of`.
    """

    path: Path
    header: dict[str, Any]
    records: list[Record]
    warnings: list[str] = dataclasses.field(default_factory=list)
    stamp: Any = None

    @property
    def done(self) -> int:
        """How many jobs have a result that counts."""
        return len({record.place for record in self.records if record.status in DONE and not record.superseded})

    @property
    def wanted(self) -> int:
        """How many jobs there are when it is finished."""
        return int(self.header.get("jobs_wanted", 0))

    @property
    def finished(self) -> bool:
        """Whether all jobs that were wanted have ended."""
        return self.done >= self.wanted


def stamp_of(path: Path) -> Any:
    """Something that is another when a file has been written to since; None where there is nothing."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return [facts.st_ino, facts.st_size, facts.st_mtime_ns] if facts.st_size else None


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep's file: a whole JSON document however it is laid out, or, job by job, what a killed process left of one.

    Of a file that was cut short only the last, incomplete line is dropped.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no sweep's file, of another version, or a job of it can't be read; the text says where. Nothing is left out.
    """
    stamp = stamp_of(path)
    data = path.read_bytes()
    try:
        document = _parse(data.decode("utf-8-sig"))
    except ValueError as error:
        return dataclasses.replace(_salvage(path, data.decode("utf-8", errors="replace"), error), stamp=stamp)
    header = _header(path, document)
    jobs = header.pop("jobs", None)
    if not isinstance(jobs, list):
        raise ValueError(f'{path}: is no file that hipgroupgemm sweep --json wrote: it has no list "jobs"')
    sweep = Sweep(path, header, [], stamp=stamp)
    for number, job in enumerate(jobs):
        try:
            sweep.records.append(Record.from_dict(job))
        except ValueError as error:
            raise ValueError(f"{path}: jobs[{number}] {error}; mend or remove that job, or start a sweep anew") from None
    return sweep


def _salvage(path: Path, text: str, fault: ValueError) -> Sweep:
    """The jobs of a file that is no JSON document: a sweep that was killed while it wrote a line. Only the last line may be broken."""
    first, *rest = text.split("\n")
    try:
        start = _parse(first.rstrip() + "]}") if first.rstrip().endswith("[") else None
    except ValueError:
        start = None
    if start is None and FORMAT in text:
        raise ValueError(
            f"{path}: is not JSON ({fault}), nor has it a job a line as hipgroupgemm sweep writes them, so that its jobs can't be saved; "
            "mend it, or start a sweep anew in another file"
        )
    header = _header(path, start)
    header.pop("jobs", None)
    sweep = Sweep(path, header, [])
    body = [line for line in rest if line.strip()]
    complete = body[-1:] == ["]}"]
    if body[-1:] in (["]}"], ["]"]):
        body.pop()
    for number, line in enumerate(body):
        try:
            if "\ufffd" in line:
                raise ValueError("has bytes that are no UTF-8")
            sweep.records.append(Record.from_dict(_parse(line.rstrip().removesuffix(","))))
        except ValueError as error:
            if number < len(body) - 1 or complete:
                raise ValueError(f"{path}: line {number + 2} {_why(error)}; mend or remove that line, or start a sweep anew") from None
            sweep.warnings.append(f"{path}: ends in the middle of a job, the sweep was killed; that job is dropped")
    return sweep


def _parse(text: str) -> Any:
    """JSON of any layout; NaN and infinities, which no sweep writes, are refused."""

    def refuse(name: str) -> Any:
        raise ValueError(f"has {name}, which JSON has no word for")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _why(error: ValueError) -> str:
    return f"is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)


def _header(path: Path, document: Any) -> dict[str, Any]:
    """What a sweep's document has, as it is; raises ValueError for another document."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: is no file that hipgroupgemm sweep --json wrote")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{path}: is of version {document.get('version')!r}, this hipgroupgemm reads version {VERSION}; use the one that wrote it"
        )
    wanted, sessions = document.get("jobs_wanted", 0), document.get("sessions", [])
    if not isinstance(wanted, int) or not isinstance(sessions, list):
        raise ValueError(f"{path}: is no file that hipgroupgemm sweep --json wrote: wanted a number jobs_wanted and a list sessions")
    return {name: value for name, value in document.items() if name not in ("format", "version")}


def _head(header: Mapping[str, Any]) -> str:
    fields = {"format": FORMAT, "version": VERSION, **header}
    return json.dumps(fields, allow_nan=False)[:-1] + ', "jobs": ['


def _line(record: Record) -> str:
    return json.dumps(dataclasses.asdict(record), allow_nan=False)


def document(header: Mapping[str, Any], records: Iterable[Record]) -> str:
    """The whole text of a sweep's file."""
    lines = ",\n".join(_line(record) for record in records)
    return _head(header) + ("\n" + lines if lines else "") + _END.decode()


class SweepFile:
    """A sweep's file while the sweep runs: every job is on the disk when `append` returns.

    A new file replaces an old one whole; after that jobs are added at its end. Between two calls it is a complete JSON document.
    While it is open no other sweep can write to it.

    Args:
        stamp: of what may be replaced, see `stamp_of`; without one, whatever is there may be.

    Raises:
        RuntimeError: another sweep is writing to the file, or has written to it since that stamp.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], records: Iterable[Record] = (), stamp: Any = _ANY) -> None:
        path = Path(os.path.realpath(path))
        if path.exists():
            with path.open("rb") as old:
                _lock(old, path)  # no other sweep has it; closing gives it up again
        if stamp is not _ANY and stamp_of(path) != stamp:
            raise RuntimeError(f"{path}: has been written to since this sweep began; begin again, with --resume {path}")
        kept = list(records)
        write_text(path, document(header, kept))
        self.path, self._empty = path, not kept
        self._file = path.open("r+b")
        _lock(self._file, path)
        self._end = self._file.seek(0, os.SEEK_END) - len(_END)

    def append(self, record: Record) -> None:
        """Adds a job and waits until it is on the disk."""
        line = ("\n" if self._empty else ",\n").encode() + _line(record).encode()
        self._file.seek(self._end)
        self._file.write(line + _END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._end += len(line)
        self._empty = False

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


def _lock(file: Any, path: Path) -> None:
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise RuntimeError(f"{path}: another sweep is writing to it; wait for that one, or name another file") from None
            # file systems without locks: nothing is known, nothing is refused
