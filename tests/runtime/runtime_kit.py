"""What the tests of the runtime package share: device fixtures, and a runtime that only keeps accounts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import DeviceMemoryError, base, directories, memory, objects
from hipgroupgemm.runtime.objects import DeviceInfo

# ---- a real or emulated device

KINDS = [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("rocm", marks=pytest.mark.hip)]

SOURCE = """
#include "scale.h"
struct Pair { int a; double b; };
extern "C" __global__ void scale(float* out, const float* in, int n, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = scaled(in[i], factor);
}
extern "C" __global__ void all_kinds(double* out, signed char a, unsigned char b, short c, unsigned short d,
                                     int e, unsigned int f, long long g, unsigned long long h, float i,
                                     double j, Pair k) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f;
    out[6] = (double)(g >> 40); out[7] = (double)(h >> 40);
    out[8] = i; out[9] = j; out[10] = k.a; out[11] = k.b;
}
extern "C" __global__ void reverse_in_shared(float* out, const float* in, int n) {
    extern __shared__ float space[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) space[i] = in[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = space[n - 1 - i];
}
extern "C" __global__ void add_one(int* values, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] += 1;
}
"""
HEADERS = {"scale.h": "__device__ inline float scaled(float x, float factor) { return x * factor; }\n"}


@pytest.fixture(params=KINDS)
def runtime(request: pytest.FixtureRequest) -> base.Runtime:
    return runtimes.get_runtime(request.param)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # one directory a test session: the compile cost is paid once, and nothing of the user's cache is used
    monkeypatch.setenv(directories.CACHE_VARIABLE, str(tmp_path_factory.getbasetemp() / "code-cache"))


@pytest.fixture
def module(runtime: base.Runtime) -> objects.Module:
    return runtime.module_from_source(SOURCE, "test.cu", [], 0, HEADERS)


@pytest.fixture
def stream(runtime: base.Runtime) -> Iterator[int]:
    handle = runtime.create_stream(0)
    with runtime.use_device(0):
        yield handle
        runtime.synchronize_stream(handle)
    runtime.destroy_stream(handle)


class Device:
    """A NumPy array's copy in device memory."""

    def __init__(self, runtime: base.Runtime, array: np.ndarray, stream: int) -> None:
        self.runtime, self.array, self.stream = runtime, np.ascontiguousarray(array), stream
        self.ptr = runtime.malloc_plain(self.array.nbytes, 0)
        runtime.memcpy_async(self.ptr, self.array.ctypes.data, self.array.nbytes, stream)
        runtime.synchronize_stream(stream)

    def read(self) -> np.ndarray:
        result = np.empty_like(self.array)
        self.runtime.memcpy_async(result.ctypes.data, self.ptr, result.nbytes, self.stream)
        self.runtime.synchronize_stream(self.stream)
        return result

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.free_plain(self.ptr, 0)


def poisoned(count: int) -> np.ndarray:
    return np.full(count, np.nan, np.float32)


# ---- no device

MEMORY = 1 << 30


class Accounts(base.Runtime):
    """Allocates addresses, and refuses what a driver would refuse or should never see."""

    kind = "cuda"

    def __init__(self, alignment: int = 256, memory_bytes: int = MEMORY) -> None:
        super().__init__()
        self.alignment = alignment
        self.memory_bytes = memory_bytes
        self.live: dict[int, int] = {}
        self.log: list[tuple[object, ...]] = []
        self.captures: dict[int, int] = {}
        self.relaxed = 0
        self.streams = {0, 5, 6}
        self.stream_ids: dict[int, int] = {}
        self.next = 1 << 20
        self.lock = threading.Lock()

    def device_count(self) -> int:
        return 2

    def _read_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(device, "accounts", "sm_90", "", 1, 32, 1024, 48 << 10, 228 << 10, 0, self.memory_bytes)

    def _enter_device(self, device: int) -> object:
        return None

    def stream_key(self, stream: int) -> int:
        return self.stream_ids.get(stream, stream)

    def is_capturing(self, stream: int) -> bool:
        return stream in self.captures

    def capture_id(self, stream: int) -> int:
        return self.captures.get(stream, 0)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self.relaxed += 1
        yield
        self.relaxed -= 1

    def _new(self, nbytes: int, what: tuple[object, ...]) -> int:
        with self.lock:
            if sum(self.live.values()) + nbytes > self.memory_bytes:
                raise DeviceMemoryError("malloc", 2, "out of memory")
            ptr = self.next
            self.next += -(-nbytes // self.alignment) * self.alignment
            self.live[ptr] = nbytes
            self.log.append((*what, ptr))
        return ptr

    def malloc_plain(self, nbytes: int, device: int) -> int:
        assert nbytes > 0
        return self._new(nbytes, ("malloc_plain",))

    def free_plain(self, ptr: int, device: int) -> None:  # as the real ones, it relaxes what a capture forbids
        self.log.append(("free_plain", ptr))
        del self.live[ptr]

    def _inside(self, ptr: int, nbytes: int) -> None:
        assert any(start <= ptr and ptr + nbytes <= start + size for start, size in self.live.items()), "wild access"

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        self._inside(dst, nbytes)
        self._inside(src, nbytes)
        self.log.append(("copy", stream, dst, src, nbytes))

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        assert stream not in self.captures, "recorded into the graph"
        self._inside(dst, nbytes)
        self.log.append(("fill", stream, dst, value, nbytes))

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        assert non_blocking
        self.streams.add(99)
        return 99

    def destroy_stream(self, stream: int) -> None:
        self.streams.remove(stream)

    def synchronize_stream(self, stream: int = 0) -> None:
        assert stream not in self.captures
        self.log.append(("wait", stream))


Accounts.__abstractmethods__ = frozenset()


class Pool:
    """A caller's allocator."""

    def __init__(self, runtime: Accounts, offset: int = 0) -> None:
        self.runtime = runtime
        self.offset = offset
        self.calls: list[tuple[int, int, int]] = []
        self.released: list[int] = []

    def __call__(self, nbytes: int, device: int, stream: int) -> Allocated:
        self.calls.append((nbytes, device, stream))
        return Allocated(self, self.runtime._new(nbytes + self.offset, ("pool",)) + self.offset)


class Allocated:
    def __init__(self, pool: Pool, ptr: int) -> None:
        self.pool = pool
        self.ptr = ptr

    def release(self) -> None:
        self.pool.released.append(self.ptr)
        self.pool.runtime.log.append(("release", self.ptr))


@pytest.fixture
def accounts() -> Iterator[Accounts]:
    runtime = Accounts()
    yield runtime
    memory.default_allocator.cache_clear()


@pytest.fixture(autouse=True)
def no_user_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_user_allocators", {})
