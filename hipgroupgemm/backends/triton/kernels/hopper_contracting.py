"""CONTRACTING on sm_90: 16-bit operands, beta = 0. How it works: `hopper_common`."""

# mypy: ignore-errors
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hipgroupgemm.backends.triton.kernels.hopper_common import (
    FIELDS,
    NUMBERS,
    copy_in,
    descriptor_of,
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


@gluon.jit
def read_problem(problem, group_starts, group_ends, end_table, groups, scans, active, GROUPS: gl.constexpr):
    """(group, batch, begin, end) of a problem; nothing to read where alpha is 0."""
    g = problem % groups
    b = problem // groups
    if GROUPS > 0:
        begin, end = read_bounds(end_table, g)
    else:
        at = b * (scans > 1).to(gl.int32) * groups + g
        begin, end = gl.load(group_starts + at).to(gl.int32), gl.load(group_ends + at).to(gl.int32)
    return g, b, begin, gl.where(active != 0, end, begin)


@gluon.jit
def producer(
    tensors, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GROUPS: gl.constexpr,
    PROGRAMMATIC: gl.constexpr,
):  # fmt: skip
    """The warp that copies; `tensors` are those of `copy` in the kernel below."""
    (
        lhs, rhs, group_starts, group_ends, end_table, M, N, groups, batches, scans, swizzle, active, a_ring, b_ring, notes, full, empty,
    ) = tensors  # fmt: skip
    wait_for_scan(PROGRAMMATIC)
    CM: gl.constexpr = BM // CONSUMERS
    row_tiles = gl.cdiv(M, BM)
    column_tiles = gl.cdiv(N, BN)
    per = row_tiles * column_tiles
    step = 0
    for t in range(gl.program_id(0), groups * batches * per, gl.num_programs(0)):
        tm, tn = swizzled(t % per, row_tiles, swizzle, column_tiles)
        g, b, begin, end = read_problem(t // per, group_starts, group_ends, end_table, groups, scans, active, GROUPS)
        # an empty group has one step, of nothing
        for k in range(begin, gl.maximum(end, begin + 1), BK):
            stage = step % STAGES
            valid = gl.minimum(end - k, BK)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if k == begin:
                tell(notes, 2 * stage, gl.cdiv(gl.maximum(end - begin, 1), BK), tm * BM, tn * BN, 0)
                tell(notes, 2 * stage + 1, g, b, 0, 0)
            ready = full.index(stage)
            mbarrier.expect(ready, (BM + BN) * BK * 2)
            for i in gl.static_range(CONSUMERS):
                at = [b, k, valid - BK, tm * BM + i * CM]
                copy_in(lhs, at, ready, a_ring.index(stage * CONSUMERS + i))
            copy_in(rhs, [b, k, valid - BK, tn * BN], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def store_directly(
    pointer, acc, row, column, M, N, row_step, CM: gl.constexpr, BN: gl.constexpr, STREAMING: gl.constexpr,
):  # fmt: skip
    """Writes CM rows of a tile from registers, each row's columns in one piece, as wide as a warp can."""
    across: gl.constexpr = BN // 8 if BN < 256 else 32
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    value = gl.convert_layout(acc.to(pointer.dtype.element_ty), wide)
    r = row + gl.arange(0, CM, layout=gl.SliceLayout(1, wide))
    n = column + gl.arange(0, BN, layout=gl.SliceLayout(0, wide))
    at = gl.expand_dims(r, 1).to(gl.int64) * row_step + gl.expand_dims(n, 0)
    inside = gl.expand_dims(r < M, 1) & gl.expand_dims(n < N, 0)
    # what is known of the arguments (rows and row lengths are multiples of 16 bytes) does not come through to a consumer by itself
    vector: gl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    at_once = gl.max_contiguous(gl.multiple_of(pointer + at, [1, 16]), [1, vector])
    inside = gl.max_constancy(inside, [1, vector])
    if STREAMING:
        gl.store(at_once, value, mask=inside, cache_modifier=".cs")
    else:
        gl.store(at_once, value, mask=inside)


@gluon.jit
def consumer(
    tensors, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    MMA_N: gl.constexpr, SUBTILES: gl.constexpr, BUFFERS: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """Consumer number WHICH; `tensors` are those of `multiply` in the kernel below."""
    out, out_maps, out_pointer, out_g, out_b, out_m, M, N, groups, batches, alpha, a_ring, b_ring, buffers, notes, full, empty = tensors
    CM: gl.constexpr = BM // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MMA_N, 16])
    tiles = groups * batches * gl.cdiv(M, BM) * gl.cdiv(N, BN)
    step = 0
    known = M * 0 - 1
    acc = gl.zeros([CM, BN], gl.float32, layout)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        steps, first, column, _ = hear(notes, 2 * (step % STAGES))
        g, b, _, _ = hear(notes, 2 * (step % STAGES) + 1)
        row = first + WHICH * CM
        if row < M:
            for i in range(0, steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                x = a_ring.index(stage * CONSUMERS + WHICH).reshape([BK, CM]).permute((1, 0))
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
            if SUBTILES == 0:
                if LISTED:
                    matrix = gl.load(out_pointer.to(gl.pointer_type(gl.int64)) + g).to(out_pointer.dtype)
                else:
                    matrix = out_pointer + g.to(gl.int64) * out_g
                store_directly(matrix + b.to(gl.int64) * out_b, acc, row, column, M, N, out_m, CM, BN, BUFFERS > 1)
            elif LISTED:
                own = descriptor_of(out_maps, g, out, known)
                known = g
                store_tile(own, acc, buffers, WHICH, (g * 0, b, row), column, CM, BN, SUBTILES, BUFFERS)
            else:
                store_tile(out, acc, buffers, WHICH, (g, b, row), column, CM, BN, SUBTILES, BUFFERS)
        else:
            skip_steps(steps, step, full, empty, STAGES)
            step += steps
    tma.store_wait(0)


@gluon.jit
def contracting(
    lhs, rhs, out, out_maps, out_pointer, out_g, out_b, out_m, group_starts, group_ends, sizes, sizes_step, fault, K, M, N, groups,
    batches, scans, swizzle, active, sizes_are_wide, sizes_are_ends, alpha,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, MMA_N: gl.constexpr,
    SUBTILES: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr, SPARE: gl.constexpr, GROUPS: gl.constexpr,
    PROGRAMMATIC: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """`portable.contracting`, with descriptors for operands.

    Args:
        lhs: (batch, j, i, m), boxes (1, 1, BK, BM / CONSUMERS). rhs: (batch, j, i, n), boxes (1, 1, BK, BN). out: (g, batch, m, n),
            boxes (1, 1, BM / CONSUMERS, BN / SUBTILES). out_pointer, out_g, out_b, out_m: the same with its strides (elements).
            LISTED: out is of (1, batch, m, n), for what all groups share; out_maps has a tensor map and out_pointer an address for each
            group's.
        group_starts, group_ends: what the scan in front of this has found, without GROUPS.
        sizes, sizes_step, sizes_are_wide, sizes_are_ends, fault, K: for `scan_groups`, with GROUPS.
        SUBTILES: 0 stores from registers, past the caches with BUFFERS 2; 1 or 2 are pieces for the copy engine.
        REGISTERS, SPARE: a thread of a consumer and of the producer.
        GROUPS: that the block has room to scan, a power of two from 128, or 0: they were scanned before.
    """
    a_ring = gl.allocate_shared_memory(lhs.dtype, [STAGES * CONSUMERS] + lhs.block_type.shape, lhs.layout)
    b_ring = gl.allocate_shared_memory(rhs.dtype, [STAGES] + rhs.block_type.shape, rhs.layout)
    BUFFERED: gl.constexpr = CONSUMERS * BUFFERS if SUBTILES > 0 else 1
    buffers = gl.allocate_shared_memory(out.dtype, [BUFFERED] + out.block_type.shape, out.layout)
    notes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, FIELDS], NUMBERS)
    full, empty = make_ring(STAGES, CONSUMERS)
    ROOM: gl.constexpr = GROUPS if GROUPS > 0 else 1
    end_table = gl.allocate_shared_memory(gl.int32, [ROOM, 1], NUMBERS)
    tile_table = gl.allocate_shared_memory(gl.int32, [ROOM, 1], NUMBERS)
    if GROUPS > 0:
        scan_groups(
            sizes, sizes_step, sizes_are_wide, sizes_are_ends, groups, K, fault,
            reinterpret(end_table, gl.int32, [GROUPS], NUMBERS), reinterpret(tile_table, gl.int32, [GROUPS], NUMBERS), GROUPS, BM,
        )  # fmt: skip
    multiply = (
        out, out_maps, out_pointer, out_g, out_b, out_m, M, N, groups, batches, alpha, a_ring, b_ring, buffers, notes, full, empty,
    )  # fmt: skip
    copy = (
        lhs, rhs, group_starts, group_ends, end_table, M, N, groups, batches, scans, swizzle, active, a_ring, b_ring, notes, full, empty,
    )  # fmt: skip
    # constexpr values stand in place: they would not survive an assignment
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consumer, (multiply, 0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, LISTED)),
            (producer, (copy, BM, BN, BK, STAGES, CONSUMERS, GROUPS, PROGRAMMATIC)),
        ], [1], [SPARE])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (multiply, 0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, LISTED)),
            (consumer, (multiply, 1, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, LISTED)),
            (producer, (copy, BM, BN, BK, STAGES, CONSUMERS, GROUPS, PROGRAMMATIC)),
        ], [4, 1], [REGISTERS, SPARE])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (multiply, 0, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, LISTED)),
            (consumer, (multiply, 1, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, LISTED)),
            (consumer, (multiply, 2, BM, BN, BK, STAGES, CONSUMERS, MMA_N, SUBTILES, BUFFERS, LISTED)),
            (producer, (copy, BM, BN, BK, STAGES, CONSUMERS, GROUPS, PROGRAMMATIC)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, SPARE])  # fmt: skip
