"""NON_CONTRACTING and BATCH on sm_90: 16-bit operands, beta = 0, no bias. How it works: `hopper_common`."""

# mypy: ignore-errors
# ruff: noqa: SIM102, RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hipgroupgemm.backends.triton.kernels.hopper_common import (
    FAR,
    FIELDS,
    NUMBERS,
    copy_in,
    copy_out,
    descriptor_of,
    find_group,
    hear,
    make_ring,
    read_bounds,
    reinterpret,
    scan_groups,
    skip_steps,
    store_tile,
    swizzled,
    tell,
    wait_for_scan,
)

EVEN = gl.constexpr(4)  # of so many row tiles of a group each gets as many rows; of fewer the last gets what is left


@gluon.jit
def row_tile_count(found, tile_count, M, BM: gl.constexpr, GROUPS: gl.constexpr, TABLE: gl.constexpr):
    """Row tiles: those that the block found, those of the table, or without groups those of all rows."""
    if GROUPS > 0:
        return found
    elif TABLE:
        return gl.load(tile_count)
    else:
        return gl.cdiv(M, BM)


@gluon.jit
def read_tile(
    tile, tiles, group_starts, group_ends, end_table, tile_table, M, row_tiles,
    BM: gl.constexpr, GROUPS: gl.constexpr, LOG: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """(problem, its first row, the end of its rows, its first row tile) of a row tile."""
    if GROUPS > 0:
        g = find_group(tile_table, tile, LOG)
        begin, end = read_bounds(end_table, g)
        first, _ = read_bounds(tile_table, g)
        return g, begin, end, first
    elif TABLE:
        at = tiles + tile * 4
        problem, row = gl.load(at), gl.load(at + 2)
        begin, end = gl.load(group_starts + problem).to(gl.int32), gl.load(group_ends + problem).to(gl.int32)
        return problem, begin, end, tile - (row - begin) // BM
    else:
        return tile * 0, tile * 0, M, tile * 0


@gluon.jit
def producer(
    tensors, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    RHS_K_INNER: gl.constexpr, GROUPS: gl.constexpr, LOG: gl.constexpr, TABLE: gl.constexpr, PROGRAMMATIC: gl.constexpr,
    LISTED: gl.constexpr,
):  # fmt: skip
    """The warp that copies; `tensors` are those of `copy` in the kernel below.

    Tiles of a group stand together: up to `swizzle` row tiles go through all columns side by side, so that weights are read
    once for so many rows. What a larger group has is shared out evenly, and so are its rows among its tiles: blocks whose tiles were
    shorter would run ahead, and what they read would have left the cache when the others want it.
    """
    (
        lhs, rhs, rhs_maps, tiles, tile_count, group_starts, group_ends, found, end_table, tile_table, M, N, K, groups, outer, swizzle,
        a_ring, b_ring, notes, full, empty,
    ) = tensors  # fmt: skip
    wait_for_scan(PROGRAMMATIC)
    CM: gl.constexpr = BM // CONSUMERS
    column_tiles = gl.cdiv(N, BN)
    row_tiles = row_tile_count(found, tile_count, M, BM, GROUPS, TABLE)
    per = row_tiles * column_tiles
    beyond = gl.where(K > 0, 0, FAR)  # nothing is read there: zeros
    step = 0
    known = M * 0 - 1
    for t in range(gl.program_id(0), per * outer, gl.num_programs(0)):
        nth = t % per
        problem, begin, end, first_tile = read_tile(
            nth // column_tiles, tiles, group_starts, group_ends, end_table, tile_table, M, row_tiles, BM, GROUPS, LOG, TABLE
        )
        own_tiles = gl.cdiv(end - begin, BM)
        side_by_side = gl.cdiv(own_tiles, gl.cdiv(own_tiles, swizzle))
        tm, tn = swizzled(nth - first_tile * column_tiles, own_tiles, side_by_side, column_tiles)
        height = gl.where(own_tiles >= EVEN, gl.cdiv(end - begin, own_tiles), BM)
        first = begin + tm * height
        rows = gl.minimum(height, end - first)
        b = t // per + problem // groups
        g = problem % groups
        if LISTED:
            weights = descriptor_of(rhs_maps, g, rhs, known)
            known = g
            g = g * 0
        else:
            weights = rhs
        for k in range(0, gl.maximum(K, 1), BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if k == 0:
                tell(notes, stage, rows, first + rows, b, tn * BN)
            ready = full.index(stage)
            mbarrier.expect(ready, (BM + BN) * BK * 2)
            for i in gl.static_range(CONSUMERS):
                at = [b, FAR, first + rows, gl.minimum(FAR - rows + i * CM, FAR - 1), k + beyond]
                copy_in(lhs, at, ready, a_ring.index(stage * CONSUMERS + i))
            if RHS_K_INNER:
                copy_in(weights, [g, b, tn * BN, k + beyond], ready, b_ring.index(stage))
            else:
                copy_in(weights, [g, b, k + beyond, tn * BN], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def consumer(
    tensors, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    MMA_N: gl.constexpr, SUBTILES: gl.constexpr, BUFFERS: gl.constexpr, RHS_K_INNER: gl.constexpr, GROUPS: gl.constexpr,
    TABLE: gl.constexpr, PROGRAMMATIC: gl.constexpr,
):  # fmt: skip
    """Consumer number WHICH; `tensors` are those of `multiply` in the kernel below."""
    (
        out, tile_count, covered_range, found, covered, M, N, K, batches, scans, zero_uncovered, alpha,
        a_ring, b_ring, buffers, notes, full, empty,
    ) = tensors  # fmt: skip
    wait_for_scan(PROGRAMMATIC)
    CM: gl.constexpr = BM // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MMA_N, 16])
    column_tiles = gl.cdiv(N, BN)
    row_tiles = row_tile_count(found, tile_count, M, BM, GROUPS, TABLE)
    outer = batches // scans
    steps = gl.cdiv(gl.maximum(K, 1), BK)
    step = 0
    acc = gl.zeros([CM, BN], gl.float32, layout)
    for _ in range(gl.program_id(0), row_tiles * column_tiles * outer, gl.num_programs(0)):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        rows, last, b, column = hear(notes, step % STAGES)
        if rows > WHICH * CM:
            for i in range(0, steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                x = a_ring.index(stage * CONSUMERS + WHICH).reshape([CM, BK])
                if RHS_K_INNER:
                    y = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
                else:
                    y = b_ring.index(stage).reshape([BK, BN])
                acc = warpgroup_mma(x, y, acc, use_acc=i > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                if i > 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            if alpha != 1.0:
                acc = acc * alpha
            store_tile(out, acc, buffers, WHICH, (b, FAR, last, FAR - rows + WHICH * CM), column, CM, BN, SUBTILES, BUFFERS)
        else:
            skip_steps(steps, step, full, empty, STAGES)
            step += steps
    if TABLE:
        if zero_uncovered != 0:
            buffer = buffers.index(WHICH * BUFFERS)
            tma.store_wait(0)
            buffer.reshape([CM, BN // SUBTILES]).store(gl.zeros([CM, BN // SUBTILES], buffer.dtype, layout))
            fence_async_shared()
            for b in range(0, batches):
                if GROUPS > 0:
                    begin, end = M * 0, covered
                else:
                    scanned = b * (scans > 1).to(gl.int32)
                    begin = gl.load(covered_range + scanned * 2).to(gl.int32)
                    end = gl.load(covered_range + scanned * 2 + 1).to(gl.int32)
                head = gl.cdiv(begin, BM)
                tail = gl.cdiv(M - end, BM)
                for t in range(gl.program_id(0), (head + tail) * column_tiles, gl.num_programs(0)):
                    tm = t // column_tiles
                    first = gl.where(tm < head, tm * BM, end + (tm - head) * BM)
                    last = gl.where(tm < head, begin, M)
                    rows = gl.minimum(last - first, BM)
                    column = t % column_tiles * BN
                    at = FAR - rows + WHICH * CM
                    if rows > WHICH * CM:
                        copy_out(out, [b, FAR, first + rows, at, column], buffer)
                        if SUBTILES == 2:
                            copy_out(out, [b, FAR, first + rows, at, column + BN // 2], buffer)
    tma.store_wait(0)


@gluon.jit
def non_contracting(
    lhs, rhs, out, rhs_maps, tiles, tile_count, covered_range, group_starts, group_ends, sizes, sizes_step, fault, M, N, K, groups, batches,
    scans, swizzle, zero_uncovered, sizes_are_wide, sizes_are_ends, alpha,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, SPARE: gl.constexpr, GROUPS: gl.constexpr, LOG: gl.constexpr,
    RHS_K_INNER: gl.constexpr, TABLE: gl.constexpr, PROGRAMMATIC: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """`portable.non_contracting`, with descriptors for operands.

    Args:
        lhs: (batch, w, j, i, k), boxes (1, 1, 1, BM / CONSUMERS, BK). rhs: (g, batch, k, n) or, RHS_K_INNER, (g, batch, n, k), boxes
            (1, 1, BK, BN) or (1, 1, BN, BK); where LISTED, what all groups' arrays share, (1, batch, ...). out: (batch, w, j, i, n), boxes
            (1, 1, 1, BM / CONSUMERS, BN / SUBTILES).
        rhs_maps: where LISTED, a tensor map for each group's array.
        tiles, tile_count, covered_range, group_starts, group_ends: what the scan in front of this has found, without GROUPS.
        sizes, sizes_step, sizes_are_wide, sizes_are_ends, fault: for `scan_groups`, with GROUPS.
        swizzle: row tiles that go through the columns side by side, at the most.
        REGISTERS, SPARE: a thread of a consumer and of the producer.
        GROUPS: that the block has room to scan, a power of two from 128, or 0: they were scanned before. LOG: its logarithm.
    """
    a_ring = gl.allocate_shared_memory(lhs.dtype, [STAGES * CONSUMERS] + lhs.block_type.shape, lhs.layout)
    b_ring = gl.allocate_shared_memory(rhs.dtype, [STAGES] + rhs.block_type.shape, rhs.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [CONSUMERS * BUFFERS] + out.block_type.shape, out.layout)
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, FIELDS], NUMBERS)
    full, empty = make_ring(STAGES, CONSUMERS)
    ROOM: gl.constexpr = GROUPS if GROUPS > 0 else 1
    end_table = gl.allocate_shared_memory(gl.int32, [ROOM, 1], NUMBERS)
    tile_table = gl.allocate_shared_memory(gl.int32, [ROOM, 1], NUMBERS)
    found, covered = M * 0, M * 0
    if GROUPS > 0:
        found, covered = scan_groups(
            sizes, sizes_step, sizes_are_wide, sizes_are_ends, groups, M, fault,
            reinterpret(end_table, gl.int32, [GROUPS], NUMBERS), reinterpret(tile_table, gl.int32, [GROUPS], NUMBERS), GROUPS, BM,
        )  # fmt: skip
    multiply = (
        out, tile_count, covered_range, found, covered, M, N, K, batches, scans, zero_uncovered, alpha,
        a_ring, b_ring, buffers, notes, full, empty,
    )  # fmt: skip
    copy = (
        lhs, rhs, rhs_maps, tiles, tile_count, group_starts, group_ends, found, end_table, tile_table, M, N, K, groups,
        batches // scans, swizzle, a_ring, b_ring, notes, full, empty,
    )  # fmt: skip
    # constexpr values stand in place: they would not survive an assignment
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consumer, (multiply, 0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, GROUPS, TABLE, PROGRAMMATIC)),
            (producer, (copy, BM, BN, BK, STAGES, CONSUMERS, RHS_K_INNER, GROUPS, LOG, TABLE, PROGRAMMATIC, LISTED)),
        ], [1], [SPARE])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (multiply, 0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, GROUPS, TABLE, PROGRAMMATIC)),
            (consumer, (multiply, 1, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, GROUPS, TABLE, PROGRAMMATIC)),
            (producer, (copy, BM, BN, BK, STAGES, CONSUMERS, RHS_K_INNER, GROUPS, LOG, TABLE, PROGRAMMATIC, LISTED)),
        ], [4, 1], [REGISTERS, SPARE])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (multiply, 0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, GROUPS, TABLE, PROGRAMMATIC)),
            (consumer, (multiply, 1, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, GROUPS, TABLE, PROGRAMMATIC)),
            (consumer, (multiply, 2, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, GROUPS, TABLE, PROGRAMMATIC)),
            (producer, (copy, BM, BN, BK, STAGES, CONSUMERS, RHS_K_INNER, GROUPS, LOG, TABLE, PROGRAMMATIC, LISTED)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, SPARE])  # fmt: skip
