// What a block has found: kept by each thread, put together at its end.
#ifndef HGG_FINDINGS_H
#define HGG_FINDINGS_H

#include "judge_arguments.h"
#include "numbers.h"

namespace hgg {

constexpr hgg_u64 kNowhere = ~(hgg_u64)0;
constexpr int kChunkElements = 4096;  // of a line, that a block takes at a time

HGG_FUNCTION hgg_findings nothing_found() {
  return hgg_findings{0, 0, kNowhere, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, kNowhere, 0.0};
}

HGG_FUNCTION void clear(HGG_PRIVATE(hgg_findings, (&found))) {
  HGG_STEP(t) {
    (void)t;  // a GPU's thread has one, whatever its number
    HGG_OWN(found, t) = nothing_found();
  }
}

HGG_FUNCTION double magnitude_of(double value) { return value < 0 ? -value : value; }

HGG_FUNCTION void note_wrong(hgg_findings& f, hgg_u64 index, double got, double wanted, double bound) {
  f.wrong += 1;
  const double error = magnitude_of(got - wanted);
  const double ratio = error == error && bound > 0 ? error / bound : (double)float_of(0x7f800000u);
  f.worst = maximum(f.worst, ratio);
  if (index >= f.first) return;
  f.first = index;
  f.got = got;
  f.wanted = wanted;
  f.bound = bound;
}

HGG_FUNCTION void add_findings(hgg_findings& to, const hgg_findings& from) {
  to.count += from.count;
  to.wrong += from.wrong;
  if (from.first < to.first) {
    to.first = from.first;
    to.got = from.got;
    to.wanted = from.wanted;
    to.bound = from.bound;
  }
  to.square_error += from.square_error;
  to.square_norm += from.square_norm;
  to.unwritten += from.unwritten;
  to.nan += from.nan;
  to.first_nan = minimum(to.first_nan, from.first_nan);
  to.worst = maximum(to.worst, from.worst);
}

// Field by field: the global address space of a HIP device has no copy of a struct.
HGG_FUNCTION void write_findings(hgg_u64 address, const hgg_findings& f) {
  write<hgg_u64>(address, f.count);
  write<hgg_u64>(address + 8, f.wrong);
  write<hgg_u64>(address + 16, f.first);
  write<double>(address + 24, f.got);
  write<double>(address + 32, f.wanted);
  write<double>(address + 40, f.bound);
  write<double>(address + 48, f.square_error);
  write<double>(address + 56, f.square_norm);
  write<hgg_u64>(address + 64, f.unwritten);
  write<hgg_u64>(address + 72, f.nan);
  write<hgg_u64>(address + 80, f.first_nan);
  write<double>(address + 88, f.worst);
}

// Adds up what the threads found, always in the same order, and writes it to the block's place.
HGG_FUNCTION void report(hgg_u64 findings, hgg_findings* shared, const HGG_PRIVATE(hgg_findings, (&mine))) {
  HGG_PHASE(t) { shared[t] = HGG_OWN(mine, t); }
  HGG_ROLLED
  for (int half = HGG_THREADS / 2; half > 0; half /= 2) {
    HGG_PHASE(t) {
      if (t < half) add_findings(shared[t], shared[t + half]);
    }
  }
  HGG_PHASE(t) {
    if (t == 0) write_findings(findings + sizeof(hgg_findings) * (hgg_u64)block_index(), shared[0]);
  }
}

// Where a block's share of a walk over lines of elements lies: one chunk of one line.
struct Chunk {
  hgg_u64 line;
  hgg_i64 first, end;
};

struct Walk {
  hgg_u64 lines;
  hgg_i64 length;  // of a line

  HGG_MEMBER hgg_u64 chunks_a_line() const { return (hgg_u64)ceiling(length, (hgg_i64)kChunkElements); }
  HGG_MEMBER hgg_u64 units() const { return lines * chunks_a_line(); }
  HGG_MEMBER Chunk at(hgg_u64 unit) const {
    const hgg_u64 each = chunks_a_line(), line = unit / each;
    const hgg_i64 first = (hgg_i64)(unit - line * each) * kChunkElements;
    return Chunk{line, first, minimum(first + kChunkElements, length)};
  }
};

}  // namespace hgg

#endif
