// hgg_zero_uncovered: gives output that no group covers its beta * c.
//
// NON_CONTRACTING: the rows before the first computed group and those behind the last, in every batch.
// CONTRACTING: the slabs of empty groups. Each such piece is a candidate; every block looks at all
// candidates, which is two loads each, and returns when none has anything to write. Otherwise the pieces are
// cut into units that the blocks take in turn.
//
// beta 0 writes zeros and never reads c. Else the product is taken in float32 (float64 for float64 out) and
// rounded once. An element of c is read by the thread that writes the same element of out, so c may be
// exactly out.
#ifndef HGG_UNCOVERED_H
#define HGG_UNCOVERED_H

#include "numbers.h"
#include "scan.h"

namespace hgg {

constexpr int kCandidates = kThreads * kItems;  // looked at together
constexpr int kLineVectors = 8;                 // vectors that one thread writes of a long line

struct UncoveredShared {
  hgg_u32 mask[kCandidates / 32];  // candidates with something to write
  hgg_u32 any;
};

// Rows [first, end) of one batch of out, or of one slab.
struct Piece {
  hgg_u64 out;
  hgg_u64 c;
  hgg_i64 rows;
};

HGG_FUNCTION hgg_u64 place(const hgg_matrix& m, hgg_u64 batch, hgg_u64 group, hgg_i64 row) {
  return group_address(m.base, m.group_stride, group) + batch * (hgg_u64)m.batch_stride +
         (hgg_u64)row * (hgg_u64)m.row_stride;
}

// Candidate -> batch of out, and which of the batch's candidates: a group, or 0 for the rows before the
// covered ones and 1 for those behind. Scans are one a batch, or one for all.
struct Candidate {
  hgg_u32 batch;
  hgg_u32 which;
  hgg_u64 scanned;  // index of (batch, which) in what the scan wrote
};

HGG_FUNCTION Candidate candidate_of(const hgg_arguments& a, hgg_u32 candidate) {
  const hgg_u32 each = a.mode == HGG_RAGGED_K ? (hgg_u32)a.group_count : 2;
  const hgg_u32 batch = candidate / each, which = candidate % each;
  return Candidate{batch, which, (a.batch_count == 1 ? 0 : (hgg_u64)batch * each) + which};
}

// Rows [first, end) that a candidate has to write.
HGG_FUNCTION Rows rows_left_of(const hgg_arguments& a, const Candidate& c) {
  if (a.mode == HGG_RAGGED_K) {
    const bool empty = read<hgg_i64>(a.starts + 8 * c.scanned) == read<hgg_i64>(a.ends + 8 * c.scanned);
    return Rows{0, empty ? a.out_rows : 0};
  }
  // With nothing covered, both ends of the covered rows are 0 and the rows behind are all.
  const hgg_i64 covered = read<hgg_i64>(a.covered_range + 8 * c.scanned);
  return c.which ? Rows{covered, a.ragged_extent} : Rows{0, covered};
}

HGG_FUNCTION bool rows_left(const hgg_arguments& a, hgg_u32 candidate) {
  const Rows rows = rows_left_of(a, candidate_of(a, candidate));
  return rows.end > rows.start;
}

HGG_FUNCTION Piece piece_of(const hgg_arguments& a, hgg_u32 candidate) {
  const Candidate c = candidate_of(a, candidate);
  const Rows rows = rows_left_of(a, c);
  const hgg_u64 group = a.mode == HGG_RAGGED_K ? c.which : 0;
  return Piece{place(a.out, c.batch, group, rows.start), place(a.c_matrix, c.batch, group, rows.start),
               rows.end - rows.start};
}

// A piece as lines of elements, the faster dimension of out inside; packed lines become one.
struct Lines {
  hgg_u64 out, c;
  hgg_u64 count, length;
  hgg_u64 out_step, c_step;      // between lines, bytes
  hgg_u64 out_stride, c_stride;  // between elements, bytes
};

HGG_FUNCTION Lines lines_of(const hgg_arguments& a, const Piece& piece, bool reads) {
  Lines l{piece.out,
          piece.c,
          (hgg_u64)piece.rows,
          (hgg_u64)a.out_columns,
          (hgg_u64)a.out.row_stride,
          (hgg_u64)a.c_matrix.row_stride,
          (hgg_u64)a.out.column_stride,
          (hgg_u64)a.c_matrix.column_stride};
  if (l.length == 1 || (l.count != 1 && l.out_step < l.out_stride)) {
    l = Lines{l.out, l.c, l.length, l.count, l.out_stride, l.c_stride, l.out_step, l.c_step};
  }
  if (l.out_step == l.length * l.out_stride && (!reads || l.c_step == l.length * l.c_stride)) {
    l.length *= l.count;
    l.count = 1;
  }
  return l;
}

template <class Type>
struct Writer {
  typedef typename Type::Storage Storage;
  typedef typename Type::Real Real;
  static constexpr int kBytes = sizeof(Storage);
  static constexpr int kVector = 16 / kBytes;

