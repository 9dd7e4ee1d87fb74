"""Kernels for every GPU that Triton compiles for: plain pointers, any strides, any alignment, every rule of the operation.

One kernel a mode. Tiles are taken by a persistent grid. `hipgroupgemm.reference` and `backends.reference.compute` compute the same
on the host; `tests/backends/triton/test_triton_device.py` compares them.

Everything that a tile reads lies inside the operands: surplus columns are masked, surplus rows read the last valid one again (of the same
group, so that nothing of another group's comes in), and all are dropped when the tile is stored. The contracted axis's tail is read as
zeros in both operands: a zero in only one of them would let the other's NaN through.
"""

# Triton needs its kernels' parameters named as they are used, and annotations that are Triton's own.
# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl


@triton.jit
def swizzled(t, row_tiles, swizzle, column_tiles):
    """Number `t` of row_tiles x column_tiles tiles -> (row tile, column tile).

    `swizzle` row tiles go through all columns together, rows fastest, so that tiles that share a group's weights run near each other.
    """
    per = swizzle * column_tiles
    first = t // per * swizzle
    size = tl.minimum(swizzle, row_tiles - first)
    rem = t % per
    return first + rem % size, rem // size


@triton.jit
def combine(acc, alpha, beta, c, at, keep, HAS_C: tl.constexpr):
    """alpha * acc + beta * c, c read only where it is asked for."""
    value = acc * alpha
    if HAS_C:
        value += tl.load(c + at, mask=keep, other=0.0).to(tl.float32) * beta
    return value


@triton.jit
def array_of(operand, g, step, b, batch_step, LISTED: tl.constexpr, ALIGNED: tl.constexpr):
    """Batch entry b of group g's array: g * step elements behind the operand or, where that is a list, at an address in a table there.

    ALIGNED: whether the table's addresses and the batch's steps are multiples of 16 bytes. Triton's analysis forgets what is known of an
    address that becomes a pointer, but believes what it is told of a sum.
    """
    if LISTED:
        array = tl.load(operand.to(tl.pointer_type(tl.int64)) + g).to(operand.dtype) + b * batch_step
        if ALIGNED:
            array = tl.multiple_of(array, 16)
        return array
    else:
        return operand + g * step + b * batch_step


