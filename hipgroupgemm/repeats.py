"""Repeated calls: what a call with the very same operands came to before, so that it need not be looked at again.

A training step or a decoding loop makes the same call over and over: the same arrays, or arrays of the same layout in the same recycled
memory. Everything that the checks look at is in the key below (addresses, layouts, types, devices, settings and the current stream),
so an equal key has an equal outcome. Only the cases that need nothing else are keyed: CuPy arrays and torch tensors on a GPU, sizes
there as well, no stream, workspace or check asked for.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.calls import Operands
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.views import ArrayView

__all__ = ["Repeat", "Repeats", "key_of"]

_LIMIT = 512
_SCALARS = (int, float, type(None))
_Reader = Callable[[Any], "tuple[Hashable, ...] | None"]


def _read_cupy(array: Any) -> tuple[Hashable, ...] | None:
    data = array.data
    return (data.ptr, array.shape, array.strides, array.dtype, data.device_id)


def _read_torch(tensor: Any) -> tuple[Hashable, ...] | None:
    if not tensor.is_cuda or tensor.requires_grad or tensor.is_neg() or tensor.is_conj():
        return None  # on the CPU, or something that has to be refused or thought about
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.layout, tensor.get_device())


def _stream_cupy(_: tuple[Hashable, ...]) -> int:
    return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


def _stream_torch(signature: tuple[Hashable, ...]) -> int:
    return int(sys.modules["torch"].cuda.current_stream(signature[-1]).cuda_stream)


_Pair = tuple[_Reader, Callable[["tuple[Hashable, ...]"], int]]
_readers: dict[Any, _Pair | None] = {}


def _reader_of(kind: type) -> _Pair | None:
    adapter = arrays._adapter(kind)
    found: _Pair | None = None
    if adapter is arrays._cupy_view:
        found = (_read_cupy, _stream_cupy)
    elif adapter is arrays._torch_view:
        found = (_read_torch, _stream_torch)
    _readers[kind] = found
    return found


def key_of(
    operands: tuple[Any, Any, Any, Any, Any, Any], alpha: Any, beta: Any, group_offset: Any, rest: tuple[Hashable, ...]
) -> tuple[Hashable, ...] | None:
    """The key of a call, or None for a call that is always looked at.

    Args:
        operands: lhs, rhs, sizes or end offsets, out, c, bias; the last three may be None.
        alpha, beta, group_offset: as given.
        rest: hashable settings that tell calls apart.
    """
    kind: Any = type(operands[0])
    reader = _readers[kind] if kind in _readers else _reader_of(kind)
    if reader is None or type(alpha) not in _SCALARS or type(beta) not in _SCALARS or type(group_offset) not in (int, type(None)):
        return None
    read, stream_of = reader
    key: list[Hashable] = [kind]
    for operand in operands:
        if operand is None:
            key.append(None)
            continue
        if type(operand) is not kind:
            return None
        signature = read(operand)
        if signature is None:
            return None
        key.append(signature)
    first: Any = key[1]
    # 1 == 1.0 here, and both mean the same
    return (*key, alpha, beta, group_offset, rest, stream_of(first))


class Repeat:
    """One call, ready to be made again.

    Attributes:
        arguments: what the backend gets; nothing in it keeps an array alive.
        holder: whoever runs it (a plan, or a plan cache's entry).
    """

    __slots__ = ("_device", "_dtype", "_shape", "arguments", "holder", "like")

    def __init__(self, operands: Operands, config: GroupedGemmConfig, made: bool, holder: Any) -> None:
        arguments = operands.arguments(config)
        self.arguments: Arguments = dataclasses.replace(arguments, group_sizes=dataclasses.replace(arguments.group_sizes, owner=None))
        self.holder = holder
        self.like: ArrayView = dataclasses.replace(operands.lhs, owner=None)
        self._device = operands.device
        self._shape: tuple[int, ...] | None = operands.output.shape if made else None
        self._dtype: np.dtype[Any] | None = operands.output.dtype if made else None

    def output(self) -> tuple[Any, int]:
        """A new array for the result, and its address."""
        shape, dtype = self._shape, self._dtype
        if shape is None or dtype is None:
            raise RuntimeError("out: was given, and is not made")
        if self.like.framework == "cupy":
            cupy: Any = sys.modules["cupy"]
            if cupy.cuda.runtime.getDevice() == self._device.index:
                array = cupy.empty(shape, dtype)
                return array, int(array.data.ptr)
        made, view = arrays.empty(shape, np.dtype(dtype), self.like, self._device, self.arguments.stream)
        return made, view.pointer

    def written(self, out: Any) -> Any:
        """The caller's out, once it has been written: see `arrays.written`."""
        if self.like.framework == "torch":
            return arrays.written(out, dataclasses.replace(self.like, owner=out))
        return out


class Repeats(dict[Any, Repeat]):
    """Calls by key; bounded, all are forgotten when there are too many."""

    def remember(self, key: Any, operands: Operands, config: GroupedGemmConfig, *, made: bool, holder: Any) -> None:
        """Keeps a call that has just been made."""
        o = operands
        if o.sizes.device.kind == "cpu" or o.device.kind == "cpu" or 0 in o.output.shape:
            return
        if len(self) >= _LIMIT:
            self.clear()
        self[key] = Repeat(operands, config, made, holder)
