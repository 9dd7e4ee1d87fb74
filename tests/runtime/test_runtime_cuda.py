"""What only CUDA has, on a real device (-m cuda), and what a launch costs the host."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import device_graphs
import numpy as np
import pytest

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import compile as cuda_compile
from hipgroupgemm.runtime import directories, memory
from hipgroupgemm.runtime.cuda.runtime import CudaRuntime
from hipgroupgemm.runtime.cuda.tensor_map import TensorMapEncoder
from hipgroupgemm.runtime.parameters import TENSOR_MAP, KernelParameters
from hipgroupgemm.runtime.scratch import Scratch

pytestmark = pytest.mark.cuda

SOURCE = r"""
struct alignas(64) TensorMap { char bytes[128]; };
extern "C" __global__ void nothing(void*, void*, void*, int, int, int, long long, long long) {}
extern "C" __global__ void add_one(int* values, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] += 1;
}
// copies one box of a tensor to out through the copy engine
extern "C" __global__ void load_box(const __grid_constant__ TensorMap map, unsigned short* out, int x, int y,
                                    int elements) {
    extern __shared__ __align__(128) unsigned short box[];
    __shared__ __align__(8) unsigned long long barrier;
    unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        unsigned to = (unsigned)__cvta_generic_to_shared(box);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(elements * 2)
                     : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(at) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                     " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at) : "memory");
    for (int i = threadIdx.x; i < elements; i += blockDim.x) out[i] = box[i];
}
"""


@pytest.fixture(scope="module")
def runtime() -> CudaRuntime:
    found = runtimes.get_runtime("cuda")
    assert isinstance(found, CudaRuntime)
    return found


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(directories.CACHE_VARIABLE, str(tmp_path_factory.getbasetemp() / "code-cache"))


@pytest.fixture
def module(runtime: CudaRuntime) -> Any:
    return runtime.module_from_source(SOURCE, "cuda.cu", ["-std=c++17"], 0)


@pytest.fixture
def stream(runtime: CudaRuntime) -> Iterator[int]:
    handle = runtime.create_stream(0)
    with runtime.use_device(0):
        yield handle
        runtime.synchronize_stream(handle)
    runtime.destroy_stream(handle)


def upload(runtime: CudaRuntime, array: np.ndarray, stream: int) -> int:
    ptr = runtime.malloc_plain(array.nbytes, 0)
    runtime.memcpy_async(ptr, array.ctypes.data, array.nbytes, stream)
    runtime.synchronize_stream(stream)
    return ptr


def download(runtime: CudaRuntime, ptr: int, like: np.ndarray, stream: int) -> np.ndarray:
    result = np.empty_like(like)
    runtime.memcpy_async(result.ctypes.data, ptr, result.nbytes, stream)
    runtime.synchronize_stream(stream)
    return result


def test_primary_context_is_shared_and_restored(runtime: CudaRuntime) -> None:
    from cuda.bindings import driver

    seen: list[int] = []

    def body() -> None:
        seen.append(int(driver.cuCtxGetCurrent()[1]))
        with runtime.use_device(0):
            seen.append(int(driver.cuCtxGetCurrent()[1]))
        seen.append(int(driver.cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    primary = int(driver.cuDevicePrimaryCtxRetain(0)[1])
    driver.cuDevicePrimaryCtxRelease(0)
    assert seen == [0, primary, 0]


def test_managed_memory_has_a_device(runtime: CudaRuntime) -> None:
    from cuda.bindings import driver

    with runtime.use_device(0):
        status, ptr = driver.cuMemAllocManaged(4096, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        assert int(status) == 0
        assert runtimes.device_of_pointer(int(ptr)) == ("cuda", 0)
        driver.cuMemFree(ptr)


def test_stream_numbers(runtime: CudaRuntime) -> None:
    keys = set()
    for _ in range(20):  # handles come back, numbers don't
        handle = runtime.create_stream(0)
        keys.add(runtime.stream_key(handle))
        runtime.destroy_stream(handle)
    assert len(keys) == 20 and all(key < 0 for key in keys)
    with runtime.use_device(0):
        assert runtime.stream_key(0) == runtime.stream_key(1) == 0
        assert runtime.stream_key(2) < 0


def test_per_thread_default_stream(runtime: CudaRuntime) -> None:
    with runtime.use_device(0):
        ptr = upload(runtime, np.zeros(100, np.uint8), 2)
        runtime.memset_async(ptr, 3, 100, 2)
        np.testing.assert_array_equal(download(runtime, ptr, np.empty(100, np.uint8), 2), 3)
        runtime.free_plain(ptr, 0)


def test_ptx_for_a_device_newer_than_the_compiler(runtime: CudaRuntime, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, _ = cuda_compile._nvrtc()
    monkeypatch.setattr(cuda_compile, "_nvrtc", lambda: (compiler, (80,)))
    source = 'extern "C" __global__ void k(int* p) { *p = 41; }'
    code = runtime.compile(source, "k.cu", [], runtime.device_info(0).architecture)
    assert b".target sm_80" in code
    params = KernelParameters(["ptr"])
    ptr = upload(runtime, np.zeros(1, np.int32), stream)
    params.set(ptr)
    runtime.launch(runtime.load_module(code, 0).get_function("k"), (1, 1, 1), (1, 1, 1), 0, stream, params)
    assert download(runtime, ptr, np.empty(1, np.int32), stream)[0] == 41
    runtime.free_plain(ptr, 0)


@pytest.mark.parametrize("x, y", [(0, 0), (64, 96), (128, 200)])
def test_tensor_maps(runtime: CudaRuntime, module: Any, stream: int, x: int, y: int) -> None:
    rows, columns, box = 203, 136, (8, 64)
    rng = np.random.default_rng()
    tensors = [rng.integers(1, 60000, (rows, columns), dtype=np.uint16) for _ in range(2)]
    addresses = [upload(runtime, tensor, stream) for tensor in tensors]
    out = upload(runtime, np.zeros(box, np.uint16), stream)
    params = KernelParameters([TENSOR_MAP, "ptr", "i32", "i32", "i32"])
    encoder = TensorMapEncoder(runtime, "bf16", box)
    encoder.encode(params.blob_address(0), addresses[0], tensors[0].shape, (columns * 2,))
    launch = runtime.prepare_launch(module.get_function("load_box"), (1, 1, 1), (128, 1, 1), 1024, stream, params)
    for i, tensor in enumerate(tensors):
        if i:
            encoder.replace_address(params.blob_address(0), addresses[i])
        for position, value in enumerate([out, x, y, box[0] * box[1]], 1):
            params[position] = value
        runtime.memset_async(out, 0xFF, box[0] * box[1] * 2, stream)
        launch.run()
        expected = np.zeros(box, np.uint16)  # what lies outside reads as zeros
        inside = tensor[y : y + box[0], x : x + box[1]]
        expected[: inside.shape[0], : inside.shape[1]] = inside
        np.testing.assert_array_equal(download(runtime, out, expected, stream), expected)
    with pytest.raises(runtimes.DeviceError, match="multiple of 16"):
        encoder.replace_address(params.blob_address(0), addresses[0] + 2)
    for ptr in (*addresses, out):
        runtime.free_plain(ptr, 0)


def test_programmatic_launches(runtime: CudaRuntime, module: Any, stream: int) -> None:
    out = upload(runtime, np.zeros(8, np.int32), stream)
    count = KernelParameters(["ptr", "i32"])
    count.set(out, 8)
    launch = runtime.prepare_launch(module.get_function("add_one"), (1, 1, 1), (32, 1, 1), 0, stream, count, programmatic=True)
    for _ in range(5):
        launch.run()
    np.testing.assert_array_equal(download(runtime, out, np.empty(8, np.int32), stream), [5] * 8)
    runtime.free_plain(out, 0)


def test_default_stream_during_a_capture(runtime: CudaRuntime) -> None:
    from cuda.bindings import driver

    blocking = runtime.create_stream(0, non_blocking=False)
    source = f'extern "C" __global__ void k(int* p) {{ p[threadIdx.x] = 7; }}  // {os.urandom(8).hex()}'
    fresh = runtime.module_from_source(source, "fresh.cu", [], 0).get_function("k")  # never launched so far
    params = KernelParameters(["ptr"])
    with runtime.use_device(0):
        driver.cuStreamBeginCapture(blocking, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        assert runtime.is_capturing(blocking)
        with pytest.raises(runtimes.DeviceError, match="default stream can't be used while another stream"):
            runtime.is_capturing(0)
        scratch = Scratch(runtime, 0, blocking, 4096)
        inside = scratch.pointer(runtime.capture_id(blocking))  # under the strictest mode
        pinned = runtime.host_malloc(64, 0)
        runtime.memset_async(inside, 5, 4096, blocking)
        params.set(inside)
        runtime.launch(fresh, (1, 1, 1), (16, 1, 1), 0, blocking, params)
        assert runtime.is_capturing(blocking)
        graph = device_graphs.end_capture(runtime, blocking)
        device_graphs.launch_graph(runtime, graph, blocking)
        found = download(runtime, inside, np.empty(1024, np.int32), blocking)
        np.testing.assert_array_equal(found, [7] * 16 + [0x05050505] * 1008)
        device_graphs.destroy_graph(runtime, graph)
    runtime.host_free(pinned, 0)
    scratch.close()
    runtime.destroy_stream(blocking)


@pytest.mark.filterwarnings("ignore")  # of the other packages
def test_torch(runtime: CudaRuntime, module: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000, dtype=torch.int32, device="cuda:0")
    assert runtimes.device_of_pointer(tensor.data_ptr() + 40) == ("cuda", 0)
    params = KernelParameters(["ptr", "i32"])
    params.set(tensor.data_ptr(), 1000)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), runtime.use_device(0):
        stream = runtimes_stream(torch.cuda.current_stream())
        assert stream == side.cuda_stream
        launch = runtime.prepare_launch(module.get_function("add_one"), (4, 1, 1), (256, 1, 1), 0, stream, params)
        for _ in range(3):
            launch.run()
            tensor.add_(10)
    torch.cuda.current_stream().wait_stream(side)
    assert tensor.cpu().tolist() == [33] * 1000
    # a torch graph, captured in torch's own (global) mode
    scratch = Scratch(runtime, 0, side.cuda_stream, 8192)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        assert runtime.is_capturing(side.cuda_stream)
        launch.run()
        piece = scratch.pointer(runtime.capture_id(side.cuda_stream))
        runtime.memset_async(piece, 1, 8192, side.cuda_stream)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.cpu().tolist() == [35] * 1000
    del graph
    scratch.close()


def runtimes_stream(stream: object) -> int:
    from hipgroupgemm.runtime.streams import normalize_stream

    return normalize_stream("cuda", stream)


@pytest.mark.filterwarnings("ignore")
def test_other_allocators(runtime: CudaRuntime, stream: int) -> None:
    cupy = pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")

    def cupy_pool(nbytes: int, device: int, handle: int) -> Any:
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(handle):
            return cupy.cuda.alloc(nbytes)

    class TorchBlock:
        def __init__(self, nbytes: int, device: int, handle: int) -> None:
            self.ptr = torch.cuda.caching_allocator_alloc(nbytes, device, handle)

        def release(self) -> None:
            torch.cuda.caching_allocator_delete(self.ptr)

    used = cupy.get_default_memory_pool()
    for allocator in (cupy_pool, TorchBlock):
        before = used.used_bytes(), torch.cuda.memory_allocated()
        memory.set_allocator(allocator)
        try:
            scratch = Scratch(runtime, 0, stream, 100_000)
            ptr = scratch.pointer(0)
            assert (used.used_bytes(), torch.cuda.memory_allocated()) != before
            runtime.memset_async(ptr, 7, 100_000, stream)
            np.testing.assert_array_equal(download(runtime, ptr, np.empty(100_000, np.uint8), stream), 7)
            scratch.close()
        finally:
            memory.set_allocator(None)
        assert (used.used_bytes(), torch.cuda.memory_allocated()) == before


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)


def test_fork_after_somebody_else_initialised() -> None:
    code = """
