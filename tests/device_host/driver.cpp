// Test driver over the kernels' host build: many launches in one call, and the structs' layout as the
// compiler sees it.
#include "kernels.cpp"

extern "C" {

// Runs `count` launches in order. Returns the number of the first that was refused, or count.
int hgg_test_run(const void* arguments, const int* kernels, const unsigned* grids, const int* orders,
                 int count) {
  static const char* const names[] = {"hgg_fill", "hgg_scan", "hgg_zero_uncovered"};
  for (int i = 0; i < count; ++i) {
    const void* own = static_cast<const char*>(arguments) + i * sizeof(hgg_arguments);
    if (hgg_host_launch(names[kernels[i]], own, grids[i], HGG_THREADS, orders[i]) != 0) return i;
  }
  return count;
}

struct hgg_test_field {
  const char* type;
  const char* name;
  int offset;
  int size;
};

#define FIELD(type, name) \
  {#type, #name, (int)__builtin_offsetof(type, name), (int)sizeof(((type*)nullptr)->name)}
extern const hgg_test_field hgg_test_layout[] = {
    FIELD(hgg_user_arguments, m),
    FIELD(hgg_user_arguments, n),
    FIELD(hgg_user_arguments, batch),
    FIELD(hgg_user_arguments, k),
    FIELD(hgg_user_arguments, d),
    FIELD(hgg_user_arguments, c),
    FIELD(hgg_user_arguments, a),
    FIELD(hgg_user_arguments, b),
    FIELD(hgg_user_arguments, stride_d1),
    FIELD(hgg_user_arguments, stride_d2),
    FIELD(hgg_user_arguments, stride_c1),
    FIELD(hgg_user_arguments, stride_c2),
    FIELD(hgg_user_arguments, stride_a1),
    FIELD(hgg_user_arguments, stride_a2),
    FIELD(hgg_user_arguments, stride_b1),
    FIELD(hgg_user_arguments, stride_b2),
    FIELD(hgg_user_arguments, alpha),
    FIELD(hgg_user_arguments, beta),
    FIELD(hgg_user_arguments, scale_a),
    FIELD(hgg_user_arguments, scale_b),
    FIELD(hgg_user_arguments, scale_c),
    FIELD(hgg_user_arguments, scale_d),
    FIELD(hgg_user_arguments, scale_alpha_vec),
    FIELD(hgg_user_arguments, bias),
    FIELD(hgg_user_arguments, bias_type),
    FIELD(hgg_user_arguments, reserved),
    FIELD(hgg_user_arguments, e),
    FIELD(hgg_user_arguments, stride_e1),
    FIELD(hgg_user_arguments, stride_e2),
    FIELD(hgg_user_arguments, act0),
    FIELD(hgg_user_arguments, act1),
    FIELD(hgg_user_arguments, activation_type),
    FIELD(hgg_operand, base),
    FIELD(hgg_operand, row_stride),
    FIELD(hgg_operand, group_stride),
    FIELD(hgg_operand, batch_stride),
    FIELD(hgg_matrix, base),
    FIELD(hgg_matrix, row_stride),
    FIELD(hgg_matrix, column_stride),
    FIELD(hgg_matrix, group_stride),
    FIELD(hgg_matrix, batch_stride),
    FIELD(hgg_fault, kind),
    FIELD(hgg_fault, batch),
    FIELD(hgg_fault, group),
    FIELD(hgg_fault, wanted),
    FIELD(hgg_fault, left),
    FIELD(hgg_tile, problem),
    FIELD(hgg_tile, rows),
    FIELD(hgg_tile, first_row),
    FIELD(hgg_arguments, sizes),
    FIELD(hgg_arguments, sizes_stride),
    FIELD(hgg_arguments, sizes_batch_stride),
    FIELD(hgg_arguments, group_offset),
    FIELD(hgg_arguments, group_offset_value),
    FIELD(hgg_arguments, ragged_extent),
    FIELD(hgg_arguments, starts),
    FIELD(hgg_arguments, ends),
    FIELD(hgg_arguments, covered_range),
    FIELD(hgg_arguments, fault),
    FIELD(hgg_arguments, sizes_kind),
    FIELD(hgg_arguments, sizes_type),
    FIELD(hgg_arguments, group_offset_type),
    FIELD(hgg_arguments, batch_count),
    FIELD(hgg_arguments, group_count),
    FIELD(hgg_arguments, group_total),
    FIELD(hgg_arguments, mode),
    FIELD(hgg_arguments, flags),
    FIELD(hgg_arguments, records),
    FIELD(hgg_arguments, record_count),
    FIELD(hgg_arguments, block_rows),
    FIELD(hgg_arguments, tiles),
    FIELD(hgg_arguments, tile_count),
    FIELD(hgg_arguments, tile_capacity),
    FIELD(hgg_arguments, alpha),
    FIELD(hgg_arguments, beta),
    FIELD(hgg_arguments, d),
    FIELD(hgg_arguments, c),
    FIELD(hgg_arguments, a),
    FIELD(hgg_arguments, b),
    FIELD(hgg_arguments, bias),
    FIELD(hgg_arguments, out),
    FIELD(hgg_arguments, c_matrix),
    FIELD(hgg_arguments, out_rows),
    FIELD(hgg_arguments, out_columns),
    FIELD(hgg_arguments, out_batch_count),
    FIELD(hgg_arguments, out_type),
    FIELD(hgg_arguments, c_type),
    FIELD(hgg_arguments, record),
};
extern const int hgg_test_layout_count = (int)(sizeof(hgg_test_layout) / sizeof(hgg_test_layout[0]));

extern const int hgg_test_threads = HGG_THREADS;

}  // extern "C"
