// The working state of balance_experts (expert_balance.h): its two stages change one set of homes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/core/expert_balance.h"

namespace conclave::scheduler {

using ExpertHomes = std::vector<uint16_t>;  // of one expert: indices of shards

// One layer: who lives where, and what that loads each shard with.
class BalanceLayer {
 public:
  BalanceLayer(std::vector<double> weight, size_t shards)
      : weight_(std::move(weight)), homes_(weight_.size()), load_(shards), count_(shards) {
    for (const double w : weight_) total_ += w;
  }

  const ExpertHomes& homes(uint32_t expert) const { return homes_[expert]; }
  bool has(uint32_t expert, size_t shard) const {
    const ExpertHomes& homes = homes_[expert];
    return std::find(homes.begin(), homes.end(), shard) != homes.end();
  }
  double weight(uint32_t expert) const { return weight_[expert]; }
  double total() const { return total_; }
  double load(size_t shard) const { return load_[shard]; }
  uint32_t count(size_t shard) const { return count_[shard]; }
  // What the expert brings to each of its homes.
  double share(uint32_t expert) const {
    return weight_[expert] / static_cast<double>(std::max<size_t>(homes_[expert].size(), expected_));
  }
  void add(uint32_t expert, size_t shard) {
    lift(expert, -1);
    homes_[expert].push_back(static_cast<uint16_t>(shard));
    ++count_[shard];
    lift(expert, 1);
  }
  void drop(uint32_t expert, size_t shard) {
    lift(expert, -1);
    std::erase(homes_[expert], static_cast<uint16_t>(shard));
    --count_[shard];
    lift(expert, 1);
  }
  // Loads from scratch, as if every expert had at least `expected` homes: sums that went up and down drift.
  void recount(uint32_t expected) {
    expected_ = expected;
    std::fill(load_.begin(), load_.end(), 0.0);
    for (uint32_t expert = 0; expert < homes_.size(); ++expert) lift(expert, 1);
  }

 private:
  void lift(uint32_t expert, double sign) {
    const double share_now = sign * share(expert);
    for (const uint16_t home : homes_[expert]) load_[home] += share_now;
  }

  std::vector<double> weight_;
  std::vector<ExpertHomes> homes_;
  std::vector<double> load_;
  std::vector<uint32_t> count_;
  double total_ = 0;
  uint32_t expected_ = 1;
};

struct BalanceItem {
  uint32_t layer = 0;
  uint32_t expert = 0;
};

class Balancer {
 public:
  Balancer(uint32_t layers, uint32_t experts, std::span<const double> load,
           const std::vector<BalanceShard>& shards, const std::vector<ExpertHomes>& current,
           const BalanceOptions& options);
  // Makes the homes that every expert is to have, as far as slots go.
  void require();
  // Evens out the load.
  void spread();
  const ExpertHomes& homes(uint32_t layer, uint32_t expert) const { return layers_[layer].homes(expert); }

 private:
  // A change that takes load from the busiest shard.
  struct Step {
    double score = 0;
    uint32_t expert = 0;
    size_t to = 0;
    bool keep = false;              // a further home, not a move
    std::optional<uint32_t> other;  // comes back in exchange
  };

  bool full(size_t shard) const { return used_[shard] >= slots_[shard]; }
  // The layer's part of the shard's slots; the parts of all layers together are all of them.
  uint64_t part(uint32_t layer, size_t shard) const {
    const uint64_t of = layers_.size();
    return slots_[shard] * (layer + 1) / of - slots_[shard] * layer / of;
  }
  bool room(uint32_t layer, size_t shard, bool strict) const {
    return !full(shard) && (!strict || layers_[layer].count(shard) < part(layer, shard));
  }
  void add(BalanceItem item, size_t shard) {
    layers_[item.layer].add(item.expert, shard);
    ++used_[shard];
  }
  void drop(BalanceItem item, size_t shard) {
    layers_[item.layer].drop(item.expert, shard);
    --used_[shard];
  }
  double heat(BalanceItem item) const {
    const BalanceLayer& layer = layers_[item.layer];
    return layer.total() > 0 ? layer.weight(item.expert) / layer.total() : 0;
  }

  bool place(BalanceItem item, uint32_t level);
  bool place_by_shifting(BalanceItem item, uint32_t level);
  std::optional<BalanceItem> spare(size_t shard, uint32_t level);
  std::optional<BalanceItem> movable(size_t from, size_t to, BalanceItem but) const;

  double mean(const BalanceLayer& layer) const { return layer.total() / static_cast<double>(usable_.size()); }
  size_t busiest(const BalanceLayer& layer) const;
  double ratio(const BalanceLayer& layer) const { return layer.load(busiest(layer)) / mean(layer); }
  size_t empty_shards(const BalanceLayer& layer) const;
  bool improve(uint32_t index, bool strict);
  void fill(uint32_t index, bool strict);
  void fill_one(uint32_t index, size_t to, bool strict);
  void trim(uint32_t index);
  void relieve(uint32_t index, bool strict);
  bool split_hottest(uint32_t index, size_t from, bool strict);
  Step best_step(uint32_t index, size_t from, bool strict) const;
  Step best_exchange(uint32_t index, size_t from) const;
  double score(const BalanceLayer& layer, size_t from, size_t to, double from_after, double to_after,
               double cost) const;

  const uint32_t experts_;
  const double trigger_;
  uint32_t min_ = 1;
  uint32_t max_ = 1;
  std::vector<uint64_t> slots_;  // 0 for a shard that is leaving
  std::vector<uint64_t> used_;
  std::vector<size_t> usable_;  // shards that may hold something
  std::vector<BalanceLayer> layers_;
  std::vector<bool> fresh_;  // of a layer: nothing of it had a home
  // Experts with more homes than the level that is being made, per shard, the best to give one up last.
  std::vector<std::vector<BalanceItem>> spares_;
  uint32_t spares_level_ = 0;
};

// The loads of one layer as numbers from 0 up; all 1 where nothing is known.
std::vector<double> expert_weights(std::span<const double> load, uint32_t layer, uint32_t experts);

}  // namespace conclave::scheduler
