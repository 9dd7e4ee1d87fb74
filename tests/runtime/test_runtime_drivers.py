"""Both vendors' runtimes over bindings that are none: what they call, what they restore, and what their errors say."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import device_graphs
import pytest

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime.cuda.runtime import CudaRuntime
from hipgroupgemm.runtime.hip import runtime as hip_runtime
from hipgroupgemm.runtime.hip.runtime import HipRuntime
from hipgroupgemm.runtime.objects import DeviceInfo
from hipgroupgemm.runtime.parameters import KernelParameters


class Status(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700


class Mode(enum.IntEnum):
    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class Bindings(types.ModuleType):
    """Answers every call with what the test says, else with success and a handle; keeps a list of all calls."""

    def __init__(self, name: str, prefix: str) -> None:
        super().__init__(name)
        self.prefix = prefix
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, tuple[Any, ...]] = {}
        self.mode: Any = Mode.GLOBAL

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not name.startswith(self.prefix):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == "cuThreadExchangeStreamCaptureMode":
                before, self.mode = self.mode, arguments[0]
                return Status.SUCCESS, before
            return self.answers.get(name, (Status.SUCCESS, 1))

        return call

    def names(self) -> list[str]:
        found = [call[0] for call in self.calls]
        self.calls.clear()
        return found


def _enum_with(*members: str) -> Any:
    return types.SimpleNamespace(**{name: name for name in members})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaRuntime, Bindings]:
    driver: Any = Bindings("cuda.bindings.driver", "cu")
    driver.CUresult, driver.CUstreamCaptureMode = Status, Mode
    driver.CUpointer_attribute = _enum_with("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL")
    driver.CUlaunchConfig = driver.CUlaunchAttribute = types.SimpleNamespace
    driver.CUlaunchAttributeID = None
    driver.CUstream = int
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return _described(CudaRuntime()), driver


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> tuple[HipRuntime, Bindings]:
    hip: Any = Bindings("rocm.bindings.hip", "hip")
    hip.hipError_t, hip.hipStreamCaptureMode = Status, Mode
    hip.hipMemcpyKind = _enum_with("hipMemcpyDefault")
    hip.hipPointer_attribute = _enum_with("HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL")
    hip.ihipStream_t = types.SimpleNamespace(fromObj=lambda stream: ("stream", stream))
    monkeypatch.setattr(hip_runtime, "load_hip", lambda: (hip, "libc.so.6"))
    arguments = types.SimpleNamespace(addresses=lambda params: ("addresses", params.address), no_extra=None)
    monkeypatch.setattr(hip_runtime, "_LaunchArguments", lambda _: arguments)
    return _described(HipRuntime()), hip


def _described(runtime: Any) -> Any:
    runtime._infos[0] = DeviceInfo(
        0, "none", "sm_90" if runtime.kind == "cuda" else "gfx942", "", 8, 32, 1024, 1 << 15, 1 << 16, 0, 1 << 30
    )
    runtime._bindings.calls.clear()
    return runtime


@pytest.fixture(params=["cuda", "rocm"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Bindings]:
    return request.getfixturevalue(request.param)


def test_a_failed_launch_is_told_in_whole_sentences(pair: tuple[Any, Bindings]) -> None:
    runtime, bindings = pair
    function = runtime.load_module(b"code", 0).get_function("kernel")
    call = "cuLaunchKernelEx" if runtime.kind == "cuda" else "hipModuleLaunchKernel"
    bindings.answers[call] = (Status.INVALID_VALUE,)
    with pytest.raises(runtimes.DeviceError) as caught:
        runtime.launch(function, (1, 2, 3), (5000, 1, 1), 77, 9, KernelParameters(["ptr"]))
    text = str(caught.value)
    assert "kernel kernel, grid (1, 2, 3), block (5000, 1, 1), 77 bytes of shared memory" in text
    assert "want 1 or more blocks, 1 to 1024 threads per block" in text and text.startswith(f"{call} failed with status 1 (INVALID_VALUE)")
    bindings.answers[call] = (Status.ILLEGAL_ADDRESS,)
    with pytest.raises(runtimes.DeviceError, match=r"77 bytes of shared memory: a kernel accessed memory out of bounds"):
        runtime.launch(function, (1, 2, 3), (5000, 1, 1), 77, 9, KernelParameters(["ptr"]))


def test_errors_are_named_and_left_with_nobody(pair: tuple[Any, Bindings]) -> None:
    runtime, bindings = pair
    prefix = "cu" if runtime.kind == "cuda" else "hip"
    bindings.answers[f"{prefix}StreamSynchronize"] = (Status.ILLEGAL_ADDRESS,)
    with pytest.raises(runtimes.DeviceError, match=f"{prefix}StreamSynchronize failed with status 700 .ILLEGAL_ADDRESS.: a kernel"):
        runtime.synchronize_stream(5)
    assert bindings.names() == [f"{prefix}StreamSynchronize", *(["hipGetLastError"] if prefix == "hip" else [])]
    malloc = "cuMemAlloc" if prefix == "cu" else "hipMalloc"
    bindings.answers |= {malloc: (Status.OUT_OF_MEMORY,), f"{prefix}MemGetInfo": (Status.SUCCESS, 3, 8)}
    with pytest.raises(runtimes.DeviceMemoryError, match=f"{malloc} failed.*wanted 99 bytes on device 0, where 3 of 8 bytes are free"):
        runtime.malloc_plain(99, 0)
    assert bindings.mode == Mode.GLOBAL  # restored
    bindings.answers[f"{prefix}EventQuery"] = (Status.NOT_READY,)
    assert runtime.query_event(5) is False
    bindings.answers[f"{prefix}EventQuery"] = (Status.SUCCESS,)
    assert runtime.query_event(5) is True
    bindings.answers[f"{prefix}EventQuery"] = (Status.ILLEGAL_ADDRESS,)
    with pytest.raises(runtimes.DeviceError, match=f"{prefix}EventQuery"):
        runtime.query_event(5)


def test_captures(pair: tuple[Any, Bindings]) -> None:
    runtime, bindings = pair
    prefix = "cu" if runtime.kind == "cuda" else "hip"
    bindings.answers[f"{prefix}StreamIsCapturing"] = (Status.SUCCESS, 0)
    assert not runtime.is_capturing(5) and runtime.capture_id(5) == 0
    bindings.answers[f"{prefix}StreamIsCapturing"] = (Status.SUCCESS, 1)
    bindings.answers[f"{prefix}StreamGetCaptureInfo"] = (Status.SUCCESS, 1, 41, None, None, 0)
    assert runtime.is_capturing(5) and runtime.capture_id(5) == 41
    bindings.answers[f"{prefix}StreamGetCaptureInfo"] = (Status.SUCCESS, 2, 41, None, None, 0)
    with pytest.raises(runtimes.DeviceError, match=r"status 901 .*invalidated the capture"):
        runtime.capture_id(5)
    bindings.calls.clear()
    with device_graphs.capture(runtime, 5) as graph:
        pass
    assert graph == [1]
    assert bindings.names() == [
        f"{prefix}StreamBeginCapture",
        f"{prefix}StreamEndCapture",
        "cuGraphInstantiate" if prefix == "cu" else "hipGraphInstantiateWithFlags",
        f"{prefix}GraphDestroy",
    ]
    bindings.answers[f"{prefix}StreamEndCapture"] = (Status.INVALID_VALUE, None)
    with pytest.raises(KeyError), device_graphs.capture(runtime, 5):
        raise KeyError("inside")
    if prefix == "cu":
        with pytest.raises(KeyError), runtime.relaxed_capture():
            assert bindings.mode == Mode.RELAXED
            raise KeyError("inside")
        assert bindings.mode == Mode.GLOBAL


def test_a_forked_child_calls_nothing(pair: tuple[Any, Bindings]) -> None:
    runtime, bindings = pair
    launch = runtime.prepare_launch(runtime.load_module(b"code", 0).get_function("k"), (1, 1, 1), (1, 1, 1), 0, 0, KernelParameters([]))
    runtime.disable_after_fork()
    bindings.calls.clear()
    for call in (launch.run, lambda: runtime.malloc_plain(5, 0), lambda: runtime.query_event(1), lambda: runtime.pointer_device(64)):
        with pytest.raises(runtimes.ForkedProcessError):
            call()
    assert not bindings.calls
