// AVX2 with FMA.
#include "libs/kernels/cpu/lanes.h"
#include "libs/kernels/cpu/table.h"

namespace conclave::kernels {
namespace {
#include "libs/kernels/cpu/attention_ops.inc"
#include "libs/kernels/cpu/matmul_panel.inc"
#include "libs/kernels/cpu/vector_ops.inc"

size_t prepared_floats_256(const MatmulArgs& a) { return a.m * prepared_row<false>(a); }
}  // namespace

const Table& avx2_table() {
  static constexpr Table kTable = {matmul_panel<false>, prepared_floats_256, prepare_rows<false>, rms_norm_op,
                                   round_bf16_op,       widen_bf16_op,       silu_mul_op,         sigmoid_op,
                                   rotate_op,           combine_op,          max_of_op,           exp_sum_op,
                                   exp_of_op,           exp_bins_op,         collect_op,          attend_op,
                                   attend_merge_op};
  return kTable;
}

}  // namespace conclave::kernels
