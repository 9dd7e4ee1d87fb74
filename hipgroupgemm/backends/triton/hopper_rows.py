"""NON_CONTRACTING and BATCH on sm_90: 16-bit operands, beta = 0, no bias. How it works: `hopper_common`."""

# mypy: ignore-errors
# ruff: noqa: SIM102, RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hipgroupgemm.backends.triton.hopper_common import FAR, copy_in, copy_out, make_ring, place, skip_steps, wait_for_scan


@gluon.jit
def row_tile_count(tile_count, rows_total, BM: gl.constexpr, TABLE: gl.constexpr):
    """Row tiles: those of the table, or without one those of all rows."""
    if TABLE:
        return gl.load(tile_count)
    else:
        return gl.cdiv(rows_total, BM)


@gluon.jit
def read_tile(tiles, tm, rows_total, BM: gl.constexpr, TABLE: gl.constexpr):
    """(problem, rows, first row) of a row tile."""
    if TABLE:
        at = tiles + tm * 4
        return gl.load(at), gl.load(at + 1), gl.load(at + 2)
    else:
        return tm * 0, gl.minimum(rows_total - tm * BM, BM), tm * BM


@gluon.jit
def copies(
    lhs, rhs, tiles, tile_count, rows_total, columns, depth, groups, outer, window, a_ring, b_ring, full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    RHS_K_INNER: gl.constexpr, TABLE: gl.constexpr, PROGRAMMATIC: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    wait_for_scan(PROGRAMMATIC)
    CM: gl.constexpr = BM // CONSUMERS
    column_tiles = gl.cdiv(columns, BN)
    row_tiles = row_tile_count(tile_count, rows_total, BM, TABLE)
    per = row_tiles * column_tiles
    step = 0
    for t in range(gl.program_id(0), per * outer, gl.num_programs(0)):
        tm, tn = place(t % per, row_tiles, window, column_tiles)
        problem, rows, first = read_tile(tiles, tm, rows_total, BM, TABLE)
        b = t // per + problem // groups
        g = problem % groups
        for k in range(0, depth, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (BM + BN) * BK * 2)
            for i in gl.static_range(CONSUMERS):
                at = [b, FAR, first + rows, gl.minimum(FAR - rows + i * CM, FAR - 1), k]
                copy_in(lhs, at, ready, a_ring.index(stage * CONSUMERS + i))
            if RHS_K_INNER:
                copy_in(rhs, [g, b, tn * BN, k], ready, b_ring.index(stage))
            else:
                copy_in(rhs, [g, b, k, tn * BN], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def store_rows(
    out, acc, buffers, WHICH: gl.constexpr, b, j, i, column,
    CM: gl.constexpr, BN: gl.constexpr, SUBTILES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Hands CM rows of a tile to the copy engine, in one piece or in two halves.

    A buffer is written again when the copy has read it: with two buffers the copy before the last one.
    """
    if SUBTILES == 1:
        buffer = buffers.index(WHICH * BUFFERS)
        tma.store_wait(0)
        buffer.reshape([CM, BN]).store(acc.to(buffer.dtype))
        fence_async_shared()
        copy_out(out, [b, FAR, j, i, column], buffer)
    else:
        left, right = acc.reshape([CM, 2, BN // 2]).permute((0, 2, 1)).split()
        buffer = buffers.index(WHICH * BUFFERS)
        tma.store_wait(BUFFERS - 1)
        buffer.reshape([CM, BN // 2]).store(left.to(buffer.dtype))
        fence_async_shared()
        copy_out(out, [b, FAR, j, i, column], buffer)
        second = buffers.index(WHICH * BUFFERS + BUFFERS - 1)
        tma.store_wait(BUFFERS - 1)
        second.reshape([CM, BN // 2]).store(right.to(second.dtype))
        fence_async_shared()
        copy_out(out, [b, FAR, j, i, column + BN // 2], second)


@gluon.jit
def products(
    out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
    a_ring, b_ring, buffers, full, empty,
    WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    MMA_N: gl.constexpr, SUBTILES: gl.constexpr, BUFFERS: gl.constexpr, RHS_K_INNER: gl.constexpr, TABLE: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):  # fmt: skip
    """Consumer number WHICH."""
    wait_for_scan(PROGRAMMATIC)
    CM: gl.constexpr = BM // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MMA_N, 16])
    column_tiles = gl.cdiv(columns, BN)
    row_tiles = row_tile_count(tile_count, rows_total, BM, TABLE)
    per = row_tiles * column_tiles
    outer = batches // scans
    steps = gl.cdiv(depth, BK)
    step = 0
    for t in range(gl.program_id(0), per * outer, gl.num_programs(0)):
        tm, tn = place(t % per, row_tiles, window, column_tiles)
        problem, rows, first = read_tile(tiles, tm, rows_total, BM, TABLE)
        if rows > WHICH * CM:
            acc = gl.zeros([CM, BN], gl.float32, layout)
            for i in range(0, steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                x = a_ring.index(stage * CONSUMERS + WHICH).reshape([CM, BK])
                if RHS_K_INNER:
                    y = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
                else:
                    y = b_ring.index(stage).reshape([BK, BN])
                acc = warpgroup_mma(x, y, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                if i > 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            b = t // per + problem // groups
            store_rows(out, acc * alpha, buffers, WHICH, b, first + rows, FAR - rows + WHICH * CM, tn * BN, CM, BN, SUBTILES, BUFFERS)
        else:
            skip_steps(steps, step, full, empty, STAGES)
            step += steps
    if TABLE:
        if zero_tail != 0:
            buffer = buffers.index(WHICH * BUFFERS)
            tma.store_wait(0)
            buffer.reshape([CM, BN // SUBTILES]).store(gl.zeros([CM, BN // SUBTILES], buffer.dtype, layout))
            fence_async_shared()
            for b in range(0, batches):
                scanned = b * (scans > 1).to(gl.int32)
                begin = gl.load(cover + scanned * 2).to(gl.int32)
                end = gl.load(cover + scanned * 2 + 1).to(gl.int32)
                head = gl.cdiv(begin, BM)
                tail = gl.cdiv(rows_total - end, BM)
                for t in range(gl.program_id(0), (head + tail) * column_tiles, gl.num_programs(0)):
                    tm = t // column_tiles
                    first = gl.where(tm < head, tm * BM, end + (tm - head) * BM)
                    last = gl.where(tm < head, begin, rows_total)
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
    lhs, rhs, out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, SPARE: gl.constexpr, RHS_K_INNER: gl.constexpr,
    TABLE: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):  # fmt: skip
    """`portable.non_contracting`, with descriptors for operands.

    Args:
        lhs: (batch, w, j, i, k), boxes (1, 1, 1, BM / CONSUMERS, BK). rhs: (g, batch, k, n) or, RHS_K_INNER, (g, batch, n, k), boxes
            (1, 1, BK, BN) or (1, 1, BN, BK). out: (batch, w, j, i, n), boxes (1, 1, 1, BM / CONSUMERS, BN / SUBTILES).
        REGISTERS, SPARE: a thread of a consumer and of the copying warp.
    """
    a_ring = gl.allocate_shared_memory(lhs.dtype, [STAGES * CONSUMERS] + lhs.block_type.shape, lhs.layout)
    b_ring = gl.allocate_shared_memory(rhs.dtype, [STAGES] + rhs.block_type.shape, rhs.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [CONSUMERS * BUFFERS] + out.block_type.shape, out.layout)
    full, empty = make_ring(STAGES, CONSUMERS)
    # the tuples stand in place: constexpr values would not survive an assignment
    if CONSUMERS == 1:
        gl.warp_specialize([
            (products, (
                out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
                a_ring, b_ring, buffers, full, empty,
                0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
            (copies, (
                lhs, rhs, tiles, tile_count, rows_total, columns, depth, groups, batches // scans, window, a_ring, b_ring, full, empty,
                BM, BN, BK, STAGES, CONSUMERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
        ], [1], [SPARE])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (products, (
                out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
                a_ring, b_ring, buffers, full, empty,
                0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
            (products, (
                out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
                a_ring, b_ring, buffers, full, empty,
                1, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
            (copies, (
                lhs, rhs, tiles, tile_count, rows_total, columns, depth, groups, batches // scans, window, a_ring, b_ring, full, empty,
                BM, BN, BK, STAGES, CONSUMERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
        ], [4, 1], [REGISTERS, SPARE])  # fmt: skip
    else:
        gl.warp_specialize([
            (products, (
                out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
                a_ring, b_ring, buffers, full, empty,
                0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
            (products, (
                out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
                a_ring, b_ring, buffers, full, empty,
                1, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
            (products, (
                out, tiles, tile_count, cover, rows_total, columns, depth, groups, batches, scans, window, zero_tail, alpha,
                a_ring, b_ring, buffers, full, empty,
                2, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
            (copies, (
                lhs, rhs, tiles, tile_count, rows_total, columns, depth, groups, batches // scans, window, a_ring, b_ring, full, empty,
                BM, BN, BK, STAGES, CONSUMERS, RHS_K_INNER, TABLE, PROGRAMMATIC,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, SPARE])  # fmt: skip
