// The scheduler's figures of load and of time in the queue, as metrics show them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

// 2 layers of 8 experts; index = layer * 8 + expert.
ExpertLoad load(std::vector<std::pair<uint32_t, uint64_t>> entries) {
  ExpertLoad report;
  for (const auto& [index, count] : entries) report.entries.push_back({index, count});
  return report;
}

TEST(LoadFigures, MaxOverMeanAndBusyShareByLayer) {
  Harness h;
  h.make_ready();
  EXPECT_EQ(h.core.metrics().load_gauges, nullptr);
  const SessionId shard = h.sessions[Incarnation(201)];
  // Layer 0: one expert has half of it all. Layer 1: even.
  std::vector<std::pair<uint32_t, uint64_t>> entries;
  for (uint32_t e = 0; e < 8; ++e) entries.emplace_back(e, e == 3 ? 700 : 100);
  for (uint32_t e = 0; e < 8; ++e) entries.emplace_back(8 + e, 50);
  h.event(MemberMessage{shard, load(entries)});
  const auto gauges = h.core.metrics().load_gauges;
  ASSERT_NE(gauges, nullptr);
  ASSERT_EQ(gauges->layers.size(), 2u);
  EXPECT_DOUBLE_EQ(gauges->layers[0].busiest_expert, 4.0);  // 700 over 1400 / 8
  EXPECT_DOUBLE_EQ(gauges->layers[1].busiest_expert, 1.0);
  EXPECT_DOUBLE_EQ(gauges->layers[0].busy_share, 1.0);  // eight of eight
  EXPECT_DOUBLE_EQ(gauges->layers[0].busiest_shard, 1.0) << "there is one";
  EXPECT_NEAR(gauges->layers[0].load / gauges->layers[1].load, 1400.0 / 400.0, 1e-9);
  ASSERT_EQ(gauges->experts.size(), 16u);
  EXPECT_EQ(gauges->experts[0].layer, 0u);
  EXPECT_EQ(gauges->experts[0].expert, 3u);
  EXPECT_EQ(gauges->experts.back().layer, 1u);
}

TEST(LoadFigures, AreLookedAtOnceASecondAndListABoundedNumber) {
  Harness h;
  h.make_ready();
  const SessionId shard = h.sessions[Incarnation(201)];
  h.event(MemberMessage{shard, load({{0, 100}})});
  const auto first = h.core.metrics().load_gauges;
  h.advance(100 * kMillisecond);
  h.event(MemberMessage{shard, load({{1, 100}})});
  EXPECT_EQ(h.core.metrics().load_gauges, first);
  h.heartbeat_all();
  h.advance(400 * kMillisecond);
  h.heartbeat_all();
  h.advance(400 * kMillisecond);
  h.heartbeat_all();
  h.advance(200 * kMillisecond);
  h.event(MemberMessage{shard, load({{1, 100}})});
  const auto second = h.core.metrics().load_gauges;
  ASSERT_NE(second, first);
  EXPECT_EQ(second->experts.size(), 2u) << "only those that were asked for";
  EXPECT_EQ(second->experts[0].expert, 1u);
}

TEST(LoadFigures, MembersAreNamedWhileTheyAreHere) {
  Harness h;
  h.make_ready();
  const auto names = [&] {
    std::vector<std::string> out;
    for (const MemberGauge& member : *h.core.metrics().member_gauges) out.push_back(member.name);
    return out;
  };
  EXPECT_THAT(names(), ::testing::UnorderedElementsAre("attention-101", "expert-201"));
  h.event(MemberLost{h.worker, unavailable("killed")});
  EXPECT_THAT(names(), ::testing::ElementsAre("expert-201"));
}

TEST(LoadFigures, TimeInTheQueueCountsOnceARequest) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 10, 3));  // starts at once
  SessionId first = h.worker;
  h.run_all();
  EXPECT_EQ(h.core.metrics().queue_times.count(), 1u);
  EXPECT_EQ(h.core.metrics().queue_times.sum(), 0);
  h.event(MemberLost{first, unavailable("killed")});
  AcceptedRequest waiting = Harness::request(2, 10, 3);
  waiting.choices = 3;
  h.submit(waiting);
  h.heartbeat_all();
  h.advance(300 * kMillisecond);
  h.heartbeat_all();
  h.worker = h.join_worker(102);
  h.run_all();
  ASSERT_EQ(h.finish(2), FinishReason::kLength);
  EXPECT_EQ(h.core.metrics().queue_times.count(), 2u) << "its choices wait together";
  EXPECT_EQ(h.core.metrics().queue_times.sum(), 300 * kMillisecond);
}

}  // namespace
}  // namespace conclave::scheduler
