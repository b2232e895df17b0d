#include "attention_service/core/dispatch_plan.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave {

void DispatchPlanner::find_homes(const PlacementTable& placement, uint32_t layer, ExpertRows& expert,
                                 std::span<const HomeUse> use) {
  expert.homes_begin = homes_.size();
  if (layer < placement.layers() && expert.expert < placement.experts()) {
    for (const HomeUse wanted : {HomeUse::kYes, HomeUse::kSlow}) {
      for (const uint16_t home : placement.homes(layer, expert.expert)) {
        if (use[home] == wanted) homes_.push_back(home);
      }
      if (homes_.size() > expert.homes_begin) break;
    }
  }
  expert.homes_end = homes_.size();
}

// Few rows: one home.
void DispatchPlanner::choose_home(ExpertRows& expert, std::span<uint64_t> load) {
  const uint16_t first = homes_[expert.homes_begin];
  uint16_t best = first;
  for (size_t i = expert.homes_begin; i < expert.homes_end; ++i) {
    const uint64_t bias = best == first ? kExpertVisitCost : 0;
    if (load[homes_[i]] + bias < load[best]) best = homes_[i];
  }
  load[best] += kExpertVisitCost + expert.rows;
  parts_.push_back({best, expert.rows});
}

// Many rows: as many homes as get a good part each, those with the least to do, filled up to one level.
void DispatchPlanner::spread(ExpertRows& expert, std::span<uint64_t> load) {
  const size_t count = expert.homes_end - expert.homes_begin;
  const size_t most = std::min<size_t>(count, (expert.rows + kMaxUnsplitRows - 1) / kMaxUnsplitRows);
  // By load, those before in the placement first: an insertion sort, since std::stable_sort allocates.
  sorted_.clear();
  for (size_t i = expert.homes_begin; i < expert.homes_end; ++i) {
    const uint16_t home = homes_[i];
    const auto at = std::upper_bound(sorted_.begin(), sorted_.end(), home,
                                     [&](uint16_t a, uint16_t b) { return load[a] < load[b]; });
    sorted_.insert(at, home);
  }
  // With the first n of them level: load + visit + rows is the same for each. One that would get less than a
  // visit is worth stays out.
  size_t n = most;
  uint64_t level = 0;
  for (; n > 1; --n) {
    uint64_t sum = expert.rows + n * kExpertVisitCost;
    for (size_t i = 0; i < n; ++i) sum += load[sorted_[i]];
    level = (sum + n - 1) / n;
    if (level >= load[sorted_[n - 1]] + 2 * kExpertVisitCost) break;
  }
  if (n == 1) return choose_home(expert, load);
  uint32_t left = expert.rows;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t room = level - load[sorted_[i]] - kExpertVisitCost;
    const auto rows = i + 1 == n ? left : static_cast<uint32_t>(std::min<uint64_t>(room, left));
    if (rows == 0) continue;
    left -= rows;
    load[sorted_[i]] += kExpertVisitCost + rows;
    parts_.push_back({sorted_[i], rows});
  }
}

void DispatchPlanner::give(uint16_t home, DispatchPair pair, uint16_t expert) {
  if (work_of_[home] < 0) {
    work_of_[home] = static_cast<int>(plan_.work.size());
    if (spare_.empty()) spare_.emplace_back();
    plan_.work.push_back(std::move(spare_.back()));
    spare_.pop_back();
    ShardWork& fresh = plan_.work.back();
    fresh.shard = home;
    fresh.tokens.clear();
    fresh.begin.clear();
    fresh.pairs.clear();
    fresh.expert_ids.clear();
  }
  ShardWork& work = plan_.work[work_of_[home]];
  if (work.tokens.empty() || work.tokens.back() != pair.token) {
    work.tokens.push_back(pair.token);
    work.begin.push_back(static_cast<uint32_t>(work.pairs.size()));
  }
  work.pairs.push_back(pair);
  work.expert_ids.push_back(expert);
}

const DispatchPlan& DispatchPlanner::plan(const PlacementTable& placement, uint32_t layer,
                                          std::span<const DispatchPair> pairs, std::span<const uint16_t> ids,
                                          uint32_t top_k, std::span<const HomeUse> use,
                                          std::span<uint64_t> load) {
  const size_t shards = placement.shards().size();
  CONCLAVE_CHECK(use.size() == shards && load.size() == shards);
  for (ShardWork& work : plan_.work) spare_.push_back(std::move(work));
  plan_.work.clear();
  plan_.homeless.clear();
  plan_.split_experts = 0;
  experts_.clear();
  order_.clear();
  homes_.clear();
  parts_.clear();
  const auto expert_of = [&](DispatchPair pair) {
    return ids[static_cast<size_t>(pair.token) * top_k + pair.slot];
  };

  uint16_t largest = 0;
  for (const DispatchPair pair : pairs) largest = std::max(largest, expert_of(pair));
  at_.assign(largest + size_t{1}, -1);
  for (const DispatchPair pair : pairs) {
    const uint16_t expert = expert_of(pair);
    if (at_[expert] < 0) {
      at_[expert] = static_cast<int>(experts_.size());
      experts_.emplace_back().expert = expert;
    }
    ++experts_[at_[expert]].rows;
  }
  for (uint32_t i = 0; i < experts_.size(); ++i) {
    find_homes(placement, layer, experts_[i], use);
    order_.push_back(i);
  }
  // Those without a choice first, then the heaviest: what is light evens out what they leave.
  std::sort(order_.begin(), order_.end(), [&](uint32_t i, uint32_t j) {
    const ExpertRows &a = experts_[i], &b = experts_[j];
    const bool choice_a = a.homes_end - a.homes_begin > 1, choice_b = b.homes_end - b.homes_begin > 1;
    if (choice_a != choice_b) return choice_b;
    return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert;
  });
  for (const uint32_t i : order_) {
    ExpertRows& expert = experts_[i];
    const size_t homes = expert.homes_end - expert.homes_begin;
    if (homes == 0) continue;
    expert.part = parts_.size();
    expert.rows > kMaxUnsplitRows&& homes > 1 ? spread(expert, load) : choose_home(expert, load);
    expert.parts_end = parts_.size();
    plan_.split_experts += expert.parts_end - expert.part > 1 ? 1 : 0;
  }

  work_of_.assign(shards, -1);
  for (const DispatchPair pair : pairs) {
    ExpertRows& expert = experts_[at_[expert_of(pair)]];
    if (expert.homes_begin == expert.homes_end) {
      plan_.homeless.push_back(pair);
      continue;
    }
    while (parts_[expert.part].rows == 0) ++expert.part;
    CONCLAVE_CHECK(expert.part < expert.parts_end);
    --parts_[expert.part].rows;
    give(parts_[expert.part].home, pair, expert.expert);
  }
  for (ShardWork& work : plan_.work) work.begin.push_back(static_cast<uint32_t>(work.pairs.size()));
  std::sort(plan_.work.begin(), plan_.work.end(),
            [](const ShardWork& a, const ShardWork& b) { return a.shard < b.shard; });
  return plan_;
}

}  // namespace conclave
