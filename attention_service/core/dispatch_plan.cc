#include "attention_service/core/dispatch_plan.h"

#include <algorithm>

namespace conclave {
namespace {

// Where the rows of one expert go, in the order of its rows.
struct Part {
  uint16_t home = 0;
  uint32_t rows = 0;
};

struct ExpertRows {
  uint16_t expert = 0;
  uint32_t rows = 0;
  std::vector<uint16_t> homes;  // that may be asked
  std::vector<Part> parts;
  size_t current = 0;  // part that takes the next row
};

std::vector<uint16_t> usable_homes(const PlacementTable& placement, uint32_t layer, uint16_t expert,
                                   const std::vector<HomeUse>& use) {
  std::vector<uint16_t> homes;
  if (layer >= placement.layers() || expert >= placement.experts()) return homes;
  for (const HomeUse wanted : {HomeUse::kYes, HomeUse::kSlow}) {
    for (const uint16_t home : placement.homes(layer, expert)) {
      if (use[home] == wanted) homes.push_back(home);
    }
    if (!homes.empty()) break;
  }
  return homes;
}

// Few rows: one home.
void choose_home(ExpertRows& expert, std::vector<uint64_t>& load) {
  uint16_t best = expert.homes.front();
  for (const uint16_t home : expert.homes) {
    const uint64_t bias = best == expert.homes.front() ? kExpertVisitCost : 0;
    if (load[home] + bias < load[best]) best = home;
  }
  load[best] += kExpertVisitCost + expert.rows;
  expert.parts.push_back({best, expert.rows});
}

// Many rows: as many homes as get a good part each, those with the least to do, filled up to one level.
void spread(ExpertRows& expert, std::vector<uint64_t>& load) {
  const size_t most =
      std::min<size_t>(expert.homes.size(), (expert.rows + kMaxUnsplitRows - 1) / kMaxUnsplitRows);
  std::vector<uint16_t> homes = expert.homes;
  std::stable_sort(homes.begin(), homes.end(), [&](uint16_t a, uint16_t b) { return load[a] < load[b]; });
  // With the first n of them level: load + visit + rows is the same for each. One that would get less than a
  // visit is worth stays out.
  size_t n = most;
  uint64_t level = 0;
  for (; n > 1; --n) {
    uint64_t sum = expert.rows + n * kExpertVisitCost;
    for (size_t i = 0; i < n; ++i) sum += load[homes[i]];
    level = (sum + n - 1) / n;
    if (level >= load[homes[n - 1]] + 2 * kExpertVisitCost) break;
  }
  if (n == 1) return choose_home(expert, load);
  uint32_t left = expert.rows;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t room = level - load[homes[i]] - kExpertVisitCost;
    const auto rows = i + 1 == n ? left : static_cast<uint32_t>(std::min<uint64_t>(room, left));
    if (rows == 0) continue;
    left -= rows;
    load[homes[i]] += kExpertVisitCost + rows;
    expert.parts.push_back({homes[i], rows});
  }
}

void give(DispatchPlan& plan, std::vector<int>& work_of, uint16_t home, DispatchPair pair, uint16_t expert) {
  if (work_of[home] < 0) {
    work_of[home] = static_cast<int>(plan.work.size());
    plan.work.emplace_back().shard = home;
  }
  ShardWork& work = plan.work[work_of[home]];
  if (work.tokens.empty() || work.tokens.back() != pair.token) {
    work.tokens.push_back(pair.token);
    work.begin.push_back(static_cast<uint32_t>(work.pairs.size()));
  }
  work.pairs.push_back(pair);
  work.expert_ids.push_back(expert);
}

}  // namespace

DispatchPlan plan_dispatch(const PlacementTable& placement, uint32_t layer,
                           std::span<const DispatchPair> pairs, std::span<const uint16_t> ids, uint32_t top_k,
                           const std::function<HomeUse(uint16_t)>& usable, std::vector<uint64_t>& load) {
  DispatchPlan plan;
  const size_t shards = placement.shards().size();
  load.resize(shards, 0);
  std::vector<HomeUse> use(shards);
  for (size_t s = 0; s < shards; ++s) use[s] = usable(static_cast<uint16_t>(s));
  const auto expert_of = [&](DispatchPair pair) {
    return ids[static_cast<size_t>(pair.token) * top_k + pair.slot];
  };

  std::vector<ExpertRows> experts;
  uint16_t largest = 0;
  for (const DispatchPair pair : pairs) largest = std::max(largest, expert_of(pair));
  std::vector<int> at(largest + size_t{1}, -1);  // of `experts`, by id
  for (const DispatchPair pair : pairs) {
    const uint16_t expert = expert_of(pair);
    if (at[expert] < 0) {
      at[expert] = static_cast<int>(experts.size());
      experts.emplace_back().expert = expert;
    }
    ++experts[at[expert]].rows;
  }
  // Those without a choice first, then the heaviest: what is light evens out what they leave.
  std::vector<ExpertRows*> order;
  for (ExpertRows& expert : experts) {
    expert.homes = usable_homes(placement, layer, expert.expert, use);
    order.push_back(&expert);
  }
  std::sort(order.begin(), order.end(), [](const ExpertRows* a, const ExpertRows* b) {
    const bool choice_a = a->homes.size() > 1, choice_b = b->homes.size() > 1;
    if (choice_a != choice_b) return choice_b;
    return a->rows != b->rows ? a->rows > b->rows : a->expert < b->expert;
  });
  for (ExpertRows* expert : order) {
    if (expert->homes.empty()) continue;
    expert->rows > kMaxUnsplitRows && expert->homes.size() > 1 ? spread(*expert, load)
                                                               : choose_home(*expert, load);
    plan.split_experts += expert->parts.size() > 1 ? 1 : 0;
  }

  std::vector<int> work_of(shards, -1);
  for (const DispatchPair pair : pairs) {
    ExpertRows& expert = experts[at[expert_of(pair)]];
    if (expert.homes.empty()) {
      plan.homeless.push_back(pair);
      continue;
    }
    while (expert.parts[expert.current].rows == 0) ++expert.current;
    Part& part = expert.parts[expert.current];
    --part.rows;
    give(plan, work_of, part.home, pair, expert.expert);
  }
  for (ShardWork& work : plan.work) work.begin.push_back(static_cast<uint32_t>(work.pairs.size()));
  std::sort(plan.work.begin(), plan.work.end(),
            [](const ShardWork& a, const ShardWork& b) { return a.shard < b.shard; });
  return plan;
}

}  // namespace conclave
