// AVX-512 (F, BW, DQ, VL) without the BF16 dot product.
#include "libs/kernels/cpu/lanes.h"
#include "libs/kernels/cpu/table.h"

namespace conclave::kernels {
namespace {
#include "libs/kernels/cpu/attention_ops.inc"
#include "libs/kernels/cpu/vector_ops.inc"
// In this order: each uses the one before.
#include "libs/kernels/cpu/decode_512.inc"
//
#include "libs/kernels/cpu/matmul_panel.inc"
//
#include "libs/kernels/cpu/matmul_direct.inc"
}  // namespace

const Table& avx512_table() {
  static constexpr Table kTable = {
      matmul_512,  prepared_floats_512, prepare_x_512, rms_norm_op, round_bf16_op,  widen_bf16_op,
      silu_mul_op, sigmoid_op,          rotate_op,     combine_op,  max_of_op,      exp_sum_op,
      exp_of_op,   exp_bins_op,         collect_op,    attend_op,   attend_merge_op};
  return kTable;
}

}  // namespace conclave::kernels
