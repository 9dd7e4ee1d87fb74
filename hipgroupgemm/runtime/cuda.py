"""The CUDA runtime, on the driver API.

Bindings: ``cuda.bindings.driver``, which cuda-core depends on, for everything that isn't on the path of an
execute; for what is (launches, tensor maps, pointer and capture queries) the same driver library through
ctypes with prepared arguments, which the launch benchmark in tests/test_runtime_cuda.py shows to be quicker.

Only primary contexts are used, the ones that the CUDA runtime API, torch, JAX and CuPy use; none is ever
created.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .base import Runtime
from .errors import DeviceError, DeviceMemoryError, ForkedProcessError, RuntimeUnavailable
from .objects import DeviceInfo, Function, Module, PreparedLaunch
from .parameters import KernelParameters
from .process import mapped_libraries

INSTALL = (
    "Install an NVIDIA driver (525 or newer) and the package cuda-core (pip install 'hipgroupgemm[cuda]')."
)

_NOT_INITIALIZED = 3
_OUT_OF_MEMORY = 2
_NOT_READY = 600
_CAPTURE_IMPLICIT = 906
_NOTES = {
    201: "no context is current in this thread: wrap the call in runtime.use_device(i)",
    209: "the code object holds no code for this device: compile for its architecture",
    400: "a handle (stream, event, function) is not valid, was destroyed, or belongs to another device",
    700: "a kernel accessed memory out of bounds; the context is lost, restart the process",
    716: "a kernel used a misaligned address; the context is lost, restart the process",
    719: "a kernel failed; the context is lost, restart the process",
    900: "not allowed while a stream is being captured: do it before the capture",
    901: "an earlier call invalidated the capture: end it, and prepare everything before the next one",
    906: "the default stream can't be used while another stream of the context is being captured: pass the"
    " stream"
    " that is captured, or end the capture first",
}

_ALLOC_PORTABLE = 1
_EVENT_DISABLE_TIMING = 2
_STREAM_NON_BLOCKING = 1
_MEMORY_DEVICE = 2
_POINTER_ATTRIBUTES = (2, 9, 8)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _DEVICE_ORDINAL, _IS_MANAGED
_LAUNCH_CLUSTER_DIMENSION = 4
_LAUNCH_PROGRAMMATIC = 6
_LAUNCH_ATTRIBUTE_BYTES = 72  # id (4), padding (4), value (64)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class _PointerQuery(threading.local):
    """Storage of one cuPointerGetAttributes call, one a thread."""

    def __init__(self) -> None:
        self.attributes = (ctypes.c_int * len(_POINTER_ATTRIBUTES))(*_POINTER_ATTRIBUTES)
        # each answer gets 8 bytes, of which the attributes asked for write 4
        self.answers = (ctypes.c_uint64 * len(_POINTER_ATTRIBUTES))()
        start = ctypes.addressof(self.answers)
        self.addresses = (ctypes.c_void_p * len(_POINTER_ATTRIBUTES))(*(start + 8 * i for i in range(3)))


class CudaLaunch(PreparedLaunch):
    """cuLaunchKernelEx with everything in place; made by :meth:`CudaRuntime.prepare_launch`."""

    __slots__ = ("_arguments", "_call", "_config", "_function", "_keep", "_runtime")

    def __init__(
        self, runtime: CudaRuntime, function: Function, config: _LaunchConfig, keep: tuple[Any, ...]
    ) -> None:
        self._runtime = runtime
        self._function = function
        self._config = config
        self._keep = keep
        self._call = runtime._cu_launch_kernel_ex
        params: KernelParameters = keep[0]
        self._arguments = (
            ctypes.c_void_p(ctypes.addressof(config)),
            ctypes.c_void_p(function.handle),
            ctypes.c_void_p(params.address),
        )

    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""
        if self._runtime._forked:
            raise ForkedProcessError("cuda")
        config, function, params = self._arguments
        status = self._call(config, function, params, None)
        if status:
            at = self._config
            self._runtime._launch_failed(
                status,
                "cuLaunchKernelEx",
                self._function,
                (at.grid_x, at.grid_y, at.grid_z),
                (at.block_x, at.block_y, at.block_z),
                at.shared_bytes,
            )

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Change the grid (blocks in x, y, z) of later runs."""
        config = self._config
        config.grid_x, config.grid_y, config.grid_z = grid


