#include <array>
#include <cmath>
#include <cstring>

#include "libs/base/check.h"
#include "libs/base/float_bits.h"
#include "libs/checkpoint/make_internal.h"
#include "libs/checkpoint/safetensors.h"

namespace conclave::make {
namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

uint64_t draw(uint64_t key, uint64_t counter) { return mix(key + (counter + 1) * 0x9e3779b97f4a7c15ull); }

// The standard deviation of kE4m3 codes: a triangular distribution on (-448, 448).
constexpr float kE4m3Std = 182.9f;

// 256 equally likely values of that distribution as E4M3 codes. Only square roots, which IEEE rounds the same
// everywhere: made checkpoints are equal on every machine.
const std::array<uint8_t, 256>& e4m3_codes() {
  static const std::array<uint8_t, 256> kCodes = [] {
    std::array<uint8_t, 256> codes{};
    for (uint32_t i = 0; i < 128; ++i) {
      const float p = (static_cast<float>(i) + 0.5f) / 256.0f;
      const float x = (std::sqrt(2.0f * p) - 1.0f) * 448.0f;
      codes[i] = float_to_e4m3(x);
      codes[255 - i] = float_to_e4m3(-x);
    }
    return codes;
  }();
  return kCodes;
}

// Near enough to a normal distribution, from four 16-bit uniforms, in exact arithmetic up to one product and
// one sum.
float normal(uint64_t bits, float mean, float std) {
  const int32_t sum =
      static_cast<int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  constexpr float kSumStd = 37837.23f;  // of the sum: 65536 / sqrt(3)
  return mean + static_cast<float>(sum - 131070) * (std / kSumStd);
}

float scale_value(uint64_t bits, float std) {
  const float u = static_cast<float>(bits >> 40) * 0x1.0p-24f;
  return std / kE4m3Std * (0.5f + u);
}

class Planner {
 public:
  Planner(const ModelSpec& spec, const MakeOptions& options)
      : spec_(spec),
        weight_dtype_(options.dtype == "fp8"    ? "F8_E4M3"
                      : options.dtype == "bf16" ? "BF16"
                                                : "F32"),
        plain_dtype_(options.dtype == "f32" ? "F32" : "BF16"),
        gate_dtype_(options.dtype == "bf16" && options.fused ? "BF16" : "F32"),
        fused_(options.fused),
        gate_bias_std_(options.gate_bias_std) {}

  std::vector<TensorPlan> plan() {
    const float hidden = static_cast<float>(spec_.hidden_size);
    dense("model.embed_tokens.weight", {spec_.vocab_size, spec_.hidden_size}, 1.0f);
    for (uint32_t l = 0; l < spec_.num_layers; ++l) layer("model.layers." + std::to_string(l) + ".");
    norm("model.norm.weight", spec_.hidden_size);
    // Logits of a standard deviation of 2: the last norm leaves elements of about 1.
    if (!spec_.tie_word_embeddings) {
      dense("lm_head.weight", {spec_.vocab_size, spec_.hidden_size}, 2.0f / std::sqrt(hidden));
    }
    return std::move(plans_);
  }

 private:
  void add(TensorPlan p) {
    p.bytes = safetensors_dtype_bytes(p.dtype);
    for (const uint64_t n : p.shape) p.bytes *= n;
    if (p.parts.empty()) p.part_bytes = p.bytes;
    plans_.push_back(std::move(p));
  }
  void dense(const std::string& name, std::vector<uint64_t> shape, float std) {
    add({.name = name, .dtype = plain_dtype_, .shape = std::move(shape), .std = std, .parts = {}});
  }
  void norm(const std::string& name, uint32_t n) {
    add({.name = name, .dtype = plain_dtype_, .shape = {n}, .mean = 1.0f, .std = 0.2f, .parts = {}});
  }
  // A projection whose outputs are about `gain` for inputs of about 1.
  void matrix(const std::string& name, uint64_t rows, uint64_t cols, float gain) {
    const float std = gain / std::sqrt(static_cast<float>(cols));
    const bool fp8 = weight_dtype_ == "F8_E4M3";
    add({.name = name,
         .dtype = weight_dtype_,
         .shape = {rows, cols},
         .fill = fp8 ? Fill::kE4m3 : Fill::kNormal,
         .std = std,
         .parts = {}});
    if (fp8) {
      add({.name = name + "_scale_inv",
           .dtype = "F32",
           .shape = {(rows + 127) / 128, (cols + 127) / 128},
           .fill = Fill::kScale,
           .std = std,
           .parts = {}});
    }
  }
  // The experts' matrices w (one or two of each expert) of [rows, cols], stacked.
  void stacked(const std::string& name, const std::string& key_prefix, const std::vector<std::string>& w,
               uint64_t rows, uint64_t cols, float gain) {
    const float std = gain / std::sqrt(static_cast<float>(cols));
    const bool fp8 = weight_dtype_ == "F8_E4M3";
    auto keys = [&](const std::string& suffix) {
      std::vector<std::string> out;
      for (uint32_t e = 0; e < spec_.num_experts; ++e) {
        for (const std::string& m : w) out.push_back(key_prefix + std::to_string(e) + "." + m + suffix);
      }
      return out;
    };
    add({.name = name,
         .dtype = weight_dtype_,
         .shape = {spec_.num_experts, rows * w.size(), cols},
         .fill = fp8 ? Fill::kE4m3 : Fill::kNormal,
         .std = std,
         .parts = keys(".weight"),
         .part_bytes = rows * cols * safetensors_dtype_bytes(weight_dtype_)});
    if (fp8) {
      const uint64_t scale_rows = (rows + 127) / 128;
      const uint64_t scale_cols = (cols + 127) / 128;
      add({.name = name + "_scale_inv",
           .dtype = "F32",
           .shape = {spec_.num_experts, scale_rows * w.size(), scale_cols},
           .fill = Fill::kScale,
           .std = std,
           .parts = keys(".weight_scale_inv"),
           .part_bytes = scale_rows * scale_cols * 4});
    }
  }

