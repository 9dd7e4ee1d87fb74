"""The algorithms: which tiles, stages, warps and schedules there are, and which of them can run a config."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from hipgroupgemm.backends.triton.compiler import ELEMENTS, Target
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode

__all__ = ["DeviceProperties", "KernelConfig", "can_run", "hopper_refusal", "kernel_configs"]

TYPES = frozenset(ELEMENTS)
FEATURES = frozenset(
    (
        "alpha",
        "bias",
        "c",
        "group_offset",
        "mixed_types",
        "narrow_output",
        "out_listed",
        "rhs_listed",
        "sizes_per_batch",
        "tf32",
        "wide_output",
    )
)
LAYOUTS = frozenset(
    ("bias_inner_stride", "c_inner_stride", "column_major_output", "lhs_inner_stride", "output_inner_stride", "rhs_inner_stride")
)
# what the sm_90 kernels have; all else runs on the portable ones, which have everything that the backend declares
HOPPER_TYPES = frozenset(("bfloat16", "float16"))
# Lists are not among it: with tables of tensor maps (`hopper_common.descriptor_of`) bench/lists.py was right on an H200 under
# compute-sanitizer, and ended in an illegal access without it. It had freed the stacked call's operands; until it has been right with
# --maps since, and test_triton_lists.py with HIPGROUPGEMM_LIST_MAPS=1, the portable kernels take them.
HOPPER_FEATURES = frozenset(("alpha", "group_offset", "sizes_per_batch", "wide_output"))
HOPPER_LAYOUTS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DeviceProperties:
    """What the choice depends on: the target, multiprocessors, and shared memory a block can get (bytes).

    `limited`: the multiprocessors are fewer than the device has. Blocks are then one per multiprocessor, since the hardware spreads a
    grid over all that it has before it places two blocks together.
    """

    target: Target
    multiprocessors: int
    shared_memory: int
    limited: bool = False

    def resident(self, blocks: int) -> int:
        """Blocks per multiprocessor of an algorithm that wants so many."""
        return 1 if self.limited else blocks


@dataclass(frozen=True)
class KernelConfig:
    """One algorithm.

    Attributes:
        kernel: "tma" (sm_90: copy engine, warp-specialised) or "ptr" (portable).
        tile_m, tile_n, tile_k: the tile: rows and columns of out, and the step along k.
        warps: that multiply; the sm_90 kernels have one consumer of four warps or more of them. stages: of the pipeline.
        subtiles: pieces in which the copy engine stores a finished tile, 0: it is stored from registers. blocks: per multiprocessor.
        swap: computes the tile's transpose, so that few rows fill the matrix unit's narrow side.
        split: shares of k in CONTRACTING (split-k).
        buffers: that the pieces go through; 2 from registers: past the caches.
        extra: further options of Triton's compile.
        swizzle: how many row tiles (of a group, where there are groups of rows) go through all columns side by side, at the most.
    """

    kernel: str
    tile_m: int
    tile_n: int
    tile_k: int
    warps: int
    stages: int
    subtiles: int = 1
    blocks: int = 1
    swap: bool = False
    split: int = 1
    buffers: int = 1
    extra: tuple[tuple[str, Any], ...] = ()
    swizzle: int = 8

    @functools.cached_property
    def name(self) -> str:
        """Readable and unique: tma_128x256x64_w8_s4_e2_b1_z16, ptr_32x128x64_w4_s3_b2_swap_z1."""
        parts = [self.kernel, f"{self.tile_m}x{self.tile_n}x{self.tile_k}", f"w{self.warps}", f"s{self.stages}"]
        if self.kernel == "tma":
            parts.append(f"e{self.subtiles}" + (f"x{self.buffers}" if self.buffers > 1 else ""))
        parts.append(f"b{self.blocks}")
        parts += [f"{key.replace('matrix_instr_nonkdim', 'mfma').replace('waves_per_eu', 'wpe')}{value}" for key, value in self.extra]
        if self.swap:
            parts.append("swap")
        if self.split > 1:
            parts.append(f"split{self.split}")
        return "_".join((*parts, f"z{self.swizzle}"))

    @property
    def consumers(self) -> int:
        """Of the sm_90 kernels, four warps each."""
        return self.warps // 4

    def usual_swizzle(self, config: GroupedGemmConfig) -> int:
        """The swizzle that is tried first: rows of a group that share its weights go side by side, as far as they stay in the L2 cache."""
        if config.ragged_mode is RaggedDotMode.CONTRACTING:
            return 8
        if self.kernel == "tma":
            return SIDE_BY_SIDE // self.tile_m
        row_tiles = config.m / groups_of_rows(config) / self.tile_m
        return max(swizzle for swizzle in SWIZZLES if swizzle == 1 or 2 * row_tiles >= swizzle)

    def shared_bytes(self, operand_bytes: int, out_bytes: int) -> int:
        """Shared memory of the sm_90 kernels, without the tables of those that scan."""
        ring = self.stages * ((self.tile_m + self.tile_n) * self.tile_k * operand_bytes + 48)  # barriers and notes, too
        if self.subtiles == 0:  # on the way to whole rows a tile passes through shared memory
            return ring + self.tile_m * (self.tile_n + 8) * out_bytes + 2048
        return ring + self.tile_m * self.tile_n * self.buffers // self.subtiles * out_bytes + 256

    def split_k_bytes(self, config: GroupedGemmConfig) -> int:
        """Bytes of workspace: the float32 partials of split-k."""
        if self.split == 1:
            return 0
        return 4 * self.split * config.group_count * max(config.batch_count, 1) * config.m * config.n


def groups_of_rows(config: GroupedGemmConfig) -> int:
    """How many groups share the ragged rows, at least 1."""
    return max(config.group_count, 1) if config.ragged_mode is not RaggedDotMode.BATCH else 1


_H = functools.partial(KernelConfig, "tma")
_P = functools.partial(KernelConfig, "ptr")

SIDE_BY_SIDE = 2048
"""Rows of a group in NON_CONTRACTING: its weights are read once for so many. More would not stay in the L2 cache."""
SWIZZLES = (1, 4, 16)
"""Of the portable kernels in NON_CONTRACTING and BATCH."""

_HOPPER = (
    # tile_m, tile_n, tile_k, warps, stages, subtiles, blocks
    _H(64, 128, 64, 4, 6, 1, 1), _H(64, 128, 64, 4, 4, 1, 2), _H(64, 128, 64, 4, 3, 1, 2), _H(64, 128, 128, 4, 2, 1, 2),
    _H(64, 256, 64, 4, 4, 1, 1), _H(64, 256, 64, 4, 2, 2, 2), _H(64, 64, 64, 4, 6, 1, 2), _H(128, 128, 64, 8, 6, 1, 1),
    _H(128, 128, 64, 8, 5, 1, 1), _H(128, 128, 64, 8, 6, 2, 1, buffers=2), _H(128, 128, 128, 8, 3, 1, 1), _H(128, 128, 64, 4, 3, 2, 2),
    _H(128, 256, 64, 8, 4, 2, 1), _H(128, 256, 64, 8, 3, 1, 1), _H(128, 256, 64, 8, 3, 2, 1, buffers=2), _H(192, 256, 64, 12, 3, 2, 1),
    _H(192, 128, 64, 12, 4, 1, 1), _H(192, 128, 64, 12, 5, 2, 1), _H(192, 128, 64, 12, 4, 2, 1, buffers=2),
)  # fmt: skip
_HOPPER_CONTRACTING = (
    _H(128, 128, 32, 4, 4, 1, 2), _H(128, 128, 32, 4, 5, 2, 2), _H(64, 128, 32, 4, 4, 1, 3), _H(64, 256, 32, 4, 3, 1, 2),
    _H(128, 256, 32, 8, 5, 1, 1), _H(128, 256, 32, 8, 5, 2, 1, buffers=2), _H(128, 256, 32, 8, 7, 2, 1), _H(128, 256, 16, 8, 6, 1, 1),
    _H(128, 256, 64, 8, 3, 1, 1), _H(128, 256, 64, 8, 4, 2, 1), _H(256, 128, 32, 8, 5, 1, 1), _H(128, 128, 32, 8, 4, 1, 1),
    _H(128, 128, 32, 8, 6, 2, 1, buffers=2), _H(128, 128, 32, 8, 3, 1, 2), _H(128, 128, 32, 8, 3, 2, 2, buffers=2),
    _H(128, 128, 64, 8, 5, 1, 1), _H(128, 128, 64, 8, 5, 2, 1, buffers=2), _H(192, 256, 64, 12, 3, 2, 1), _H(192, 256, 32, 12, 4, 1, 1),
    _H(192, 256, 32, 12, 4, 2, 1, buffers=2), _H(192, 256, 32, 12, 6, 2, 1), _H(192, 128, 32, 12, 6, 1, 1),
    _H(192, 128, 32, 12, 6, 2, 1, buffers=2), _H(192, 128, 64, 12, 4, 1, 1), _H(128, 256, 32, 8, 5, 0, 1),
    _H(128, 256, 32, 8, 5, 0, 1, buffers=2), _H(128, 256, 64, 8, 3, 0, 1), _H(128, 128, 32, 8, 6, 0, 1), _H(128, 128, 64, 8, 5, 0, 1),
    _H(192, 256, 32, 12, 4, 0, 1), _H(192, 128, 32, 12, 6, 0, 1), _H(64, 256, 32, 4, 3, 0, 2), _H(64, 256, 32, 4, 3, 0, 2, buffers=2),
)  # fmt: skip
_PORTABLE_CUDA = (
    _P(16, 64, 64, 4, 3, blocks=4), _P(16, 128, 64, 4, 4, blocks=2), _P(32, 64, 32, 4, 3, blocks=4), _P(32, 128, 64, 4, 3, blocks=2),
    _P(64, 64, 32, 4, 3, blocks=4), _P(64, 128, 32, 4, 4, blocks=2), _P(64, 128, 64, 4, 3, blocks=2), _P(128, 128, 32, 4, 4, blocks=2),
    _P(128, 128, 64, 8, 3, blocks=1), _P(128, 256, 64, 8, 3, blocks=1), _P(16, 64, 64, 4, 3, blocks=4, swap=True),
    _P(16, 128, 64, 4, 4, blocks=2, swap=True), _P(32, 128, 64, 4, 3, blocks=2, swap=True), _P(32, 128, 32, 4, 3, blocks=2),
    _P(64, 64, 16, 4, 3, blocks=4),
)  # fmt: skip
_PORTABLE_CUDA_CONTRACTING = (
    _P(64, 64, 32, 4, 3, blocks=4), _P(128, 128, 32, 4, 3, blocks=2), _P(128, 128, 16, 4, 3, blocks=2), _P(128, 128, 64, 8, 3, blocks=1),
    _P(64, 128, 32, 4, 3, blocks=2), _P(128, 256, 32, 8, 3, blocks=1), _P(64, 64, 16, 4, 3, blocks=4),
    _P(64, 64, 32, 4, 3, blocks=4, split=4), _P(64, 64, 32, 4, 3, blocks=4, split=16), _P(128, 128, 32, 4, 3, blocks=2, split=4),
    _P(128, 128, 32, 4, 3, blocks=2, split=16),
)  # fmt: skip


def _mfma(size: int, kpack: int = 1, waves: int = 0) -> tuple[tuple[str, Any], ...]:
    return (("matrix_instr_nonkdim", size), ("kpack", kpack), ("waves_per_eu", waves))


_PORTABLE_ROCM = (
    _P(16, 64, 64, 2, 2, blocks=4, extra=_mfma(16)), _P(16, 128, 128, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(16, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2), swap=True), _P(32, 64, 64, 4, 2, blocks=4, extra=_mfma(16, 2)),
    _P(32, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)), _P(32, 128, 64, 4, 2, blocks=2, extra=_mfma(32, 2)),
    _P(64, 64, 64, 4, 2, blocks=3, extra=_mfma(16, 2)), _P(64, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(64, 128, 64, 4, 2, blocks=2, extra=_mfma(32, 2)), _P(64, 256, 64, 8, 2, blocks=1, extra=_mfma(16, 2)),
    _P(128, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)), _P(128, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2, 2)),
    _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(32, 2)), _P(128, 256, 64, 8, 2, blocks=1, extra=_mfma(16, 2, 2)),
    _P(256, 128, 64, 8, 2, blocks=1, extra=_mfma(16, 2, 2)), _P(256, 256, 64, 8, 2, blocks=1, extra=_mfma(16, 1, 2)),
    _P(32, 64, 16, 4, 2, blocks=4, extra=_mfma(16)), _P(64, 64, 16, 4, 2, blocks=4, extra=_mfma(16)),
)  # fmt: skip
_PORTABLE_ROCM_CONTRACTING = (
    _P(64, 64, 32, 4, 2, blocks=4, extra=_mfma(16, 2)), _P(64, 64, 64, 4, 2, blocks=3, extra=_mfma(16, 2)),
    _P(64, 128, 32, 4, 2, blocks=2, extra=_mfma(16, 2)), _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(32, 2)), _P(128, 128, 64, 4, 2, blocks=2, extra=_mfma(16, 2)),
    _P(128, 128, 64, 8, 2, blocks=1, extra=_mfma(16, 2, 2)), _P(128, 256, 32, 8, 2, blocks=1, extra=_mfma(16, 2, 2)),
    _P(256, 256, 32, 8, 2, blocks=1, extra=_mfma(16, 1, 2)), _P(64, 64, 16, 4, 2, blocks=4, extra=_mfma(16)),
    _P(64, 64, 32, 4, 2, blocks=4, extra=_mfma(16, 2), split=4), _P(128, 128, 32, 4, 2, blocks=2, extra=_mfma(16, 2), split=8),
)  # fmt: skip


@functools.lru_cache
def kernel_configs(mode: RaggedDotMode, target: Target) -> tuple[KernelConfig, ...]:
    """Every algorithm of a mode on a target; its place here is its index. Those with another swizzle than the usual one come last."""
    contracting, hopper = mode is RaggedDotMode.CONTRACTING, list[KernelConfig]()
    if target.backend == "cuda":
        portable = list(_PORTABLE_CUDA_CONTRACTING if contracting else _PORTABLE_CUDA)
        if target.architecture == 90:
            hopper += _HOPPER_CONTRACTING if contracting else [replace(k, swizzle=SIDE_BY_SIDE // k.tile_m) for k in _HOPPER]
    else:
        portable = list(_PORTABLE_ROCM_CONTRACTING if contracting else _PORTABLE_ROCM)
        if target.architecture != "gfx942":  # gfx950 and others take kpack 1 only
            portable = [replace(k, extra=tuple((key, 1 if key == "kpack" else value) for key, value in k.extra)) for k in portable]
    quarter = [replace(k, swizzle=k.swizzle // 4) for k in hopper if k.tile_n == 256]
    if not contracting:
        portable = [replace(k, swizzle=swizzle) for swizzle in SWIZZLES for k in portable]
    return tuple(dict.fromkeys([*hopper, *portable, *quarter]))


# ---- which can run a config --------------------------------------------------------------------------------------------------


def hopper_refusal(config: GroupedGemmConfig, target: Target) -> str | None:
    """Why the sm_90 kernels cannot run this config on this target, or None. What they do not declare is refused."""
    c = config
    if target.backend != "cuda" or target.architecture != 90:
        return f"{target.name} is not sm_90"
    for field, offered in (("type_a", HOPPER_TYPES), ("type_b", HOPPER_TYPES), ("type_d", TYPES)):
        if getattr(c, field) not in offered:
            return f"{field}={getattr(c, field)}"
    missing = (c.features() - HOPPER_FEATURES) | (c.layouts() - HOPPER_LAYOUTS)
    if missing:
        return ", ".join(sorted(missing))
    if 0 in (c.m, c.n, c.k, c.batch_count, c.group_count):
        return "an extent is 0"
    operands = [
        ("lhs", c.lhs_leading_dim_stride, c.lhs_batch_stride, c.lhs_alignment, c.m if c.trans_a else c.k),
        ("rhs", c.rhs_leading_dim_stride, c.rhs_batch_stride, c.rhs_alignment, c.k if c.trans_b else c.n),
        ("out", c.output_leading_dim_stride, c.output_batch_stride, c.output_alignment, c.n),
    ]
    for name, leading, batch, alignment, extent in operands:
        if alignment < 16:
            return f"{name} is aligned to {alignment} bytes, not 16"
        if leading < extent or leading * 4 >= 1 << 35 or batch * 4 >= 1 << 40:
            return f"{name}'s strides are out of the copy engine's range"
        if c.batch_count > 1 and batch == 0:
            return f"{name} is the same in all batches"
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


def can_run(kernel: KernelConfig, config: GroupedGemmConfig, device: DeviceProperties) -> bool:
    """Whether the tile suits the types, and its memory suffices; `hopper_refusal` says whether the sm_90 kernels can at all."""
    k, size, out_size = kernel, max(FLOAT_BYTES[config.type_a], FLOAT_BYTES[config.type_b]), FLOAT_BYTES[config.type_d]
    if k.kernel == "tma":
        if k.subtiles == 0 and config.n * out_size % 16:
            return False
        return k.blocks * (k.shared_bytes(2, out_size) + 1024) <= device.shared_memory + 1024
    if size == 4:
        # float32 products run on the plain units: small tiles, so that the accumulators stay in registers
        return k.tile_m * k.tile_n <= 64 * 128 and k.tile_k <= 32 and not k.swap
    step = (k.tile_m + k.tile_n) * k.tile_k * size
    if device.target.backend == "hip" and device.target.architecture != "gfx950":  # 64 KiB of LDS
        return step * max(k.stages - 1, 1) <= 64 * 1024
    return step * k.stages <= device.shared_memory
