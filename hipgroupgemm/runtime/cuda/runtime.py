"""The CUDA runtime, on the driver API through ``cuda.bindings.driver``, which cuda-core depends on.

Only primary contexts are used, the ones that the CUDA runtime API, torch, JAX and CuPy use; none is ever created. What a launch costs,
this way and others, is measured in tests/runtime/test_runtime_cuda.py.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.compile import compile_cuda, nvrtc_version
from hipgroupgemm.runtime.errors import ForkedProcessError, RuntimeUnavailable
from hipgroupgemm.runtime.objects import PROGRAMMATIC, DeviceInfo, Function, LaunchDescription, Module, PreparedLaunch
from hipgroupgemm.runtime.parameters import KernelParameters
from hipgroupgemm.runtime.process import mapped_libraries

__all__ = ["CudaRuntime"]

INSTALL = "Install an NVIDIA driver (525 or newer) and the package cuda-core (pip install 'hipgroupgemm[cuda]')."

_INVALID_VALUE = 1
_NOT_INITIALIZED = 3


class CudaRuntime(Runtime):
    """CUDA in this process. Get it from ``get_runtime("cuda")``."""

    kind = "cuda"
    _prefix = "cu"
    _renamed: ClassVar = {
        "Malloc": "cuMemAlloc",
        "Free": "cuMemFree",
        "HostMalloc": "cuMemHostAlloc",
        "HostFree": "cuMemFreeHost",
        "MemsetAsync": "cuMemsetD8Async",
        "DeviceSynchronize": "cuCtxSynchronize",
    }

    _compile = staticmethod(compile_cuda)

    def __init__(self) -> None:
        super().__init__()
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeUnavailable("cuda", f"the Python package cuda.bindings is missing ({error})", INSTALL) from None
        self._bindings, self._statuses, self._capture_modes = driver, driver.CUresult, driver.CUstreamCaptureMode
        try:
            status = int(driver.cuInit(0)[0])
        except Exception as error:  # the bindings raise what their loader raises, which differs between versions
            raise RuntimeUnavailable("cuda", f"no driver library ({error})", INSTALL) from None
        if status == _NOT_INITIALIZED:  # what cuInit says in a process forked from one in which somebody had called it
            raise ForkedProcessError("cuda")
        if status:
            raise RuntimeUnavailable("cuda", f"cuInit returned status {status} ({self._status_name(status)})", INSTALL)
        self._count = int(self._check("DeviceGetCount"))
        if self._count == 0:
            raise RuntimeUnavailable("cuda", "the driver sees no device (is CUDA_VISIBLE_DEVICES empty?)", INSTALL)
        self.version = int(self._check("DriverGetVersion"))
        self._current_context, self._capture_status = driver.cuCtxGetCurrent, driver.cuStreamIsCapturing
        self._contexts: dict[int, tuple[Any, int]] = {}  # the retained primary ones, as the bindings' object and as an int
        self._device_ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        self.library = next(iter(mapped_libraries("libcuda.so")), "libcuda.so.1")
        self._library: ctypes.CDLL | None = None

    # ---- devices

    def _read_info(self, device: int) -> DeviceInfo:
        def attribute(name: str) -> int:
            code = getattr(self._bindings.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
            return int(self._check("DeviceGetAttribute", code, device))

        name = bytes(self._check("DeviceGetName", 256, device)).split(b"\0", 1)[0].decode(errors="replace")
        return DeviceInfo(
            index=device,
            name=name,
            architecture=f"sm_{attribute('COMPUTE_CAPABILITY_MAJOR')}{attribute('COMPUTE_CAPABILITY_MINOR')}",
            features="",
            multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            warp_size=attribute("WARP_SIZE"),
            max_threads_per_block=attribute("MAX_THREADS_PER_BLOCK"),
            shared_memory_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK"),
            shared_memory_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2_bytes=attribute("L2_CACHE_SIZE"),
            memory_bytes=int(self._check("DeviceTotalMem", device)),
        )

    def _primary_context(self, device: int) -> tuple[Any, int]:
        self.check_device(device)
        with self._lock:
            pair = self._contexts.get(device)
            if pair is None:
                context = self._check("DevicePrimaryCtxRetain", device)
                pair = self._contexts[device] = (context, int(context))
        return pair

    def current_device(self) -> int:
        """Index of the calling thread's current device; 0 when none was made current."""
        return int(self._check("CtxGetDevice")) if int(self._check("CtxGetCurrent")) else 0

    def _enter_device(self, device: int) -> object:
        context, handle = self._contexts.get(device) or self._primary_context(device)
        if self._forked:
            self.check_process()
        status, current = self._current_context()  # without _check: every execute comes here
        if not status and int(current) == handle:
            return None
        current = self._check("CtxGetCurrent")
        self._check("CtxSetCurrent", context)
        return current

    def capture_id(self, stream: int) -> int:
        """Number of the capture that the stream takes part in, unique in the process; 0 for none."""
        if self._forked:
            self.check_process()
        status, capturing = self._capture_status(stream)  # likewise
        return super().capture_id(stream) if status or capturing else 0

    def _leave_device(self, previous: object) -> None:
        # set rather than popped: code inside may have replaced the top of the stack, as cudaSetDevice does
        self._check("CtxSetCurrent", previous)

    # ---- memory and streams

    def pointer_device(self, ptr: int) -> int | None:
        """Device that a pointer belongs to; see :meth:`Runtime.pointer_device`."""
        self.check_process()
        status, device = self._bindings.cuPointerGetAttribute(self._device_ordinal, ptr)
        if status == 0:
            return int(device)
        if status == _INVALID_VALUE:
            return None  # memory that the driver did not allocate or register
        raise self._fail("cuPointerGetAttribute", int(status))

    def stream_key(self, stream: int) -> int:
        """A number for a stream that no later stream gets; negative, so that it is no handle."""
        return 0 if stream in (0, 1) else -1 - int(self._check("StreamGetId", stream))

    # ---- code and launches

    def compiler_version(self) -> str:
        """NVRTC's version, "nvrtc 13.0"."""
        return nvrtc_version()

    def _load(self, code: bytes, device: int) -> int:
        return super()._load(code if code.startswith(b"\x7fELF") else code + b"\0", device)  # PTX is text and must end in a zero

    def _get_function(self, module: Module, name: str) -> object:
        function = super()._get_function(module, name)
        # since CUDA 12 a kernel is loaded at its first launch, which a capture would forbid: load it now
        if self.version >= 12040 and hasattr(self._bindings, "cuFuncLoad"):
            with self.use_device(module.device), self.relaxed_capture():
                self._check("FuncLoad", function)
        return function

    def _set_shared_limit(self, function: Function, nbytes: int) -> None:
        attribute = self._bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.use_device(function.module.device), self.relaxed_capture():
            self._check("FuncSetAttribute", function.native, attribute, nbytes)

    def _require_programmatic(self, info: DeviceInfo) -> None:
        if int(info.architecture.removeprefix("sm_")) < 90:
            raise NotImplementedError(f"programmatic: device {info.index} is {info.architecture}; want sm_90 or later")

    def _launch_rule(self, function: Function, info: DeviceInfo) -> str:
        return f", and at most {function.shared_limit} bytes (get_function raises that limit up to {info.shared_memory_optin})"

    def driver_function(self, name: str) -> Any:
        """A function of the driver library through ctypes, for calls that prepared arguments make cheaper.

        Raises:
            NotImplementedError: the driver is too old to have it.
        """
        self._library = self._library or ctypes.CDLL(self.library)
        try:
            return getattr(self._library, name)
        except AttributeError:
            text = f"{name}: the driver (API version {self.version}) has no such function; install a newer one"
            raise NotImplementedError(text) from None

    def launch_functions(self, device: int) -> tuple[dict[str, int], dict[str, str]]:
        """What `replay.Replay` needs of the driver."""
        names = {"get_current": "cuCtxGetCurrent", "set_current": "cuCtxSetCurrent", "is_capturing": "cuStreamIsCapturing"}
        names.update(replace_address="cuTensorMapReplaceAddress", launch="cuLaunchKernelEx")
        return {"context": self._primary_context(device)[1]}, names