@triton.jit
def non_contracting(
    lhs, rhs, out, c, bias, tiles, tile_count, covered_range, M, N, K, groups, batches, scans, swizzle, zero_uncovered, lhs_b, lhs_m,
    lhs_k, rhs_g, rhs_b, rhs_k, rhs_n, out_b, out_m, out_n, c_b, c_m, c_n, bias_g, bias_n, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TABLE: tl.constexpr, WIDE: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, LISTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """NON_CONTRACTING and BATCH: out[rows of g] = alpha * lhs[rows of g] @ rhs[g] + beta * c + bias[g].

    Args:
        tiles: (tile_count, 4) int32: problem (scanned batch * groups + group), rows, first row (int64). Without TABLE (BATCH) tiles
            are cut from all rows.
        covered_range: (scans, 2) int64, first covered row and end of the covered rows.
        K: 0 where alpha is 0, so that nothing is read.
        batches: batches in all; scans: how many of them were scanned, 1 where they share their sizes.
        swizzle: see `swizzled`.
        lhs_b ... bias_n: strides, elements.
        LISTED, ALIGNED: of rhs, see `array_of`.
    """
    column_tiles = tl.cdiv(N, BN)
    if TABLE:
        row_tiles = tl.load(tile_count)
    else:
        row_tiles = tl.cdiv(M, BM).to(tl.int32)
    per = row_tiles * column_tiles
    outer = batches // scans
    step = tl.num_programs(0)
    for t in tl.range(tl.program_id(0), per * outer, step):
        tm, tn = swizzled(t % per, row_tiles, swizzle, column_tiles)
        if TABLE:
            problem = tl.load(tiles + tm.to(tl.int64) * 4)
            rows = tl.load(tiles + tm.to(tl.int64) * 4 + 1)
            first = tl.load((tiles + tm.to(tl.int64) * 4 + 2).to(tl.pointer_type(tl.int64)))
        else:
            problem = 0
            first = tm.to(tl.int64) * BM
            rows = tl.minimum(M - first, BM).to(tl.int32)
        b = (t // per + problem // groups).to(tl.int64)
        g = (problem % groups).to(tl.int64)
        row = tl.arange(0, BM)
        column = tn * BN + tl.arange(0, BN)
        r = first + tl.minimum(row, rows - 1)
        n = column.to(tl.int64)
        has_column = column < N
        k = tl.arange(0, BK)
        if SWAP:
            acc = tl.zeros((BN, BM), tl.float32)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
        at_lhs = lhs + b * lhs_b + r * lhs_m
        at_rhs = array_of(rhs, g, rhs_g, b, rhs_b, LISTED, ALIGNED) + n * rhs_n
        for k0 in range(0, K, BK):
            kk = (k0 + k).to(tl.int64)
            if SWAP:
                xp = at_lhs[None, :] + kk[:, None] * lhs_k
                yp = at_rhs[:, None] + kk[None, :] * rhs_k
            else:
                xp = at_lhs[:, None] + kk[None, :] * lhs_k
                yp = at_rhs[None, :] + kk[:, None] * rhs_k
            if EVEN_K:
                x = tl.load(xp)
                if SWAP:
                    y = tl.load(yp, mask=has_column[:, None], other=0.0)
                else:
                    y = tl.load(yp, mask=has_column[None, :], other=0.0)
            else:
                inside = k0 + k < K
                if SWAP:
                    x = tl.load(xp, mask=inside[:, None], other=0.0)
                    y = tl.load(yp, mask=inside[None, :] & has_column[:, None], other=0.0)
                else:
                    x = tl.load(xp, mask=inside[None, :], other=0.0)
                    y = tl.load(yp, mask=inside[:, None] & has_column[None, :], other=0.0)
            if WIDE:
                x = x.to(tl.float32)
                y = y.to(tl.float32)
            if SWAP:
                acc = tl.dot(y, x, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if SWAP:
            acc = tl.trans(acc)
        keep = (row < rows)[:, None] & has_column[None, :]
        at = b * c_b + r[:, None] * c_m + n[None, :] * c_n
        value = combine(acc, alpha, beta, c, at, keep, HAS_C)
        if HAS_BIAS:
            value += tl.load(bias + g * bias_g + n * bias_n, mask=has_column, other=0.0).to(tl.float32)[None, :]
        tl.store(out + b * out_b + r[:, None] * out_m + n[None, :] * out_n, value.to(out.dtype.element_ty), mask=keep)
    if TABLE:
        if zero_uncovered != 0:
            for b in range(0, batches):
                scanned = b * (scans > 1)
                begin = tl.load(covered_range + scanned * 2)
                end = tl.load(covered_range + scanned * 2 + 1)
                head = tl.cdiv(begin, BM).to(tl.int32)
                tail = tl.cdiv(M - end, BM).to(tl.int32)
                for t in range(tl.program_id(0), (head + tail) * column_tiles, step):
                    tm = t // column_tiles
                    in_head = tm < head
                    first = tl.where(in_head, tm.to(tl.int64) * BM, end + (tm - head).to(tl.int64) * BM)
                    last = tl.where(in_head, begin, M.to(tl.int64))
                    r = first + tl.arange(0, BM)
                    column = t % column_tiles * BN + tl.arange(0, BN)
                    keep = (r < last)[:, None] & (column < N)[None, :]
                    wide_b = tl.cast(b, tl.int64)
                    n = column.to(tl.int64)
                    at = wide_b * c_b + r[:, None] * c_m + n[None, :] * c_n
                    value = combine(tl.zeros((BM, BN), tl.float32), alpha, beta, c, at, keep, HAS_C)
                    tl.store(out + wide_b * out_b + r[:, None] * out_m + n[None, :] * out_n, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def store_slab(
    acc, out, c, g, b, m, n, keep, out_g, out_b, out_m, out_n, c_g, c_b, c_m, c_n, alpha, beta,
    HAS_C: tl.constexpr, LISTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows m and columns n of group g: out = alpha * acc + beta * c."""
    own_c = c
    if HAS_C:
        own_c = array_of(c, g, c_g, b, c_b, LISTED, ALIGNED)
    value = combine(acc, alpha, beta, own_c, m * c_m + n * c_n, keep, HAS_C)
    own_out = array_of(out, g, out_g, b, out_b, LISTED, ALIGNED)
    tl.store(own_out + m * out_m + n * out_n, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def contracting(
    lhs, rhs, out, c, group_starts, group_ends, partials, M, N, groups, batches, scans, swizzle, active, lhs_b, lhs_m, lhs_k, rhs_b,
    rhs_k, rhs_n, out_g, out_b, out_m, out_n, c_g, c_b, c_m, c_n, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, HAS_C: tl.constexpr,
    PRECISION: tl.constexpr, LISTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """CONTRACTING: out[g] = alpha * lhs[:, k of g] @ rhs[k of g, :] + beta * c[g], where k of g is [group_starts[g], group_ends[g]).

    With SPLIT > 1 (split-k) each group's k is cut into SPLIT even shares; the float32 sums of share s go to partials[s], which is
    (groups, batches, M, N) packed, and `add_partials` adds them in the order of s, so that equal inputs give equal bits.

    Args:
        active: 0 where alpha is 0, so that nothing is read.
        LISTED, ALIGNED: of out and c, see `array_of`.
    """
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(N, BN)
    per = row_tiles * column_tiles
    for t in tl.range(tl.program_id(0), groups * batches * per * SPLIT, tl.num_programs(0)):
        share = t % SPLIT
        problem = t // SPLIT // per
        tm, tn = swizzled(t // SPLIT % per, row_tiles, swizzle, column_tiles)
        g = problem % groups
        b = problem // groups
        scanned = b * (scans > 1)
        begin = tl.load(group_starts + scanned * groups + g)
        end = tl.load(group_ends + scanned * groups + g)
        end = tl.where(active != 0, end, begin)
        if SPLIT > 1:
            length = tl.cdiv(tl.cdiv(end - begin, SPLIT), BK) * BK
            begin = tl.minimum(begin + share * length, end)
            end = tl.minimum(begin + length, end)
        row = tm * BM + tl.arange(0, BM)
        column = tn * BN + tl.arange(0, BN)
        has_row = row < M
        has_column = column < N
        m = row.to(tl.int64)
        n = column.to(tl.int64)
        wide_b = b.to(tl.int64)
        wide_g = g.to(tl.int64)
        k = tl.arange(0, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        at_lhs = lhs + wide_b * lhs_b + begin * lhs_k + m * lhs_m
        at_rhs = rhs + wide_b * rhs_b + begin * rhs_k + n * rhs_n
        length_of = (end - begin).to(tl.int32)
        for k0 in range(0, length_of, BK):
            inside = k0 + k < length_of
            kk = (k0 + k).to(tl.int64)
            x = tl.load(at_lhs[:, None] + kk[None, :] * lhs_k, mask=inside[None, :] & has_row[:, None], other=0.0)
            y = tl.load(at_rhs[None, :] + kk[:, None] * rhs_k, mask=inside[:, None] & has_column[None, :], other=0.0)
            if WIDE:
                x = x.to(tl.float32)
                y = y.to(tl.float32)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        keep = has_row[:, None] & has_column[None, :]
        if SPLIT > 1:
            at = ((share.to(tl.int64) * groups + wide_g) * batches + wide_b) * M * N
            tl.store(partials + at + m[:, None] * N + n[None, :], acc, mask=keep)
        else:
            store_slab(
                acc, out, c, wide_g, wide_b, m[:, None], n[None, :], keep, out_g, out_b, out_m, out_n, c_g, c_b, c_m, c_n, alpha, beta,
                HAS_C, LISTED, ALIGNED,
            )  # fmt: skip


@triton.jit
def add_partials(
    partials, out, c, M, N, groups, batches, out_g, out_b, out_m, out_n, c_g, c_b, c_m, c_n, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, HAS_C: tl.constexpr, LISTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out = alpha * (the sum of `contracting`'s SPLIT partials, in order) + beta * c."""
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(N, BN)
    per = row_tiles * column_tiles
    for t in tl.range(tl.program_id(0), groups * batches * per, tl.num_programs(0)):
        problem = t // per
        g = (problem % groups).to(tl.int64)
        b = (problem // groups).to(tl.int64)
        row = t % per // column_tiles * BM + tl.arange(0, BM)
        column = t % per % column_tiles * BN + tl.arange(0, BN)
        keep = (row < M)[:, None] & (column < N)[None, :]
        m = row.to(tl.int64)[:, None]
        n = column.to(tl.int64)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for share in tl.static_range(SPLIT):
            at = ((share * groups + g) * batches + b) * M * N
            acc += tl.load(partials + at + m * N + n, mask=keep, other=0.0)
        store_slab(
            acc, out, c, g, b, m, n, keep, out_g, out_b, out_m, out_n, c_g, c_b, c_m, c_n, alpha, beta, HAS_C, LISTED, ALIGNED,
        )  # fmt: skip
