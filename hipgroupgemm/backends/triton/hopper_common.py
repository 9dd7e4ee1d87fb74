"""What the sm_90 kernels share: TMA copies, a ring of stages, warp specialisation, asynchronous wgmma. In Gluon.

One warp copies operand tiles into a ring of shared-memory stages and runs ahead of the others, also across tiles, so that memory stays
busy while a tile is finished. One or more *consumers*, four warps each, multiply: each has its own rows of the tile and shares the columns'
operand with the others. They do not wait for each other: while one stores its rows, the others go on multiplying, and it may be ahead
of them by as many steps as the ring is deep.

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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

FAR = gl.constexpr(1 << 30)
# renamed between Triton 3.6 and 3.9
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


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
def skip_steps(steps, step, full, empty, STAGES: gl.constexpr):
    """Lets `steps` stages pass: for a consumer without rows in this tile."""
    for i in range(0, steps):
        stage = (step + i) % STAGES
        mbarrier.wait(full.index(stage), ((step + i) // STAGES) & 1)
        mbarrier.arrive(empty.index(stage), count=1)
