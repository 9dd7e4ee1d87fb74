"""A runtime on the host that runs Triton's kernels in Triton's interpreter and the scan as its host build.

With it the whole Triton backend runs on a CPU as it does on a GPU: plans, scratch, parameter blocks, captures, the shared scan, and the
pointer kernels line by line in NumPy. The process must have been started with TRITON_INTERPRET=1, which Triton reads when a kernel is
decorated (`make test` does it; the tests are marked "interpreter"). Kernels written in Gluon have no interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import pathlib
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from device_host.build import HostBuild, compile_host
from device_host.layout import ARGUMENTS

from hipgroupgemm.backends.triton import compiler, executable
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.objects import DeviceInfo, PreparedLaunch
from hipgroupgemm.runtime.parameters import Blob, KernelParameters

_CODES = {"i32": "i", "i64": "q", "fp32": "f", "ptr": "Q"}
_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "i32": "int32", "i64": "int64"}
_one_at_a_time = threading.RLock()  # the interpreter has one grid position for the whole process


class Pointer:
    """An address with a type: as much of a torch tensor as the interpreter asks for."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> Pointer:
        return self

    def cpu(self) -> Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> Pointer:
        return Pointer(self.address, self.dtype)

    def set_(self, *_: Any) -> None:
        """It points there already."""

    def copy_(self, _: Any) -> None:
        """What the kernel wrote is there already."""

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset


_specs: list[compiler.KernelSpec] = []


def describe(spec: compiler.KernelSpec) -> compiler.CompiledKernel:
    """Stands in for `compile_kernel`: the code is the specialisation's number here."""
    if spec not in _specs:
        _specs.append(spec)
    code = str(_specs.index(spec)).encode()
    names = [name for name in _function_of(spec).arg_names if dict(spec.signature)[name] != "constexpr"]
    return compiler._describe(spec, {"boxes": [], "name": spec.function, "shared": 0, "threads": 128, "parameters": names}, code)


def _function_of(spec: compiler.KernelSpec) -> Any:
    return getattr(importlib.import_module(f"hipgroupgemm.backends.triton.kernels.{spec.module}"), spec.function)


class Launch(PreparedLaunch):
    """A launch that runs when it is asked to, or is recorded."""

    def __init__(self, runtime: HostRuntime, module: int, grid: tuple[int, int, int], stream: int, parameters: KernelParameters) -> None:
        self.runtime, self.module, self.grid, self.stream, self.parameters = runtime, module, grid, stream, parameters

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        self.grid = grid

    def run(self) -> None:
        raw = ctypes.string_at(self.parameters.buffer_address, self.parameters.nbytes)
        grid, module, offsets = self.grid, self.module, tuple(self.parameters.offsets)
        self.runtime.do(self.stream, lambda: self.runtime.run_kernel(module, grid, raw, offsets))


