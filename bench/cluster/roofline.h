// What a step must cost at least: the bytes it touches over the memory's bandwidth, or its operations over
// the peak of the arithmetic, whichever is more, for each part of the work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "libs/model/model_spec.h"
#include "libs/model/weights.h"

namespace conclave::bench {

// Measured in the same run.
struct MachineLimits {
  double bytes_per_s = 0;
  double flops_per_s = 0;
};

// One kind of work of some steps together.
struct Work {
  double bytes = 0;  // read from memory, each weight once a use
  double flops = 0;

  double seconds(const MachineLimits& m) const {
    return std::max(bytes / m.bytes_per_s, flops / m.flops_per_s);
  }
};

inline double matrix_bytes(const WeightView& w) { return static_cast<double>(w.bytes()); }
inline double matrix_flops(const WeightView& w) { return 2.0 * w.rows * w.cols; }

// Projections and gates of all layers for `rows` rows in `steps` steps, and the keys and values they read:
// `positions` is the sum over rows of the positions each attends to.
inline Work attention_work(const ModelSpec& spec, const DenseWeights& dense, double steps, double rows,
                           double positions, double kv_bytes_per_element) {
  Work work;
  for (const DenseLayerWeights& layer : dense.layers) {
    for (const WeightView* w : {&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj, &layer.gate}) {
      work.bytes += steps * matrix_bytes(*w);
      work.flops += rows * matrix_flops(*w);
    }
    work.bytes += positions * 2 * spec.kv_size() * kv_bytes_per_element;
    work.flops += positions * 4 * spec.q_size();
  }
  return work;
}

// `runs` reads of an expert's weights, for `items` (row, expert) pairs in all.
inline Work expert_work(const ExpertWeights& expert, double runs, double items) {
  Work work;
  for (const WeightView* w : {&expert.w1, &expert.w3, &expert.w2}) {
    work.bytes += runs * matrix_bytes(*w);
    work.flops += items * matrix_flops(*w);
  }
  return work;
}

inline Work head_work(const DenseWeights& dense, double steps, double rows) {
  return {steps * matrix_bytes(dense.lm_head), rows * matrix_flops(dense.lm_head)};
}

}  // namespace conclave::bench
