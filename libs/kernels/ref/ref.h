// The operations again, as plain loops in double: what the kernels are held against. Independent of them on
// purpose, slow, and without a contract of their own. Shapes as in libs/kernels/ops.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libs/model/numerics.h"
#include "libs/model/request.h"
#include "libs/model/weights.h"

namespace conclave::kernels::ref {

using Vector = std::vector<double>;

// The weight matrix, dequantised: rows * cols.
Vector dequantize(const WeightView& w);
// y = x W^T for m rows of x.
Vector matmul(const WeightView& w, const Vector& x, uint32_t m);
// Sum of |x_k W_ok|: what a tolerance is relative to.
Vector matmul_magnitude(const WeightView& w, const Vector& x, uint32_t m);
Vector rms_norm(const Vector& x, const std::vector<float>& w, double eps, uint32_t m);
// One row of heads * head_dim at one position; frequencies and angle in binary32 as the model defines them.
Vector rope(const Vector& x, uint32_t heads, uint32_t head_dim, uint32_t rotary_dim, double theta,
            uint32_t position);
double silu(double x);
// keys, values: [positions][kv_heads * dim]; q: one row at `position`, which sees keys 0 .. position.
Vector attention(const Vector& q, const Vector& keys, const Vector& values, uint32_t heads, uint32_t kv_heads,
                 uint32_t dim, uint32_t position);
struct Routing {
  std::vector<uint32_t> ids;
  Vector weights;
  double margin = 0;  // smallest gap between neighbouring choices down to the first one not taken
};
Routing route(const std::vector<float>& logits, const std::vector<float>& bias, uint32_t top_k);
// One row through one expert, no rounding anywhere.
Vector expert(const ExpertWeights& w, const Vector& x);
// The logits after forbidden tokens, logit_bias and penalties; beyond vocab_limit -infinity.
Vector adjusted(std::span<const float> logits, const SamplingParams& params, std::span<const TokenId> prompt,
                std::span<const TokenId> output, std::span<const TokenId> forbidden);
// The probabilities left after temperature, top_k, top_p, min_p, renormalised; 0 for what is cut.
Vector distribution(std::span<const float> logits, const SamplingParams& params);
Vector distribution(const Vector& logits, const SamplingParams& params);

}  // namespace conclave::kernels::ref
