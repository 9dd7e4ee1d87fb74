"""The runtimes on a real or emulated device: the same cases on CUDA (-m cuda) and on ROCm (-m hip)."""

from __future__ import annotations

import os
import struct
import threading

import numpy as np
import pytest
import runtime_kit as kit
from runtime_kit import HEADERS, SOURCE, Device, poisoned

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import base, cache, memory, objects
from hipgroupgemm.runtime.parameters import Blob, KernelParameters
from hipgroupgemm.runtime.pinned import PinnedRing
from hipgroupgemm.runtime.scratch import ScratchMemory

runtime, module, stream = kit.runtime, kit.module, kit.stream
cache_directory = kit.cache_directory


def test_device_description(runtime: base.Runtime) -> None:
    info = runtime.device_info(0)
    assert runtime.device_count() >= 1
    assert info.name.isprintable() and info.name
    prefix, warp = ("sm_", 32) if runtime.kind == "cuda" else ("gfx", 64)
    assert runtime.device_info(0).architecture.startswith(prefix) and ":" not in runtime.device_info(0).architecture
    assert info.target.startswith(runtime.device_info(0).architecture)
    assert info.warp_size == warp
    assert info.multiprocessors > 0
    assert info.shared_memory_optin >= info.shared_memory_per_block >= 32 * 1024
    free, total = runtime.memory_info(0)
    assert 0 < free <= total <= info.memory_bytes
    assert runtime.version > 0 and os.path.exists(runtime.library)


def test_one_object_and_its_devices(runtime: base.Runtime) -> None:
    assert runtimes.get_runtime(runtime.kind) is runtime
    assert (runtime.kind, runtime.device_count() - 1) in runtimes.find_devices()
    assert runtimes.default_device() in runtimes.find_devices()


@pytest.mark.parametrize("device", [-1, 10_000])
def test_no_such_device(runtime: base.Runtime, device: int) -> None:
    for call in (
        lambda: runtime.device_info(device),
        lambda: runtime.malloc_plain(16, device),
        lambda: runtime.use_device(device).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"device: got {device}; want 0 to"):
            call()


def test_use_device_restores(runtime: base.Runtime) -> None:
    result = []

    def body() -> None:  # in a thread of its own, where no device was made current
        with runtime.use_device(0):
            result.append(runtime.current_device())
            with runtime.use_device(0):
                result.append(runtime.current_device())
            result.append(runtime.current_device())
        try:
            with runtime.use_device(0):
                raise KeyError("out")
        except KeyError:
            result.append(runtime.current_device())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert result == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [1, 3, 4097])
