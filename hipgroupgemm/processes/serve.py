"""The worker's side: it runs the functions that its parent names. What they print goes to the parent's tail of standard error."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["IDLE_SECONDS", "error_text", "main", "send", "step"]

IDLE_SECONDS = 60.0
"""A worker without a call for so long ends: it may hold a device's memory, and its parent may have forgotten it."""

_TEXT = 4000  # characters of an error


class _Parent:
    """The way to the parent, and the deadlines of the call that it waits for."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._pid = connection, os.getpid()
        self.deadlines: dict[str, float] = {}

    def reply(self, *values: Any) -> None:
        if os.getpid() != self._pid:  # a copy that a function has forked and let return
            os._exit(0)
        self._connection.send_bytes(pickle.dumps(values))


_parent: _Parent | None = None


def step(name: str, detail: Any = None) -> None:
    """Says that the next step of this call begins, and starts its deadline. Outside a worker it does nothing.

    Args:
        name: of the step; a call begins with "run". detail: anything picklable that a `WorkerDied` of this step is to bring along.
    """
    if _parent is not None:
        seconds = _parent.deadlines.get(name)
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:  # ends this process well after the parent should have; this needs no Python, whose lock the function may hold
            faulthandler.dump_traceback_later(1.5 * seconds + 3.0, exit=True)
        _parent.reply("step", name, detail)


def send(message: object) -> None:
    """Gives a picklable message to the parent's `on_message`. Outside a worker it does nothing."""
    if _parent is not None:
        _parent.reply("message", message)


def error_text(error: BaseException) -> str:
    """An exception in words, bounded."""
    try:
        text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    except (Exception, SystemExit) as again:  # its text is made by code that may be broken
        text = f"{type(error).__name__}, whose text raises {type(again).__name__}"
    return text if len(text) <= _TEXT else text[:_TEXT] + " ..."


def _end() -> None:
    """Ends this process at once, and what it has started (compilers) with it, whatever its other threads do."""
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(parent: _Parent, data: bytes) -> None:
    try:
        function, arguments, parent.deadlines = pickle.loads(data)
        step("run")
        module, _, attribute = function.partition(":")
        result = getattr(importlib.import_module(module), attribute)(*arguments)
        parent.reply("done", result)
    except (Exception, SystemExit) as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(error_text(error))
        parent.reply("raised", error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _read(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            calls.put(connection.recv_bytes())
        except (EOFError, OSError):
            _end()  # the parent is gone, or wants this process gone


def main(connection: Connection) -> None:
    """Serves calls until the parent closes the connection."""
    global _parent
    faulthandler.enable(all_threads=False)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    _parent = _Parent(connection)
    while True:
        try:
            _answer(_parent, calls.get(timeout=IDLE_SECONDS))
        except (queue.Empty, BrokenPipeError):
            sys.stderr.flush()
            _end()
