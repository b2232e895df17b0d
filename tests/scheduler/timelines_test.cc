// Timelines of followed requests: what is in them, that nobody else has one, and their bounds.
#include "scheduler/core/timelines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using Kind = TimelineMarkKind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

AcceptedRequest followed(uint64_t id, uint32_t prompt, uint32_t max_tokens) {
  AcceptedRequest r = Harness::request(id, prompt, max_tokens);
  r.trace = {7, id, 9, true};
  return r;
}

SchedulerTimeline timeline(const Harness& h, uint64_t id) {
  auto found = h.core.timeline(RequestId{1, id});
  EXPECT_TRUE(found.ok()) << found.status();
  return found.ok() ? *std::move(found) : SchedulerTimeline();
}

std::vector<Kind> kinds(const SchedulerTimeline& timeline) {
  std::vector<Kind> out;
  for (const TimelineMark& mark : timeline.marks) out.push_back(mark.kind);
  return out;
}

// What a real worker would have measured: all of the time since the plan but a millisecond on the way.
bool step(Harness& h, Nanos wall) {
  auto& side = h.workers.at(h.worker);
  if (side.plans.empty()) return false;
  const BatchPlan plan = std::move(side.plans.front());
  side.plans.pop_front();
  StepResult result = side.model.run(plan, side.plans);
  if (plan.timed) {
    result.timing.emplace();
    result.timing->wall_ns = wall;
    result.timing->attention_ns = wall / 2;
    result.timing->shards = {{Incarnation(201), 2, 8, wall / 4, wall / 8, wall / 16}};
  }
  h.now += wall + kMillisecond;
  h.event(MemberMessage{h.worker, std::move(result)});
  return true;
}

TEST(Timelines, HasEveryPhaseAndStepOfAFollowedRequest) {
  SchedulerOptions options;
  options.prefill_chunk_tokens = 8;
  Harness h(options);
  h.make_ready();
  const TimePoint arrival = h.now;
  h.submit(followed(1, 20, 3));
  while (step(h, 10 * kMillisecond)) {
  }
  ASSERT_EQ(h.finish(1), FinishReason::kLength);
  h.now += kSecond;
  h.event(Tick{});
  const SchedulerTimeline seen = timeline(h, 1);
  EXPECT_EQ(seen.age, h.now - arrival);
  EXPECT_TRUE(seen.ended);
  EXPECT_EQ(seen.prompt_tokens, 20u);
  EXPECT_EQ(seen.trace.trace_lo, 1u);
  EXPECT_THAT(kinds(seen), ElementsAre(Kind::kAccepted, Kind::kStarted, Kind::kEnded));
  EXPECT_EQ(seen.marks[0].at, 0);
  EXPECT_EQ(seen.marks[1].detail, "on attention-101, 0 of 20 tokens cached");
  EXPECT_EQ(seen.marks[2].detail, "length");
  // 8 + 8 + 4 positions of the prompt, then two decodes: the last token's own position is never computed.
  std::vector<std::pair<uint32_t, uint32_t>> slices;
  Nanos before = 0;
  for (const TimelineStep& one : seen.steps) {
    slices.emplace_back(one.start, one.count);
    EXPECT_EQ(one.worker, Incarnation(101));
    EXPECT_EQ(one.sampled, one.start + one.count >= 20);
    ASSERT_NE(one.timing, nullptr);
    EXPECT_EQ(one.timing->wall_ns, 10 * kMillisecond);
    EXPECT_LE(one.planned, one.reported - one.timing->wall_ns)
        << "a step lies between its plan and its result";
    EXPECT_GT(one.reported, before);
    before = one.reported;
  }
  EXPECT_THAT(slices, ElementsAre(std::pair(0u, 8u), std::pair(8u, 8u), std::pair(16u, 4u),
                                  std::pair(20u, 1u), std::pair(21u, 1u)));
  ASSERT_EQ(seen.members.size(), 2u);
  EXPECT_EQ(seen.members[0].name, "attention-101");
  EXPECT_EQ(seen.members[1].name, "expert-201");
  EXPECT_EQ(h.core.metrics().timelines_opened, 1u);
}

