"""Arrays of nobody's framework: objects that export host memory by DLPack, or claim device memory by `__cuda_array_interface__`.

Written from the protocols' texts (dmlc.github.io/dlpack, numba's CUDA array interface), not with the package's own code.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
EXTENDED = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8)}


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", Deleter)]


class DLPackVersion(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("version", DLPackVersion),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype, capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]


class DLPackArray:
    """A NumPy array behind DLPack, as some other library would export it.

    Args:
        values: the array.
        versioned: whether `__dlpack__` knows max_version and answers with DLPack 1.x; else it raises TypeError for the argument.
        readonly: sets the flag (1.x only).
        null_strides: leaves strides out, which means row-major.
        byte_offset: how much of the address is given as an offset.
        device: (type, id) as `__dlpack_device__` gives it.
        type_code: (code, bits, lanes) in place of the values' own.
        version: the version that a 1.x answer claims.
    """

    def __init__(
        self,
        values: np.ndarray[Any, Any],
        *,
        versioned: bool = True,
        readonly: bool = False,
        null_strides: bool = False,
        byte_offset: int = 0,
        device: tuple[int, int] = (1, 0),
        type_code: tuple[int, int, int] | None = None,
        version: tuple[int, int] = (1, 0),
    ) -> None:
        self.values, self.versioned, self.device = values, versioned, device
        self.requests: list[dict[str, Any]] = []
        name, kind = values.dtype.name, values.dtype.kind
        code = type_code or ((*EXTENDED[name], 1) if name in EXTENDED else (CODES[kind], values.dtype.itemsize * 8, 1))
        self.shape = (ctypes.c_int64 * max(values.ndim, 1))(*values.shape)
        self.strides = (ctypes.c_int64 * max(values.ndim, 1))(*(stride // values.itemsize for stride in values.strides))
        self.managed: Any = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        if versioned:
            self.managed.version, self.managed.flags = DLPackVersion(*version), int(readonly)
        tensor = self.managed.dl_tensor
        tensor.data = (values.ctypes.data - byte_offset) if values.size else None
        tensor.byte_offset = byte_offset if values.size else 0
        tensor.device, tensor.ndim, tensor.dtype = DLDevice(*device), values.ndim, DLDataType(*code)
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if not null_strides:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        self.requests.append(arguments)
        if not self.versioned and "max_version" in arguments:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned" if self.versioned else b"dltensor", None)


class CudaArray:
    """An object with `__cuda_array_interface__`; `changes` replace entries, None removes one."""

    def __init__(self, shape: Any, typestr: str, pointer: int = 0x7F00_0000_1000, *, readonly: bool = False, **changes: Any) -> None:
        interface: dict[str, Any] = {"shape": shape, "typestr": typestr, "data": (pointer, readonly), "version": 3}
        interface.update(changes)
        self.interface = {name: value for name, value in interface.items() if value is not ...}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface
