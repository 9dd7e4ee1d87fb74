"""What only ROCm has, on a real or emulated device (-m hip)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import compile as hip_compile
from hipgroupgemm.runtime import process
from hipgroupgemm.runtime.hip.library import HIP_STEM
from hipgroupgemm.runtime.hip.runtime import HipRuntime
from hipgroupgemm.runtime.parameters import KernelParameters

pytestmark = pytest.mark.hip

SOURCE = 'extern "C" __global__ void k(int* p) { *p = 1; }'


@pytest.fixture(scope="module")
def runtime() -> HipRuntime:
    found = runtimes.get_runtime("rocm")
    assert isinstance(found, HipRuntime)
    return found


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=variables)


def test_one_library_is_loaded(runtime: HipRuntime) -> None:
    assert process.mapped_libraries(HIP_STEM) == [runtime.library]
    assert runtime.version // 10_000_000 >= 6


@pytest.fixture(scope="module")
def copied(runtime: HipRuntime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second HIP runtime: the same code under another path, as when two packages bring one each."""
    target = tmp_path_factory.mktemp("other") / os.path.basename(runtime.library)
    shutil.copy(runtime.library, target)
    return target


def test_two_runtimes_are_refused(runtime: HipRuntime, copied: Path) -> None:
    code = """
import ctypes, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
import hipgroupgemm.runtime as r
try:
    r.get_runtime("rocm")
except r.RuntimeUnavailable as error:
    print(error)
"""
    run = run_python(code, str(copied), runtime.library)
    assert run.returncode == 0, run.stderr
    assert str(copied) in run.stdout and runtime.library in run.stdout and "2 HIP runtimes" in run.stdout


def test_the_loaded_runtime_is_used(runtime: HipRuntime, copied: Path) -> None:
    code = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
import hipgroupgemm.runtime as r
from hipgroupgemm.runtime.process import mapped_libraries
x = r.get_runtime("rocm")
p = x.malloc_plain(100, 0)
assert r.device_of_pointer(p) == ("rocm", 0)
print(x.library, *mapped_libraries("libamdhip64.so"))
"""
    run = run_python(code, str(copied))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(copied)] * 2


def test_hip_python_in_use_before_us(runtime: HipRuntime) -> None:
    code = """
try:
    from rocm.bindings import hip
except ImportError:
    from hip import hip
status, pointer = hip.hipMalloc(100)
assert int(status) == 0
import hipgroupgemm.runtime as r
from hipgroupgemm.runtime.process import mapped_libraries
assert r.device_of_pointer(int(pointer)) == ("rocm", 0)
print(r.get_runtime("rocm").library, *mapped_libraries("libamdhip64.so"))
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr
    first, *mapped = run.stdout.split()
    assert mapped == [first]


def test_hidden_devices() -> None:
    code = """
import hipgroupgemm.runtime as r
try:
    r.get_runtime("rocm")
except r.RuntimeUnavailable as error:
    print(error)
"""
    run = run_python(code, HIP_VISIBLE_DEVICES="-1")
    assert run.returncode == 0 and "HIP_VISIBLE_DEVICES" in run.stdout, run.stderr


def test_no_error_is_left_behind(runtime: HipRuntime) -> None:
    # HIP remembers the last error of a thread, and torch looks for it after its own launches
    def last() -> int:
        return int(runtime._bindings.hipGetLastError()[0])

    last()
    code = runtime.compile(SOURCE, "k.cu", [], runtime.device_info(0).target)
    module = runtime.load_module(code, 0)
    stream = runtime.create_stream(0)
    event = runtime.create_event(0)
    with runtime.use_device(0):
        assert runtime.pointer_device(id(code)) is None
        assert last() == 0
        function, params = module.get_function("k"), KernelParameters(["ptr"])
        with pytest.raises(runtimes.DeviceError):
            runtime.launch(function, (1, 1, 1), (5000, 1, 1), 0, stream, params)
        assert last() == 0
        with pytest.raises(runtimes.DeviceError):
            module.get_function("absent")
        assert last() == 0
        with pytest.raises(runtimes.DeviceMemoryError):
            runtime.malloc_plain(1 << 50, 0)
        assert last() == 0
        runtime.record_event(event, stream)
        runtime.query_event(event)
        assert last() == 0
    runtime.destroy_event(event)
    runtime.destroy_stream(stream)


def test_no_programmatic_launches(runtime: HipRuntime) -> None:
    code = runtime.compile(SOURCE, "k.cu", [], runtime.device_info(0).target)
    function = runtime.load_module(code, 0).get_function("k")
    params = KernelParameters(["ptr"])
    with pytest.raises(NotImplementedError, match="programmatic"):
        runtime.prepare_launch(function, (1, 1, 1), (64, 1, 1), 0, 0, params, programmatic=True)


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx942:sramecc+:xnack-", "gfx950"])
def test_compiles_for_every_target(target: str) -> None:
    code = hip_compile.compile_hip(SOURCE, "k.cu", ["-O3"], target)
    assert code.startswith((b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__")) and target.partition(":")[0].encode() in code


def test_code_for_another_target_is_refused(runtime: HipRuntime) -> None:
    other = "gfx90a" if runtime.device_info(0).architecture != "gfx90a" else "gfx942"
    with pytest.raises(runtimes.DeviceError, match="hipModuleLoadData failed"):
        runtime.load_module(hip_compile.compile_hip(SOURCE, "k.cu", [], other), 0)
    with pytest.raises(ValueError, match="want a name like gfx942"):
        hip_compile.compile_hip(SOURCE, "k.cu", [], "sm_90")
