"""A sweep's file, JSON Lines: a header, then a line a job. It is only ever added to, and what a killed process leaves is readable."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hipgroupgemm.measure.text import STDOUT, write_text
from hipgroupgemm.sweep.jobs import RequestError, SweepJob, SweepRequest

__all__ = ["BAD", "DONE", "RIGHT", "Header", "Record", "Row", "Sweep", "SweepFile", "kind_of", "read_sweep"]

FORMAT, VERSION = "hipgroupgemm sweep", 2
DONE = ("ok", "refused")
"""The states of jobs that are not run again when a sweep is taken up."""
RIGHT = ("ok", "pruned", "behind")
BAD = ("wrong", "nondeterministic", "crashed", "timed out", "hung", "failed")
"""Verdicts on candidates: right ones, and those that make a sweep's exit status 1."""


class Row(msgspec.Struct, frozen=True):
    """One candidate, as `TuningRow.to_dict` gives it. Files of other versions may have less."""

    backend: str
    index: int
    name: str
    verdict: str
    reason: str = ""
    workspace_size: int = 0
    deterministic: bool = False
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    ratio: float | None = None
    tflops: float | None = None
    fraction: float | None = None
    error: float | str | None = None
    error_limit: float | str | None = None
    checked: int = 0
    samples: int = 0


class Record(msgspec.Struct, dict=True):
    """What came of one job on one device.

    Attributes:
        device, identity: "cuda:0", and what that is: target, compute units and library versions.
        status: "ok" when tuning ended, "refused" where no backend can, "out of memory", or "failed". reason: why, where it is not ok, and
            why backends that were named took no part.
        best: the winning row. report: what `TuningReport.to_dict` gives. None where there is none.
        load_average, cores: of the machine before this start of the sweep, and that the process may use.
        stored: whether the result went to the tuning store. finished: ISO 8601, UTC.
    """

    job: SweepJob
    device: str
    identity: dict[str, Any]
    status: str
    reason: str = ""
    best: Row | None = None
    report: dict[str, Any] | None = None
    load_average: float | None = None
    cores: int = 1
    stored: bool = False
    finished: str = ""

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The candidates; empty where tuning did not end."""
        return msgspec.convert((self.report or {}).get("rows", []), list[Row])

    @property
    def key(self) -> tuple[SweepJob, str]:
        """What a sweep has one result of: a job on a kind of device."""
        return self.job, kind_of(self.identity)

    @property
    def device_title(self) -> str:
        """The device's kind and product name."""
        return f"{self.identity.get('kind')}: {self.identity.get('name') or self.identity.get('target')}"


class Header(msgspec.Struct, kw_only=True, tag_field="format", tag=FORMAT):
    """A file's first line.

    Attributes:
        request: what was asked for. devices: the identities of its devices, by name. jobs: how many there are when it is finished.
        machine: processor, cores, system, commit. started: ISO 8601, UTC.
    """

    version: int = VERSION
    request: SweepRequest
    devices: dict[str, dict[str, Any]]
    jobs: int
    machine: dict[str, Any]
    started: str


class Sweep(msgspec.Struct):
    """What a sweep's file holds.

    Attributes:
        results: by `Record.key`; of a job that ran again the last one counts. size: bytes of whole lines. torn: a part of a line follows.
        label: what a report calls it.
    """

    path: Path
    header: Header
    results: dict[tuple[SweepJob, str], Record]
    size: int
    torn: bool
    label: str = ""

    @property
    def records(self) -> list[Record]:
        """The results, in the order in which jobs first ended."""
        return list(self.results.values())

    @property
    def done(self) -> int:
        """How many jobs have a result that counts."""
        return sum(record.status in DONE for record in self.records)


