"""Device memory as an array, for callers that have no array library of their own; and the allocator behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hipgroupgemm.operands import dlpack
from hipgroupgemm.operands.dtypes import dtype_of
from hipgroupgemm.operands.views import ArrayView, Device, packed_strides
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.memory import allocate, set_allocator
from hipgroupgemm.runtime.streams import normalize_stream, protocol_stream

__all__ = ["DeviceArray", "set_allocator"]


class DeviceArray:
    """A row-major array in the memory of a CUDA or ROCm device.

    It exports `__cuda_array_interface__` (CUDA only, and not for bf16 and fp8, which that interface cannot name) and DLPack, so CuPy,
    torch, JAX and Numba take it without a copy. Freed in the order of its stream when the last reference goes.

    Attributes:
        shape: extents. dtype: NumPy dtype. device: where it lies. stream: the stream that its contents are produced on (a handle).
        ptr: device address; 0 without elements.
    """

    def __init__(self, memory: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device, stream: int) -> None:
        self._memory = memory
        self.shape, self.dtype, self.device, self.stream = shape, dtype, device, stream
        self.ptr: int = memory.ptr

    @classmethod
    def empty(cls, shape: Any, dtype: Any, device: Device | str, stream: Any = 0) -> DeviceArray:
        """An uninitialised array.

        Args:
            shape: extents. dtype: anything `numpy.dtype` takes, "bfloat16" included.
            device: "cuda:0", "rocm:0" or a Device. stream: where it will be used first, a stream object or handle.

        Raises:
            ValueError: the device is a CPU; use NumPy there.
        """
        where, kind = Device.of(device), dtype_of(dtype)
        if where.kind == "cpu":
            raise ValueError("device=cpu: a DeviceArray lies on a GPU; use numpy.empty")
        extents = tuple(int(extent) for extent in shape)
        handle = normalize_stream(where.kind, stream)
        nbytes = int(np.prod(extents, dtype=np.int64)) * kind.itemsize
        return cls(allocate(get_runtime(where.kind), nbytes, where.index, handle), extents, kind, where, handle)

    @classmethod
    def from_numpy(cls, values: Any, device: Device | str, stream: Any = 0) -> DeviceArray:
        """A copy of a host array. Waits until it is there."""
        host = np.ascontiguousarray(values)
        made = cls.empty(host.shape, host.dtype, device, stream)
        made._copy(made.ptr, host.ctypes.data, host.nbytes)
        return made

    def _copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copies between this array and the host, and waits for it."""
        if nbytes:
            runtime = get_runtime(self.device.kind)
            with runtime.use_device(self.device.index):
                runtime.memcpy_async(destination, source, nbytes, self.stream)
                runtime.synchronize_stream(self.stream)

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host. Waits for the array's stream."""
        host: np.ndarray[Any, Any] = np.empty(self.shape, self.dtype)
        self._copy(host.ctypes.data, self.ptr, host.nbytes)
        return host

    def view(self) -> ArrayView:
        """This array as the package's own view."""
        strides = packed_strides(self.shape, self.dtype.itemsize)
        return ArrayView(self.ptr, self.shape, strides, self.dtype, self.device, "", self.stream, False, self)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, see https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
        if self.device.kind != "cuda":
            raise AttributeError("__cuda_array_interface__: the array is on ROCm; use DLPack")
        if self.dtype.kind == "V" or self.dtype.isbuiltin != 1:
            raise AttributeError(f"__cuda_array_interface__: cannot name {self.dtype.name}; use DLPack")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),
            "version": 3,
            "strides": None,
            "stream": protocol_stream("cuda", self.stream),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type (2 CUDA, 10 ROCm) and index."""
        return (2 if self.device.kind == "cuda" else 10, self.device.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule; the consumer's stream waits for this array's. -1 asks for no waiting."""
        if copy:
            raise BufferError("copy=True: no copy is made; copy in the consumer")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"dl_device={dl_device}: the array is on {self.device} and is not moved")
        if stream != -1:
            consumer = normalize_stream(self.device.kind, stream)
            if consumer != self.stream:
                order_streams(self.device, self.stream, consumer)
        versioned = max_version is not None and max_version[0] >= 1
        return dlpack.export_capsule(self.view(), versioned=versioned, keep=self)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name} {self.shape} on {self.device}>"


def order_streams(device: Device, first: int, second: int) -> None:
    """Makes what is launched on stream `second` from now on wait for what is on stream `first` now."""
    runtime = get_runtime(device.kind)
    with runtime.use_device(device.index):
        event = runtime.create_event(device.index)
        try:
            runtime.record_event(event, first)
            runtime.wait_event(second, event)
        finally:
            runtime.destroy_event(event)
