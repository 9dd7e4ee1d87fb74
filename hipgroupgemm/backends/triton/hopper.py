"""Kernels for sm_90: TMA copies, warp-specialised, asynchronous wgmma, in Gluon. 16-bit operands, beta = 0, no bias.

One warp copies operand tiles into a ring of shared-memory stages and runs ahead of the others, also across tiles, so that memory stays
busy while a tile is finished; the other warps multiply, and hand each finished tile to the copy engine.

Ragged tiles need no masks. An operand with ragged rows is described to the copy engine as (batch, j, i, column) where j and i step
over rows alike: element (j, i) is row j + i, and boxes stick out of i's range where valid rows end. What is outside arrives as zeros
and is not stored, so no other group's rows are ever read: NaN there cannot come in. (Triton's own `triton.tools.ragged_tma` steps over
rows twice for the same reason.) For k in CONTRACTING, whose order does not matter, the box is at j = first, i = valid - height: surplus
entries come first, with negative i. Stores refuse negative coordinates, so in NON_CONTRACTING surplus entries come last: i ends at
TALLEST, the box is at j = first + valid, i = TALLEST - valid, and the described base lies TALLEST rows before the operand, which is
where (0, 0) would be; only valid rows are touched.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, RUF005, RUF059

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

TALLEST = gl.constexpr(256)


@gluon.jit
def wait_for_scan(PROGRAMMATIC: gl.constexpr):
    """With programmatic launch this grid may run before the scan's results are there."""
    if PROGRAMMATIC:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def place(t, tiles, window, columns):
    """As `portable.place`."""
    per = window * columns
    first = t // per * window
    size = gl.minimum(window, tiles - first)
    rem = t % per
    return first + rem % size, rem // size


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
def non_contracting_copies(
    lhs,
    rhs,
    tiles,
    tile_count,
    rows_total,
    columns,
    depth,
    groups,
    outer,
    window,
    a_ring,
    b_ring,
    full,
    empty,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    RHS_K_INNER: gl.constexpr,
    TABLE: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):
    """The copying warp of `non_contracting`."""
    wait_for_scan(PROGRAMMATIC)
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
            tma.async_copy_global_to_shared(lhs, [b, first + rows, TALLEST - rows, k], ready, a_ring.index(stage))
            if RHS_K_INNER:
                tma.async_copy_global_to_shared(rhs, [g, b, tn * BN, k], ready, b_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(rhs, [g, b, k, tn * BN], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def store_tile(out, acc, buffer, x, y, rows, column, BM: gl.constexpr, BN: gl.constexpr, SUBTILES: gl.constexpr):
    """Hands a tile to the copy engine, in one piece or in two halves; the buffer is free again when the copy has read it."""
    if SUBTILES == 1:
        tma.store_wait(0)
        buffer.reshape([BM, BN]).store(acc.to(buffer.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [x, y, rows, column], buffer)
    else:
        left, right = acc.reshape([BM, 2, BN // 2]).permute((0, 2, 1)).split()
        tma.store_wait(0)
        buffer.reshape([BM, BN // 2]).store(left.to(buffer.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [x, y, rows, column], buffer)
        tma.store_wait(0)
        buffer.reshape([BM, BN // 2]).store(right.to(buffer.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [x, y, rows, column + BN // 2], buffer)


@gluon.jit
def non_contracting_products(
    out,
    tiles,
    tile_count,
    cover,
    rows_total,
    columns,
    depth,
    groups,
    batches,
    scans,
    window,
    zero_tail,
    alpha,
    a_ring,
    b_ring,
    buffer,
    full,
    empty,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr,
    RHS_K_INNER: gl.constexpr,
    TABLE: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):
    """The multiplying warps of `non_contracting`."""
    wait_for_scan(PROGRAMMATIC)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, MMA_N, 16])
    column_tiles = gl.cdiv(columns, BN)
    row_tiles = row_tile_count(tile_count, rows_total, BM, TABLE)
    per = row_tiles * column_tiles
    outer = batches // scans
    step = 0
    for t in range(gl.program_id(0), per * outer, gl.num_programs(0)):
        tm, tn = place(t % per, row_tiles, window, column_tiles)
        problem, rows, first = read_tile(tiles, tm, rows_total, BM, TABLE)
        acc = gl.zeros([BM, BN], gl.float32, layout)
        for k in range(0, depth, BK):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            a = a_ring.index(stage).reshape([BM, BK])
            if RHS_K_INNER:
                b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
            else:
                b = b_ring.index(stage).reshape([BK, BN])
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if k > 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=depth > 0)
        b = t // per + problem // groups
        store_tile(out, acc * alpha, buffer, b, first + rows, TALLEST - rows, tn * BN, BM, BN, SUBTILES)
    if TABLE:
        if zero_tail != 0:
            tma.store_wait(0)
            buffer.reshape([BM, BN // SUBTILES]).store(gl.zeros([BM, BN // SUBTILES], buffer.dtype, layout))
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
                    tma.async_copy_shared_to_global(out, [b, first + rows, TALLEST - rows, column], buffer)
                    if SUBTILES == 2:
                        tma.async_copy_shared_to_global(out, [b, first + rows, TALLEST - rows, column + BN // 2], buffer)
    tma.store_wait(0)


@gluon.jit
def make_ring(STAGES: gl.constexpr):
    """The stages' barriers: full (copies have arrived) and empty (the multiplying warps are done)."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def non_contracting(
    lhs,
    rhs,
    out,
    tiles,
    tile_count,
    cover,
    rows_total,
    columns,
    depth,
    groups,
    batches,
    scans,
    window,
    zero_tail,
    alpha,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr,
    RHS_K_INNER: gl.constexpr,
    TABLE: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):
    """`portable.non_contracting`, with descriptors for operands.

    Args:
        lhs: (batch, j, i, k), boxes (1, 1, BM, BK). rhs: (g, batch, k, n) or, RHS_K_INNER, (g, batch, n, k), boxes (1, 1, BK, BN)
            or (1, 1, BN, BK). out: (batch, j, i, n), boxes (1, 1, BM, BN / SUBTILES).
    """
    a_ring = gl.allocate_shared_memory(lhs.dtype, [STAGES] + lhs.block_type.shape, lhs.layout)
    b_ring = gl.allocate_shared_memory(rhs.dtype, [STAGES] + rhs.block_type.shape, rhs.layout)
    buffer = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    full, empty = make_ring(STAGES)
    gl.warp_specialize(
        [  # in place: constexpr values would not survive an assignment
            (
                non_contracting_products,
                (
                    out,
                    tiles,
                    tile_count,
                    cover,
                    rows_total,
                    columns,
                    depth,
                    groups,
                    batches,
                    scans,
                    window,
                    zero_tail,
                    alpha,
                    a_ring,
                    b_ring,
                    buffer,
                    full,
                    empty,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    WARPS,
                    MMA_N,
                    SUBTILES,
                    RHS_K_INNER,
                    TABLE,
                    PROGRAMMATIC,
                ),
            ),
            (
                non_contracting_copies,
                (
                    lhs,
                    rhs,
                    tiles,
                    tile_count,
                    rows_total,
                    columns,
                    depth,
                    groups,
                    batches // scans,
                    window,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    RHS_K_INNER,
                    TABLE,
                    PROGRAMMATIC,
                ),
            ),
        ],
        [1],
        [40],
    )


@gluon.jit
def read_slab(starts, ends, slab, groups, scans, active):
    """(group, batch, begin, end) of a slab; nothing to read where alpha is 0."""
    g = slab % groups
    b = slab // groups
    at = b * (scans > 1).to(gl.int32) * groups + g
    begin = gl.load(starts + at).to(gl.int32)
    end = gl.load(ends + at).to(gl.int32)
    return g, b, begin, gl.where(active != 0, end, begin)


@gluon.jit
def contracting_copies(
    lhs,
    rhs,
    starts,
    ends,
    rows,
    columns,
    groups,
    batches,
    scans,
    window,
    active,
    a_ring,
    b_ring,
    full,
    empty,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):
    """The copying warp of `contracting`."""
    wait_for_scan(PROGRAMMATIC)
    row_tiles = gl.cdiv(rows, BM)
    column_tiles = gl.cdiv(columns, BN)
    per = row_tiles * column_tiles
    step = 0
    for t in range(gl.program_id(0), groups * batches * per, gl.num_programs(0)):
        tm, tn = place(t % per, row_tiles, window, column_tiles)
        g, b, begin, end = read_slab(starts, ends, t // per, groups, scans, active)
        for k in range(begin, end, BK):
            stage = step % STAGES
            valid = gl.minimum(end - k, BK)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(lhs, [b, k, valid - BK, tm * BM], ready, a_ring.index(stage))
            tma.async_copy_global_to_shared(rhs, [b, k, valid - BK, tn * BN], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def contracting_products(
    out,
    starts,
    ends,
    rows,
    columns,
    groups,
    batches,
    scans,
    window,
    active,
    alpha,
    a_ring,
    b_ring,
    buffer,
    full,
    empty,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):
    """The multiplying warps of `contracting`."""
    wait_for_scan(PROGRAMMATIC)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, MMA_N, 16])
    row_tiles = gl.cdiv(rows, BM)
    column_tiles = gl.cdiv(columns, BN)
    per = row_tiles * column_tiles
    step = 0
    for t in range(gl.program_id(0), groups * batches * per, gl.num_programs(0)):
        tm, tn = place(t % per, row_tiles, window, column_tiles)
        g, b, begin, end = read_slab(starts, ends, t // per, groups, scans, active)
        acc = gl.zeros([BM, BN], gl.float32, layout)
        for k in range(begin, end, BK):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            x = a_ring.index(stage).reshape([BK, BM]).permute((1, 0))
            y = b_ring.index(stage).reshape([BK, BN])
            acc = warpgroup_mma(x, y, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if k > begin:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=end > begin)
        store_tile(out, acc * alpha, buffer, g, b, tm * BM, tn * BN, BM, BN, SUBTILES)
    tma.store_wait(0)


@gluon.jit
def contracting(
    lhs,
    rhs,
    out,
    starts,
    ends,
    rows,
    columns,
    groups,
    batches,
    scans,
    window,
    active,
    alpha,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):
    """`portable.contracting`, with descriptors for operands.

    Args:
        lhs: (batch, j, i, m), boxes (1, 1, BK, BM). rhs: (batch, j, i, n), boxes (1, 1, BK, BN). out: (g, batch, m, n), boxes
            (1, 1, BM, BN / SUBTILES).
    """
    a_ring = gl.allocate_shared_memory(lhs.dtype, [STAGES] + lhs.block_type.shape, lhs.layout)
    b_ring = gl.allocate_shared_memory(rhs.dtype, [STAGES] + rhs.block_type.shape, rhs.layout)
    buffer = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    full, empty = make_ring(STAGES)
    gl.warp_specialize(
        [  # in place: constexpr values would not survive an assignment
            (
                contracting_products,
                (
                    out,
                    starts,
                    ends,
                    rows,
                    columns,
                    groups,
                    batches,
                    scans,
                    window,
                    active,
                    alpha,
                    a_ring,
                    b_ring,
                    buffer,
                    full,
                    empty,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    WARPS,
                    MMA_N,
                    SUBTILES,
                    PROGRAMMATIC,
                ),
            ),
            (
                contracting_copies,
                (
                    lhs,
                    rhs,
                    starts,
                    ends,
                    rows,
                    columns,
                    groups,
                    batches,
                    scans,
                    window,
                    active,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    BM,
                    BN,
                    BK,
                    STAGES,
                    PROGRAMMATIC,
                ),
            ),
        ],
        [1],
        [40],
    )
