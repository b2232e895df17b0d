// AVX-512 (F, BW, DQ, VL) with the BF16 dot product.
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

// The fastest of a few rounds of the same multiplications by the dot product or by two fused multiply-adds.
template <bool kDot>
uint64_t time_steps() {
  __m512 acc[8];
  for (auto& v : acc) v = _mm512_setzero_ps();
  const __m512 one = _mm512_set1_ps(1.0f);
  uint64_t best = ~uint64_t{0};
  for (int round = 0; round < 7; ++round) {
    const uint64_t start = __builtin_ia32_rdtsc();
    for (int i = 0; i < 400; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        if constexpr (kDot) {
          acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)one, (__m512bh)one);
        } else {
          acc[j] = _mm512_fmadd_ps(one, one, acc[j]);
          acc[j] = _mm512_fmadd_ps(one, one, acc[j]);
        }
        asm volatile("" : "+v"(acc[j]));
      }
    }
    const uint64_t took = __builtin_ia32_rdtsc() - start;
    best = took < best ? took : best;
  }
  return best;
}
}  // namespace

bool avx512bf16_dot_is_faster() { return time_steps<true>() < time_steps<false>(); }

const Table& avx512bf16_table() {
  static constexpr Table kTable = {
      matmul_512,  prepared_floats_512, prepare_x_512, rms_norm_op, round_bf16_op,  widen_bf16_op,
      silu_mul_op, sigmoid_op,          rotate_op,     combine_op,  max_of_op,      exp_sum_op,
      exp_of_op,   exp_bins_op,         collect_op,    attend_op,   attend_merge_op};
  return kTable;
}

}  // namespace conclave::kernels
