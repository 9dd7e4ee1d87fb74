"""What was measured on what: the machine, the device and the versions that a result is only worth something with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.benchmark.labs import Lab
from hipgroupgemm.runtime.process import available_cores

__all__ = ["blas_name", "busy_note", "commit_of", "cpu_model", "describe", "load_average"]


def describe(lab: Lab) -> dict[str, Any]:
    """Device, processor, versions and the checkout's commit as plain values."""
    import hipgroupgemm

    versions = {"hipgroupgemm": hipgroupgemm.__version__, "python": platform.python_version(), "numpy": np.__version__}
    for name in ("ml_dtypes", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "blas": blas_name(),
    }
    if lab.device.kind == "cpu":
        facts["device"] = f"cpu: {facts['cpu']}, {facts['cores']} cores"
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            if variable in os.environ:
                facts[variable] = os.environ[variable]
    else:
        cupy = lab.xp
        versions["cupy"] = cupy.__version__
        versions["runtime"] = str(cupy.cuda.runtime.runtimeGetVersion())
        versions["driver"] = str(cupy.cuda.runtime.driverGetVersion())
        properties = cupy.cuda.runtime.getDeviceProperties(lab.device.index)
        name = properties["name"]
        facts["device"] = f"{lab.device}: {name.decode() if isinstance(name, bytes) else name}"
        if properties.get("gcnArchName"):
            arch = properties["gcnArchName"]
            facts["architecture"] = arch.decode() if isinstance(arch, bytes) else arch
    commit, changed = commit_of(Path(hipgroupgemm.__file__).resolve().parent.parent)
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
    if not (checkout / ".git").exists():
        return None, None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, errors="replace", timeout=10, check=False
            )
        except (OSError, subprocess.SubprocessError):  # no git, or one that hangs
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD") or None
    state = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if state is None else bool(state)


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def blas_name() -> str:
    """The BLAS that NumPy was built with, as NumPy tells it, or "unknown"."""
    with contextlib.suppress(Exception):  # NumPy promises no layout of this
        config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload,func-returns-value,unused-ignore]
        blas = config["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}".strip()
    return "unknown"
