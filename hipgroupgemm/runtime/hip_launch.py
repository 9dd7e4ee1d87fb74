"""HIP launches with every argument in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ForkedProcessError
from .objects import Function, PreparedLaunch
from .parameters import KernelParameters

if TYPE_CHECKING:
    from .hip import HipRuntime


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
        self._keep = params
        self._call = runtime._hip.hipModuleLaunchKernel
        self._arguments = (
            *block,
            shared_bytes,
            runtime._hip.ihipStream_t.fromObj(stream),
            params.address,
            None,
        )

    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""
        if self._runtime._forked:
            raise ForkedProcessError("rocm")
        status = self._call(self._function.native, *self._grid, *self._arguments)[0]
        if status:
            self._runtime._launch_failed(
                int(status), self._function, self._grid, self._arguments[:3], self._arguments[3]
            )

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Change the grid (blocks in x, y, z) of later runs."""
        self._grid = tuple(grid)
