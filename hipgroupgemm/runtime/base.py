"""What a device runtime offers, whichever vendor's driver is behind it.

Handles are ints. A stream or an event belongs to the device that was current when it was made; 0 is the
default stream of the current device. Calls that take a ``device`` make it current by themselves and restore
what was current before; the others work on the current device, so callers wrap several of them in one
:meth:`Runtime.use_device`. Device pointers are ints, sizes are bytes, times are milliseconds.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

from .errors import ForkedProcessError
from .keep_alive import KeptObjects
from .objects import DeviceInfo, Function, Module, PreparedLaunch, UseDevice
from .parameters import KernelParameters


class Runtime(abc.ABC):
    """One vendor's runtime in this process. Get it from :func:`hipgroupgemm.runtime.get_runtime`.

    All methods may be called from any thread. In a process forked from one that used this object every method
    raises ForkedProcessError.

    Attributes:
        kind: "cuda" or "rocm".
        version: the driver's or HIP runtime's version number, as the vendor encodes it.
        library: path of the driver library, where it is known.
    """

    kind: str
    version: int
    library: str

    def __init__(self) -> None:
        self._infos: dict[int, DeviceInfo] = {}
        self._modules: dict[tuple[int, str], Module] = {}
        self._module_locks: dict[tuple[int, str], threading.Lock] = {}
        self._lock = threading.Lock()
        self._forked = False
        self._kept = KeptObjects(self)

    # ---- devices

    @abc.abstractmethod
    def device_count(self) -> int:
        """Number of devices, at least 1."""

    @abc.abstractmethod
    def _read_info(self, device: int) -> DeviceInfo:
        """Ask the driver for everything in DeviceInfo."""

    def device_info(self, device: int) -> DeviceInfo:
        """What device ``device`` is (read once).

        Raises:
            ValueError: there is no such device.
        """
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

    def device_name(self, device: int) -> str:
        """The vendor's name of a device."""
        return self.device_info(device).name

    def architecture(self, device: int) -> str:
        """Compiler target without features: "sm_90", "gfx942"."""
        return self.device_info(device).architecture

    def features(self, device: int) -> str:
        """Feature suffix of the target ("sramecc+:xnack-"), "" on CUDA."""
        return self.device_info(device).features

    def multiprocessor_count(self, device: int) -> int:
        """SMs (CUDA) or CUs (ROCm) of a device."""
        return self.device_info(device).multiprocessors

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

    @abc.abstractmethod
    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of a device's memory."""

    # ---- memory

    @abc.abstractmethod
    def pointer_device(self, ptr: int) -> int | None:
        """Device that a pointer belongs to; None for memory that the runtime doesn't know.

        Managed memory counts, and so does pinned host memory, which every device can read (Numba's mapped
        arrays are such): the answer is then the device that was current when it was allocated.
        """

    @abc.abstractmethod
    def malloc(self, nbytes: int, device: int, stream: int = 0) -> int:
        """Device memory for use on ``stream``, in stream order where the device can; 0 for 0 bytes.

        Aligned to at least 256 bytes; contents undefined. Must not be called while ``stream`` is being
        captured (the memory would belong to the graph): see :meth:`malloc_plain`.

        Raises:
            DeviceMemoryError: out of memory.
        """

    @abc.abstractmethod
    def free(self, ptr: int, device: int, stream: int = 0) -> None:
        """Give :meth:`malloc`'s memory back once ``stream`` has done what it was given so far. 0 is fine."""

    @abc.abstractmethod
    def malloc_plain(self, nbytes: int, device: int) -> int:
        """Device memory that belongs to no stream. Allowed while a stream is captured; it is not recorded."""

    @abc.abstractmethod
    def free_plain(self, ptr: int, device: int) -> None:
        """Free memory of :meth:`malloc_plain` or :meth:`malloc`; waits for the device. 0 is fine."""

    @abc.abstractmethod
    def host_malloc(self, nbytes: int, device: int) -> int:
        """Pinned host memory, readable by every device; 0 for 0 bytes."""

    @abc.abstractmethod
    def host_free(self, ptr: int, device: int) -> None:
        """Free pinned host memory. Copies from it must have finished. 0 is fine."""

    @abc.abstractmethod
    def memcpy_async(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy bytes between any two of host and devices, in stream order.

        Host memory that isn't pinned is read before the call returns, and is written before it returns.
        """

    @abc.abstractmethod
    def memset_async(self, dst: int, value: int, nbytes: int, stream: int = 0) -> None:
        """Fill device memory with one byte value, in stream order."""

    # ---- streams and events

    @abc.abstractmethod
    def create_stream(self, device: int, *, non_blocking: bool = True) -> int:
        """A new stream; non_blocking streams don't wait for the legacy default stream."""

    @abc.abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream once its work is done; returns at once."""

    @abc.abstractmethod
    def synchronize_stream(self, stream: int = 0) -> None:
        """Wait until a stream's work is done; raises DeviceError when some of it failed."""

    @abc.abstractmethod
    def synchronize_device(self, device: int) -> None:
        """Wait until all work of a device is done."""

    @abc.abstractmethod
    def stream_key(self, stream: int) -> int:
        """A number for a stream that no later stream gets, where the driver has one; else the handle."""

    @abc.abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Whether the stream records a graph just now.

        Raises:
            DeviceError: ``stream`` is the default stream and another stream is being captured in a mode that
                forbids work on it.
        """

    @abc.abstractmethod
    def capture_id(self, stream: int) -> int:
        """Number of the capture that the stream takes part in, unique in the process; 0 for none."""

    @abc.abstractmethod
    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Let this thread allocate and synchronise while a stream is captured, without disturbing that."""

    @abc.abstractmethod
    def create_event(self, device: int, *, timing: bool = False) -> int:
        """A new event; only those made with ``timing`` can be given to :meth:`elapsed_ms`."""

    @abc.abstractmethod
    def destroy_event(self, event: int) -> None:
        """Destroy an event; work that it marks is not disturbed."""

    @abc.abstractmethod
    def record_event(self, event: int, stream: int = 0) -> None:
        """Mark the present end of a stream's work."""

    @abc.abstractmethod
    def wait_event(self, stream: int, event: int) -> None:
        """Let a stream's later work wait for an event, without blocking the host."""

    @abc.abstractmethod
    def query_event(self, event: int) -> bool:
        """Whether the work that an event marks is done."""

    @abc.abstractmethod
    def synchronize_event(self, event: int) -> None:
        """Block the host until the work that an event marks is done."""

    @abc.abstractmethod
    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two recorded events made with ``timing``; both must have completed."""

    def keep_alive(self, device: int, stream: int, objects: object) -> None:
        """Keep operands of a call until ``stream`` has done what it was given so far; returns at once.

        For arrays whose framework may use their memory again before our stream has passed. At most 64 calls of a stream are kept: one
        more waits for the oldest. Not for a stream that is being captured: there the owner of the graph keeps the operands.
        """
        self._kept.keep(device, stream, objects)

    # ---- graphs

    @abc.abstractmethod
    def begin_capture(self, stream: int) -> None:
        """Record what this thread gives to ``stream`` from now on, instead of running it."""

    @abc.abstractmethod
    def end_capture(self, stream: int) -> int:
        """End the recording; the executable graph's handle."""

    @abc.abstractmethod
    def launch_graph(self, graph: int, stream: int) -> None:
        """Run an executable graph in stream order."""

    @abc.abstractmethod
    def destroy_graph(self, graph: int) -> None:
        """Destroy an executable graph; a run under way ends first."""

    @contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """``with runtime.capture(s) as graph:`` records; afterwards ``graph[0]`` is the graph's handle."""
        graph: list[int] = []
        self.begin_capture(stream)
        try:
            yield graph
        except BaseException:
            self.abort_capture(stream)
            raise
        graph.append(self.end_capture(stream))

    @abc.abstractmethod
    def abort_capture(self, stream: int) -> None:
        """End a recording and drop it, also one that an error has invalidated."""

    # ---- code

    @abc.abstractmethod
    def compiler_version(self) -> str:
        """Identifies NVRTC or hipRTC for the compile cache."""

    @abc.abstractmethod
    def compile(
        self,
        source: str,
        name: str,
        options: Sequence[str] = (),
        device_arch: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Compile device source at run time, without looking at a cache.

        Args:
            source: CUDA C++ or HIP source text.
            name: what the compiler calls the source in its messages.
            options: compiler options, the target excluded.
            device_arch: "sm_90", "gfx942", also with features.
            headers: text of each header that the source may include, by the name in its ``#include``.

        Raises:
            CompileError: with the compiler's log.
        """

    @abc.abstractmethod
    def _load(self, code: bytes, device: int) -> int:
        """Load a code object; the module's handle."""

    @abc.abstractmethod
    def _unload_module(self, handle: int, device: int) -> None:
        """Unload a module by handle."""

    @abc.abstractmethod
    def _get_function(self, module: Module, name: str) -> object:
        """The bindings' object of a kernel; int() of it is the handle."""

    @abc.abstractmethod
    def _set_shared_limit(self, function: Function, nbytes: int) -> None:
        """Let a kernel use ``nbytes`` of dynamic shared memory."""

    def load_module(self, code: bytes, device: int) -> Module:
        """Load a code object (cubin, PTX, hsaco) on one device.

        Raises:
            DeviceError: the code is for another architecture, or broken.
        """
        self.check_device(device)
        return Module(self, self._load(code, device), device)

    def module_from_source(
        self,
        source: str,
        name: str,
        options: Sequence[str] = (),
        device: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> Module:
        """Compile for a device and load, through the memory cache and the cache on disk.

        The same module for the same arguments; it stays loaded as long as the process lives. Threads that ask
        for one module at once compile it once.
        """
        from .cache import cache_key, default_cache

        info = self.device_info(device)
        key = cache_key(source, options, info.target, self.compiler_version(), headers)
        with self._lock:
            module = self._modules.get((device, key))
            if module is not None:
                return module
            gate = self._module_locks.setdefault((device, key), threading.Lock())
        with gate:
            module = self._modules.get((device, key))
            if module is None:
                code = default_cache().get(key)
                if code is not None:
                    try:
                        module = self.load_module(code, device)
                    except ForkedProcessError:
                        raise
                    except RuntimeError:
                        default_cache().discard(key)  # intact on disk, but no code object: written by something else
                if module is None:
                    code = self.compile(source, name, options, info.target, headers)
                    module = self.load_module(code, device)
                    default_cache().put(key, code)
                with self._lock:
                    self._modules[device, key] = module
                    self._module_locks.pop((device, key), None)
            return module

    # ---- launches

    @abc.abstractmethod
    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
    ) -> None:
        """Launch a kernel on the current device.

        Args:
            function: the kernel; its device must be current.
            grid: blocks in x, y, z, each 1 or more.
            block: threads in x, y, z.
            shared_bytes: dynamic shared memory, bytes.
            stream: handle.
            params: the parameter block, read during the call.
        """

    @abc.abstractmethod
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
    ) -> PreparedLaunch:
        """A launch to be run many times with the same arguments.

        Args:
            function: the kernel.
            grid: blocks in x, y, z.
            block: threads in x, y, z.
            shared_bytes: dynamic shared memory, bytes.
            stream: handle.
            params: the parameter block, kept by reference: its values are read at each run.
            cluster: blocks a thread block cluster in x, y, z (CUDA, sm_90 and later).
            programmatic: let the launch start before the one before it has ended, where the kernel itself
                waits for it (CUDA's programmatic dependent launch).

        Raises:
            NotImplementedError: clusters or programmatic launches on a device without them.
        """

    # ---- forks

    def check_process(self) -> None:
        """Raise ForkedProcessError in a process forked after this runtime was made."""
        if self._forked:
            raise ForkedProcessError(self.kind)

    def disable_after_fork(self) -> None:
        """Called in a forked child: from now on every call raises ForkedProcessError."""
        self._forked = True
        # another thread of the parent may have held these at the fork
        self._lock = threading.Lock()
        self._module_locks = {}

    def raise_forked(self, *_: object) -> NoReturn:
        """Stands in for the launch functions in a forked child."""
        raise ForkedProcessError(self.kind)
