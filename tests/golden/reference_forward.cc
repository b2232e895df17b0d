#include "tests/golden/reference_forward.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "libs/base/float_bits.h"

namespace conclave::reference {
namespace {

double dot(const double* a, const double* b, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

std::vector<double> Matrix::operator()(std::span<const double> x) const {
  std::vector<double> y(rows);
  for (uint32_t r = 0; r < rows; ++r) y[r] = dot(values.data() + size_t{r} * cols, x.data(), cols);
  return y;
}

Model::Model(const BoundModel& model, const Options& options) : bound_(model), options_(options) {
  embed_ = dequantize(model.dense.embed);
  lm_head_ = dequantize(model.dense.lm_head);
  for (uint32_t l = 0; l < model.spec.num_layers; ++l) {
    const DenseLayerWeights& d = model.dense.layers[l];
    Layer layer{dequantize(d.q_proj),
                dequantize(d.k_proj),
                dequantize(d.v_proj),
                dequantize(d.o_proj),
                dequantize(d.gate),
                {},
                {},
                {}};
    for (const ExpertWeights& e : model.experts[l]) {
      layer.w1.push_back(dequantize(options.faults.swap_w1_w3 ? e.w3 : e.w1));
      layer.w3.push_back(dequantize(options.faults.swap_w1_w3 ? e.w1 : e.w3));
      layer.w2.push_back(dequantize(e.w2));
    }
    layers_.push_back(std::move(layer));
  }
}

Matrix Model::dequantize(const WeightView& w) const {
  Matrix m{w.rows, w.cols, std::vector<double>(size_t{w.rows} * w.cols)};
  const uint32_t scale_rows = (w.rows + 127) / 128;
  for (uint32_t r = 0; r < w.rows; ++r) {
    for (uint32_t c = 0; c < w.cols; ++c) {
      const size_t i = size_t{r} * w.cols + c;
      double v = 0;
      switch (w.dtype) {
        case WeightDtype::kF32:
          v = static_cast<const float*>(w.data)[i];
          break;
        case WeightDtype::kBf16:
          v = bf16_to_float(static_cast<const Bf16*>(w.data)[i]);
          break;
        case WeightDtype::kFp8E4m3: {
          const size_t s = options_.faults.transposed_scales ? size_t{c / 128} * scale_rows + r / 128
                                                             : size_t{r / 128} * w.scale_cols + c / 128;
          v = static_cast<double>(e4m3_to_float(static_cast<const uint8_t*>(w.data)[i])) * w.scales[s];
          break;
        }
      }
      m.values[i] = v;
    }
  }
  return m;
}

Sequence::Sequence(const Model& model)
    : model_(model), keys_(model.spec().num_layers), values_(model.spec().num_layers) {}

double Sequence::round(double v) const {
  return model_.options_.bf16 ? bf16_to_float(float_to_bf16(static_cast<float>(v))) : v;
}

std::vector<double> Sequence::rounded(std::vector<double> v) const {
  for (double& x : v) x = round(x);
  return v;
}

std::vector<double> Sequence::norm(std::span<const double> x, std::span<const float> w, size_t group) const {
  std::vector<double> y(x.size());
  for (size_t begin = 0; begin < x.size(); begin += group) {
    double sum = 0;
    for (size_t i = begin; i < begin + group; ++i) sum += x[i] * x[i];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(group) + model_.spec().rms_norm_eps);
    for (size_t i = begin; i < begin + group; ++i) y[i] = x[i] * scale * w[i];
  }
  return y;
}

void Sequence::rotate(std::vector<double>& heads) const {
  const ModelSpec& s = model_.spec();
  const Faults& f = model_.options_.faults;
  const uint32_t dims = f.full_rotation ? s.head_dim : s.rotary_dim;
  for (size_t base = 0; base < heads.size(); base += s.head_dim) {
    for (uint32_t i = 0; i < dims / 2; ++i) {
      // The frequency and the angle are binary32 by definition of the model.
      const float frequency = static_cast<float>(std::pow(s.rope_theta, -2.0 * i / dims));
      const double angle = static_cast<float>(position_) * frequency;
      const size_t a = base + (f.interleaved_rotation ? 2 * i : i);
      const size_t b = f.interleaved_rotation ? a + 1 : a + dims / 2;
      const double x = heads[a];
      const double y = heads[b];
      heads[a] = x * std::cos(angle) - y * std::sin(angle);
      heads[b] = y * std::cos(angle) + x * std::sin(angle);
    }
  }
}

std::vector<double> Sequence::attention(uint32_t layer, std::span<const double> x) {
  const ModelSpec& s = model_.spec();
  const Model::Layer& w = model_.layers_[layer];
  const DenseLayerWeights& d = model_.bound_.dense.layers[layer];
  const bool per_head = model_.options_.faults.per_head_norm;
  std::vector<double> q = w.q(x);
  std::vector<double> k = w.k(x);
  if (s.use_qk_norm) {
    q = norm(q, d.q_norm, per_head ? s.head_dim : q.size());
    k = norm(k, d.k_norm, per_head ? s.head_dim : k.size());
  }
  rotate(q);
  rotate(k);
  q = rounded(std::move(q));
  keys_[layer].push_back(rounded(std::move(k)));
  values_[layer].push_back(rounded(w.v(x)));

  std::vector<double> out(s.q_size());
  const uint32_t heads_per_kv = s.num_heads / s.num_kv_heads;
  const double scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  for (uint32_t h = 0; h < s.num_heads; ++h) {
    const size_t qo = size_t{h} * s.head_dim;
    const size_t ko = size_t{h / heads_per_kv} * s.head_dim;
    std::vector<double> p(position_ + 1);
    for (uint32_t t = 0; t <= position_; ++t)
      p[t] = scale * dot(q.data() + qo, keys_[layer][t].data() + ko, s.head_dim);
    const double top = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (double& v : p) sum += v = std::exp(v - top);
    for (uint32_t t = 0; t <= position_; ++t) {
      const double weight = p[t] / sum;
      const double* v = values_[layer][t].data() + ko;
      double* o = out.data() + qo;
      for (uint32_t i = 0; i < s.head_dim; ++i) o[i] += weight * v[i];
    }
  }
  return w.o(rounded(std::move(out)));
}

std::vector<double> Sequence::experts(uint32_t layer, std::span<const double> x) {
  const ModelSpec& s = model_.spec();
  const Model::Layer& w = model_.layers_[layer];
  const VectorF32& bias = model_.bound_.dense.layers[layer].gate_bias;
  const Faults& f = model_.options_.faults;
  std::vector<double> score = w.gate(x);
  for (double& v : score) v = 1 / (1 + std::exp(-v));
  std::vector<double> choice = score;
  if (!bias.empty() && !f.ignore_bias) {
    for (uint32_t e = 0; e < s.num_experts; ++e) choice[e] += bias[e];
  }
  auto order_by = [&](const std::vector<double>& key) {
    std::vector<uint32_t> order(s.num_experts);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key[a] > key[b]; });
    return order;
  };
  const std::vector<uint32_t> order = order_by(choice);
  const uint32_t top = s.experts_per_token;
  if (top < s.num_experts) gate_margin_ = std::min(gate_margin_, choice[order[top - 1]] - choice[order[top]]);
  const std::vector<uint32_t> plain = order_by(score);
  for (uint32_t i = 0; i < top; ++i) {
    if (std::find(plain.begin(), plain.begin() + top, order[i]) == plain.begin() + top) {
      ++changed_;
      break;
    }
  }
  double total = 0;
  for (uint32_t i = 0; i < top; ++i) total += f.biased_weights ? choice[order[i]] : score[order[i]];
  if (f.no_renormalize) total = 1;

