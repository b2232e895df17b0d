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
  uint32_t split_experts = 0;          // whose rows go to several homes
};

// Whether a shard may be asked.
enum class HomeUse : uint8_t {
  kNo,
  kSlow,  // where nobody else has the expert
  kYes,
};

// To compute an expert its weights are read once, whatever the number of rows: for few rows that is what it
// costs. So its rows go to one home while there are at most kMaxUnsplitRows, and are spread over several,
// each with a good part of them, when there are more.
inline constexpr uint64_t kExpertVisitCost = 8;  // of reading an expert's weights once, in rows
inline constexpr uint32_t kMaxUnsplitRows = 32;

// `pairs` ascending by (token, slot); `ids` is tokens x top_k, the gate's choice. An expert goes to its first
// usable home, so that it stays where its weights were read last, unless another has less to do by more than
// a visit costs. `load` holds what each shard has to do, in rows, and is advanced.
DispatchPlan plan_dispatch(const PlacementTable& placement, uint32_t layer,
                           std::span<const DispatchPair> pairs, std::span<const uint16_t> ids, uint32_t top_k,
                           const std::function<HomeUse(uint16_t)>& usable, std::vector<uint64_t>& load);

}  // namespace conclave
