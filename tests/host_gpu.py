"""A GPU that is none: host memory behind the calls of a runtime that a workbench makes, and tuning's kernels in their host build.

With it DeviceHarness, the judge's Python part and the kernels run in every test run, without a device. Freed memory is kept full of rubbish
for a while, and the kernels' threads run in another order at every launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.measure.device_harness import DeviceHarness
from hipgroupgemm.runtime.objects import DeviceInfo

TOTAL = 1 << 30


class HostRuntime:
    """The calls of `hipgroupgemm.runtime.base.Runtime` that a workbench makes."""

    kind = "cuda"
    _forked = False

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray[Any, Any]] = {}
        self.freed: list[np.ndarray[Any, Any]] = []
        self.events: dict[int, float] = {}
        self.streams: set[int] = set()
        self.handles = 100

    def device_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(device, "host", "sm_00", "", 2, 32, 1024, 49152, 49152, 1 << 20, TOTAL)

    @contextlib.contextmanager
    def use_device(self, device: int) -> Iterator[int]:
        yield device

    def _handle(self) -> int:
        self.handles += 1
        return self.handles

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        stream = self._handle()
        self.streams.add(stream)
        return stream

    def destroy_stream(self, stream: int) -> None:
        self.streams.remove(stream)

    def synchronize_stream(self, stream: int = 0) -> None:
        assert stream in self.streams

    def create_event(self, device: int, *, timing: bool = False) -> int:
        event = self._handle()
        self.events[event] = 0.0
        return event

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record_event(self, event: int, stream: int = 0) -> None:
        self.events[event] = time.perf_counter()

    def synchronize_event(self, event: int) -> None:
        assert self.events[event]

    def elapsed_ms(self, start: int, end: int) -> float:
        return (self.events[end] - self.events[start]) * 1e3

    def memory_info(self, device: int) -> tuple[int, int]:
        return TOTAL - sum(block.size for block in self.blocks.values()), TOTAL

    def malloc_plain(self, nbytes: int, device: int) -> int:
        if nbytes > self.memory_info(device)[0]:
            raise MemoryError("the host GPU is full")
        block = np.full(nbytes + 512, 0xA5, np.uint8)
        ptr = block.ctypes.data + -block.ctypes.data % 256
        self.blocks[ptr] = block
        return int(ptr)

    def free_plain(self, ptr: int, device: int) -> None:
        block = self.blocks.pop(ptr)
        block.fill(0xA5)
        self.freed = [*self.freed[-8:], block]

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memmove(dst, src, nbytes)

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memset(dst, value, nbytes)


class HostKernels:
    """Launches kernels of a host library, threads and blocks in another order each time."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.call = self.library.hgg_host_judge
        self.call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
        self.order = 0

    def launch(self, name: str, arguments: np.ndarray[Any, Any], grid: int, stream: int) -> None:
        self.order = (self.order + 1) % 6
        status = self.call(name.encode(), arguments.ctypes.data, grid, 256, self.order)
        if status:
            raise RuntimeError(f"{name}: {status}")


def host_bench(library: Path) -> DeviceHarness:
    return DeviceHarness("cuda:0", runtime=HostRuntime(), kernels=HostKernels(library))
