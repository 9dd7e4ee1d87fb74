// The record writer: one 196-byte hipBLASLt record for every computed group, behind the scan.
//
// A thread puts one record together in shared memory; then the block copies the chunk to global memory in
// 16-byte stores. Records are 49 words, an odd number, so the threads of a warp stage on different banks; 196
// is a multiple of 4 only, so the stage is shifted to the phase of its place in global memory, and up to
// three words at either end go alone.
#ifndef HGG_RECORDS_H
#define HGG_RECORDS_H

#include "scan.h"

namespace hgg {

constexpr int kChunk = 64;  // records staged at a time
static_assert(kChunk <= kThreads, "a thread stages one record");

struct FillShared {
  alignas(16) hgg_u32 stage[kChunk * HGG_RECORD_WORDS + 4];
  ScanShared scan;
};

HGG_FUNCTION void put_u64(hgg_u32* record, int word, hgg_u64 value) {
  record[word] = (hgg_u32)value;
  record[word + 1] = (hgg_u32)(value >> 32);
}

HGG_FUNCTION void put_address(hgg_u32* record, int word, const hgg_operand& operand, hgg_u64 otherwise,
                              hgg_u64 row, hgg_u64 group, hgg_u64 batch) {
  const hgg_u64 address = operand.base + row * (hgg_u64)operand.row_stride +
                          group * (hgg_u64)operand.group_stride + batch * (hgg_u64)operand.batch_stride;
  put_u64(record, word, operand.base ? address : otherwise);
}

// The words that are not the template's.
HGG_FUNCTION constexpr bool is_computed(int word) {
  return word == HGG_WORD(m) || word == HGG_WORD(n) || word == HGG_WORD(k) ||
         (word >= HGG_WORD(d) && word < HGG_WORD(stride_d1)) ||
         (word >= HGG_WORD(alpha) && word < HGG_WORD(scale_a)) || word == HGG_WORD(bias) ||
         word == HGG_WORD(bias) + 1;
}

// Mode says which extent is the group's rows. An empty group in CONTRACTING loses its n as well: then it has
// no tiles, and its slab belongs to hgg_finish alone, whatever a GEMM kernel makes of k = 0.
template <int Mode>
HGG_FUNCTION void stage_record(const hgg_arguments& a, hgg_u32* record, hgg_u64 batch, hgg_u64 group,
                               hgg_u64 start, hgg_u64 rows) {
  const hgg_user_arguments& like = a.record;
  const hgg_u32* words = (const hgg_u32*)&like;
  HGG_UNROLL
  for (int word = 0; word < HGG_RECORD_WORDS; ++word)
    if (!is_computed(word)) record[word] = words[word];
  const hgg_u64 row = rows ? start : 0;
  record[HGG_WORD(m)] = Mode == HGG_RAGGED_M ? (hgg_u32)rows : like.m;
  record[HGG_WORD(n)] = Mode == HGG_RAGGED_N || (Mode == HGG_RAGGED_K && !rows) ? (hgg_u32)rows : like.n;
  record[HGG_WORD(k)] = Mode == HGG_RAGGED_K ? (hgg_u32)rows : like.k;
  put_address(record, HGG_WORD(d), a.d, like.d, row, group, batch);
  put_address(record, HGG_WORD(c), a.c, like.c, row, group, batch);
  put_address(record, HGG_WORD(a), a.a, like.a, row, group, batch);
  put_address(record, HGG_WORD(b), a.b, like.b, row, group, batch);
  put_address(record, HGG_WORD(bias), a.bias, like.bias, row, group, batch);
  HGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    record[HGG_WORD(alpha) + i] = a.flags & HGG_OVERRIDE_ALPHA ? a.alpha[i] : like.alpha[i];
    record[HGG_WORD(beta) + i] = a.flags & HGG_OVERRIDE_BETA ? a.beta[i] : like.beta[i];
  }
}

HGG_FUNCTION void stage_any(const hgg_arguments& a, hgg_u32* record, hgg_u64 batch, hgg_u64 group,
                            hgg_u64 start, hgg_u64 rows) {
  switch (a.mode) {
    case HGG_RAGGED_N: stage_record<HGG_RAGGED_N>(a, record, batch, group, start, rows); break;
    case HGG_RAGGED_M: stage_record<HGG_RAGGED_M>(a, record, batch, group, start, rows); break;
    default: stage_record<HGG_RAGGED_K>(a, record, batch, group, start, rows); break;
  }
}

