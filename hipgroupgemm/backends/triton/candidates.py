"""The algorithms: which tiles, stages, warps and schedules there are, which of them can run a config, and which is the best guess."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from hipgroupgemm.backends.triton.compiler import Target
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode

__all__ = ["Candidate", "Machine", "all_candidates", "copies_reason", "ordered"]

_INT32 = 1 << 31


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the choice depends on: the target, multiprocessors, and shared memory a block can get (bytes)."""

    target: Target
    multiprocessors: int
    shared_memory: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One algorithm.

    Attributes:
        kernel: "hopper" (copy engine, warp-specialised) or "portable".
        bm, bn, bk: the tile: rows and columns of out, and the step along k.
        warps: that multiply; the copy-engine kernels have one consumer of four warps or more of them. stages: of the pipeline.
        subtiles: pieces in which the copy engine stores a finished tile, 0: it is stored from registers. buffers: that the pieces go
            through; 2 from registers: past the caches. blocks: a multiprocessor.
        swap: computes the tile's transpose, so that few rows fill the matrix unit's narrow side.
        split: shares of k in CONTRACTING.
        extra: further options of Triton's compile.
    """

    kernel: str
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    subtiles: int = 1
    blocks: int = 1
    swap: bool = False
    split: int = 1
    buffers: int = 1
    extra: tuple[tuple[str, Any], ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """Readable and unique: tma_128x256x64_w8_s4_e2_b1, ptr_32x128x64_w4_s3_swap."""
        parts = [
            "tma" if self.kernel == "hopper" else "ptr",
            f"{self.bm}x{self.bn}x{self.bk}",
            f"w{self.warps}",
            f"s{self.stages}",
        ]
        if self.kernel == "hopper":
            parts.append(f"e{self.subtiles}" + (f"x{self.buffers}" if self.buffers > 1 else ""))
        parts.append(f"b{self.blocks}")
        parts += [f"{key.replace('matrix_instr_nonkdim', 'mfma').replace('waves_per_eu', 'wpe')}{value}" for key, value in self.extra]
        if self.swap:
            parts.append("swap")
        if self.split > 1:
            parts.append(f"split{self.split}")
        return "_".join(parts)

    def shared_bytes(self, operand_bytes: int, out_bytes: int) -> int:
        """Shared memory of the hopper kernels, without the tables of those that scan."""
        ring = self.stages * ((self.bm + self.bn) * self.bk * operand_bytes + 48)  # barriers and notes, too
        if self.subtiles == 0:  # on the way to whole rows a tile passes through shared memory
            return ring + self.bm * (self.bn + 8) * out_bytes + 2048
        return ring + self.bm * self.bn * self.buffers // self.subtiles * out_bytes + 256


_H = functools.partial(Candidate, "hopper")
_P = functools.partial(Candidate, "portable")

_HOPPER_ROWS = (
    # bm, bn, bk, warps, stages, subtiles, blocks
    _H(64, 128, 64, 4, 6, 1, 1),
    _H(64, 128, 64, 4, 4, 1, 2),
    _H(64, 128, 64, 4, 3, 1, 2),
    _H(64, 128, 128, 4, 2, 1, 2),
    _H(64, 256, 64, 4, 4, 1, 1),
    _H(64, 256, 64, 4, 2, 2, 2),
    _H(64, 64, 64, 4, 6, 1, 2),
    _H(128, 128, 64, 8, 6, 1, 1),
    _H(128, 128, 64, 8, 5, 1, 1),
    _H(128, 128, 64, 8, 6, 2, 1, buffers=2),
    _H(128, 128, 128, 8, 3, 1, 1),
    _H(128, 128, 64, 4, 3, 2, 2),
    _H(128, 256, 64, 8, 4, 2, 1),
    _H(128, 256, 64, 8, 3, 1, 1),
    _H(128, 256, 64, 8, 3, 2, 1, buffers=2),
    _H(192, 256, 64, 12, 3, 2, 1),
    _H(192, 128, 64, 12, 4, 1, 1),
    _H(192, 128, 64, 12, 5, 2, 1),
    _H(192, 128, 64, 12, 4, 2, 1, buffers=2),
)
_HOPPER_SLABS = (
    _H(128, 128, 32, 4, 4, 1, 2),
    _H(128, 128, 32, 4, 5, 2, 2),
    _H(64, 128, 32, 4, 4, 1, 3),
    _H(64, 256, 32, 4, 3, 1, 2),
    _H(128, 256, 32, 8, 5, 1, 1),
    _H(128, 256, 32, 8, 5, 2, 1, buffers=2),
    _H(128, 256, 32, 8, 7, 2, 1),
    _H(128, 256, 16, 8, 6, 1, 1),
    _H(128, 256, 64, 8, 3, 1, 1),
    _H(128, 256, 64, 8, 4, 2, 1),
    _H(256, 128, 32, 8, 5, 1, 1),
    _H(128, 128, 32, 8, 4, 1, 1),
    _H(128, 128, 32, 8, 6, 2, 1, buffers=2),
    _H(128, 128, 32, 8, 3, 1, 2),
    _H(128, 128, 32, 8, 3, 2, 2, buffers=2),
    _H(128, 128, 64, 8, 5, 1, 1),
    _H(128, 128, 64, 8, 5, 2, 1, buffers=2),
    _H(192, 256, 64, 12, 3, 2, 1),
    _H(192, 256, 32, 12, 4, 1, 1),
    _H(192, 256, 32, 12, 4, 2, 1, buffers=2),
    _H(192, 256, 32, 12, 6, 2, 1),
    _H(192, 128, 32, 12, 6, 1, 1),
    _H(192, 128, 32, 12, 6, 2, 1, buffers=2),
    _H(192, 128, 64, 12, 4, 1, 1),
    _H(128, 256, 32, 8, 5, 0, 1),
    _H(128, 256, 32, 8, 5, 0, 1, buffers=2),
    _H(128, 256, 64, 8, 3, 0, 1),
    _H(128, 128, 32, 8, 6, 0, 1),
    _H(128, 128, 64, 8, 5, 0, 1),
    _H(192, 256, 32, 12, 4, 0, 1),
    _H(192, 128, 32, 12, 6, 0, 1),
    _H(64, 256, 32, 4, 3, 0, 2),
    _H(64, 256, 32, 4, 3, 0, 2, buffers=2),
)
_PORTABLE_CUDA = (
    _P(16, 64, 64, 4, 3, blocks=4),
    _P(16, 128, 64, 4, 4, blocks=2),
    _P(32, 64, 32, 4, 3, blocks=4),
    _P(32, 128, 64, 4, 3, blocks=2),
    _P(64, 64, 32, 4, 3, blocks=4),
    _P(64, 128, 32, 4, 4, blocks=2),
    _P(64, 128, 64, 4, 3, blocks=2),
    _P(128, 128, 32, 4, 4, blocks=2),
    _P(128, 128, 64, 8, 3, blocks=1),
    _P(128, 256, 64, 8, 3, blocks=1),
    _P(16, 64, 64, 4, 3, blocks=4, swap=True),
    _P(16, 128, 64, 4, 4, blocks=2, swap=True),
    _P(32, 128, 64, 4, 3, blocks=2, swap=True),
    _P(32, 128, 32, 4, 3, blocks=2),
    _P(64, 64, 16, 4, 3, blocks=4),
)
_PORTABLE_CUDA_SLABS = (
    _P(64, 64, 32, 4, 3, blocks=4),
    _P(128, 128, 32, 4, 3, blocks=2),
    _P(128, 128, 16, 4, 3, blocks=2),
    _P(128, 128, 64, 8, 3, blocks=1),
    _P(64, 128, 32, 4, 3, blocks=2),
    _P(128, 256, 32, 8, 3, blocks=1),
    _P(64, 64, 16, 4, 3, blocks=4),
    _P(64, 64, 32, 4, 3, blocks=4, split=4),
    _P(64, 64, 32, 4, 3, blocks=4, split=16),
    _P(128, 128, 32, 4, 3, blocks=2, split=4),
    _P(128, 128, 32, 4, 3, blocks=2, split=16),
)


def _mfma(size: int, kpack: int = 1, waves: int = 0) -> tuple[tuple[str, Any], ...]:
    return (("matrix_instr_nonkdim", size), ("kpack", kpack), ("waves_per_eu", waves))


_PORTABLE_ROCM = (
    _P(16, 64, 64, 2, 2, blocks=4, extra=_mfma(16)),
    _P(16, 128, 128, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(16, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2), swap=True),
    _P(32, 64, 64, 4, 2, blocks=4, extra=_mfma(16, 2)),
    _P(32, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(32, 128, 64, 4, 2, blocks=2, extra=_mfma(32, 2)),
    _P(64, 64, 64, 4, 2, blocks=3, extra=_mfma(16, 2)),
    _P(64, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(64, 128, 64, 4, 2, blocks=2, extra=_mfma(32, 2)),
    _P(64, 256, 64, 8, 2, blocks=1, extra=_mfma(16, 2)),
    _P(128, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(128, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2, 2)),
    _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(32, 2)),
    _P(128, 256, 64, 8, 2, blocks=1, extra=_mfma(16, 2, 2)),
    _P(256, 128, 64, 8, 2, blocks=1, extra=_mfma(16, 2, 2)),
    _P(256, 256, 64, 8, 2, blocks=1, extra=_mfma(16, 1, 2)),
    _P(32, 64, 16, 4, 2, blocks=4, extra=_mfma(16)),
    _P(64, 64, 16, 4, 2, blocks=4, extra=_mfma(16)),
)
_PORTABLE_ROCM_SLABS = (
    _P(64, 64, 32, 4, 2, blocks=4, extra=_mfma(16, 2)),
    _P(64, 64, 64, 4, 2, blocks=3, extra=_mfma(16, 2)),
    _P(64, 128, 32, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(32, 2)),
    _P(128, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(128, 128, 64, 8, 2, blocks=1, extra=_mfma(16, 2, 2)),
    _P(128, 256, 32, 8, 2, blocks=1, extra=_mfma(16, 2, 2)),
    _P(256, 256, 32, 8, 2, blocks=1, extra=_mfma(16, 1, 2)),
    _P(64, 64, 16, 4, 2, blocks=4, extra=_mfma(16)),
    _P(64, 64, 32, 4, 2, blocks=4, extra=_mfma(16, 2), split=4),
    _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(16, 2), split=8),
)


def all_candidates(mode: RaggedDotMode, target: Target) -> tuple[Candidate, ...]:
    """Every candidate of a mode on a target; its place here is its index."""
    slabs = mode is RaggedDotMode.CONTRACTING
    if target.backend != "cuda":
        found = _PORTABLE_ROCM_SLABS if slabs else _PORTABLE_ROCM
        return found if target.architecture == "gfx942" else _without_kpack(found)
    portable = _PORTABLE_CUDA_SLABS if slabs else _PORTABLE_CUDA
    if target.architecture != 90:
        return portable
    return (*(_HOPPER_SLABS if slabs else _HOPPER_ROWS), *portable)


@functools.lru_cache(4)
def _without_kpack(found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """gfx950 and others take kpack 1 only."""
    plain = [dataclasses.replace(k, extra=tuple((key, 1 if key == "kpack" else value) for key, value in k.extra)) for k in found]
    return tuple(dict.fromkeys(plain))


# ---- which can run a config --------------------------------------------------------------------------------------------------


def copies_reason(config: GroupedGemmConfig, target: Target) -> str | None:
    """Why the copy engine's kernels cannot run this config on this target, or None."""
    c = config
    if target.backend != "cuda" or target.architecture != 90:
        return f"{target.name} is not sm_90"
    if c.type_a != c.type_b or c.type_a not in ("bfloat16", "float16"):
        return f"operands are {c.type_a} and {c.type_b}, not both bf16 or fp16"
    if c.beta or c.epilogue.bias:
        return "beta or a bias"
    if 0 in (c.m, c.n, c.k, c.batch_count, c.group_count):
        return "an extent is 0"
    operands = [
        ("lhs", c.lhs_inner_stride, c.lhs_leading_dim_stride, c.lhs_batch_stride, c.lhs_alignment, c.m if c.trans_a else c.k),
        ("rhs", c.rhs_inner_stride, c.rhs_leading_dim_stride, c.rhs_batch_stride, c.rhs_alignment, c.k if c.trans_b else c.n),
        ("out", c.output_inner_stride, c.output_leading_dim_stride, c.output_batch_stride, c.output_alignment, c.n),
    ]
    for name, inner, leading, batch, alignment, extent in operands:
        if inner != 1:
            return f"{name}'s inner stride is {inner}"
        if alignment < 16:
            return f"{name} is aligned to {alignment} bytes, not 16"
        if leading < extent or leading * 4 >= 1 << 35 or batch * 4 >= 1 << 40:
            return f"{name}'s strides are out of the copy engine's range"
        if c.batch_count > 1 and batch == 0:
            return f"{name} is the same in all batches"
    if not c.must_swap_operands:
        return "out is not row-major"
    if c.ragged_mode is RaggedDotMode.NON_CONTRACTING and c.group_count > 1 and not 0 < c.stride_group_dim < 1 << 38:
        return "rhs's group stride is out of the copy engine's range"
    if c.ragged_extent >= 1 << 30:
        return "the ragged extent is 2^30 or more"
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        if not c.trans_a or c.trans_b:
            return "an operand's ragged axis is its contiguous one"
    elif c.trans_a:
        return "lhs's ragged axis is its contiguous one"
    return None


