"""Kernels compiled ahead of tuning, in processes of their own: all are found afterwards, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import time

import numpy as np
import pytest
from test_triton_compile import DEVICES, config_of

from hipgroupgemm.backends import base
from hipgroupgemm.backends.triton import TritonBackend, ahead, compiler, defaults, kernel_config, specs
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime import cache
from hipgroupgemm.tuning import engine


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path / "cache"


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    found = []
    original = subprocess.Popen

    def popen(*args, **kwargs):
        found.append(original(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return found


@pytest.fixture
def backend(monkeypatch):
    made = TritonBackend()
    monkeypatch.setattr(made, "properties", lambda device: DEVICES["gfx942"])
    return made


def algorithms_of(backend, key, count):
    return backend.algorithms(key, Device("rocm", 0), base.AlgorithmLimits(count))


def test_all_are_compiled_and_found(backend, started, own_cache):
    key = config_of("forward").key()
    wanted = algorithms_of(backend, key, 3)
    device = DEVICES["gfx942"]
    kernels = [specs.spec_of(kernel_config.kernel_configs(key.ragged_mode, device.target)[a.index], key, device) for a in wanted]
    assert not any(map(compiler.is_compiled, kernels))
    assert backend.compile_ahead(key, Device("rocm", 0), wanted) == len(set(kernels))
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert all(map(compiler.is_compiled, kernels))
    files = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*.bin")}
    assert all(compiler.compile_kernel(spec).code[:4] == b"\x7fELF" for spec in kernels)
    assert files == {path: path.stat().st_mtime_ns for path in own_cache.rglob("*.bin")}, "compiled once more"
    assert backend.compile_ahead(key, Device("rocm", 0), wanted) == 0 and len(started) == 2


def test_little_time_leaves_nothing_running(backend, started):
    key = config_of("weight gradient").key()
    began = time.monotonic()
    backend.compile_ahead(key, Device("rocm", 0), algorithms_of(backend, key, 12), 0.2)
    assert time.monotonic() - began < 20
    assert started and all(process.poll() is not None for process in started)


def test_what_is_refused_stays_with_the_one_who_asks(backend, started):
    key = config_of("forward").key()
    device = DEVICES["gfx942"]
    good = [specs.spec_of(kernel, key, device) for _, kernel in defaults.ordered(key, device)[:2]]
    bad = good[0]._replace(function="there_is_none")
    assert ahead.compile_ahead([bad, *good]) == 2
    assert not compiler.is_compiled(bad) and all(map(compiler.is_compiled, good))


@pytest.mark.parametrize("directory", [None, "/dev/null/cache", "open to all"])
def test_nowhere_to_keep_them(directory, backend, started, tmp_path, monkeypatch):
    if directory == "open to all":
        directory = tmp_path / "shared"
        directory.mkdir()
        directory.chmod(0o777)
    monkeypatch.setattr(ahead, "default_cache", lambda: cache.CompileCache(directory))
    key = config_of("forward").key()
    assert backend.compile_ahead(key, Device("rocm", 0), algorithms_of(backend, key, 8)) == 0 and not started


def test_tuning_asks_for_it(monkeypatch):
    from fake_backend import FakeBackend

    import hipgroupgemm as hgg
    from hipgroupgemm.backends import register_backend, unregister_backend

    asked = []
    double = FakeBackend(["good", "good:1"], name="ahead")
    monkeypatch.setattr(type(double), "compile_ahead", lambda self, *arguments: asked.append((self.name, *arguments)), raising=False)
    register_backend(double, ("cpu",))
    try:
        config = hgg.config_for_ragged_dot(np.ones((6, 4), "f4"), np.ones((2, 4, 3), "f4"), [2, 4])
        report = engine.tune(config, "cpu", backends="ahead", isolate=False, repetitions=2, time_limit=50, roofline=False)
    finally:
        unregister_backend("ahead")
    ((name, key, device, algorithms, seconds),) = asked
    assert (name, key, device, seconds) == ("ahead", config.key(), Device("cpu", 0), 20.0)
    assert {a.name for a in algorithms} == {row.algorithm.name for row in report.rows}
