// The list of what happened to a cluster: each kind of event is in it, and it stays short.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

std::vector<ClusterEvent> of_kind(const Harness& h, const std::string& kind) {
  std::vector<ClusterEvent> out;
  for (const ClusterEvent& event : h.core.status().events)
    if (event.kind == kind) out.push_back(event);
  return out;
}

TEST(EventLog, AlikeOnesAreOneWithACountAndTheOldestGo) {
  EventLog log;
  log.add("lost", "a", "why", 1);
  log.add("joined", "b", "", 2);
  log.add("lost", "a", "why", 3);
  ASSERT_EQ(log.entries().size(), 2u);
  EXPECT_EQ(log.entries()[0].kind, "joined");
  EXPECT_EQ(log.entries()[1].times, 2u);
  EXPECT_EQ(log.entries()[1].at, 3);
  EXPECT_EQ(log.entries()[1].number, 3u);
  for (int i = 0; i < 1000; ++i) log.add("joined", "member-" + std::to_string(i), "", 10 + i);
  ASSERT_EQ(log.entries().size(), EventLog::kKept);
  EXPECT_EQ(log.entries().back().who, "member-999");
  for (size_t i = 1; i < log.entries().size(); ++i)
    EXPECT_LT(log.entries()[i - 1].number, log.entries()[i].number);
}

TEST(EventLog, ACrowdThatAlternatesDoesNotPushOutTheRest) {
  EventLog log;
  log.add("lost", "worker", "its process ended", 1);
  for (int i = 0; i < 10'000; ++i) log.add("refused", "member-" + std::to_string(i % 8), "too many", i);
  EXPECT_EQ(log.entries().size(), 9u);
  EXPECT_EQ(log.entries().front().kind, "lost");
}

TEST(EventLog, LongTextsAreCutBetweenCharacters) {
  EventLog log;
  std::string text;
  for (int i = 0; i < 200; ++i) text += "\xc3\xa9";  // two bytes each
  for (size_t shift = 0; shift < 2; ++shift) log.add("lost", "x", std::string(shift, 'a') + text, 1);
  for (const ClusterEvent& event : log.entries()) {
    EXPECT_LE(event.detail.size(), EventLog::kMaxText);
    EXPECT_GE(event.detail.size(), EventLog::kMaxText - 3);
    EXPECT_EQ(static_cast<unsigned char>(event.detail.back()), 0xa9u);  // a whole character
  }
}

TEST(Events, MembersComeAndGo) {
  Harness h;
  h.make_ready();
  EXPECT_EQ(of_kind(h, "joined").size(), 3u);  // worker, shard, router
  EXPECT_FALSE(of_kind(h, "placement").empty());
  h.submit(Harness::request(1, 10, 50));
  h.step(h.worker);
  h.event(MemberLost{h.worker, unavailable("its process ended")});
  ASSERT_EQ(of_kind(h, "lost").size(), 1u);
  EXPECT_EQ(of_kind(h, "lost")[0].who, "attention-101");
  EXPECT_EQ(of_kind(h, "lost")[0].detail, "its process ended");
  EXPECT_EQ(of_kind(h, "lost")[0].at, h.now);
  ASSERT_EQ(of_kind(h, "replay").size(), 1u);
  EXPECT_EQ(of_kind(h, "replay")[0].detail, "1 sequences are computed again elsewhere");
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  EXPECT_EQ(of_kind(h, "lost").size(), 2u);
}

TEST(Events, RefusalsNameTheReason) {
  Harness h;
  h.make_ready();
  Hello other = Harness::member_hello(Role::kAttention, 102);
  other.numerics_id = "k2-gpu";
  h.join(other);
  ASSERT_EQ(of_kind(h, "refused").size(), 1u);
  EXPECT_EQ(of_kind(h, "refused")[0].who, "attention-102");
  EXPECT_THAT(of_kind(h, "refused")[0].detail, HasSubstr("k2-gpu"));
}

TEST(Events, SuspicionIsToldOnceForEachSilence) {
  SchedulerOptions options;
  options.dead_after_ms = 600'000;
  Harness h(options);
  h.make_ready();
  for (int silence = 1; silence <= 2; ++silence) {
    h.advance(5 * options.lease_ms * kMillisecond);
    for (const char* who : {"attention-101", "expert-201"}) {
      uint32_t times = 0;
      for (const ClusterEvent& event : of_kind(h, "suspect")) times += event.who == who ? event.times : 0;
      EXPECT_EQ(times, static_cast<uint32_t>(silence)) << who;
    }
    h.heartbeat_all();
  }
}

TEST(Events, StallsNameTheRequestAndDrainsTheMember) {
  SchedulerOptions options;
  options.stall_report_ms = 1000;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  for (int i = 0; i < 20; ++i) {
    h.advance(options.lease_ms * kMillisecond / 3);
    h.heartbeat_all();
  }
  ASSERT_EQ(of_kind(h, "stall").size(), 1u);
  EXPECT_EQ(of_kind(h, "stall")[0].who, "00000000000000010000000000000001");
  EXPECT_THAT(of_kind(h, "stall")[0].detail, HasSubstr("worker: attention-101"));
  EXPECT_EQ(h.core.status().requests_stalled, 1u);
  h.event(DrainMember{1, Incarnation(101)});
  ASSERT_EQ(of_kind(h, "draining").size(), 1u);
  EXPECT_EQ(of_kind(h, "draining")[0].who, "attention-101");
}

TEST(Events, TheStatusHasWhatMembersSaidOfThemselves) {
  Harness h;
  Hello hello = Harness::member_hello(Role::kAttention, 101);
  hello.ops_address = "10.0.0.7:9090";
  hello.version = "0.1.0";
  hello.threads = 3;
  h.now = 5 * kSecond;
  h.join(hello);
  const StatusSnapshot status = h.core.status();
  ASSERT_EQ(status.members.size(), 1u);
  EXPECT_EQ(status.members[0].ops_address, "10.0.0.7:9090");
  EXPECT_EQ(status.members[0].version, "0.1.0");
  EXPECT_EQ(status.members[0].numerics_id, "k1-cpu");
  EXPECT_EQ(status.members[0].threads, 3u);
  EXPECT_EQ(status.members[0].joined, 5 * kSecond);
}

}  // namespace
}  // namespace conclave::scheduler