TEST(Timelines, OthersAreNeitherTimedNorKept) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 10, 5));
  ASSERT_FALSE(h.workers.at(h.worker).plans.empty());
  for (const BatchPlan& plan : h.workers.at(h.worker).plans) EXPECT_FALSE(plan.timed);
  h.run_all();
  EXPECT_EQ(h.core.timeline(RequestId{1, 1}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(h.core.metrics().timelines, 0u);
  // A step that computes for one that is followed is timed, whoever else is in it.
  h.submit(Harness::request(2, 10, 5));
  h.submit(followed(3, 10, 5));
  h.step(h.worker);  // two steps are in flight already
  bool timed = false;
  for (const BatchPlan& plan : h.workers.at(h.worker).plans) timed = timed || plan.timed;
  EXPECT_TRUE(timed);
  h.run_all();
  EXPECT_GT(timeline(h, 3).steps.size(), 3u);
  for (const TimelineStep& one : timeline(h, 3).steps)
    EXPECT_EQ(one.timing, nullptr) << "its worker is an old one";
}

TEST(Timelines, PreemptionReplayMoveAndStallAreMarked) {
  SchedulerOptions options;
  options.stall_report_ms = 10'000;
  options.admission_reserve_tokens = 0;
  Harness h(options);
  h.worker = h.join_worker(101, 4);  // pages
  h.join_shard(201);
  h.gateway = h.join_gateway();
  h.submit(Harness::request(1, 16, 40));
  h.submit(followed(2, 16, 40));
  h.run_all();
  ASSERT_EQ(h.finish(2), FinishReason::kLength);
  auto marks = kinds(timeline(h, 2));
  EXPECT_THAT(marks, ::testing::Contains(Kind::kPreempted)) << "two of 56 tokens do not fit 4 pages";
  EXPECT_EQ(std::count(marks.begin(), marks.end(), Kind::kStarted),
            1 + std::count(marks.begin(), marks.end(), Kind::kPreempted));
  EXPECT_EQ(marks.back(), Kind::kEnded);

  h.submit(followed(3, 10, 30));
  h.step(h.worker);
  const SessionId second = h.join_worker(102);
  h.event(MemberLost{h.worker, unavailable("killed")});
  h.worker = second;
  SchedulerTimeline seen = timeline(h, 3);
  EXPECT_THAT(kinds(seen), ElementsAre(Kind::kAccepted, Kind::kStarted, Kind::kReplayed, Kind::kStarted));
  EXPECT_EQ(seen.marks[2].detail, "attention-101 was lost");
  EXPECT_THAT(seen.marks[3].detail, HasSubstr("on attention-102"));

  const SessionId third = h.join_worker(103);
  h.event(DrainMember{1, Incarnation(102)});
  EXPECT_THAT(kinds(timeline(h, 3)), ::testing::Contains(Kind::kMoved));
  h.worker = third;
  h.run_all();
  EXPECT_EQ(h.finish(3), FinishReason::kLength);

  h.submit(followed(4, 10, 30));
  for (Nanos passed = 0; passed < 14 * kSecond; passed += 100 * kMillisecond) {
    h.advance(100 * kMillisecond);
    h.heartbeat_all();
  }
  seen = timeline(h, 4);
  ASSERT_THAT(kinds(seen), ::testing::Contains(Kind::kStalled));
  EXPECT_THAT(seen.marks.back().detail, HasSubstr("attention-103"));
  h.event(Cancel{h.gateway, RequestId{1, 4}});
  seen = timeline(h, 4);
  EXPECT_EQ(seen.marks.back().detail, "cancelled");
  EXPECT_TRUE(seen.ended);
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Timelines, ARouterThatComesBackAndOneThatTakesOver) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = followed(1, 10, 30);
  r.router_context = "context";
  h.submit(r);
  h.step(h.worker);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  h.gateway = h.join_gateway();
  h.submit(r);
  const SessionId other = h.join_gateway(901);
  h.event(Adopt{other, RequestId{1, 1}, ""});
  EXPECT_EQ(h.gateways[other].adopt_replies[RequestId(1, 1)].at(0).adopted->request.trace.trace_lo, 1u);
  h.event(Release{other, RequestId{1, 1}, true});
  EXPECT_THAT(kinds(timeline(h, 1)),
              ElementsAre(Kind::kAccepted, Kind::kStarted, Kind::kDetached, Kind::kReattached, Kind::kAdopted,
                          Kind::kReleased, Kind::kEnded));
}

