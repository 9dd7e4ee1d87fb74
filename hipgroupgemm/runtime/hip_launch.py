"""HIP launches with every argument in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ForkedProcessError
from .objects import Function, PreparedLaunch
from .parameters import KernelParameters

if TYPE_CHECKING:
    from .hip import HipRuntime


class LaunchArguments:
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
        """The array of parameter addresses; made once a parameter block, and kept by it."""
        if params.native is None:
            params.native = self._addresses.fromObj(params.address)
        return params.native


class HipLaunch(PreparedLaunch):
    """hipModuleLaunchKernel with its arguments in place; made by :meth:`HipRuntime.prepare_launch`."""

    __slots__ = ("_arguments", "_call", "_function", "_grid", "_keep", "_runtime")

    def __init__(
        self,
        runtime: HipRuntime,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
    ) -> None:
        self._runtime = runtime
        self._function = function
        self._grid = tuple(grid)
        self._keep = params  # HIP reads its memory
        self._call = runtime._hip.hipModuleLaunchKernel
        self._arguments = (
            *block,
            shared_bytes,
            runtime._stream(stream),
            runtime._launch_arguments.addresses(params),
            runtime._launch_arguments.no_extra,
        )

    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""
        if self._runtime._forked:
            raise ForkedProcessError("rocm")
        status = self._call(self._function.native, *self._grid, *self._arguments)[0]
        if status:
            self._runtime._launch_failed(int(status), self._function, self._grid, self._arguments[:3], self._arguments[3])

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Change the grid (blocks in x, y, z) of later runs."""
        self._grid = tuple(grid)
