// The scan that everything here stands on: group sizes or end offsets -> first and last row of every group,
// first fault.
//
// All groups of all batches form one flat list (flat = batch * group_total + group) that a block walks in
// windows of HGG_THREADS * kItems places, with a running carry. It is a segmented scan: a new batch starts
// from 0 again. Behind the groups hgg_fill has a place for each surplus record, a batch of its own without
// rows. Blocks share nothing: each scans what lies before its own share itself, which costs less than a
// grid-wide barrier at the few thousand groups that an MoE layer has.
//
// Sizes are limited to [0, R + 1] and summed in 64 bits; end offsets are limited to [0, R] and their running
// maximum is taken. A group's rows are [min(previous, R), min(own, R)).
#ifndef HGG_SCAN_H
#define HGG_SCAN_H

#include "portable.h"

namespace hgg {

constexpr int kThreads = HGG_THREADS;
constexpr int kItems = HGG_ITEMS;           // groups a thread may own in one window
constexpr int kWindow = kThreads * kItems;  // places in one window
constexpr int kWarps = kThreads / kWarp;
static_assert(kThreads % kWarp == 0, "whole warps");

// A value in flight carries two marks: the first group of its batch, and a size or offset that is wrong by
// itself.
constexpr hgg_u64 kHead = 1ull << 62;
constexpr hgg_u64 kWrong = 1ull << 63;
constexpr hgg_u64 kValue = kHead - 1;
constexpr hgg_u32 kNoFault = 0xffffffffu;
constexpr hgg_i64 kMost = 0x7fffffffffffffffll;
constexpr hgg_i64 kLeast = -kMost - 1;

struct ScanShared {
  hgg_u64 value[kWindow + kWindow / 8];  // inclusive prefixes; read through slot()
  hgg_u64 total[kWarps];                 // of each warp
  hgg_u64 carry[2];  // last prefix of the window before; two, so that none is overwritten while it is read
  hgg_i64 offset;    // group_offset, clamped
  hgg_i64 wanted;    // of the fault
  hgg_i64 left;
  hgg_u32 fault;  // flat index of the first fault
  hgg_i32 kind;
  hgg_i32 bad_offset;  // group_offset was out of range
};

// What a thread has of a window: neighbouring places.
struct Mine {
  hgg_u64 item[kItems];  // limited size or offset, with its marks
  hgg_u64 sum;           // the prefix over them; after scan_warp over all up to them in the warp
  hgg_u64 before;        // the prefix over all before them in the warp
};

// Neighbouring values of a thread lie side by side; the gaps keep the threads of a warp on different banks.
HGG_FUNCTION int slot(int i) { return i + (i >> 3); }

HGG_FUNCTION hgg_u32 group_places(const hgg_arguments& a) {
  return (hgg_u32)a.batch_count * (hgg_u32)a.group_total;
}

// A window of the flat list, and which of the two carries it starts from.
struct Window {
  hgg_u32 first;
  int count;
  int parity;
  HGG_MEMBER bool holds(hgg_u32 flat) const { return flat - first < (hgg_u32)count; }
  // How many of its places are groups; the others are those of surplus records.
  HGG_MEMBER int real(const hgg_arguments& a) const {
    const hgg_u32 groups = group_places(a);
    return first >= groups ? 0 : (int)minimum((hgg_u32)count, groups - first);
  }
};

HGG_FUNCTION hgg_u32 batch_of(const hgg_arguments& a, hgg_u32 flat) {
  return a.batch_count == 1 ? 0 : flat / (hgg_u32)a.group_total;
}
HGG_FUNCTION hgg_u32 group_of(const hgg_arguments& a, hgg_u32 flat, hgg_u32 batch) {
  return flat - batch * (hgg_u32)a.group_total;
}
HGG_FUNCTION bool is_head(const hgg_arguments& a, hgg_u32 flat) {
  return a.batch_count == 1 ? flat == 0 : flat % (hgg_u32)a.group_total == 0;
}
HGG_FUNCTION hgg_u64 size_address(const hgg_arguments& a, hgg_u32 flat) {
  const hgg_u32 batch = batch_of(a, flat);
  return a.sizes + (hgg_u64)group_of(a, flat, batch) * (hgg_u64)a.sizes_stride +
         (hgg_u64)batch * (hgg_u64)a.sizes_batch_stride;
}

// --- reading integers of any type: the width is a template parameter, the sign a bit to test

template <class Word>
HGG_FUNCTION bool is_aligned(hgg_u64 bits) {
  return (bits & (sizeof(Word) - 1)) == 0;
}

// The bit that makes an integer of this type negative; 0 when none does.
template <class Word>
HGG_FUNCTION hgg_u64 sign_bit(hgg_i32 type) {
  return type < HGG_U8 ? 1ull << (8 * sizeof(Word) - 1) : 0;
}

// Calls visitor.template visit<Word>() with the unsigned type that has the width of an hgg integer code.
template <class Visitor>
HGG_FUNCTION void with_width_of(hgg_i32 type, const Visitor& visitor) {
  switch (type & 3) {
    case HGG_I8: visitor.template visit<unsigned char>(); break;
    case HGG_I16: visitor.template visit<unsigned short>(); break;
    case HGG_I32: visitor.template visit<hgg_u32>(); break;
    default: visitor.template visit<hgg_u64>(); break;
  }
}

struct ReadOne {
  hgg_u64 address;
  hgg_i32 type;
  hgg_i64* value;
  template <class Word>
  HGG_MEMBER void visit() const {
    const hgg_u64 raw = load<Word>(address, is_aligned<Word>(address)), sign = sign_bit<Word>(type);
    *value = raw & sign ? (hgg_i64)(raw | ~(2 * sign - 1)) : (hgg_i64)minimum(raw, (hgg_u64)kMost);
  }
};

// One integer as int64, saturated.
// Where a group's array starts, see hgg_operand.
HGG_FUNCTION hgg_u64 group_address(hgg_u64 base, hgg_i64 group_stride, hgg_u64 group) {
  return group_stride == HGG_LISTED ? read<hgg_u64>(base + 8 * group) : base + group * (hgg_u64)group_stride;
}

HGG_FUNCTION hgg_i64 read_integer(hgg_u64 address, hgg_i32 type) {
  hgg_i64 value = 0;
  with_width_of(type, ReadOne{address, type, &value});
  return value;
}

// --- the steps of a window, one phase each

HGG_FUNCTION int items_of(const Window& window) { return ceiling(window.count, kThreads); }

// [0, R + 1] for a size, [0, R] for an offset; marked when it is wrong whatever stands before it.
HGG_FUNCTION hgg_u64 limited(hgg_u64 raw, hgg_u64 sign, hgg_u64 extent, bool offsets) {
  if (raw & sign) return kWrong;
  if (raw <= extent) return raw;
  return offsets ? extent | kWrong : extent + 1;
}

// Reads a thread's places, one load each, so that they are in flight together.
struct ReadItems {
  const hgg_arguments* a;
  Window window;
  Mine* own;
  int t;

