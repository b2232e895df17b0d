// What a checkpoint's config.json says of the model, in plain types. Nothing is hard-coded to one size.
// Parsing lives in libs/checkpoint/model_config.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/ids.h"

namespace conclave {

enum class WeightDtype : uint8_t { kF32, kBf16, kFp8E4m3 };

// What mixes tokens in a layer. Only kFullAttention exists until the M1 issue; kLightning is refused at load.
enum class LayerKind : uint8_t { kFullAttention, kLightning };

struct ModelSpec {
  std::string model_type;  // "minimax_m2"
  std::string name;        // the checkpoint directory's name, what /v1/models shows unless configured
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;  // of one expert
  uint32_t num_layers = 0;
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;    // independent of hidden_size / num_heads
  uint32_t rotary_dim = 0;  // the first rotary_dim dimensions of a head are rotated; even, <= head_dim
  uint32_t num_experts = 0;
  uint32_t experts_per_token = 0;
  uint32_t vocab_size = 0;
  uint32_t max_positions = 0;
  float rms_norm_eps = 1e-6f;
  double rope_theta = 5e6;
  bool use_qk_norm = true;       // RMSNorm over the whole q (k) projection, before the split into heads
  bool use_routing_bias = true;  // chooses experts, never weighs them
  bool tie_word_embeddings = false;
  std::vector<LayerKind> layer_kinds;    // num_layers entries
  std::optional<uint32_t> weight_block;  // 128 when quantization_config says FP8 blocks
  std::vector<TokenId>
      stop_token_ids;  // generation_config.json, then tokenizer_config.json, then config.json
  std::optional<TokenId> bos_token_id;
  std::vector<std::string> notes;  // one line each: fields ignored on purpose (MTP) and why

  // Sampling defaults of generation_config.json; what is absent there is absent here.
  std::optional<float> default_temperature;
  std::optional<float> default_top_p;
  std::optional<uint32_t> default_top_k;
  std::optional<float> default_min_p;
  std::optional<float> default_repetition_penalty;

  uint32_t q_size() const { return num_heads * head_dim; }
  uint32_t kv_size() const { return num_kv_heads * head_dim; }
};

}  // namespace conclave