  void layer(const std::string& p) {
    const uint32_t hidden = spec_.hidden_size;
    norm(p + "input_layernorm.weight", hidden);
    matrix(p + "self_attn.q_proj.weight", spec_.q_size(), hidden, 1.0f);
    matrix(p + "self_attn.k_proj.weight", spec_.kv_size(), hidden, 1.0f);
    matrix(p + "self_attn.v_proj.weight", spec_.kv_size(), hidden, 1.0f);
    matrix(p + "self_attn.o_proj.weight", hidden, spec_.q_size(), 1.5f);
    if (spec_.use_qk_norm) {
      norm(p + "self_attn.q_norm.weight", spec_.q_size());
      norm(p + "self_attn.k_norm.weight", spec_.kv_size());
    }
    norm(p + "post_attention_layernorm.weight", hidden);
    const std::string canonical = p + "block_sparse_moe.";
    const std::string moe = fused_ ? p + "mlp." : canonical;
    auto gate = [&](const std::string& name, std::vector<uint64_t> shape, float std) {
      TensorPlan plan{.name = moe + name,
                      .dtype = gate_dtype_,
                      .shape = std::move(shape),
                      .std = std,
                      .parts = {canonical + name}};
      plan.part_bytes = safetensors_dtype_bytes(gate_dtype_);
      for (const uint64_t n : plan.shape) plan.part_bytes *= n;
      add(std::move(plan));
    };
    // Gate logits of about 1, so that scores spread and routing is not degenerate; a bias that often changes
    // the choice.
    gate("gate.weight", {spec_.num_experts, hidden}, 1.0f / std::sqrt(static_cast<float>(hidden)));
    if (spec_.use_routing_bias) gate("e_score_correction_bias", {spec_.num_experts}, gate_bias_std_);
    constexpr float kDownGain = 1.7f;  // silu(w1 x) * (w3 x) of unit inputs has a deviation of 0.6
    if (fused_) {
      stacked(moe + "experts.gate_up_proj", canonical + "experts.", {"w1", "w3"}, spec_.intermediate_size,
              hidden, 1.0f);
      stacked(moe + "experts.down_proj", canonical + "experts.", {"w2"}, hidden, spec_.intermediate_size,
              kDownGain);
      return;
    }
    for (uint32_t e = 0; e < spec_.num_experts; ++e) {
      const std::string x = moe + "experts." + std::to_string(e) + ".";
      matrix(x + "w1.weight", spec_.intermediate_size, hidden, 1.0f);
      matrix(x + "w2.weight", hidden, spec_.intermediate_size, kDownGain);
      matrix(x + "w3.weight", spec_.intermediate_size, hidden, 1.0f);
    }
  }

  const ModelSpec& spec_;
  const std::string weight_dtype_;
  const std::string plain_dtype_;
  const std::string gate_dtype_;
  const bool fused_;
  const float gate_bias_std_;
  std::vector<TensorPlan> plans_;
};

}  // namespace

std::vector<TensorPlan> plan_tensors(const ModelSpec& spec, const MakeOptions& options) {
  return Planner(spec, options).plan();
}

uint64_t tensor_key(uint64_t seed, std::string_view part_name) {
  uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a, then mixed with the seed
  for (const char c : part_name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return mix(h ^ mix(seed + 0x632be59bd9b4e019ull));
}

void fill_bytes(const TensorPlan& plan, uint64_t key, uint64_t offset, std::span<std::byte> out) {
  CONCLAVE_CHECK(offset % 8 == 0);
  std::byte* p = out.data();
  if (plan.fill == Fill::kE4m3) {
    const auto& codes = e4m3_codes();
    uint64_t counter = offset / 8;
    for (size_t i = 0; i < out.size(); i += 8) {
      const uint64_t bits = draw(key, counter++);
      uint8_t eight[8];
      for (int j = 0; j < 8; ++j) eight[j] = codes[bits >> (8 * j) & 0xff];
      std::memcpy(p + i, eight, std::min<size_t>(8, out.size() - i));
    }
    return;
  }
  if (plan.dtype == "BF16") {
    uint64_t counter = offset / 2;
    for (size_t i = 0; i + 2 <= out.size(); i += 2) {
      const Bf16 b = float_to_bf16(normal(draw(key, counter++), plan.mean, plan.std));
      std::memcpy(p + i, &b, 2);
    }
    return;
  }
  CONCLAVE_CHECK(plan.dtype == "F32");
  uint64_t counter = offset / 4;
  for (size_t i = 0; i + 4 <= out.size(); i += 4) {
    const uint64_t bits = draw(key, counter++);
    const float f =
        plan.fill == Fill::kScale ? scale_value(bits, plan.std) : normal(bits, plan.mean, plan.std);
    std::memcpy(p + i, &f, 4);
  }
}

}  // namespace conclave::make
