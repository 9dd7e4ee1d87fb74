"""DLPack capsules, read and made with ctypes, for every element type (NumPy's own import takes neither bf16 nor fp8).

Layout and codes are those of dlpack.h 1.0 (https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import ArrayView, Device, packed_strides

__all__ = ["DEVICE_TYPES", "device_of", "export_capsule", "import_capsule"]

DEVICE_TYPES = {1: "cpu", 3: "cpu", 11: "cpu", 2: "cuda", 13: "cuda", 10: "rocm"}
_DEVICE_CODES = {"cpu": 1, "cuda": 2, "rocm": 10}
_FLAG_READ_ONLY = 1
_CODES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(0, bits): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{(1, bits): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{(2, bits): np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{(5, bits): np.dtype(f"complex{bits}") for bits in (64, 128)},
    (4, 16): DTYPES["bfloat16"],
    (6, 8): np.dtype(bool),
    (10, 8): DTYPES["float8_e4m3fn"],
    (11, 8): DTYPES["float8_e4m3fnuz"],
    (12, 8): DTYPES["float8_e5m2"],
    (13, 8): DTYPES["float8_e5m2fnuz"],
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
# inside a capsule's destructor the object has no references left, so there it is handled as a bare address
_is_valid_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"


def device_of(producer: Any, name: str) -> Device:
    """The device that a producer's `__dlpack_device__` names; NotImplementedError for kinds of device not served here."""
    code, index = producer.__dlpack_device__()
    return _device(code, index, name)


def _device(code: int, index: int, name: str) -> Device:
    kind = DEVICE_TYPES.get(int(code))
    if kind is None:
        raise NotImplementedError(f"{name}: lies on a device of DLPack type {int(code)}; wanted CPU, CUDA or ROCm memory")
    return Device(kind, 0 if kind == "cpu" else int(index))


def import_capsule(capsule: Any, name: str) -> ArrayView:
    """What a DLPack capsule describes. The capsule is not consumed: the view keeps it, and with it the memory, alive."""
    if _is_valid(capsule, _VERSIONED):
        versioned = _ManagedVersioned.from_address(_get_pointer(capsule, _VERSIONED))
        if versioned.major != 1:
            raise NotImplementedError(f"{name}: DLPack version {versioned.major}.{versioned.minor}; wanted 0.x or 1.x")
        tensor, readonly = versioned.tensor, bool(versioned.flags & _FLAG_READ_ONLY)
    elif _is_valid(capsule, _PLAIN):
        tensor, readonly = _Managed.from_address(_get_pointer(capsule, _PLAIN)).tensor, False
    else:
        raise TypeError(f"{name}: __dlpack__ gave no DLPack capsule, or one already used")
    code = (tensor.dtype.code, tensor.dtype.bits)
    if tensor.dtype.lanes != 1 or code not in _CODES:
        raise NotImplementedError(
            f"{name}: DLPack type code {code[0]} of {code[1]} bits, {tensor.dtype.lanes} lanes is no supported element type"
        )
    dtype, device = _CODES[code], _device(tensor.device.type, tensor.device.id, name)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = packed_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim])
    pointer = tensor.data + tensor.byte_offset if tensor.data else 0
    return ArrayView(pointer, shape, strides, dtype, device, "", None, readonly, capsule)


_exported: dict[int, Any] = {}


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _forget_untaken(capsule: int) -> None:
    for kind in (_PLAIN, _VERSIONED):
        if _is_valid_at(capsule, kind):  # nobody took it
            _exported.pop(_get_pointer_at(capsule, kind), None)


_release = _DELETER(_forget)
_destroy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget_untaken)


def export_capsule(view: ArrayView, *, versioned: bool, keep: Any) -> Any:
    """A capsule for `view`; `keep` stays alive until the consumer is done with it.

    Args:
        view: what to export; strides must be multiples of the item size.
        versioned: whether the consumer takes DLPack 1.x.
        keep: the object that owns the memory.
    """
    code = next(code for code, dtype in _CODES.items() if dtype == view.dtype)
    count = max(view.ndim, 1)
    shape = (ctypes.c_int64 * count)(*view.shape)
    strides = (ctypes.c_int64 * count)(*(s // view.dtype.itemsize for s in view.strides))
    managed: Any = _ManagedVersioned() if versioned else _Managed()
    if versioned:
        managed.major, managed.minor, managed.flags = 1, 0, _FLAG_READ_ONLY if view.readonly else 0
    tensor = managed.tensor
    tensor.data, tensor.byte_offset, tensor.ndim = view.pointer or None, 0, view.ndim
    tensor.device = _Device(_DEVICE_CODES[view.device.kind], view.device.index)
    tensor.dtype = _DataType(code[0], code[1], 1)
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _release
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, keep)
    return _new(address, _VERSIONED if versioned else _PLAIN, ctypes.cast(_destroy, ctypes.c_void_p))
