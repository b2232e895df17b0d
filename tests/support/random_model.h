// A small model with random weights in memory, of any geometry and weight format, for tests that need no
// file.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "libs/base/float_bits.h"
#include "libs/base/random.h"
#include "libs/model/model_spec.h"
#include "libs/model/weights.h"

namespace conclave::testing {

struct Geometry {
  uint32_t hidden = 128;
  uint32_t intermediate = 128;
  uint32_t layers = 3;
  uint32_t heads = 4;
  uint32_t kv_heads = 2;
  uint32_t head_dim = 32;
  uint32_t rotary_dim = 16;
  uint32_t experts = 10;
  uint32_t top_k = 3;
  uint32_t vocab = 160;
  uint32_t max_positions = 65536;
};

class RandomModel {
 public:
  // `dtype` is that of the projections and experts; embedding, lm_head and norms are BF16 (F32 where dtype is
  // F32), the gate F32, as in the published checkpoints.
  RandomModel(WeightDtype dtype, uint64_t seed, const Geometry& g = {}) : random_(seed) {
    spec.model_type = "minimax_m2";
    spec.name = "random";
    spec.hidden_size = g.hidden;
    spec.intermediate_size = g.intermediate;
    spec.num_layers = g.layers;
    spec.num_heads = g.heads;
    spec.num_kv_heads = g.kv_heads;
    spec.head_dim = g.head_dim;
    spec.rotary_dim = g.rotary_dim;
    spec.num_experts = g.experts;
    spec.experts_per_token = g.top_k;
    spec.vocab_size = g.vocab;
    spec.max_positions = g.max_positions;
    spec.layer_kinds.assign(g.layers, LayerKind::kFullAttention);
    const WeightDtype plain = dtype == WeightDtype::kF32 ? WeightDtype::kF32 : WeightDtype::kBf16;
    dense.embed = matrix(plain, g.vocab, g.hidden, 1.0);
    dense.lm_head = matrix(plain, g.vocab, g.hidden, 1.5);
    dense.final_norm = vector(g.hidden, 1.0, 0.1);
    for (uint32_t l = 0; l < g.layers; ++l) {
      DenseLayerWeights w;
      w.input_norm = vector(g.hidden, 1.0, 0.1);
      w.post_attention_norm = vector(g.hidden, 1.0, 0.1);
      w.q_proj = matrix(dtype, spec.q_size(), g.hidden, 1.0);
      w.k_proj = matrix(dtype, spec.kv_size(), g.hidden, 1.0);
      w.v_proj = matrix(dtype, spec.kv_size(), g.hidden, 1.0);
      w.o_proj = matrix(dtype, g.hidden, spec.q_size(), 1.0);
      w.q_norm = vector(spec.q_size(), 1.0, 0.2);
      w.k_norm = vector(spec.kv_size(), 1.0, 0.2);
      w.gate = matrix(WeightDtype::kF32, g.experts, g.hidden, 1.0);
      w.gate_bias = vector(g.experts, 0.0, 0.3);
      dense.layers.push_back(std::move(w));
      auto& row = experts.emplace_back();
      for (uint32_t e = 0; e < g.experts; ++e) {
        row.push_back({matrix(dtype, g.intermediate, g.hidden, 1.0),
                       matrix(dtype, g.intermediate, g.hidden, 1.0),
                       matrix(dtype, g.hidden, g.intermediate, 2.0)});
      }
    }
  }

  ModelSpec spec;
  DenseWeights dense;
  ExpertTable experts;

 private:
  float normal() {  // near enough: the sum of uniforms
    double sum = 0;
    for (int i = 0; i < 6; ++i) sum += random_.uniform();
    return static_cast<float>((sum - 3.0) * std::sqrt(2.0));
  }
  VectorF32 vector(uint32_t n, float mean, float spread) {
    VectorF32 v(n);
    for (float& x : v) x = mean + spread * normal();
    return v;
  }
  // Rows give outputs of about `gain` for inputs of size 1.
  WeightView matrix(WeightDtype dtype, uint32_t rows, uint32_t cols, double gain) {
    const float scale = static_cast<float>(gain / std::sqrt(static_cast<double>(cols)));
    const size_t count = static_cast<size_t>(rows) * cols;
    WeightView view;
    view.dtype = dtype;
    view.rows = rows;
    view.cols = cols;
    // Exactly sized, so that a sanitizer sees an overrun at once.
    auto bytes = std::make_unique<std::vector<std::byte>>(view.bytes());
    for (size_t i = 0; i < count; ++i) {
      const float x = scale * normal();
      if (dtype == WeightDtype::kF32) {
        std::memcpy(bytes->data() + i * 4, &x, 4);
      } else if (dtype == WeightDtype::kBf16) {
        const Bf16 b = float_to_bf16(x);
        std::memcpy(bytes->data() + i * 2, &b, 2);
      } else {
        const uint8_t b = float_to_e4m3(x / (scale * 0x1.0p-4f));
        std::memcpy(bytes->data() + i, &b, 1);
      }
    }
    view.data = bytes->data();
    storage_.push_back(std::move(bytes));
    if (dtype == WeightDtype::kFp8E4m3) {
      view.scale_cols = (cols + 127) / 128;
      auto scales =
          std::make_unique<std::vector<float>>(static_cast<size_t>((rows + 127) / 128) * view.scale_cols);
      for (float& s : *scales) s = scale * 0x1.0p-4f * static_cast<float>(0.75 + 0.5 * random_.uniform());
      view.scales = scales->data();
      scales_.push_back(std::move(scales));
    }
    return view;
  }

  SplitMix64 random_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> storage_;
  std::vector<std::unique_ptr<std::vector<float>>> scales_;
};

}  // namespace conclave::testing
