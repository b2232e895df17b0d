// Requests without progress are reported once, with what they wait for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

uint32_t stalled(const Harness& h, StallHop hop) {
  return h.core.metrics().requests_stalled[static_cast<size_t>(hop)];
}
uint64_t reported(const Harness& h, StallHop hop) {
  return h.core.metrics().stalls_reported[static_cast<size_t>(hop)];
}

SchedulerOptions ten_seconds() {
  SchedulerOptions options;
  options.stall_report_ms = 10'000;
  return options;
}

TEST(Stalls, AStepOwedIsTheWorkers) {
  Harness h(ten_seconds());
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  h.step(h.worker);
  h.pass(9 * kSecond);
  EXPECT_TRUE(h.stalls.empty());
  h.pass(4 * kSecond);
  ASSERT_EQ(h.stalls.size(), 1u);
  EXPECT_EQ(h.stalls[0].request, (RequestId{1, 1}));
  EXPECT_EQ(h.stalls[0].hop, StallHop::kWorker);
  EXPECT_EQ(h.stalls[0].detail, "attention-101");
  EXPECT_GE(h.stalls[0].stalled, 10 * kSecond);
  EXPECT_EQ(stalled(h, StallHop::kWorker), 1u);
  h.pass(30 * kSecond);
  EXPECT_EQ(h.stalls.size(), 1u);  // once
  // Another stall is another report.
  h.step(h.worker);
  h.pass(5 * kSecond);
  EXPECT_EQ(stalled(h, StallHop::kWorker), 0u);
  h.pass(10 * kSecond);
  EXPECT_EQ(h.stalls.size(), 2u);
  EXPECT_EQ(reported(h, StallHop::kWorker), 2u);
  h.run_all();
  h.pass(5 * kSecond);
  EXPECT_EQ(stalled(h, StallHop::kWorker), 0u);
}

TEST(Stalls, AShardThatIsSilentIsNamed) {
  SchedulerOptions options = ten_seconds();
  options.dead_after_ms = 100'000;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  h.pass(13 * kSecond, h.sessions[Incarnation(201)]);
  ASSERT_EQ(h.stalls.size(), 1u);
  EXPECT_EQ(h.stalls[0].hop, StallHop::kShard);
  EXPECT_EQ(h.stalls[0].detail, "expert-201");
}

TEST(Stalls, AShardThatAWorkerComplainsAboutIsNamed) {
  Harness h(ten_seconds());
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  h.pass(5 * kSecond);
  h.event(MemberMessage{h.worker, PeerTrouble{Incarnation(201), "no reply"}});
  h.pass(8 * kSecond);
  ASSERT_EQ(h.stalls.size(), 1u);
  EXPECT_EQ(h.stalls[0].hop, StallHop::kShard);
}

TEST(Stalls, WithoutAHomeForEveryExpertItIsThePlacement) {
  Harness h(ten_seconds());
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  h.step(h.worker);
  const SessionId shard = h.sessions[Incarnation(201)];
  h.event(MemberLost{shard, unavailable("killed")});
  h.closed[shard] = unavailable("killed");
  h.pass(13 * kSecond);
  ASSERT_EQ(h.stalls.size(), 1u);
  EXPECT_EQ(h.stalls[0].hop, StallHop::kPlacement);
  EXPECT_THAT(h.stalls[0].detail, HasSubstr("shard"));
  // Something else it waits for is said again.
  h.join_shard(202);
  h.step(h.worker);
  h.pass(13 * kSecond);
  EXPECT_EQ(h.stalls.back().hop, StallHop::kWorker);
}

TEST(Stalls, WithoutAWorkerThatTakesWorkItIsThat) {
  Harness h(ten_seconds());
  h.make_ready();
  h.event(DrainMember{1, Incarnation(101)});
  h.submit(Harness::request(1, 10, 50));
  h.pass(13 * kSecond);
  ASSERT_EQ(h.stalls.size(), 1u);
  EXPECT_EQ(h.stalls[0].hop, StallHop::kNoWorker);
}

TEST(Stalls, RoomForTheFirstAndTurnForThoseBehindIt) {
  SchedulerOptions options = ten_seconds();
  options.preemption = false;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 10, 900));  // nearly all of 64 pages
  h.submit(Harness::request(2, 10, 500));
  h.submit(Harness::request(3, 10, 500));
  const Nanos beat = 100 * kMillisecond;
  for (Nanos done = 0; done < 13 * kSecond; done += beat) {
    h.advance(beat);
    h.heartbeat_all();
    h.step(h.worker);  // the first one goes on
  }
  ASSERT_EQ(h.stalls.size(), 2u);
  EXPECT_EQ(h.stalls[0].request, (RequestId{1, 2}));
  EXPECT_EQ(h.stalls[0].hop, StallHop::kRoom);
  EXPECT_EQ(h.stalls[1].hop, StallHop::kTurn);
  EXPECT_EQ(stalled(h, StallHop::kWorker), 0u);
}

TEST(Stalls, ALongPromptMakesProgressByItsSteps) {
  SchedulerOptions options = ten_seconds();
  options.prefill_chunk_tokens = 16;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 900, 5));
  for (int i = 0; i < 20; ++i) {
    h.pass(3 * kSecond);
    h.step(h.worker);
  }
  EXPECT_TRUE(h.tokens(1).empty());
  EXPECT_TRUE(h.stalls.empty());
  h.pass(13 * kSecond);
  EXPECT_EQ(h.stalls.size(), 1u);
}

TEST(Stalls, TheSchedulersOwnAbsenceIsNobodysStall) {
  Harness h(ten_seconds());
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  h.step(h.worker);
  h.pass(kSecond);
  h.now += 60 * kSecond;  // it was stopped
  h.event(Tick{});
  h.pass(8 * kSecond);
  EXPECT_TRUE(h.stalls.empty());
  h.pass(5 * kSecond);
  EXPECT_EQ(h.stalls.size(), 1u);
}

TEST(Stalls, NoneIsLookedForWithoutRequestsOrWhenOff) {
  Harness h(ten_seconds());
  h.make_ready();
  h.submit(Harness::request(1, 10, 2));
  h.run_all();
  h.pass(5 * kSecond);
  EXPECT_EQ(h.core.metrics().requests_stalled, PerStallHop<uint32_t>{});
  SchedulerOptions off;
  off.stall_report_ms = 0;
  Harness quiet(off);
  quiet.make_ready();
  quiet.submit(Harness::request(1, 10, 50));
  quiet.pass(100 * kSecond);
  EXPECT_TRUE(quiet.stalls.empty());
}

}  // namespace
}  // namespace conclave::scheduler
