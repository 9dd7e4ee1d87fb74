"""Kernel parameters in memory that the driver reads in place, prepared once and updated cheaply.

A launch hands the driver an array with the address of each parameter. Building that array costs more than the launch itself in Python, so
it is built once here, over one block of memory laid out as a C struct would be (every value at a multiple of its alignment). Both drivers
copy the values during the launch call, so a block can be changed and launched again as soon as the call has returned. One block must not
be changed by two threads at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BLOCK_ALIGNMENT", "TENSOR_MAP", "Blob", "KernelParameters"]

# struct's format of each scalar kind; a pointer is an unsigned 64-bit integer on every supported machine
_FORMATS = {
    "ptr": "Q",
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "f32": "f",
    "f64": "d",
}
# the names that Triton's signatures use for the same things
_ALIASES = {"fp32": "f32", "fp64": "f64", "i1": "u8", "u1": "u8"}

BLOCK_ALIGNMENT = 128
"""Bytes. The block starts at a multiple of this, so no parameter can ask for a larger alignment."""


@dataclass(frozen=True)
class Blob:
    """A parameter passed by value as raw bytes: a struct, or a tensor map (``Blob(128, 64)``)."""

    nbytes: int
    alignment: int = 8  # a power of two, at most 128


TENSOR_MAP = Blob(128, 64)
"""The kind of a CUtensorMap parameter."""


def _layout_of(kind: str | Blob) -> tuple[str, int, int]:
    """(struct format, bytes, alignment) of one kind."""
    if isinstance(kind, Blob):
        return f"{kind.nbytes}s", kind.nbytes, kind.alignment
    code = _FORMATS.get("ptr" if kind.startswith("*") else _ALIASES.get(kind, kind))
    if code is None:
        raise ValueError(f"kind: got {kind!r}; want one of {', '.join(_FORMATS)}, or a Blob")
    size = struct.calcsize("=" + code)
    return code, size, size


class KernelParameters:
    """The parameters of one kernel, in order, with storage that outlives the launches.

    Args:
        kinds: one entry for each parameter: "ptr", "i8" to "i64", "u8" to "u64", "f32", "f64", or a :class:`Blob`. Triton's spellings
            ("*bf16", "fp32", "i1") are taken too.
        names: one name for each parameter, for :meth:`index` and for error texts.

    Attributes:
        address: of the array of addresses, the driver's ``kernelParams``; native: an object of the bindings for it (host memory).
        buffer_address, nbytes, offsets: of the values, laid out as a C struct in host memory.

    Values start as zeros. ``params[i] = value`` changes one, ``params.set(value, ...)`` all of them.
    """

    def __init__(self, kinds: Sequence[str | Blob], names: Sequence[str] | None = None) -> None:
        self.kinds, self.names = tuple(kinds), tuple(names or map(str, range(len(kinds))))
        layouts = [_layout_of(kind) for kind in kinds]
        offsets: list[int] = []
        end = 0
        for _, size, alignment in layouts:
            offsets.append(-(-end // alignment) * alignment)
            end = offsets[-1] + size
        self.offsets, self.nbytes = tuple(offsets), end
        self.native: Any = None
        # ctypes aligns no better than malloc does, so the block starts at the first multiple inside a larger one
        self._storage = (ctypes.c_char * (end + BLOCK_ALIGNMENT))()
        base = ctypes.addressof(self._storage)
        start = -base % BLOCK_ALIGNMENT
        self.buffer_address = base + start
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(self.buffer_address + at for at in offsets))
        self.address = ctypes.addressof(self._pointers)
        self._slots = [(struct.Struct("=" + code), start + at) for (code, _, _), at in zip(layouts, offsets, strict=True)]

    def __len__(self) -> int:
        return len(self.kinds)

    def index(self, name: str) -> int:
        """Position of the parameter called ``name``; ValueError when there is none."""
        return self.names.index(name)

    def __setitem__(self, position: int, value: Any) -> None:
        """Set one parameter; ValueError for a value that its kind can't hold."""
        packer, at = self._slots[position]
        try:
            # struct pads short bytes with zeros and cuts long ones, so a blob's size is looked at here
            if isinstance(self.kinds[position], Blob) and len(value) != packer.size:
                raise TypeError
            packer.pack_into(self._storage, at, value)
        except (struct.error, OverflowError, TypeError) as error:
            where = f"parameter {self.names[position]} ({self.kinds[position]})"
            raise ValueError(f"{where}: got {value!r}; want a value of its {packer.size} bytes") from error

    def __getitem__(self, position: int) -> Any:
        """The present value of one parameter: an int, a float, or bytes for a blob."""
        packer, at = self._slots[position]
        return packer.unpack_from(self._storage, at)[0]

    def set(self, *values: Any) -> None:
        """Set all parameters, in order; ValueError for another number of values, and for one that does not fit."""
        for position, value in zip(range(len(self.kinds)), values, strict=True):
            self[position] = value

    def blob_address(self, position: int) -> int:
        """Host address of the bytes of one parameter, for a driver call that writes it in place."""
        return self.buffer_address + self.offsets[position]
