"""What a runtime hands out: device descriptions, loaded modules, kernels, prepared launches."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hipgroupgemm.runtime.forks import new_lock

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime
    from hipgroupgemm.runtime.parameters import KernelParameters

__all__ = [
    "DEFAULT_SHARED_LIMIT", "LIBRARY_CALL", "PROGRAMMATIC", "DeviceInfo", "Function", "LaunchDescription", "LibraryCall", "Module",
    "PreparedLaunch", "UseDevice",
]  # fmt: skip

DEFAULT_SHARED_LIMIT = 48 * 1024
"""Bytes of dynamic shared memory that any kernel may use; above it a CUDA kernel must opt in."""


@dataclass(frozen=True)
class DeviceInfo:
    """What one device is. Sizes are bytes."""

    index: int  # in this process
    name: str  # the vendor's, "NVIDIA H200"
    architecture: str  # compiler target without feature suffix: "sm_90", "gfx942"
    features: str  # the suffix, "sramecc+:xnack-"; "" on CUDA
    multiprocessors: int  # SMs or CUs
    warp_size: int  # threads of a warp (32) or wavefront (64)
    max_threads_per_block: int
    shared_memory_per_block: int  # what a block gets without asking
    shared_memory_optin: int  # what a block can get at most
    l2_bytes: int  # 0 when unknown
    memory_bytes: int

    @property
    def target(self) -> str:
        """Architecture and features as the vendor's compiler takes them ("gfx942:sramecc+:xnack-")."""
        return f"{self.architecture}:{self.features}" if self.features else self.architecture


class Module:
    """Device code loaded on one device. Made by :meth:`Runtime.load_module`."""

    def __init__(self, runtime: Runtime, handle: int, device: int) -> None:
        self.runtime, self.handle, self.device = runtime, handle, device
        self._functions: dict[str, Function] = {}
        self._lock = new_lock()

    def get_function(self, name: str, shared_bytes: int = 0) -> Function:
        """A kernel of this module, allowed to use ``shared_bytes`` of dynamic shared memory.

        The same object for the same name; a larger ``shared_bytes`` raises its limit.

        Raises:
            ValueError: more shared memory than the device gives a block.
            DeviceError: the module has no such kernel.
        """
        with self._lock:
            function = self._functions.get(name)
            if function is None:
                function = Function(name, self.runtime._get_function(self, name), self)
                self._functions[name] = function
            if shared_bytes > function.shared_limit:
                limit = self.runtime.device_info(self.device).shared_memory_optin
                if shared_bytes > limit:
                    gives = f"device {self.device} gives {limit} at most. Choose a smaller tile or fewer stages"
                    raise ValueError(f"shared_bytes: kernel {name} wants {shared_bytes} bytes of shared memory a block; {gives}")
                self.runtime._set_shared_limit(function, shared_bytes)
                function.shared_limit = shared_bytes
            return function


class Function:
    """One kernel of a module, which stays loaded.

    ``handle`` is the driver's, as an int, and ``native`` the object that the bindings want for it. ``shared_limit`` is how many bytes of
    dynamic shared memory it may use now.
    """

    __slots__ = ("handle", "module", "name", "native", "shared_limit")

    def __init__(self, name: str, native: object, module: Module) -> None:
        self.name, self.native, self.module = name, native, module
        self.handle = int(native)  # type: ignore[call-overload]
        self.shared_limit = DEFAULT_SHARED_LIMIT

    def __repr__(self) -> str:
        return f"<Function {self.name} on {self.module.runtime.kind} device {self.module.device}>"


class LaunchDescription(NamedTuple):
    """A launch in numbers: addresses of the driver's function and of the array of parameters, blocks, threads, bytes; the stream apart.

    `kind` is plain (0), PROGRAMMATIC or LIBRARY_CALL, as in `include/launches.h`.
    """

    function: int
    parameters: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    kind: int


PROGRAMMATIC, LIBRARY_CALL = 1, 2


class LibraryCall:
    """A library's function that launches by itself, in a list of launches that C code makes: (uint64, uint64, stream) -> status.

    Args:
        function: its address. parameters: two "u64", which outlive this.
    """

    def __init__(self, function: int, parameters: KernelParameters) -> None:
        self._parameters, self._function = parameters, function

    def describe(self) -> LaunchDescription:
        """As a launch describes itself."""
        return LaunchDescription(self._function, self._parameters.address, (0, 0, 0), (0, 0, 0), 0, LIBRARY_CALL)


class UseDevice:
    """Context manager of :meth:`Runtime.use_device`; light, because every execute enters one."""

    __slots__ = ("_device", "_previous", "_runtime")

    def __init__(self, runtime: Runtime, device: int) -> None:
        self._runtime, self._device = runtime, device
        self._previous: object = None

    def __enter__(self) -> int:
        self._previous = self._runtime._enter_device(self._device)
        return self._device

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            self._runtime._leave_device(self._previous)


class PreparedLaunch(abc.ABC):
    """A launch with every argument fixed but the grid and the contents of its parameter block."""

    call: ClassVar[str]  # the driver's, for errors

    def __init__(self, runtime: Runtime, function: Function, params: KernelParameters, stream: int, launch: LaunchDescription) -> None:
        self._runtime, self._function = runtime, function
        self._params = params  # the driver reads its memory
        self._launch, self._grid = launch, launch.grid

    @abc.abstractmethod
    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Change the grid (blocks in x, y, z) of later runs."""
        self._grid = grid

    def fail(self, status: int) -> None:
        """Raise what a launch that got this status from the driver raises."""
        self._runtime._launch_failed(self.call, status, self._function, self.describe())

    def describe(self) -> LaunchDescription:
        """What is launched now, for code that launches it by itself."""
        return self._launch._replace(grid=self._grid)
