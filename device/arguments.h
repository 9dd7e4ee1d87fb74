/* The one argument of every kernel here: a plain struct passed by value (648 bytes, natural alignment).
 *
 * One struct serves hgg_fill, hgg_scan and hgg_zero_uncovered, so a plan keeps one copy, patches pointers, extents,
 * alpha and beta in it, and launches two kernels with the same bytes. Every offset is asserted below; a NumPy
 * structured dtype or a ctypes struct with these fields in this order and natural alignment is the same
 * bytes.
 *
 * Addresses are device addresses; 0 means absent where that is allowed. Strides are in BYTES and may be 0.
 *
 * Launch: block = (HGG_THREADS, 1, 1), grid = (blocks, 1, 1), no dynamic shared memory. Any number of blocks
 * from 1 up (below 2^24) gives the same bytes. Good choices, with
 *   N = batch_count * group_total + (record_count - batch_count * group_count) places to fill:
 *   hgg_fill    min(max(1, ceil(N / HGG_FILL_SHARE)), 256)
 *   hgg_scan    the same without a tile table, min(max(1, ceil(tile_capacity / 1024)), 32) with one
 *   hgg_zero_uncovered  twice the number of multiprocessors
 *
 * What the host promises (the kernels do not check it):
 *   0 <= group_count <= group_total
 *   (ragged_extent + 1) * group_total < 2^61; ragged_extent < 2^32 when records are written
 *   batch_count * group_total < 2^31; batch_count * group_count <= record_count < 2^31
 *   out_batch_count * max(group_count, 2) < 2^31
 *   starts, ends, covered_range, fault, records and tiles overlap no operand and are aligned as said below
 */
#ifndef HGG_ARGUMENTS_H
#define HGG_ARGUMENTS_H

#include "user_arguments.h"

/* Threads of a block, in every kernel. */
#ifndef HGG_THREADS
#define HGG_THREADS 256
#endif
/* Groups that a thread takes at a time; a tuning knob of the build, without effect on any result. */
#ifndef HGG_ITEMS
#define HGG_ITEMS 8
#endif
/* Groups a block of hgg_fill should be given (a hint for the grid). */
#ifndef HGG_FILL_SHARE
#define HGG_FILL_SHARE 32
#endif

/* sizes_kind. With HGG_SIZES_NONE nothing is read: the first group of each batch has all ragged_extent rows,
 * as BATCH mode needs it. */
enum {
  HGG_SIZES_NONE = 0,
  HGG_SIZES_COUNTS = 1, /* rows of each group */
  HGG_SIZES_OFFSETS = 2 /* end offset of each group (torch's offs) */
};

/* sizes_type, group_offset_type */
enum { HGG_I8 = 0, HGG_I16 = 1, HGG_I32 = 2, HGG_I64 = 3, HGG_U8 = 4, HGG_U16 = 5, HGG_U32 = 6, HGG_U64 = 7 };

/* mode: which of hipBLASLt's extents is ragged */
enum {
  HGG_RAGGED_N = 0, /* NON_CONTRACTING with swapped operands (row-major out); also BATCH */
  HGG_RAGGED_M = 1, /* NON_CONTRACTING without the swap (column-major out) */
  HGG_RAGGED_K = 2  /* CONTRACTING: out has a slab a group */
};

/* out_type, c_type */
enum { HGG_BF16 = 0, HGG_F16 = 1, HGG_F32 = 2, HGG_F64 = 3 };

/* flags */
enum {
  HGG_OVERRIDE_ALPHA = 1, /* records take alpha from the arguments, else from the template */
  HGG_OVERRIDE_BETA = 2
};

