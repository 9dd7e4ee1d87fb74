// The judge of grouped GEMMs: a naive product in float64, and a look at every element of out.
//
// It shares nothing with any backend and nothing with the scan: which rows belong to which product, and what
// is sampled, comes from the host as a list of tiles. hgg_judge compares elements of out with alpha * (a . b)
// + beta * c
// + bias under
//   |error| <= accumulation * M + rounding * (|wanted| + accumulation * M) + smallest
// where M is the same sum of magnitudes (Higham's |A| |B|, see tolerance.py). hgg_inspect looks at all of out
// for what was not written, for NaN, and for rows that no group covers.
#ifndef HGG_JUDGE_H
#define HGG_JUDGE_H

#include "findings.h"

namespace hgg {

constexpr int kJudgeRows = HGG_JUDGE_ROWS, kJudgeColumns = HGG_JUDGE_COLUMNS;
constexpr int kDepth = 32;                         // of the contracted axis, staged at a time
constexpr int kAcross = HGG_THREADS / kJudgeRows;  // threads beside each other
constexpr int kEach = kJudgeColumns / kAcross;     // columns of a thread
static_assert(kAcross * kJudgeRows == HGG_THREADS && kEach * kAcross == kJudgeColumns,
              "a thread has whole columns");

// Rows of the stages are one element longer than needed, so that threads that store one column do not meet on
// a bank.
struct JudgeStage {
  double a[kDepth][kJudgeRows + 1];
  double b[kDepth][kJudgeColumns + 1];
  hgg_u64 row_at[kJudgeRows];        // addresses of lhs's rows at column 0, 0 where there is none
  hgg_u64 column_at[kJudgeColumns];  // addresses of rhs's columns at row 0
};

union JudgeShared {
  JudgeStage stage;
  hgg_findings found[HGG_THREADS];
};

struct InspectShared {
  hgg_findings found[HGG_THREADS];
};

struct Sums {
  double value[kEach];
  double magnitude[kEach];
};

HGG_FUNCTION hgg_u64 address_in(const hgg_tensor& x, hgg_i64 group, hgg_i64 batch, hgg_i64 row,
                                hgg_i64 column) {
  return x.base + (hgg_u64)(group * x.group_stride + batch * x.batch_stride + row * x.row_stride +
                            column * x.column_stride);
}

HGG_FUNCTION double value_in(const hgg_tensor& x, hgg_u64 address) {
  return read_any<double>(x.type, address, x.aligned != 0);
}

HGG_FUNCTION hgg_judge_tile tile_at(hgg_u64 address) {
  return hgg_judge_tile{read<hgg_i64>(address),      read<hgg_i64>(address + 8),
                        read<hgg_i64>(address + 16), read<double>(address + 24),
                        read<hgg_i32>(address + 32), read<hgg_i32>(address + 36),
                        read<hgg_i32>(address + 40), 0};
}

struct Judge {
  const hgg_judge_arguments* a;
  hgg_judge_tile tile;
  hgg_i64 first_column;  // of column_list

  HGG_MEMBER hgg_i64 row_of(int i) const {
    return read<hgg_i64>(a->row_list + 8 * (hgg_u64)(tile.first + i));
  }
  HGG_MEMBER hgg_i64 column_of(int j) const {
    return read<hgg_i64>(a->column_list + 8 * (hgg_u64)(first_column + j));
  }
  HGG_MEMBER bool has_column(int j) const { return first_column + j < a->column_count; }

  HGG_MEMBER void stage_addresses(JudgeStage& s, int t) const {
    if (t < kJudgeRows) s.row_at[t] = t < tile.count ? address_in(a->lhs, 0, tile.batch, row_of(t), 0) : 0;
    if (t < kJudgeColumns)
      s.column_at[t] = has_column(t) ? address_in(a->rhs, tile.group, tile.batch, 0, column_of(t)) : 0;
  }

  // Stages [k, k + kDepth) of the rows; zeros where there are none. Neighbouring threads take neighbouring
  // elements of whichever axis is the nearer in memory.
  template <class Type>
  HGG_MEMBER void stage_rows(JudgeStage& s, hgg_i64 k, int t) const {
    const bool k_inside = a->lhs.column_stride <= a->lhs.row_stride, aligned = a->lhs.aligned != 0;
    HGG_UNROLL
    for (int n = 0; n < kDepth * kJudgeRows / HGG_THREADS; ++n) {
      const int e = t + n * HGG_THREADS;
      const int d = k_inside ? e % kDepth : e / kJudgeRows, i = k_inside ? e / kDepth : e % kJudgeRows;
      const hgg_u64 at = s.row_at[i] + (hgg_u64)((k + d) * a->lhs.column_stride);
      const bool there = s.row_at[i] != 0 && k + d < tile.k_end;
      s.a[d][i] = there ? element<Type>(at, aligned) : 0.0;
    }
  }

