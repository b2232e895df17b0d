// Routing + PlacementTable -> one dispatch per shard. Equal arguments give equal plans.
#pragma once

#include <cstdint>
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

// Keeps its memory from call to call: planning is part of every layer. One thread at a time.
class DispatchPlanner {
 public:
  // `pairs` ascending by (token, slot); `ids` is tokens x top_k, the gate's choice. An expert goes to its
  // first usable home, so that it stays where its weights were read last, unless another has less to do by
  // more than a visit costs. `use` and `load` are by the placement's shards: whether each may be asked, and
  // what it has to do, in rows, which is advanced. The plan is valid until the next call.
  const DispatchPlan& plan(const PlacementTable& placement, uint32_t layer,
                           std::span<const DispatchPair> pairs, std::span<const uint16_t> ids, uint32_t top_k,
                           std::span<const HomeUse> use, std::span<uint64_t> load);

 private:
  // Where rows of one expert go, in the order of its rows.
  struct Part {
    uint16_t home = 0;
    uint32_t rows = 0;
  };
  // Homes and parts are runs of homes_ and parts_.
  struct ExpertRows {
    uint16_t expert = 0;
    uint32_t rows = 0;
    size_t homes_begin = 0, homes_end = 0;  // that may be asked
    size_t part = 0, parts_end = 0;         // the one that takes the next row
  };

  void find_homes(const PlacementTable& placement, uint32_t layer, ExpertRows& expert,
                  std::span<const HomeUse> use);
  void choose_home(ExpertRows& expert, std::span<uint64_t> load);
  void spread(ExpertRows& expert, std::span<uint64_t> load);
  void give(uint16_t home, DispatchPair pair, uint16_t expert);

  DispatchPlan plan_;
  std::vector<ShardWork> spare_;  // of plans before, for their memory
  std::vector<ExpertRows> experts_;
  std::vector<int> at_;  // of experts_, by id
  std::vector<uint32_t> order_;
  std::vector<uint16_t> homes_;
  std::vector<Part> parts_;
  std::vector<uint16_t> sorted_;
  std::vector<int> work_of_;  // by shard
};

}  // namespace conclave
