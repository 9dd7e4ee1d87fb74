"""The ROCm runtime, on hip-python (``hip.hip`` of versions 6 and 7, ``rocm.bindings.hip`` of version 10).

Which HIP runtime library it works on is decided in :mod:`hipgroupgemm.runtime.hip_library`.

hip-python 6 and 7 keep Python's global lock during their calls, so a thread that waits for a stream stops all
others.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .base import Runtime
from .errors import DeviceError, DeviceMemoryError, ForkedProcessError, RuntimeUnavailable
from .hip_launch import HipLaunch, LaunchArguments
from .hip_library import NO_DEVICE, load_hip
from .objects import DeviceInfo, Function, Module
from .parameters import KernelParameters

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_NOT_SUPPORTED = 801
_CAPTURE_INVALIDATED = 901
_NOTES = {
    98: "the code object holds no such kernel for this device",
    209: "the code object holds no code for this device: compile for its architecture",
    400: "a handle (stream, event, function) is not valid, was destroyed, or belongs to another device",
    700: "a kernel accessed memory out of bounds; the process must be restarted",
    719: "a kernel failed; the process must be restarted",
    900: "not allowed while a stream is being captured: do it before the capture",
    901: "an earlier call invalidated the capture: end it, and prepare everything before the next one",
    906: "the default stream can't be used while another stream is being captured: pass the stream that is"
    " captured, or end the capture first",
}

_HOST_PORTABLE = 1
_EVENT_DISABLE_TIMING = 2
_STREAM_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
_KEPT_STREAMS = 256


class _PointerQuery(threading.local):
    """Where one hipPointerGetAttribute call of a thread writes its answer."""

    def __init__(self) -> None:
        self.answer = ctypes.c_int()
        self.address = ctypes.c_void_p(ctypes.addressof(self.answer))


class HipRuntime(Runtime):
    """HIP in this process. Get it from ``get_runtime("rocm")``."""

    kind = "rocm"

    def __init__(self) -> None:
        super().__init__()
        self._hip, self.library = load_hip()
        try:
            count = int(self._check("hipGetDeviceCount"))
        except DeviceError as error:
            raise RuntimeUnavailable("rocm", f"{self.library}: {error}", NO_DEVICE) from None
        if count == 0:
            raise RuntimeUnavailable("rocm", f"{self.library} sees no device", NO_DEVICE)
        self._count = count
        self.version = int(self._check("hipRuntimeGetVersion"))
        self._without_pools: set[int] = set()
        self._copy_kind = self._hip.hipMemcpyKind.hipMemcpyDefault
        self._launch_arguments = LaunchArguments(self._hip)
        self._streams: dict[int, Any] = {}
        self._query = _PointerQuery()
        self._device_ordinal = self._hip.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        # hip-python's binding of this one passes an uninitialised mode in, so it is called without it
        self._exchange_capture_mode = getattr(ctypes.CDLL(self.library), "hipThreadExchangeStreamCaptureMode", None)

    # ---- calls and errors

    def _status_name(self, status: int) -> str:
        try:
            return str(self._hip.hipError_t(status).name)
        except ValueError:
            return "unknown"

    def _fail(self, call: str, status: int, note: str = "") -> DeviceError:
        # HIP keeps the last error for whoever asks next, and torch asks after its own launches: take it back
        self._hip.hipGetLastError()
        kind = DeviceMemoryError if status == _OUT_OF_MEMORY else DeviceError
        return kind(call, status, self._status_name(status), note or _NOTES.get(status, ""))

    def _check(self, call: str, *arguments: Any) -> Any:
        """Call HIP through the bindings; the value, or the tuple of values, or None."""
        if self._forked:
            raise ForkedProcessError("rocm")
        result = getattr(self._hip, call)(*arguments)
        status = int(result[0])
        if status:
            raise self._fail(call, status)
        if len(result) == 2:
            return result[1]
        return result[1:] if len(result) > 2 else None

    def _stream(self, stream: int) -> Any:
        """The bindings' object of a stream handle: a bare pointer that owns nothing, so it may be kept."""
        found = self._streams.get(stream)
        if found is None:
            if len(self._streams) >= _KEPT_STREAMS:
                self._streams.clear()
            found = self._streams[stream] = self._hip.ihipStream_t.fromObj(stream)
        return found

    # ---- devices

    def device_count(self) -> int:
        """Number of devices, at least 1."""
        return self._count

    def _read_info(self, device: int) -> DeviceInfo:
        hip = self._hip
        if hip.__name__.startswith("rocm."):
            properties = self._check("hipGetDeviceProperties", device)
        else:  # before version 10 the caller brings the struct
            properties = hip.hipDeviceProp_t()
            self._check("hipGetDeviceProperties", properties, device)

        def text(value: Any) -> str:
            data = value if isinstance(value, str) else bytes(value).decode(errors="replace")
            return data.split("\0", 1)[0]

        architecture, _, features = text(properties.gcnArchName).partition(":")
        pools = hip.hipDeviceAttribute_t.hipDeviceAttributeMemoryPoolsSupported
        try:
            memory_pools = bool(self._check("hipDeviceGetAttribute", pools, device))
        except DeviceError:
            memory_pools = False
        shared = int(properties.sharedMemPerBlock)
        return DeviceInfo(
            index=device,
            name=text(properties.name),
            architecture=architecture,
            features=features,
            multiprocessors=int(properties.multiProcessorCount),
            warp_size=int(properties.warpSize),
            max_threads_per_block=int(properties.maxThreadsPerBlock),
            shared_memory_per_block=shared,
            shared_memory_optin=max(shared, int(properties.sharedMemPerBlockOptin)),
            l2_bytes=int(properties.l2CacheSize),
            memory_bytes=int(properties.totalGlobalMem),
            memory_pools=memory_pools,
        )

    def current_device(self) -> int:
        """Index of the calling thread's current device."""
        return int(self._check("hipGetDevice"))

    def _enter_device(self, device: int) -> object:
        current = int(self._check("hipGetDevice"))
        if current == device:
            return None
        self.check_device(device)
        self._check("hipSetDevice", device)
        return current

    def _leave_device(self, previous: object) -> None:
        self._check("hipSetDevice", previous)

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of a device's memory."""
        with self.use_device(device):
            free, total = self._check("hipMemGetInfo")
        return int(free), int(total)

    # ---- memory

    def pointer_device(self, ptr: int) -> int | None:
        """Device that a pointer belongs to; see :meth:`Runtime.pointer_device`."""
        if self._forked:
            raise ForkedProcessError("rocm")
        if not ptr:
            return None
        answer = self._query.answer
        answer.value = -1
        status = self._hip.hipPointerGetAttribute(self._query.address, self._device_ordinal, ptr)[0]
        if status == 0 and answer.value >= 0:
            return int(answer.value)
        if status:
            self._hip.hipGetLastError()  # unknown memory is no error here: leave no trace of one
        return None

    def malloc(self, nbytes: int, device: int, stream: int = 0) -> int:
        """Device memory for use on ``stream``; see :meth:`Runtime.malloc`."""
        if nbytes == 0:
            return 0
        if device not in self._without_pools and self.device_info(device).memory_pools:
            with self.use_device(device):
                try:
                    return self._allocate("hipMallocAsync", device, nbytes, stream)
                except DeviceMemoryError:
                    raise
                except DeviceError as error:
                    if error.status != _NOT_SUPPORTED:
                        raise
                    # said to be supported, and refused (some virtualised devices)
                    self._without_pools.add(device)
        return self.malloc_plain(nbytes, device)

    def malloc_plain(self, nbytes: int, device: int) -> int:
        """Device memory that belongs to no stream; see :meth:`Runtime.malloc_plain`."""
        if nbytes == 0:
            return 0
        with self.use_device(device), self.relaxed_capture():
            return self._allocate("hipMalloc", device, nbytes)

    def _allocate(self, call: str, device: int, nbytes: int, *stream: int) -> int:
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
        try:
            return int(self._check(call, nbytes, *stream))
        except DeviceMemoryError:
            free, total = self.memory_info(device)
            note = f"wanted {nbytes} bytes on device {device}, where {free} of {total} bytes are free"
            raise self._fail(call, _OUT_OF_MEMORY, note) from None

    def free(self, ptr: int, device: int, stream: int = 0) -> None:
        """Give memory back in stream order; see :meth:`Runtime.free`."""
        if not ptr:
            return
        if device in self._without_pools or not self.device_info(device).memory_pools:
            self.free_plain(ptr, device)
        else:
            with self.use_device(device):
                self._check("hipFreeAsync", ptr, stream)

    def free_plain(self, ptr: int, device: int) -> None:
        """Free memory of :meth:`malloc_plain` or :meth:`malloc`; waits for the device."""
        if ptr:
            with self.use_device(device), self.relaxed_capture():
                self._check("hipFree", ptr)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread allocate and synchronise while some stream is captured."""
        exchange = self._exchange_capture_mode
        if exchange is None:
            yield
            return
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        status = exchange(ctypes.byref(mode))
        if status:
            raise self._fail("hipThreadExchangeStreamCaptureMode", status)
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))

    def host_malloc(self, nbytes: int, device: int) -> int:
        """Pinned host memory, readable by every device; 0 for 0 bytes."""
        if nbytes == 0:
            return 0
        with self.use_device(device), self.relaxed_capture():
            return int(self._check("hipHostMalloc", nbytes, _HOST_PORTABLE))

    def host_free(self, ptr: int, device: int) -> None:
        """Free pinned host memory. Copies from it must have finished. 0 is fine."""
        if ptr:
            with self.use_device(device), self.relaxed_capture():
                self._check("hipHostFree", ptr)

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy bytes in stream order; see :meth:`Runtime.memcpy_async`."""
        if nbytes:
            self._check("hipMemcpyAsync", dst, src, nbytes, self._copy_kind, self._stream(stream))

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Fill device memory with one byte value, in stream order."""
        if nbytes:
            self._check("hipMemsetAsync", dst, value, nbytes, self._stream(stream))

    # ---- streams and events

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        """A new stream; non_blocking streams don't wait for the default stream."""
        with self.use_device(device):
            return int(self._check("hipStreamCreateWithFlags", _STREAM_NON_BLOCKING if non_blocking else 0))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done."""
        self._check("hipStreamDestroy", stream)

    def synchronize_stream(self, stream: int = 0) -> None:
        """Wait until a stream's work is done."""
        self._check("hipStreamSynchronize", stream)

    def synchronize_device(self, device: int) -> None:
        """Wait until all work of a device is done."""
        with self.use_device(device):
            self._check("hipDeviceSynchronize")

    def stream_key(self, stream: int) -> int:
        """The handle: HIP numbers no streams in the releases supported here."""
        return stream

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream records a graph just now."""
        return int(self._check("hipStreamIsCapturing", self._stream(stream))) != 0

    def capture_id(self, stream: int) -> int:
        """Number of the capture that the stream takes part in, 0 when it isn't captured."""
        if not self.is_capturing(stream):
            return 0
        status, number = self._check("hipStreamGetCaptureInfo", stream)[:2]
        if int(status) != 1:
            # an invalidated capture has no number
            raise self._fail("hipStreamGetCaptureInfo", _CAPTURE_INVALIDATED)
        return int(number)

    def create_event(self, device: int, *, timing: bool = False) -> int:
        """A new event; only those made with ``timing`` can be given to :meth:`elapsed_ms`."""
        with self.use_device(device):
            return int(self._check("hipEventCreateWithFlags", 0 if timing else _EVENT_DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy an event; work that it marks is not disturbed."""
        self._check("hipEventDestroy", event)

    def record_event(self, event: int, stream: int = 0) -> None:
        """Mark the present end of a stream's work."""
        self._check("hipEventRecord", event, self._stream(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """Let a stream's later work wait for an event, without blocking the host."""
        self._check("hipStreamWaitEvent", stream, event, 0)

    def query_event(self, event: int) -> bool:
        """Whether the work that an event marks is done."""
        self.check_process()
        status = int(self._hip.hipEventQuery(event)[0])
        if status == _NOT_READY:
            self._hip.hipGetLastError()
        elif status:
            raise self._fail("hipEventQuery", status)
        return status == 0

    def synchronize_event(self, event: int) -> None:
        """Block the host until the work that an event marks is done."""
        self._check("hipEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two recorded events made with ``timing``; both must have completed."""
        return float(self._check("hipEventElapsedTime", start, end))

    # ---- graphs

    def begin_capture(self, stream: int) -> None:
        """Record what this thread gives to ``stream`` from now on, instead of running it."""
        self._check("hipStreamBeginCapture", stream, self._hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> int:
        """End the recording; the executable graph's handle."""
        graph = self._check("hipStreamEndCapture", stream)
        try:
            return int(self._check("hipGraphInstantiateWithFlags", graph, 0))
        finally:
            self._check("hipGraphDestroy", graph)

    def abort_capture(self, stream: int) -> None:
        """End a recording and drop it, also one that an error has invalidated."""
        self.check_process()
        status, graph = self._hip.hipStreamEndCapture(stream)
        if int(status):
            self._hip.hipGetLastError()
        elif graph is not None:
            self._check("hipGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Run an executable graph in stream order."""
        self._check("hipGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Destroy an executable graph; a run under way ends first."""
        self._check("hipGraphExecDestroy", graph)

    # ---- code

    def compiler_version(self) -> str:
        """HipRTC's version and the HIP runtime's, which tells releases of the compiler apart."""
        from .hip_compile import hiprtc_version

        return f"{hiprtc_version()} of HIP {self.version}"

    def compile(
        self,
        source: str,
        name: str,
        options: Sequence[str] = (),
        device_arch: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Compile HIP C++ with hipRTC; see :meth:`Runtime.compile`."""
        from .hip_compile import compile_hip

        target = device_arch or self.device_info(self.current_device()).target
        return compile_hip(source, name, options, target, headers)

    def _load(self, code: bytes, device: int) -> int:
        with self.use_device(device), self.relaxed_capture():
            return int(self._check("hipModuleLoadData", code))

    def _unload_module(self, handle: int, device: int) -> None:
        with self.use_device(device), self.relaxed_capture():
            self._check("hipModuleUnload", handle)

    def _get_function(self, module: Module, name: str) -> object:
        with self.use_device(module.device):
            status, function = self._hip.hipModuleGetFunction(module.handle, name.encode())
        if int(status):
            raise self._fail("hipModuleGetFunction", int(status), f"the module has no kernel {name!r}")
        return function

    def _set_shared_limit(self, function: Function, nbytes: int) -> None:
        """Nothing to do: a module's kernel may use all of the LDS (hipFuncSetAttribute is for host stubs)."""

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
            raise ForkedProcessError("rocm")
        arguments = self._launch_arguments
        status = self._hip.hipModuleLaunchKernel(
            function.native,
            *grid,
            *block,
            shared_bytes,
            self._stream(stream),
            arguments.addresses(params),
            arguments.no_extra,
        )[0]
        if status:
            self._launch_failed(int(status), function, grid, block, shared_bytes)

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
    ) -> HipLaunch:
        """A launch to be run many times; see :meth:`Runtime.prepare_launch`."""
        if programmatic or (cluster is not None and tuple(cluster) != (1, 1, 1)):
            raise NotImplementedError("cluster, programmatic: ROCm devices have neither; leave both out")
        return HipLaunch(self, function, grid, block, shared_bytes, stream, params)

    def _launch_failed(self, status: int, function: Function, grid: Sequence[int], block: Sequence[int], shared_bytes: int) -> None:
        info = self.device_info(function.module.device)
        where = f"kernel {function.name}, grid {tuple(grid)}, block {tuple(block)}, {shared_bytes} bytes"
        " of shared memory"
        if status == 1:
            where += (
                f"; want 1 or more blocks, 1 to {info.max_threads_per_block} threads a block, fewer than"
                f" 2^32 threads in all, and at most {info.shared_memory_optin} bytes"
            )
        raise self._fail("hipModuleLaunchKernel", status, where + (f": {_NOTES[status]}" if status in _NOTES else ""))