  const hgg_arguments* a;
  Real beta;
  bool reads;      // beta is not 0
  bool same;       // c has out's type
  bool aligned;    // every element of the piece of out lies on a multiple of its size
  bool c_aligned;  // likewise of c

  HGG_MEMBER Storage value_at(hgg_u64 c) const {
    if (!reads) return Storage(0);
    const Real read = same ? read_element<Type>(c, c_aligned) : read_any<Real>(a->c_type, c, c_aligned);
    return Type::narrow(multiply(beta, read));
  }

  // Elements [from, to) of a line, by `lanes` threads of which this is number `lane`.
  HGG_MEMBER void line(const Lines& l, hgg_u64 number, hgg_u64 from, hgg_u64 to, int lane, int lanes) const {
    const hgg_u64 out = l.out + number * l.out_step, c = l.c + number * l.c_step;
    // Vectors need out packed and, where c is read, c packed, of the same type and in the same phase.
    const hgg_u64 gap = (16 - ((out + from * kBytes) & 15)) & 15;
    const hgg_u64 body = minimum(from + gap / kBytes, to);
    const bool vectorized =
        aligned && l.out_stride == (hgg_u64)kBytes &&
        (!reads || (same && l.c_stride == (hgg_u64)kBytes && ((c + body * kBytes) & 15) == 0));
    const hgg_u64 vectors = vectorized ? (to - body) / kVector : 0;
    if (reads) scaled_vectors(out + body * kBytes, c + body * kBytes, vectors, lane, lanes);
    else zero_vectors(out + body * kBytes, vectors, lane, lanes);
    // What is left: before the vectors and behind them, or everything.
    const hgg_u64 skipped = vectors * kVector;
    HGG_ROLLED
    for (hgg_u64 left = from + lane; left + skipped < to; left += lanes) {
      const hgg_u64 i = left < body || !vectors ? left : left + skipped;
      store<Storage>(out + i * l.out_stride, value_at(c + i * l.c_stride), aligned);
    }
  }

  HGG_MEMBER void zero_vectors(hgg_u64 out, hgg_u64 vectors, int lane, int lanes) const {
    union {
      hgg_u64 word[2];
      hgg_vector vector;
    } zero;
    zero.word[0] = zero.word[1] = 0;
    for (hgg_u64 v = lane; v < vectors; v += lanes) write<hgg_vector>(out + 16 * v, zero.vector);
  }

  // Four vectors of c are on their way before the first is used: c may be out, so the compiler cannot move a
  // load over a store.
  HGG_MEMBER void scaled_vectors(hgg_u64 out, hgg_u64 c, hgg_u64 vectors, int lane, int lanes) const {
    union Vector {
      hgg_vector vector;
      Storage element[kVector];
    };
    HGG_ROLLED
    for (hgg_u64 v = lane; v < vectors; v += 4 * (hgg_u64)lanes) {
      Vector x[4];
      HGG_UNROLL
      for (int k = 0; k < 4; ++k)
        if (v + k * lanes < vectors) x[k].vector = read<hgg_vector>(c + 16 * (v + k * lanes));
      HGG_UNROLL
      for (int k = 0; k < 4; ++k) {
        if (v + k * lanes >= vectors) break;
        HGG_UNROLL
        for (int i = 0; i < kVector; ++i)
          x[k].element[i] = Type::narrow(multiply(beta, Type::widen(x[k].element[i])));
        write<hgg_vector>(out + 16 * (v + k * lanes), x[k].vector);
      }
    }
  }

