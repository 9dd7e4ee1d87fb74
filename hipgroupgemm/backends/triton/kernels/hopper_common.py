"""What the sm_90 kernels share: TMA copies, a ring of stages, warp specialisation, asynchronous wgmma. In Gluon.

One warp, the *producer*, copies operand tiles into a ring of shared-memory stages and runs ahead of the others, also across tiles, so that
memory stays busy while a tile is finished. One or more *consumers*, four warps each, multiply: each has its own rows of the tile and
shares the columns' operand with the others. They do not wait for each other: while one stores its rows, the others go on multiplying,
and it may be ahead of them by as many steps as the ring is deep.

The producer also finds out which tile comes next and where it lies, and leaves that with the tile's first stage (`tell`, `hear`): the
others wait for that stage anyway, and what they do between two tiles is what the matrix unit waits for. A tile always has one
step at least, of zeros if there is nothing to add up, so that accumulators need not be cleared.

Groups are scanned in one of two ways. Up to 1024 of them are scanned here, by every block for itself before it starts, from sizes to
tables in shared memory (`scan_groups`); that is quicker than a launch in front of this one. All else goes through the shared device
routine, whose tables are read from global memory (GROUPS = 0).

Ragged tiles need no masks. An operand with ragged rows is described to the copy engine with two axes j and i that step over rows
alike: element (j, i) is row j + i. A box is placed so that it sticks out of i's range where valid rows end. What is outside arrives
as zeros and is not stored, so no other group's rows are ever read: NaN there cannot come in.

- k in CONTRACTING, whose order does not matter: (batch, j, i, column), the box at j = first, i = valid - height. Surplus entries come
  first, with negative i.
- Rows in NON_CONTRACTING, where stores fault on negative coordinates: (batch, w, j, i, column), i up to FAR, the box at j = first +
  valid, i = FAR - valid. Surplus entries come last. The step of w is 2^35 bytes less one row, so that w = FAR takes off FAR rows and
  adds 2^65 bytes, which is nothing to a 64-bit address. (A base FAR rows before the operand would do the same, but the copy engine
  was seen to fault where a described base is not mapped.) Triton's own `triton.tools.ragged_tma` does this as well.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

FAR = gl.constexpr(1 << 30)
LEAST = gl.constexpr(-(1 << 63))
FIELDS = gl.constexpr(4)
# kinds of faults, as in device/arguments.h
NEGATIVE = gl.constexpr(1)
PAST_END = gl.constexpr(2)
OFFSETS = gl.constexpr(3)
# renamed between Triton 3.6 and 3.9
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def wait_for_scan(PROGRAMMATIC: gl.constexpr):
    """With programmatic launch this grid may run before the scan's results are there."""
    if PROGRAMMATIC:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def swizzled(t, row_tiles, swizzle, column_tiles):
    """As `portable.swizzled`."""
    per = swizzle * column_tiles
    first = t // per * swizzle
    size = gl.minimum(swizzle, row_tiles - first)
    rem = t % per
    return first + rem % size, rem // size


# ---- lists ----------------------------------------------------------------------------------------------------------------------


@builtin
def _reinterpreted(address, like, _semantic=None):
    """A descriptor at a device address, of the box, extents and strides of another.

    Triton's Python has no name for this operation of its compiler: `compiler.py` puts it in the place of what is made here.
    """
    builder, sizes = _semantic.builder, [[number.handle for number in numbers] for numbers in (like.shape, like.strides)]
    handle = builder.create_make_tensor_descriptor(like.type._to_ir(builder), address.handle, *sizes, ir.PADDING_OPTION.PAD_ZERO)
    return tma.tensor_descriptor(handle, like.shape, like.strides, like.block_type, layout=like.layout)


