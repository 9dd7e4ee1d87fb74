"""A CUDA device that is none: a driver of our own that notes each launch with the bytes of its parameters, and a runtime in front of it.

Nothing is compiled for a device and no kernel runs: what is checked with it is which launches are made, and every byte that they are given.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from typing import Any

import numpy as np

from hipgroupgemm.backends.triton import compiler
from hipgroupgemm.runtime.host_code import compile_host_code
from hipgroupgemm.runtime.objects import DEFAULT_SHARED_LIMIT, DeviceInfo, LaunchDescription
from hipgroupgemm.runtime.parameters import TENSOR_MAP

CONTEXT = 7

DRIVER = r"""
#include <stdint.h>
#include <string.h>
#define PUBLIC __attribute__((visibility("default")))
struct kernel { uint32_t count, sizes[96]; };
struct noted { uint64_t function, stream; uint32_t grid[3], block[3], shared, programmatic, bytes; unsigned char data[4096]; };
PUBLIC struct kernel kernels[64];
PUBLIC struct noted noted[64];
PUBLIC uint64_t count = 0, current = 7, asked_capturing = 0;
PUBLIC int failing = 0;
PUBLIC int cuCtxGetCurrent(void **c) { *c = (void *)current; return 0; }
PUBLIC int cuCtxSetCurrent(void *c) { current = (uint64_t)c; return 0; }
PUBLIC int cuStreamIsCapturing(void *s, int *c) { ++asked_capturing; *c = 1; return 0; }
PUBLIC int cuTensorMapReplaceAddress(uint64_t *map, void *a) {
    if ((uint64_t)a % 16) return 1;
    map[0] = (uint64_t)a;
    return 0;
}
PUBLIC int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,
                                  const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    if ((uint64_t)map % 64 || (uint64_t)address % 16) return 1;
    memset(map, 0, 128);
    map[0] = (uint64_t)address;
    map[1] = type | rank << 8 | swizzle << 16 | promotion << 24;
    for (uint32_t i = 0; i < rank; ++i) map[2 + i] = dims[i];
    for (uint32_t i = 0; i + 1 < rank; ++i) map[7 + i] = strides[i];
    for (uint32_t i = 0; i < rank; ++i) map[11 + i] = (uint64_t)box[i] << 32 | steps[i];
    return 0;
}
struct attribute { int id; char pad[4]; int value; char rest[60]; };
struct config { uint32_t g[3], b[3], shared; void *stream; struct attribute *attributes; uint32_t n; };
PUBLIC int cuLaunchKernelEx(const struct config *c, void *f, void **p, void **extra) {
    const uint64_t number = (uint64_t)f;
    if (failing) return failing;
    if (number >= 64 || count >= 64 || extra) return 400;
    struct noted *n = &noted[count++];
    n->function = number;
    n->stream = (uint64_t)c->stream;
    memcpy(n->grid, c->g, sizeof n->grid);
    memcpy(n->block, c->b, sizeof n->block);
    n->shared = c->shared;
    n->programmatic = c->n ? (uint32_t)(c->attributes[0].id * 10 + c->attributes[0].value) : 0;
    n->bytes = 0;
    for (uint32_t i = 0; i < kernels[number].count; ++i) {
        memcpy(n->data + n->bytes, p[i], kernels[number].sizes[i]);
        n->bytes += kernels[number].sizes[i];
    }
    return 0;
}
"""


class _Kernel(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint32), ("sizes", ctypes.c_uint32 * 96))


class _Noted(ctypes.Structure):
    _fields_ = (
        *(("function", ctypes.c_uint64), ("stream", ctypes.c_uint64)),
        *(("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3)),
        *((name, ctypes.c_uint32) for name in ("shared", "programmatic", "bytes")),
        ("data", ctypes.c_ubyte * 4096),
    )


class Launch:
    """As a prepared launch is: it describes itself, and runs by itself in Python."""

    def __init__(self, runtime: FakeCuda, function: Any, grid: Any, block: Any, shared: int, stream: int, parameters: Any, early: bool):
        self.runtime, self.function, self.grid, self.block, self.shared = runtime, function, grid, block, shared
        self.stream, self.parameters, self.early = stream, parameters, early

    def set_grid(self, grid: Any) -> None:
        self.grid = grid

    def describe(self) -> LaunchDescription:
        return LaunchDescription(self.function.handle, self.parameters.address, self.grid, self.block, self.shared, self.early)

    def run(self) -> None:
        """Notes what the driver would."""
        p = self.parameters
        sizes = self.runtime.sizes_of(p)
        data = b"".join(ctypes.string_at(p.blob_address(i), size) for i, size in enumerate(sizes))
        early = 61 if self.early else 0
        self.runtime.ran.append((self.function.name, tuple(self.grid), tuple(self.block), self.shared, early, data))


class FakeCuda:
    """The calls of a CUDA runtime that preparing a recipe makes."""

    kind, _forked = "cuda", False

    def __init__(self, path: Any) -> None:
        path.write_bytes(compile_host_code(DRIVER, "c"))
        self.library = str(path)
        self.driver = ctypes.CDLL(self.library)
        self.kernels = (_Kernel * 64).in_dll(self.driver, "kernels")
        self.noted = (_Noted * 64).in_dll(self.driver, "noted")
        self.count = ctypes.c_uint64.in_dll(self.driver, "count")
        self.asked_capturing = ctypes.c_uint64.in_dll(self.driver, "asked_capturing")
        self.current = ctypes.c_uint64.in_dll(self.driver, "current")
        self.failing = ctypes.c_int.in_dll(self.driver, "failing")
        self.functions: list[Any] = []
        self.ran: list[Any] = []
        self.memory: list[np.ndarray[Any, Any]] = []

    # ---- of a runtime
    @contextlib.contextmanager
    def use_device(self, device: int) -> Any:
        yield device

    def capture_id(self, stream: int) -> int:
        return 0

    def check_process(self) -> None:
        pass

    def device_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(device, "fake", "sm_90", "", 132, 32, 1024, 49152, 232448, 1 << 25, 1 << 37)

    def driver_function(self, name: str) -> Any:
        return getattr(self.driver, name)

    def launch_functions(self, device: int) -> Any:
        names = {"get_current": "cuCtxGetCurrent", "set_current": "cuCtxSetCurrent", "is_capturing": "cuStreamIsCapturing"}
        names.update(replace_address="cuTensorMapReplaceAddress", launch="cuLaunchKernelEx")
        return {"context": CONTEXT}, names

    def malloc_plain(self, nbytes: int, device: int) -> int:
        block = np.full(nbytes + 256, 0xA5, np.uint8)
        self.memory.append(block)
        return int(block.ctypes.data + -block.ctypes.data % 256)

    def memset_async(self, address: int, value: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memset(address, value, nbytes)

    def memcpy_async(self, to: int, source: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memmove(to, source, nbytes)

    host_malloc = malloc_plain

    def create_event(self, device: int) -> int:
        return 1

    def record_event(self, *_: Any) -> None:
        pass

    synchronize_event = synchronize_stream = synchronize_device = record_event

    def prepare_launch(
        self, function: Any, grid: Any, block: Any, shared: int, stream: int, parameters: Any, programmatic: bool = False
    ) -> Any:
        sizes = self.sizes_of(parameters)
        kernel = self.kernels[function.handle]
        kernel.count = len(sizes)
        for i, size in enumerate(sizes):
            kernel.sizes[i] = size
        return Launch(self, function, grid, block, shared, stream, parameters, programmatic)

    # ---- of the test
    @staticmethod
    def sizes_of(parameters: Any) -> list[int]:
        ends = [*parameters.offsets[1:], parameters.nbytes]
        return [end - start for start, end in zip(parameters.offsets, ends, strict=True)]

    def function(self, name: str) -> Any:
        """A kernel; equal names are one."""
        for found in self.functions:
            if found.name == name:
                return found
        self.functions.append(types.SimpleNamespace(name=name, handle=len(self.functions) + 1, shared_limit=DEFAULT_SHARED_LIMIT))
        return self.functions[-1]

    def told(self) -> list[tuple[Any, ...]]:
        """The launches that the driver saw since the last question, and forgets: name, grid, block, shared, attribute, bytes, stream."""
        found = []
        for n in self.noted[: self.count.value]:
            name = next(f.name for f in self.functions if f.handle == n.function)
            found.append((name, tuple(n.grid), tuple(n.block), n.shared, n.programmatic, bytes(n.data[: n.bytes]), n.stream))
        self.count.value = 0
        return found


def compile_nothing(runtime: FakeCuda, spec: Any) -> Any:
    """Stands for Triton: the parameters of the kernel that it would make."""
    kinds: list[Any] = []
    names: list[str] = []
    boxes = []
    for name, kind in spec.signature:
        if kind == "constexpr":
            continue
        rank = len(kind[2]) if isinstance(kind, tuple) else 0
        kinds += [TENSOR_MAP, *["i32"] * rank, *["i64"] * rank] if rank else [kind]
        names += [name, *(f"{name}.{i}" for i in range(2 * rank))]
        if rank:
            boxes.append((kind[2], 0))
    key = f"{spec.function} {sorted((str(k), str(v)) for k, v in spec.constants)}"
    runtime.function(key)
    return compiler.CompiledKernel(b"", key, 4096, 384, tuple(boxes), tuple(kinds), tuple(names))
