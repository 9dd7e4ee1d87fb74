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

from hipgroupgemm.measure.text import STDOUT
from hipgroupgemm.sweep.jobs import RequestError, SweepJob, SweepRequest

__all__ = ["BAD", "DONE", "RIGHT", "Header", "Record", "Row", "Sweep", "SweepFile", "check_free", "identity_text", "kind_of", "read_sweep"]

FORMAT, VERSION = "hipgroupgemm sweep", 2
DONE = ("ok", "refused")
"""The states of jobs that are not run again when a sweep is taken up."""
RIGHT = ("ok", "pruned")
BAD = ("wrong", "nondeterministic", "crashed", "timed out", "failed")
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
        load_average, cores: of the machine before the sweep, and that the process may use. stored: in the tuning store. finished: UTC.
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
    def device_title(self) -> str:
        """The device's kind and product name."""
        return identity_text(self.identity).partition(";")[0]


class Header(msgspec.Struct, kw_only=True, tag_field="format", tag=FORMAT):
    """A file's first line: the request, its devices' identities by name, how many jobs it makes, the machine, and when it began (UTC)."""

    version: int = VERSION
    request: SweepRequest
    devices: dict[str, dict[str, Any]]
    jobs: int
    machine: dict[str, Any]
    started: str


class Sweep(msgspec.Struct):
    """What a sweep's file holds.

    Attributes:
        results: by job and kind of device, in the order in which they first ended; of a job that ran again the last one counts.
        size: bytes of whole lines. torn: whether a part of a line follows. label: what a report calls it.
    """

    path: Path
    header: Header
    results: dict[tuple[SweepJob, str], Record]
    size: int
    torn: bool
    label: str = ""

    @property
    def records(self) -> list[Record]:
        """The results alone."""
        return list(self.results.values())

    @property
    def done(self) -> int:
        """How many jobs have a result that counts."""
        return sum(record.status in DONE for record in self.records)


def kind_of(identity: Mapping[str, Any]) -> str:
    """An identity as a key: devices that are equal share their jobs."""
    return json.dumps(identity, sort_keys=True)


def identity_text(identity: Mapping[str, Any]) -> str:
    """An identity in a line: the device's kind and product name, and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in dict(identity.get("versions", {})).items())
    return f"{identity.get('kind')}: {identity.get('name') or identity.get('target')}; {versions}"


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep's file. A last line without its end is left out.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no sweep's, of another version, or a line can't be read; the text says which. Nothing else is left out.
    """
    data = path.read_bytes()
    if FORMAT.encode() not in data[:100]:
        raise ValueError(f"{path}: is no file that hipgroupgemm sweep --json wrote")
    number, results, (*lines, torn) = 1, {}, data.split(b"\n")
    try:
        told = json.loads(lines[0])
        if told.get("version") != VERSION:
            raise ValueError(f"it is of version {told.get('version')}")
        header = msgspec.convert(told, Header)
        for line in lines[1:]:
            number += 1
            record = msgspec.convert(json.loads(line), Record)
            _ = record.rows  # they are to be rows, too
            results[record.job, kind_of(record.identity)] = record
    except (ValueError, IndexError, AttributeError) as error:
        wanted = f"wanted JSON Lines of version {VERSION}: a header, then a line a job"
        raise ValueError(f"{path}: line {number} can't be read ({error}); {wanted}; mend it, or start a sweep anew") from None
    return Sweep(path, header, results, len(data) - len(torn), bool(torn))


class SweepFile:
    """A sweep's file while the sweep runs: a job is on the disk when `append` returns. Meanwhile no other sweep can write to it.

    Args:
        path: an existing sweep's file, which `sweep` then has; with a header a new one, standard output, or a pipe.
        header: of a new sweep. overwrite: whether it may replace what is there.

    Attributes:
        written: whether anything was written.

    Raises:
        RequestError: there is something already. RuntimeError: another sweep is writing to it. ValueError: see `read_sweep`.
    """

    sweep: Sweep

    def __init__(self, path: Path, header: Header | None = None, *, overwrite: bool = False) -> None:
        self.path, self.written = path, False
        self._file: BinaryIO
        self._end: int | None = None  # where what is left of a killed sweep's last line begins
        if path == STDOUT or (path.exists() and not path.is_file()):
            self._file = sys.stdout.buffer if path == STDOUT else path.open("wb")
        else:
            if header is not None:
                check_free(path, overwrite)
            self._file, self._end = path.open("r+b" if path.exists() else "xb"), 0
        try:
            _lock(self._file, path)
            if header is not None:
                self.append(header)
            else:
                self.sweep = read_sweep(path)
                self._end = self.sweep.size
        except BaseException:
            self.close()
            raise

    def mend(self) -> None:
        """Removes the part of a line at the end."""
        if self._end is not None:
            self._file.seek(self._end)
            self._file.truncate()
            self._end, self.written = None, True

    def append(self, value: Header | Record) -> None:
        """Adds a line and waits until it is on the disk."""
        self.mend()
        try:
            self._file.write(json.dumps(msgspec.to_builtins(value)).encode() + b"\n")  # json has an escape for all that a reason may hold
            self._file.flush()
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(self.path)) from None
        self.written = True
        with contextlib.suppress(OSError):  # a pipe
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not sys.stdout.buffer:
            with contextlib.suppress(OSError):  # what could not be written before
                self._file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"{path}: another sweep is writing to it; wait for that one, or name another file") from None
    except (ImportError, OSError):  # a system or a file without locks: nothing is known, nothing is refused
        return


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
