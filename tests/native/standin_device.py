"""The stand-in HIP runtime through ctypes: memory, streams, faults."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Device:
    """Device memory as ints. Everything allocated here stays until ``free`` or the end of the process."""

    def __init__(self) -> None:
        self.hip = ctypes.CDLL("libamdhip64.so.6")
        # Only the stand-in has it: these tests must never reach a real runtime by mistake.
        self._take_fault = self.hip.hipStandinClearFault

    def check(self, error: int, call: str) -> None:
        if error:
            raise RuntimeError(f"{call}: HIP error {error}")

    def take_fault(self) -> int:
        """Forget a kernel's fault; the error that it left, 0 if none."""
        return int(self._take_fault())

    def malloc(self, nbytes: int) -> int:
        out = ctypes.c_void_p()
        self.check(self.hip.hipMalloc(ctypes.byref(out), ctypes.c_size_t(nbytes)), "hipMalloc")
        return out.value or 0

    def free(self, address: int) -> None:
        self.check(self.hip.hipFree(ctypes.c_void_p(address)), "hipFree")

    def write(self, address: int, array: Array) -> None:
        data = np.ascontiguousarray(array)
        self.check(
            self.hip.hipMemcpy(ctypes.c_void_p(address), ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes), 1),
            "hipMemcpy",
        )

    def upload(self, array: Array) -> int:
        address = self.malloc(max(array.nbytes, 1))
        if array.nbytes:
            self.write(address, array)
        return address

    def read(self, address: int, count: int, dtype: npt.DTypeLike) -> Array:
        out = np.empty(count, dtype)
        if out.nbytes:
            self.check(
                self.hip.hipMemcpy(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(address), ctypes.c_size_t(out.nbytes), 2),
                "hipMemcpy",
            )
        return out

    def pinned(self, nbytes: int) -> int:
        out = ctypes.c_void_p()
        self.check(self.hip.hipHostMalloc(ctypes.byref(out), ctypes.c_size_t(nbytes), 0), "hipHostMalloc")
        return out.value or 0

    def stream(self) -> int:
        out = ctypes.c_void_p()
        self.check(self.hip.hipStreamCreate(ctypes.byref(out)), "hipStreamCreate")
        return out.value or 0

    def bytes_in_use(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.check(self.hip.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "hipMemGetInfo")
        return total.value - free.value