@gluon.jit
def descriptor_of(maps, g, like, known):
    """The descriptor of group g's array in a table of tensor maps of 128 bytes; `known` is the group before.

    A block must fence a map in global memory that the host has written, before it uses that map for the first time (CUDA C++ Programming
    Guide, "Using TMA to transfer multi-dimensional arrays"). As where Triton does, an empty wait follows for ptxas's sake.
    """
    address = maps + g.to(gl.int64) * 16
    if g != known:
        gl.inline_asm_elementwise(
            "fence.proxy.tensormap::generic.acquire.sys [$1], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; // $0",
            "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return _reinterpreted(address.to(gl.pointer_type(like.dtype)), like)


# ---- the ring -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def make_ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The stages' barriers: full (copies have arrived) and empty (all consumers are done)."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def tell(notes, at, a, b, c, d):
    """The producer leaves four numbers for the consumers, before it declares a stage full."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 4, layout=layout)
    notes.index(at).store(gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, d))))
    block_barrier()


@gluon.jit
def hear(notes, at):
    """The four numbers, once the stage is full and before it is declared empty."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 4, layout=layout)
    x = notes.index(at).load(layout)
    a = gl.sum(gl.where(i == 0, x, 0), 0)
    b = gl.sum(gl.where(i == 1, x, 0), 0)
    c = gl.sum(gl.where(i == 2, x, 0), 0)
    d = gl.sum(gl.where(i == 3, x, 0), 0)
    return a, b, c, d


@gluon.jit
def skip_steps(steps, step, full, empty, STAGES: gl.constexpr):
    """Lets `steps` stages pass: for a consumer without rows in this tile."""
    for i in range(0, steps):
        stage = (step + i) % STAGES
        mbarrier.wait(full.index(stage), ((step + i) // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)


# ---- the end of a tile ------------------------------------------------------------------------------------------------------------


@gluon.jit
def store_tile(
    out, acc, buffers, WHICH: gl.constexpr, at, column,
    CM: gl.constexpr, BN: gl.constexpr, SUBTILES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Hands CM rows of a tile to the copy engine, in one piece or in two halves; `at` is where they go, without the column.

    A buffer is written again when the copy has read it: with two buffers the copy before the last one.
    """
    if SUBTILES == 1:
        buffer = buffers.index(WHICH * BUFFERS)
        tma.store_wait(0)
        buffer.reshape([CM, BN]).store(acc.to(buffer.dtype))
        fence_async_shared()
        copy_out(out, at + (column,), buffer)
    else:
        left, right = acc.reshape([CM, 2, BN // 2]).permute((0, 2, 1)).split()
        buffer = buffers.index(WHICH * BUFFERS)
        tma.store_wait(BUFFERS - 1)
        buffer.reshape([CM, BN // 2]).store(left.to(buffer.dtype))
        fence_async_shared()
        copy_out(out, at + (column,), buffer)
        second = buffers.index(WHICH * BUFFERS + BUFFERS - 1)
        tma.store_wait(BUFFERS - 1)
        second.reshape([CM, BN // 2]).store(right.to(second.dtype))
        fence_async_shared()
        copy_out(out, at + (column + BN // 2,), second)


# ---- the scan -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _largest(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _read_sizes(sizes, i, groups, step, wide):
    """int32 or (wide) int64 values, `step` 4-byte words apart; zeros beyond the groups."""
    there = (i >= 0) & (i < groups)
    at = sizes + i.to(gl.int64) * step
    low = gl.load(at, mask=there, other=0).to(gl.int64)
    high = gl.load(at + 1, mask=there & (wide != 0), other=0).to(gl.int64)
    return gl.where(wide != 0, (high << 32) | (low & 0xFFFFFFFF), low)


@gluon.jit
def scan_groups(
    sizes, step, wide, sizes_are_ends, groups, extent, fault, group_ends, tile_ends, GROUPS: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """Sizes (or end offsets) -> tables in shared memory: the end of each group's rows, and of its row tiles of BM rows.

    The rules are those of `device/scan.h`. The first block notes the first fault, if none is noted.

    Returns:
        the number of row tiles, and of covered rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 128], [32], [4], [0])
    i = gl.arange(0, GROUPS, layout=layout)
    most = extent.to(gl.int64)
    raw = _read_sizes(sizes, i, groups, step, wide)
    if sizes_are_ends != 0:
        before = _read_sizes(sizes, i - 1, groups, step, wide)
        own = gl.minimum(gl.maximum(raw, 0), most)
        end = gl.associative_scan(own, 0, _largest)
        start = gl.associative_scan(gl.minimum(gl.maximum(before, 0), most), 0, _largest)
        wrong = (raw < 0) | (raw > most) | (own < start)
    else:
        own = gl.minimum(gl.maximum(raw, 0), most + 1)
        end = gl.associative_scan(own, 0, _sum)
        start = end - own
        wrong = (raw < 0) | ((end > most) & (start <= most))
    first = gl.min(gl.where(wrong & (i < groups), i, GROUPS), 0)
    if (first < groups) & (gl.program_id(0) == 0):
        here = i == first
        value = gl.sum(gl.where(here, raw, 0), 0)
        rows = gl.sum(gl.where(here, start, 0), 0)
        if (gl.load(fault) & 0xFFFFFFFF) == 0:
            kind = gl.where(sizes_are_ends != 0, OFFSETS, gl.where(value < 0, NEGATIVE, PAST_END))
            short = gl.where(value < LEAST + rows, LEAST, value - rows)
            gl.store(fault, kind.to(gl.int64))  # the upper half is the batch
            gl.store(fault + 1, first.to(gl.int64))
            gl.store(fault + 2, gl.where(sizes_are_ends != 0, short, value))
            gl.store(fault + 3, most - rows)
    end = gl.minimum(end, most).to(gl.int32)
    start = gl.minimum(start, most).to(gl.int32)
    tiles = gl.where(i < groups, (end - start + BM - 1) // BM, 0)
    group_ends.store(end)
    tile_ends.store(gl.associative_scan(tiles, 0, _sum))
    found, covered = gl.sum(tiles, 0), gl.max(end, 0)
    # What warp_specialize hands to the other warps may be written where the reductions above have their scratch, and Triton sees no
    # need to wait for the slowest warp's reading there. Without this a warp now and then took one number for the other, and all hung.
    block_barrier()
    return found, covered


@gluon.jit
def read_number(table, i):
    """Entry i of a table, for the producer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.max(table.index(i).load(layout), 0)


@gluon.jit
def read_bounds(table, i):
    """(entry i - 1, or 0; entry i) of a table."""
    before = read_number(table, gl.maximum(i - 1, 0))
    return gl.where(i > 0, before, 0), read_number(table, i)


@gluon.jit
def find_group(tile_ends, tile, LOG: gl.constexpr):
    """The first group whose tiles end behind `tile`."""
    found = tile * 0
    for s in gl.static_range(LOG):
        behind = found + (1 << (LOG - 1 - s))
        found = gl.where(read_number(tile_ends, behind - 1) <= tile, behind, found)
    return found