class CudaRuntime(Runtime):
    """CUDA in this process. Get it from ``get_runtime("cuda")``."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeUnavailable(
                "cuda", f"the Python package cuda.bindings is missing ({error})", INSTALL
            ) from None
        self._driver: Any = driver
        try:
            status = int(driver.cuInit(0)[0])
        except (
            Exception
        ) as error:  # the bindings raise what their loader raises, which differs between versions
            raise RuntimeUnavailable("cuda", f"no driver library ({error})", INSTALL) from None
        if status == _NOT_INITIALIZED:
            # what cuInit says in a process forked from one in which somebody had called it
            raise ForkedProcessError("cuda")
        if status:
            name = self._status_name(status)
            raise RuntimeUnavailable("cuda", f"cuInit returned status {status} ({name})", INSTALL)
        self._count = int(self._check("cuDeviceGetCount"))
        if self._count == 0:
            raise RuntimeUnavailable(
                "cuda", "the driver sees no device (is CUDA_VISIBLE_DEVICES empty?)", INSTALL
            )
        self.version = int(self._check("cuDriverGetVersion"))
        self._contexts: dict[int, tuple[Any, int]] = {}
        mapped = mapped_libraries("libcuda.so")
        self.library = mapped[0] if mapped else "libcuda.so.1"
        library = ctypes.CDLL(self.library)
        # no argtypes: prepared ctypes objects pass unconverted, which is what makes these calls cheap
        self._cu_launch_kernel = library.cuLaunchKernel
        self._cu_launch_kernel_ex = library.cuLaunchKernelEx
        self._cu_pointer_get_attributes = library.cuPointerGetAttributes
        self._cu_stream_is_capturing = library.cuStreamIsCapturing
        self._cu_tensor_map_encode = library.cuTensorMapEncodeTiled
        self._cu_tensor_map_replace = library.cuTensorMapReplaceAddress
        self._query = _PointerQuery()

    # ---- calls and errors

    def _status_name(self, status: int) -> str:
        try:
            return str(self._driver.CUresult(status).name)
        except ValueError:
            return "unknown"

    def _fail(self, call: str, status: int, note: str = "") -> DeviceError:
        kind = DeviceMemoryError if status == _OUT_OF_MEMORY else DeviceError
        return kind(call, status, self._status_name(status), note or _NOTES.get(status, ""))

    def _check(self, call: str, *arguments: Any) -> Any:
        """Call the driver through the bindings; the value, or the tuple of values, or None."""
        if self._forked:
            raise ForkedProcessError("cuda")
        result = getattr(self._driver, call)(*arguments)
        status = int(result[0])
        if status:
            raise self._fail(call, status)
        if len(result) == 2:
            return result[1]
        return result[1:] if len(result) > 2 else None

    # ---- devices

    def device_count(self) -> int:
        """Number of devices, at least 1."""
        return self._count

    def _attribute(self, device: int, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(self._check("cuDeviceGetAttribute", attribute, device))

    def _read_info(self, device: int) -> DeviceInfo:
        name = bytes(self._check("cuDeviceGetName", 256, device)).split(b"\0", 1)[0].decode(errors="replace")
        major = self._attribute(device, "COMPUTE_CAPABILITY_MAJOR")
        minor = self._attribute(device, "COMPUTE_CAPABILITY_MINOR")
        return DeviceInfo(
            index=device,
            name=name,
            architecture=f"sm_{major}{minor}",
            features="",
            multiprocessors=self._attribute(device, "MULTIPROCESSOR_COUNT"),
            warp_size=self._attribute(device, "WARP_SIZE"),
            max_threads_per_block=self._attribute(device, "MAX_THREADS_PER_BLOCK"),
            shared_memory_per_block=self._attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK"),
            shared_memory_optin=self._attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_bytes=self._attribute(device, "L2_CACHE_SIZE"),
            memory_bytes=int(self._check("cuDeviceTotalMem", device)),
            memory_pools=bool(self._attribute(device, "MEMORY_POOLS_SUPPORTED")),
        )

    def _primary_context(self, device: int) -> tuple[Any, int]:
        """The retained primary context of a device, as the bindings' object and as an int."""
        pair = self._contexts.get(device)
        if pair is None:
            self.check_device(device)
            with self._lock:
                pair = self._contexts.get(device)
                if pair is None:
                    context = self._check("cuDevicePrimaryCtxRetain", device)
                    pair = self._contexts[device] = (context, int(context))
        return pair

    def current_device(self) -> int:
        """Index of the calling thread's current device; 0 when none was made current."""
        if not int(self._check("cuCtxGetCurrent")):
            return 0
        return int(self._check("cuCtxGetDevice"))

    def _enter_device(self, device: int) -> object:
        context, handle = self._contexts.get(device) or self._primary_context(device)
        current = self._check("cuCtxGetCurrent")
        if int(current) == handle:
            return None
        self._check("cuCtxSetCurrent", context)
        return current

    def _leave_device(self, previous: object) -> None:
        # set rather than popped: code inside may have replaced the top of the stack, as cudaSetDevice does
        self._check("cuCtxSetCurrent", previous)

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of a device's memory."""
        with self.use_device(device):
            free, total = self._check("cuMemGetInfo")
        return int(free), int(total)

    # ---- memory

    def pointer_device(self, ptr: int) -> int | None:
        """Device that owns a device pointer (managed memory included); None for host or unknown memory."""
        if self._forked:
            raise ForkedProcessError("cuda")
        query = self._query
        answers = query.answers
        answers[0] = answers[1] = answers[2] = 0
        status = self._cu_pointer_get_attributes(3, query.attributes, query.addresses, ctypes.c_uint64(ptr))
        if status:
            raise self._fail("cuPointerGetAttributes", status)
        if answers[0] & 0xFFFFFFFF == _MEMORY_DEVICE or answers[2] & 0xFF:
            return answers[1] & 0xFFFFFFFF
        return None

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
            raise self._fail(call, _OUT_OF_MEMORY, note) from None

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
        """A number for a stream that no later stream gets (negative, so that it can't be taken for a
        handle)."""
        if stream in (0, 1):
            return 0
        return -1 - int(self._check("cuStreamGetId", stream))

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream records a graph just now."""
        if self._forked:
            raise ForkedProcessError("cuda")
        answer = ctypes.c_int()
        status = self._cu_stream_is_capturing(ctypes.c_void_p(stream), ctypes.byref(answer))
        if status:
            raise self._fail("cuStreamIsCapturing", status)
        return answer.value != 0

    def capture_id(self, stream: int) -> int:
        """Number of the capture that the stream takes part in, 0 when it isn't captured."""
        if not self.is_capturing(stream):
            return 0
        status, number = self._check("cuStreamGetCaptureInfo", stream)[:2]
        if int(status) != 1:
            raise DeviceError(
                "cuStreamGetCaptureInfo", 901, self._status_name(901), _NOTES[901]
            )  # an invalidated capture has no number
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
        if status not in (0, _NOT_READY):
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

        return compile_cuda(
            source, name, options, device_arch or self.architecture(self.current_device()), headers
        )

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
        status = self._cu_launch_kernel(
            ctypes.c_void_p(function.handle),
            *grid,
            *block,
            shared_bytes,
            ctypes.c_void_p(stream),
            ctypes.c_void_p(params.address),
            None,
        )
        if status:
            self._launch_failed(status, "cuLaunchKernel", function, grid, block, shared_bytes)

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
        attributes = []
        if cluster is not None and tuple(cluster) != (1, 1, 1):
            attributes.append(struct.pack("=I4x3I52x", _LAUNCH_CLUSTER_DIMENSION, *cluster))
        if programmatic:
            attributes.append(struct.pack("=I4xi60x", _LAUNCH_PROGRAMMATIC, 1))
        if attributes:
            info = self.device_info(function.module.device)
            if int(info.architecture.removeprefix("sm_")) < 90:
                raise NotImplementedError(
                    f"cluster, programmatic: device {info.index} is {info.architecture}; both need sm_90"
                    " or later"
                )
        stored = (ctypes.c_char * (_LAUNCH_ATTRIBUTE_BYTES * max(len(attributes), 1)))()
        stored.raw = b"".join(attributes).ljust(len(stored), b"\0")
        config = _LaunchConfig(
            *grid,
            *block,
            shared_bytes,
            stream,
            ctypes.addressof(stored) if attributes else None,
            len(attributes),
        )
        return CudaLaunch(self, function, config, (params, stored))

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
        raise self._fail(call, status, where + (f": {_NOTES[status]}" if status in _NOTES else ""))

    def disable_after_fork(self) -> None:
        """Called in a forked child: from now on every call raises ForkedProcessError."""
        super().disable_after_fork()
        self._contexts = {}
