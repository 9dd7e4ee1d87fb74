"""The runtime package without a device: registry, errors, streams, tensor maps."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import compile as cuda_compile
from hipgroupgemm.runtime import process, streams
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.cuda import tensor_map
from hipgroupgemm.runtime.hip import library as hip_library
from hipgroupgemm.runtime.hip import runtime as hip


class KnowsPointers(Runtime):
    """A runtime that knows some pointers and nothing else."""

    __abstractmethods__ = frozenset()

    def __init__(self, kind: str, pointers: dict[int, int]) -> None:
        super().__init__()
        self.kind = kind
        self.pointers = pointers

    def pointer_device(self, ptr: int) -> int | None:
        self.check_process()
        return self.pointers.get(ptr)


KnowsPointers.__abstractmethods__ = frozenset()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Runtime]]:
    """An empty registry of runtimes, where no bindings can be imported."""
    table: dict[str, Runtime] = {}
    monkeypatch.setattr(runtimes, "_runtimes", table)
    monkeypatch.setattr(runtimes, "_forked_with", set())
    for name in ("cuda.bindings", "rocm.bindings", "hip"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(hip_library, "_HIP_SONAMES", ("libno-such-hip.so.7",))
    monkeypatch.setattr(hip_library, "_search_directories", lambda: ["/nowhere/lib"])
    monkeypatch.setattr(hip_library, "mapped_libraries", lambda stem: [])
    yield table


# ---- the registry


def test_import_is_light() -> None:
    """The package loads nothing of a vendor, and nothing of the standard library that takes long, for its runtime."""
    code = "import sys, numpy, ml_dtypes; before = set(sys.modules); import hipgroupgemm; print(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert not {name for name in loaded if name.startswith(("hipgroupgemm.runtime.cuda", "hipgroupgemm.runtime.hip"))}
    assert loaded.isdisjoint({"cuda", "hip", "rocm", "cffi", "platformdirs", "click", "rich", "cupy", "torch", "jax"})
    assert loaded.isdisjoint({"tempfile", "shutil", "hashlib", "logging", "subprocess", "multiprocessing", "socket"})


def test_no_cuda(registry: dict[str, Runtime]) -> None:
    with pytest.raises(runtimes.RuntimeUnavailable, match=r"cuda\.bindings is missing.*cuda-core") as caught:
        runtimes.get_runtime("cuda")
    assert caught.value.kind == "cuda" and isinstance(caught.value, RuntimeError)


def test_no_hip_library(registry: dict[str, Runtime]) -> None:
    with pytest.raises(runtimes.RuntimeUnavailable, match=r"no libamdhip64\.so in /nowhere/lib.*hip-python"):
        runtimes.get_runtime("rocm")


def test_no_hip_python(registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_library, "find_hip_library", lambda: "/opt/rocm/lib/libamdhip64.so")
    with pytest.raises(runtimes.RuntimeUnavailable, match=r"hip-python is missing.*pip install"):
        runtimes.get_runtime("rocm")


def test_library_that_cannot_be_loaded(registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libamdhip64.so.6").write_bytes(b"no library")
    monkeypatch.setattr(hip_library, "_search_directories", lambda: [str(tmp_path)])
    with pytest.raises(runtimes.RuntimeUnavailable, match=r"libamdhip64\.so\.6: .*also looked in"):
        runtimes.get_runtime("rocm")


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind: got 'vulkan'; want one of rocm, cuda"):
        runtimes.get_runtime("vulkan")


def test_no_device_is_found_where_there_is_none(registry: dict[str, Runtime]) -> None:
    assert runtimes.find_devices() == [] and runtimes.default_device() is None


def test_devices_are_found_without_an_array_library(registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    registry["cuda"] = runtime = KnowsPointers("cuda", {})
    runtime._count, runtime.current_device = 2, lambda: 1  # type: ignore[method-assign]
    assert runtimes.find_devices() == [("cuda", 0), ("cuda", 1)] and runtimes.default_device() == ("cuda", 1)


def test_threads_get_one_object(registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KnowsPointers] = []

    def slow() -> KnowsPointers:
        time.sleep(0.05)
        made.append(KnowsPointers("rocm", {}))
        return made[-1]

    monkeypatch.setattr(hip, "HipRuntime", slow)
    found: list[Runtime] = []
    threads = [threading.Thread(target=lambda: found.append(runtimes.get_runtime("rocm"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found == made * 8


def test_device_of_pointer(registry: dict[str, Runtime]) -> None:
    with pytest.raises(runtimes.RuntimeUnavailable, match=r"rocm: .*cuda: .*|cuda: .*rocm: .*"):
        runtimes.device_of_pointer(4096)
    registry["cuda"] = KnowsPointers("cuda", {4096: 3})
    registry["rocm"] = KnowsPointers("rocm", {8192: 1})
    assert runtimes.device_of_pointer(4096) == ("cuda", 3)
    assert runtimes.device_of_pointer(8192) == ("rocm", 1)
    with pytest.raises(ValueError, match="0x3000, which no device of cuda or rocm"):
        runtimes.device_of_pointer(0x3000)
    with pytest.raises(ValueError, match="ptr: got 0"):
        runtimes.device_of_pointer(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child(registry: dict[str, Runtime]) -> None:
    runtime = registry["cuda"] = KnowsPointers("cuda", {4096: 0})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls = [
                lambda: runtimes.get_runtime("cuda"),
                lambda: runtimes.device_of_pointer(4096),
                lambda: runtime.pointer_device(4096),
            ]
            for call in calls:
                try:
                    call()
                except runtimes.ForkedProcessError as error:
                    status += "before this process was forked" in str(error)
            status = 0 if status == 1 + len(calls) else status
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert runtimes.get_runtime("cuda") is runtime and runtimes.device_of_pointer(4096) == ("cuda", 0)


@pytest.mark.parametrize("initialised", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_somebody_else_initialised_hip(
    registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, initialised: bool
) -> None:
    # a process that uses HIP has its device file open, whichever package initialised it
    device_file = tmp_path / "kfd"
    device_file.touch()
    monkeypatch.setattr(runtimes, "_HIP_DEVICE_FILE", str(device_file))
    expected = runtimes.ForkedProcessError if initialised else runtimes.RuntimeUnavailable
    with device_file.open() if initialised else nullcontext():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                runtimes.get_runtime("rocm")
            except RuntimeError as error:
                status = 0 if type(error) is expected else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_errors_pickle() -> None:
    errors = [
        runtimes.RuntimeUnavailable("cuda", "looked", "install"),
        runtimes.ForkedProcessError("rocm"),
        runtimes.DeviceError("cuCall", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "note"),
        runtimes.DeviceMemoryError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
        runtimes.CompileError("nvrtcCompileProgram", 6, "NVRTC_ERROR_COMPILATION", "k.cu", "line 1"),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
        assert isinstance(error, RuntimeError)
    assert str(errors[2]) == "cuCall failed with status 700 (CUDA_ERROR_ILLEGAL_ADDRESS): note"


# ---- what is loaded


@pytest.fixture
def map_file(tmp_path: Path) -> Iterator[object]:
    """Maps a file of a given name into this process, as the dynamic loader would."""
    held: list[mmap.mmap] = []

    def map_it(*parts: str) -> str:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(64))
        with path.open("rb") as file:
            held.append(mmap.mmap(file.fileno(), 64, access=mmap.ACCESS_READ))
        return str(path)

    yield map_it
    for mapping in held:
        mapping.close()


def test_mapped_libraries(map_file, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    before = process.mapped_libraries("libfor-a-test.so")
    first = map_file("with blank", "libfor-a-test.so.6.4")
    map_file("other", "unlibfor-a-test.so.6")
    assert before == [] and process.mapped_libraries("libfor-a-test.so") == [first]
    second = map_file("b", "libfor-a-test.so")
    assert sorted(process.mapped_libraries("libfor-a-test.so")) == sorted([first, second])


def test_two_hip_runtimes_are_refused(map_file, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(hip_library, "HIP_STEM", "libamdhip64-test.so")
    assert hip_library.single_hip_runtime() is None
    first = map_file("torch", "libamdhip64-test.so")
    assert hip_library.single_hip_runtime() == first
    assert hip_library.find_hip_library() == first
    second = map_file("rocm", "libamdhip64-test.so.6")
    with pytest.raises(runtimes.RuntimeUnavailable, match="2 HIP runtimes") as caught:
        hip_library.single_hip_runtime()
    assert first in str(caught.value) and second in str(caught.value)


def test_search_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("ROCM_HOME", "HIP_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/first:/second")
    monkeypatch.setenv("ROCM_PATH", "/named")
    found = hip_library._search_directories()
    assert found[:3] == ["/first", "/second", "/named/lib"] and found[-2:] == [
        "/opt/rocm/lib",
        "/opt/rocm/lib64",
    ]
    for name in ("libamdhip64.so.6.4.43484", "libamdhip64.so.10.0", "libamdhip64.so.7"):
        (tmp_path / name).touch()
    assert hip_library._in_directory(str(tmp_path), "libamdhip64.so") == str(tmp_path / "libamdhip64.so.10.0")
    (tmp_path / "libamdhip64.so").touch()
    assert hip_library._in_directory(str(tmp_path), "libamdhip64.so") == str(tmp_path / "libamdhip64.so")
    assert hip_library._in_directory(str(tmp_path), "libhiprtc.so") is None


# ---- streams


class Holder:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class Convertible:
    def __int__(self) -> int:
        return 77


class WithProtocol:
    ptr = 1  # the protocol comes first

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 55


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (1 << 45, 1 << 45),
        (np.int64(9), 9),
        (Holder(cuda_stream=11), 11),
        (Holder(ptr=12), 12),
        (Holder(handle=ctypes.c_void_p(13)), 13),
        (Holder(handle=ctypes.c_void_p(None)), 0),
        (Convertible(), 77),
        (WithProtocol(), 55),
    ],
)
def test_stream_handles(stream: object, handle: int) -> None:
    assert streams.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["0", 1.0, True, Holder(), [1]])
def test_no_streams(stream: object) -> None:
    with pytest.raises(TypeError, match="stream: got"):
        streams.stream_handle(stream)


def test_default_streams() -> None:
    assert [streams.normalize_stream("cuda", s) for s in (None, 0, 1, 2, 640)] == [0, 0, 0, 2, 640]
    assert [streams.normalize_stream("rocm", s) for s in (None, 0, 640)] == [0, 0, 640]
    for value in (1, 2):
        with pytest.raises(ValueError, match=f"stream: got {value}, which only CUDA defines"):
            streams.normalize_stream("rocm", value)
    for kind in ("cuda", "rocm"):
        with pytest.raises(ValueError, match="stream: got -1"):
            streams.normalize_stream(kind, -1)
    assert [streams.protocol_stream("cuda", s) for s in (0, 2, 640)] == [1, 2, 640]
    assert [streams.protocol_stream("rocm", s) for s in (0, 640)] == [0, 640]


# ---- CUDA's parts that need no driver


def test_target_options() -> None:
    supported = (75, 80, 90, 100)
    assert cuda_compile.target_options("sm_90", supported) == ("--gpu-architecture=sm_90", True)
    assert cuda_compile.target_options("sm_90a", supported) == ("--gpu-architecture=sm_90a", True)
    assert cuda_compile.target_options("sm_121", supported) == ("--gpu-architecture=compute_100", False)
    with pytest.raises(ValueError, match="compiles for sm_75 and later"):
        cuda_compile.target_options("sm_70", supported)
    for name in ("gfx942", "90", "sm_x"):
        with pytest.raises(ValueError, match="want a name like sm_90"):
            cuda_compile.target_options(name, supported)


class EncodesNothing:
    """Takes the place of the CUDA runtime: its driver refuses every tensor map."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def check_process(self) -> None:
        pass

    def driver_function(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.seen.append(arguments)
            return 1

        return call

    def _fail(self, call: str, status: int, note: str) -> Exception:
        return runtimes.DeviceError(call, status, "CUDA_ERROR_INVALID_VALUE", note)


def test_tensor_map_arguments() -> None:
    runtime = EncodesNothing()
    encoder = tensor_map.TensorMapEncoder(runtime, "bf16", (128, 64), swizzle=128)  # type: ignore[arg-type]
    with pytest.raises(runtimes.DeviceError, match=r"cuTensorMapEncodeTiled.*shape \(300, 512\).*want an address"):
        encoder.encode(64, 4096, (300, 512), (1024,))
    into, kind, rank, address, dimensions, strides, box, steps, *mode = runtime.seen[0]
    assert (into.value, kind, rank, address.value) == (64, 9, 2, 4096)  # type: ignore[attr-defined]
    assert list(dimensions) == [512, 300] and list(strides) == [1024]  # type: ignore[call-overload]
    assert list(box) == [64, 128] and list(steps) == [1, 1]  # type: ignore[call-overload]
    assert mode == [0, 3, 2, 0]
    with pytest.raises(ValueError, match="got 1 and 1 entries; want 2 and 1"):
        encoder.encode(64, 4096, (300,), (1024,))
    with pytest.raises(runtimes.DeviceError, match=r"cuTensorMapReplaceAddress.*got 0x1001"):
        encoder.replace_address(64, 4097)
    for box in ((128, 65), (257, 64), (128, 128), (1, 1, 1, 1, 1, 8)):
        with pytest.raises(ValueError, match="box: got"):
            tensor_map.TensorMapEncoder(runtime, "bf16", box, swizzle=128)  # type: ignore[arg-type]
