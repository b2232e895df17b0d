// Views of weights where they lie (mapped files). A view owns nothing; the Checkpoint that made it must
// outlive it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libs/model/model_spec.h"

namespace conclave {

// A row-major matrix [rows = outputs, cols = inputs]: y = W x. FP8 weights carry one F32 multiplier per block
// of 128 x 128: W[o][i] = e4m3[o][i] * scales[(o/128) * scale_cols + i/128].
struct WeightView {
  const void* data = nullptr;
  WeightDtype dtype = WeightDtype::kBf16;
  uint32_t rows = 0;
  uint32_t cols = 0;
  const float* scales = nullptr;  // kFp8E4m3 only
  uint32_t scale_cols = 0;

  size_t bytes() const {
    const size_t n = static_cast<size_t>(rows) * cols;
    return dtype == WeightDtype::kF32 ? n * 4 : dtype == WeightDtype::kBf16 ? n * 2 : n;
  }
};

// A vector (norm weights, selection bias), widened to F32 at load: small, and read every step.
using VectorF32 = std::vector<float>;

struct ExpertWeights {
  WeightView w1;  // gate  [intermediate, hidden]
  WeightView w3;  // up    [intermediate, hidden]
  WeightView w2;  // down  [hidden, intermediate]
};

// Everything of a layer but its experts: what an attention worker holds.
struct DenseLayerWeights {
  VectorF32 input_norm;           // [hidden]
  VectorF32 post_attention_norm;  // [hidden]
  WeightView q_proj, k_proj, v_proj, o_proj;
  VectorF32 q_norm;     // [q_size], empty when !use_qk_norm
  VectorF32 k_norm;     // [kv_size]
  WeightView gate;      // [experts, hidden]; F32 or BF16 in the file
  VectorF32 gate_bias;  // [experts], empty when !use_routing_bias
};

struct DenseWeights {
  WeightView embed;  // [vocab, hidden]
  std::vector<DenseLayerWeights> layers;
  VectorF32 final_norm;
  WeightView lm_head;  // [vocab, hidden]; equals embed when tied
};

// experts[layer][expert]
using ExpertTable = std::vector<std::vector<ExpertWeights>>;

}  // namespace conclave