import os
from cuda.bindings import driver
assert int(driver.cuInit(0)[0]) == 0
child = os.fork()
if child == 0:
    import hipgroupgemm.runtime as r
    try:
        r.get_runtime("cuda")
    except r.ForkedProcessError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = run_python(code)
    assert run.returncode == 0 and "before this process was forked" in run.stdout, run.stderr


def test_fault_of_a_kernel() -> None:
    code = """
import hipgroupgemm.runtime as r
from hipgroupgemm.runtime.parameters import KernelParameters
x = r.get_runtime("cuda")
code = x.compile('extern "C" __global__ void k(int* p) { *p = 1; }', "k.cu", [], x.device_info(0).architecture)
params = KernelParameters(["ptr"])
params.set(1 << 44)
with x.use_device(0):
    x.launch(x.load_module(code, 0).get_function("k"), (1, 1, 1), (1, 1, 1), 0, 0, params)
    try:
        x.synchronize_stream(0)
    except r.DeviceError as error:
        print(error.status, error)
"""
    run = run_python(code)
    assert "700 cuStreamSynchronize failed with status 700 (CUDA_ERROR_ILLEGAL_ADDRESS)" in run.stdout, run.stderr
    assert "lost to this process, restart it" in run.stdout


# ---- what it costs


def p50(call: Callable[[], object], between: Callable[[], object], count: int = 4000) -> float:
    """Median host time of one call in microseconds; ``between`` drains the device every 200 calls."""
    for _ in range(300):
        call()
    between()
    clock = time.perf_counter_ns
    times = []
    for i in range(count):
        start = clock()
        call()
        times.append(clock() - start)
        if i % 200 == 199:
            between()
    return float(np.median(times)) / 1e3


