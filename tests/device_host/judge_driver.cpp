// Tuning's kernels in a host build, and their structs' layout as the compiler sees it.
#include "judge.cpp"

extern "C" {

struct hgg_test_field {
  const char* type;
  const char* name;
  int offset;
  int size;
};

#define FIELD(type, name) \
  {#type, #name, (int)__builtin_offsetof(type, name), (int)sizeof(((type*)nullptr)->name)}
extern const hgg_test_field hgg_test_layout[] = {
    FIELD(hgg_findings, count),
    FIELD(hgg_findings, wrong),
    FIELD(hgg_findings, first),
    FIELD(hgg_findings, got),
    FIELD(hgg_findings, wanted),
    FIELD(hgg_findings, bound),
    FIELD(hgg_findings, square_error),
    FIELD(hgg_findings, square_norm),
    FIELD(hgg_findings, unwritten),
    FIELD(hgg_findings, nan),
    FIELD(hgg_findings, first_nan),
    FIELD(hgg_findings, worst),
    FIELD(hgg_tensor, base),
    FIELD(hgg_tensor, group_stride),
    FIELD(hgg_tensor, batch_stride),
    FIELD(hgg_tensor, row_stride),
    FIELD(hgg_tensor, column_stride),
    FIELD(hgg_tensor, type),
    FIELD(hgg_tensor, aligned),
    FIELD(hgg_judge_tile, first),
    FIELD(hgg_judge_tile, k_first),
    FIELD(hgg_judge_tile, k_end),
    FIELD(hgg_judge_tile, accumulation),
    FIELD(hgg_judge_tile, batch),
    FIELD(hgg_judge_tile, group),
    FIELD(hgg_judge_tile, count),
    FIELD(hgg_judge_tile, zero),
    FIELD(hgg_judge_arguments, lhs),
    FIELD(hgg_judge_arguments, rhs),
    FIELD(hgg_judge_arguments, out),
    FIELD(hgg_judge_arguments, c),
    FIELD(hgg_judge_arguments, bias),
    FIELD(hgg_judge_arguments, groups),
    FIELD(hgg_judge_arguments, batches),
    FIELD(hgg_judge_arguments, rows),
    FIELD(hgg_judge_arguments, columns),
    FIELD(hgg_judge_arguments, tiles),
    FIELD(hgg_judge_arguments, tile_count),
    FIELD(hgg_judge_arguments, row_list),
    FIELD(hgg_judge_arguments, column_list),
    FIELD(hgg_judge_arguments, column_count),
    FIELD(hgg_judge_arguments, covered),
    FIELD(hgg_judge_arguments, findings),
    FIELD(hgg_judge_arguments, poison),
    FIELD(hgg_judge_arguments, alpha),
    FIELD(hgg_judge_arguments, beta),
    FIELD(hgg_judge_arguments, rounding),
    FIELD(hgg_judge_arguments, smallest),
    FIELD(hgg_judge_arguments, scaled),
    FIELD(hgg_judge_arguments, flags),
    FIELD(hgg_judge_arguments, zero),
    FIELD(hgg_memory_arguments, base),
    FIELD(hgg_memory_arguments, other),
    FIELD(hgg_memory_arguments, extent),
    FIELD(hgg_memory_arguments, stride),
    FIELD(hgg_memory_arguments, count),
    FIELD(hgg_memory_arguments, first),
    FIELD(hgg_memory_arguments, skip),
    FIELD(hgg_memory_arguments, findings),
    FIELD(hgg_memory_arguments, bytes),
    FIELD(hgg_memory_arguments, poison),
};
extern const int hgg_test_layout_count = (int)(sizeof(hgg_test_layout) / sizeof(hgg_test_layout[0]));

// HGG_JUDGE_ROWS, HGG_JUDGE_COLUMNS, the elements of a chunk, and the two flags.
extern const int hgg_test_constants[] = {hgg::kJudgeRows, hgg::kJudgeColumns, hgg::kChunkElements,
                                         HGG_JUDGE_KEPT, HGG_JUDGE_ROWS_INSIDE};

}  // extern "C"
