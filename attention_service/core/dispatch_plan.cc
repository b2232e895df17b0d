#include "attention_service/core/dispatch_plan.h"

#include <algorithm>

namespace conclave {

DispatchPlan plan_dispatch(const PlacementTable& placement, uint32_t layer,
                           std::span<const DispatchPair> pairs, std::span<const uint16_t> ids, uint32_t top_k,
                           const std::function<bool(uint16_t)>& usable, std::vector<uint64_t>& load) {
  DispatchPlan plan;
  const size_t shards = placement.shards().size();
  load.resize(shards, 0);
  std::vector<char> may_ask(shards);
  for (size_t s = 0; s < shards; ++s) may_ask[s] = usable(static_cast<uint16_t>(s)) ? 1 : 0;
  std::vector<int> work_of(shards, -1);

  for (const DispatchPair pair : pairs) {
    const uint16_t expert = ids[static_cast<size_t>(pair.token) * top_k + pair.slot];
    int home = -1;
    if (layer < placement.layers() && expert < placement.experts()) {
      for (uint16_t candidate : placement.homes(layer, expert)) {
        if (may_ask[candidate] && (home < 0 || load[candidate] < load[home])) home = candidate;
      }
    }
    if (home < 0) {
      plan.homeless.push_back(pair);
      continue;
    }
    ++load[home];
    if (work_of[home] < 0) {
      work_of[home] = static_cast<int>(plan.work.size());
      plan.work.emplace_back().shard = static_cast<uint16_t>(home);
    }
    ShardWork& work = plan.work[work_of[home]];
    if (work.tokens.empty() || work.tokens.back() != pair.token) {
      work.tokens.push_back(pair.token);
      work.begin.push_back(static_cast<uint32_t>(work.pairs.size()));
    }
    work.pairs.push_back(pair);
    work.expert_ids.push_back(expert);
  }
  for (ShardWork& work : plan.work) work.begin.push_back(static_cast<uint32_t>(work.pairs.size()));
  std::sort(plan.work.begin(), plan.work.end(),
            [](const ShardWork& a, const ShardWork& b) { return a.shard < b.shard; });
  return plan;
}

}  // namespace conclave