class CudaLaunch(PreparedLaunch):
    """cuLaunchKernelEx with its configuration made; from :meth:`Runtime.prepare_launch`.

    Why through the bindings: on an H200 (driver API 13.0, cuda-bindings 13.3, Python 3.12) the host's median was 4.4 to 4.8 us a launch
    this way, 4.6 to 5.6 for cuLaunchKernel with its eleven arguments, 4.9 for cuLaunchKernelEx through ctypes with prepared arguments,
    and 5.9 to 7.5 for ctypes with argument types.
    """

    call = "cuLaunchKernelEx"

    def __init__(self, runtime: CudaRuntime, function: Function, params: KernelParameters, stream: int, launch: LaunchDescription) -> None:
        super().__init__(runtime, function, params, stream, launch)
        driver = runtime._bindings
        self._config = config = driver.CUlaunchConfig()
        self.set_grid(launch.grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = driver.CUstream(stream)
        if launch.kind == PROGRAMMATIC:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._native, self._address, self._function_of_driver = function.native, params.address, driver.cuLaunchKernelEx

    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""
        if self._runtime._forked:
            self._runtime.check_process()
        status = self._function_of_driver(self._config, self._native, self._address, 0)[0]
        if status:
            self.fail(int(status))

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Change the grid (blocks in x, y, z) of later runs."""
        self._grid, config = grid, self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid


CudaRuntime._launch_class = CudaLaunch
