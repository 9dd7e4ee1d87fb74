"""The child process of tuning: `python -m hipgroupgemm.tuning.worker`, driven over pipes by `tuning.child`.

A candidate that crashes or hangs takes this process down and not the user's. It reads requests from its standard input and writes replies
to its standard output, frames of pickled data both; what candidates print there goes to standard error. It ends when its input does, so
that it never outlives its parent, and when it has had nothing to do for a while, with a session or without.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import time
from typing import Any, BinaryIO

__all__ = ["HEADER", "IDLE_SECONDS", "SESSION_SECONDS", "main", "read_frame", "write_frame"]

HEADER = struct.Struct("<Q")
IDLE_SECONDS = 30.0
"""How long a worker without a session waits for the next before it ends: it may hold a device's context."""
SESSION_SECONDS = 120.0
"""How long one with a session waits for a request: an interrupt at a bad moment may have made its parent forget it."""

_END = object()


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Writes one value."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """One value's pickled bytes, or None at the end of the stream."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    (length,) = HEADER.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def _end() -> None:
    """Ends this process at once, and what it has started (compilers) with it, whatever its other threads do."""
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Server:
    def __init__(self, replies: BinaryIO) -> None:
        self._replies = replies
        self._session: Any = None
        self._backends: dict[str, Any] = {}
        self._limits: dict[str, float] = {}
        self._number, self._pid = 0, os.getpid()

    @property
    def busy(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    def reply(self, *values: Any) -> None:
        """Sends a reply, with the number of its request and this process's id."""
        if os.getpid() != self._pid:  # a copy that a candidate has forked and let return
            os._exit(0)
        write_frame(self._replies, (self._number, self._pid, *values))

    def note(self, step: str) -> None:
        """Tells the parent which step begins now, and sets the time for it."""
        self._watch(step)
        self.reply("at", step, getattr(self._session, "closing", None))

    def _watch(self, step: str) -> None:
        """Ends this process well after the parent should have, from a thread that needs no Python.

        Where a candidate holds the interpreter's lock, no thread of Python's sees that the parent is gone.
        """
        faulthandler.dump_traceback_later(1.5 * self._limits.get(step, 600.0) + 3.0, exit=True)

    def answer(self, number: int, limits: dict[str, float], request: tuple[Any, ...]) -> bool:
        """`serve` for the request of that number, with the seconds that a step of each name may take."""
        self._number, self._limits = number, limits
        self._watch("start")
        try:
            return self.serve(*request)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def serve(self, kind: str, *values: Any) -> bool:
        """Answers one request; False when the device can't be used any more, and so this process neither."""
        from hipgroupgemm.tuning.session import Session, SessionError, error_text

        try:
            if kind == "backends":
                self.reply("done", self._load(*values))
            elif kind == "open":
                self._close()
                self._session = Session(values[0], self._backends, self.note)
                self.reply("done", self._session.ceilings)
            elif kind in ("check", "time", "forget"):
                found = self._step(kind, *values)
                broken = self._session.healthy()
                self.reply("broken" if broken else "done", found, broken, self._session.take_faults())
                return not broken
            elif kind == "linger":
                self.note("run")
                time.sleep(values[0])
                self.reply("done", None)
            elif kind == "close":
                self._close()
                self.reply("done", None)
            else:
                self.reply("error", f"no such request: {kind!r}")
        except SessionError as error:
            self.reply("error", str(error))
        except Exception as error:
            self.reply("error", error_text(error))
        return True

    def _step(self, kind: str, algorithm: Any, *rest: Any) -> Any:
        if kind == "check":
            return self._session.check(algorithm, *rest)
        if kind == "time":
            sample, turn, judged = rest
            return self._session.time(algorithm, sample, turn, judged=judged)
        return self._session.forget(algorithm)

    def _load(self, pickled: dict[str, bytes]) -> dict[str, str]:
        """Takes over backends; returns by name why some can't be had here."""
        from hipgroupgemm.tuning.session import error_text

        refused = {}
        for name, data in pickled.items():
            try:
                self._backends[name] = pickle.loads(data)
            except Exception as error:
                refused[name] = error_text(error)
        return refused

    def _close(self) -> None:
        try:
            if self._session is not None:
                self._session.close()
        finally:
            self._session = None


def _read_requests(stream: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    while True:
        data = read_frame(stream)
        if data is None:
            _end()  # the parent is gone, or wants this process gone
        requests.put(data)


def main() -> None:
    """Serves requests until the input ends."""
    stream = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(stream, requests), daemon=True).start()
    server = _Server(replies)
    while True:
        try:
            data = requests.get(timeout=SESSION_SECONDS if server.busy else IDLE_SECONDS)
        except queue.Empty:
            _end()
        number, limits, request = pickle.loads(data)
        try:
            usable = server.answer(number, limits, request)
        except BrokenPipeError:
            _end()
        if not usable:
            sys.stderr.flush()
            _end()


if __name__ == "__main__":
    main()