  // Likewise of the columns.
  template <class Type>
  HGG_MEMBER void stage_columns(JudgeStage& s, hgg_i64 k, int t) const {
    const bool k_inside = a->rhs.row_stride < a->rhs.column_stride, aligned = a->rhs.aligned != 0;
    HGG_UNROLL
    for (int n = 0; n < kDepth * kJudgeColumns / HGG_THREADS; ++n) {
      const int e = t + n * HGG_THREADS;
      const int d = k_inside ? e % kDepth : e / kJudgeColumns, j = k_inside ? e / kDepth : e % kJudgeColumns;
      const hgg_u64 at = s.column_at[j] + (hgg_u64)((k + d) * a->rhs.row_stride);
      const bool there = s.column_at[j] != 0 && k + d < tile.k_end;
      s.b[d][j] = there ? element<Type>(at, aligned) : 0.0;
    }
  }

  template <class Type>
  static HGG_MEMBER double element(hgg_u64 address, bool aligned) {
    double value;
    convert(read_element<Type>(address, aligned), value);
    return value;
  }

  HGG_MEMBER void stage(JudgeStage& s, hgg_i64 k, int t) const {
    switch (a->lhs.type) {
      case HGG_BF16: stage_rows<BFloat16>(s, k, t); break;
      case HGG_F16: stage_rows<Float16>(s, k, t); break;
      case HGG_F32: stage_rows<Float32>(s, k, t); break;
      default: stage_rows<Float64>(s, k, t); break;
    }
    switch (a->rhs.type) {
      case HGG_BF16: stage_columns<BFloat16>(s, k, t); break;
      case HGG_F16: stage_columns<Float16>(s, k, t); break;
      case HGG_F32: stage_columns<Float32>(s, k, t); break;
      default: stage_columns<Float64>(s, k, t); break;
    }
  }

  HGG_MEMBER void accumulate(const JudgeStage& s, Sums& sums, int t) const {
    const int i = t / kAcross, j = t % kAcross;
    HGG_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      const double x = s.a[d][i];
      HGG_UNROLL
      for (int q = 0; q < kEach; ++q) {
        const double product = x * s.b[d][j + q * kAcross];
        sums.value[q] += product;
        sums.magnitude[q] += magnitude_of(product);
      }
    }
  }

  HGG_MEMBER void compare(const Sums& sums, hgg_findings& found, int t) const {
    const int i = t / kAcross;
    if (i >= tile.count) return;
    const hgg_i64 row = row_of(i);
    HGG_ROLLED
    for (int q = 0; q < kEach; ++q) {
      const int j = t % kAcross + q * kAcross;
      if (!has_column(j)) break;
      double value = sums.value[0], magnitude = sums.magnitude[0];
      HGG_UNROLL
      for (int p = 1; p < kEach; ++p) {  // an array with an index would leave the registers
        value = p == q ? sums.value[p] : value;
        magnitude = p == q ? sums.magnitude[p] : magnitude;
      }
      compare_element(value, magnitude, row, column_of(j), found);
    }
  }

  HGG_MEMBER void compare_element(double value, double sum, hgg_i64 row, hgg_i64 column,
                                  hgg_findings& found) const {
    double wanted = a->alpha * value, magnitude = magnitude_of(a->alpha) * sum;
    if (a->beta != 0) {
      const double c = a->beta * value_in(a->c, address_in(a->c, tile.group, tile.batch, row, column));
      wanted += c;
      magnitude += magnitude_of(c);
    }
    if (a->bias.base) {
      const double bias = value_in(a->bias, address_in(a->bias, tile.group, 0, 0, column));
      wanted += bias;
      magnitude += magnitude_of(bias);
    }
    const double got = value_in(a->out, address_in(a->out, tile.group, tile.batch, row, column));
    const double error = magnitude_of(got - wanted), summed = tile.accumulation * magnitude;
    const double bound = summed + a->rounding * (magnitude_of(wanted) + summed) + a->smallest;
    found.count += 1;
    found.square_error += error * error;
    found.square_norm += wanted * wanted;
    if (error <= bound) return;  // NaN is not
    const hgg_u64 slab =
        (a->groups > 1 ? (hgg_u64)tile.group : 0) * (hgg_u64)a->batches + (hgg_u64)tile.batch;
    note_wrong(found, (slab * (hgg_u64)a->rows + (hgg_u64)row) * (hgg_u64)a->columns + (hgg_u64)column, got,
               wanted, bound);
  }
};

