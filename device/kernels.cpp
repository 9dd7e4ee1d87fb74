// The kernels' entry points. Build as
//   HIP    hipRTC, or: hipcc / clang++ -x hip --cuda-device-only --offload-arch=gfx942
//   CUDA   NVRTC, or: nvcc -x cu -arch=sm_90 -cubin
//   host   g++ -std=c++17 -shared -fPIC
// each with -I device -I include. Arguments and launch shapes: arguments.h.
#include "uncovered.h"
#include "records.h"
#include "tiles.h"

#if !defined(HGG_HOST)

// One record a group, and rows, covered range and fault.
HGG_KERNEL hgg_fill(HGG_BY_VALUE hgg_arguments arguments) {
  HGG_SHARED hgg::FillShared shared;
  hgg::fill_block(arguments, shared);
}

// Rows, covered_range and fault, and the tile table where it is asked for.
HGG_KERNEL hgg_scan(HGG_BY_VALUE hgg_arguments arguments) {
  HGG_SHARED hgg::TileShared shared;
  hgg::scan_block(arguments, shared);
}

// beta * c where no group reaches; behind hgg_fill or hgg_scan on the same stream.
HGG_KERNEL hgg_zero_uncovered(HGG_BY_VALUE hgg_arguments arguments) {
  HGG_SHARED hgg::UncoveredShared shared;
  hgg::zero_uncovered_block(arguments, shared);
}

#else

// The host build's launch: runs `grid` blocks of the named kernel one after the other. `order` (0 to 5) picks
// the order in which threads and blocks are emulated; the result must not depend on it. Returns 0, 1 for a
// kernel that is not here, 2 for a launch shape that no GPU would be given.
extern "C" int hgg_host_launch(const char* kernel, const void* arguments, unsigned grid, unsigned threads,
                               int order) {
  if (grid == 0 || threads != HGG_THREADS || order < 0) return 2;
  hgg_arguments a;
  std::memcpy(&a, arguments, sizeof(a));
  if (std::strcmp(kernel, "hgg_fill") == 0) {
    hgg::run_blocks<hgg::FillShared>(a, grid, order,
                                     [](const auto& x, auto& shared) { hgg::fill_block(x, shared); });
  } else if (std::strcmp(kernel, "hgg_scan") == 0) {
    hgg::run_blocks<hgg::TileShared>(a, grid, order,
                                     [](const auto& x, auto& shared) { hgg::scan_block(x, shared); });
  } else if (std::strcmp(kernel, "hgg_zero_uncovered") == 0) {
    hgg::run_blocks<hgg::UncoveredShared>(a, grid, order,
                                     [](const auto& x, auto& shared) { hgg::zero_uncovered_block(x, shared); });
  } else {
    return 1;
  }
  return 0;
}

#endif
