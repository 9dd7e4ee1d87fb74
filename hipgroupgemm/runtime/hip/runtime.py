"""The ROCm runtime, on hip-python (``hip.hip`` of versions 6 and 7, ``rocm.bindings.hip`` of version 10).

Which HIP runtime library it works on is decided in :mod:`hipgroupgemm.runtime.hip.library`.

hip-python 6 and 7 keep Python's global lock during their calls, so a thread that waits for a stream stops all others.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, ClassVar

from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.compile import compile_hip, hiprtc_version
from hipgroupgemm.runtime.errors import DeviceError, RuntimeUnavailable
from hipgroupgemm.runtime.hip.library import NO_DEVICE, load_hip, single_hip_runtime
from hipgroupgemm.runtime.objects import DeviceInfo, Function, LaunchDescription, PreparedLaunch
from hipgroupgemm.runtime.parameters import KernelParameters

__all__ = ["HipRuntime"]

_KEPT_STREAMS = 256


class _LaunchArguments:
    """Arguments of hipModuleLaunchKernel as objects that hip-python takes without converting them.

    With ints each conversion looks for a buffer and a CUDA array interface first, about a microsecond each.
    """

    def __init__(self, hip: Any) -> None:
        if hip.__name__.startswith("rocm."):
            from rocm.bindings import _hip_helpers as helpers
            from rocm.bindings.util.types import ListOfPointer

            self._addresses = ListOfPointer
        else:
            from hip import _hip_helpers as helpers
            from hip._util.types import Pointer

            self._addresses = Pointer
        self.no_extra: Any = helpers.HipModuleLaunchKernel_extra.fromObj(None)

    def addresses(self, params: KernelParameters) -> Any:
        """The array of parameter addresses; made once for each parameter block, and kept by it."""
        if params.native is None:
            params.native = self._addresses.fromObj(params.address)
        return params.native


class _PointerQuery(threading.local):
    """Where one hipPointerGetAttribute call of a thread writes its answer."""

    def __init__(self) -> None:
        self.answer = ctypes.c_int()
        self.address = ctypes.c_void_p(ctypes.addressof(self.answer))


class HipRuntime(Runtime):
    """HIP in this process. Get it from ``get_runtime("rocm")``."""

    kind = "rocm"
    _prefix = "hip"
    _renamed: ClassVar = {
        "StreamCreate": "hipStreamCreateWithFlags",
        "EventCreate": "hipEventCreateWithFlags",
        "GraphInstantiate": "hipGraphInstantiateWithFlags",
    }

    _compile = staticmethod(compile_hip)

    def __init__(self) -> None:
        super().__init__()
        hip, self.library = load_hip()
        self._bindings, self._statuses, self._capture_modes = hip, hip.hipError_t, hip.hipStreamCaptureMode
        try:
            self._count = int(self._check("GetDeviceCount"))
        except DeviceError as error:
            raise RuntimeUnavailable("rocm", f"{self.library}: {error}", NO_DEVICE) from None
        if self._count == 0:
            raise RuntimeUnavailable("rocm", f"{self.library} sees no device", NO_DEVICE)
        self.version = int(self._check("RuntimeGetVersion"))
        self._copy_kind = (hip.hipMemcpyKind.hipMemcpyDefault,)
        self._launch_arguments = _LaunchArguments(hip)
        self._streams: dict[int, Any] = {}
        self._query = _PointerQuery()
        self._device_ordinal = hip.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        # hip-python's binding of this one passes an uninitialised mode in, so it is called without it
        self._exchange = getattr(ctypes.CDLL(self.library), "hipThreadExchangeStreamCaptureMode", None)

    def _forget_error(self) -> None:
        # HIP keeps the last error for whoever asks next, and torch asks after its own launches
        self._bindings.hipGetLastError()

    def _stream(self, stream: int) -> Any:
        # a bare pointer that owns nothing, so it may be kept
        found = self._streams.get(stream)
        if found is None:
            if len(self._streams) >= _KEPT_STREAMS:
                self._streams.clear()
            found = self._streams[stream] = self._bindings.ihipStream_t.fromObj(stream)
        return found

    def check_library(self) -> None:
        """RuntimeUnavailable where a package loaded after ours has brought a second runtime into this process."""
        single_hip_runtime()

    # ---- devices

    def _read_info(self, device: int) -> DeviceInfo:
        hip = self._bindings
        if hip.__name__.startswith("rocm."):
            properties = self._check("GetDeviceProperties", device)
        else:  # before version 10 the caller brings the struct
            properties = hip.hipDeviceProp_t()
            self._check("GetDeviceProperties", properties, device)

        def text(value: Any) -> str:
            return (value if isinstance(value, str) else bytes(value).decode(errors="replace")).partition("\0")[0]

        architecture, _, features = text(properties.gcnArchName).partition(":")
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
        )

    def current_device(self) -> int:
        """Index of the calling thread's current device."""
        return int(self._check("GetDevice"))

    def _enter_device(self, device: int) -> object:
        current = int(self._check("GetDevice"))
        if current == device:
            return None
        self.check_device(device)
        self._check("SetDevice", device)
        return current

    def _leave_device(self, previous: object) -> None:
        self._check("SetDevice", previous)

    # ---- memory and captures

    def pointer_device(self, ptr: int) -> int | None:
        """Device that a pointer belongs to; see :meth:`Runtime.pointer_device`."""
        self.check_process()
        if not ptr:
            return None
        answer = self._query.answer
        answer.value = -1
        status = self._bindings.hipPointerGetAttribute(self._query.address, self._device_ordinal, ptr)[0]
        if status:
            self._forget_error()  # unknown memory is no error here: leave no trace of one
            return None
        return int(answer.value) if answer.value >= 0 else None

    def _exchange_capture_mode(self, mode: Any) -> Any:
        if self._exchange is None:
            return mode
        self.check_process()
        exchanged = ctypes.c_int(int(mode))
        status = self._exchange(ctypes.byref(exchanged))
        if status:
            raise self._fail("hipThreadExchangeStreamCaptureMode", status)
        return exchanged.value

    # ---- code and launches

    def compiler_version(self) -> str:
        """HipRTC's version and the HIP runtime's, which tells releases of the compiler apart."""
        return f"{hiprtc_version()} of HIP {self.version}"

    def launch_functions(self, device: int) -> tuple[dict[str, int], dict[str, str]]:
        """What `replay.Replay` needs of the runtime."""
        names = {"get_current": "hipGetDevice", "set_current": "hipSetDevice", "is_capturing": "hipStreamIsCapturing"}
        return {"device": device, "is_hip": 1}, {**names, "launch": "hipModuleLaunchKernel"}


class HipLaunch(PreparedLaunch):
    """hipModuleLaunchKernel with its arguments in place; from :meth:`Runtime.prepare_launch`."""

    call = "hipModuleLaunchKernel"

    def __init__(self, runtime: HipRuntime, function: Function, params: KernelParameters, stream: int, launch: LaunchDescription) -> None:
        super().__init__(runtime, function, params, stream, launch)
        made = runtime._launch_arguments
        self._function_of_driver = runtime._bindings.hipModuleLaunchKernel
        self._arguments = (*launch.block, launch.shared_bytes, runtime._stream(stream), made.addresses(params), made.no_extra)

    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""
        if self._runtime._forked:
            self._runtime.check_process()
        status = self._function_of_driver(self._function.native, *self._grid, *self._arguments)[0]
        if status:
            self.fail(int(status))


HipRuntime._launch_class = HipLaunch
