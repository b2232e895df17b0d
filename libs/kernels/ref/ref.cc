#include "libs/kernels/ref/ref.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "libs/base/float_bits.h"

namespace conclave::kernels::ref {

Vector dequantize(const WeightView& w) {
  Vector out(size_t{w.rows} * w.cols);
  for (uint32_t o = 0; o < w.rows; ++o) {
    for (uint32_t i = 0; i < w.cols; ++i) {
      const size_t at = size_t{o} * w.cols + i;
      switch (w.dtype) {
        case WeightDtype::kF32:
          out[at] = static_cast<const float*>(w.data)[at];
          break;
        case WeightDtype::kBf16:
          out[at] = bf16_to_float(static_cast<const Bf16*>(w.data)[at]);
          break;
        case WeightDtype::kFp8E4m3:
          out[at] = static_cast<double>(e4m3_to_float(static_cast<const uint8_t*>(w.data)[at])) *
                    w.scales[o / 128 * w.scale_cols + i / 128];
          break;
      }
    }
  }
  return out;
}

Vector matmul(const WeightView& w, const Vector& x, uint32_t m) {
  const Vector d = dequantize(w);
  Vector y(size_t{m} * w.rows);
  for (uint32_t t = 0; t < m; ++t)
    for (uint32_t o = 0; o < w.rows; ++o)
      for (uint32_t i = 0; i < w.cols; ++i)
        y[size_t{t} * w.rows + o] += x[size_t{t} * w.cols + i] * d[size_t{o} * w.cols + i];
  return y;
}

Vector matmul_magnitude(const WeightView& w, const Vector& x, uint32_t m) {
  const Vector d = dequantize(w);
  Vector y(size_t{m} * w.rows);
  for (uint32_t t = 0; t < m; ++t)
    for (uint32_t o = 0; o < w.rows; ++o)
      for (uint32_t i = 0; i < w.cols; ++i)
        y[size_t{t} * w.rows + o] += std::abs(x[size_t{t} * w.cols + i] * d[size_t{o} * w.cols + i]);
  return y;
}

Vector rms_norm(const Vector& x, const std::vector<float>& w, double eps, uint32_t m) {
  const size_t n = w.size();
  Vector out(x.size());
  for (uint32_t t = 0; t < m; ++t) {
    double squares = 0;
    for (size_t i = 0; i < n; ++i) squares += x[t * n + i] * x[t * n + i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + eps);
    for (size_t i = 0; i < n; ++i) out[t * n + i] = x[t * n + i] * scale * w[i];
  }
  return out;
}

Vector rope(const Vector& x, uint32_t heads, uint32_t head_dim, uint32_t rotary_dim, double theta,
            uint32_t position) {
  Vector out = x;
  const uint32_t half = rotary_dim / 2;
  for (uint32_t h = 0; h < heads; ++h) {
    for (uint32_t i = 0; i < half; ++i) {
      const auto frequency = static_cast<float>(std::pow(theta, -2.0 * i / rotary_dim));
      const double angle = static_cast<float>(position) * frequency;
      const double a = x[size_t{h} * head_dim + i], b = x[size_t{h} * head_dim + half + i];
      out[size_t{h} * head_dim + i] = a * std::cos(angle) - b * std::sin(angle);
      out[size_t{h} * head_dim + half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  return out;
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

Vector attention(const Vector& q, const Vector& keys, const Vector& values, uint32_t heads, uint32_t kv_heads,
                 uint32_t dim, uint32_t position) {
  Vector out(size_t{heads} * dim);
  const size_t width = size_t{kv_heads} * dim;
  for (uint32_t h = 0; h < heads; ++h) {
    const size_t kv = size_t{h / (heads / kv_heads)} * dim;
    Vector scores(position + 1);
    for (uint32_t t = 0; t <= position; ++t) {
      for (uint32_t d = 0; d < dim; ++d) scores[t] += q[size_t{h} * dim + d] * keys[t * width + kv + d];
      scores[t] /= std::sqrt(static_cast<double>(dim));
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& s : scores) sum += s = std::exp(s - top);
    for (uint32_t t = 0; t <= position; ++t)
      for (uint32_t d = 0; d < dim; ++d)
        out[size_t{h} * dim + d] += scores[t] / sum * values[t * width + kv + d];
  }
  return out;
}

Routing route(const std::vector<float>& logits, const std::vector<float>& bias, uint32_t top_k) {
  const auto n = static_cast<uint32_t>(logits.size());
  Vector scores(n), choice(n);
  for (uint32_t e = 0; e < n; ++e) {
    scores[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(logits[e])));
    choice[e] = scores[e] + (bias.empty() ? 0.0 : bias[e]);
  }
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return choice[a] > choice[b]; });
  Routing r;
  r.margin = std::numeric_limits<double>::infinity();
  double sum = 0;
  for (uint32_t s = 0; s < top_k; ++s) {
    if (s + 1 < n) r.margin = std::min(r.margin, choice[order[s]] - choice[order[s + 1]]);
    r.ids.push_back(order[s]);
    r.weights.push_back(scores[order[s]]);
    sum += scores[order[s]];
  }
  for (double& w : r.weights) w /= sum;
  return r;
}

Vector expert(const ExpertWeights& w, const Vector& x) {
  Vector gate = matmul(w.w1, x, 1);
  const Vector up = matmul(w.w3, x, 1);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = silu(gate[i]) * up[i];
  return matmul(w.w2, gate, 1);
}

Vector adjusted(std::span<const float> logits, const SamplingParams& params, std::span<const TokenId> prompt,
                std::span<const TokenId> output, std::span<const TokenId> forbidden) {
  Vector y(logits.begin(), logits.end());
  for (const TokenId token : forbidden) {
    if (token < y.size()) y[token] = -INFINITY;
  }
  for (const TokenBias& entry : params.logit_bias) {
    if (entry.token < y.size()) y[entry.token] += static_cast<double>(entry.bias);
  }
  for (TokenId token = 0; token < y.size(); ++token) {
    const auto generated = std::count(output.begin(), output.end(), token);
    if (generated > 0 || std::find(prompt.begin(), prompt.end(), token) != prompt.end()) {
      const double r = static_cast<double>(params.repetition_penalty);
      y[token] = y[token] > 0 ? y[token] / r : y[token] * r;
    }
    if (generated == 0) continue;
    y[token] -= static_cast<double>(params.frequency_penalty) * static_cast<double>(generated);
    y[token] -= static_cast<double>(params.presence_penalty);
  }
  if (params.vocab_limit != 0) {
    for (size_t i = params.vocab_limit; i < y.size(); ++i) y[i] = -INFINITY;
  }
  return y;
}

Vector distribution(std::span<const float> logits, const SamplingParams& params) {
  return distribution(Vector(logits.begin(), logits.end()), params);
}

Vector distribution(const Vector& logits, const SamplingParams& params) {
  size_t n = logits.size();
  if (params.vocab_limit != 0) n = std::min<size_t>(n, params.vocab_limit);
  Vector p(logits.size());
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
  if (params.temperature == 0.0f) {
    p[order[0]] = 1.0;
    return p;
  }
  if (params.top_k != 0) order.resize(std::min<size_t>(n, params.top_k));
  double total = 0;
  for (const uint32_t id : order)
    total += p[id] = std::exp((logits[id] - logits[order[0]]) / params.temperature);
  double sum = 0, kept = 0;
  const double largest = p[order[0]];
  for (const uint32_t id : order) {
    if ((params.top_p < 1.0f && sum >= params.top_p * total) || p[id] < params.min_p * largest) {
      p[id] = 0;
      continue;
    }
    sum += p[id];
    kept += p[id];
  }
  for (double& x : p) x /= kept;
  return p;
}

}  // namespace conclave::kernels::ref
