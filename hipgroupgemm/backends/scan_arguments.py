"""The one argument of the device kernels (`device/arguments.h`), filled in from a config and a call.

The kernels hgg_fill, hgg_scan and hgg_zero_uncovered share one 648-byte struct. This module knows its layout and nothing of a backend's own
records, but for the 196 bytes at its end, which the hipBLASLt backend sets.
"""

from __future__ import annotations

import struct
from typing import ClassVar

from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.problem.groups import GroupFault

__all__ = ["FAULT_BYTES", "LISTED", "RECORD_BYTES", "SIZE", "ScanArguments", "fault_from_bytes"]

SIZE = 648
RECORD_BYTES = 196
FAULT_BYTES = 32

LISTED = -(1 << 63)
RAGGED_N, RAGGED_K = 0, 2
_SIZES_NONE, _SIZES_COUNTS, _SIZES_OFFSETS = 0, 1, 2
_INTEGERS = {name: code for code, name in enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))}
_FLOATS = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}
_OVERRIDE_ALPHA_BETA = 3

_SCAN = struct.Struct("<QqqQqqQQQQ8i")
_RECORDS = struct.Struct("<Qi")
_TILES = struct.Struct("<iQQq")
_SCALARS = struct.Struct("<16s16s")
_OPERAND = struct.Struct("<Qqqq")
_MATRIX = struct.Struct("<Qqqqq")
_FINISH = struct.Struct("<qqiii")
_FAULT = struct.Struct("<iiqqq")
_AT_SCAN, _AT_RECORDS, _AT_TILES, _AT_SCALARS = 0, 112, 124, 152
_AT_OPERANDS = {"d": 184, "c": 216, "a": 248, "b": 280, "bias": 312}
_AT_OUT, _AT_C, _AT_FINISH, _AT_RECORD = 344, 384, 424, 452


class ScanArguments:
    """The struct's bytes, for one executable. `bytes` is passed by value at every launch."""

    CELLS: ClassVar[dict[str, int]] = {
        **{"sizes": 0, "group_offset": 24, "group_starts": 48, "group_ends": 56, "covered_range": 64, "fault": 72},
        **{"tiles": 128, "tile_count": 136},
    }
    """Where the scan's addresses lie, by name: offsets in bytes."""
    OPERAND_CELLS: ClassVar[dict[str, int]] = {**_AT_OPERANDS, "out": _AT_OUT, "c of out": _AT_C}
    """Where those of the operands lie, by the names that `set_operand` has, and those of `set_uncovered`."""

    def __init__(self) -> None:
        self.bytes = bytearray(SIZE)

    def set_scan(
        self, config: GroupedGemmConfig, arguments: Arguments, sizes: int, *, starts: int, ends: int, covered_range: int, fault: int
    ) -> None:
        """The scan's inputs and results.

        Args:
            config: the call's config.
            arguments: the call.
            sizes: device address of the sizes or end offsets, laid out as the call's view says.
            starts, ends, covered_range, fault: device addresses of the results, 0 where one is not wanted.
        """
        view, offset = arguments.group_sizes, arguments.group_offset
        batches = config.batch_count if config.sizes_per_batch else 1
        if config.ragged_mode is RaggedDotMode.BATCH:
            extent, strides, kind, code, counts = config.m, (0, 0), _SIZES_NONE, 0, (1, 1, 1)
        else:
            inner = view.strides[-1] if view.shape[-1] > 1 else view.dtype.itemsize
            extent, strides = config.ragged_extent, (inner, batch_stride_of(view.shape, view.strides) if batches > 1 else 0)
            kind, code = _SIZES_OFFSETS if arguments.ends else _SIZES_COUNTS, _INTEGERS[view.dtype.name]
            counts = batches, config.group_count, config.group_total
        where = (0, offset, 0) if isinstance(offset, int) else (offset.pointer, 0, _INTEGERS[offset.dtype.name])
        mode = RAGGED_K if config.ragged_mode is RaggedDotMode.CONTRACTING else RAGGED_N
        results, last = (extent, starts, ends, covered_range, fault), (*counts, mode, _OVERRIDE_ALPHA_BETA)
        _SCAN.pack_into(self.bytes, _AT_SCAN, sizes, *strides, *where[:2], *results, kind, code, where[2], *last)

    def make_all_groups_empty(self, zero: int) -> None:
        """After `set_scan`: every size is the 8 zero bytes at this device address. Faults are not looked for again."""
        fields = list(_SCAN.unpack_from(self.bytes, _AT_SCAN))
        fields[0:3] = [zero, 0, 0]
        fields[9:12] = [0, _SIZES_COUNTS, _INTEGERS["int64"]]
        _SCAN.pack_into(self.bytes, _AT_SCAN, *fields)

    def set_records(self, records: int, count: int) -> None:
        """Where hgg_fill writes how many records."""
        _RECORDS.pack_into(self.bytes, _AT_RECORDS, records, count)

    def set_tiles(self, block_rows: int, tiles: int, tile_count: int, capacity: int) -> None:
        """Where hgg_scan writes the table of tiles of `block_rows` rows, and their number."""
        _TILES.pack_into(self.bytes, _AT_TILES, block_rows, tiles, tile_count, capacity)

    def set_scalars(self, alpha: float, beta: float, *, double: bool) -> None:
        """alpha and beta, as float64 where the computation is, else as float32."""
        code = "<d" if double else "<f"
        _SCALARS.pack_into(self.bytes, _AT_SCALARS, struct.pack(code, alpha), struct.pack(code, beta))

    def set_operand(self, which: str, base: int, row: int, group: int, batch: int) -> None:
        """Where the records find operand "a", "b", "c", "d" or "bias": base and strides a row, group and batch entry, in bytes.

        A group stride of LISTED: base is the device address of a table of the groups' bases.
        """
        _OPERAND.pack_into(self.bytes, _AT_OPERANDS[which], base, row, group, batch)

    def set_uncovered(self, config: GroupedGemmConfig, out: int, c: int) -> None:
        """out and c for hgg_zero_uncovered, or the tables of their addresses where they are lists."""
        size = FLOAT_BYTES[config.type_d]
        for at, base, (group, batch, rows, columns) in ((_AT_OUT, out, config.output_strides), (_AT_C, c, config.c_strides)):
            step = LISTED if config.out_listed else group * size
            _MATRIX.pack_into(self.bytes, at, base, rows * size, columns * size, step, batch * size)
        kind = _FLOATS[config.type_d]
        _FINISH.pack_into(self.bytes, _AT_FINISH, config.m, config.n, config.batch_count, kind, kind)

    def set_record(self, record: bytes) -> None:
        """The 196 bytes that every record starts from."""
        self.bytes[_AT_RECORD : _AT_RECORD + RECORD_BYTES] = record


def batch_stride_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The one stride (bytes) along all axes of sizes but the last, which a config has found to merge into one axis."""
    for extent, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if extent > 1:
            return stride
    return 0


def fault_from_bytes(raw: bytes) -> GroupFault | None:
    """The fault that a device has kept, or None."""
    kind, batch, group, wanted, left = _FAULT.unpack(raw)
    if kind == 0:
        return None
    name = {1: "group_sizes", 2: "group_sizes", 3: "offs", 4: "group_offset"}[kind]
    return GroupFault(name, batch, int(group), wanted, left)
