#include "scheduler/core/expert_balance.h"

#include <cmath>
#include <limits>

#include "libs/base/check.h"
#include "scheduler/core/expert_balancer.h"

namespace conclave::scheduler {
namespace {

// An expert that nobody asked for lately counts as this part of the mean: it may be asked for again, and a
// hundred of them on one shard are a load.
constexpr double kLeastWeight = 0.02;

}  // namespace

std::vector<double> expert_weights(std::span<const double> load, uint32_t layer, uint32_t experts) {
  std::vector<double> weights(experts, 1.0);
  if (load.empty()) return weights;
  double sum = 0;
  for (uint32_t e = 0; e < experts; ++e) {
    const double w = load[static_cast<size_t>(layer) * experts + e];
    weights[e] = w > 0 && std::isfinite(w) ? w : 0;
    sum += weights[e];
  }
  if (sum == 0) std::fill(weights.begin(), weights.end(), 1.0);
  return weights;
}

Balancer::Balancer(uint32_t layers, uint32_t experts, std::span<const double> load,
                   const std::vector<BalanceShard>& shards, const std::vector<ExpertHomes>& current,
                   const BalanceOptions& options)
    : experts_(experts), trigger_(std::max(1.0, options.improve_ratio)), used_(shards.size()) {
  const uint64_t all = static_cast<uint64_t>(layers) * experts;
  for (size_t s = 0; s < shards.size(); ++s) {
    slots_.push_back(shards[s].leaving ? 0 : std::min(shards[s].slots, all));
    if (slots_[s] > 0) usable_.push_back(s);
  }
  const auto most = static_cast<uint32_t>(usable_.size());
  min_ = std::min(std::max(1u, options.min_replicas), std::max(1u, most));
  max_ = std::min(std::max(min_, options.max_replicas), std::max(1u, most));
  for (uint32_t l = 0; l < layers; ++l) {
    std::vector<double> weights = expert_weights(load, l, experts);
    double sum = 0;
    for (const double w : weights) sum += w;
    for (double& w : weights) w = std::max(w, kLeastWeight * sum / experts);
    BalanceLayer& layer = layers_.emplace_back(std::move(weights), shards.size());
    bool any = false;
    for (uint32_t e = 0; e < experts && !current.empty(); ++e) {
      for (const uint16_t home : current[static_cast<size_t>(l) * experts + e]) {
        any = true;
        if (home < shards.size() && !full(home) && !layer.has(e, home)) add({l, e}, home);
      }
    }
    fresh_.push_back(!any);
    layer.recount(min_);
  }
}

void Balancer::require() {
  for (uint32_t level = 1; level <= min_; ++level) {
    std::vector<std::pair<double, BalanceItem>> lacking;
    for (uint32_t l = 0; l < layers_.size(); ++l) {
      for (uint32_t e = 0; e < experts_; ++e) {
        if (homes(l, e).size() + 1 == level) lacking.push_back({heat({l, e}), {l, e}});
      }
    }
    // The heaviest first: what is light evens out what they leave. It also says who goes without when slots
    // end.
    std::stable_sort(lacking.begin(), lacking.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [_, item] : lacking) {
      if (!place(item, level)) place_by_shifting(item, level);
    }
  }
}

bool Balancer::place(BalanceItem item, uint32_t level) {
  const BalanceLayer& layer = layers_[item.layer];
  std::optional<size_t> best;
  bool best_within = false;
  for (const size_t s : usable_) {
    if (full(s) || layer.has(item.expert, s)) continue;
    const bool within = room(item.layer, s, true);
    if (best && within < best_within) continue;
    if (!best || within > best_within || layer.load(s) < layer.load(*best) ||
        (layer.load(s) == layer.load(*best) && layer.count(s) < layer.count(*best))) {
      best = s;
      best_within = within;
    }
  }
  if (!best) {
    for (const size_t s : usable_) {
      if (layer.has(item.expert, s) || (best && layer.load(s) >= layer.load(*best))) continue;
      if (spare(s, level)) best = s;
    }
    if (!best) return false;
    drop(*spare(*best, level), *best);
  }
  add(item, *best);
  return true;
}

// There is room only where the expert lives already: another one moves there and leaves its place. With first
// homes for all this finds a place whenever any slot is left.
bool Balancer::place_by_shifting(BalanceItem item, uint32_t level) {
  const BalanceLayer& layer = layers_[item.layer];
  for (const size_t s : usable_) {
    if (!layer.has(item.expert, s) || (full(s) && !spare(s, level))) continue;
    for (const size_t t : usable_) {
      if (layer.has(item.expert, t)) continue;
      const std::optional<BalanceItem> moves = movable(t, s, item);
      if (!moves) continue;
      if (full(s)) drop(*spare(s, level), s);
      drop(*moves, t);
      add(*moves, s);
      add(item, t);
      return true;
    }
  }
  return false;
}

// What lives at `from` and not at `to`, of the same layer when there is such.
std::optional<BalanceItem> Balancer::movable(size_t from, size_t to, BalanceItem but) const {
  for (uint32_t i = 0; i < layers_.size(); ++i) {
    const auto l = static_cast<uint32_t>((but.layer + i) % layers_.size());
    for (uint32_t e = 0; e < experts_; ++e) {
      if (l == but.layer && e == but.expert) continue;
      if (layers_[l].has(e, from) && !layers_[l].has(e, to)) return BalanceItem{l, e};
    }
  }
  return std::nullopt;
}

// A home at the shard of an expert that has more than `level`.
std::optional<BalanceItem> Balancer::spare(size_t shard, uint32_t level) {
  if (spares_level_ != level) {
    spares_level_ = level;
    spares_.assign(slots_.size(), {});
    for (uint32_t l = 0; l < layers_.size(); ++l) {
      for (uint32_t e = 0; e < experts_; ++e) {
        if (homes(l, e).size() <= level) continue;
        for (const uint16_t home : homes(l, e)) spares_[home].push_back({l, e});
      }
    }
    for (std::vector<BalanceItem>& of_shard : spares_) {
      std::stable_sort(of_shard.begin(), of_shard.end(), [&](const BalanceItem& a, const BalanceItem& b) {
        const size_t homes_a = homes(a.layer, a.expert).size();
        const size_t homes_b = homes(b.layer, b.expert).size();
        return homes_a != homes_b ? homes_a < homes_b : heat(a) > heat(b);
      });
    }
  }
  std::vector<BalanceItem>& of_shard = spares_[shard];
  while (!of_shard.empty()) {
    const BalanceItem item = of_shard.back();
    if (homes(item.layer, item.expert).size() > level && layers_[item.layer].has(item.expert, shard)) {
      return item;
    }
    of_shard.pop_back();
  }
  return std::nullopt;
}

namespace {

// The worst layer's busiest shard over the mean of those that may hold something, or do.
double busiest_of(uint32_t layers, uint32_t experts, std::span<const double> load,
                  const std::vector<BalanceShard>& shards, const std::vector<ExpertHomes>& homes) {
  if (homes.empty()) return 0;
  std::vector<bool> counts(shards.size());
  for (size_t s = 0; s < shards.size(); ++s) counts[s] = !shards[s].leaving && shards[s].slots > 0;
  for (const ExpertHomes& of_expert : homes) {
    for (const uint16_t home : of_expert) {
      if (home < shards.size()) counts[home] = true;
    }
  }
  const auto number = static_cast<double>(std::count(counts.begin(), counts.end(), true));
  double worst = 0;
  for (uint32_t l = 0; l < layers; ++l) {
    const size_t first = static_cast<size_t>(l) * experts;
    const std::vector<double> weights = expert_weights(load, l, experts);
    std::vector<double> of_shard(shards.size());
    double total = 0;
    for (uint32_t e = 0; e < experts; ++e) {
      const ExpertHomes& at = homes[first + e];
      for (const uint16_t home : at) {
        if (home >= shards.size()) continue;
        of_shard[home] += weights[e] / static_cast<double>(at.size());
        total += weights[e] / static_cast<double>(at.size());
      }
    }
    if (total == 0) continue;
    worst = std::max(worst, *std::max_element(of_shard.begin(), of_shard.end()) / (total / number));
  }
  return worst;
}

// How many of a are not in b.
uint64_t lacking(const ExpertHomes& a, const ExpertHomes& b) {
  return static_cast<uint64_t>(std::count_if(
      a.begin(), a.end(), [&](uint16_t home) { return std::find(b.begin(), b.end(), home) == b.end(); }));
}

}  // namespace

Balance balance_experts(uint32_t layers, uint32_t experts, std::span<const double> load,
                        const std::vector<BalanceShard>& shards, const std::vector<ExpertHomes>& current,
                        const BalanceOptions& options) {
  const size_t all = static_cast<size_t>(layers) * experts;
  CONCLAVE_CHECK(load.empty() || load.size() == all);
  CONCLAVE_CHECK(current.empty() || current.size() == all);
  CONCLAVE_CHECK(shards.size() <= std::numeric_limits<uint16_t>::max());
  Balancer balancer(layers, experts, load, shards, current, options);
  balancer.require();
  if (!options.repair_only) balancer.spread();

  Balance result;
  result.complete = true;
  result.homes.reserve(all);
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint32_t e = 0; e < experts; ++e) {
      const ExpertHomes& homes = result.homes.emplace_back(balancer.homes(l, e));
      result.complete = result.complete && !homes.empty();
      const ExpertHomes before =
          current.empty() ? ExpertHomes() : current[static_cast<size_t>(l) * experts + e];
      result.added += lacking(homes, before);
      result.removed += lacking(before, homes);
    }
  }
  result.busiest_before = busiest_of(layers, experts, load, shards, current);
  result.busiest_after = busiest_of(layers, experts, load, shards, result.homes);
  return result;
}

}  // namespace conclave::scheduler
