"""What this process has loaded and opened, read from /proc (Linux), and what it may use."""

from __future__ import annotations

import contextlib
import os
import platform
import sys


def available_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def import_path() -> list[str]:
    """This process's import path, for another that is to find the same modules from any directory."""
    path = []
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):  # a working directory that was deleted holds no module
                path.append(entry or os.getcwd())
    return path


def mapped_libraries(stem: str) -> list[str]:
    """Paths of the shared libraries whose file name starts with ``stem`` (".so" included) in this process.

    Several names of one file count once (device and inode decide). Empty where there is no /proc.
    """
    found: dict[tuple[str, str], str] = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                if stem not in line:
                    continue
                # address permissions offset device inode path; a path may hold blanks
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and os.path.basename(fields[5]).startswith(stem):
                    found.setdefault((fields[3], fields[4]), fields[5])
    except OSError:
        return []
    return list(found.values())


def has_open(path: str) -> bool:
    """Whether this process has the file at ``path`` open."""
    descriptors: list[str] = []
    with contextlib.suppress(OSError):
        descriptors = os.listdir("/proc/self/fd")
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed since the listing
            if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                return True
    return False


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"
