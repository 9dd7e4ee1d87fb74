"""A stand-in for tuning in the processes of a sweep: quick, with times that follow from the problem, and able to fail in every way.

What it does is said by the environment variable SWEEP_DOUBLE, JSON: {"seconds": of a job, "version": of the backend, "scale": of times,
"verdicts": {algorithm: verdict}, "names": [algorithms], "only": {n: [algorithms besides]},
"samples": timed calls, "spread": added to p90, "ceilings": scale of the device's, "notes": [texts],
and for problems by their n: "refuse", "memory", "raise", "die", "lose": [n, ...]}.
A lost device stays lost while the file "lost" exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.tuning.report import TuningReport, TuningRow

NAMES = ("tile_64", "tile_128", "tile_256")


def options() -> dict[str, Any]:
    return json.loads(os.environ.get("SWEEP_DOUBLE", "{}"))


def identity(device: Any) -> dict[str, Any]:
    o = options()
    if o.get("lost") and Path(o["lost"]).exists():
        raise RuntimeError(f"{device} does not answer")
    versions = {"hipgroupgemm": "0.1.0", "double": o.get("version", "1")}
    return {
        "kind": device.kind,
        "target": "t1",
        "compute_units": 4,
        "name": o.get("device", f"A {device.kind}"),
        "versions": versions,
        "backends": {"double": list(versions)},
    }


def median(config: Any, index: int) -> float:
    """Milliseconds, different for every problem and algorithm: the second algorithm wins where n is odd, else the first."""
    order = (1, 0, 2) if config.n % 2 else (0, 1, 2)
    return (1 + order[index]) * (config.m + 2 * config.k + 3 * config.n) / 100 * float(options().get("scale", 1))


def row(config: Any, index: int, name: str) -> TuningRow:
    o = options()
    verdict = o.get("verdicts", {}).get(name, "ok")
    algorithm = MatmulAlgorithm("double", index, name, 1000 * index, True)
    if verdict != "ok":
        return TuningRow(algorithm, verdict, f"it is {verdict}")
    ms = median(config, index)
    p90 = (1.02 + o.get("spread", 0)) * ms
    return TuningRow(algorithm, "ok", "", ms, 0.99 * ms, p90, 2.5, 0.5 / (1 + index), 1e-3, 2e-3, 7, o.get("samples", 5))


def tune(config: Any, device: Any, group_sizes: Any = None, *, progress: Any, **settings: Any) -> TuningReport:
    o = options()
    if log := o.get("log"):
        with open(log, "a") as file:
            file.write(json.dumps({"n": config.n, "device": str(device), "sizes": group_sizes, **settings}) + "\n")
    if config.n in o.get("refuse", ()):
        raise NotImplementedError("no backend takes this")
    if config.n in o.get("memory", ()):
        raise MemoryError("too large")
    if config.n in o.get("raise", ()):
        raise RuntimeError("the driver\nhas failed")
    if config.n in o.get("die", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    if config.n in o.get("lose", ()):
        Path(o["lost"]).touch()
        raise RuntimeError("the device fell off the bus")
    for step in range(4):
        progress(types.SimpleNamespace(phase="time", done=step, total=4, row=None))
        time.sleep(float(o.get("seconds", 0)) / 4)
    asked = settings["algorithms"]
    names = o.get("names", NAMES) if isinstance(asked, str) else asked
    ceilings = {"flops": 1e9 * float(o.get("ceilings", 1)), "bandwidth": 1e9, "how": "by the stand-in"}
    return TuningReport(
        roofline=ceilings,
        config=config.key(),
        device=str(device),
        device_name=identity(device)["name"],
        identity=identity(device),
        ragged_extent=config.ragged_extent,
        size_samples=group_sizes or [[1]],
        size_class="balanced",
        notes=o.get("notes", []),
        origin=settings.get("origin") or ("seed" if group_sizes is None else "user"),
        seed=settings["seed"],
        started="2026-01-01T00:00:00+00:00",
        seconds=0.1,
        floor_ms=0.1,
        rows=[row(config, index, name) for index, name in enumerate(names)],
    )


def names(job: Any, device: Any, backends: Any, max_workspace_size: Any = None) -> set[str]:
    o = options()
    return {*o.get("names", NAMES), *o.get("only", {}).get(str(job.n), ())}


# ---- what a device's process is asked, in place of `sweep.workers` ----------------------------------------------------------------


def _workers() -> Any:
    from hipgroupgemm.sweep import workers

    workers.tune, workers.identity, workers.algorithm_names = tune, identity, names
    return workers


def device_identity(*arguments: Any) -> Any:
    return _workers().device_identity(*arguments)


def run_job(*arguments: Any) -> Any:
    return _workers().run_job(*arguments)


def main() -> None:
    """The command with this stand-in, for tests that need a process of their own."""
    from hipgroupgemm.cli import main as command
    from hipgroupgemm.sweep import running

    running.WORKERS = "sweep_double"
    command(sys.argv[1:])


if __name__ == "__main__":
    main()
