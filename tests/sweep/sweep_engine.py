"""`hipgroupgemm sweep` with real tuning and a backend for tests, in processes of its own: python -m sweep_engine sweep ...

The environment variable SWEEP_ENGINE, JSON, says what the backend has: {"version": "1", "kernels": {name: behaviour}, "marks": folder},
where a behaviour is an algorithm of `fake_backend`. tests/sweep/data/old.jsonl and new.jsonl were made with `OLD` and `NEW` and

    python -m sweep_engine sweep --no-store --devices cpu --backend double --shape 60,24,20,6 --shape 45,16,12,5 \\
        --class fwd_wi,wgrad_wo --json FILE
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from fake_backend import FakeBackend

from hipgroupgemm import register_backend
from hipgroupgemm.backends import backend_names
from hipgroupgemm.backends.base import Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.sweep import workers

OLD = {
    "version": "1",
    "kernels": {"tile_32": "good:7", "tile_64": "good:5", "tile_128": "good:8", "tile_256": "wrong", "stream_k": "good:6"},
}
NEW = {
    "version": "2",
    "kernels": {"tile_64": "good:7", "tile_128": "good:4", "tile_256": "good:6", "stream_k": "exits:3", "tile_512": "good:5"},
}


class VersionedBackend(FakeBackend):
    """A backend whose kernels keep their names from version to version, and not what they do."""

    def __init__(self, kernels: dict[str, str], version: str, marks: str = "") -> None:
        super().__init__(list(kernels), name="double", marks=marks)
        self.kernels, self.version = kernels, version

    def versions(self, device: Device) -> dict[str, str]:
        return {"double": self.version}

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        return super().prepare(config, device, dataclasses.replace(algorithm, name=self.kernels[algorithm.name]), stream)


def _register() -> None:
    if "double" not in backend_names():
        options = json.loads(os.environ["SWEEP_ENGINE"])
        register_backend(VersionedBackend(options["kernels"], options["version"], options.get("marks", "")), ("cpu",))


def device_identity(*arguments: Any) -> Any:
    _register()
    return workers.device_identity(*arguments)


def run_job(*arguments: Any) -> Any:
    _register()
    return workers.run_job(*arguments)


def main() -> None:
    from hipgroupgemm.cli import main as command
    from hipgroupgemm.sweep import running

    running.WORKERS = "sweep_engine"
    _register()  # the command looks at names
    command(sys.argv[1:])


if __name__ == "__main__":
    main()
