"""The best guess: which algorithms come first for a config, by a table of what was measured and by an estimate."""

from __future__ import annotations

import math

from hipgroupgemm.backends.triton.kernel_config import (
    DeviceProperties,
    KernelConfig,
    can_run,
    groups_of_rows,
    hopper_refusal,
    kernel_configs,
)
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode

__all__ = ["DEFAULTS", "ordered", "shape_class"]

_FLAT, _HALVES, _DEEP = "tma_128x256x64_w8_s3_e1_b1_z16", "tma_128x256x64_w8_s3_e2x2_b1_z16", "tma_128x256x64_w8_s4_e2_b1_z16"
_WHOLE, _WIDE = "tma_64x256x64_w4_s4_e1_b1_z32", "tma_64x256x64_w4_s2_e2_b2_z32"
_SQUARE, _SQUARE6, _SQUARE_HALVES = "tma_128x128x64_w8_s5_e1_b1_z16", "tma_128x128x64_w8_s6_e1_b1_z16", "tma_128x128x64_w8_s6_e2x2_b1_z16"
_DOUBLE, _LONG = "tma_64x128x64_w4_s3_e1_b2_z32", "tma_64x128x64_w4_s6_e1_b1_z32"
_TALL, _SPLIT, _SPLIT4 = "tma_192x256x64_w12_s3_e2_b1_z10", "tma_192x128x64_w12_s5_e2_b1_z10", "tma_192x128x64_w12_s4_e1_b1_z10"
# CONTRACTING: whole rows stored from registers (e0) get out fastest, until products take longer than that
_ROWS, _PAST, _SMALL = "tma_128x256x32_w8_s5_e0_b1_z8", "tma_128x256x32_w8_s5_e0x2_b1_z8", "tma_128x128x32_w8_s6_e0_b1_z8"
_PAIRS, _PAIRS_PAST, _THREE = "tma_64x256x32_w4_s3_e0_b2_z8", "tma_64x256x32_w4_s3_e0x2_b2_z8", "tma_192x128x32_w12_s6_e0_b1_z8"
_TALL32, _WIDE32 = "tma_192x256x32_w12_s6_e2_b1_z8", "tma_128x256x32_w8_s7_e2_b1_z8"
_SQUARE32_HALVES, _SQUARE_ROWS = "tma_128x128x32_w8_s6_e2x2_b1_z8", "tma_128x128x64_w8_s5_e0_b1_z8"
_SQUARE64, _FLAT64, _TALL64 = "tma_128x128x64_w8_s5_e1_b1_z8", "tma_128x256x64_w8_s3_e1_b1_z8", "tma_192x256x64_w12_s3_e2_b1_z8"
_SPLIT_K4, _SPLIT_K16 = "ptr_128x128x32_w4_s3_b2_split4_z8", "ptr_128x128x32_w4_s3_b2_split16_z8"
_SPLIT_K4_SMALL, _SPLIT_K16_SMALL = "ptr_64x64x32_w4_s3_b4_split4_z8", "ptr_64x64x32_w4_s3_b4_split16_z8"

