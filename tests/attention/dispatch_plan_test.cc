#include "attention_service/core/dispatch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "libs/base/random.h"

namespace conclave {
namespace {

std::vector<ShardEndpoint> shards(uint64_t n) {
  std::vector<ShardEndpoint> out;
  for (uint64_t i = 1; i <= n; ++i) out.push_back({Incarnation(i), "s", "a"});
  return out;
}
std::vector<DispatchPair> all_pairs(uint32_t tokens, uint32_t top_k) {
  std::vector<DispatchPair> out;
  for (uint32_t t = 0; t < tokens; ++t) {
    for (uint32_t s = 0; s < top_k; ++s) out.push_back({t, s});
  }
  return out;
}
const auto kAll = [](uint16_t) { return HomeUse::kYes; };

// By one planner for all tests, as a worker has one for all layers.
template <class Usable>
DispatchPlan plan_dispatch(const PlacementTable& placement, uint32_t layer,
                           const std::vector<DispatchPair>& pairs, const std::vector<uint16_t>& ids,
                           uint32_t top_k, const Usable& usable, std::vector<uint64_t>& load) {
  static DispatchPlanner planner;
  std::vector<HomeUse> use;
  for (uint16_t s = 0; s < placement.shards().size(); ++s) use.push_back(usable(s));
  load.resize(use.size(), 0);
  return planner.plan(placement, layer, pairs, ids, top_k, use, load);
}

TEST(DispatchPlan, SendsEachTokenOncePerShardWithItsExpertsInSlotOrder) {
  const PlacementTable table = even_placement(Epoch(1), 1, 8, shards(2));  // 0..3 and 4..7
  const std::vector<uint16_t> ids = {5, 1, 4, /**/ 0, 3, 2, /**/ 7, 6, 1};
  std::vector<uint64_t> load;
  const DispatchPlan plan = plan_dispatch(table, 0, all_pairs(3, 3), ids, 3, kAll, load);
  ASSERT_EQ(plan.work.size(), 2u);
  EXPECT_TRUE(plan.homeless.empty());
  EXPECT_EQ(plan.work[0].shard, 0);
  EXPECT_EQ(plan.work[0].tokens, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(plan.work[0].begin, (std::vector<uint32_t>{0, 1, 4, 5}));
  EXPECT_EQ(plan.work[0].expert_ids, (std::vector<uint16_t>{1, 0, 3, 2, 1}));
  EXPECT_EQ(plan.work[1].shard, 1);
  EXPECT_EQ(plan.work[1].tokens, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(plan.work[1].begin, (std::vector<uint32_t>{0, 2, 4}));
  EXPECT_EQ(plan.work[1].expert_ids, (std::vector<uint16_t>{5, 4, 7, 6}));
  EXPECT_EQ(plan.work[1].pairs[1].slot, 2u);
  EXPECT_EQ(load, (std::vector<uint64_t>{5 + 4 * kExpertVisitCost, 4 + 4 * kExpertVisitCost}));
}

// `experts` experts with homes at all of `count` shards, the first named in turn.
PlacementTable replicated(uint32_t experts, uint64_t count) {
  PlacementTable table(Epoch(1), 1, experts, shards(count));
  for (uint32_t e = 0; e < experts; ++e) {
    for (uint64_t s = 0; s < count; ++s) table.add_home(0, e, static_cast<uint16_t>((e + s) % count));
  }
  return table;
}

// How many shards compute each expert, and the rows of each shard.
struct Spread {
  Spread(const DispatchPlan& plan, uint32_t experts, size_t shards) : visits(experts), rows(shards) {
    for (const ShardWork& work : plan.work) {
      std::set<uint16_t> seen(work.expert_ids.begin(), work.expert_ids.end());
      for (const uint16_t e : seen) ++visits[e];
      rows[work.shard] = work.pairs.size();
    }
  }
  std::vector<int> visits;
  std::vector<size_t> rows;
};

TEST(DispatchPlan, FewRowsOfAnExpertStayTogether) {
  const PlacementTable table = replicated(8, 3);
  std::vector<uint16_t> ids;
  for (uint32_t t = 0; t < 60; ++t) ids.push_back(static_cast<uint16_t>(t * 5 % 8));
  std::vector<uint64_t> load;
  const DispatchPlan plan = plan_dispatch(table, 0, all_pairs(60, 1), ids, 1, kAll, load);
  const Spread spread(plan, 8, 3);
  EXPECT_EQ(spread.visits, std::vector<int>(8, 1)) << "weights are read once";
  EXPECT_EQ(plan.split_experts, 0u);
  for (const size_t rows : spread.rows) EXPECT_GE(rows, 14u) << "experts are spread all the same";
}

TEST(DispatchPlan, AnExpertStaysAtItsFirstHomeUnlessAnotherHasMuchLessToDo) {
  const PlacementTable table = replicated(1, 2);
  const auto home = [&](std::vector<uint64_t> load) {
    return plan_dispatch(table, 0, all_pairs(4, 1), std::vector<uint16_t>(4, 0), 1, kAll, load).work[0].shard;
  };
  EXPECT_EQ(home({0, 0}), 0);
  EXPECT_EQ(home({kExpertVisitCost, 0}), 0);
  EXPECT_EQ(home({kExpertVisitCost + 1, 0}), 1);
  EXPECT_EQ(home({100, 200}), 0);
}

TEST(DispatchPlan, ManyRowsOfAnExpertAreSplitSoThatShardsAreLevel) {
  const PlacementTable table = replicated(1, 2);
  const std::vector<uint16_t> ids(100, 0);
  std::vector<uint64_t> load = {40, 0};
  const DispatchPlan plan = plan_dispatch(table, 0, all_pairs(100, 1), ids, 1, kAll, load);
  ASSERT_EQ(plan.work.size(), 2u);
  EXPECT_EQ(plan.split_experts, 1u);
  EXPECT_EQ(plan.work[0].pairs.size(), 30u);
  EXPECT_EQ(plan.work[1].pairs.size(), 70u);
  EXPECT_EQ(load, (std::vector<uint64_t>{40 + 30 + kExpertVisitCost, 70 + kExpertVisitCost}));
  // Rows stay in order, each goes once.
  std::set<uint32_t> tokens;
  for (const ShardWork& work : plan.work) {
    EXPECT_TRUE(std::is_sorted(work.tokens.begin(), work.tokens.end()));
    tokens.insert(work.tokens.begin(), work.tokens.end());
  }
  EXPECT_EQ(tokens.size(), 100u);
  // A part that is not worth a visit is not made.
  load = {1000, 0};
  EXPECT_EQ(plan_dispatch(table, 0, all_pairs(100, 1), ids, 1, kAll, load).work.size(), 1u);
}

TEST(DispatchPlan, NoMorePartsThanAreWorthIt) {
  const PlacementTable table = replicated(1, 8);
  for (const uint32_t rows : {1u, 32u, 33u, 64u, 65u, 300u}) {
    const std::vector<uint16_t> ids(rows, 0);
    std::vector<uint64_t> load;
    const DispatchPlan plan = plan_dispatch(table, 0, all_pairs(rows, 1), ids, 1, kAll, load);
    EXPECT_EQ(plan.work.size(), std::min<size_t>(8, (rows + 31) / 32)) << rows;
    for (const ShardWork& work : plan.work) EXPECT_GE(work.pairs.size(), std::min(rows, 16u)) << rows;
  }
}

TEST(DispatchPlan, OthersAreAskedBeforeASlowHome) {
  const PlacementTable table = replicated(2, 2);
  const std::vector<uint16_t> ids = {0, 1};
  const auto ask = [&](HomeUse first, HomeUse second) {
    std::vector<uint64_t> load;
    return plan_dispatch(
        table, 0, all_pairs(1, 2), ids, 2, [&](uint16_t s) { return s == 0 ? first : second; }, load);
  };
  DispatchPlan plan = ask(HomeUse::kSlow, HomeUse::kYes);
  ASSERT_EQ(plan.work.size(), 1u);
  EXPECT_EQ(plan.work[0].shard, 1);
  plan = ask(HomeUse::kSlow, HomeUse::kNo);
  ASSERT_EQ(plan.work.size(), 1u);
  EXPECT_EQ(plan.work[0].shard, 0) << "better than nobody";
  EXPECT_EQ(ask(HomeUse::kSlow, HomeUse::kSlow).work.size(), 2u);
  EXPECT_EQ(ask(HomeUse::kNo, HomeUse::kNo).homeless.size(), 2u);
}

// Whatever the homes, loads and failures: each pair goes exactly once, to a home that may be asked.
TEST(DispatchPlan, EveryPairGoesOnceToAUsableHomeOfItsExpert) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SplitMix64 random(seed);
    const auto count = 1 + random.below(5);
    const auto experts = static_cast<uint32_t>(1 + random.below(12));
    PlacementTable table(Epoch(1), 1, experts, shards(count));
    for (uint32_t e = 0; e < experts; ++e) {
      for (uint16_t s = 0; s < count; ++s) {
        if (random.chance(0.6)) table.add_home(0, e, s);
      }
    }
    const auto tokens = static_cast<uint32_t>(1 + random.below(200));
    std::vector<uint16_t> ids;
    for (uint32_t i = 0; i < tokens * 2; ++i) ids.push_back(static_cast<uint16_t>(random.below(experts)));
    std::vector<HomeUse> use;
    std::vector<uint64_t> load;
    for (uint64_t s = 0; s < count; ++s) {
      use.push_back(static_cast<HomeUse>(random.below(3)));
      load.push_back(random.below(300));
    }
    const DispatchPlan plan = plan_dispatch(
        table, 0, all_pairs(tokens, 2), ids, 2, [&](uint16_t s) { return use[s]; }, load);
    std::set<std::pair<uint32_t, uint32_t>> seen;
    for (const ShardWork& work : plan.work) {
      ASSERT_EQ(work.begin.size(), work.tokens.size() + 1);
      for (size_t i = 0; i < work.pairs.size(); ++i) {
        const DispatchPair pair = work.pairs[i];
        EXPECT_TRUE(seen.emplace(pair.token, pair.slot).second);
        const uint16_t expert = ids[pair.token * 2 + pair.slot];
        EXPECT_EQ(work.expert_ids[i], expert);
        const auto& homes = table.homes(0, expert);
        EXPECT_TRUE(std::find(homes.begin(), homes.end(), work.shard) != homes.end());
        EXPECT_NE(use[work.shard], HomeUse::kNo);
      }
    }
    for (const DispatchPair pair : plan.homeless) {
      EXPECT_TRUE(seen.emplace(pair.token, pair.slot).second);
      for (const uint16_t home : table.homes(0, ids[pair.token * 2 + pair.slot]))
        EXPECT_EQ(use[home], HomeUse::kNo);
    }
    EXPECT_EQ(seen.size(), tokens * 2u) << seed;
  }
}

TEST(DispatchPlan, LeavesHomelessWhatNobodyUsableHas) {
  PlacementTable table(Epoch(1), 2, 3, shards(2));
  table.add_home(0, 0, 0);
  table.add_home(0, 1, 1);
  std::vector<uint64_t> load;
  const std::vector<uint16_t> ids = {0, 1, 2};
  const DispatchPlan plan = plan_dispatch(
      table, 0, all_pairs(1, 3), ids, 3, [](uint16_t s) { return s == 1 ? HomeUse::kYes : HomeUse::kNo; },
      load);
  ASSERT_EQ(plan.work.size(), 1u);
  EXPECT_EQ(plan.work[0].expert_ids, (std::vector<uint16_t>{1}));
  ASSERT_EQ(plan.homeless.size(), 2u);
  EXPECT_EQ(plan.homeless[0].slot, 0u);
  EXPECT_EQ(plan.homeless[1].slot, 2u);
  // Before the first placement there is no table at all.
  EXPECT_EQ(plan_dispatch(PlacementTable(), 0, all_pairs(1, 3), ids, 3, kAll, load).homeless.size(), 3u);
}

}  // namespace
}  // namespace conclave
