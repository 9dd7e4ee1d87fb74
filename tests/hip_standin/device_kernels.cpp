// The project's kernels for the stand-in: their host build, with the entry points that host_kernels.cpp looks
// for. Build with -I of the folders device/ and include/.
#include "kernels.cpp"

#include <cstddef>
#include <cstdint>

namespace {

// Another order of threads and blocks at every launch: a missing barrier then shows.
int next_order() {
    static int order = 0;
    return order++ % 6;
}

int launch(const char* kernel, const uint32_t grid[3], const uint32_t block[3], size_t shared_bytes,
           void* const* arguments) {
    if (grid[1] != 1 || grid[2] != 1 || block[1] != 1 || block[2] != 1 || shared_bytes) return 1;
    return hgg_host_launch(kernel, arguments[0], grid[0], block[0], next_order());
}

}  // namespace

#define STANDIN_KERNEL(name)                                                                            \
    extern "C" int standin_##name(const uint32_t grid[3], const uint32_t block[3], size_t shared_bytes, \
                                  void* const* arguments) {                                             \
        return launch(#name, grid, block, shared_bytes, arguments);                                     \
    }                                                                                                   \
    extern "C" const uint32_t standin_##name##_sizes[] = {1, sizeof(hgg_arguments)}

STANDIN_KERNEL(hgg_fill);
STANDIN_KERNEL(hgg_scan);
STANDIN_KERNEL(hgg_zero_uncovered);