DEFAULTS: dict[RaggedDotMode, dict[str, tuple[str, ...]]] = {
    RaggedDotMode.NON_CONTRACTING: {
        "short": (_DOUBLE, _WIDE, _FLAT, _LONG, _HALVES, _WHOLE),
        "short, rhs k-major": (_WHOLE, _LONG, _DOUBLE, _FLAT, _HALVES, _WIDE),
        "to 128": (_HALVES, _FLAT, _DEEP, _WHOLE, _SQUARE),
        "to 128, rhs k-major": (_DEEP, _HALVES, _FLAT, _WHOLE, _SQUARE),
        "to 128, last wave empty": (_WHOLE, _HALVES, _FLAT, _DEEP, _SQUARE),
        "to 128, last wave empty, rhs k-major": (_WHOLE, _DEEP, _HALVES, _FLAT, _SQUARE),
        "to 128, narrow": (_SQUARE, _HALVES, _FLAT, _DEEP, _WHOLE, _SQUARE_HALVES),
        "to 128, narrow, rhs k-major": (_SQUARE, _DEEP, _HALVES, _FLAT, _WHOLE, _SQUARE_HALVES),
        "to 192": (_TALL, _SPLIT, _HALVES, _FLAT, _WHOLE, _SPLIT4),
        "to 192, rhs k-major": (_TALL, _SPLIT, _DEEP, _FLAT, _WHOLE, _SPLIT4),
        "to 192, narrow": (_SPLIT, _TALL, _HALVES, _FLAT, _WHOLE, _SPLIT4),
        "to 192, narrow, rhs k-major": (_SPLIT, _TALL, _DEEP, _FLAT, _WHOLE, _SPLIT4),
        "long": (_FLAT, _WHOLE, _DEEP, _HALVES, _SQUARE, _SQUARE6),
        "to 560, rhs k-major": (_WHOLE, _FLAT, _DEEP, _HALVES, _SQUARE, _SQUARE6),
        "long, narrow": (_SQUARE, _SQUARE6, _FLAT, _WHOLE),
    },
    RaggedDotMode.CONTRACTING: {
        "few tiles": (_SPLIT_K4, _SPLIT_K4_SMALL, _SPLIT_K16, _SPLIT_K16_SMALL),
        "very few tiles": (_SPLIT_K16, _SPLIT_K16_SMALL, _SPLIT_K4, _SPLIT_K4_SMALL),
        "to 40": (_PAST, _SMALL, _ROWS, _PAIRS_PAST, _WIDE32, _THREE),
        "to 40, small": (_SMALL, _PAST, _ROWS, _PAIRS_PAST, _WIDE32, _THREE),
        "to 72": (_PAIRS, _PAIRS_PAST, _SQUARE_ROWS, _SQUARE32_HALVES, _ROWS, _SQUARE64),
        "to 128": (_PAST, _THREE, _ROWS, "tma_192x128x32_w12_s6_e2x2_b1_z8", _SQUARE32_HALVES, _SQUARE_ROWS),
        "to 560": (_TALL32, _WIDE32, "tma_128x256x32_w8_s5_e2x2_b1_z8", "tma_192x256x32_w12_s4_e1_b1_z8", _TALL64, _FLAT64),
        "long": (_FLAT64, _SQUARE64, _TALL64, _TALL32, _WIDE32, "tma_192x128x64_w12_s4_e1_b1_z8"),
    },
}
"""Names of algorithms by mode and `shape_class`, the best first, as measured on an H200 (bench/NOTES.md has the numbers and the shapes).

Sizes are not known here. The first is the one that loses least to the best of each cell, over balanced and skewed sizes; those
behind it were the best somewhere: what tuning should try. BATCH has NON_CONTRACTING's.
"""


def ordered(config: GroupedGemmConfig, device: DeviceProperties) -> list[tuple[int, KernelConfig]]:
    """(index, algorithm) of all that can run the config, the best guess first: the table's, then by the estimate.

    Those with another swizzle than the usual one come last; on some of the multiprocessors those that count on several blocks per SM.
    """
    contracting = config.ragged_mode is RaggedDotMode.CONTRACTING
    table = DEFAULTS[RaggedDotMode.CONTRACTING if contracting else RaggedDotMode.NON_CONTRACTING]
    places = {name: place for place, name in enumerate(table[shape_class(config, device)])}
    hopper = hopper_refusal(config, device.target) is None
    found = [
        (
            device.limited and k.kernel == "tma" and k.blocks > 1,
            places.get(k.name, len(places)),
            k.swizzle != k.usual_swizzle(config),
            _estimate(k, config, device),
            index,
            k,
        )
        for index, k in enumerate(kernel_configs(config.ragged_mode, device.target))
        if (hopper or k.kernel != "tma") and can_run(k, config, device)
    ]
    return [(index, kernel) for *_, index, kernel in sorted(found, key=lambda entry: entry[:-1])]