HGG_FUNCTION void judge_block(const hgg_judge_arguments& a, JudgeShared& shared) {
  HGG_PRIVATE(hgg_findings, found);
  HGG_PRIVATE(Sums, sums);
  clear(found);
  const hgg_u64 across = (hgg_u64)ceiling(a.column_count, (hgg_i64)kJudgeColumns);
  const hgg_u64 units = (hgg_u64)a.tile_count * across;
  for (hgg_u64 unit = block_index(); unit < units; unit += grid_size()) {
    const hgg_u64 which = unit / across;
    const Judge judge{&a, tile_at(a.tiles + sizeof(hgg_judge_tile) * which),
                      (hgg_i64)(unit - which * across) * kJudgeColumns};
    HGG_PHASE(t) {
      judge.stage_addresses(shared.stage, t);
      HGG_UNROLL
      for (int q = 0; q < kEach; ++q) HGG_OWN(sums, t).value[q] = HGG_OWN(sums, t).magnitude[q] = 0.0;
    }
    for (hgg_i64 k = judge.tile.k_first; k < judge.tile.k_end; k += kDepth) {
      HGG_PHASE(t) { judge.stage(shared.stage, k, t); }
      HGG_PHASE(t) { judge.accumulate(shared.stage, HGG_OWN(sums, t), t); }
    }
    HGG_STEP(t) { judge.compare(HGG_OWN(sums, t), HGG_OWN(found, t), t); }
  }
  report(a.findings, shared.found, found);
}

// ---- all of out

HGG_FUNCTION hgg_u64 bits_at(const hgg_tensor& x, hgg_u64 address) {
  const bool aligned = x.aligned != 0;
  switch (bytes_of(x.type)) {
    case 2: return load<unsigned short>(address, aligned);
    case 4: return load<hgg_u32>(address, aligned);
    default: return load<hgg_u64>(address, aligned);
  }
}

HGG_FUNCTION void inspect_element(const hgg_judge_arguments& a, hgg_u64 slab, hgg_i64 row, hgg_i64 column,
                                  hgg_findings& found) {
  const hgg_i64 group = (hgg_i64)(slab / (hgg_u64)a.batches), batch = (hgg_i64)(slab % (hgg_u64)a.batches);
  const hgg_u64 at = address_in(a.out, group, batch, row, column);
  const hgg_u64 index = (slab * (hgg_u64)a.rows + (hgg_u64)row) * (hgg_u64)a.columns + (hgg_u64)column;
  const hgg_i64 first = read<hgg_i64>(a.covered + 16 * slab), end = read<hgg_i64>(a.covered + 16 * slab + 8);
  const double got = value_in(a.out, at);
  if (row >= first && row < end) {
    if (got == got) return;
    if (bits_at(a.out, at) == a.poison)
      found.unwritten += 1;
    else
      found.nan += 1;
    found.first_nan = minimum(found.first_nan, index);
    return;
  }
  if (a.flags & HGG_JUDGE_KEPT) {
    if (bits_at(a.out, at) != a.poison) note_wrong(found, index, got, float_of(0x7fc00000u), 0.0);
    return;
  }
  double wanted = 0.0, bound = 0.0;
  if (a.beta != 0) {
    wanted = a.beta * value_in(a.c, address_in(a.c, group, batch, row, column));
    const double size = magnitude_of(wanted), summed = a.scaled * size;
    bound = summed + a.rounding * (size + summed) + a.smallest;
  }
  if (!(magnitude_of(got - wanted) <= bound)) note_wrong(found, index, got, wanted, bound);
}

HGG_FUNCTION void inspect_block(const hgg_judge_arguments& a, InspectShared& shared) {
  HGG_PRIVATE(hgg_findings, found);
  clear(found);
  const bool rows_inside = (a.flags & HGG_JUDGE_ROWS_INSIDE) != 0;
  const hgg_u64 lines = (hgg_u64)(rows_inside ? a.columns : a.rows);
  const Walk walk{(hgg_u64)a.groups * (hgg_u64)a.batches * lines, rows_inside ? a.rows : a.columns};
  for (hgg_u64 unit = block_index(); unit < walk.units(); unit += grid_size()) {
    const Chunk chunk = walk.at(unit);
    const hgg_u64 slab = chunk.line / lines;
    const hgg_i64 line = (hgg_i64)(chunk.line - slab * lines);
    HGG_STEP(t) {
      for (hgg_i64 i = chunk.first + t; i < chunk.end; i += HGG_THREADS)
        inspect_element(a, slab, rows_inside ? i : line, rows_inside ? line : i, HGG_OWN(found, t));
    }
  }
  report(a.findings, shared.found, found);
}

}  // namespace hgg

#endif
