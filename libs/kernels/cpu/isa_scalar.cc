// The contract itself, in baseline instructions.
#include "libs/kernels/cpu/lanes.h"
#include "libs/kernels/cpu/table.h"

namespace conclave::kernels {
namespace {
#include "libs/kernels/cpu/attention_ops.inc"
#include "libs/kernels/cpu/matmul_plain.inc"
#include "libs/kernels/cpu/vector_ops.inc"
}  // namespace

const Table& scalar_table() {
  static constexpr Table kTable = {
      matmul_plain, prepared_floats_none, prepare_x_none, rms_norm_op, round_bf16_op,  widen_bf16_op,
      silu_mul_op,  sigmoid_op,           rotate_op,      combine_op,  max_of_op,      exp_sum_op,
      exp_of_op,    exp_bins_op,          collect_op,     attend_op,   attend_merge_op};
  return kTable;
}

}  // namespace conclave::kernels