TEST(Timelines, WhatWasDeliveredBeforeIsSaid) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = followed(1, 10, 5);
  r.resubmitted = true;
  r.delivered = {{{1, 2}, false}};
  h.submit(r);
  EXPECT_EQ(timeline(h, 1).marks[0].detail, "again, with 2 tokens delivered");
}

TEST(Timelines, EveryChoiceHasItsSteps) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = followed(1, 40, 4);
  r.choices = 3;
  h.submit(r);
  while (step(h, kMillisecond)) {
  }
  std::map<uint32_t, int> samples;
  for (const TimelineStep& one : timeline(h, 1).steps) samples[one.choice] += one.sampled;
  EXPECT_THAT(samples, ElementsAre(std::pair(0u, 4), std::pair(1u, 4), std::pair(2u, 4)));
}

TEST(Timelines, BoundsOfOneRequest) {
  Timeline one(RequestId{1, 1}, {}, 5, 6, 100);
  for (uint32_t i = 0; i < 20; ++i) {
    TimelineStep step;
    step.start = i;
    one.add(step, 100, 200 + i);
  }
  SchedulerTimeline seen = one.snapshot(1000);
  std::vector<uint32_t> starts;
  for (const TimelineStep& step : seen.steps) starts.push_back(step.start);
  EXPECT_THAT(starts, ElementsAre(0u, 1u, 2u, 17u, 18u, 19u));
  EXPECT_EQ(seen.dropped_steps, 14u);
  EXPECT_EQ(seen.first_steps, 3u);
  for (int i = 0; i < 1000; ++i) one.mark(Kind::kStalled, 0, std::string(5000, 'x'), 300);
  one.mark(Kind::kEnded, 0, "stop", 400);
  for (uint64_t i = 1; i < 1000; ++i) one.name(Incarnation(i), "m");
  seen = one.snapshot(1000);
  EXPECT_EQ(seen.marks.size(), kMaxTimelineMarks);
  EXPECT_EQ(seen.marks.back().kind, Kind::kEnded);
  EXPECT_EQ(seen.marks.front().detail.size(), kMaxTimelineDetail);
  EXPECT_EQ(seen.dropped_marks, 1001 - kMaxTimelineMarks);
  EXPECT_EQ(seen.members.size(), kMaxTimelineMembers);
}

TEST(Timelines, BoundOfRequestsKeepsTheOpenOnesAndTheLast) {
  TimelineBook book({3, 4});
  const auto open = [&](uint64_t id) { return book.open(RequestId{1, id}, {}, 1, 0); };
  const auto a = open(1), b = open(2), c = open(3);
  EXPECT_EQ(open(4), nullptr) << "all are open";
  EXPECT_EQ(book.refused(), 1u);
  b->end();
  const auto d = open(4);
  ASSERT_NE(d, nullptr);
  EXPECT_EQ(book.find(RequestId{1, 2}), nullptr) << "the one that had ended made room";
  EXPECT_NE(book.find(RequestId{1, 1}), nullptr);
  EXPECT_EQ(book.size(), 3u);
  const auto again = open(1);
  EXPECT_EQ(book.find(RequestId{1, 1}), again.get());
  EXPECT_EQ(book.size(), 3u);
  a->mark(Kind::kEnded, 0, "", 5);  // whoever still has the old one may go on
  TimelineBook none({0, 4});
  EXPECT_EQ(none.open(RequestId{1, 1}, {}, 1, 0), nullptr);
}

TEST(Timelines, ManyMoreThanThereIsRoomFor) {
  SchedulerOptions options;
  options.max_timelines = 4;
  options.max_timeline_steps = 2;
  Harness h(options);
  h.make_ready();
  for (uint64_t id = 1; id <= 40; ++id) h.submit(followed(id, 10, 5));
  h.run_all();
  const SchedulerMetrics m = h.core.metrics();
  EXPECT_EQ(m.timelines, 4u);
  EXPECT_EQ(m.timelines_opened + m.timelines_refused, 40u);
  EXPECT_GT(m.timelines_refused, 0u);
  EXPECT_EQ(timeline(h, 1).steps.size(), 2u);
  EXPECT_TRUE(h.core.audit().ok());
}

}  // namespace
}  // namespace conclave::scheduler
