#include "libs/checkpoint/binding.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "libs/base/float_bits.h"
#include "libs/checkpoint/model_config.h"

namespace conclave {
namespace {

constexpr uint32_t kBlock = 128;

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? "," : "") + std::to_string(shape[i]);
  return s + "]";
}

uint32_t blocks(uint64_t n) { return static_cast<uint32_t>((n + kBlock - 1) / kBlock); }

// 128 bits, order-dependent. Not cryptographic: it tells checkpoints apart, it does not defend against
// forgery.
class Hash {
 public:
  void add(const void* data, size_t n) {
    const auto* p = static_cast<const unsigned char*>(data);
    add_u64(n);
    for (; n >= 8; p += 8, n -= 8) {
      uint64_t w;
      std::memcpy(&w, p, 8);
      add_u64(w);
    }
    uint64_t w = 0;
    std::memcpy(&w, p, n);
    add_u64(w);
  }
  void add(std::string_view s) { add(s.data(), s.size()); }
  void add_u64(uint64_t w) {
    a_ = std::rotl((a_ ^ w) * 0x9e3779b97f4a7c15ull, 29);
    b_ = std::rotl((b_ + w) * 0xc2b2ae3d27d4eb4full, 31) ^ a_;
  }
  std::string hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string s;
    for (const uint64_t w : {mix(a_), mix(b_ ^ mix(a_))}) {
      for (int i = 60; i >= 0; i -= 4) s += kDigits[w >> i & 15];
    }
    return s;
  }

 private:
  static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
  }
  uint64_t a_ = 0x243f6a8885a308d3ull;
  uint64_t b_ = 0x13198a2e03707344ull;
};

class Binder {
 public:
  Binder(BoundModel& model, uint32_t mtp_layers, FaultList& faults)
      : model_(model),
        spec_(model.spec),
        dir_(*model.tensors),
        mtp_layers_(mtp_layers),
        faults_(faults),
        used_(dir_.tensors().size(), false) {}

  void bind() {
    DenseWeights& d = model_.dense;
    d.embed = plain_matrix("model.embed_tokens.weight", spec_.vocab_size, spec_.hidden_size);
    d.final_norm = vector("model.norm.weight", spec_.hidden_size);
    if (spec_.tie_word_embeddings) {
      d.lm_head = d.embed;
      known_unused("lm_head.weight");
    } else {
      d.lm_head = plain_matrix("lm_head.weight", spec_.vocab_size, spec_.hidden_size);
    }
    d.layers.resize(spec_.num_layers);
    model_.experts.resize(spec_.num_layers);
    for (uint32_t l = 0; l < spec_.num_layers; ++l) layer(l);
    leftovers();
  }