def shape_class(config: GroupedGemmConfig, device: DeviceProperties) -> str:
    """The entry of `DEFAULTS` for a config: by rows, or in CONTRACTING by length of k, per group on the average; and by tiles."""
    c, groups = config, groups_of_rows(config)
    problems = groups * max(c.batch_count, 1)
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        tiles, length = problems * math.ceil(c.m / 128) * math.ceil(c.n / 128), c.k / groups
        if 2 * tiles <= device.multiprocessors and length >= 2048:
            return "very few tiles" if 8 * tiles <= device.multiprocessors else "few tiles"
        if length <= 40:
            return "to 40, small" if c.m * c.n <= 1 << 19 else "to 40"
        return next((f"to {limit}" for limit in (72, 128, 560) if length <= limit), "long")
    rows, across = c.m / groups, problems * math.ceil(c.n / 256)
    # few tiles of 256 columns would leave multiprocessors idle, or waste more than half of the tile
    narrow = c.n <= 128 or across * math.ceil(rows / 128) < device.multiprocessors
    k_major = ", rhs k-major" if c.trans_b else ""
    if rows <= 64:
        return "short" if narrow else f"short{k_major}"
    if rows <= 128:
        # a last wave that is nearly empty costs more than tiles of half the height
        shorter = _filling(2 * across, device) > 1.1 * _filling(across, device)
        return f"to 128{', narrow' if narrow else ', last wave empty' if shorter else ''}{k_major}"
    if rows <= 192:
        return f"to 192{', narrow' if narrow else ''}{k_major}"
    if narrow:
        return "long, narrow"
    return "to 560, rhs k-major" if c.trans_b and rows <= 560 else "long"


def _filling(tiles: int, device: DeviceProperties) -> float:
    """Share of the multiprocessors' time that so many equal tiles fill."""
    return tiles / (math.ceil(tiles / device.multiprocessors) * device.multiprocessors)


def _estimate(kernel: KernelConfig, config: GroupedGemmConfig, device: DeviceProperties) -> float:
    """A cost to compare algorithms by, in tile steps of one multiprocessor; not a time."""
    c, k, groups = config, kernel, groups_of_rows(config)
    rows, length, problems = c.m / groups, float(c.k), groups * max(c.batch_count, 1)
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        rows, length = c.m, c.k / groups
    elif c.ragged_mode is RaggedDotMode.NON_CONTRACTING:
        rows = max(rows, 1)
    tiles = problems * math.ceil(rows / k.tile_m) * math.ceil(max(c.n, 1) / k.tile_n) * k.split
    steps = math.ceil(max(length / k.split, 1) / k.tile_k)
    resident = device.resident(k.blocks)
    slots = device.multiprocessors * resident
    waves = tiles / slots if tiles > 4 * slots else math.ceil(tiles / slots)
    valid = max(min(rows, k.tile_m), 1)
    math_cost = max(k.tile_m, 64 if k.kernel == "tma" else 16) * k.tile_n * k.tile_k / (128 * 128 * 64)
    move_cost = (valid + k.tile_n) * k.tile_k / (256 * 64) * 1.2
    out_cost = valid * k.tile_n / (128 * 128) * 1.5
    per_tile = steps * max(math_cost, move_cost) + out_cost + 0.6 / resident
    penalty = 1.0 if k.kernel == "tma" else 1.6
    if k.kernel != "tma":  # these read and multiply a tile's surplus rows as well
        penalty *= 1.0 + 0.12 * math.log2(k.tile_m / valid)
    if k.split > 1:
        penalty *= 1.0 + 0.3 * k.split * (tiles // k.split > slots)
    return waves * per_tile * resident * penalty