// Copies `count` staged records to the records from `first` on.
HGG_FUNCTION void copy_stage(const hgg_arguments& a, const hgg_u32* stage, hgg_u64 first, int count, int t) {
  const hgg_u64 address = a.records + first * HGG_RECORD_BYTES;
  const int shift = (int)(first & 3);  // the stage's phase, in words: 49 * first modulo 4
  const int words = count * HGG_RECORD_WORDS;
  const int head = minimum((4 - shift) & 3, words);
  const int vectors = (words - head) / 4;
  const int tail = words - head - 4 * vectors;
  const hgg_u32* source = stage + shift;
  for (int i = t; i < vectors; i += kThreads)
    write<hgg_vector>(address + 4 * head + 16 * i, *(const hgg_vector*)(source + head + 4 * i));
  if (t < head) write<hgg_u32>(address + 4 * t, source[t]);
  const int last = words - tail + t - 4;
  if (t >= 4 && t < 4 + tail) write<hgg_u32>(address + 4 * last, source[last]);
}

// The share of one block: writes rows and records of the groups in it, behind their windows. The places
// behind the groups are those of surplus records, which keep the problem count at hipBLASLt's two or more: no
// rows.
struct RecordWriter {
  const hgg_arguments* a;
  FillShared* shared;
  Share share;

  // Records before a place. Groups that are not computed have none, so the records of a share follow each
  // other.
  HGG_MEMBER hgg_u32 records_before(hgg_u32 flat) const {
    const hgg_u32 groups = group_places(*a);
    if (flat >= groups) return (hgg_u32)a->batch_count * (hgg_u32)a->group_count + (flat - groups);
    const hgg_u32 batch = batch_of(*a, flat);
    const hgg_i64 local = (hgg_i64)group_of(*a, flat, batch) - shared->scan.offset;
    return batch * (hgg_u32)a->group_count +
           (hgg_u32)minimum(maximum(local, (hgg_i64)0), (hgg_i64)a->group_count);
  }

  HGG_MEMBER void window(const Window& window) {
    const hgg_u32 end = minimum(window.first + (hgg_u32)window.count, share.end);
    HGG_ROLLED
    for (hgg_u32 at = maximum(window.first, share.first); at < end; at += kChunk) {
      const int count = (int)minimum(end - at, (hgg_u32)kChunk);
      const hgg_u32 first = records_before(at);
      const int records = (int)(records_before(at + count) - first);
      if (records == 0) continue;
      HGG_PHASE(t) {
        if (t < count) stage(window, at + t, first);
      }
      HGG_PHASE(t) {
        if (a->records) copy_stage(*a, shared->stage, first, records, t);
      }
    }
  }

  HGG_MEMBER void stage(const Window& window, hgg_u32 flat, hgg_u32 first) const {
    hgg_u32 batch = 0, record = records_before(flat) - first;
    hgg_i64 local = 0;
    Rows rows{0, 0};
    if (flat < group_places(*a)) {
      batch = batch_of(*a, flat);
      const hgg_u32 group = group_of(*a, flat, batch);
      local = (hgg_i64)group - shared->scan.offset;
      if (local < 0 || local >= a->group_count) return;
      rows = rows_of(*a, shared->scan, window, flat, group == 0);
      write_rows(*a, batch, (hgg_u32)local, rows);
      if (!a->records) return;
    }
    stage_any(*a, shared->stage + (first & 3) + record * HGG_RECORD_WORDS, batch, (hgg_u64)local,
              (hgg_u64)rows.start, (hgg_u64)(rows.end - rows.start));
  }
};

HGG_FUNCTION void fill_block(const hgg_arguments& a, FillShared& shared) {
  const hgg_u32 groups = group_places(a);
  const hgg_u32 records = (hgg_u32)a.batch_count * (hgg_u32)a.group_count;
  const Share share = share_of(groups + (a.records ? (hgg_u32)a.record_count - records : 0));
  if (share.first == share.end && block_index() != 0) return;
  RecordWriter writer{&a, &shared, share};
  // Only the first block is here without a share: there is nothing to scan then.
  const hgg_u32 from = share.first < groups ? scan_start(a, share.first) : share.first;
  scan(a, shared.scan, from, share.end, share, writer);
}

}  // namespace hgg

#endif
