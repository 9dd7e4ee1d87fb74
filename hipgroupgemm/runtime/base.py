"""What a device runtime offers, whichever vendor's driver is behind it.

CUDA's driver API and HIP are two spellings of one interface, so nearly all of it is here: a call is named without the vendor's prefix,
and each vendor's class says what its bindings name or do otherwise.

Handles are ints. A stream or an event belongs to the device that was current when it was made; 0 is the default stream of the current
device. Calls that take a ``device`` make it current by themselves and restore what was current before; the others work on the current
device, so callers wrap several of them in one :meth:`Runtime.use_device`. Device pointers are ints, sizes are bytes, times milliseconds.

cuda.core is not used: its streams, events and buffers own their handles, while most of ours come from others as ints, and HIP has
nothing like it, so there would be two implementations again.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from hipgroupgemm.runtime.cache import cache_key, default_cache
from hipgroupgemm.runtime.errors import DeviceError, DeviceMemoryError, ForkedProcessError
from hipgroupgemm.runtime.forks import new_rlock
from hipgroupgemm.runtime.keep_alive import KeptObjects
from hipgroupgemm.runtime.objects import DeviceInfo, Function, LaunchDescription, Module, PreparedLaunch, UseDevice
from hipgroupgemm.runtime.parameters import KernelParameters

__all__ = ["Runtime"]

_Extents = tuple[int, int, int]

_OUT_OF_MEMORY = 2
# both vendors number these alike
_NOTES = {
    98: "the code object holds no such kernel for this device",
    201: "no context is current in this thread: wrap the call in runtime.use_device(i)",
    209: "the code object holds no code for this device: compile for its architecture",
    400: "a handle (stream, event, function) is not valid, was destroyed, or belongs to another device",
    700: "a kernel accessed memory out of bounds; the device is lost to this process, restart it",
    716: "a kernel used a misaligned address; the device is lost to this process, restart it",
    719: "a kernel failed; the device is lost to this process, restart it",
    900: "not allowed while a stream is being captured: do it before the capture",
    901: "an earlier call invalidated the capture: end it, and prepare everything before the next one",
    906: "the default stream can't be used while another stream of the device is being captured: pass the stream that is captured, or end"
    " the capture first",
}
_NOT_READY = 600
_INVALIDATED = 901
_PORTABLE = 1  # pinned memory for every device
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_RELAXED = 2  # a mode of captures
_ACTIVE = 1  # a capture that is under way and not spoilt


class Runtime(abc.ABC):
    """One vendor's runtime in this process. Get it from :func:`hipgroupgemm.runtime.get_runtime`.

    All methods may be called from any thread. In a process forked from one that used this object every method raises ForkedProcessError.
    """

    kind: str  # "cuda" or "rocm"
    version: int  # the driver's or HIP runtime's, as the vendor encodes it
    library: str  # path of the driver library, where it is known

    _prefix: ClassVar[str] = ""
    _renamed: ClassVar[Mapping[str, str]] = {}  # the vendor's names of calls that are not the prefix and our name
    _bindings: Any
    _statuses: Any  # the vendor's enumeration
    _capture_modes: Any
    _copy_kind: tuple[Any, ...] = ()
    _count: int
    _compile: Callable[..., bytes]
    _launch_class: Callable[..., PreparedLaunch]

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._forked = False
        self._infos: dict[int, DeviceInfo] = {}
        self._modules: dict[tuple[int, str], Module] = {}
        self._lock = new_rlock()
        self._kept = KeptObjects(self)

    # ---- calls and errors

    def _call(self, call: str, *arguments: Any) -> Any:
        """Make a call; what the bindings return, the status first."""
        if self._forked:
            raise ForkedProcessError(self.kind)
        function = self._functions.get(call)
        if function is None:
            function = self._functions[call] = getattr(self._bindings, self._name(call))
        return function(*arguments)

    def _check(self, call: str, *arguments: Any) -> Any:
        """Make a call; the value, or the tuple of values, or None."""
        function = None if self._forked else self._functions.get(call)  # here for speed: every call of the package comes this way
        result = function(*arguments) if function is not None else self._call(call, *arguments)
        if result[0]:
            raise self._fail(self._name(call), int(result[0]))
        if len(result) == 2:
            return result[1]
        return result[1:] if len(result) > 2 else None

    def _name(self, call: str) -> str:
        return self._renamed.get(call) or self._prefix + call

    def _status_name(self, status: int) -> str:
        try:
            return str(self._statuses(status).name)
        except ValueError:
            return "unknown"

    def _fail(self, call: str, status: int, note: str = "") -> DeviceError:
        self._forget_error()
        kind = DeviceMemoryError if status == _OUT_OF_MEMORY else DeviceError
        return kind(call, status, self._status_name(status), note or _NOTES.get(status, ""))

    def _forget_error(self) -> None:  # noqa: B027 - CUDA's driver keeps none
        """Take back the error that the vendor keeps for whoever asks next."""

    def _stream(self, stream: int) -> Any:
        """What the bindings take for a stream without converting it."""
        return stream

    def check_process(self) -> None:
        """Raise ForkedProcessError in a process forked after this runtime was made."""
        if self._forked:
            raise ForkedProcessError(self.kind)

    def disable_after_fork(self) -> None:
        """Called in a forked child: from now on every call raises ForkedProcessError."""
        self._forked = True

    # ---- devices

    def device_count(self) -> int:
        """Number of devices, at least 1."""
        return self._count

    @abc.abstractmethod
    def _read_info(self, device: int) -> DeviceInfo:
        """Ask the driver for everything in DeviceInfo."""

    def device_info(self, device: int) -> DeviceInfo:
        """What device ``device`` is (read once); ValueError where there is none."""
        info = self._infos.get(device)
        if info is None:
            self.check_device(device)
            info = self._infos[device] = self._read_info(device)
        return info

    def check_device(self, device: int) -> None:
        """ValueError unless ``device`` is the index of a device."""
        self.check_process()
        count = self.device_count()
        if not 0 <= device < count:
            raise ValueError(f"device: got {device}; want 0 to {count - 1} ({count} {self.kind} devices)")

    @abc.abstractmethod
    def current_device(self) -> int:
        """Index of the calling thread's current device; 0 when none was made current."""

    def use_device(self, device: int) -> UseDevice:
        """``with runtime.use_device(i):`` makes a device current in this thread, then restores the former.

        On CUDA that is the device's primary context, the one that torch, JAX and CuPy use.
        """
        return UseDevice(self, device)

    @abc.abstractmethod
    def _enter_device(self, device: int) -> object:
        """Make a device current; what to restore, or None when nothing changed."""

    @abc.abstractmethod
    def _leave_device(self, previous: object) -> None:
        """Restore what :meth:`_enter_device` returned."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of a device's memory."""
        with self.use_device(device):
            free, total = self._check("MemGetInfo")
        return int(free), int(total)

    def synchronize_device(self, device: int) -> None:
        """Wait until all work of a device is done."""
        with self.use_device(device):
            self._check("DeviceSynchronize")

    # ---- memory

    @abc.abstractmethod
    def pointer_device(self, ptr: int) -> int | None:
        """Device that a pointer belongs to; None for memory that the runtime doesn't know.

        Managed memory counts, and so does pinned host memory, which every device can read (Numba's mapped arrays are such): the answer
        is then the device that was current when it was allocated.
        """

    def check_library(self) -> None:  # noqa: B027 - CUDA's driver is one
        """RuntimeUnavailable where a package loaded after ours has brought a second runtime into this process."""

    def malloc_plain(self, nbytes: int, device: int) -> int:
        """Device memory, aligned to 256 bytes, contents undefined; 0 for 0 bytes. Allowed during a capture, and not recorded."""
        if nbytes == 0:
            return 0
        if nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes}; want 0 or more")
        with self.use_device(device), self.relaxed_capture():
            try:
                return int(self._check("Malloc", nbytes))
            except DeviceMemoryError as error:
                free, total = self.memory_info(device)
                note = f"wanted {nbytes} bytes on device {device}, where {free} of {total} bytes are free"
                raise self._fail(error.call, error.status, note) from None

    def free_plain(self, ptr: int, device: int) -> None:
        """Free memory of :meth:`malloc_plain`; waits for the device. 0 is fine."""
        self._relaxed("Free", ptr, device)

    def host_malloc(self, nbytes: int, device: int) -> int:
        """Pinned host memory, readable by every device; 0 for 0 bytes."""
        if nbytes == 0:
            return 0
        with self.use_device(device), self.relaxed_capture():
            return int(self._check("HostMalloc", nbytes, _PORTABLE))

    def host_free(self, ptr: int, device: int) -> None:
        """Free pinned host memory. Copies from it must have finished. 0 is fine."""
        self._relaxed("HostFree", ptr, device)

    def _relaxed(self, call: str, handle: int, device: int) -> None:
        """Make a call that a capture elsewhere would forbid; none for handle 0."""
        if handle:
            with self.use_device(device), self.relaxed_capture():
                self._check(call, handle)

    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy bytes between any two of host and devices, in stream order; the call waits for host memory that isn't pinned."""
        if nbytes:
            self._check("MemcpyAsync", dst, src, nbytes, *self._copy_kind, self._stream(stream))

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Fill device memory with one byte value, in stream order."""
        if nbytes:
            self._check("MemsetAsync", dst, value, nbytes, self._stream(stream))

    # ---- streams and events

    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        """A new stream; non_blocking streams don't wait for the legacy default stream."""
        with self.use_device(device):
            return int(self._check("StreamCreate", _NON_BLOCKING if non_blocking else 0))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done; returns at once."""
        self._check("StreamDestroy", stream)

    def synchronize_stream(self, stream: int = 0) -> None:
        """Wait until a stream's work is done; raises DeviceError when some of it failed."""
        self._check("StreamSynchronize", stream)

    def stream_key(self, stream: int) -> int:
        """A number for a stream that no later stream gets, where the driver has one; else the handle."""
        return stream

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream records a graph just now; DeviceError for the default stream where another's capture forbids work on it."""
        return bool(self._check("StreamIsCapturing", self._stream(stream)))

    def capture_id(self, stream: int) -> int:
        """Number of the capture that the stream takes part in, unique in the process; 0 for none."""
        if not self._check("StreamIsCapturing", self._stream(stream)):
            return 0
        status, number = self._check("StreamGetCaptureInfo", stream)[:2]
        if int(status) != _ACTIVE:  # an invalidated capture has no number
            raise self._fail(self._prefix + "StreamGetCaptureInfo", _INVALIDATED)
        return int(number)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread allocate and synchronise while a stream is captured, without disturbing that."""
        before = self._exchange_capture_mode(self._capture_modes(_RELAXED))
        try:
            yield
        finally:
            self._exchange_capture_mode(before)

    def _exchange_capture_mode(self, mode: Any) -> Any:
        """Set this thread's mode; what it was."""
        return self._check("ThreadExchangeStreamCaptureMode", mode)

    def create_event(self, device: int, *, timing: bool = False) -> int:
        """A new event; only those made with ``timing`` can be given to :meth:`elapsed_ms`."""
        with self.use_device(device):
            return int(self._check("EventCreate", 0 if timing else _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy an event; work that it marks is not disturbed."""
        self._check("EventDestroy", event)

    def record_event(self, event: int, stream: int = 0) -> None:
        """Mark the present end of a stream's work."""
        self._check("EventRecord", event, self._stream(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """Let a stream's later work wait for an event, without blocking the host."""
        self._check("StreamWaitEvent", stream, event, 0)

    def query_event(self, event: int) -> bool:
        """Whether the work that an event marks is done."""
        status = int(self._call("EventQuery", event)[0])
        if status not in (0, _NOT_READY):
            raise self._fail(self._name("EventQuery"), status)
        if status:
            self._forget_error()
        return not status

    def synchronize_event(self, event: int) -> None:
        """Block the host until the work that an event marks is done."""
        self._check("EventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two recorded events made with ``timing``; both must have completed."""
        return float(self._check("EventElapsedTime", start, end))

    def keep_alive(self, device: int, stream: int, objects: object) -> None:
        """Keep operands of a call until ``stream`` has done what it was given so far; returns at once.

        For arrays whose framework may use their memory again before our stream has passed. At most 16 calls of a stream are kept: one
        more waits for the oldest. Not for a stream that is being captured: there the owner of the graph keeps the operands.
        """
        self._kept.keep(device, stream, objects)

    # ---- code

    @abc.abstractmethod
    def compiler_version(self) -> str:
        """Identifies NVRTC or hipRTC for the compile cache."""

    def compile(self, source: str, name: str, options: Sequence[str], target: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Compile CUDA C++ or HIP source at run time, without looking at a cache.

        ``name`` is what the compiler calls the source in its messages, ``target`` is :attr:`DeviceInfo.target`, and ``headers`` is the text
        of each header that the source may include, by the name in its ``#include``.

        Raises:
            CompileError: with the compiler's log.
            RuntimeUnavailable: the compiler is not installed.
        """
        return self._compile(source, name, options, target, headers)

    def _load(self, code: bytes, device: int) -> int:
        """Load a code object; the module's handle."""
        with self.use_device(device), self.relaxed_capture():
            return int(self._check("ModuleLoadData", code))

    def _get_function(self, module: Module, name: str) -> object:
        """The bindings' object of a kernel; int() of it is the handle."""
        with self.use_device(module.device):
            try:
                return self._check("ModuleGetFunction", module.handle, name.encode())
            except DeviceError as error:
                raise self._fail(error.call, error.status, f"the module has no kernel {name!r}") from None

    def _set_shared_limit(self, function: Function, nbytes: int) -> None:  # noqa: B027 - a HIP kernel may use all of the LDS
        """Let a kernel use ``nbytes`` of dynamic shared memory."""

    def load_module(self, code: bytes, device: int) -> Module:
        """Load a code object (cubin, PTX, hsaco) on one device, for as long as the process lives; DeviceError where it does not fit."""
        self.check_device(device)
        return Module(self, self._load(code, device), device)

    def module_from_source(
        self, source: str, name: str, options: Sequence[str] = (), device: int = 0, headers: Mapping[str, str] | None = None
    ) -> Module:
        """Compile for a device and load, through the memory cache and the cache on disk.

        The same module for the same arguments; it stays loaded as long as the process lives. Threads that ask at once compile once.
        """
        info = self.device_info(device)
        key = cache_key(source, options, info.target, self.compiler_version(), headers)
        with self._lock:
            module = self._modules.get((device, key))
            stored = default_cache().get(key) if module is None else None
            if stored is not None:
                try:
                    module = self.load_module(stored, device)
                except ForkedProcessError:
                    raise
                except RuntimeError:
                    default_cache().discard(key)  # intact on disk, but no code object: written by something else
            if module is None:
                code = self.compile(source, name, options, info.target, headers)
                module = self.load_module(code, device)
                default_cache().put(key, code)
            self._modules[device, key] = module
            return module

    # ---- launches

    def launch(self, function: Function, grid: _Extents, block: _Extents, shared_bytes: int, stream: int, params: KernelParameters) -> None:
        """Launch a kernel once; arguments as for :meth:`prepare_launch`, which is quicker for many launches."""
        self.prepare_launch(function, grid, block, shared_bytes, stream, params).run()

    def prepare_launch(
        self,
        function: Function,
        grid: _Extents,
        block: _Extents,
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
        *,
        programmatic: bool = False,
    ) -> PreparedLaunch:
        """A launch to be run many times; the values in ``params`` are read at each run, where the kernel's device must be current.

        ``grid`` is blocks and ``block`` threads in x, y, z; ``shared_bytes`` is dynamic shared memory. ``programmatic`` lets the launch
        start before the one before it has ended, where the kernel itself waits for it (CUDA's programmatic dependent launch); a device
        without such launches raises NotImplementedError.
        """
        if programmatic:
            self._require_programmatic(self.device_info(function.module.device))
        launch = LaunchDescription(function.handle, params.address, grid, block, shared_bytes, programmatic)
        return self._launch_class(self, function, params, stream, launch)

    def _require_programmatic(self, info: DeviceInfo) -> None:
        """NotImplementedError unless a device has programmatic launches."""
        raise NotImplementedError(f"programmatic: {info.architecture} has no such launches; leave it out")

    def launch_functions(self, device: int) -> tuple[dict[str, int], dict[str, str]]:
        """For code that launches by itself: numbers and the driver's functions, by field of `hgg_driver` (`include/launches.h`)."""
        raise NotImplementedError(f"{self.kind}: its launches are made from Python")

    def _launch_failed(self, call: str, status: int, function: Function, at: LaunchDescription) -> None:
        """Raise what is wrong with a launch."""
        self.check_process()
        where = f"kernel {function.name}, grid {tuple(at.grid)}, block {tuple(at.block)}, {at.shared_bytes} bytes of shared memory"
        if status == 1:
            info = self.device_info(function.module.device)
            where += f"; want 1 or more blocks, 1 to {info.max_threads_per_block} threads per block" + self._launch_rule(function, info)
        raise self._fail(call, status, where + (f": {_NOTES[status]}" if status in _NOTES else ""))

    def _launch_rule(self, function: Function, info: DeviceInfo) -> str:
        """What else a launch has to keep to, in words."""
        return f", fewer than 2^32 threads in all, and at most {info.shared_memory_optin} bytes"
