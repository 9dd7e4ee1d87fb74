"""Operands of `generators` in the memory of a CUDA or ROCm device, through the package's own runtime: no array library is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from generators import Library

import hipgroupgemm as hgg
from hipgroupgemm.operands.views import ArrayView, Device


class DeviceLibrary(Library):
    """Storage is a DeviceArray of bytes; operands are views into it."""

    def __init__(self, device: str, stream: int = 0) -> None:
        self.name, self.device, self.stream = "device", device, stream

    def to_device(self, storage: np.ndarray[Any, Any]) -> Any:
        return hgg.DeviceArray.from_numpy(storage, self.device, self.stream)

    def to_host(self, storage: Any) -> np.ndarray[Any, Any]:
        return storage.to_numpy()

    def view(self, storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        pointer = storage.ptr + offset if 0 not in shape else 0
        return ArrayView(pointer, shape, strides, dtype, Device.of(self.device), "", storage.stream, False, storage)

    def result(self, array: Any) -> np.ndarray[Any, Any]:
        return array.to_numpy()


class HostSizes(DeviceLibrary):
    """The same, for group sizes that stay on the host."""

    def to_device(self, storage: np.ndarray[Any, Any]) -> Any:
        return storage.copy()

    def to_host(self, storage: Any) -> np.ndarray[Any, Any]:
        return storage.copy()

    def view(self, storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.ndarray(shape, dtype, storage, offset, strides)
