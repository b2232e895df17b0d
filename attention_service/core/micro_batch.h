// A part of a step's rows that goes through the layers on its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention_service/core/sequence_table.h"

namespace conclave {

struct MicroBatchSlice {
  std::shared_ptr<Sequence> sequence;
  uint32_t start = 0;  // position of the first row
  uint32_t count = 0;
  bool sample = false;      // after the last row
  uint32_t plan_index = 0;  // of the plan's slice it comes from
};

struct MicroBatch {
  enum class Phase : uint8_t { kReady, kWaiting, kDone };

  std::vector<MicroBatchSlice> slices;  // rows are theirs, one slice after the other
  uint32_t rows = 0;
  // Its first slice continues one of the batch before it: layer l runs here only after it ran there.
  bool after_previous = false;
  Phase phase = Phase::kReady;
  uint32_t layer = 0;          // the next layer to run; num_layers: only the head is left
  bool combine_first = false;  // outputs of layer - 1 wait to be added
  std::vector<float> x;        // rows x hidden, the residual stream
  std::vector<uint32_t> positions;
  std::vector<uint16_t> ids;   // rows x top_k, the gate's choice in `layer - 1`
  std::vector<float> weights;  // parallel to ids

  // Sets rows and positions from the slices.
  void index_rows();
  // Drops the rows for whose slice `gone(sequence)` holds; returns how many.
  uint32_t drop_rows(uint32_t hidden, const std::function<bool(const Sequence&)>& gone);
};

// Splits a step's slices, in order, into at most `max_batches` parts of about equal rows, at least `min_rows`
// each. A slice may be cut; its parts then depend on one another in order.
std::vector<MicroBatch> split_step(std::vector<MicroBatchSlice> slices, uint32_t max_batches,
                                   uint32_t min_rows);

}  // namespace conclave