def test_launch_cost(runtime: CudaRuntime, module: Any, stream: int, capsys: pytest.CaptureFixture[str]) -> None:
    from cuda.bindings import driver

    function = module.get_function("nothing")
    params = KernelParameters(["ptr", "ptr", "ptr", "i32", "i32", "i32", "i64", "i64"])
    values = (1, 2, 3, 4, 5, 6, 7, 8)
    params.set(*values)
    grid, block, shared = (132, 1, 1), (128, 1, 1), 0

    def drain() -> None:
        runtime.synchronize_stream(stream)

    prepared = runtime.prepare_launch(function, grid, block, shared, stream, params)
    rows: dict[str, float] = {"(an empty call)": p50(lambda: None, drain)}
    rows["PreparedLaunch.run"] = p50(prepared.run, drain)

    def set_and_run() -> None:
        params.set(*values)
        prepared.run()

    rows["KernelParameters.set of 8 + run"] = p50(set_and_run, drain)

    def entered() -> None:
        with runtime.use_device(0):
            params.set(*values)
            prepared.run()

    rows["use_device + set + run"] = p50(entered, drain)
    rows["Runtime.launch"] = p50(lambda: runtime.launch(function, grid, block, shared, stream, params), drain)
    cu_stream, cu_function, address = driver.CUstream(stream), function.native, params.address
    rows["cuda.bindings cuLaunchKernel, objects"] = p50(
        lambda: driver.cuLaunchKernel(cu_function, *grid, *block, shared, cu_stream, address, 0), drain
    )
    rows["cuda.bindings cuLaunchKernel, ints"] = p50(
        lambda: driver.cuLaunchKernel(cu_function, *grid, *block, shared, stream, address, 0), drain
    )
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.hStream = cu_stream
    rows["cuda.bindings cuLaunchKernelEx, objects"] = p50(lambda: driver.cuLaunchKernelEx(config, cu_function, address, 0), drain)
    typed = ctypes.CDLL(runtime.library).cuLaunchKernel
    typed.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    rows["ctypes cuLaunchKernel, argtypes"] = p50(lambda: typed(function.handle, *grid, *block, shared, stream, address, None), drain)
    other: dict[str, float] = {}

    def nothing() -> None:
        with runtime.use_device(0):
            pass

    other["use_device, already current"] = p50(nothing, drain)
    ptr = runtime.malloc_plain(1 << 20, 0)
    other["pointer_device"] = p50(lambda: runtime.pointer_device(ptr), drain)
    other["device_of_pointer"] = p50(lambda: runtimes.device_of_pointer(ptr), drain)
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    other["cuda.bindings cuPointerGetAttribute"] = p50(lambda: driver.cuPointerGetAttribute(attribute, ptr), drain)
    other["is_capturing"] = p50(lambda: runtime.is_capturing(stream), drain)
    other["cuda.bindings cuStreamIsCapturing"] = p50(lambda: driver.cuStreamIsCapturing(stream), drain)
    other["stream_key"] = p50(lambda: runtime.stream_key(stream), drain)
    scratch = Scratch(runtime, 0, stream, 1 << 20)
    scratch.reserve()
    other["Scratch.pointer"] = p50(lambda: scratch.pointer(0), drain)
    other["keep_alive"] = p50(lambda: runtime.keep_alive(0, stream, ()), drain)
    scratch.close()

    def allocate() -> None:
        memory.allocate(runtime, 1 << 20, 0, stream).release()

    other["allocate + release, 1 MiB, kept"] = p50(allocate, drain)
    other["malloc_plain + free_plain, 1 MiB"] = p50(lambda: runtime.free_plain(runtime.malloc_plain(1 << 20, 0), 0), drain)
    other["memset_async"] = p50(lambda: runtime.memset_async(ptr, 0, 4096, stream), drain)
    event = runtime.create_event(0)
    other["record_event"] = p50(lambda: runtime.record_event(event, stream), drain)
    runtime.destroy_event(event)
    descriptor = KernelParameters([TENSOR_MAP])
    encoder = TensorMapEncoder(runtime, "bf16", (128, 64), swizzle=128)
    into = descriptor.blob_address(0)
    other["TensorMapEncoder.encode"] = p50(lambda: encoder.encode(into, ptr, (1024, 512), (1024,)), drain)
    other["TensorMapEncoder.replace_address"] = p50(lambda: encoder.replace_address(into, ptr), drain)
    runtime.free_plain(ptr, 0)

    info = runtime.device_info(0)
    bindings = importlib.metadata.version("cuda-bindings")
    with capsys.disabled():
        print(f"\nhost time, p50 of 4000 calls, us: {info.name}, driver API {runtime.version}, {os.uname().machine},")
        print(f"Python {sys.version.split()[0]}, cuda-bindings {bindings}")
        for name, value in {**rows, **other}.items():
            print(f"  {value:7.2f}  {name}")
    assert rows["PreparedLaunch.run"] <= 6.0
