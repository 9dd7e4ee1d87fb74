"""Reads the arrays of a call straight to a key and addresses, without views: NumPy, CuPy and torch, for calls like one that was parsed.

A reader takes a function's arguments by name and lhs's class. It gives a key of all layouts, the addresses by role (of a list a tuple of
them) and the stream, or None for a call that has to be parsed.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.exchange import exchange_reader
from hipgroupgemm.problem.parse import ARRAYS, ROLES

__all__ = ["Read", "Reader", "choose_reader", "readers", "torch_types"]

_MOST_READERS = 256
Read = tuple["Hashable", "dict[str, Any]", int]
Reader = Callable[["dict[str, Any]", Any], "Read | None"]


def _read_numpy(arguments: dict[str, Any], kind: Any) -> Read | None:
    layouts: list[Hashable] = []
    pointers = {}
    for name, role in _ROLES_OF_ARRAYS:
        array = arguments[name]
        if array is None:
            layouts.append(None)
        elif type(array) is kind:
            pointer = array.__array_interface__["data"][0]
            pointers[role] = pointer
            layouts += (pointer & 15, array.shape, array.strides, array.dtype, name != "out" or array.flags.writeable)
        elif not _read_list(array, (kind,), _numpy_array, role, layouts, pointers):
            return None
    return tuple(layouts), pointers, 0


def _read_list(
    entries: Any,
    kinds: tuple[type, ...],
    read: Callable[[Any], tuple[Any, ...]],
    role: str,
    layouts: list[Hashable],
    pointers: dict[str, Any],
) -> bool:
    """Adds a list of arrays of one layout, all with memory: `read` gives one's address and layout. False for what is no such list."""
    if type(entries) not in (list, tuple) or not entries or not ROLES[role].listed:
        return False
    first = read(entries[0])[1:] if type(entries[0]) in kinds else ()
    found = [read(entry) if type(entry) in kinds else (0,) for entry in entries]
    if any(entry[0] == 0 or entry[1:] != first for entry in found):
        return False
    pointers[role] = tuple([entry[0] for entry in found])
    layouts += (len(found), functools.reduce(operator.or_, pointers[role]) & 15, *first)
    return True


def _numpy_array(array: Any) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype, array.flags.writeable


def _read_cupy(arguments: dict[str, Any], kind: Any) -> Read | None:
    layouts: list[Hashable] = []
    pointers = {}
    for name, role in _ROLES_OF_ARRAYS:
        array = arguments[name]
        if array is None:
            layouts.append(None)
        elif type(array) is kind:
            data = array.data
            pointer = pointers[role] = data.ptr
            layouts += (pointer & 15, array.shape, array.strides, array.dtype.num, data.device_id)
        elif not _read_list(array, (kind,), _cupy_array, role, layouts, pointers):
            return None
    return tuple(layouts), pointers, arrays.current_cupy_stream(arguments["lhs"].data.device_id)


def _cupy_array(array: Any) -> tuple[Any, ...]:
    return array.data.ptr, array.shape, array.strides, array.dtype.num, array.data.device_id


def _torch_reader(types: tuple[type, ...]) -> Reader:
    """Reads plain tensors and parameters, where no transformation and no recording of gradients may miss the call."""
    torch: Any = sys.modules["torch"]
    recording, read = torch.is_grad_enabled, exchange_reader(types, _ROLES) or functools.partial(_read_tensors, types)
    transforming = arrays.torch_transforming
    return lambda arguments, _: None if transforming() else read(_operands_of(arguments), recording())


def _read_tensors(types: tuple[type, ...], tensors: tuple[Any, ...], recording: bool) -> Read | None:
    """What `exchange_reader` reads, from Python."""
    layouts: list[Hashable] = []
    pointers = {}
    try:
        for role, tensor in zip(_ROLES, tensors, strict=True):
            if tensor is None:
                layouts.append(None)
            elif type(tensor) in types and not (recording and tensor.requires_grad) and not tensor.is_neg():
                pointer = pointers[role] = tensor.data_ptr()
                layouts += (pointer & 15, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            elif not _read_list(tensor, types, functools.partial(_tensor, recording), role, layouts, pointers):
                return None
        index = tensors[0].get_device()
    except RuntimeError:  # a sparse or nested tensor has no address or no strides
        return None
    return tuple(layouts), pointers, 0 if index < 0 else arrays.current_torch_stream(index)


def _tensor(recording: bool, tensor: Any) -> tuple[Any, ...]:
    if (recording and tensor.requires_grad) or tensor.is_neg():
        return (0,)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_ROLES = tuple("group_sizes" if name == "offs" else name for name in ARRAYS)
_ROLES_OF_ARRAYS = tuple(zip(ARRAYS, _ROLES, strict=True))
_operands_of: Callable[[dict[str, Any]], tuple[Any, ...]] = operator.itemgetter(*ARRAYS)
readers: dict[type, Reader | None] = {}


def torch_types() -> tuple[type, ...]:
    """The classes of tensors that are read; none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    return () if not hasattr(torch, "nn") else (torch.Tensor, torch.nn.Parameter)


def choose_reader(kind: type) -> Reader | None:
    """The reader of calls whose lhs is of this class, noted in `readers`; None where they have to be parsed."""
    found: Reader | None = _read_numpy if kind is np.ndarray else None
    if kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        found = _read_cupy
    elif kind in (types := torch_types()):
        found = _torch_reader(types)
    if len(readers) >= _MOST_READERS:  # a caller that makes classes without end
        readers.clear()
    readers[kind] = found
    return found