  // Takes this block's units of a piece. The blocks take turns from piece to piece as well, so that many
  // small pieces are spread over them like one big one: `turn` is the block of the first unit; the next is
  // returned.
  HGG_MEMBER hgg_u32 piece(const Piece& p, hgg_u32 turn, int t) const {
    if (p.rows <= 0 || a->out_columns <= 0) return turn;
    const Lines l = lines_of(*a, p, reads);
    const hgg_u64 segment = (hgg_u64)kThreads * kLineVectors * kVector;
    int lanes = 1;
    while (lanes < kThreads && (hgg_u64)lanes * kVector < l.length) lanes *= 2;
    const hgg_u64 parts = ceiling(l.length, segment);      // units a line, when a line takes the whole block
    const hgg_u64 together = (hgg_u64)(kThreads / lanes);  // lines a unit, when it does not
    const hgg_u64 units = ceiling(l.count, together) * parts;
    const hgg_u32 grid = grid_size();
    HGG_ROLLED
    for (hgg_u64 unit = (block_index() + grid - turn) % grid; unit < units; unit += grid) {
      const hgg_u64 nth = parts == 1 ? unit : unit / parts;
      const hgg_u64 number = nth * together + t / lanes, from = (unit - nth * parts) * segment;
      if (number < l.count) line(l, number, from, minimum(from + segment, l.length), t % lanes, lanes);
    }
    return (turn + (hgg_u32)(units % grid)) % grid;
  }
};

template <class Type>
HGG_FUNCTION void write_pieces(const hgg_arguments& a, UncoveredShared& shared, hgg_u32 first, int count,
                                hgg_u32& turn, typename Type::Real beta, bool reads) {
  const hgg_u64 out_bits = (hgg_u64)(a.out.row_stride | a.out.column_stride);
  const hgg_u64 c_bits = (hgg_u64)(a.c_matrix.row_stride | a.c_matrix.column_stride);
  hgg_u32 after = turn;
  HGG_PHASE(t) {
    after = turn;
    HGG_ROLLED
    for (int word = 0; word < ceiling(count, 32); ++word)
      for (hgg_u32 bits = shared.mask[word]; bits; bits &= bits - 1) {
        const Piece piece = piece_of(a, first + 32 * word + (hgg_u32)lowest_bit(bits));
        const Writer<Type> writer{&a,
                                  beta,
                                  reads,
                                  a.c_type == a.out_type,
                                  ((out_bits | piece.out) & (sizeof(typename Type::Storage) - 1)) == 0,
                                  ((c_bits | piece.c) & (hgg_u64)(bytes_of(a.c_type) - 1)) == 0};
        after = writer.piece(piece, after, t);
      }
  }
  turn = after;
}

// Marks the candidates that have something to write; the loads of a thread are in flight together.
HGG_FUNCTION void mark_candidates(const hgg_arguments& a, UncoveredShared& shared, hgg_u32 first, int count,
                                  int t) {
  bool marked[kItems];
  HGG_UNROLL
  for (int k = 0; k < kItems; ++k) {
    const int i = t + k * kThreads;
    marked[k] = i < count && rows_left(a, first + i);
  }
  HGG_UNROLL
  for (int k = 0; k < kItems; ++k) {
    const int i = t + k * kThreads;
    if (!marked[k]) continue;
    atomic_or(&shared.mask[i >> 5], 1u << (i & 31));
    shared.any = 1;
  }
}

HGG_FUNCTION void zero_uncovered_block(const hgg_arguments& a, UncoveredShared& shared) {
  const bool contracting = a.mode == HGG_RAGGED_K;
  if (a.out_columns <= 0) return;
  // The common case, without a barrier: one scan, and all rows are covered.
  if (!contracting && a.batch_count == 1) {
    const hgg_i64 begin = read<hgg_i64>(a.covered_range), end = read<hgg_i64>(a.covered_range + 8);
    if (begin == 0 && end == a.ragged_extent) return;
  }
  const hgg_u32 candidates = (hgg_u32)a.out_batch_count * (contracting ? (hgg_u32)a.group_count : 2);
  union {
    hgg_u32 word[2];
    double f64;
    float f32;
  } beta;
  beta.word[0] = a.beta[0];
  beta.word[1] = a.beta[1];
  // By the bits, since a subnormal beta is not 0.
  const bool wide = a.out_type == HGG_F64;
  const bool reads =
      wide ? (beta.word[0] | (beta.word[1] & 0x7fffffffu)) != 0 : (beta.word[0] & 0x7fffffffu) != 0;
  hgg_u32 turn = 0;
  HGG_ROLLED
  for (hgg_u32 first = 0; first < candidates; first += kCandidates) {
    const int count = (int)minimum(candidates - first, (hgg_u32)kCandidates);
    HGG_PHASE(t) {
      if (t < kCandidates / 32) shared.mask[t] = 0;
      if (t == 0) shared.any = 0;
    }
    HGG_PHASE(t) { mark_candidates(a, shared, first, count, t); }
    const bool any = shared.any != 0;
    if (any) {
      switch (a.out_type) {
        case HGG_BF16: write_pieces<BFloat16>(a, shared, first, count, turn, beta.f32, reads); break;
        case HGG_F16: write_pieces<Float16>(a, shared, first, count, turn, beta.f32, reads); break;
        case HGG_F32: write_pieces<Float32>(a, shared, first, count, turn, beta.f32, reads); break;
        default: write_pieces<Float64>(a, shared, first, count, turn, beta.f64, reads); break;
      }
    }
    HGG_PHASE(t) { (void)t; }  // the mask is cleared only when all have read it
  }
}

}  // namespace hgg

#endif
