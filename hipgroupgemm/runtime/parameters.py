"""Kernel parameters in memory that the driver reads in place, prepared once and updated cheaply.

A launch hands the driver an array with the address of each parameter. Building that array costs more than the
launch itself in Python, so it is built once here, over one block of memory laid out as a C struct would be
(every value at a multiple of its alignment). Both drivers copy the values during the launch call, so a block
can be changed and launched again as soon as the call has returned. One block must not be changed by two
threads at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any

# name: (struct format, bytes); a pointer is an unsigned 64-bit integer on every supported machine
_SCALARS = {
    "ptr": ("Q", 8),
    "i8": ("b", 1),
    "u8": ("B", 1),
    "i16": ("h", 2),
    "u16": ("H", 2),
    "i32": ("i", 4),
    "u32": ("I", 4),
    "i64": ("q", 8),
    "u64": ("Q", 8),
    "f32": ("f", 4),
    "f64": ("d", 8),
}
# the names that Triton's signatures use for the same things
_ALIASES = {"fp32": "f32", "fp64": "f64", "i1": "u8", "u1": "u8"}

BLOCK_ALIGNMENT = 128
"""Bytes. The block starts at a multiple of this, so no parameter can ask for a larger alignment."""


class Blob:
    """A parameter passed by value as raw bytes: a struct, or a tensor map (``Blob(128, 64)``).

    Args:
        nbytes: its size in bytes.
        alignment: a power of two, at most 128.

    Raises:
        ValueError: a size or an alignment out of range.
    """

    __slots__ = ("alignment", "nbytes")

    def __init__(self, nbytes: int, alignment: int = 8) -> None:
        if nbytes < 1:
            raise ValueError(f"nbytes: got {nbytes}; want a size of 1 byte or more")
        if alignment < 1 or alignment & (alignment - 1) or alignment > BLOCK_ALIGNMENT:
            raise ValueError(f"alignment: got {alignment}; want a power of two up to {BLOCK_ALIGNMENT}")
        self.nbytes = nbytes
        self.alignment = alignment

    def __repr__(self) -> str:
        return f"Blob({self.nbytes}, {self.alignment})"


TENSOR_MAP = Blob(128, 64)
"""The kind of a CUtensorMap parameter."""


def _layout_of(kind: str | Blob) -> tuple[str, int, int]:
    """(struct format, bytes, alignment) of one kind."""
    if isinstance(kind, Blob):
        return f"{kind.nbytes}s", kind.nbytes, kind.alignment
    if not isinstance(kind, str):
        raise TypeError(f"kind: got a {type(kind).__name__}; want one of {', '.join(_SCALARS)}, or a Blob")
    name = "ptr" if kind.startswith("*") else _ALIASES.get(kind, kind)
    if name not in _SCALARS:
        raise ValueError(f"kind: got {kind!r}; want one of {', '.join(_SCALARS)}, or a Blob")
    code, size = _SCALARS[name]
    return code, size, size


class KernelParameters:
    """The parameters of one kernel, in order, with storage that outlives the launches.

    Args:
        kinds: one entry a parameter: "ptr", "i8" to "i64", "u8" to "u64", "f32", "f64", or a :class:`Blob`.
            Triton's spellings ("*bf16", "fp32", "i1") are taken too.
        names: one name a parameter, for :meth:`index` and for error texts.

    Attributes:
        address: of the array of addresses, the driver's ``kernelParams`` (host memory).
        buffer_address: of the values, laid out as a C struct (host memory).
        nbytes: size of the values up to the end of the last one.
        offsets: of each value in that struct, in bytes.
        native: for the bindings, which may keep an object for ``address`` here.

    Values start as zeros. ``params[i] = value`` changes one, ``params.set(value, ...)`` all of them at once,
    which costs little more than changing two.
    """

    __slots__ = (
        "_all",
        "_blobs",
        "_pointers",
        "_positions",
        "_slots",
        "_start",
        "_storage",
        "address",
        "buffer_address",
        "kinds",
        "names",
        "native",
        "nbytes",
        "offsets",
        "sizes",
    )

    def __init__(self, kinds: Sequence[str | Blob], names: Sequence[str] | None = None) -> None:
        if names is not None and (len(names) != len(kinds) or len(set(names)) != len(names)):
            raise ValueError(f"names: got {list(names)}; want {len(kinds)} different names, one a parameter")
        self.kinds = tuple(kinds)
        self.names = tuple(names) if names is not None else None
        self._positions = {name: i for i, name in enumerate(names or ())}
        layouts = [_layout_of(kind) for kind in kinds]
        offsets: list[int] = []
        codes = ["="]
        end = 0
        for code, size, alignment in layouts:
            start = -(-end // alignment) * alignment
            codes.append(f"{start - end}x{code}")
            offsets.append(start)
            end = start + size
        self.offsets = tuple(offsets)
        self.sizes = tuple(size for _, size, _ in layouts)
        self.nbytes = end
        self.native: Any = None
        # ctypes aligns no better than malloc does, so the block starts at the first multiple inside a larger
        # one
        self._storage = (ctypes.c_char * (end + BLOCK_ALIGNMENT))()
        base = ctypes.addressof(self._storage)
        self._start = -base % BLOCK_ALIGNMENT
        self.buffer_address = base + self._start
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(self.buffer_address + at for at in offsets))
        self.address = ctypes.addressof(self._pointers)
        self._slots = [(struct.Struct("=" + code), self._start + at) for (code, _, _), at in zip(layouts, offsets, strict=True)]
        self._all = struct.Struct("".join(codes))
        self._blobs = tuple((i, kind.nbytes) for i, kind in enumerate(kinds) if isinstance(kind, Blob))

    def __len__(self) -> int:
        return len(self.kinds)

    def __repr__(self) -> str:
        shown = ", ".join(f"{self._label(i)}={self[i]!r}" for i in range(len(self)))
        return f"KernelParameters({shown})"

    def index(self, name: str) -> int:
        """Position of the parameter called ``name``; ValueError when there is none."""
        try:
            return self._positions[name]
        except KeyError:
            raise ValueError(f"name: got {name!r}; want one of {list(self.names or ())}") from None

    def __setitem__(self, position: int, value: Any) -> None:
        """Set one parameter.

        Raises:
            IndexError: no such parameter.
            TypeError: a value of another type than the kind takes.
            ValueError: a value that its bytes can't hold, or a blob of another size.
        """
        packer, at = self._slots[position]
        try:
            # struct pads short bytes with zeros and cuts long ones, so a blob's size is looked at here
            if isinstance(self.kinds[position], Blob) and len(value) != self.sizes[position]:
                self._refuse(position, value)
            packer.pack_into(self._storage, at, value)
        except (struct.error, OverflowError, TypeError) as error:
            self._refuse(position, value, error)

    def __getitem__(self, position: int) -> Any:
        """The present value of one parameter: an int, a float, or bytes for a blob."""
        packer, at = self._slots[position]
        return packer.unpack_from(self._storage, at)[0]

    def set(self, *values: Any) -> None:
        """Set all parameters, in order. After an error the values are those before or after the call, mixed.

        Raises:
            TypeError: another number of values than parameters, or a value of another type than its kind
                takes.
            ValueError: a value that its bytes can't hold, or a blob of another size.
        """
        try:
            for position, size in self._blobs:
                if len(values[position]) != size:
                    self._refuse(position, values[position])
            self._all.pack_into(self._storage, self._start, *values)
        except (struct.error, OverflowError, TypeError, IndexError):
            if len(values) != len(self.kinds):
                raise TypeError(f"values: got {len(values)}; want {len(self.kinds)}, one a parameter") from None
            for position, value in enumerate(values):
                self[position] = value

    def set_some(self, positions: Iterable[int], values: Iterable[Any]) -> None:
        """Set the parameters at ``positions`` to ``values``, pair by pair."""
        for position, value in zip(positions, values, strict=True):
            self[position] = value

    def blob_address(self, position: int) -> int:
        """Host address of the bytes of one parameter, for a driver call that writes it in place."""
        return self.buffer_address + self.offsets[position]

    def _label(self, position: int) -> str:
        return repr(self.names[position]) if self.names is not None else str(position)

    def _refuse(self, position: int, value: Any, error: Exception | None = None) -> None:
        """Raise what is wrong with ``value``, in this class's words instead of struct's."""
        kind, size = self.kinds[position], self.sizes[position]
        where = f"parameter {self._label(position)} ({kind})"
        if isinstance(kind, Blob):
            if isinstance(value, bytes | bytearray):
                raise ValueError(f"{where}: got {len(value)} bytes; want {size}") from error
            raise TypeError(f"{where}: got a {type(value).__name__}; want {size} bytes") from error
        floating = kind in ("f32", "f64", "fp32", "fp64")
        if not hasattr(value, "__index__") and not (floating and hasattr(value, "__float__")):
            wanted = "a number" if floating else "an integer"
            raise TypeError(f"{where}: got a {type(value).__name__}; want {wanted}") from error
        raise ValueError(f"{where}: got {value!r}; want a value that fits its {size} bytes") from error