/* hgg_fault.kind, and what wanted and left are then. `previous` is the rows of all groups before this one. */
enum {
  HGG_FAULT_NONE = 0,
  HGG_FAULT_NEGATIVE = 1,    /* a negative size: the size, R - previous */
  HGG_FAULT_PAST_END = 2,    /* sizes sum past R: the size, R - previous */
  HGG_FAULT_OFFSETS = 3,     /* an end offset falls or is past R: offset - previous, R - previous */
  HGG_FAULT_GROUP_OFFSET = 4 /* group_offset out of range: group_offset, group_total - group_count */
};

/* The first fault since the host last zeroed it: 32 bytes, 8-byte aligned. A launch writes it only while kind
 * is HGG_FAULT_NONE, so a plan may look as late as it likes. Within a launch a wrong group_offset comes
 * first, then the lowest batch, then the lowest group. Numbers that int64 cannot hold are saturated. */
typedef struct hgg_fault {
  hgg_i32 kind;
  hgg_i32 batch;
  hgg_i64 group; /* of group_total */
  hgg_i64 wanted;
  hgg_i64 left;
} hgg_fault;

/* One tile of the table for a persistent kernel: 16 bytes, 16-byte aligned. Read as int32 x 4 on a
 * little-endian device it is (problem, rows, low word of first_row, high word), so with R < 2^31 the third
 * int32 is the first row. */
typedef struct hgg_tile {
  hgg_i32 problem; /* batch * group_count + group */
  hgg_i32 rows;    /* 1 .. block_rows */
  hgg_i64 first_row;
} hgg_tile;

/* Where record (batch, group) finds an operand, in 64 bits:
 *   base + start * row_stride + group * group_stride + batch * batch_stride
 * start is the group's first row (0 for an empty group, so that the address stays inside the operand), group
 * counts from 0 whatever group_offset is. base 0: the template's address is kept.
 * group_stride HGG_LISTED: the groups' arrays lie anywhere; base is the address of a table of their addresses,
 * 8-byte aligned, and what is read there takes the place of base + group * group_stride. */
#define HGG_LISTED (-9223372036854775807LL - 1)
typedef struct hgg_operand {
  hgg_u64 base;
  hgg_i64 row_stride;
  hgg_i64 group_stride;
  hgg_i64 batch_stride;
} hgg_operand;

/* A matrix for hgg_zero_uncovered. Elements are at
 *   base + batch * batch_stride + group * group_stride + row * row_stride + column * column_stride
 * with group_stride as in hgg_operand. */
typedef struct hgg_matrix {
  hgg_u64 base;
  hgg_i64 row_stride;
  hgg_i64 column_stride;
  hgg_i64 group_stride;
  hgg_i64 batch_stride;
} hgg_matrix;

