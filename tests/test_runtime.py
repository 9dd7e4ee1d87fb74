"""The runtime package without a device: registry, errors, streams, parameter blocks."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import cuda_compile, hip_library, process, report, streams, tensor_map
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.parameters import TENSOR_MAP, Blob, KernelParameters


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
    code = (
        "import sys, hipgroupgemm; before = set(sys.modules); import hipgroupgemm.runtime;"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = {"hipgroupgemm.runtime", "hipgroupgemm.runtime.errors", "_typing", "typing", "collections.abc"}
    extra = {name for name in run.stdout.split() if name not in allowed}
    assert {name.partition(".")[0] for name in extra}.isdisjoint({"cuda", "hip", "rocm", "ctypes", "numpy"})
    assert len(extra) <= 12, extra  # typing's own imports, where nothing else has needed it


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


def test_library_that_cannot_be_loaded(
    registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libamdhip64.so.6").write_bytes(b"no library")
    monkeypatch.setattr(hip_library, "_search_directories", lambda: [str(tmp_path)])
    with pytest.raises(runtimes.RuntimeUnavailable, match=r"libamdhip64\.so\.6: .*also looked in"):
        runtimes.get_runtime("rocm")


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind: got 'vulkan'; want one of rocm, cuda"):
        runtimes.get_runtime("vulkan")


def test_reports_name_what_is_missing(registry: dict[str, Runtime]) -> None:
    reports = {r.kind: r for r in runtimes.available_runtimes()}
    assert set(reports) == {"cuda", "rocm"}
    assert not reports["cuda"].available and not reports["rocm"].available
    assert "cuda.bindings" in reports["cuda"].problem and "cuda-core" in reports["cuda"].install
    assert "libamdhip64" in reports["rocm"].problem and "hip-python" in reports["rocm"].install


def test_version_text() -> None:
    assert report.version_text("cuda", 13000) == "13.0"
    assert report.version_text("cuda", 12080) == "12.8"
    assert report.version_text("rocm", 60443484) == "6.4.43484"


def test_threads_get_one_object(registry: dict[str, Runtime], monkeypatch: pytest.MonkeyPatch) -> None:
    from hipgroupgemm.runtime import hip

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


# ---- parameter blocks

SCALARS = {
    "ptr": ctypes.c_uint64,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
# blobs whose layout ctypes can show
BLOBS = {(5, 1): ctypes.c_uint8 * 5, (12, 4): ctypes.c_uint32 * 3, (24, 8): ctypes.c_uint64 * 3}


def value_of(kind: str | tuple[int, int]) -> st.SearchStrategy[object]:
    if isinstance(kind, tuple):
        return st.binary(min_size=kind[0], max_size=kind[0])
    if kind in ("f32", "f64"):
        return st.floats(width=32 if kind == "f32" else 64, allow_nan=False)
    bits = 64 if kind == "ptr" else int(kind[1:])
    if kind.startswith("i"):
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return st.integers(0, (1 << bits) - 1)


slots = st.one_of(st.sampled_from(sorted(SCALARS)), st.sampled_from(sorted(BLOBS))).flatmap(
    lambda kind: st.tuples(st.just(kind), value_of(kind))
)


@given(st.lists(slots, max_size=24))
def test_layout_is_a_c_struct(chosen: list[tuple[str | tuple[int, int], object]]) -> None:
    kinds = [Blob(*kind) if isinstance(kind, tuple) else kind for kind, _ in chosen]
    values = [value for _, value in chosen]
    types = [BLOBS[kind] if isinstance(kind, tuple) else SCALARS[kind] for kind, _ in chosen]
    reference = type("S", (ctypes.Structure,), {"_fields_": [(f"f{i}", t) for i, t in enumerate(types)]})
    params = KernelParameters(kinds)
    assert list(params.offsets) == [getattr(reference, f"f{i}").offset for i in range(len(types))]
    assert len(params) == len(kinds) and params.buffer_address % 128 == 0
    assert list(params) == [bytes(k.nbytes) if isinstance(k, Blob) else 0 for k in kinds]
    params.set(*values)
    assert list(params) == values
    # what the driver reads: an array of addresses, each of a value
    addresses = (ctypes.c_void_p * max(len(kinds), 1)).from_address(params.address)
    for i, (ctype, value) in enumerate(zip(types, values, strict=True)):
        assert addresses[i] == params.buffer_address + params.offsets[i] == params.blob_address(i)
        stored = ctype.from_address(addresses[i] or 0)
        assert (bytes(stored) if isinstance(value, bytes) else stored.value) == value
    # one at a time gives the same bytes
    other = KernelParameters(kinds)
    other.set_some(range(len(values)), values)
    assert ctypes.string_at(other.buffer_address, other.nbytes) == ctypes.string_at(
        params.buffer_address, params.nbytes
    )


def test_tensor_maps_are_aligned() -> None:
    params = KernelParameters(["i32", TENSOR_MAP, "i32", TENSOR_MAP], ["n", "a", "m", "b"])
    assert params.offsets == (0, 64, 192, 256)
    assert all(params.blob_address(params.index(name)) % 64 == 0 for name in "ab")
    assert params.index("m") == 2
    with pytest.raises(ValueError, match="name: got 'q'"):
        params.index("q")


def test_triton_spellings() -> None:
    params = KernelParameters(["*bf16", "*fp32", "fp32", "fp64", "i1"])
    assert params.offsets == (0, 8, 16, 24, 32)
    params.set(1, 2, 0.5, 0.25, True)
    assert list(params) == [1, 2, 0.5, 0.25, 1]


def test_numpy_scalars() -> None:
    params = KernelParameters(["i32", "f32", "i64"])
    params.set(np.int64(-3), np.float64(0.5), np.uint8(7))
    assert list(params) == [-3, 0.5, 7]


@pytest.mark.parametrize(
    ("kind", "value", "error", "text"),
    [
        ("i32", 2**31, ValueError, "fits its 4 bytes"),
        ("i32", np.int64(2**31), ValueError, "fits its 4 bytes"),
        ("u32", -1, ValueError, "fits its 4 bytes"),
        ("ptr", -1, ValueError, "fits its 8 bytes"),
        ("ptr", None, TypeError, "want an integer"),
        ("i64", 1.0, TypeError, "want an integer"),
        ("f32", 1e39, ValueError, "fits its 4 bytes"),
        ("f32", "1", TypeError, "want a number"),
        (Blob(4, 4), b"123", ValueError, "got 3 bytes; want 4"),
        (Blob(4, 4), b"12345", ValueError, "got 5 bytes; want 4"),
        (Blob(4, 4), 1, TypeError, "want 4 bytes"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_wrong_values(
    kind: str | Blob, value: object, error: type[Exception], text: str, whole: bool
) -> None:
    params = KernelParameters(["i32", kind], ["count", "wrong"])
    with pytest.raises(error, match=f"parameter 'wrong'.*{text}"):
        if whole:
            params.set(1, value)
        else:
            params[1] = value


def test_wrong_blocks() -> None:
    with pytest.raises(ValueError, match="kind: got 'i33'"):
        KernelParameters(["i33"])
    with pytest.raises(TypeError, match="kind: got a int"):
        KernelParameters([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="names: got"):
        KernelParameters(["i32", "i32"], ["a", "a"])
    with pytest.raises(TypeError, match="values: got 3; want 2"):
        KernelParameters(["i32", "i32"]).set(1, 2, 3)
    with pytest.raises(TypeError, match="values: got 0; want 1"):
        KernelParameters([Blob(4)]).set()
    with pytest.raises(IndexError):
        KernelParameters(["i32"])[1] = 0
    with pytest.raises(ValueError, match="alignment: got 3"):
        Blob(4, 3)
    with pytest.raises(ValueError, match="nbytes: got 0"):
        Blob(0)


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

    _forked = False

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def _cu_tensor_map_encode(self, *arguments: object) -> int:
        self.seen.append(arguments)
        return 1

    def _fail(self, call: str, status: int, note: str) -> Exception:
        return runtimes.DeviceError(call, status, "CUDA_ERROR_INVALID_VALUE", note)


def test_tensor_map_arguments() -> None:
    runtime = EncodesNothing()
    encoder = tensor_map.TensorMapEncoder(runtime, "bf16", (128, 64), swizzle=128)  # type: ignore[arg-type]
    with pytest.raises(runtimes.DeviceError, match=r"cuTensorMapEncodeTiled.*shape \(300, 512\)"):
        encoder.encode(64, 4096, (300, 512), (1024,))
    into, kind, rank, address, dimensions, strides, box, steps, *mode = runtime.seen[0]
    assert (into.value, kind, rank, address.value) == (64, 9, 2, 4096)  # type: ignore[attr-defined]
    assert list(dimensions) == [512, 300] and list(strides) == [1024]  # type: ignore[call-overload]
    assert list(box) == [64, 128] and list(steps) == [1, 1]  # type: ignore[call-overload]
    assert mode == [0, 3, 2, 0]
    wrong = [
        ((65, 4096, (300, 512), (1024,)), "into: got 0x41"),
        ((64, 4097, (300, 512), (1024,)), "address: got 0x1001"),
        ((64, 4096, (0, 512), (1024,)), "shape: got"),
        ((64, 4096, (300, 512), (1022,)), "strides: got"),
        ((64, 4096, (300,), (1024,)), "got 1 and 1 entries; want 2 and 1"),
    ]
    for arguments, text in wrong:
        with pytest.raises(ValueError, match=text):
            encoder.encode(*arguments)  # type: ignore[arg-type]
    for options, text in [
        ({"element_type": "int3"}, "element_type: got 'int3'"),
        ({"box": (128, 65)}, "box: got"),
        ({"box": (257, 64)}, "box: got"),
        ({"box": (128, 128)}, "box: got"),
        ({"swizzle": 48}, "swizzle: got 48"),
        ({"box": ()}, "box: got 0 dimensions"),
    ]:
        chosen = {"element_type": "bf16", "box": (128, 64), "swizzle": 128, **options}
        with pytest.raises(ValueError, match=text):
            tensor_map.TensorMapEncoder(runtime, **chosen)  # type: ignore[arg-type]


def test_launch_config_is_the_drivers() -> None:
    from hipgroupgemm.runtime.cuda import _LaunchConfig

    offsets = {name: getattr(_LaunchConfig, name).offset for name, _ in _LaunchConfig._fields_}
    # CUlaunchConfig of cuda.h: seven 32-bit numbers, then a pointer at the next multiple of 8
    assert offsets["shared_bytes"] == 24 and offsets["stream"] == 32 and offsets["attributes"] == 40
    assert offsets["attribute_count"] == 48 and ctypes.sizeof(_LaunchConfig) == 56
    assert struct.calcsize("=I4x3I52x") == struct.calcsize("=I4xi60x") == 72
