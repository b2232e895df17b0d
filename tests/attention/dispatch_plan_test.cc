#include "attention_service/core/dispatch_plan.h"

#include <gtest/gtest.h>

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
const auto kAll = [](uint16_t) { return true; };

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
  EXPECT_EQ(load, (std::vector<uint64_t>{5, 4}));
}

TEST(DispatchPlan, SpreadsOverReplicasByLoad) {
  PlacementTable table(Epoch(1), 1, 1, shards(2));
  table.add_home(0, 0, 0);
  table.add_home(0, 0, 1);
  const std::vector<uint16_t> ids(10, 0);
  std::vector<uint64_t> load = {4, 0};
  const DispatchPlan plan = plan_dispatch(table, 0, all_pairs(10, 1), ids, 1, kAll, load);
  ASSERT_EQ(plan.work.size(), 2u);
  EXPECT_EQ(plan.work[0].pairs.size(), 3u);
  EXPECT_EQ(plan.work[1].pairs.size(), 7u);
}

TEST(DispatchPlan, LeavesHomelessWhatNobodyUsableHas) {
  PlacementTable table(Epoch(1), 2, 3, shards(2));
  table.add_home(0, 0, 0);
  table.add_home(0, 1, 1);
  std::vector<uint64_t> load;
  const std::vector<uint16_t> ids = {0, 1, 2};
  const DispatchPlan plan = plan_dispatch(
      table, 0, all_pairs(1, 3), ids, 3, [](uint16_t s) { return s == 1; }, load);
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
