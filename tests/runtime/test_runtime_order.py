"""Order and concurrency on a device: streams, events, captures, scratch, threads, forks (-m cuda, -m hip)."""

from __future__ import annotations

import os
import threading
import weakref

import device_graphs
import numpy as np
import pytest
import runtime_kit as kit
from runtime_kit import Device, poisoned

from hipgroupgemm import runtime as runtimes
from hipgroupgemm.runtime import base, memory, objects
from hipgroupgemm.runtime.parameters import KernelParameters
from hipgroupgemm.runtime.scratch import Scratch

runtime, module, stream = kit.runtime, kit.module, kit.stream
cache_directory = kit.cache_directory


def test_events_order_streams(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    function = module.get_function("add_one")
    other = runtime.create_stream(0)
    start, end = runtime.create_event(0, timing=True), runtime.create_event(0, timing=True)
    done = runtime.create_event(0)
    count = 4096
    first, second = KernelParameters(["ptr", "i32"]), KernelParameters(["ptr", "i32"])
    with Device(runtime, np.zeros(count, np.int32), stream) as values:
        first.set(values.ptr, count)
        second.set(values.ptr, count)
        runtime.record_event(start, stream)
        for _ in range(4):
            runtime.launch(function, (count // 64, 1, 1), (64, 1, 1), 0, stream, first)
        runtime.record_event(end, stream)
        runtime.record_event(done, stream)
        runtime.wait_event(other, done)
        runtime.launch(function, (count // 64, 1, 1), (64, 1, 1), 0, other, second)
        runtime.record_event(done, other)
        runtime.synchronize_event(done)
        assert runtime.query_event(done) and runtime.query_event(end)
        np.testing.assert_array_equal(values.read(), np.full(count, 5))
        assert 0 < runtime.elapsed_ms(start, end) < 60_000
        with pytest.raises(runtimes.DeviceError):  # made without timing
            runtime.elapsed_ms(start, done)
    for event in (start, end, done):
        runtime.destroy_event(event)
    runtime.destroy_stream(other)
    runtime.synchronize_device(0)


def test_capture(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    function = module.get_function("add_one")
    params = KernelParameters(["ptr", "i32"])
    scratch = Scratch(runtime, 0, stream, 1024)
    outside = scratch.pointer(0)
    with Device(runtime, np.zeros(10, np.int32), stream) as values:
        params.set(values.ptr, 10)
        assert not runtime.is_capturing(stream) and runtime.capture_id(stream) == 0
        with device_graphs.capture(runtime, stream) as graph:
            assert runtime.is_capturing(stream)
            number = runtime.capture_id(stream)
            assert number != 0
            runtime.launch(function, (1, 1, 1), (64, 1, 1), 0, stream, params)
            inside = scratch.pointer(number)
            assert inside != outside and inside % 256 == 0
            assert scratch.pointer(number) == inside
            block = memory.Buffer(memory.default_allocator(runtime), 4096, 0, stream)
            runtime.memset_async(block.ptr, 1, 4096, stream)
            runtime.memset_async(inside, 2, 1024, stream)
        assert not runtime.is_capturing(stream)
        np.testing.assert_array_equal(values.read(), 0)  # recorded, not run
        check = np.full(1024, 9, np.uint8)
        runtime.memcpy_async(check.ctypes.data, inside, 1024, stream)
        runtime.synchronize_stream(stream)
        np.testing.assert_array_equal(check, 0)  # zeroed outside the recording, before the graph ever ran
        for _ in range(2):
            device_graphs.launch_graph(runtime, graph[0], stream)
        np.testing.assert_array_equal(values.read(), 2)
        runtime.memcpy_async(check.ctypes.data, inside, 1024, stream)
        runtime.synchronize_stream(stream)
        np.testing.assert_array_equal(check, 2)
        assert scratch.pointer(0) == outside
        with device_graphs.capture(runtime, stream) as second:
            assert runtime.capture_id(stream) != number
            assert scratch.pointer(runtime.capture_id(stream)) not in (inside, outside)
        device_graphs.destroy_graph(runtime, second[0])
        device_graphs.destroy_graph(runtime, graph[0])
    block.release()
    scratch.close()


def test_capture_that_fails_is_ended(runtime: base.Runtime, stream: int) -> None:
    with pytest.raises(KeyError), device_graphs.capture(runtime, stream):
        raise KeyError("inside")
    assert not runtime.is_capturing(stream)
    with Device(runtime, np.arange(3), stream) as still:
        np.testing.assert_array_equal(still.read(), np.arange(3))


def test_invalidated_capture(runtime: base.Runtime, stream: int) -> None:
    own = runtime.create_stream(0)
    with pytest.raises(runtimes.DeviceError, match="while a stream is being captured"), device_graphs.capture(runtime, own):
        runtime.synchronize_stream(own)  # not allowed for a stream that is being captured
    # HIP 6.4 never lets go of a stream whose capture failed; then it must not pass for a usable one
    assert runtime.kind == "rocm" or not runtime.is_capturing(own)
    if not runtime.is_capturing(own):
        runtime.synchronize_stream(own)
        assert runtime.capture_id(own) == 0
    else:
        with pytest.raises(runtimes.DeviceError, match="invalidated"):
            runtime.capture_id(own)
    runtime.destroy_stream(own)
    with Device(runtime, np.arange(3), stream) as still:  # and no other stream is disturbed
        np.testing.assert_array_equal(still.read(), np.arange(3))


def test_close_gives_back_what_captures_used(runtime: base.Runtime) -> None:
    """Graphs captured again and again, each with scratch of 8 MiB, on a stream that was never used before."""
    stream, nbytes = runtime.create_stream(0), 8 << 20
    with runtime.use_device(0):
        runtime.synchronize_device(0)
        for _ in range(2):  # the first round loads what the driver keeps for good
            before = runtime.memory_info(0)[0]
            scratch, graphs = Scratch(runtime, 0, stream, nbytes), []
            for _ in range(4):
                with device_graphs.capture(runtime, stream) as graph:
                    scratch.reserve()
                    runtime.memset_async(scratch.pointer(runtime.capture_id(stream)), 7, nbytes, stream)
                graphs.append(graph[0])
                device_graphs.launch_graph(runtime, graph[0], stream)
            runtime.synchronize_stream(stream)
            found = np.empty(nbytes, np.uint8)
            for address in scratch.addresses():
                runtime.memcpy_async(found.ctypes.data, address, nbytes, stream)
                runtime.synchronize_stream(stream)
                np.testing.assert_array_equal(found, 7)
            assert scratch.in_graph() and len(scratch.addresses()) == 4
            for graph_handle in graphs:
                device_graphs.destroy_graph(runtime, graph_handle)
            scratch.close()
            runtime.synchronize_device(0)
            after = runtime.memory_info(0)[0]
        assert before - after < 1 << 20
    runtime.destroy_stream(stream)


def test_keep_alive(runtime: base.Runtime, stream: int) -> None:
    class Operand:
        pass

    operands = [Operand() for _ in range(200)]
    seen = [weakref.ref(operand) for operand in operands]
    while operands:
        runtime.keep_alive(0, stream, operands.pop())
    runtime.synchronize_stream(stream)
    runtime.keep_alive(0, stream, ())
    assert sum(each() is not None for each in seen) == 0
    other = runtime.create_stream(0)  # keeping something for one stream does not disturb the capture of another
    runtime.keep_alive(0, stream, ())
    with device_graphs.capture(runtime, other) as graph:
        for _ in range(40):
            runtime.keep_alive(0, stream, ())
    device_graphs.destroy_graph(runtime, graph[0])
    runtime.destroy_stream(other)


def test_allocator_uses_blocks_again(runtime: base.Runtime, stream: int) -> None:
    allocator = memory.StreamAllocator(runtime)
    block = allocator(10_000, 0, stream)
    ptr = block.ptr
    block.release()
    assert allocator.kept_bytes(0) >= 10_000
    other = allocator(10_000, 0, 0)
    assert other.ptr != ptr  # another stream
    same = allocator(9_999, 0, stream)
    assert same.ptr == ptr
    for each in (other, same):
        each.release()
    assert allocator.trim(0) >= 20_000 and allocator.kept_bytes(0) == 0


def test_several_threads(runtime: base.Runtime, module: objects.Module) -> None:
    function = module.get_function("scale")
    failures: list[BaseException] = []

    def body(seed: int) -> None:
        try:
            stream = runtime.create_stream(0)
            params = KernelParameters(["ptr", "ptr", "i32", "f32"])
            data = np.random.default_rng(seed).standard_normal(777).astype(np.float32)
            with runtime.use_device(0):
                launch = runtime.prepare_launch(function, (4, 1, 1), (256, 1, 1), 0, stream, params)
                for factor in range(1, 4):
                    buffer = memory.allocate(runtime, data.nbytes, 0, stream)
                    with (
                        Device(runtime, data, stream) as source,
                        Device(runtime, poisoned(777), stream) as target,
                    ):
                        params.set(buffer.ptr, source.ptr, 777, float(factor))
                        launch.run()
                        params.set(target.ptr, buffer.ptr, 777, 1.0)
                        launch.run()
                        np.testing.assert_array_equal(target.read(), data * np.float32(factor))
                    buffer.release()
            runtime.destroy_stream(stream)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_default_stream(runtime: base.Runtime, module: objects.Module) -> None:
    with runtime.use_device(0), Device(runtime, np.zeros(5, np.int32), 0) as values:
        params = KernelParameters(["ptr", "i32"])
        params.set(values.ptr, 5)
        runtime.launch(module.get_function("add_one"), (1, 1, 1), (64, 1, 1), 0, 0, params)
        np.testing.assert_array_equal(values.read(), [1] * 5)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused(runtime: base.Runtime, module: objects.Module, stream: int) -> None:
    scratch = Scratch(runtime, 0, stream, 100)
    scratch.pointer(0)
    params = KernelParameters(["ptr", "i32"])
    launch = runtime.prepare_launch(module.get_function("add_one"), (1, 1, 1), (64, 1, 1), 0, stream, params)
    child = os.fork()
    if child == 0:  # nothing here may reach pytest: report by exit status alone
        status = 1
        try:
            calls = [
                lambda: runtimes.get_runtime(runtime.kind),
                lambda: runtime.malloc_plain(16, 0),
                lambda: runtime.pointer_device(1 << 40),
                lambda: runtime.is_capturing(stream),
                lambda: runtime.launch(module.get_function("add_one"), (1, 1, 1), (1, 1, 1), 0, stream, params),
                launch.run,
                lambda: runtime.load_module(b"", 0),
                lambda: scratch.pointer(77),
            ]
            status = 2
            for call in calls:
                try:
                    call()
                except runtimes.ForkedProcessError:
                    status += 1
            scratch.close()  # must touch nothing
            status = 0 if status == 2 + len(calls) else status
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert runtime.pointer_device(scratch.pointer(0)) == 0
    scratch.close()
