"""Reading a call's torch tensors in one call into C, through DLPack's C exchange API, which torch has since 2.10.

Asking a tensor for its address, shape, strides, type and device costs a call of Python's each: for the four arrays of a call 7 us on an
H200's host, in C 1 us (`include/exchange.h`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hipgroupgemm.native import include_folder
from hipgroupgemm.runtime.host_code import HostCodeError, compile_host_code, load_host_code

__all__ = ["exchange_reader"]

Reader = Callable[[tuple[Any, ...], bool], "tuple[bytes, dict[str, Any], int] | None"]

_SOURCE = """
__attribute__((visibility("default")))
hgg_object *hgg_read(const hgg_exchange *api, hgg_object *operands, hgg_object *roles, hgg_object *types, int recording, int lists) {
    return hgg_read_operands(api, operands, roles, types, recording, lists);
}
"""


@functools.lru_cache(1)
def _read_function() -> Any:
    """The C function; None where it cannot be had."""
    source = (Path(include_folder()) / "exchange.h").read_text(encoding="utf-8") + _SOURCE
    try:
        library = load_host_code(compile_host_code(source, "c"), "hipgroupgemm-exchange", ctypes.PyDLL)
    except HostCodeError:
        return None
    function = library.hgg_read
    function.argtypes, function.restype = (ctypes.c_void_p, *[ctypes.py_object] * 3, ctypes.c_int, ctypes.c_int), ctypes.py_object
    return function


def exchange_reader(types: tuple[type, ...], roles: tuple[str, ...], lists: Sequence[str] = ()) -> Reader | None:
    """Reads torch tensors of exactly these classes, in the order of the roles; None without the API or a C compiler.

    Operands whose role is in `lists` may be lists or tuples of tensors of one layout; the address is then a tuple of addresses.

    The reader takes tensors, or None for one that is not there, and whether gradients are recorded. It returns a key for everything but the
    addresses, the addresses by role, and torch's current stream on the first one's device (0 on a CPU); None for tensors that have no
    memory, whose gradients are recorded, or whose negation is pending.
    """
    capsule = getattr(types[0], "__dlpack_c_exchange_api__", None)
    if capsule is None or _read_function() is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    try:
        table = pointer(capsule, b"dlpack_exchange_api")
    except ValueError:
        return None
    head = (ctypes.c_uint32 * 2).from_address(table)
    entries = (ctypes.c_void_p * 7).from_address(table)
    if head[0] != 1 or not entries[5] or not entries[6]:
        return None
    function, mask = _read_function(), sum(1 << place for place, role in enumerate(roles) if role in lists)
    return lambda tensors, recording: function(table, tensors, roles, types, recording, mask)
