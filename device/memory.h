// Walks over an operand's memory: filling it with numbers, looking between its elements, comparing bits,
// reading more than the caches hold, and telling whether it has changed.
#ifndef HGG_MEMORY_H
#define HGG_MEMORY_H

#include "findings.h"

namespace hgg {

struct MemoryShared {
  hgg_findings found[HGG_THREADS];
};

HGG_FUNCTION Walk walk_of(const hgg_memory_arguments& a) {
  return Walk{(hgg_u64)(a.extent[0] * a.extent[1] * a.extent[2]), a.extent[3]};
}

// Offset of a line's first element.
HGG_FUNCTION hgg_u64 line_offset(const hgg_memory_arguments& a, hgg_u64 line) {
  const hgg_u64 before = line / (hgg_u64)a.extent[2], plane = before / (hgg_u64)a.extent[1];
  return plane * (hgg_u64)a.stride[0] + (before - plane * (hgg_u64)a.extent[1]) * (hgg_u64)a.stride[1] +
         (line - before * (hgg_u64)a.extent[2]) * (hgg_u64)a.stride[2];
}

template <class T>
HGG_FUNCTION void scatter(const hgg_memory_arguments& a) {
  const Walk walk = walk_of(a);
  const bool aligned =
      (a.base | (hgg_u64)a.stride[0] | (hgg_u64)a.stride[1] | (hgg_u64)a.stride[2] | (hgg_u64)a.stride[3]) %
          sizeof(T) ==
      0;
  for (hgg_u64 unit = block_index(); unit < walk.units(); unit += grid_size()) {
    const Chunk chunk = walk.at(unit);
    const hgg_u64 line = a.base + line_offset(a, chunk.line);
    const hgg_u64 index = chunk.line * (hgg_u64)walk.length + (hgg_u64)chunk.first + (hgg_u64)a.first;
    const hgg_u32 length = (hgg_u32)a.count, from = (hgg_u32)(index % (hgg_u64)length);
    HGG_STEP(t) {
      for (hgg_i64 i = chunk.first + t; i < chunk.end; i += HGG_THREADS) {
        const hgg_u32 place = (from + (hgg_u32)(i - chunk.first)) % length;
        store<T>(line + (hgg_u64)(i * a.stride[3]), read<T>(a.other + sizeof(T) * (hgg_u64)place), aligned);
      }
    }
  }
}

// Element number i, in the order of the walk, becomes element (first + i) modulo count of the table.
HGG_FUNCTION void scatter_block(const hgg_memory_arguments& a, MemoryShared&) {
  switch (a.bytes) {
    case 1: scatter<unsigned char>(a); break;
    case 2: scatter<unsigned short>(a); break;
    case 4: scatter<hgg_u32>(a); break;
    default: scatter<hgg_u64>(a); break;
  }
}

template <class T>
HGG_FUNCTION void count_differences(const hgg_memory_arguments& a, HGG_PRIVATE(hgg_findings, (&found))) {
  const Walk walk = walk_of(a);
  const bool aligned = (a.base | a.other | (hgg_u64)a.stride[0] | (hgg_u64)a.stride[1] |
                        (hgg_u64)a.stride[2] | (hgg_u64)a.stride[3]) %
                           sizeof(T) ==
                       0;
  for (hgg_u64 unit = block_index(); unit < walk.units(); unit += grid_size()) {
    const Chunk chunk = walk.at(unit);
    const hgg_u64 line = line_offset(a, chunk.line);
    HGG_STEP(t) {
      for (hgg_i64 i = chunk.first + t; i < chunk.end; i += HGG_THREADS) {
        const hgg_u64 at = line + (hgg_u64)(i * a.stride[3]);
        HGG_OWN(found, t).count += load<T>(a.base + at, aligned) != load<T>(a.other + at, aligned);
      }
    }
  }
}

HGG_FUNCTION void same_block(const hgg_memory_arguments& a, MemoryShared& shared) {
  HGG_PRIVATE(hgg_findings, found);
  clear(found);
  switch (a.bytes) {
    case 1: count_differences<unsigned char>(a, found); break;
    case 2: count_differences<unsigned short>(a, found); break;
    case 4: count_differences<hgg_u32>(a, found); break;
    default: count_differences<hgg_u64>(a, found); break;
  }
  report(a.findings, shared.found, found);
}

// Whether a byte, counted from the first element on, belongs to an element. Elements do not overlap: every
// stride is at least what the axes behind it span, so the index along each axis is the quotient.
HGG_FUNCTION bool in_element(const hgg_memory_arguments& a, hgg_i64 byte) {
  if (byte < 0) return false;
  HGG_UNROLL
  for (int axis = 0; axis < 4; ++axis) {
    if (a.extent[axis] == 0) return false;
    if (a.extent[axis] == 1) continue;
    const hgg_i64 index = (hgg_i64)((hgg_u64)byte / (hgg_u64)a.stride[axis]);
    byte -= minimum(index, a.extent[axis] - 1) * a.stride[axis];
  }
  return byte < a.bytes;
}

// Counts the bytes of a buffer that belong to no element and are not the poison.
HGG_FUNCTION void gaps_block(const hgg_memory_arguments& a, MemoryShared& shared) {
  HGG_PRIVATE(hgg_findings, found);
  clear(found);
  const Walk walk{1, a.count - a.skip};
  const hgg_u64 buffer = a.base - (hgg_u64)a.first;
  for (hgg_u64 unit = block_index(); unit < walk.units(); unit += grid_size()) {
    const Chunk chunk = walk.at(unit);
    HGG_STEP(t) {
      for (hgg_i64 i = chunk.first + t; i < chunk.end; i += HGG_THREADS) {
        const hgg_i64 at = i < a.first ? i : i + a.skip;
        if (read<unsigned char>(buffer + (hgg_u64)at) == a.poison || in_element(a, at - a.first)) continue;
        HGG_OWN(found, t).count += 1;
      }
    }
  }
  report(a.findings, shared.found, found);
}

// Reads `count` words of 16 bytes. Reading drives everything else out of a cache and leaves nothing in it
// that would have to be written back while the next kernel is timed. The buffer is full of zeros, so nothing
// is ever counted; the compiler does not know.
HGG_FUNCTION void touch_block(const hgg_memory_arguments& a, MemoryShared& shared) {
  HGG_PRIVATE(hgg_findings, found);
  HGG_STEP(t) {
    hgg_findings& mine = HGG_OWN(found, t);
    mine = nothing_found();
    const hgg_u64 step = (hgg_u64)grid_size() * HGG_THREADS;
    hgg_u64 sum = 0;
    for (hgg_u64 i = (hgg_u64)block_index() * HGG_THREADS + (hgg_u64)t; i < (hgg_u64)a.count; i += step) {
      union {
        hgg_vector vector;
        hgg_u64 word[2];
      } x;
      x.vector = read<hgg_vector>(a.base + 16 * i);
      sum |= x.word[0] | x.word[1];
    }
    mine.count = sum;
  }
  report(a.findings, shared.found, found);
}

HGG_FUNCTION hgg_u64 mixed(hgg_u64 x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

// A number made of `count` words of 16 bytes and of their places: the sum over all half words of a one-to-one
// function of the half word and its place, so that any change to one of them changes it.
HGG_FUNCTION void digest_block(const hgg_memory_arguments& a, MemoryShared& shared) {
  HGG_PRIVATE(hgg_findings, found);
  HGG_STEP(t) {
    hgg_findings& mine = HGG_OWN(found, t);
    mine = nothing_found();
    const hgg_u64 step = (hgg_u64)grid_size() * HGG_THREADS, odd = 0x9e3779b97f4a7c15ull;
    hgg_u64 sum = 0;
    for (hgg_u64 i = (hgg_u64)block_index() * HGG_THREADS + (hgg_u64)t; i < (hgg_u64)a.count; i += step) {
      union {
        hgg_vector vector;
        hgg_u64 word[2];
      } x;
      x.vector = read<hgg_vector>(a.base + 16 * i);
      sum += mixed(x.word[0] + (2 * i + 1) * odd) + mixed(x.word[1] + (2 * i + 2) * odd);
    }
    mine.count = sum;
  }
  report(a.findings, shared.found, found);
}

}  // namespace hgg

#endif
