// Which experts a shard holds, the warming of those it is about to need, and the release of the others.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "libs/model/placement.h"
#include "libs/model/weights.h"

namespace conclave {

class ExpertStore {
 public:
  struct Options {
    uint64_t capacity_bytes = 0;  // nothing is warmed beyond it; 0: no limit
    bool mapped = false;          // the weights lie in mapped files, so released pages may be given back
  };

  // `table` is borrowed and outlives the store.
  ExpertStore(const ExpertTable& table, uint32_t num_experts, Options options);
  ExpertStore(const ExpertTable& table, uint32_t num_experts) : ExpertStore(table, num_experts, Options()) {}

  bool holds(uint32_t layer, uint32_t expert) const { return state_[index(layer, expert)] != State::kNone; }
  const ExpertWeights& weights(uint32_t layer, uint32_t expert) const { return table_[layer][expert]; }
  uint64_t held() const { return held_; }
  uint64_t held_bytes() const { return held_bytes_; }
  // Of the expert that needs most.
  uint64_t largest_bytes() const;

  // Holds from now on, besides all it held before, what the table assigns to `shard`; queues what of that is
  // cold for warming, and nothing else. What is cold can be computed with at once, only more slowly.
  void assign(const PlacementTable& placement, Incarnation shard);
  // Lets go of all that the last table did not assign; returns how many experts. They are answered as missing
  // from now on. What it had no room to warm before is queued.
  uint64_t release();
  // Reads one byte of each page of the next weights until about `bytes` are covered; returns how many were.
  // What would exceed the capacity stays cold: it is held all the same, since an expert without a home stops
  // the cluster and one that is read from its file when asked for only slows it.
  uint64_t warm(uint64_t bytes);
  bool warming() const { return !cold_.empty(); }
  uint64_t cold() const { return cold_.size(); }

 private:
  enum class State : uint8_t { kNone, kCold, kWarm };

  size_t index(uint32_t layer, uint32_t expert) const {
    return static_cast<size_t>(layer) * num_experts_ + expert;
  }
  const ExpertWeights& at(size_t i) const { return table_[i / num_experts_][i % num_experts_]; }
  void queue_cold();

  const ExpertTable& table_;
  const uint32_t num_experts_;
  const Options options_;
  std::vector<State> state_;
  std::vector<bool> assigned_;  // by the last table
  uint64_t held_ = 0;
  uint64_t held_bytes_ = 0;
  uint64_t warm_bytes_ = 0;
  std::deque<size_t> cold_;
  size_t asked_ = 0;  // the first so many of cold_ are being read
  uint64_t asked_bytes_ = 0;
};

}  // namespace conclave
