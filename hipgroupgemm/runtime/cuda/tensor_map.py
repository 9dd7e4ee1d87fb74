"""Tensor maps (TMA descriptors) for CUDA devices of compute capability 9.0 and later.

A tensor map is 128 bytes that tell the copy engine where a tensor lies and which box of it one copy moves. The driver's
cuTensorMapEncodeTiled builds it, with dimensions innermost first; here they are outermost first, as in NumPy and in Triton's signatures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hipgroupgemm.runtime.cuda.runtime import CudaRuntime

__all__ = ["TensorMapEncoder"]

_ALIGNMENT = 64
# CUtensorMapDataType, bytes
_ELEMENTS = {"u8": (0, 1), "fp16": (6, 2), "fp32": (7, 4), "fp64": (8, 8), "bf16": (9, 2)}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by bytes
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion by bytes


class TensorMapEncoder:
    """Encodes tensor maps of one element type, rank, box and swizzle; the tensor differs from call to call.

    Args:
        runtime: the CUDA runtime.
        element_type: "u8", "fp16", "bf16", "fp32" or "fp64". Elements outside the tensor read as 0.
        box: elements that one copy moves along each dimension, outermost first (1 to 5 dimensions).
        swizzle: bytes: 0 (none), 32, 64 or 128; no less than the box's innermost extent in bytes, unless 0.
        l2_promotion: bytes that the L2 cache fetches at once: 0, 64, 128 or 256.
    """

    def __init__(self, runtime: CudaRuntime, element_type: str, box: Sequence[int], *, swizzle: int = 0, l2_promotion: int = 128) -> None:
        code, itemsize = _ELEMENTS[element_type]
        rank, inner = len(box), box[-1] * itemsize
        if not 1 <= rank <= 5 or any(not 1 <= extent <= 256 for extent in box) or inner % 16 or (swizzle and inner > swizzle):
            raise ValueError(
                f"box: got {tuple(box)} of {element_type} with swizzle {swizzle}; want 1 to 5 dimensions of 1 to 256 elements, the"
                " innermost a multiple of 16 bytes and no wider than the swizzle"
            )
        self.runtime, self.element_type, self.itemsize = runtime, element_type, itemsize
        self.rank, self.box = rank, tuple(box)
        self._dimensions = (ctypes.c_uint64 * rank)()
        self._strides = (ctypes.c_uint64 * max(rank - 1, 1))()
        self._head = (code, rank)
        self._tail = (
            *((ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*([1] * rank))),
            *(0, _SWIZZLES[swizzle], _L2_PROMOTIONS[l2_promotion], 0),
        )
        # through ctypes: 2.0 us a call on an H200, the bindings 3.6, because these arrays are prepared
        self._call = runtime.driver_function("cuTensorMapEncodeTiled")
        self._replace = runtime.driver_function("cuTensorMapReplaceAddress")

    def encode(self, into: int, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        """Write the tensor map of one tensor. One encoder must not be used by two threads at once.

        Args:
            into: host address of 128 bytes at a multiple of 64 (``KernelParameters.blob_address``).
            address: device address of the first element, a multiple of 16.
            shape: extents, outermost first, each 1 to 2^32.
            strides: bytes from one element to the next along every dimension but the innermost, outermost first; multiples of 16 below
                2^40. The innermost is contiguous.

        DeviceError says what the driver refuses, with its rules.
        """
        self.runtime.check_process()
        if len(shape) != self.rank or len(strides) != self.rank - 1:
            raise ValueError(f"shape, strides: got {len(shape)} and {len(strides)} entries; want {self.rank} and {self.rank - 1}")
        self._dimensions[:] = [*reversed(shape)]
        if self.rank > 1:
            self._strides[:] = [*reversed(strides)]
        at = ctypes.c_void_p(address)
        status = self._call(ctypes.c_void_p(into), *self._head, at, self._dimensions, self._strides, *self._tail)
        if status:
            got = f"{self.element_type} at {address:#x}, shape {tuple(shape)}, strides {tuple(strides)} bytes, into {into:#x}"
            wanted = "an address that is a multiple of 16, to one of 64, 1 to 2^32 elements, strides that are multiples of 16 below 2^40"
            raise self.runtime._fail("cuTensorMapEncodeTiled", status, f"got {got}; want {wanted}")

    def replace_address(self, into: int, address: int) -> None:
        """Point an encoded tensor map at another tensor of the same shape and strides."""
        self.runtime.check_process()
        status = self._replace(ctypes.c_void_p(into), ctypes.c_void_p(address))
        if status:
            raise self.runtime._fail("cuTensorMapReplaceAddress", status, f"got {address:#x}; want an address that is a multiple of 16")
