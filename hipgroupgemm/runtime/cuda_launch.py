"""CUDA launches with every argument in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ForkedProcessError
from .objects import Function, PreparedLaunch
from .parameters import KernelParameters

if TYPE_CHECKING:
    from .cuda import CudaRuntime


class CudaLaunch(PreparedLaunch):
    """cuLaunchKernelEx with its configuration made; from :meth:`CudaRuntime.prepare_launch`.

    Why through the bindings: on an H200 (driver API 13.0, cuda-bindings 13.3, Python 3.12) the host's median
    was 4.4 to 4.8 us a launch this way, 4.6 to 5.6 for cuLaunchKernel with its eleven arguments, 4.9 for
    cuLaunchKernelEx through ctypes with prepared arguments, and 5.9 to 7.5 for ctypes with argument types.
    """

    __slots__ = ("_address", "_call", "_config", "_function", "_native", "_params", "_runtime")

    def __init__(
        self,
        runtime: CudaRuntime,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: KernelParameters,
        cluster: tuple[int, int, int] | None,
        programmatic: bool,
    ) -> None:
        driver = runtime._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(stream)
        attributes: list[Any] = []
        names = driver.CUlaunchAttributeID
        if cluster is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = attribute.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = cluster
            attributes.append(attribute)
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        self._runtime = runtime
        self._function = function
        self._native = function.native
        self._config = config
        self._params = params  # kept alive: the driver reads its memory
        self._address = params.address
        self._call = driver.cuLaunchKernelEx

    def run(self) -> None:
        """Launch, with the values that the parameter block has now."""
        if self._runtime._forked:
            raise ForkedProcessError("cuda")
        status = self._call(self._config, self._native, self._address, 0)[0]
        if status:
            at = self._config
            self._runtime._launch_failed(
                int(status),
                "cuLaunchKernelEx",
                self._function,
                (at.gridDimX, at.gridDimY, at.gridDimZ),
                (at.blockDimX, at.blockDimY, at.blockDimZ),
                at.sharedMemBytes,
            )

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """Change the grid (blocks in x, y, z) of later runs."""
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