def _fits(candidate: Candidate, config: GroupedGemmConfig, machine: Machine) -> bool:
    size, out_size = max(FLOAT_BYTES[config.type_a], FLOAT_BYTES[config.type_b]), FLOAT_BYTES[config.type_d]
    if candidate.kernel == "hopper":
        if candidate.subtiles == 0 and config.n * out_size % 16:
            return False
        return candidate.blocks * (candidate.shared_bytes(2, out_size) + 1024) <= machine.shared_memory + 1024
    if size == 4:
        # float32 products run on the plain units: small tiles, so that the accumulators stay in registers
        return candidate.bm * candidate.bn <= 64 * 128 and candidate.bk <= 32 and not candidate.swap
    if machine.target.backend == "hip" and machine.target.architecture != "gfx950":  # 64 KiB of LDS
        return (candidate.bm + candidate.bn) * candidate.bk * size * max(candidate.stages - 1, 1) <= 64 * 1024
    return (candidate.bm + candidate.bn) * candidate.bk * size * candidate.stages <= machine.shared_memory


def ordered(config: GroupedGemmConfig, machine: Machine) -> list[tuple[int, Candidate]]:
    """(index, candidate) of all that can run the config, the best guess first."""
    copies = copies_reason(config, machine.target) is None
    found = [
        (index, candidate)
        for index, candidate in enumerate(all_candidates(config.ragged_mode, machine.target))
        if (copies or candidate.kernel != "hopper") and _fits(candidate, config, machine)
    ]
    places = {name: place for place, name in enumerate(_favourites(config, machine))}
    far = len(places)  # behind all of them
    return sorted(found, key=lambda pair: (places.get(pair[1].name, far), _estimate(pair[1], config, machine), pair[0]))


