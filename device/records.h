// The record writer: one 196-byte hipBLASLt record for every computed group, behind the scan.
//
// Records are put together in shared memory and the block copies them to global memory, a chunk at a time.
// What is the same in all records is staged while the group sizes are still on their way; behind the scan one
// thread a record adds what is the record's own. Records are 49 words, an odd number, so the threads of a
// warp stage on different banks; 196 is a multiple of 4 only, so the 16-byte stores take their words one by
// one, and up to three words at either end of a chunk go alone.
#ifndef HGG_RECORDS_H
#define HGG_RECORDS_H

#include "scan.h"

namespace hgg {

constexpr int kChunk = 64;  // records staged at a time
static_assert(kChunk <= kThreads, "a thread stages one record");

struct FillShared {
  hgg_u32 stage[kChunk * HGG_RECORD_WORDS];
  ScanShared scan;
};

// Word `word` of every record, where it is the same in all: the template's, or alpha's or beta's.
HGG_FUNCTION hgg_u32 common_word(const hgg_arguments& a, int word) {
  const int scalar = word - HGG_WORD(alpha);
  if (scalar >= 0 && scalar < 4 && (a.flags & HGG_OVERRIDE_ALPHA)) return a.alpha[scalar];
  if (scalar >= 4 && scalar < 8 && (a.flags & HGG_OVERRIDE_BETA)) return a.beta[scalar - 4];
  return ((const hgg_u32*)&a.record)[word];
}

// Stages all words of the first `records` records from their template.
HGG_FUNCTION void stage_common(const hgg_arguments& a, hgg_u32* stage, int records, int t) {
  HGG_ROLLED
  for (int word = t / 32; word < HGG_RECORD_WORDS; word += kThreads / 32) {
    const hgg_u32 value = common_word(a, word);
    HGG_ROLLED
    for (int record = t % 32; record < records; record += 32) stage[record * HGG_RECORD_WORDS + word] = value;
  }
}

HGG_FUNCTION void put_address(hgg_u32* record, int word, const hgg_operand& operand, hgg_u64 row,
                              hgg_u64 group, hgg_u64 batch) {
  if (!operand.base) return;
  const hgg_u64 address = group_address(operand.base, operand.group_stride, group) +
                          row * (hgg_u64)operand.row_stride + batch * (hgg_u64)operand.batch_stride;
  record[word] = (hgg_u32)address;
  record[word + 1] = (hgg_u32)(address >> 32);
}

// A record's own words. Mode says which extent is the group's rows. An empty group in CONTRACTING loses its n
// as well: then it has no tiles, and its slab belongs to hgg_zero_uncovered alone, whatever a GEMM kernel makes of
// k = 0. (The stage still has the n of an earlier chunk, so it is written either way.)
template <int Mode>
HGG_FUNCTION void stage_own(const hgg_arguments& a, hgg_u32* record, hgg_u64 batch, hgg_u64 group,
                            hgg_u64 start, hgg_u64 rows) {
  const hgg_u64 row = rows ? start : 0;
  if (Mode == HGG_RAGGED_M) record[HGG_WORD(m)] = (hgg_u32)rows;
  if (Mode == HGG_RAGGED_N) record[HGG_WORD(n)] = (hgg_u32)rows;
  if (Mode == HGG_RAGGED_K) {
    record[HGG_WORD(k)] = (hgg_u32)rows;
    record[HGG_WORD(n)] = rows ? a.record.n : 0;
  }
  put_address(record, HGG_WORD(d), a.d, row, group, batch);
  put_address(record, HGG_WORD(c), a.c, row, group, batch);
  put_address(record, HGG_WORD(a), a.a, row, group, batch);
  put_address(record, HGG_WORD(b), a.b, row, group, batch);
  put_address(record, HGG_WORD(bias), a.bias, row, group, batch);
}

HGG_FUNCTION void stage_any(const hgg_arguments& a, hgg_u32* record, hgg_u64 batch, hgg_u64 group,
                            hgg_u64 start, hgg_u64 rows) {
  switch (a.mode) {
    case HGG_RAGGED_N: stage_own<HGG_RAGGED_N>(a, record, batch, group, start, rows); break;
    case HGG_RAGGED_M: stage_own<HGG_RAGGED_M>(a, record, batch, group, start, rows); break;
    default: stage_own<HGG_RAGGED_K>(a, record, batch, group, start, rows); break;
  }
}

// Copies `count` staged records to the records from `first` on.
HGG_FUNCTION void copy_stage(const hgg_arguments& a, const hgg_u32* stage, hgg_u64 first, int count, int t) {
  const hgg_u64 address = a.records + first * HGG_RECORD_BYTES;
  const int words = count * HGG_RECORD_WORDS;
  const int head =
      minimum((int)(-(hgg_i64)first & 3), words);  // up to 16 bytes: 49 * first is first modulo 4
  const int vectors = (words - head) / 4;
  const int tail = words - head - 4 * vectors;
  for (int i = t; i < vectors; i += kThreads) {
    union {
      hgg_u32 word[4];
      hgg_vector vector;
    } x;
    HGG_UNROLL
    for (int j = 0; j < 4; ++j) x.word[j] = stage[head + 4 * i + j];
    write<hgg_vector>(address + 4 * head + 16 * i, x.vector);
  }
  if (t < head) write<hgg_u32>(address + 4 * t, stage[t]);
  const int last = words - tail + t - 4;
  if (t >= 4 && t < 4 + tail) write<hgg_u32>(address + 4 * last, stage[last]);
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

  HGG_MEMBER void prepare(int t) const {
    if (a->records)
      stage_common(*a, shared->stage, (int)minimum(share.end - share.first, (hgg_u32)kChunk), t);
  }

  HGG_MEMBER void window(const Window& window, const HGG_PRIVATE(Mine, (&))) {
    const hgg_u32 end = minimum(window.first + (hgg_u32)window.count, share.end);
    HGG_ROLLED
    for (hgg_u32 at = maximum(window.first, share.first); at < end; at += kChunk) {
      const int count = (int)minimum(end - at, (hgg_u32)kChunk);
      const hgg_u32 first = records_before(at);
      const int records = (int)(records_before(at + count) - first);
      if (records == 0) continue;
      HGG_PHASE(t) {
        if (t < count) stage_place(window, at + t, first);
      }
      HGG_PHASE(t) {
        if (a->records) copy_stage(*a, shared->stage, first, records, t);
      }
    }
  }

  HGG_MEMBER void stage_place(const Window& window, hgg_u32 flat, hgg_u32 first) const {
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
    stage_any(*a, shared->stage + record * HGG_RECORD_WORDS, batch, (hgg_u64)local, (hgg_u64)rows.start,
              (hgg_u64)(rows.end - rows.start));
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
