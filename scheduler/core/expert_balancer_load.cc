#include <cmath>

#include "scheduler/core/expert_balancer.h"

namespace conclave::scheduler {
namespace {

// A step must lower the busiest shard by this part of the mean; less is not worth a mapping.
constexpr double kLeastStep = 0.004;
// A surplus home goes for want of room when its expert's share stays below this part of a shard's mean load.
constexpr double kUselessShare = 0.1;
constexpr int kMaxRounds = 8;
constexpr uint32_t kMaxTries = 4;  // further homes one after another that have not paid yet

}  // namespace

size_t Balancer::busiest(const BalanceLayer& layer) const {
  size_t best = usable_.front();
  for (const size_t s : usable_) {
    if (layer.load(s) > layer.load(best)) best = s;
  }
  return best;
}

size_t Balancer::empty_shards(const BalanceLayer& layer) const {
  size_t count = 0;
  for (const size_t s : usable_) count += layer.count(s) == 0 ? 1 : 0;
  return count;
}

void Balancer::spread() {
  if (usable_.size() < 2 || experts_ == 0) return;
  // What one layer gives up another may use, so until nothing changes: only then does a second call with this
  // answer find nothing to do.
  bool changed = true;
  for (int round = 0; changed && round < kMaxRounds; ++round) {
    changed = false;
    for (const bool strict : {true, false}) {
      for (uint32_t l = 0; l < layers_.size(); ++l) changed = improve(l, strict) || changed;
    }
  }
}

bool Balancer::improve(uint32_t index, bool strict) {
  BalanceLayer& layer = layers_[index];
  layer.recount(1);
  const double before = ratio(layer);
  const size_t empty = empty_shards(layer);
  const double aim = 1 + (trigger_ - 1) / 5;
  const double bar = fresh_[index] ? aim : trigger_;
  if (before <= bar && empty == 0) return false;

  const BalanceLayer saved_layer = layer;
  const std::vector<uint64_t> saved_used = used_;
  if (empty > 0) fill(index, strict);
  if (ratio(layer) > bar) {
    trim(index);
    relieve(index, strict);
  }
  layer.recount(1);
  const double after = ratio(layer);
  // Where nothing lived before nothing is lost by a small gain.
  const bool gain = fresh_[index] ? after < before * (1 - kLeastStep) : after * trigger_ <= before;
  if (gain || (empty_shards(layer) < empty && after <= before)) return true;
  layer = saved_layer;
  used_ = saved_used;
  return false;
}

// Shards that hold nothing of the layer get their share, from whoever has most.
void Balancer::fill(uint32_t index, bool strict) {
  for (const size_t to : usable_) {
    if (layers_[index].count(to) == 0) fill_one(index, to, strict);
  }
}

void Balancer::fill_one(uint32_t index, size_t to, bool strict) {
  const BalanceLayer& layer = layers_[index];
  std::vector<size_t> givers;
  while (layer.load(to) < mean(layer) && room(index, to, strict)) {
    const double lack = mean(layer) - layer.load(to);
    givers.clear();
    for (const size_t s : usable_) {
      if (layer.load(s) > layer.load(to)) givers.push_back(s);
    }
    std::stable_sort(givers.begin(), givers.end(),
                     [&](size_t a, size_t b) { return layer.load(a) > layer.load(b); });
    bool moved = false;
    for (const size_t from : givers) {
      std::optional<uint32_t> best;
      for (uint32_t e = 0; e < experts_; ++e) {
        if (!layer.has(e, from) || layer.has(e, to)) continue;
        const double share = layer.share(e);
        if (layer.load(to) + share >= layer.load(from) * (1 - 1e-9)) continue;
        if (share > lack * (1 + 1e-9) && layer.count(to) > 0) continue;
        // The largest that fits; when none does, for a first one, the smallest.
        if (!best || (share <= lack ? layer.share(*best) > lack || share > layer.share(*best)
                                    : share < layer.share(*best))) {
          best = e;
        }
      }
      if (!best) continue;
      drop({index, *best}, from);
      add({index, *best}, to);
      moved = true;
      break;
    }
    if (!moved) return;
  }
}

// Surplus homes of experts that nobody asks for make room on shards that are full.
void Balancer::trim(uint32_t index) {
  const BalanceLayer& layer = layers_[index];
  for (const size_t s : usable_) {
    if (!full(s)) continue;
    for (uint32_t e = 0; e < experts_; ++e) {
      const size_t n = layer.homes(e).size();
      if (n <= min_ || !layer.has(e, s)) continue;
      if (layer.weight(e) / static_cast<double>(n - 1) <= kUselessShare * mean(layer)) drop({index, e}, s);
    }
  }
}

void Balancer::relieve(uint32_t index, bool strict) {
  BalanceLayer& layer = layers_[index];
  const double aim = mean(layer) * (1 + (trigger_ - 1) / 5);
  // A further home may first overload the shard that takes it, and pay once other experts have moved away
  // from there: it is tried where no step helps, and undone when in the end nothing came of it.
  std::optional<std::pair<BalanceLayer, std::vector<uint64_t>>> best;
  double best_load = 0;
  uint32_t tries = 0;
  for (uint32_t i = 0; i < 4 * experts_ + 64; ++i) {  // each lowers a busiest shard: far fewer are needed
    const size_t from = busiest(layer);
    if (layer.load(from) <= aim) return;
    Step step = best_step(index, from, strict);
    if (step.score <= 0) step = best_exchange(index, from);
    if (step.score <= 0) {
      if (!best || layer.load(from) < best_load - kLeastStep * mean(layer)) {
        best = {layer, used_};
        best_load = layer.load(from);
        tries = 0;
      }
      if (tries++ == kMaxTries || !split_hottest(index, from, strict)) break;
      continue;
    }
    if (!step.keep) drop({index, step.expert}, from);
    if (step.other) drop({index, *step.other}, step.to);
    add({index, step.expert}, step.to);
    if (step.other) add({index, *step.other}, from);
  }
  if (best && layer.load(busiest(layer)) > best_load - kLeastStep * mean(layer)) {
    layer = std::move(best->first);
    used_ = std::move(best->second);
  }
}

// Gives the heaviest expert of the shard that may have one another home where there is least to do.
bool Balancer::split_hottest(uint32_t index, size_t from, bool strict) {
  const BalanceLayer& layer = layers_[index];
  if (layer.load(from) <= mean(layer) * trigger_) return false;
  std::optional<uint32_t> hottest;
  std::optional<size_t> to;
  for (uint32_t e = 0; e < experts_; ++e) {
    if (!layer.has(e, from) || layer.homes(e).size() >= max_) continue;
    if (hottest && layer.share(e) <= layer.share(*hottest)) continue;
    std::optional<size_t> least;
    for (const size_t s : usable_) {
      if (layer.has(e, s) || !room(index, s, strict)) continue;
      if (!least || layer.load(s) < layer.load(*least)) least = s;
    }
    if (!least) continue;
    hottest = e;
    to = least;
  }
  if (hottest) add({index, *hottest}, *to);
  return hottest.has_value();
}

// How much load beyond the mean a step takes away per home to be mapped; 0 when it is none.
double Balancer::score(const BalanceLayer& layer, size_t from, size_t to, double from_after, double to_after,
                       double cost) const {
  const double m = mean(layer);
  if (std::max(from_after, to_after) > layer.load(from) - kLeastStep * m) return 0;
  const auto beyond = [m](double load) { return std::max(load - m, 0.0); };
  const double gain =
      beyond(layer.load(from)) + beyond(layer.load(to)) - beyond(from_after) - beyond(to_after);
  // Among equals the one that leaves both nearest to the mean.
  const double miss = (std::abs(from_after - m) + std::abs(to_after - m)) / (m + layer.load(from));
  return gain / cost + m * 1e-6 / (1 + miss);
}

Balancer::Step Balancer::best_step(uint32_t index, size_t from, bool strict) const {
  const BalanceLayer& layer = layers_[index];
  const bool hot = layer.load(from) > mean(layer) * trigger_;
  std::vector<size_t> tos;
  for (const size_t s : usable_) {
    if (s != from && room(index, s, strict)) tos.push_back(s);
  }
  Step best;
  for (uint32_t e = 0; e < experts_ && !tos.empty(); ++e) {
    if (!layer.has(e, from)) continue;
    const double share = layer.share(e);
    const size_t n = layer.homes(e).size();
    const double shared = layer.weight(e) / static_cast<double>(n + 1);
    for (const size_t to : tos) {
      if (layer.has(e, to)) continue;
      const double moved = score(layer, from, to, layer.load(from) - share, layer.load(to) + share, 1);
      if (moved > best.score) best = {moved, e, to, false, std::nullopt};
      if (!hot || n >= max_) continue;
      // A further home costs memory for good, hence a little more than a move.
      const double split =
          score(layer, from, to, layer.load(from) - (share - shared), layer.load(to) + shared, 1.5);
      if (split > best.score) best = {split, e, to, true, std::nullopt};
    }
  }
  return best;
}

Balancer::Step Balancer::best_exchange(uint32_t index, size_t from) const {
  const BalanceLayer& layer = layers_[index];
  Step best;
  std::vector<std::pair<double, uint32_t>> theirs;
  for (const size_t to : usable_) {
    const double gap = layer.load(from) - layer.load(to);
    if (to == from || gap <= 0) continue;
    theirs.clear();
    for (uint32_t e = 0; e < experts_; ++e) {
      if (layer.has(e, to) && !layer.has(e, from)) theirs.push_back({layer.share(e), e});
    }
    std::sort(theirs.begin(), theirs.end());
    const double wanted = std::min(layer.load(from) - mean(layer), gap / 2);
    for (uint32_t e = 0; e < experts_; ++e) {
      if (!layer.has(e, from) || layer.has(e, to)) continue;
      const double share = layer.share(e);
      auto near = std::lower_bound(theirs.begin(), theirs.end(), std::pair{share - wanted, 0u});
      if (near != theirs.begin()) --near;
      for (int i = 0; i < 2 && near != theirs.end(); ++i, ++near) {
        const double delta = share - near->first;
        if (delta <= 0) continue;
        const double s = score(layer, from, to, layer.load(from) - delta, layer.load(to) + delta, 2);
        if (s > best.score) best = {s, e, to, false, near->second};
      }
    }
  }
  return best;
}

}  // namespace conclave::scheduler
