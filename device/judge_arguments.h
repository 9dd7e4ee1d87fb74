/* Arguments and findings of the kernels that make operands for tuning and judge what backends did to them
 * (judge.h, memory.h).
 *
 * Plain structs with natural alignment, passed by value; every offset is asserted below. Addresses are device
 * addresses, strides are in BYTES. Launch: block = (HGG_THREADS, 1, 1), grid = (blocks, 1, 1) with any number
 * of blocks from 1 up. Every block writes one hgg_findings, also where it had nothing to do; the host adds
 * them up. So no result depends on the order in which blocks run, and no kernel needs 64-bit atomics.
 */
#ifndef HGG_JUDGE_ARGUMENTS_H
#define HGG_JUDGE_ARGUMENTS_H

#include "arguments.h"

/* What hgg_judge compares at a time. */
enum { HGG_JUDGE_ROWS = 16, HGG_JUDGE_COLUMNS = 64 };

/* flags of hgg_judge_arguments */
enum {
  HGG_JUDGE_KEPT = 1, /* hgg_inspect: rows that no group covers must still hold the poison, not beta * c */
  HGG_JUDGE_ROWS_INSIDE = 2 /* hgg_inspect: rows are nearer to each other in memory than columns */
};

/* What one block has seen. `first` and `first_nan` count (group, batch, row, column) of out in row-major
 * order, and are all ones where there is none; got, wanted and bound are those of `first`. */
typedef struct hgg_findings {
  hgg_u64 count; /* hgg_judge: elements compared; hgg_same: that differ; hgg_gaps: bytes that were written;
                  hgg_digest: the block's part of the sum */
  hgg_u64 wrong; /* hgg_judge: outside of their bound; hgg_inspect: not covered, and not what they must be */
  hgg_u64 first;
  double got;
  double wanted;
  double bound;
  double square_error; /* hgg_judge: sums over what was compared */
  double square_norm;
  hgg_u64 unwritten; /* hgg_inspect: covered, and still the poison */
  hgg_u64 nan;       /* hgg_inspect: covered, and another NaN */
  hgg_u64 first_nan; /* of either */
  double worst;      /* of what is wrong: the largest error in units of its bound; infinite for NaN */
} hgg_findings;

/* Elements are at base + group * group_stride + batch * batch_stride + row * row_stride + column *
 * column_stride. lhs has its contracted axis as columns, rhs as rows. */
typedef struct hgg_tensor {
  hgg_u64 base; /* 0: there is no such operand */
  hgg_i64 group_stride;
  hgg_i64 batch_stride;
  hgg_i64 row_stride;
  hgg_i64 column_stride;
  hgg_i32 type;
  hgg_i32 aligned; /* whether every element lies on a multiple of its size */
} hgg_tensor;

/* Some rows of one product: their dot products run over [k_first, k_end) of lhs's columns and rhs's rows. */
typedef struct hgg_judge_tile {
  hgg_i64 first; /* of row_list */
  hgg_i64 k_first;
  hgg_i64 k_end;
  double accumulation; /* the bound's factor on the sum of |a| |b| */
  hgg_i32 batch;
  hgg_i32 group;
  hgg_i32 count; /* rows, at most HGG_JUDGE_ROWS */
  hgg_i32 zero;
} hgg_judge_tile;

typedef struct hgg_judge_arguments {
  hgg_tensor lhs;
  hgg_tensor rhs;
  hgg_tensor out;
  hgg_tensor c;    /* read where beta is not 0 */
  hgg_tensor bias; /* group and column strides count */
  hgg_i64 groups;  /* of out: its extents */
  hgg_i64 batches;
  hgg_i64 rows;
  hgg_i64 columns;
  hgg_u64 tiles; /* hgg_judge_tile[tile_count] */
  hgg_i64 tile_count;
  hgg_u64 row_list;    /* int64, rows of out */
  hgg_u64 column_list; /* int64[column_count] */
  hgg_i64 column_count;
  hgg_u64 covered;  /* int64 (groups, batches, 2): first covered row, end of covered rows */
  hgg_u64 findings; /* out, one for each block */
  hgg_u64 poison;   /* an element's bits before the run, in the lowest bytes */
  double alpha;
  double beta;
  double rounding; /* the bound's factor on the magnitude of the result, and its absolute part */
  double smallest;
  double scaled; /* the accumulation factor of elements that are beta * c alone */
  hgg_u32 flags;
  hgg_u32 zero;
} hgg_judge_arguments;

/* A walk over memory: elements at base + sum of index[i] * stride[i], the largest stride first. */
typedef struct hgg_memory_arguments {
  hgg_u64 base;
  hgg_u64 other; /* hgg_scatter: the table; hgg_same: the copy's base */
  hgg_i64 extent[4];
  hgg_i64 stride[4];
  hgg_i64
      count; /* hgg_scatter: elements of the table; hgg_gaps: bytes of the buffer; hgg_touch, hgg_digest: 16-byte words */
  hgg_i64 first; /* hgg_gaps: how far into the buffer base lies; hgg_scatter: where in the table to begin */
  hgg_i64 skip;  /* hgg_gaps: bytes from `first` on that are known to be elements */
  hgg_u64 findings; /* out, one for each block; 0 for hgg_scatter */
  hgg_i32 bytes;    /* of an element: 1, 2, 4 or 8 */
  hgg_u32 poison;   /* hgg_gaps: the byte */
} hgg_memory_arguments;

#define HGG_AT(type, field, offset) HGG_ASSERT_OFFSET(type, field, offset)
HGG_AT(hgg_findings, first, 16);
HGG_AT(hgg_findings, square_error, 48);
HGG_AT(hgg_findings, first_nan, 80);
HGG_AT(hgg_tensor, type, 40);
HGG_AT(hgg_judge_tile, accumulation, 24);
HGG_AT(hgg_judge_tile, count, 40);
HGG_AT(hgg_judge_arguments, bias, 192);
HGG_AT(hgg_judge_arguments, groups, 240);
HGG_AT(hgg_judge_arguments, tiles, 272);
HGG_AT(hgg_judge_arguments, covered, 312);
HGG_AT(hgg_judge_arguments, alpha, 336);
HGG_AT(hgg_judge_arguments, flags, 376);
HGG_AT(hgg_memory_arguments, extent, 16);
HGG_AT(hgg_memory_arguments, count, 80);
HGG_AT(hgg_memory_arguments, findings, 104);
HGG_AT(hgg_memory_arguments, poison, 116);
#undef HGG_AT
HGG_STATIC_ASSERT(sizeof(hgg_findings) == 96 && sizeof(hgg_tensor) == 48, "judge: findings and tensor");
HGG_STATIC_ASSERT(sizeof(hgg_judge_tile) == 48 && sizeof(hgg_judge_arguments) == 384,
                  "judge: tile and arguments");
HGG_STATIC_ASSERT(sizeof(hgg_memory_arguments) == 120, "judge: memory arguments");

#endif
