// Routing + PlacementTable -> one dispatch per shard. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "libs/model/placement.h"

namespace conclave {

// One (token, slot) that needs its expert's output.
struct DispatchPair {
  uint32_t token = 0;
  uint32_t slot = 0;
};

// What one shard is asked: rows in ascending token order, each once, with the pairs of that token in slot
// order.
struct ShardWork {
  uint16_t shard = 0;                // index into the placement's shards
  std::vector<uint32_t> tokens;      // one per row
  std::vector<uint32_t> begin;       // rows + 1 offsets into pairs
  std::vector<DispatchPair> pairs;   // entry i of the dispatch
  std::vector<uint16_t> expert_ids;  // parallel to pairs
};

struct DispatchPlan {
  std::vector<ShardWork> work;         // shards with work, ascending
  std::vector<DispatchPair> homeless;  // no usable home now
};

// `pairs` ascending by (token, slot); `ids` is tokens x top_k, the gate's choice. Of several usable homes the
// one with the least load so far takes the pair (ties: the first named); `load` holds (token, expert) pairs
// per shard index and is advanced. `usable(shard index)` says whether a shard may be asked.
DispatchPlan plan_dispatch(const PlacementTable& placement, uint32_t layer,
                           std::span<const DispatchPair> pairs, std::span<const uint16_t> ids, uint32_t top_k,
                           const std::function<bool(uint16_t)>& usable, std::vector<uint64_t>& load);

}  // namespace conclave
