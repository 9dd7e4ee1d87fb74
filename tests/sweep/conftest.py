"""What tests of sweeps share: devices' processes that tune with a stand-in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hipgroupgemm.measure import environment
from hipgroupgemm.sweep import running

HERE = str(Path(__file__).parent)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Devices' processes tune with the stand-in, see `sweep_double`; returns a function that says how."""
    monkeypatch.setattr(running, "WORKERS", "sweep_double")
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))

    def options(**values: object) -> None:
        monkeypatch.setenv("SWEEP_DOUBLE", json.dumps(values))

    options()
    return options


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that commands find; only the stand-in runs on them."""
    monkeypatch.setattr(environment, "find_devices", lambda: [("cuda", 0), ("cuda", 1)])
