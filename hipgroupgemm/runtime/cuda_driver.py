"""The CUDA driver: initialisation, errors, devices and their primary contexts."""

from __future__ import annotations

from typing import Any

from .base import Runtime
from .errors import DeviceError, DeviceMemoryError, ForkedProcessError, RuntimeUnavailable
from .objects import DeviceInfo
from .process import mapped_libraries

INSTALL = "Install an NVIDIA driver (525 or newer) and the package cuda-core (pip install 'hipgroupgemm[cuda]')."

OUT_OF_MEMORY = 2
NOT_READY = 600
_NOT_INITIALIZED = 3
NOTES = {
    201: "no context is current in this thread: wrap the call in runtime.use_device(i)",
    209: "the code object holds no code for this device: compile for its architecture",
    400: "a handle (stream, event, function) is not valid, was destroyed, or belongs to another device",
    700: "a kernel accessed memory out of bounds; the context is lost, restart the process",
    716: "a kernel used a misaligned address; the context is lost, restart the process",
    719: "a kernel failed; the context is lost, restart the process",
    900: "not allowed while a stream is being captured: do it before the capture",
    901: "an earlier call invalidated the capture: end it, and prepare everything before the next one",
    906: "the default stream can't be used while another stream of the context is being captured: pass the"
    " stream that is captured, or end the capture first",
}


class CudaDriver(Runtime):
    """The driver, its errors and its devices; the base of :class:`hipgroupgemm.runtime.cuda.CudaRuntime`."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeUnavailable("cuda", f"the Python package cuda.bindings is missing ({error})", INSTALL) from None
        self._driver: Any = driver
        try:
            status = int(driver.cuInit(0)[0])
        except Exception as error:  # the bindings raise what their loader raises, which differs between versions
            raise RuntimeUnavailable("cuda", f"no driver library ({error})", INSTALL) from None
        if status == _NOT_INITIALIZED:
            # what cuInit says in a process forked from one in which somebody had called it
            raise ForkedProcessError("cuda")
        if status:
            name = self._status_name(status)
            raise RuntimeUnavailable("cuda", f"cuInit returned status {status} ({name})", INSTALL)
        self._count = int(self._check("cuDeviceGetCount"))
        if self._count == 0:
            raise RuntimeUnavailable("cuda", "the driver sees no device (is CUDA_VISIBLE_DEVICES empty?)", INSTALL)
        self.version = int(self._check("cuDriverGetVersion"))
        self._contexts: dict[int, tuple[Any, int]] = {}
        mapped = mapped_libraries("libcuda.so")
        self.library = mapped[0] if mapped else "libcuda.so.1"

    # ---- calls and errors

    def _status_name(self, status: int) -> str:
        try:
            return str(self._driver.CUresult(status).name)
        except ValueError:
            return "unknown"

    def _fail(self, call: str, status: int, note: str = "") -> DeviceError:
        kind = DeviceMemoryError if status == OUT_OF_MEMORY else DeviceError
        return kind(call, status, self._status_name(status), note or NOTES.get(status, ""))

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

    def disable_after_fork(self) -> None:
        """Called in a forked child: from now on every call raises ForkedProcessError."""
        super().disable_after_fork()
        self._contexts = {}
