"""Launches made again with operands at other addresses, by one call into C (`include/launches.h`).

In Python the same takes a call for the context, one for the capture, one for every tensor map and one for every launch: on an H200 about
12 us, where the C code takes the driver's own 3.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hipgroupgemm.native import include_folder
from hipgroupgemm.runtime.host_code import HostCodeError, compile_host_code, load_host_code

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime
    from hipgroupgemm.runtime.objects import PreparedLaunch

__all__ = ["LaunchList", "Move", "Replay", "make_replay", "replay_unavailable"]

_CAPTURING = 1
_LAUNCH = 5
_CALLS = {2: "CtxGetCurrent", 3: "CtxSetCurrent", 4: "TensorMapReplaceAddress"}


class Move(NamedTuple):
    """Where an operand's address goes.

    Attributes:
        cell: host address of the 8 bytes, or of the tensor map.
        slot: the operand's place in the addresses. offset: bytes that are added to its address.
    """

    cell: int
    slot: int
    is_tensor_map: bool = False
    offset: int = 0


class _Driver(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("context", "get_current", "set_current", "is_capturing", "replace_address", "launch")),
        *((name, ctypes.c_int32) for name in ("device", "is_hip")),
    )


class _Move(ctypes.Structure):
    _fields_ = (
        *(("cell", ctypes.c_void_p), ("held", ctypes.c_uint64), ("offset", ctypes.c_uint64)),
        *(("slot", ctypes.c_uint32), ("is_tensor_map", ctypes.c_uint32)),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("function", "parameters")),
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block")),
        *((name, ctypes.c_uint32) for name in ("shared_bytes", "kind")),
    )


class _Launches(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("driver", "stream", "moves", "launches")),
        *((name, ctypes.c_uint32) for name in ("move_count", "launch_count")),
    )


@functools.lru_cache(1)
def _replay_function() -> Any:
    """The C function, or why it cannot be had."""
    header = (Path(include_folder()) / "launches.h").read_text(encoding="utf-8")
    source = (
        f'{header}\n__attribute__((visibility("default"))) int64_t hgg_replay_launches(const hgg_launches *list, const uint64_t *addresses)'
        "{ return hgg_replay(list, list->stream, addresses, 1); }\n"
    )
    try:
        function = load_host_code(compile_host_code(source, "c"), "hipgroupgemm-launches").hgg_replay_launches
    except HostCodeError as error:
        return str(error)
    function.restype = ctypes.c_int64
    return function


def replay_unavailable() -> str | None:
    """Why launches are made from Python, one by one; None where they need not be."""
    function = _replay_function()
    return function if isinstance(function, str) else None


def make_replay(
    runtime: Runtime, device: int, stream: int, moves: Sequence[Move], held: Sequence[int], launches: Sequence[PreparedLaunch]
) -> Replay | None:
    """A `Replay`; None where launches are made from Python."""
    if replay_unavailable() is not None:
        return None
    try:
        return Replay(runtime, device, stream, moves, held, launches)
    except (NotImplementedError, AttributeError):  # a driver too old to have one of the functions
        return None


class LaunchList:
    """A C list of prepared launches, and of the places where addresses go in their parameters: `hgg_launches` in `include/launches.h`.

    Args:
        runtime, device, stream: where they run.
        moves: what changes. held: the addresses that are there now, by place; none where they are not known.
        launches: prepared launches or library calls, in order; this keeps them alive, and their parameters with them.

    Attributes:
        address: host address of the list.

    Raises:
        NotImplementedError, AttributeError: a driver too old to have one of the functions.
    """

    def __init__(
        self, runtime: Runtime, device: int, stream: int, moves: Sequence[Move], held: Sequence[int], launches: Sequence[Any]
    ) -> None:
        self.launches = tuple(launches)
        numbers, names = runtime.launch_functions(device)
        library = ctypes.CDLL(runtime.library)
        functions = {field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for field, name in names.items()}
        self._driver = _Driver(**numbers, **functions)
        there = [held[move.slot] + move.offset if held else 0 for move in moves]
        described = (_Move(m.cell, at, m.offset, m.slot, m.is_tensor_map) for m, at in zip(moves, there, strict=True))
        self._moves = (_Move * max(1, len(moves)))(*described)
        self._made = (_Launch * max(1, len(launches)))(*(_Launch(*launch.describe()) for launch in launches))
        self._list = _Launches(
            ctypes.addressof(self._driver), stream, ctypes.addressof(self._moves), ctypes.addressof(self._made), len(moves), len(launches)
        )
        self.address = ctypes.addressof(self._list)


class Replay:
    """A `LaunchList` that Python runs; arguments as there."""

    def __init__(
        self, runtime: Runtime, device: int, stream: int, moves: Sequence[Move], held: Sequence[int], launches: Sequence[PreparedLaunch]
    ) -> None:
        self._runtime = runtime
        self._list = LaunchList(runtime, device, stream, moves, held, launches)
        self._call = _replay_function()
        self._addresses = (ctypes.c_uint64 * max(1, len(held)))()
        self._pack = struct.Struct(f"={len(held)}Q").pack_into
        self._arguments = ctypes.c_void_p(self._list.address), ctypes.byref(self._addresses)

    def run(self, addresses: Sequence[int]) -> bool:
        """Launches with operands at these addresses; false, with nothing done, where the stream is under graph capture.

        Raises:
            DeviceError: the driver refuses. ForkedProcessError: this process was forked.
        """
        if self._runtime._forked:
            self._runtime.check_process()
        self._pack(self._addresses, 0, *addresses)
        result = self._call(*self._arguments)
        if result == 0:
            return True
        if result == _CAPTURING:
            return False
        where, call = divmod(result, 8)
        status, number = divmod(where, 32)
        if call == _LAUNCH:
            self._list.launches[number].fail(status)
        raise self._runtime._fail(_CALLS[call], status)
