// Which experts a shard holds, and the warming of those it is about to hold.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "libs/model/placement.h"
#include "libs/model/weights.h"

namespace conclave {

class ExpertStore {
 public:
  // `table` is borrowed and outlives the store.
  ExpertStore(const ExpertTable& table, uint32_t num_experts);

  bool holds(uint32_t layer, uint32_t expert) const { return held_[index(layer, expert)]; }
  const ExpertWeights& weights(uint32_t layer, uint32_t expert) const { return table_[layer][expert]; }
  uint64_t held() const { return held_count_; }

  // Holds from now on, besides all it held before, what the table assigns to `shard`; queues the new ones for
  // warming. They can be computed with at once, only more slowly than when warm.
  void assign(const PlacementTable& placement, Incarnation shard);
  // Reads one byte of each page of the next weights until about `bytes` are covered; returns how many were.
  // 0: all is warm.
  uint64_t warm(uint64_t bytes);
  bool warming() const { return !cold_.empty(); }
  uint64_t cold() const { return cold_.size(); }

 private:
  size_t index(uint32_t layer, uint32_t expert) const {
    return static_cast<size_t>(layer) * num_experts_ + expert;
  }

  const ExpertTable& table_;
  uint32_t num_experts_;
  std::vector<bool> held_;
  uint64_t held_count_ = 0;
  std::deque<const ExpertWeights*> cold_;
  size_t asked_ = 0;  // the first so many of cold_ are being read
  uint64_t asked_bytes_ = 0;
};

}  // namespace conclave