typedef struct hgg_arguments {
  /* --- the scan: all kernels */
  hgg_u64 sizes;              /* sizes or end offsets, (batch_count, group_total) */
  hgg_i64 sizes_stride;       /* between groups */
  hgg_i64 sizes_batch_stride; /* between batches */
  hgg_u64 group_offset;       /* a (1,) integer on the device; 0: group_offset_value holds */
  hgg_i64 group_offset_value;
  hgg_i64 ragged_extent; /* R */
  hgg_u64 starts; /* out, int64 (batch_count, group_count), 8-byte aligned; 0: not wanted (hgg_zero_uncovered needs it
                     in HGG_RAGGED_K) */
  hgg_u64 ends;   /* out, likewise */
  hgg_u64 covered_range;  /* out, int64 (batch_count, 2): first covered row, end of covered rows; their difference is
                     the total. 0: not wanted (hgg_zero_uncovered needs it in HGG_RAGGED_N and HGG_RAGGED_M) */
  hgg_u64 fault;  /* in and out, hgg_fault; 0: faults are dropped */
  hgg_i32 sizes_kind;
  hgg_i32 sizes_type;
  hgg_i32 group_offset_type;
  hgg_i32 batch_count; /* scans: 1 when sizes are shared by all batches */
  hgg_i32 group_count; /* groups computed */
  hgg_i32 group_total; /* groups that sizes describes */
  hgg_i32 mode;
  hgg_u32 flags;
  /* --- records: hgg_fill */
  hgg_u64 records;      /* out, record_count x 196 bytes, 16-byte aligned */
  hgg_i32 record_count; /* records past batch_count * group_count get zero extent */
  /* --- tiles: hgg_scan */
  hgg_i32 block_rows;    /* BLOCK_M */
  hgg_u64 tiles;         /* out, hgg_tile[tile_capacity], in order of batch, group, row; 0: no table */
  hgg_u64 tile_count;    /* out, one int32: all tiles, also those past the capacity; 4-byte aligned */
  hgg_i64 tile_capacity; /* batch_count * (ragged_extent / block_rows + group_count) always suffices */
  /* --- scalars: hgg_fill (raw), hgg_zero_uncovered (beta: a float64 when out is, else a float32) */
  hgg_u32 alpha[4];
  hgg_u32 beta[4];
  /* --- operands in hipBLASLt's terms: with swapped operands a is rhs and b is lhs */
  hgg_operand d;
  hgg_operand c;
  hgg_operand a;
  hgg_operand b;
  hgg_operand bias;
  /* --- hgg_zero_uncovered */
  hgg_matrix out;      /* rows are the ragged rows in NON_CONTRACTING, m in CONTRACTING */
  hgg_matrix c_matrix; /* not read when beta is 0; may be exactly out */
  hgg_i64 out_rows;    /* rows of a slab in CONTRACTING; ragged_extent is taken in NON_CONTRACTING */
  hgg_i64 out_columns;
  hgg_i32 out_batch_count; /* batches of out; with batch_count 1 they share one scan */
  hgg_i32 out_type;
  hgg_i32 c_type;
  /* --- everything that is the same in all records */
  hgg_user_arguments record;
} hgg_arguments;

#define HGG_AT(field, offset) HGG_ASSERT_OFFSET(hgg_arguments, field, offset)
HGG_AT(sizes, 0);
HGG_AT(sizes_stride, 8);
HGG_AT(sizes_batch_stride, 16);
HGG_AT(group_offset, 24);
HGG_AT(group_offset_value, 32);
HGG_AT(ragged_extent, 40);
HGG_AT(starts, 48);
HGG_AT(ends, 56);
HGG_AT(covered_range, 64);
HGG_AT(fault, 72);
HGG_AT(sizes_kind, 80);
HGG_AT(sizes_type, 84);
HGG_AT(group_offset_type, 88);
HGG_AT(batch_count, 92);
HGG_AT(group_count, 96);
HGG_AT(group_total, 100);
HGG_AT(mode, 104);
HGG_AT(flags, 108);
HGG_AT(records, 112);
HGG_AT(record_count, 120);
HGG_AT(block_rows, 124);
HGG_AT(tiles, 128);
HGG_AT(tile_count, 136);
HGG_AT(tile_capacity, 144);
HGG_AT(alpha, 152);
HGG_AT(beta, 168);
HGG_AT(d, 184);
HGG_AT(c, 216);
HGG_AT(a, 248);
HGG_AT(b, 280);
HGG_AT(bias, 312);
HGG_AT(out, 344);
HGG_AT(c_matrix, 384);
HGG_AT(out_rows, 424);
HGG_AT(out_columns, 432);
HGG_AT(out_batch_count, 440);
HGG_AT(out_type, 444);
HGG_AT(c_type, 448);
HGG_AT(record, 452);
#undef HGG_AT
HGG_STATIC_ASSERT(sizeof(hgg_arguments) == 648, "arguments: 648 bytes");
HGG_STATIC_ASSERT(sizeof(hgg_operand) == 32 && sizeof(hgg_matrix) == 40, "arguments: operand and matrix");
HGG_STATIC_ASSERT(sizeof(hgg_fault) == 32 && sizeof(hgg_tile) == 16, "arguments: fault and tile");

#endif
