"""The CUDA runtime, on the driver API through ``cuda.bindings.driver``, which cuda-core depends on.

Only primary contexts are used, the ones that the CUDA runtime API, torch, JAX and CuPy use; none is ever
created. What a launch costs, this way and others, is measured in tests/test_runtime_cuda.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .cuda_driver import NOT_READY, NOTES, OUT_OF_MEMORY, CudaDriver
from .cuda_launch import CudaLaunch
from .errors import DeviceError, DeviceMemoryError, ForkedProcessError
from .objects import Function, Module
from .parameters import KernelParameters

_INVALID_VALUE = 1
_ALLOC_PORTABLE = 1
_EVENT_DISABLE_TIMING = 2
_STREAM_NON_BLOCKING = 1


class CudaRuntime(CudaDriver):
    """CUDA in this process. Get it from ``get_runtime("cuda")``."""

    def __init__(self) -> None:
        super().__init__()
        self._library: ctypes.CDLL | None = None
        self._device_ordinal = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

    # ---- memory

    def pointer_device(self, ptr: int) -> int | None:
        """Device that a pointer belongs to; see :meth:`Runtime.pointer_device`."""
        if self._forked:
            raise ForkedProcessError("cuda")
        status, device = self._driver.cuPointerGetAttribute(self._device_ordinal, ptr)
        if status == 0:
            return int(device)
        if status == _INVALID_VALUE:
            return None  # memory that the driver did not allocate or register
        raise self._fail("cuPointerGetAttribute", int(status))

    def malloc(self, nbytes: int, device: int, stream: int = 0) -> int:
        """Device memory for use on ``stream``; see :meth:`Runtime.malloc`."""
        if not self.device_info(device).memory_pools:
            return self.malloc_plain(nbytes, device)
        if nbytes == 0:
            return 0
        with self.use_device(device):
            return self._allocate("cuMemAllocAsync", device, nbytes, stream)

    def malloc_plain(self, nbytes: int, device: int) -> int:
        """Device memory that belongs to no stream; see :meth:`Runtime.malloc_plain`."""
        if nbytes == 0:
            return 0
        with self.use_device(device), self.relaxed_capture():
            return self._allocate("cuMemAlloc", device, nbytes)

    def _allocate(self, call: str, device: int, nbytes: int, *stream: int) -> int:
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
        try:
            return int(self._check(call, nbytes, *stream))
        except DeviceMemoryError:
            free, total = self.memory_info(device)
            note = f"wanted {nbytes} bytes on device {device}, where {free} of {total} bytes are free"
            raise self._fail(call, OUT_OF_MEMORY, note) from None

    def free(self, ptr: int, device: int, stream: int = 0) -> None:
        """Give memory back in stream order; see :meth:`Runtime.free`."""
        if not self.device_info(device).memory_pools:
            self.free_plain(ptr, device)
        elif ptr:
            with self.use_device(device):
                self._check("cuMemFreeAsync", ptr, stream)

    def free_plain(self, ptr: int, device: int) -> None:
        """Free memory of :meth:`malloc_plain` or :meth:`malloc`; waits for the device."""
        if ptr:
            with self.use_device(device), self.relaxed_capture():
                self._check("cuMemFree", ptr)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread make calls that a capture would forbid although they don't concern it."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._check("cuThreadExchangeStreamCaptureMode", mode)
        try:
            yield
        finally:
            self._check("cuThreadExchangeStreamCaptureMode", before)

    def host_malloc(self, nbytes: int, device: int) -> int:
        """Pinned host memory, readable by every device; 0 for 0 bytes."""
        if nbytes == 0:
            return 0
        with self.use_device(device), self.relaxed_capture():
            return int(self._check("cuMemHostAlloc", nbytes, _ALLOC_PORTABLE))

    def host_free(self, ptr: int, device: int) -> None:
        """Free pinned host memory. Copies from it must have finished. 0 is fine."""
        if ptr:
            with self.use_device(device), self.relaxed_capture():
                self._check("cuMemFreeHost", ptr)

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy bytes in stream order; see :meth:`Runtime.memcpy_async`."""
        if nbytes:
            self._check("cuMemcpyAsync", dst, src, nbytes, stream)

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Fill device memory with one byte value, in stream order."""
        if nbytes:
            self._check("cuMemsetD8Async", dst, value, nbytes, stream)

    # ---- streams and events

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        """A new stream; non_blocking streams don't wait for the legacy default stream."""
        with self.use_device(device):
            return int(self._check("cuStreamCreate", _STREAM_NON_BLOCKING if non_blocking else 0))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done; returns at once."""
        self._check("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int = 0) -> None:
        """Wait until a stream's work is done."""
        self._check("cuStreamSynchronize", stream)

    def synchronize_device(self, device: int) -> None:
        """Wait until all work of a device is done."""
        with self.use_device(device):
            self._check("cuCtxSynchronize")

    def stream_key(self, stream: int) -> int:
        """A number for a stream that no later stream gets; negative, so that it is no handle."""
        if stream in (0, 1):
            return 0
        return -1 - int(self._check("cuStreamGetId", stream))

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream records a graph just now."""
        if self._forked:
            raise ForkedProcessError("cuda")
        status, state = self._driver.cuStreamIsCapturing(stream)
        if status:
            raise self._fail("cuStreamIsCapturing", int(status))
        return bool(state)

    def capture_id(self, stream: int) -> int:
        """Number of the capture that the stream takes part in, 0 when it isn't captured."""
        if not self.is_capturing(stream):
            return 0
        status, number = self._check("cuStreamGetCaptureInfo", stream)[:2]
        if int(status) != 1:
            raise DeviceError("cuStreamGetCaptureInfo", 901, self._status_name(901), NOTES[901])  # an invalidated capture has no number
        return int(number)

    def create_event(self, device: int, *, timing: bool = False) -> int:
        """A new event; only those made with ``timing`` can be given to :meth:`elapsed_ms`."""
        with self.use_device(device):
            return int(self._check("cuEventCreate", 0 if timing else _EVENT_DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy an event; work that it marks is not disturbed."""
        self._check("cuEventDestroy", event)

    def record_event(self, event: int, stream: int = 0) -> None:
        """Mark the present end of a stream's work."""
        self._check("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Let a stream's later work wait for an event, without blocking the host."""
        self._check("cuStreamWaitEvent", stream, event, 0)

    def query_event(self, event: int) -> bool:
        """Whether the work that an event marks is done."""
        self.check_process()
        status = int(self._driver.cuEventQuery(event)[0])
        if status not in (0, NOT_READY):
            raise self._fail("cuEventQuery", status)
        return status == 0

    def synchronize_event(self, event: int) -> None:
        """Block the host until the work that an event marks is done."""
        self._check("cuEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two recorded events made with ``timing``; both must have completed."""
        return float(self._check("cuEventElapsedTime", start, end))

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """Record what this thread gives to ``stream`` from now on, instead of running it."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """End the recording; the executable graph's handle."""
        graph = self._check("cuStreamEndCapture", stream)
        try:
            return int(self._check("cuGraphInstantiate", graph, 0))
        finally:
            self._check("cuGraphDestroy", graph)

    def abort_capture(self, stream: int) -> None:
        """End a recording and drop it, also one that an error has invalidated."""
        self.check_process()
        status, graph = self._driver.cuStreamEndCapture(stream)
        if int(status) == 0 and int(graph):
            self._check("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Run an executable graph in stream order."""
        self._check("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Destroy an executable graph; a run under way ends first."""
        self._check("cuGraphExecDestroy", graph)

    # ---- code

    def compiler_version(self) -> str:
        """NVRTC's version, "nvrtc 13.0"."""
        from .cuda_compile import nvrtc_version

        return nvrtc_version()

    def compile(
        self,
        source: str,
        name: str,
        options: Sequence[str] = (),
        device_arch: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Compile CUDA C++ with NVRTC; see :meth:`Runtime.compile`."""
        from .cuda_compile import compile_cuda

        return compile_cuda(source, name, options, device_arch or self.architecture(self.current_device()), headers)

    def _load(self, code: bytes, device: int) -> int:
        image = code if code.startswith(b"\x7fELF") else code + b"\0"  # PTX is text and must end in a zero
        with self.use_device(device), self.relaxed_capture():
            return int(self._check("cuModuleLoadData", image))

    def _unload_module(self, handle: int, device: int) -> None:
        with self.use_device(device), self.relaxed_capture():
            self._check("cuModuleUnload", handle)

    def _get_function(self, module: Module, name: str) -> object:
        status, function = self._driver.cuModuleGetFunction(module.handle, name.encode())
        if int(status):
            raise self._fail("cuModuleGetFunction", int(status), f"the module has no kernel {name!r}")
        # since CUDA 12 a kernel is loaded at its first launch, which a capture would forbid: load it now
        load = getattr(self._driver, "cuFuncLoad", None)
        if load is not None and self.version >= 12040:
            with self.use_device(module.device), self.relaxed_capture():
                self._check("cuFuncLoad", function)
        return function

    def _set_shared_limit(self, function: Function, nbytes: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.use_device(function.module.device), self.relaxed_capture():
            self._check("cuFuncSetAttribute", function.native, attribute, nbytes)

    # ---- launches

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
    ) -> None:
        """Launch a kernel on the current device; see :meth:`Runtime.launch`."""
        if self._forked:
            raise ForkedProcessError("cuda")
        status = self._driver.cuLaunchKernel(function.native, *grid, *block, shared_bytes, stream, params.address, 0)[0]
        if status:
            self._launch_failed(int(status), "cuLaunchKernel", function, grid, block, shared_bytes)

    def prepare_launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
        *,
        cluster: tuple[int, int, int] | None = None,
        programmatic: bool = False,
    ) -> CudaLaunch:
        """A launch to be run many times; see :meth:`Runtime.prepare_launch`."""
        clustered = cluster is not None and tuple(cluster) != (1, 1, 1)
        if clustered or programmatic:
            info = self.device_info(function.module.device)
            if int(info.architecture.removeprefix("sm_")) < 90:
                raise NotImplementedError(f"cluster, programmatic: device {info.index} is {info.architecture}; both need sm_90 or later")
        return CudaLaunch(
            self,
            function,
            grid,
            block,
            shared_bytes,
            stream,
            params,
            cluster if clustered else None,
            programmatic,
        )

    def driver_function(self, name: str) -> Any:
        """A function of the driver library through ctypes, for calls that prepared arguments make cheaper.

        Raises:
            NotImplementedError: the driver is too old to have it.
        """
        if self._library is None:
            self._library = ctypes.CDLL(self.library)
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise NotImplementedError(
                f"{name}: the driver (API version {self.version}) has no such function; install a newer one"
            ) from None

    def encode_tensor_map(
        self,
        element_type: str,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        swizzle: int = 0,
        l2_promotion: int = 128,
        fill_nan: bool = False,
    ) -> bytes:
        """The 128 bytes of one TMA descriptor; see :mod:`hipgroupgemm.runtime.tensor_map`."""
        from .tensor_map import encode_tensor_map

        return encode_tensor_map(
            self,
            element_type,
            address,
            shape,
            strides,
            box,
            swizzle=swizzle,
            l2_promotion=l2_promotion,
            fill_nan=fill_nan,
        )

    def _launch_failed(
        self,
        status: int,
        call: str,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
    ) -> None:
        where = f"kernel {function.name}, grid {grid}, block {block}, {shared_bytes} bytes of shared memory"
        if status == 1:
            info = self.device_info(function.module.device)
            where += (
                f"; want 1 or more blocks, 1 to {info.max_threads_per_block} threads a block, and at most"
                f" {function.shared_limit} bytes (get_function raises that limit up to"
                f" {info.shared_memory_optin})"
            )
        raise self._fail(call, status, where + (f": {NOTES[status]}" if status in NOTES else ""))
