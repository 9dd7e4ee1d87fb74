"""What tests ask of other processes: whether they are still there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def exists(pid):
    """Whether a process is there and no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids, seconds=10.0):
    """Whether all are gone, at the latest after some seconds."""
    until = time.monotonic() + seconds
    while any(exists(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
