// The mathematics of a layer on a micro-batch, everything but the experts: docs/architecture.md,
// docs/numerics.md.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention_service/core/combine_tracker.h"
#include "attention_service/core/kv_store.h"
#include "attention_service/core/micro_batch.h"
#include "libs/kernels/ops.h"
#include "libs/model/row_pool.h"
#include "libs/model/weights.h"

namespace conclave {

class LayerMath {
 public:
  // All references are borrowed. Scratch grows to the largest micro-batch seen and is kept.
  LayerMath(const ModelSpec& spec, const DenseWeights& weights, Precision precision, bool fp8_wire,
            kernels::Context kernels, KvStore& kv);

  // x = embedding of each row's token.
  void embed(MicroBatch& batch);
  // x += o_proj(attention(norm(x))); stores the rows' keys and values.
  void attention(MicroBatch& batch, uint32_t layer);
  // Chooses experts for norm(x) into batch.ids and batch.weights; returns norm(x) as it travels to shards.
  RowBuffer gate(MicroBatch& batch, uint32_t layer, RowPool& pool);
  // x += the weighted sum of the experts' outputs, in slot order; rows masked in the tracker are left alone.
  void combine(MicroBatch& batch, const CombineTracker& tracker);
  // Final norm and lm_head of the given rows, at most `max_rows` at a time, in order: f(index of the first of
  // them, their logits). The logits (vocab_size a row) may be changed by f and live for the call.
  void logits(const MicroBatch& batch, std::span<const uint32_t> rows, uint32_t max_rows,
              const std::function<void(size_t, std::span<const std::span<float>>)>& f);

 private:
  // m rows of n floats as matmul input: themselves in F32, a rounded copy in BF16.
  const void* as_input(const float* rows, uint32_t m, uint32_t n);

  // body(row) for each row, on the pool when there is work for it.
  // A template: what it calls may be larger than a std::function keeps inside.
  template <class Body>
  void each_row(uint32_t rows, const Body& body);

  const ModelSpec& spec_;
  const DenseWeights& weights_;
  const Precision precision_;
  const RowDtype wire_dtype_;
  const kernels::Context kernels_;
  KvStore& kv_;
  const kernels::Rope rope_;
  std::vector<float> norm_, q_, k_, v_, out_, proj_, logits_;
  std::vector<Bf16> rounded_;
  std::vector<const std::byte*> pages_;
  std::vector<kernels::AttentionSlice> attention_slices_;
  std::vector<TokenId> tokens_;
};

}  // namespace conclave