class HostRuntime(Runtime):
    """One "CUDA" device of three multiprocessors, without a copy engine, whose memory is the host's, filled with NaN."""

    kind, version, library = "cuda", 0, ""
    SCAN = -1

    def __init__(self) -> None:
        super().__init__()
        self.build = HostBuild(compile_host(pathlib.Path(tempfile.mkdtemp(prefix="hipgroupgemm-scan-"))))
        self.blocks: dict[int, Any] = {}
        self.handles = itertools.count(16)  # 1 and 2 are names of default streams
        self.recording: dict[int, list[Any]] = {}
        self.recording_ids: dict[int, int] = {}
        self.graphs: dict[int, list[Any]] = {}
        self.launched: set[str] = set()

    # ---- devices

    def device_count(self) -> int:
        return 1

    def _read_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(device, "Triton's interpreter", "sm_80", "", 3, 32, 1024, 48 << 10, 160 << 10, 0, 1 << 30)

    def current_device(self) -> int:
        return 0

    def _enter_device(self, device: int) -> object:
        return None

    def _leave_device(self, previous: object) -> None:
        """There is one only."""

    def memory_info(self, device: int) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    # ---- memory

    def pointer_device(self, ptr: int) -> int | None:
        return 0 if any(start <= ptr < start + array.nbytes for start, array in self.blocks.items()) else None

    def malloc_plain(self, nbytes: int, device: int) -> int:
        if not nbytes:
            return 0
        array = np.full(nbytes + 512, 0xFF, np.uint8)
        start = -(-array.ctypes.data // 256) * 256
        self.blocks[start] = array
        return start

    def free_plain(self, ptr: int, device: int) -> None:
        if ptr:
            del self.blocks[ptr]

    host_malloc, host_free = malloc_plain, free_plain

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        self.do(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        self.do(stream, lambda: ctypes.memset(dst, value, nbytes))

    # ---- streams, events, graphs

    def do(self, stream: int, work: Any) -> None:
        """Runs work, or records it."""
        if stream in self.recording:
            self.recording[stream].append(work)
        else:
            work()

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        return next(self.handles)

    create_event = create_stream  # type: ignore[assignment]

    def destroy_stream(self, stream: int) -> None:
        """Nothing is left to do on it."""

    destroy_event = synchronize_event = synchronize_device = destroy_stream

    def synchronize_stream(self, stream: int = 0) -> None:
        assert stream not in self.recording, "would wait for a capture"

    def stream_key(self, stream: int) -> int:
        return stream

    def record_event(self, event: int, stream: int = 0) -> None:
        """All that came before is done."""

    def wait_event(self, stream: int, event: int) -> None:
        """All that came before is done."""

    def query_event(self, event: int) -> bool:
        return True

    def elapsed_ms(self, start: int, end: int) -> float:
        return 0.0

    def is_capturing(self, stream: int) -> bool:
        return stream in self.recording

    def capture_id(self, stream: int) -> int:
        return self.recording_ids.get(stream, 0)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        yield

    def begin_capture(self, stream: int) -> None:
        self.recording[stream], self.recording_ids[stream] = [], next(self.handles)

    def end_capture(self, stream: int) -> int:
        graph = self.recording_ids.pop(stream)
        self.graphs[graph] = self.recording.pop(stream)
        return graph

    def abort_capture(self, stream: int) -> None:
        self.end_capture(stream)

    def launch_graph(self, graph: int, stream: int) -> None:
        for work in self.graphs[graph]:
            work()

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    # ---- code

    def compiler_version(self) -> str:
        return "interpreter"

    def compile(self, source: str, name: str, options: Any = (), device_arch: str = "", headers: Any = None) -> bytes:
        assert "hgg_scan_early" in source
        return str(self.SCAN).encode()

    def _load(self, code: bytes, device: int) -> int:
        return int(code) + 10  # a handle is not 0

    def _get_function(self, module: Any, name: str) -> object:
        return module.handle

    def _set_shared_limit(self, function: Any, nbytes: int) -> None:
        """There is none."""

    def launch(self, function: Any, grid: Any, block: Any, shared_bytes: int, stream: int, params: KernelParameters) -> None:
        self.prepare_launch(function, grid, block, shared_bytes, stream, params).run()

    def prepare_launch(
        self,
        function: Any,
        grid: Any,
        block: Any,
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
        *,
        cluster: Any = None,
        programmatic: bool = False,
    ) -> PreparedLaunch:
        assert not programmatic
        return Launch(self, function.handle - 10, grid, stream, params)

    def run_kernel(self, module: int, grid: tuple[int, int, int], raw: bytes, offsets: tuple[int, ...]) -> None:
        """Runs a kernel over its grid with the parameter block as it was at the launch."""
        if module == self.SCAN:
            status = self.build.launch("hgg_scan", np.frombuffer(raw, ARGUMENTS, 1), grid[0])
            assert status == 0, f"the scan's launch was refused: {status}"
            return
        spec = _specs[module]
        function = _function_of(spec)
        values: dict[str, Any] = dict(spec.constants)
        kernel = describe(spec)
        for name, kind, offset in zip(kernel.names, kernel.kinds, offsets, strict=True):
            if name in dict(spec.signature) and not isinstance(kind, Blob):
                pointer = kind.startswith("*")
                (value,) = struct.unpack_from(_CODES["ptr" if pointer else kind], raw, offset)
                values[name] = Pointer(value, _TYPES[kind[1:]]) if pointer else value
        self.launched.add(spec.function)
        with _one_at_a_time, np.errstate(all="ignore"):
            function[grid](**values)


@functools.lru_cache(1)
def _runtime() -> HostRuntime:
    return HostRuntime()


def _correct_bfloat16(monkeypatch: Any) -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, which its dot multiplies and its cast cuts off instead of rounding."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def dot(_: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return TensorHandle(np.matmul(wide(a).data, wide(b).data, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    theirs = InterpreterBuilder.cast_impl

    def cast(builder: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return theirs(builder, source, kind)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


def sum_in_order(monkeypatch: Any) -> None:
    """Has the interpreter's dot sum each element in the order of k, as a matrix unit does: NumPy's BLAS goes by the place in the tile."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        import triton.language as tl

        x, y = (one.data.view(ml_dtypes.bfloat16) if one.dtype.scalar == tl.bfloat16 else one.data for one in (a, b))
        total = np.array(d.data, np.float32)
        for column, row in zip(x.astype(np.float32).T, y.astype(np.float32), strict=True):
            total += column[:, None] * row
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@contextmanager
def interpreted(monkeypatch: Any) -> Iterator[HostRuntime]:
    """Makes this the process's CUDA runtime."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreter's tests need a process of their own: TRITON_INTERPRET=1 python -m pytest -m interpreter")
    from hipgroupgemm import clear_plan_cache
    from hipgroupgemm import runtime as runtimes

    runtime = _runtime()
    monkeypatch.setitem(runtimes._runtimes, "cuda", runtime)
    monkeypatch.setattr(executable, "compile_kernel", describe)
    monkeypatch.setattr(executable, "_modules", {})
    _correct_bfloat16(monkeypatch)
    yield runtime
    clear_plan_cache()