def test_copies_and_fills(runtime: base.Runtime, stream: int, count: int) -> None:
    data = np.random.default_rng().integers(0, 256, count, dtype=np.uint8)
    with Device(runtime, data, stream) as first, Device(runtime, np.zeros_like(data), stream) as second:
        assert first.ptr % 256 == 0
        runtime.memcpy_async(second.ptr, first.ptr, count, stream)
        np.testing.assert_array_equal(second.read(), data)
        runtime.memset_async(second.ptr + count // 2, 0xA5, count - count // 2, stream)
        expected = data.copy()
        expected[count // 2 :] = 0xA5
        np.testing.assert_array_equal(second.read(), expected)
        np.testing.assert_array_equal(first.read(), data)


def test_nothing_of_nothing(runtime: base.Runtime, stream: int) -> None:
    assert runtime.malloc_plain(0, 0) == runtime.host_malloc(0, 0) == 0
    runtime.free_plain(0, 0)
    runtime.host_free(0, 0)
    runtime.memcpy_async(0, 0, 0, stream)
    runtime.memset_async(0, 0, 0, stream)
    with pytest.raises(ValueError, match="nbytes: got -1"):
        runtime.malloc_plain(-1, 0)


def test_pinned_memory(runtime: base.Runtime, stream: int) -> None:
    data = np.random.default_rng().standard_normal(1000).astype(np.float32)
    ring = PinnedRing(runtime, 0, data.nbytes)
    with Device(runtime, np.zeros_like(data), stream) as target:
        for i in range(10):  # more than it has pieces
            ring.put(data[::-1] * i, target.ptr, stream)
            np.testing.assert_array_equal(target.read(), data[::-1] * i)
            assert ring.read(target.ptr + 4, 8, stream) == (data[::-1] * i)[1:3].tobytes()
    ring.close()
    pinned = runtime.host_malloc(64, 0)
    assert runtime.pointer_device(pinned) == 0  # every device can read it
    runtime.host_free(pinned, 0)


def test_whose_pointer(runtime: base.Runtime, stream: int) -> None:
    with Device(runtime, np.zeros(1000, np.uint8), stream) as block:
        found: list[object] = []

        def ask() -> None:  # a thread in which nothing was made current
            found.append(runtimes.device_of_pointer(block.ptr + 999))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert found == [(runtime.kind, 0)]
        assert runtimes.device_of_pointer(block.ptr) == (runtime.kind, 0)
    plain = runtime.malloc_plain(512, 0)
    assert runtimes.device_of_pointer(plain) == (runtime.kind, 0)
    runtime.free_plain(plain, 0)
    host = np.zeros(16)
    assert runtime.pointer_device(host.ctypes.data) is None
    with pytest.raises(ValueError, match="no device of"):
        runtimes.device_of_pointer(host.ctypes.data)
    with pytest.raises(ValueError, match="ptr: got 0"):
        runtimes.device_of_pointer(0)


def test_out_of_memory(runtime: base.Runtime, stream: int) -> None:
    _, total = runtime.memory_info(0)
    for call in (lambda: runtime.malloc_plain(2 * total, 0), lambda: ScratchMemory(runtime, 0, stream, 2 * total)):
        with pytest.raises(runtimes.DeviceMemoryError, match=f"wanted {2 * total} bytes on device 0") as caught:
            call()
        assert isinstance(caught.value, MemoryError) and caught.value.status == 2
    with Device(runtime, np.arange(5), stream) as still:
        np.testing.assert_array_equal(still.read(), np.arange(5))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("count", [1, 999])
def test_launch(runtime: base.Runtime, module: objects.Module, stream: int, count: int, prepared: bool) -> None:
    function = module.get_function("scale")
    params = KernelParameters(["ptr", "ptr", "i32", "f32"], ["out", "in", "n", "factor"])
    data = np.random.default_rng().standard_normal(count).astype(np.float32)
    grid = (-(-count // 128), 1, 1)
    with Device(runtime, data, stream) as source, Device(runtime, poisoned(count), stream) as target:
        launch = runtime.prepare_launch(function, grid, (128, 1, 1), 0, stream, params)
        for factor in (3.0, -0.5):
            params.set(target.ptr, source.ptr, count, factor)
            if prepared:
                launch.run()
            else:
                runtime.launch(function, grid, (128, 1, 1), 0, stream, params)
            params.set(0, 0, 0, 0.0)  # the values were taken during the call
            np.testing.assert_array_equal(target.read(), data * np.float32(factor))


def test_prepared_launch_with_another_grid(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    params = KernelParameters(["ptr", "i32"])
    launch = runtime.prepare_launch(module.get_function("add_one"), (1, 1, 1), (64, 1, 1), 0, stream, params)
    with Device(runtime, np.zeros(200, np.int32), stream) as values:
        params.set(values.ptr, 200)
        launch.run()
        launch.set_grid((3, 1, 1))
        launch.run()
        np.testing.assert_array_equal(values.read(), [2] * 64 + [1] * 128 + [0] * 8)


def test_every_kind_of_parameter(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    kinds = ["ptr", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64", Blob(16, 8)]
    params = KernelParameters(kinds)
    values = [-5, 250, -30000, 60000, -(2**31), 2**32 - 1, -(2**62), 2**63, 0.25, -1e300]
    with Device(runtime, np.full(12, np.nan), stream) as out:
        params.set(out.ptr, *values, struct.pack("=i4xd", -7, 2.5))
        runtime.launch(module.get_function("all_kinds"), (1, 1, 1), (1, 1, 1), 0, stream, params)
        expected = [*values[:6], -(2**22), 2**23, 0.25, -1e300, -7, 2.5]
        np.testing.assert_array_equal(out.read(), np.array(expected, np.float64))


def test_dynamic_shared_memory(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    limit = runtime.device_info(0).shared_memory_optin
    nbytes = min(limit, 60 * 1024)
    assert nbytes > objects.DEFAULT_SHARED_LIMIT
    with pytest.raises(ValueError, match=f"gives {limit} at most"):
        module.get_function("reverse_in_shared", limit + 16)
    function = module.get_function("reverse_in_shared", nbytes)
    assert module.get_function("reverse_in_shared") is function
    data = np.random.default_rng().standard_normal(nbytes // 4).astype(np.float32)
    params = KernelParameters(["ptr", "ptr", "i32"])
    with Device(runtime, data, stream) as source, Device(runtime, poisoned(data.size), stream) as target:
        params.set(target.ptr, source.ptr, data.size)
        runtime.launch(function, (1, 1, 1), (256, 1, 1), nbytes, stream, params)
        np.testing.assert_array_equal(target.read(), data[::-1])


def test_refused_launch(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    function = module.get_function("add_one")
    params = KernelParameters(["ptr", "i32"])
    prepared = runtime.prepare_launch(function, (1, 1, 1), (4096, 1, 1), 0, stream, params)
    for call in (lambda: runtime.launch(function, (1, 1, 1), (4096, 1, 1), 0, stream, params), prepared.run):
        with pytest.raises(runtimes.DeviceError, match=r"kernel add_one.*4096.*1 to 1024 threads") as caught:
            call()
        assert caught.value.status != 0 and "Launch" in caught.value.call and caught.value.name != "unknown"
    with Device(runtime, np.zeros(4, np.int32), stream) as values:  # and the device is as good as before
        params.set(values.ptr, 4)
        runtime.launch(function, (1, 1, 1), (64, 1, 1), 0, stream, params)
        np.testing.assert_array_equal(values.read(), [1] * 4)


def test_compile_error_has_the_log(runtime: base.Runtime) -> None:
    with pytest.raises(runtimes.CompileError, match="undeclared_thing") as caught:
        runtime.compile(
            'extern "C" __global__ void k(int* p) { *p = undeclared_thing; }',
            "bad.cu",
            [],
            runtime.device_info(0).target,
        )
    assert "undeclared_thing" in caught.value.log and "bad.cu" in str(caught.value)


def test_broken_code_and_missing_kernel(runtime: base.Runtime, module: objects.Module) -> None:
    with pytest.raises(runtimes.DeviceError, match="ModuleLoadData failed with status"):
        runtime.load_module(b"\x7fELF" + bytes(200), 0)
    with pytest.raises(runtimes.DeviceError, match="no kernel 'not_there'"):
        module.get_function("not_there")
    code = runtime.compile('extern "C" __global__ void k(int* p) { *p = 1; }', "k.cu", [], runtime.device_info(0).target)
    other = runtime.load_module(code, 0)
    assert other.get_function("k") is other.get_function("k")


def test_module_cache(runtime: base.Runtime, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE + f"// {os.urandom(8).hex()}\n"
    compiled: list[str] = []
    compile_ = runtime.compile

    def counted(*arguments: object, **options: object) -> bytes:
        compiled.append("once")
        return compile_(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime, "compile", counted)
    found: list[objects.Module] = []
    threads = [threading.Thread(target=lambda: found.append(runtime.module_from_source(source, "t.cu", [], 0, HEADERS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(map(id, found))) == 1 and len(compiled) == 1

    key = cache.cache_key(source, [], runtime.device_info(0).target, runtime.compiler_version(), HEADERS)
    store = cache.default_cache()
    assert store.get(key)
    runtime._modules.clear()
    again = runtime.module_from_source(source, "t.cu", [], 0, HEADERS)  # from disk
    assert len(compiled) == 1 and again is not found[0]
    runtime._modules.clear()
    store.put(key, b"\x7fELF whole on disk, but no code object")
    third = runtime.module_from_source(source, "t.cu", [], 0, HEADERS)
    assert len(compiled) == 2
    params = KernelParameters(["ptr", "i32"])
    with Device(runtime, np.zeros(4, np.int32), stream) as values:
        params.set(values.ptr, 4)
        for each in (found[0], again, third):
            runtime.launch(each.get_function("add_one"), (1, 1, 1), (64, 1, 1), 0, stream, params)
        np.testing.assert_array_equal(values.read(), [3] * 4)


def test_every_device(runtime: base.Runtime) -> None:
    with runtime.use_device(0):
        for device in range(runtime.device_count()):
            module = runtime.module_from_source(SOURCE, "test.cu", [], device, HEADERS)
            stream = runtime.create_stream(device)
            event = runtime.create_event(device)
            ptr = runtime.malloc_plain(400, device)
            block = memory.allocate(runtime, 400, device, stream)
            assert runtime.current_device() == 0
            assert runtimes.device_of_pointer(ptr) == runtimes.device_of_pointer(block.ptr) == (runtime.kind, device)
            params = KernelParameters(["ptr", "i32"])
            params.set(ptr, 100)
            result = np.empty(100, np.int32)
            with runtime.use_device(device):
                assert runtime.current_device() == device
                runtime.memset_async(ptr, 0, 400, stream)
                add_one = module.get_function("add_one")
                runtime.launch(add_one, (1, 1, 1), (128, 1, 1), 0, stream, params)
                runtime.record_event(event, stream)
                runtime.memcpy_async(result.ctypes.data, ptr, 400, stream)
                runtime.synchronize_stream(stream)
            assert runtime.current_device() == 0 and runtime.query_event(event)
            np.testing.assert_array_equal(result, 1)
            block.release()
            runtime.free_plain(ptr, device)
            runtime.synchronize_device(device)
            runtime.destroy_event(event)
            runtime.destroy_stream(stream)