  template <class Word>
  HGG_MEMBER void visit() const {
    const hgg_u64 stride = (hgg_u64)a->sizes_stride;
    const int items = items_of(window), first = t * items, real = minimum(window.real(*a), first + items);
    const bool flat = a->batch_count == 1 || a->sizes_batch_stride == a->sizes_stride * a->group_total;
    if (flat && is_aligned<Word>(a->sizes | stride)) {
      const hgg_u64 address = a->sizes + (hgg_u64)(window.first + first) * stride;
      HGG_UNROLL
      for (int k = 0; k < kItems; ++k) {
        if (first + k >= real) break;
        own->item[k] = read<Word>(address + k * stride);
      }
      return;
    }
    HGG_UNROLL
    for (int k = 0; k < kItems; ++k) {
      if (first + k >= real) break;
      const hgg_u64 address = size_address(*a, window.first + first + k);
      own->item[k] = load<Word>(address, is_aligned<Word>(address));
    }
  }
};

HGG_FUNCTION void read_items(const hgg_arguments& a, const Window& window, Mine& own, int t) {
  if (a.sizes_kind != HGG_SIZES_NONE) with_width_of(a.sizes_type, ReadItems{&a, window, &own, t});
}

// The prefix over two neighbours; a head forgets what came before it. 0 is the identity.
template <bool Offsets>
HGG_FUNCTION hgg_u64 combine(hgg_u64 before, hgg_u64 after) {
  if (after & kHead) return after;
  if (Offsets) return (before & kHead) | maximum(before & kValue, after);
  return before + after;
}

// Limits what was read, marks it, and takes the prefix over the thread's places.
template <bool Offsets>
HGG_FUNCTION void limit_items(const hgg_arguments& a, const Window& window, Mine& own, int t) {
  const int items = items_of(window), first = t * items, real = window.real(a);
  const hgg_u64 extent = (hgg_u64)a.ragged_extent;
  const hgg_u64 sign = a.sizes_type < HGG_U8 ? 0x80ull << (8 * ((1 << (a.sizes_type & 3)) - 1)) : 0;
  hgg_u64 sum = 0;
  HGG_UNROLL
  for (int k = 0; k < kItems; ++k) {
    if (k >= items || first + k >= window.count) break;
    hgg_u64 value = 0;
    const bool head = first + k >= real || is_head(a, window.first + first + k);
    if (first + k < real)
      value = a.sizes_kind != HGG_SIZES_NONE ? limited(own.item[k], sign, extent, Offsets)
              : head                         ? extent
                                             : 0;
    own.item[k] = value | (head ? kHead : 0);
    sum = combine<Offsets>(sum, own.item[k] & ~kWrong);
  }
  own.sum = sum;
}

// Turns each thread's sum into the prefix up to it in its warp, and gives it the prefix before it.
template <bool Offsets>
HGG_FUNCTION void scan_warp(HGG_PRIVATE(Mine, (&mine))) {
#if defined(HGG_HOST)
  for (int t = 0; t < kThreads; ++t) {
    mine[t].before = t % kWarp ? mine[t - 1].sum : 0;
    mine[t].sum = combine<Offsets>(mine[t].before, mine[t].sum);
  }
#else
  const int lane = thread_index() % kWarp;
  hgg_u64 sum = mine[0].sum;
  HGG_UNROLL
  for (int up = 1; up < kWarp; up *= 2) {
    const hgg_u64 below = shuffle_up(sum, lane, up);
    if (lane >= up) sum = combine<Offsets>(below, sum);
  }
  const hgg_u64 before = shuffle_up(sum, lane, 1);
  mine[0].before = lane ? before : 0;
  mine[0].sum = sum;
#endif
}

HGG_FUNCTION void publish_total(hgg_u64 (&total)[kWarps], const Mine& own, int t) {
  if (t % kWarp == kWarp - 1) total[t / kWarp] = own.sum;
}

// The prefix over all places of the window before thread t's, once the totals are there.
template <bool Offsets>
HGG_FUNCTION hgg_u64 prefix_before(const hgg_u64 (&total)[kWarps], const Mine& own, int t) {
  hgg_u64 prefix = 0;
  HGG_UNROLL
  for (int w = 0; w < kWarps; ++w) prefix = combine<Offsets>(prefix, w < t / kWarp ? total[w] : 0);
  return combine<Offsets>(prefix, own.before);
}

// Writes the inclusive prefixes to shared memory and finds faults.
template <bool Offsets>
HGG_FUNCTION void walk_items(const hgg_arguments& a, ScanShared& shared, const Window& window,
                             const Mine& own, int t) {
  const int items = items_of(window), first = t * items;
  if (first >= window.count) return;
  hgg_u64 prefix = prefix_before<Offsets>(shared.total, own, t);
  // The very first group of all is a head, so the carry of the first window is never looked at.
  if (window.first != 0) prefix = combine<Offsets>(shared.carry[window.parity] & kValue, prefix);
  prefix &= kValue;
  const hgg_u64 extent = (hgg_u64)a.ragged_extent;
  HGG_UNROLL
  for (int k = 0; k < kItems; ++k) {
    const int i = first + k;
    if (k >= items || i >= window.count) break;
    const hgg_u64 item = own.item[k], before = item & kHead ? 0 : prefix;
    prefix = Offsets ? maximum(before, item & kValue) : before + (item & kValue);
    const bool wrong = Offsets ? (item & kValue) < before : prefix > extent && before <= extent;
    if (wrong || (item & kWrong)) atomic_min(&shared.fault, window.first + i);
    shared.value[slot(i)] = prefix;
    if (i == window.count - 1) shared.carry[1 - window.parity] = prefix;
  }
}

// --- what a window's consumers ask

HGG_FUNCTION hgg_u64 before_group(const ScanShared& shared, const Window& window, hgg_u32 flat, bool head) {
  if (head) return 0;
  return flat == window.first ? shared.carry[window.parity]
                              : shared.value[slot((int)(flat - window.first) - 1)];
}

struct Rows {
  hgg_i64 start;
  hgg_i64 end;
};

HGG_FUNCTION Rows rows_of(const hgg_arguments& a, const ScanShared& shared, const Window& window,
                          hgg_u32 flat, bool head) {
  const hgg_u64 extent = (hgg_u64)a.ragged_extent;
  return Rows{(hgg_i64)minimum(before_group(shared, window, flat, head), extent),
              (hgg_i64)minimum(shared.value[slot((int)(flat - window.first))], extent)};
}

// Writes a computed group's rows where they are asked for.
HGG_FUNCTION void write_rows(const hgg_arguments& a, hgg_u32 batch, hgg_u32 local, const Rows& rows) {
  const hgg_u64 problem = (hgg_u64)batch * (hgg_u32)a.group_count + local;
  if (a.starts) write<hgg_i64>(a.starts + 8 * problem, rows.start);
  if (a.ends) write<hgg_i64>(a.ends + 8 * problem, rows.end);
  if (!a.covered_range) return;
  const hgg_u64 range = a.covered_range + 16 * (hgg_u64)batch;
  if (local == 0) write<hgg_i64>(range, rows.start);
  if (local == (hgg_u32)a.group_count - 1) write<hgg_i64>(range + 8, rows.end);
}

// With no group at all nothing is covered.
HGG_FUNCTION void write_empty_range(const hgg_arguments& a, int t) {
  if (a.group_count != 0 || !a.covered_range || block_index() != 0) return;
  for (hgg_u64 i = t; i < 2 * (hgg_u64)a.batch_count; i += kThreads) write<hgg_i64>(a.covered_range + 8 * i, 0);
}

// --- group_offset and the fault

// Sticky: an earlier launch's fault stays until the host has seen and cleared it.
HGG_FUNCTION void keep_fault(const hgg_arguments& a, hgg_i32 kind, hgg_u32 batch, hgg_u32 group,
                             hgg_i64 wanted, hgg_i64 left) {
  const hgg_fault* fault = (const hgg_fault*)a.fault;
  if (read<hgg_i32>((hgg_u64)&fault->kind) != HGG_FAULT_NONE) return;
  write<hgg_i32>((hgg_u64)&fault->kind, kind);
  write<hgg_i32>((hgg_u64)&fault->batch, (hgg_i32)batch);
  write<hgg_i64>((hgg_u64)&fault->group, group);
  write<hgg_i64>((hgg_u64)&fault->wanted, wanted);
  write<hgg_i64>((hgg_u64)&fault->left, left);
}

HGG_FUNCTION void open_scan(const hgg_arguments& a, ScanShared& shared, int t) {
  write_empty_range(a, t);
  if (t == 0) shared.fault = kNoFault;
  if (t != kThreads - 1) return;
  const hgg_i64 given =
      a.group_offset ? read_integer(a.group_offset, a.group_offset_type) : a.group_offset_value;
  const hgg_i64 most = a.group_total - a.group_count;
  shared.offset = maximum((hgg_i64)0, minimum(given, most));
  shared.bad_offset = given != shared.offset;
  if (shared.bad_offset && block_index() == 0 && a.fault)
    keep_fault(a, HGG_FAULT_GROUP_OFFSET, 0, 0, given, most);
}

// wanted and left of the fault, while its window is at hand.
HGG_FUNCTION void describe_fault(const hgg_arguments& a, ScanShared& shared, const Window& window) {
  const hgg_u32 flat = shared.fault;
  const hgg_i64 before = (hgg_i64)before_group(shared, window, flat, is_head(a, flat));
  const hgg_i64 raw = read_integer(size_address(a, flat), a.sizes_type);
  shared.left = a.ragged_extent - before;
  if (a.sizes_kind == HGG_SIZES_OFFSETS) {
    shared.kind = HGG_FAULT_OFFSETS;
    shared.wanted = raw < kLeast + before ? kLeast : raw - before;
  } else {
    shared.kind = raw < 0 ? HGG_FAULT_NEGATIVE : HGG_FAULT_PAST_END;
    shared.wanted = raw;
  }
}

// A block's share of a flat list of `count` entries: eight at a time, so that the records of different blocks
// do not share a 32-byte sector.
struct Share {
  hgg_u32 first;
  hgg_u32 end;
};

HGG_FUNCTION Share share_of(hgg_u32 count) {
  const hgg_u32 each = ceiling(ceiling(count, grid_size()), 8u) * 8;
  const hgg_u32 first = minimum(block_index() * each, count);
  return Share{first, minimum(first + each, count)};
}

// The flat index at which a block has to start scanning for its share: where its first group's batch starts.
HGG_FUNCTION hgg_u32 scan_start(const hgg_arguments& a, hgg_u32 flat) {
  return batch_of(a, flat) * (hgg_u32)a.group_total;
}

HGG_FUNCTION void report_fault(const hgg_arguments& a, const ScanShared& shared) {
  const hgg_u32 batch = batch_of(a, shared.fault);
  keep_fault(a, shared.kind, batch, group_of(a, shared.fault, batch), shared.wanted, shared.left);
}

// Walks [from, to) of the flat list; `from` starts a batch. consumer.prepare(t) is called once at the start,
// and consumer.window(window, mine) runs phases of its own after each window. Then the fault, if there is
// one, is written down, once over all blocks: by the block that has it in its share, if no batch before
// `from` has one. That is looked up only now, in a second walk, since faults are rare.
template <class Consumer>
HGG_FUNCTION void scan(const hgg_arguments& a, ScanShared& shared, hgg_u32 from, hgg_u32 to,
                       const Share& share, Consumer& consumer) {
  const bool offsets = a.sizes_kind == HGG_SIZES_OFFSETS;
  Window window{from, 0, 0};
  HGG_PRIVATE(Mine, mine);
  bool opening = true, checking = false;
  HGG_ROLLED
  for (;;) {
    window.count = (int)minimum(to - window.first, (hgg_u32)kWindow);
    HGG_STEP(t) {
      Mine& own = HGG_OWN(mine, t);
      read_items(a, window, own, t);
      if (opening) {  // while the loads are under way
        open_scan(a, shared, t);
        consumer.prepare(t);
      }
      if (offsets) limit_items<true>(a, window, own, t);
      else limit_items<false>(a, window, own, t);
    }
    opening = false;
    if (offsets) scan_warp<true>(mine);
    else scan_warp<false>(mine);
    HGG_PHASE(t) { publish_total(shared.total, HGG_OWN(mine, t), t); }
    HGG_PHASE(t) {
      if (offsets) walk_items<true>(a, shared, window, HGG_OWN(mine, t), t);
      else walk_items<false>(a, shared, window, HGG_OWN(mine, t), t);
    }
    const hgg_u32 fault = shared.fault;
    if (window.holds(fault)) {
      if (checking) return;
      HGG_PHASE(t) {
        if (t == 0) describe_fault(a, shared, window);
      }
    }
    if (!checking) consumer.window(window, mine);
    window.first += window.count;
    window.parity ^= 1;
    if (window.first < to) continue;
    if (checking) break;
    if (!a.fault || fault < share.first || fault >= share.end || shared.bad_offset) return;
    if (from == 0) break;
    checking = true;
    window = Window{0, 0, 0};
    to = from;
  }
  HGG_PHASE(t) {
    if (t == 0) report_fault(a, shared);
  }
}

}  // namespace hgg

#endif