# ---- the best guess ----------------------------------------------------------------------------------------------------------


def _favourites(config: GroupedGemmConfig, machine: Machine) -> tuple[str, ...]:
    """Names of candidates, the best first, as measured on an H200 (bench/NOTES.md has the numbers and the shapes).

    Sizes are not known here. The first is the one that loses least to the best of each cell, over balanced and skewed sizes; those
    behind it were the best somewhere: what tuning should try.
    """
    c = config
    groups = max(c.group_count, 1) if c.ragged_mode is not RaggedDotMode.BATCH else 1
    problems = groups * max(c.batch_count, 1)
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        tiles = problems * math.ceil(c.m / 128) * math.ceil(c.n / 128)
        return _favourites_of_slabs(c.k / groups, c.m * c.n, tiles, machine)
    rows = c.m / groups
    across = problems * math.ceil(c.n / 256)
    # few tiles of 256 columns would leave multiprocessors idle, or waste more than half of the tile
    narrow = c.n <= 128 or across * math.ceil(rows / 128) < machine.multiprocessors
    flat, halves, deep, whole = "128x256x64_w8_s3_e1_b1", "128x256x64_w8_s3_e2x2_b1", "128x256x64_w8_s4_e2_b1", "64x256x64_w4_s4_e1_b1"
    square, double, long = "128x128x64_w8_s5_e1_b1", "64x128x64_w4_s3_e1_b2", "64x128x64_w4_s6_e1_b1"
    tall, split = "192x256x64_w12_s3_e2_b1", "192x128x64_w12_s5_e2_b1"
    found: tuple[str, ...]
    if rows <= 64:
        wide = "64x256x64_w4_s2_e2_b2"
        if c.trans_b and not narrow:
            found = (whole, long, double, flat, halves, wide)
        else:
            found = (double, wide, flat, long, halves, whole)
    elif rows <= 128:
        # a last wave that is nearly empty costs more than tiles of half the height
        shorter = _filling(2 * across, machine) > 1.1 * _filling(across, machine)
        found = (deep, halves, flat) if c.trans_b else (halves, flat, deep)
        if narrow:
            found = (square, *found, whole, "128x128x64_w8_s6_e2x2_b1")
        elif shorter:
            found = (whole, *found, square)
        else:
            found = (*found, whole, square)
    elif rows <= 192:
        found = (split, tall) if narrow else (tall, split)
        found = (*found, deep if c.trans_b else halves, flat, whole, "192x128x64_w12_s4_e1_b1")
    elif narrow:
        found = (square, "128x128x64_w8_s6_e1_b1", flat, whole)
    else:
        found = (whole, flat) if c.trans_b and rows <= 560 else (flat, whole)
        found = (*found, deep, halves, square, "128x128x64_w8_s6_e1_b1")
    return tuple(f"tma_{name}" for name in found)