  std::string fingerprint() {
    // By name, not by place: the same tensors in other files are the same checkpoint.
    std::vector<const TensorInfo*> sorted;
    sorted.reserve(dir_.tensors().size());
    for (const TensorInfo& t : dir_.tensors()) sorted.push_back(&t);
    std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->name < b->name; });
    Hash h;
    h.add(spec_.model_type);
    for (const uint64_t n :
         {spec_.hidden_size, spec_.intermediate_size, spec_.num_layers, spec_.num_heads, spec_.num_kv_heads,
          spec_.head_dim, spec_.rotary_dim, spec_.num_experts, spec_.experts_per_token, spec_.vocab_size,
          spec_.max_positions, std::bit_cast<uint32_t>(spec_.rms_norm_eps)}) {
      h.add_u64(n);
    }
    h.add_u64(std::bit_cast<uint64_t>(spec_.rope_theta));
    for (const TensorInfo* t : sorted) {
      h.add(t->name);
      h.add(t->dtype);
      h.add(t->shape.data(), t->shape.size() * sizeof(uint64_t));
    }
    // Content: what was read anyway, and a little of the matrices that every training step changes. Reading
    // all of it would cost a pass over the disk at every start.
    auto values = [&](const VectorF32& v) { h.add(v.data(), v.size() * sizeof(float)); };
    auto head = [&](const WeightView& w) { h.add(w.data, std::min<size_t>(w.bytes(), 4096)); };
    const DenseWeights& d = model_.dense;
    head(d.embed);
    head(d.lm_head);
    values(d.final_norm);
    for (const DenseLayerWeights& l : d.layers) {
      values(l.input_norm);
      values(l.post_attention_norm);
      values(l.q_norm);
      values(l.k_norm);
      values(l.gate_bias);
      head(l.gate);
    }
    return h.hex();
  }

 private:
  // Marks a tensor used; null (and a fault) when there is none.
  const TensorInfo* take(const std::string& name) {
    const int64_t i = dir_.find(name);
    if (i < 0) {
      faults_.add(name, "missing");
      return nullptr;
    }
    used_[static_cast<size_t>(i)] = true;
    return &dir_.tensors()[static_cast<size_t>(i)];
  }
  bool has(const std::string& name) const { return dir_.find(name) >= 0; }

  void known_unused(const std::string& name) {
    const int64_t i = dir_.find(name);
    if (i < 0) return;
    used_[static_cast<size_t>(i)] = true;
    model_.unused.push_back(name);
  }

  bool check_shape(const TensorInfo& t, const std::vector<uint64_t>& shape) {
    if (t.shape == shape) return true;
    faults_.add(t.name, "shape " + shape_text(t.shape) + ", but config.json makes it " + shape_text(shape));
    return false;
  }

  // The tensor's bytes at an address the dtype allows: where they lie, or a copy.
  const std::byte* aligned(const TensorInfo& t, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(t.data) % alignment == 0) return t.data;
    realigned_ += t.bytes;
    if (realigned_ > kMaxRealignedBytes) {
      faults_.add(t.name,
                  "data is not aligned to " + std::to_string(alignment) + " bytes, and more than " +
                      std::to_string(kMaxRealignedBytes >> 20) +
                      " MiB of this checkpoint would have to be copied: save it again with aligned tensors");
      return nullptr;
    }
    auto copy = std::make_unique<std::byte[]>(t.bytes);
    std::memcpy(copy.get(), t.data, t.bytes);
    model_.copies.push_back(std::move(copy));
    return model_.copies.back().get();
  }

  VectorF32 vector(const std::string& name, uint32_t n) {
    const TensorInfo* t = take(name);
    if (t == nullptr || !check_shape(*t, {n})) return {};
    VectorF32 v(n);
    if (t->dtype == "F32") {
      std::memcpy(v.data(), t->data, n * sizeof(float));
    } else if (t->dtype == "BF16") {
      for (uint32_t i = 0; i < n; ++i) {
        Bf16 b;
        std::memcpy(&b, t->data + i * sizeof(Bf16), sizeof(Bf16));
        v[i] = bf16_to_float(b);
      }
    } else {
      faults_.add(name, "dtype " + t->dtype + ", expected F32 or BF16");
      return {};
    }
    for (uint32_t i = 0; i < n; ++i) {
      if (!std::isfinite(v[i])) {
        faults_.add(name, "element " + std::to_string(i) + " is not a finite number");
        break;
      }
    }
    return v;
  }

  // F32 or BF16, never quantized: embeddings, lm_head, the expert gate.
  WeightView plain_matrix(const std::string& name, uint32_t rows, uint32_t cols) {
    const TensorInfo* t = take(name);
    if (t == nullptr || !check_shape(*t, {rows, cols})) return {};
    WeightView w;
    w.rows = rows;
    w.cols = cols;
    if (t->dtype == "F32") {
      w.dtype = WeightDtype::kF32;
      w.data = aligned(*t, 4);
    } else if (t->dtype == "BF16") {
      w.dtype = WeightDtype::kBf16;
      w.data = aligned(*t, 2);
    } else {
      faults_.add(name, "dtype " + t->dtype + ", expected F32 or BF16");
    }
    return w;
  }

  const float* scales(const std::vector<std::string>& names, const std::vector<uint64_t>& shape) {
    const std::string* found = nullptr;
    for (const std::string& n : names) {
      if (!has(n)) continue;
      if (found != nullptr) {
        faults_.add(n, "present beside " + *found);
        return nullptr;
      }
      found = &n;
    }
    const TensorInfo* t = take(found != nullptr ? *found : names.front());
    if (t == nullptr || !check_shape(*t, shape)) return nullptr;
    if (t->dtype != "F32") {
      faults_.add(t->name, "dtype " + t->dtype + ", block scales must be F32");
      return nullptr;
    }
    return reinterpret_cast<const float*>(aligned(*t, 4));
  }

  // F32, BF16 or FP8 with block scales; `parts` matrices [rows, cols] back to back in one tensor of the given
  // shape.
  std::vector<WeightView> matrices(const std::string& name, const std::vector<std::string>& scale_names,
                                   uint32_t parts, uint32_t rows, uint32_t cols, bool stacked) {
    const TensorInfo* t = take(name);
    std::vector<WeightView> out(parts);
    std::vector<uint64_t> shape{rows, cols};
    std::vector<uint64_t> scale_shape{blocks(rows), blocks(cols)};
    if (stacked) {
      shape.insert(shape.begin(), parts);
      scale_shape.insert(scale_shape.begin(), parts);
    }
    if (t == nullptr || !check_shape(*t, shape)) return out;
    WeightView w;
    w.rows = rows;
    w.cols = cols;
    if (t->dtype == "F32") {
      w.dtype = WeightDtype::kF32;
    } else if (t->dtype == "BF16") {
      w.dtype = WeightDtype::kBf16;
    } else if (t->dtype == "F8_E4M3") {
      w.dtype = WeightDtype::kFp8E4m3;
      if (!spec_.weight_block) faults_.add(name, "is F8_E4M3, but config.json has no quantization_config");
      w.scales = scales(scale_names, scale_shape);
      w.scale_cols = blocks(cols);
    } else {
      faults_.add(name, "dtype " + t->dtype + ", expected F32, BF16 or F8_E4M3");
      return out;
    }
    const std::byte* data = aligned(*t, w.dtype == WeightDtype::kF32    ? 4
                                        : w.dtype == WeightDtype::kBf16 ? 2
                                                                        : 1);
    if (data == nullptr) return out;
    for (uint32_t p = 0; p < parts; ++p) {
      out[p] = w;
      out[p].data = data + p * w.bytes();
      if (w.scales != nullptr) out[p].scales = w.scales + size_t{p} * blocks(rows) * blocks(cols);
    }
    return out;
  }

  WeightView matrix(const std::string& name, uint32_t rows, uint32_t cols) {
    return matrices(name, {name + "_scale_inv"}, 1, rows, cols, false)[0];
  }

  void layer(uint32_t l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    DenseLayerWeights& d = model_.dense.layers[l];
    d.input_norm = vector(p + "input_layernorm.weight", spec_.hidden_size);
    d.post_attention_norm = vector(p + "post_attention_layernorm.weight", spec_.hidden_size);
    d.q_proj = matrix(p + "self_attn.q_proj.weight", spec_.q_size(), spec_.hidden_size);
    d.k_proj = matrix(p + "self_attn.k_proj.weight", spec_.kv_size(), spec_.hidden_size);
    d.v_proj = matrix(p + "self_attn.v_proj.weight", spec_.kv_size(), spec_.hidden_size);
    d.o_proj = matrix(p + "self_attn.o_proj.weight", spec_.hidden_size, spec_.q_size());
    if (spec_.use_qk_norm) {
      d.q_norm = vector(p + "self_attn.q_norm.weight", spec_.q_size());
      d.k_norm = vector(p + "self_attn.k_norm.weight", spec_.kv_size());
    }
    known_unused(p + "self_attn.rotary_emb.inv_freq");
    const std::string moe =
        p + (!has(p + "block_sparse_moe.gate.weight") && has(p + "mlp.gate.weight") ? "mlp."
                                                                                    : "block_sparse_moe.");
    d.gate = plain_matrix(moe + "gate.weight", spec_.num_experts, spec_.hidden_size);
    if (spec_.use_routing_bias) d.gate_bias = vector(moe + "e_score_correction_bias", spec_.num_experts);
    model_.experts[l].resize(spec_.num_experts);
    if (has(moe + "experts.gate_up_proj") || has(moe + "experts.down_proj")) {
      fused_experts(moe + "experts.", model_.experts[l]);
    } else {
      for (uint32_t e = 0; e < spec_.num_experts; ++e) {
        const std::string x = moe + "experts." + std::to_string(e) + ".";
        ExpertWeights& w = model_.experts[l][e];
        w.w1 = matrix(x + "w1.weight", spec_.intermediate_size, spec_.hidden_size);
        w.w2 = matrix(x + "w2.weight", spec_.hidden_size, spec_.intermediate_size);
        w.w3 = matrix(x + "w3.weight", spec_.intermediate_size, spec_.hidden_size);
      }
    }
  }

  // gate_up_proj [experts, 2 * intermediate, hidden]: the gate's rows, then the up projection's.
  void fused_experts(const std::string& p, std::vector<ExpertWeights>& experts) {
    const uint32_t n = spec_.intermediate_size;
    const std::vector<WeightView> up =
        matrices(p + "gate_up_proj", {p + "gate_up_proj_scale_inv", p + "gate_up_proj_scales_inv"},
                 spec_.num_experts, 2 * n, spec_.hidden_size, true);
    const std::vector<WeightView> down =
        matrices(p + "down_proj", {p + "down_proj_scale_inv", p + "down_proj_scales_inv"}, spec_.num_experts,
                 spec_.hidden_size, n, true);
    if (up[0].dtype == WeightDtype::kFp8E4m3 && n % kBlock != 0) {
      faults_.add(p + "gate_up_proj",
                  "FP8 with intermediate_size " + std::to_string(n) +
                      ", which is not a multiple of 128: its up rows begin inside a scale block");
      return;
    }
    for (uint32_t e = 0; e < spec_.num_experts; ++e) {
      WeightView half = up[e];
      half.rows = n;
      experts[e].w1 = half;
      if (half.data != nullptr) half.data = static_cast<const std::byte*>(half.data) + half.bytes();
      if (half.scales != nullptr) half.scales += size_t{n / kBlock} * half.scale_cols;
      experts[e].w3 = half;
      experts[e].w2 = down[e];
    }
  }

  // Multi-token prediction: layers behind the last one, up to the number the config speaks of, and their own
  // names.
  bool is_mtp(std::string_view name) const {
    for (const std::string_view prefix : {"model.mtp", "mtp."}) {
      if (name.substr(0, prefix.size()) == prefix) return true;
    }
    constexpr std::string_view kLayers = "model.layers.";
    if (name.substr(0, kLayers.size()) != kLayers) return false;
    uint64_t n = 0;
    size_t i = kLayers.size();
    for (; i < name.size() && name[i] >= '0' && name[i] <= '9' && n < 1'000'000; ++i) {
      n = n * 10 + static_cast<uint64_t>(name[i] - '0');
    }
    return i > kLayers.size() && n >= spec_.num_layers && n < uint64_t{spec_.num_layers} + mtp_layers_;
  }

  void leftovers() {
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i]) continue;
      const std::string& name = dir_.tensors()[i].name;
      if (is_mtp(name)) {
        model_.unused.push_back(name);
      } else {
        faults_.add(name, "the model has no such parameter");
      }
    }
  }

  BoundModel& model_;
  const ModelSpec& spec_;
  const TensorDirectory& dir_;
  const uint32_t mtp_layers_;
  FaultList& faults_;
  std::vector<bool> used_;
  uint64_t realigned_ = 0;
};

}  // namespace

