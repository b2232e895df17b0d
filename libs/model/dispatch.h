// What crosses the data plane: hidden rows to a shard, expert outputs back. The wire form is
// docs/wire_format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/numerics.h"

namespace conclave {

// Bytes of rows whose memory outlives the message: shared by the sender's batch, the in-flight message and,
// over loopback, the receiver. Never written after the message was submitted.
using RowBuffer = std::shared_ptr<std::vector<std::byte>>;

// Rows of one layer for one shard: each token's row once, with the ids of those of its experts that live
// there.
struct DispatchBatch {
  DispatchId id;
  Epoch epoch;
  uint32_t layer = 0;
  uint32_t hidden = 0;  // elements per row
  RowDtype dtype = RowDtype::kBf16;
  Nanos time_left = 0;  // until the sender's dispatch deadline (0: none); a shard skips what is past it
  std::vector<uint32_t> expert_begin;  // rows()+1 offsets into expert_ids
  std::vector<uint16_t> expert_ids;    // per row, in slot order
  RowBuffer rows;                      // row_count() * row_bytes()

  uint32_t row_count() const {
    return expert_begin.empty() ? 0 : static_cast<uint32_t>(expert_begin.size() - 1);
  }
  size_t row_bytes() const { return conclave::row_bytes(dtype, hidden); }
};

// One output row per (row, expert) of the dispatch that the shard computed, unweighted. Item i belongs to the
// i-th entry of the dispatch's expert_ids unless that entry's expert is in `missing`: then it has no output.
struct CombineBatch {
  DispatchId id;
  Incarnation shard;
  uint32_t layer = 0;
  uint32_t hidden = 0;
  RowDtype dtype = RowDtype::kBf16;
  std::vector<uint32_t> items;    // indices into the dispatch's expert_ids, ascending; one output row each
  std::vector<uint16_t> missing;  // expert ids this shard does not hold
  Nanos compute_ns = 0;           // busy time of the shard for this reply's group
  RowBuffer outputs;              // items.size() * row_bytes()

  size_t row_bytes() const { return conclave::row_bytes(dtype, hidden); }
};

}  // namespace conclave