def kind_of(identity: Mapping[str, Any]) -> str:
    """An identity as a key: devices that are equal share their jobs."""
    return json.dumps(identity, sort_keys=True)


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep's file. A last line without its end is left out.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no sweep's, of another version, or a line can't be read; the text says which. Nothing else is left out.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    try:
        header = json.loads(lines[0])
        told = header.get("format"), header.get("version")
    except (ValueError, AttributeError, IndexError):
        told = None, None
    if told == (FORMAT, 1) or (told[0] is None and FORMAT.encode() in path.read_bytes()[:200]):
        raise ValueError(f"{path}: is of an older hipgroupgemm, or laid out anew; wanted JSON Lines: a header line, then a line a job")
    if told[0] != FORMAT:
        raise ValueError(f"{path}: is no file that hipgroupgemm sweep --json wrote")
    if told[1] != VERSION:
        raise ValueError(f"{path}: is of version {told[1]!r}, this hipgroupgemm reads version {VERSION}; use the one that wrote it")
    number = 0
    try:
        sweep = Sweep(path, msgspec.convert(header, Header), {}, sum(map(len, lines)) + len(lines), bool(torn))
        for line in lines[1:]:
            number += 1
            record = msgspec.convert(json.loads(line), Record)
            _ = record.rows
            sweep.results[record.key] = record
    except ValueError as error:
        raise ValueError(f"{path}: line {number + 1} can't be read ({error}); mend or remove it, or start a sweep anew") from None
    return sweep


class SweepFile:
    """A sweep's file while the sweep runs: a job is on the disk when `append` returns. Meanwhile no other sweep can write to it.

    Args:
        path: an existing sweep's file, which `sweep` then has; with a header a new one, standard output, or a pipe.
        header: of a new sweep. overwrite: whether it may replace what is there.

    Raises:
        RequestError: there is something already. RuntimeError: another sweep is writing to it. ValueError: see `read_sweep`.
    """

    def __init__(self, path: Path, header: Header | None = None, *, overwrite: bool = False) -> None:
        self.sweep: Sweep | None = None
        self._file: BinaryIO
        if path == STDOUT or (path.exists() and not path.is_file()):
            self._file = sys.stdout.buffer if path == STDOUT else path.open("wb")
        else:
            path = Path(os.path.realpath(path))
            if header is not None:
                check_free(path, overwrite)
            self._file = path.open("r+b" if path.exists() else "xb")
            self._lock(path)
        try:
            if header is None:
                self.sweep = read_sweep(path)
            elif overwrite and path.is_file():  # the old one stays until the new one is on the disk
                write_text(path, _line(header).decode())
                self._file.close()
                self._file = path.open("ab")
                self._lock(path)
            else:
                self._write(_line(header))
        except BaseException:
            self.close()
            raise

    def _lock(self, path: Path) -> None:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise RuntimeError(f"{path}: another sweep is writing to it; wait for that one, or name another file") from None
            except OSError:
                return  # a file system without locks: nothing is known, nothing is refused

    def append(self, record: Record) -> None:
        """Adds a job and waits until it is on the disk."""
        if self.sweep is not None and self._file.tell() < self.sweep.size:  # what was torn goes, now that there is something new
            self._file.seek(self.sweep.size)
            self._file.truncate()
        self._write(_line(record))

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        with contextlib.suppress(OSError):  # a pipe
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not sys.stdout.buffer:
            self._file.close()


def _line(value: Header | Record) -> bytes:
    return json.dumps(msgspec.to_builtins(value)).encode() + b"\n"  # of json: it has an escape for everything that a reason may hold


def check_free(path: Path, overwrite: bool) -> None:
    """Raises RequestError where a new sweep's file would replace something."""
    if overwrite or not path.is_file() or not path.stat().st_size:
        return
    try:
        there = read_sweep(path)
        state = "a sweep" if there.done >= there.header.jobs else "an unfinished sweep"
        what = f"holds {state} with {len(there.results)} jobs; give --resume {path} to go on with it"
    except (ValueError, OSError):
        what = "is there already, and is no sweep that can be read; give"
    raise RequestError(f"{path}: {what}, --overwrite to lose that, or another name for a new sweep")