  const std::vector<double> row = rounded({x.begin(), x.end()});
  std::vector<double> out(s.hidden_size);
  for (uint32_t i = 0; i < top; ++i) {
    const uint32_t e = order[i];
    const std::vector<double> gate = w.w1[e](row);
    std::vector<double> inner = w.w3[e](row);
    for (size_t j = 0; j < inner.size(); ++j) inner[j] *= gate[j] / (1 + std::exp(-gate[j]));
    const std::vector<double> y = rounded(w.w2[e](rounded(std::move(inner))));
    const double weight = (f.biased_weights ? choice[e] : score[e]) / total;
    for (size_t j = 0; j < out.size(); ++j) out[j] += weight * y[j];
  }
  return out;
}

void Sequence::feed(TokenId token) {
  const ModelSpec& s = model_.spec();
  const auto begin =
      model_.embed_.values.begin() + static_cast<std::ptrdiff_t>(size_t{token} * s.hidden_size);
  hidden_.assign(begin, begin + s.hidden_size);
  for (uint32_t l = 0; l < s.num_layers; ++l) {
    const DenseLayerWeights& d = model_.bound_.dense.layers[l];
    const std::vector<double> a = attention(l, rounded(norm(hidden_, d.input_norm, hidden_.size())));
    for (size_t i = 0; i < hidden_.size(); ++i) hidden_[i] += a[i];
    const std::vector<double> m = experts(l, norm(hidden_, d.post_attention_norm, hidden_.size()));
    for (size_t i = 0; i < hidden_.size(); ++i) hidden_[i] += m[i];
  }
  ++position_;
}

std::vector<double> Sequence::logits() const {
  return model_.lm_head_(rounded(norm(hidden_, model_.bound_.dense.final_norm, hidden_.size())));
}

}  // namespace conclave::reference