def _filling(tiles: int, machine: Machine) -> float:
    """Share of the multiprocessors' time that so many equal tiles fill."""
    return tiles / (math.ceil(tiles / machine.multiprocessors) * machine.multiprocessors)


def _favourites_of_slabs(depth: float, slab: int, tiles: int, machine: Machine) -> tuple[str, ...]:
    """`_favourites` of CONTRACTING, for so many rows of k a group, elements of a slab of out, and tiles of 128 x 128."""
    if 2 * tiles <= machine.multiprocessors and depth >= 2048:
        few = 8 * tiles <= machine.multiprocessors
        shares = (16, 4) if few else (4, 16)
        return tuple(f"ptr_{tile}_split{share}" for share in shares for tile in ("128x128x32_w4_s3_b2", "64x64x32_w4_s3_b4"))
    # out is most of what is moved, and whole rows stored from registers (e0) get it out fastest, until products take longer than that
    rows, past, small = "128x256x32_w8_s5_e0_b1", "128x256x32_w8_s5_e0x2_b1", "128x128x32_w8_s6_e0_b1"
    pairs, three = "64x256x32_w4_s3_e0_b2", "192x128x32_w12_s6_e0_b1"
    tall, wide = "192x256x32_w12_s6_e2_b1", "128x256x32_w8_s7_e2_b1"
    found: tuple[str, ...]
    if depth <= 40:
        first = (small, past) if slab <= 1 << 19 else (past, small)
        found = (*first, rows, "64x256x32_w4_s3_e0x2_b2", wide, three)
    elif depth <= 72:
        found = (pairs, "64x256x32_w4_s3_e0x2_b2", "128x128x64_w8_s5_e0_b1", "128x128x32_w8_s6_e2x2_b1", rows, "128x128x64_w8_s5_e1_b1")
    elif depth <= 128:
        found = (past, three, rows, "192x128x32_w12_s6_e2x2_b1", "128x128x32_w8_s6_e2x2_b1", "128x128x64_w8_s5_e0_b1")
    elif depth <= 560:
        found = (tall, wide, "128x256x32_w8_s5_e2x2_b1", "192x256x32_w12_s4_e1_b1", "192x256x64_w12_s3_e2_b1", "128x256x64_w8_s3_e1_b1")
    else:
        found = ("128x256x64_w8_s3_e1_b1", "128x128x64_w8_s5_e1_b1", "192x256x64_w12_s3_e2_b1", tall, wide, "192x128x64_w12_s4_e1_b1")
    return tuple(f"tma_{name}" for name in found)