StatusOr<std::unique_ptr<BoundModel>> load_model(const std::string& dir, FaultList& faults) {
  ASSIGN_OR_RETURN(ParsedConfig config, read_config(dir));
  auto model = std::make_unique<BoundModel>();
  model->directory = dir;
  model->spec = std::move(config.spec);
  ASSIGN_OR_RETURN(model->tensors, TensorDirectory::open(dir, faults));
  model->tensor_count = model->tensors->tensors().size();
  model->file_count = model->tensors->file_count();
  for (const TensorInfo& t : model->tensors->tensors()) model->tensor_bytes += t.bytes;
  // A config may name any size; what it takes to list its parameters must be in proportion to the files. An
  // expert has three matrices of at least one byte.
  const uint64_t experts = uint64_t{model->spec.num_layers} * model->spec.num_experts;
  if (experts > model->tensors->file_bytes() / 3 + 4096) {
    faults.add("config.json: num_local_experts", std::to_string(experts) + " experts cannot be in files of " +
                                                     std::to_string(model->tensors->file_bytes()) + " bytes");
    return std::unique_ptr<BoundModel>();
  }
  Binder binder(*model, config.mtp_layers, faults);
  binder.bind();
  if (!faults.empty()) return std::unique_ptr<BoundModel>();
  model->fingerprint = binder.fingerprint();
  return model;
}

StatusOr<std::unique_ptr<BoundModel>> load_model(const std::string& dir) {
  FaultList faults;
  ASSIGN_OR_RETURN(std::unique_ptr<BoundModel> model, load_model(dir, faults));
  RETURN_IF_ERROR(faults.to_status("checkpoint " + dir));
  return model;
}

}  // namespace conclave
