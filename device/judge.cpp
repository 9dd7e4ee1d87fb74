// Entry points of tuning's kernels, a module of their own: who only runs grouped GEMMs never compiles them.
// Built as kernels.cpp is. Arguments and launch shapes: judge_arguments.h.
#include "judge.h"

#include "memory.h"

#if !defined(HGG_HOST)

HGG_KERNEL hgg_judge(HGG_BY_VALUE hgg_judge_arguments arguments) {
  HGG_SHARED hgg::JudgeShared shared;
  hgg::judge_block(arguments, shared);
}

HGG_KERNEL hgg_inspect(HGG_BY_VALUE hgg_judge_arguments arguments) {
  HGG_SHARED hgg::InspectShared shared;
  hgg::inspect_block(arguments, shared);
}

HGG_KERNEL hgg_scatter(HGG_BY_VALUE hgg_memory_arguments arguments) {
  HGG_SHARED hgg::MemoryShared shared;
  hgg::scatter_block(arguments, shared);
}

HGG_KERNEL hgg_same(HGG_BY_VALUE hgg_memory_arguments arguments) {
  HGG_SHARED hgg::MemoryShared shared;
  hgg::same_block(arguments, shared);
}

HGG_KERNEL hgg_gaps(HGG_BY_VALUE hgg_memory_arguments arguments) {
  HGG_SHARED hgg::MemoryShared shared;
  hgg::gaps_block(arguments, shared);
}

HGG_KERNEL hgg_touch(HGG_BY_VALUE hgg_memory_arguments arguments) {
  HGG_SHARED hgg::MemoryShared shared;
  hgg::touch_block(arguments, shared);
}

HGG_KERNEL hgg_digest(HGG_BY_VALUE hgg_memory_arguments arguments) {
  HGG_SHARED hgg::MemoryShared shared;
  hgg::digest_block(arguments, shared);
}

#else

namespace {

template <class Shared, class Arguments, class Block>
int run_judge_blocks(const void* arguments, hgg_u32 grid, int order, const Block& block) {
  Arguments own;
  std::memcpy(&own, arguments, sizeof(own));
  hgg::run_blocks<Shared>(own, grid, order, block);
  return 0;
}

}  // namespace

// The host build's launch, as hgg_host_launch of kernels.cpp.
extern "C" int hgg_host_judge(const char* kernel, const void* arguments, unsigned grid, unsigned threads,
                              int order) {
  if (grid == 0 || threads != HGG_THREADS || order < 0) return 2;
  const auto judge = [](const auto& a, auto& shared) { hgg::judge_block(a, shared); };
  const auto inspect = [](const auto& a, auto& shared) { hgg::inspect_block(a, shared); };
  const auto scatter = [](const auto& a, auto& shared) { hgg::scatter_block(a, shared); };
  const auto same = [](const auto& a, auto& shared) { hgg::same_block(a, shared); };
  const auto gaps = [](const auto& a, auto& shared) { hgg::gaps_block(a, shared); };
  const auto touch = [](const auto& a, auto& shared) { hgg::touch_block(a, shared); };
  const auto digest = [](const auto& a, auto& shared) { hgg::digest_block(a, shared); };
  using Memory = hgg_memory_arguments;
  if (std::strcmp(kernel, "hgg_judge") == 0)
    return run_judge_blocks<hgg::JudgeShared, hgg_judge_arguments>(arguments, grid, order, judge);
  if (std::strcmp(kernel, "hgg_inspect") == 0)
    return run_judge_blocks<hgg::InspectShared, hgg_judge_arguments>(arguments, grid, order, inspect);
  if (std::strcmp(kernel, "hgg_scatter") == 0)
    return run_judge_blocks<hgg::MemoryShared, Memory>(arguments, grid, order, scatter);
  if (std::strcmp(kernel, "hgg_same") == 0)
    return run_judge_blocks<hgg::MemoryShared, Memory>(arguments, grid, order, same);
  if (std::strcmp(kernel, "hgg_gaps") == 0)
    return run_judge_blocks<hgg::MemoryShared, Memory>(arguments, grid, order, gaps);
  if (std::strcmp(kernel, "hgg_touch") == 0)
    return run_judge_blocks<hgg::MemoryShared, Memory>(arguments, grid, order, touch);
  if (std::strcmp(kernel, "hgg_digest") == 0)
    return run_judge_blocks<hgg::MemoryShared, Memory>(arguments, grid, order, digest);
  return 1;
}

#endif