def _estimate(candidate: Candidate, config: GroupedGemmConfig, machine: Machine) -> float:
    """A cost to compare candidates by, in tile steps of one multiprocessor; not a time."""
    c, k = config, candidate
    groups = max(c.group_count, 1)
    rows: float
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        rows, depth, problems = c.m, c.k / groups, groups * max(c.batch_count, 1)
    elif c.ragged_mode is RaggedDotMode.BATCH:
        rows, depth, problems = c.m, float(c.k), max(c.batch_count, 1)
    else:
        rows, depth, problems = max(c.m / groups, 1), float(c.k), groups * max(c.batch_count, 1)
    tiles = problems * math.ceil(rows / k.bm) * math.ceil(max(c.n, 1) / k.bn) * k.split
    steps = math.ceil(max(depth / k.split, 1) / k.bk)
    slots = machine.multiprocessors * k.blocks
    waves = tiles / slots if tiles > 4 * slots else math.ceil(tiles / slots)
    valid = max(min(rows, k.bm), 1)
    math_cost = max(k.bm, 64 if k.kernel == "hopper" else 16) * k.bn * k.bk / (128 * 128 * 64)
    move_cost = (valid * k.bk + k.bn * k.bk) / (256 * 64) * 1.2
    out_cost = valid * k.bn / (128 * 128) * 1.5
    per_tile = steps * max(math_cost, move_cost) + out_cost + 0.6 / k.blocks
    penalty = 1.0 if k.kernel == "hopper" else 1.6
    if k.kernel != "hopper":  # these read and multiply a tile's surplus rows as well
        penalty *= 1.0 + 0.12 * math.log2(k.bm / valid)
    if k.split > 1:
        penalty *= 1.0 + 0.3 * k.split * (tiles // k.split > slots)
    return waves * per_tile * k.blocks * penalty
