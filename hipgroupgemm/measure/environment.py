"""What was measured on what: the machine, the device and the versions that a result is only worth something with; and a busy machine."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.runtime import default_device, find_devices, get_runtime
from hipgroupgemm.runtime.process import available_cores, cpu_model, mapped_libraries
from hipgroupgemm.version import __version__

__all__ = ["ONE_THREAD", "THREADS", "blas_threads", "busy_note", "commit_of", "describe", "device_named", "load_average"]

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Variables by which a user has settled BLAS's threads."""

ONE_THREAD = "BLAS was given one thread"
"""What a harness says of itself where `blas_threads` took the others away."""

_BLAS = (  # how a library's file name begins, and how its calls for the number of threads are named: "set" or "get" goes into the braces
    ("libscipy_openblas64_", "scipy_openblas_{}_num_threads64_"),
    ("libscipy_openblas", "scipy_openblas_{}_num_threads"),
    ("libopenblas64_", "openblas_{}_num_threads64_"),
    ("libopenblas", "openblas_{}_num_threads"),
    ("libblis", "bli_thread_{}_num_threads"),
)


@contextlib.contextmanager
def blas_threads(count: int) -> Iterator[bool]:
    """Gives NumPy's BLAS so many threads for a while; whether that could be done: not where a user has settled it, or of an unknown BLAS.

    BLAS threads wait for each other at the end of every product. With a core taken away from them the many small products of a ragged
    dot then cost a turn of the scheduler each, a hundred times what they take, and that is what would be measured.
    """
    calls = None if any(name in os.environ for name in THREADS) else _thread_calls()
    if calls is None:
        yield False
        return
    get, set_to = calls
    before = get()
    set_to(count)
    try:
        yield True
    finally:
        set_to(before)


def _thread_calls() -> tuple[Any, Any] | None:
    for stem, name in _BLAS:
        for path in mapped_libraries(stem):
            library = ctypes.CDLL(path)
            with contextlib.suppress(AttributeError):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


def device_named(name: str) -> Device:
    """The device that a person names: "cpu"; "auto", the first runtime's current GPU where there is one, else the CPU; "gpu", that GPU;
    or "cuda:1", "rocm".

    Raises:
        RuntimeError: no such device is here. ValueError: no device is called so.
    """
    if name in ("auto", "gpu"):
        found = default_device()
        if found is None and name == "gpu":
            raise RuntimeError("no GPU was found; see hipgroupgemm doctor")
        return CPU if found is None else Device(*found)
    device = Device.of(name)
    if device.kind != "cpu" and (device.kind, device.index) not in find_devices():
        here = ", ".join(f"{kind}:{index}" for kind, index in find_devices())
        raise RuntimeError(f"there is no {device} here, only {here or 'the CPU'}; see hipgroupgemm doctor")
    return device


def describe(device: Device) -> dict[str, Any]:
    """Device, processor, versions and the checkout's commit as plain values."""
    versions = {"hipgroupgemm": __version__, "python": platform.python_version(), "numpy": np.__version__}
    for name in ("ml_dtypes", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts: dict[str, Any] = {"cpu": cpu_model(), "cores": available_cores(), "system": f"{platform.system()} {platform.machine()}"}
    facts["blas"] = "unknown"
    with contextlib.suppress(Exception):  # NumPy promises no layout of this
        config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload,func-returns-value,unused-ignore]
        blas = config["Build Dependencies"]["blas"]
        facts["blas"] = f"{blas['name']} {blas['version']}".strip()
    if device.kind == "cpu":
        facts["device"] = f"cpu: {facts['cpu']}, {facts['cores']} cores"
        facts |= {name: os.environ[name] for name in THREADS if name in os.environ}
    else:
        runtime = get_runtime(device.kind)
        info = runtime.device_info(device.index)
        versions["driver"] = str(runtime.version)
        facts |= {"device": f"{device}: {info.name}", "architecture": info.target}
    commit, changed = commit_of(Path(__file__).resolve().parents[2])
    return {**facts, "versions": versions, "commit": commit, "uncommitted_changes": changed}


def load_average() -> float | None:
    """Processes at work, on average over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def busy_note(load: float | None, cores: int) -> str:
    """What to say of times on a machine that was busy before; "" where it was not, or nobody knows."""
    if load is None or load <= cores / 2:
        return ""
    return (
        f"The load average was {load:.1f} on {cores} cores before this began: unless that was work of your own that has ended, others "
        "were at work, and the times are not to be trusted."
    )


def commit_of(checkout: Path) -> tuple[str | None, bool | None]:
    """The commit that is checked out in a directory, and whether tracked files differ from it; (None, None) where git can't tell.

    Only the top of a checkout counts: an installed package may lie somewhere below a repository that has nothing to do with it.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(checkout), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):  # no git, or one that hangs or refuses
            return None

    commit = git("rev-parse", "--verify", "HEAD") if (checkout / ".git").exists() else None
    state = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if state is None else bool(state)
