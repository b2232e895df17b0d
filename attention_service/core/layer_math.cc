#include "attention_service/core/layer_math.h"

#include <algorithm>
#include <cstring>

#include "libs/model/fp8_rows.h"

namespace conclave {
namespace {

float* grown(std::vector<float>& v, size_t n) {
  if (v.size() < n) v.resize(n);
  return v.data();
}

}  // namespace

LayerMath::LayerMath(const ModelSpec& spec, const DenseWeights& weights, Precision precision, bool fp8_wire,
                     kernels::Context kernels, KvStore& kv)
    : spec_(spec),
      weights_(weights),
      precision_(precision),
      wire_dtype_(wire_dtype(precision, fp8_wire)),
      kernels_(kernels),
      kv_(kv),
      rope_(spec.head_dim, spec.rotary_dim, spec.rope_theta) {}

template <class Body>
void LayerMath::each_row(uint32_t rows, const Body& body) {
  constexpr uint32_t kRowsPerTask = 16;
  const auto run = [&](uint32_t task) {
    const uint32_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (uint32_t row = task * kRowsPerTask; row < end; ++row) body(row);
  };
  const uint32_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  if (kernels_.pool != nullptr) {
    kernels_.pool->parallel_for(tasks, run);
  } else {
    for (uint32_t task = 0; task < tasks; ++task) run(task);
  }
}

const void* LayerMath::as_input(const float* rows, uint32_t m, uint32_t n) {
  if (precision_ == Precision::kF32) return rows;
  const size_t count = static_cast<size_t>(m) * n;
  if (rounded_.size() < count) rounded_.resize(count);
  kernels::to_bf16(kernels_, rows, count, rounded_.data());
  return rounded_.data();
}

void LayerMath::embed(MicroBatch& batch) {
  tokens_.clear();
  for (const MicroBatchSlice& slice : batch.slices) {
    const auto* first = slice.sequence->tokens.data() + slice.start;
    tokens_.insert(tokens_.end(), first, first + slice.count);
  }
  batch.x.resize(static_cast<size_t>(batch.rows) * spec_.hidden_size);
  kernels::embed(kernels_, weights_.embed, tokens_, batch.x.data());
}

void LayerMath::attention(MicroBatch& batch, uint32_t layer) {
  const DenseLayerWeights& w = weights_.layers[layer];
  const uint32_t m = batch.rows;
  const uint32_t hidden = spec_.hidden_size;
  const uint32_t q_size = spec_.q_size();
  const uint32_t kv_size = spec_.kv_size();
  float* norm = grown(norm_, static_cast<size_t>(m) * hidden);
  float* q = grown(q_, static_cast<size_t>(m) * q_size);
  float* k = grown(k_, static_cast<size_t>(m) * kv_size);
  float* v = grown(v_, static_cast<size_t>(m) * kv_size);
  float* out = grown(out_, static_cast<size_t>(m) * q_size);
  float* proj = grown(proj_, static_cast<size_t>(m) * hidden);

  kernels::rms_norm(kernels_, batch.x.data(), w.input_norm.data(), spec_.rms_norm_eps, m, hidden, norm);
  const void* input = as_input(norm, m, hidden);
  kernels::matmul(kernels_, w.q_proj, precision_, input, hidden, m, q, q_size);
  kernels::matmul(kernels_, w.k_proj, precision_, input, hidden, m, k, kv_size);
  kernels::matmul(kernels_, w.v_proj, precision_, input, hidden, m, v, kv_size);
  if (!w.q_norm.empty()) {
    // Over the whole projection, before the split into heads.
    kernels::rms_norm(kernels_, q, w.q_norm.data(), spec_.rms_norm_eps, m, q_size, q);
    kernels::rms_norm(kernels_, k, w.k_norm.data(), spec_.rms_norm_eps, m, kv_size, k);
  }
  rope_.apply(kernels_, q, m, spec_.num_heads, batch.positions.data());
  rope_.apply(kernels_, k, m, spec_.num_kv_heads, batch.positions.data());

  // Keys and values first, all of them: queries of a slice read their own chunk from the cache, as rounded
  // there.
  size_t page_count = 0;
  for (const MicroBatchSlice& slice : batch.slices) {
    page_count += (slice.start + slice.count + kBlockTokens - 1) / kBlockTokens;
  }
  pages_.clear();
  pages_.reserve(page_count);  // pointers into it are taken below
  attention_slices_.clear();
  size_t row = 0;
  for (const MicroBatchSlice& slice : batch.slices) {
    const std::vector<BlockId>& blocks = slice.sequence->blocks;
    const std::byte* const* pages = pages_.data() + pages_.size();
    const uint32_t end = slice.start + slice.count;
    for (uint32_t p = 0; p * kBlockTokens < end; ++p) pages_.push_back(kv_.page(layer, blocks[p]));
    attention_slices_.push_back({q + row * q_size, out + row * q_size, slice.start, slice.count, pages});
    for (uint32_t position = slice.start; position < end; ++position, ++row) {
      kernels::kv_store(kv_.shape(), kv_.page(layer, blocks[position / kBlockTokens]),
                        position % kBlockTokens, k + row * kv_size, v + row * kv_size);
    }
  }
  kernels::paged_attention(kernels_, kv_.shape(), attention_slices_);

  kernels::matmul(kernels_, w.o_proj, precision_, as_input(out, m, q_size), q_size, m, proj, hidden);
  each_row(m, [&](uint32_t r) {
    float* x = batch.x.data() + static_cast<size_t>(r) * hidden;
    const float* p = proj + static_cast<size_t>(r) * hidden;
    for (uint32_t i = 0; i < hidden; ++i) x[i] += p[i];
  });
}

RowBuffer LayerMath::gate(MicroBatch& batch, uint32_t layer, RowPool& pool) {
  const DenseLayerWeights& w = weights_.layers[layer];
  const uint32_t m = batch.rows;
  const uint32_t hidden = spec_.hidden_size;
  const size_t count = static_cast<size_t>(m) * hidden;
  float* norm = grown(norm_, count);
  kernels::rms_norm(kernels_, batch.x.data(), w.post_attention_norm.data(), spec_.rms_norm_eps, m, hidden,
                    norm);
  // The gate runs in F32 whatever the precision, on the row before it is rounded for travel.
  float* logits = grown(proj_, static_cast<size_t>(m) * spec_.num_experts);
  kernels::matmul(kernels_, w.gate, Precision::kF32, norm, hidden, m, logits, spec_.num_experts);
  batch.ids.resize(static_cast<size_t>(m) * spec_.experts_per_token);
  batch.weights.resize(batch.ids.size());
  kernels::route(kernels_, logits, w.gate_bias.empty() ? nullptr : w.gate_bias.data(), m, spec_.num_experts,
                 spec_.experts_per_token, batch.ids.data(), batch.weights.data());
  const size_t row_size = row_bytes(wire_dtype_, hidden);
  RowBuffer rows = pool.get(m * row_size);
  if (wire_dtype_ == RowDtype::kF32) {
    std::memcpy(rows->data(), norm, count * sizeof(float));
  } else if (wire_dtype_ == RowDtype::kBf16) {
    kernels::to_bf16(kernels_, norm, count, reinterpret_cast<Bf16*>(rows->data()));
  } else {
    each_row(m, [&](uint32_t r) {
      encode_fp8_row(norm + static_cast<size_t>(r) * hidden, hidden, rows->data() + r * row_size);
    });
  }
  return rows;
}

void LayerMath::combine(MicroBatch& batch, const CombineTracker& tracker) {
  const uint32_t hidden = spec_.hidden_size;
  const uint32_t top_k = spec_.experts_per_token;
  each_row(batch.rows, [&](uint32_t token) {
    if (tracker.masked(token)) return;
    kernels::combine_slots(precision_, tracker.rows(token),
                           batch.weights.data() + static_cast<size_t>(token) * top_k, top_k, hidden,
                           batch.x.data() + static_cast<size_t>(token) * hidden);
  });
}

void LayerMath::logits(const MicroBatch& batch, std::span<const uint32_t> rows, uint32_t max_rows,
                       const std::function<void(size_t, std::span<const std::span<float>>)>& f) {
  const uint32_t hidden = spec_.hidden_size;
  const uint32_t vocab = weights_.lm_head.rows;
  for (size_t first = 0; first < rows.size(); first += max_rows) {
    const uint32_t m = static_cast<uint32_t>(std::min<size_t>(max_rows, rows.size() - first));
    float* norm = grown(norm_, static_cast<size_t>(m) * hidden);
    float* logits = grown(logits_, static_cast<size_t>(m) * vocab);
    for (uint32_t i = 0; i < m; ++i) {
      kernels::rms_norm(kernels_, batch.x.data() + static_cast<size_t>(rows[first + i]) * hidden,
                        weights_.final_norm.data(), spec_.rms_norm_eps, 1, hidden,
                        norm + static_cast<size_t>(i) * hidden);
    }
    kernels::matmul(kernels_, weights_.lm_head, precision_, as_input(norm, m, hidden), hidden, m, logits,
                    vocab);
    std::vector<std::span<float>> each(m);
    for (uint32_t i = 0; i < m; ++i) each[i] = {logits + static_cast<size_t>(i) * vocab, vocab};
    f(first, each);
  }
}

}  // namespace conclave
