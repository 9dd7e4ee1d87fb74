// hgg_scan: starts, ends, covered_range and fault without records, and the tile table of a persistent kernel.
#ifndef HGG_TILES_H
#define HGG_TILES_H

#include "records.h"

namespace hgg {

struct TileShared {
  ScanShared scan;
  hgg_u64 total[kWarps];                    // tiles of each warp
  hgg_u32 tile_end[kWindow + kWindow / 8];  // inclusive prefix of tiles in the window, read through slot()
};

// Every block walks all groups, since where a group's tiles go depends on all groups before it, and then
// writes its share of each window's tiles. The shares are by tile, so one group with all the rows is spread
// over all blocks.
struct TileWriter {
  const hgg_arguments* a;
  TileShared* shared;
  Share share;   // of the flat list: whose rows this block writes
  hgg_u32 base;  // tiles before this window

  HGG_MEMBER bool is_computed(hgg_u32 group) const {
    const hgg_i64 local = (hgg_i64)group - shared->scan.offset;
    return local >= 0 && local < a->group_count;
  }

  HGG_MEMBER Rows rows(const Window& window, int i) const {
    return rows_of(*a, shared->scan, window, window.first + i, is_head(*a, window.first + i));
  }

  HGG_MEMBER hgg_u32 tiles_of(const Window& window, int i) const {
    const hgg_u32 flat = window.first + i;
    if (!is_computed(group_of(*a, flat, batch_of(*a, flat)))) return 0;
    const Rows r = rows(window, i);
    return (hgg_u32)ceiling(r.end - r.start, (hgg_i64)a->block_rows);
  }

  HGG_MEMBER void sum_tiles(const Window& window, Mine& own, int t) const {
    const int items = items_of(window), first = t * items;
    own.sum = 0;
    HGG_UNROLL
    for (int k = 0; k < kItems; ++k) {
      if (k >= items || first + k >= window.count) break;
      own.item[k] = tiles_of(window, first + k);
      own.sum += own.item[k];
    }
  }

  HGG_MEMBER void walk_tiles(const Window& window, const Mine& own, int t) const {
    const int items = items_of(window), first = t * items;
    hgg_u64 prefix = prefix_before<false>(shared->total, own, t);
    HGG_UNROLL
    for (int k = 0; k < kItems; ++k) {
      if (k >= items || first + k >= window.count) break;
      prefix += own.item[k];
      shared->tile_end[slot(first + k)] = (hgg_u32)prefix;
    }
  }

  HGG_MEMBER void write_share(const Window& window, int t) const {
    const hgg_u32 end = minimum(window.first + (hgg_u32)window.count, share.end);
    for (hgg_u32 flat = maximum(window.first, share.first) + t; flat < end; flat += kThreads) {
      const hgg_u32 batch = batch_of(*a, flat);
      const hgg_u32 group = group_of(*a, flat, batch);
      if (is_computed(group))
        write_rows(*a, batch, (hgg_u32)(group - shared->scan.offset),
                   rows(window, (int)(flat - window.first)));
    }
  }

  HGG_MEMBER void write_tile(const Window& window, hgg_u32 tile) const {
    int low = 0, high = window.count - 1;  // the first group whose tiles end behind this one
    while (low < high) {
      const int middle = (low + high) / 2;
      if (shared->tile_end[slot(middle)] > tile) high = middle;
      else low = middle + 1;
    }
    const hgg_u32 flat = window.first + low;
    const hgg_u32 batch = batch_of(*a, flat);
    const hgg_i64 local = (hgg_i64)group_of(*a, flat, batch) - shared->scan.offset;
    const hgg_u32 nth = tile - (low ? shared->tile_end[slot(low - 1)] : 0);
    const Rows r = rows(window, low);
    const hgg_i64 first = r.start + (hgg_i64)nth * a->block_rows;
    union {
      hgg_tile tile;
      hgg_vector vector;
    } entry;
    entry.tile = hgg_tile{(hgg_i32)(batch * (hgg_u32)a->group_count + (hgg_u32)local),
                          (hgg_i32)minimum((hgg_i64)a->block_rows, r.end - first), first};
    const hgg_u64 at = (hgg_u64)base + tile;
    if ((hgg_i64)at < a->tile_capacity) write<hgg_vector>(a->tiles + sizeof(hgg_tile) * at, entry.vector);
  }

  HGG_MEMBER void prepare(int) const {}

  HGG_MEMBER void window(const Window& window, HGG_PRIVATE(Mine, (&mine))) {
    if (!a->tiles) {
      HGG_PHASE(t) { write_share(window, t); }
      return;
    }
    HGG_STEP(t) {
      write_share(window, t);
      sum_tiles(window, HGG_OWN(mine, t), t);
    }
    scan_warp<false>(mine);
    HGG_PHASE(t) { publish_total(shared->total, HGG_OWN(mine, t), t); }
    HGG_PHASE(t) { walk_tiles(window, HGG_OWN(mine, t), t); }
    const hgg_u32 tiles = window.count ? shared->tile_end[slot(window.count - 1)] : 0;
    HGG_PHASE(t) {
      for (hgg_u32 tile = block_index() * kThreads + t; tile < tiles; tile += grid_size() * kThreads)
        write_tile(window, tile);
    }
    base += tiles;
  }
};

HGG_FUNCTION void scan_block(const hgg_arguments& a, TileShared& shared) {
  const hgg_u32 groups = group_places(a);
  const Share share = share_of(groups);
  if (!a.tiles && share.first == share.end && block_index() != 0) return;
  TileWriter writer{&a, &shared, share, 0};
  const hgg_u32 from = a.tiles ? 0 : share.first < groups ? scan_start(a, share.first) : groups;
  scan(a, shared.scan, from, a.tiles ? groups : share.end, share, writer);
  HGG_PHASE(t) {
    if (t == 0 && block_index() == 0 && a.tile_count) write<hgg_i32>(a.tile_count, (hgg_i32)writer.base);
  }
}

}  // namespace hgg

#endif
