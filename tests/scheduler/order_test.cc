// Who starts next, who gives way, who may queue, and what choices of one request share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scheduler/core/step_time.h"
#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

SchedulerOptions one_at_a_time() {
  SchedulerOptions options;
  options.max_running_requests = 1;
  return options;
}

// Ready, with request 1 running for long, so that what is submitted next waits.
void occupy(Harness& h) {
  h.make_ready();
  h.submit(Harness::request(1, 4, 40));
}

AcceptedRequest request(uint64_t id, int32_t priority, const std::string& tenant = "",
                        Nanos time_left = 600 * kSecond) {
  AcceptedRequest r = Harness::request(id, 4, 4);
  r.priority = priority;
  r.tenant = tenant;
  r.time_left = time_left;
  return r;
}

// Ids in the order in which they ended; with one at a time, that in which they started.
std::vector<uint64_t> order(Harness& h) {
  h.run_all();
  std::vector<uint64_t> ids;
  for (const TokenEvent& event : h.gateways[h.gateway].events) {
    if (event.finish != FinishReason::kNone) ids.push_back(event.request.lo);
  }
  return ids;
}

TEST(Order, TheLowerBandGoesFirstThenWhoIsDueFirstThenWhoCameFirst) {
  Harness h(one_at_a_time());
  occupy(h);
  h.submit(request(2, 1));
  h.submit(request(3, 0));
  h.submit(request(4, 0));
  h.submit(request(5, 0, "", 10 * kSecond));
  h.submit(request(6, -1));
  EXPECT_THAT(order(h), ElementsAre(1, 6, 5, 3, 4, 2));
}

TEST(Order, WaitingRaisesARequestAboveLaterOnesButNotAboveTheMostUrgentBand) {
  SchedulerOptions options = one_at_a_time();
  options.band_aging_ms = 1000;
  options.lease_ms = options.dead_after_ms = options.dead_after_trouble_ms = 60'000;
  Harness h(options);
  occupy(h);
  h.submit(request(2, 2));
  h.submit(request(3, 0));
  h.advance(1500 * kMillisecond);
  h.submit(request(4, 1));  // 2 has risen to band 1 and came first
  h.submit(request(5, 0));
  EXPECT_THAT(order(h), ElementsAre(1, 3, 5, 2, 4));
}

TEST(Order, NobodyStarvesUnderASteadyLoadOfMoreUrgentOnes) {
  SchedulerOptions options = one_at_a_time();
  options.band_aging_ms = 1000;
  options.lease_ms = options.dead_after_ms = options.dead_after_trouble_ms = 600'000;
  Harness h(options);
  h.make_ready();
  uint64_t id = 1;
  h.submit(request(id++, 0));
  h.submit(request(id++, 0));
  h.submit(request(1000, 3));
  while (h.finish(1000) == FinishReason::kNone && id < 500) {
    h.advance(20 * kMillisecond);
    for (int i = 0; i < 2; ++i) h.submit(request(id++, 0));
    for (int i = 0; i < 5; ++i) h.step(h.worker);  // a good request's worth
  }
  EXPECT_EQ(h.finish(1000), FinishReason::kLength);
  EXPECT_GT(id, 100u) << "it did not wait at all: the test shows nothing";
}

TEST(Order, TenantsTakeTurnsByTokensServedAndWeight) {
  SchedulerOptions options = one_at_a_time();
  options.tenant_weights = {{"heavy", 3}};
  Harness h(options);
  occupy(h);
  for (uint64_t id = 10; id < 30; ++id) h.submit(request(id, 0, "heavy"));
  for (uint64_t id = 30; id < 50; ++id) h.submit(request(id, 0, "light"));
  const std::vector<uint64_t> ids = order(h);
  const auto heavy = std::count_if(ids.begin() + 1, ids.begin() + 17, [](uint64_t id) { return id < 30; });
  EXPECT_EQ(heavy, 12) << "of the first 16";
}

TEST(Order, IdlingEarnsATenantNothing) {
  Harness h(one_at_a_time());
  occupy(h);
  for (uint64_t id = 10; id < 30; ++id) h.submit(request(id, 0, "busy"));
  for (int i = 0; i < 45 + 5 * 10; ++i) h.step(h.worker);  // some ten of them
  const size_t before = h.gateways[h.gateway].events.size();
  for (uint64_t id = 30; id < 40; ++id) h.submit(request(id, 0, "back"));
  h.run_all();
  std::vector<uint64_t> ids;
  for (size_t i = before; i < h.gateways[h.gateway].events.size(); ++i) {
    const TokenEvent& event = h.gateways[h.gateway].events[i];
    if (event.finish != FinishReason::kNone) ids.push_back(event.request.lo);
  }
  const auto back = std::count_if(ids.begin(), ids.begin() + 8, [](uint64_t id) { return id >= 30; });
  EXPECT_GE(back, 3);
  EXPECT_LE(back, 5);
}

// --- preemption

// Requests whose answers outgrow the pool together.
struct Tight : Harness {
  explicit Tight(uint32_t pages, uint32_t reserve = 0) : Harness(tight(reserve)) {
    worker = join_worker(101, pages);
    join_shard(201);
    gateway = join_gateway();
  }
  static SchedulerOptions tight(uint32_t reserve) {
    SchedulerOptions options;
    options.admission_reserve_tokens = reserve;
    return options;
  }
  void expect_all(uint64_t count, uint32_t prompt, uint32_t tokens) {
    for (uint64_t id = 1; id <= count; ++id) {
      const AcceptedRequest r = request(id, prompt, tokens);
      EXPECT_EQ(this->tokens(id), oracle_answer(r.prompt, r.sampling)) << id;
      EXPECT_EQ(finish(id), FinishReason::kLength) << id;
    }
    EXPECT_EQ(workers[worker].model.breach(), "");
    EXPECT_EQ(core.metrics().kv_blocks_used, 0u);
    EXPECT_EQ(core.metrics().kv_blocks_reserved, 0u);
  }
};

TEST(Preemption, WhatOutgrowsThePoolEndsWithTheSameTokens) {
  for (const uint32_t pages : {4u, 5u, 7u, 10u, 16u}) {
    SCOPED_TRACE(pages);
    Tight h(pages);
    for (uint64_t id = 1; id <= 8; ++id) h.submit(Harness::request(id, 10, 50));  // 4 pages each
    h.run_all();
    h.expect_all(8, 10, 50);
    EXPECT_GT(h.core.metrics().sequences_preempted, pages < 5 ? 0u : 1u);
  }
}

TEST(Preemption, TheFirstIsNeverPreemptedAndTheLastOneIs) {
  Tight h(8);
  for (uint64_t id = 1; id <= 4; ++id) h.submit(Harness::request(id, 10, 60));
  std::map<RequestId, int> starts;
  for (int i = 0; i < 2000; ++i) {
    if (h.workers[h.worker].plans.empty()) break;
    for (const SequenceStart& start : h.workers[h.worker].plans.front().starts) ++starts[start.request];
    h.step(h.worker);
  }
  h.expect_all(4, 10, 60);
  EXPECT_EQ((starts[RequestId{1, 1}]), 1);
  EXPECT_GT((starts[RequestId{1, 4}]), 1);
}

TEST(Preemption, TheLessUrgentBandGivesWayWhateverItsAge) {
  Tight h(8);
  AcceptedRequest old = Harness::request(1, 10, 100);  // 7 pages
  old.priority = 1;
  h.submit(old);
  for (int i = 0; i < 60; ++i) h.step(h.worker);  // it holds 5
  AcceptedRequest urgent = Harness::request(2, 10, 60);
  h.submit(urgent);
  while (h.finish(2) == FinishReason::kNone) ASSERT_TRUE(h.step(h.worker));
  EXPECT_EQ(h.finish(1), FinishReason::kNone);
  EXPECT_GE(h.core.metrics().sequences_preempted, 1u);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(old.prompt, old.sampling));
  EXPECT_EQ(h.tokens(2), oracle_answer(urgent.prompt, urgent.sampling));
}

TEST(Preemption, EachTimeTheReserveDoublesSoThatNothingIsComputedForEver) {
  Tight h(14);
  for (uint64_t id = 1; id <= 12; ++id) h.submit(Harness::request(id, 4, 200));  // 13 pages each
  h.run_all();
  h.expect_all(12, 4, 200);
  const SchedulerMetrics m = h.core.metrics();
  EXPECT_LT(m.sequences_preempted, 12 * 8u);
  EXPECT_LT(m.prefill_tokens, 12 * 4 + 12 * 8 * 200u);
}

TEST(Preemption, SwitchedOffNothingIsEverPreempted) {
  SchedulerOptions options;
  options.preemption = false;
  Harness h(options);
  h.worker = h.join_worker(101, 6);
  h.join_shard(201);
  h.gateway = h.join_gateway();
  for (uint64_t id = 1; id <= 6; ++id) h.submit(Harness::request(id, 10, 40));
  h.run_all();
  for (uint64_t id = 1; id <= 6; ++id) EXPECT_EQ(h.finish(id), FinishReason::kLength);
  EXPECT_EQ(h.core.metrics().sequences_preempted, 0u);
}

TEST(Preemption, WhatCanNeverFitIsRefusedWithTheNumbers) {
  Tight h(4);
  h.submit(Harness::request(1, 10, 60));
  EXPECT_EQ(h.reply(1).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(message_of(h.reply(1)), HasSubstr("need 5 pages"));
  EXPECT_THAT(message_of(h.reply(1)), HasSubstr("has 4"));
}

// --- choices share their prompt

TEST(CopyOnWrite, ChoicesComputeTheirPromptOnce) {
  for (const uint32_t prompt : {1u, 2u, 15u, 16u, 17u, 20u, 31u, 32u, 33u, 47u}) {
    SCOPED_TRACE(prompt);
    Harness h;
    h.make_ready();
    AcceptedRequest r = Harness::request(1, prompt, 20);
    r.choices = 4;
    h.submit(r);
    h.run_all();
    for (uint32_t c = 0; c < 4; ++c) {
      EXPECT_EQ((h.gateways[h.gateway].choice_tokens[{r.id, c}]), oracle_answer(r.prompt, r.sampling, c));
    }
    EXPECT_EQ(h.workers[h.worker].model.breach(), "");
    // Each needs the row of the last token for its own first one.
    EXPECT_EQ(h.core.metrics().prefill_tokens, prompt + 3);
    EXPECT_EQ(h.workers[h.worker].model.copies(), (prompt - 1) % kBlockTokens == 0 ? 0u : 3u);
  }
}

TEST(CopyOnWrite, WithoutThePrefixCacheEachComputesItsOwn) {
  SchedulerOptions options;
  options.prefix_cache = false;
  Harness h(options);
  h.make_ready();
  AcceptedRequest r = Harness::request(1, 20, 10);
  r.choices = 3;
  h.submit(r);
  h.run_all();
  EXPECT_EQ(h.core.metrics().prefill_tokens, 60u);
  EXPECT_EQ(h.workers[h.worker].model.copies(), 0u);
}

// --- the bounds of the queue

TEST(Overload, TheLastPartOfTheQueueIsForTenantsWithLittleInIt) {
  SchedulerOptions options = one_at_a_time();
  options.max_waiting_requests = 100;
  options.queue_reserve_percent = 10;
  Harness h(options);
  occupy(h);
  uint64_t id = 2;
  for (; id < 300; ++id) {
    h.submit(request(id, 0, "flood"));
    if (!h.reply(id).ok()) break;
  }
  EXPECT_EQ(id, 2u + 90);
  EXPECT_THAT(message_of(h.reply(id)), HasSubstr("queue_reserve_percent"));
  h.submit(request(1000, 0, "modest"));
  EXPECT_TRUE(h.reply(1000).ok());
  h.submit(request(1001, 1, "other"));  // below the default band: a tenth less for everybody
  EXPECT_EQ(h.reply(1001).code(), StatusCode::kResourceExhausted);
  for (uint64_t more = 2000; more < 2009; ++more) {
    h.submit(request(more, 0, "tenant-" + std::to_string(more)));
    EXPECT_TRUE(h.reply(more).ok());
  }
  h.submit(request(3000, 0, "late"));
  EXPECT_THAT(message_of(h.reply(3000)), HasSubstr("the queue is full"));
}

// A refused client that comes back when it was told finds what stood before it started, within a factor of
// two.
TEST(Overload, RetryAfterIsHonestWithinTwo) {
  for (const Nanos step : {5 * kMillisecond, 20 * kMillisecond, 80 * kMillisecond}) {
    SchedulerOptions options;
    options.max_running_requests = 4;
    options.max_waiting_tokens = 4000;
    options.lease_ms = options.dead_after_ms = options.dead_after_trouble_ms = 6'000'000;
    Harness h(options);
    h.make_ready();
    SplitMix64 random(9);
    uint64_t id = 1;
    struct Told {
      TimePoint at;
      Nanos wait;
      uint64_t last;  // accepted before it
    };
    std::vector<Told> told;
    std::map<uint64_t, TimePoint> started;
    uint64_t last_accepted = 0;
    for (int i = 0; i < 6000; ++i) {
      h.advance(step);
      for (int n = 0; n < 2; ++n) {
        AcceptedRequest r = Harness::request(id, static_cast<uint32_t>(10 + random.below(80)), 8, id);
        r.time_left = 100'000 * kSecond;
        h.submit(r);
        if (h.reply(id).ok()) {
          last_accepted = id;
        } else if (i > 1000 && i % 50 == 0) {
          told.push_back({h.now, retry_after_of(h.reply(id)), last_accepted});
        }
        ++id;
      }
      for (const SequenceStart& start : h.workers[h.worker].plans.empty()
                                            ? std::vector<SequenceStart>()
                                            : h.workers[h.worker].plans.front().starts) {
        started.emplace(start.request.lo, h.now);
      }
      h.step(h.worker);
    }
    size_t compared = 0;
    for (const Told& one : told) {
      const auto it = started.find(one.last);
      if (it == started.end()) continue;  // the run ended before
      ++compared;
      const double ratio = static_cast<double>(it->second - one.at) / static_cast<double>(one.wait);
      EXPECT_GT(ratio, 0.5);
      EXPECT_LT(ratio, 2.0);
    }
    EXPECT_GT(compared, 30u);
  }
}

// --- the share of prefill in a step

TEST(StepTimes, PrefillIsCutToTheTargetOrTwiceTheDecodes) {
  StepTime time;
  EXPECT_EQ(time.prefill_rows(10 * kMillisecond, 4, 100), 100u) << "nothing is known yet";
  for (int i = 0; i < 100; ++i) {
    time.observe(8, 0, 2 * kMillisecond);
    time.observe(8, 100, 2 * kMillisecond + 100 * (kMillisecond / 10));
  }
  EXPECT_NEAR(time.prefill_rows(10 * kMillisecond, 4, 500), 80, 2);
  EXPECT_EQ(time.prefill_rows(10 * kMillisecond, 4, 50), 50u);
  EXPECT_NEAR(time.prefill_rows(1 * kMillisecond, 4, 500), 20, 1) << "twice the decodes";
  EXPECT_EQ(time.prefill_rows(1 * kMillisecond, 64, 500), 64u);
  EXPECT_EQ(time.prefill_rows(0, 4, 500), 500u);
}

// A long prompt beside running decodes: every step keeps the target once the worker is known, and alone the
// prompt has the whole budget.
TEST(StepTimes, ALongPromptDoesNotStallOthers) {
  SchedulerOptions options;
  options.itl_target_ms = 10;
  options.step_token_budget = 512;
  options.prefill_chunk_tokens = 512;
  Harness h(options);
  h.worker = h.join_worker(101, 512);
  h.join_shard(201);
  h.gateway = h.join_gateway();
  const auto step = [&] {
    Harness::WorkerSide& side = h.workers[h.worker];
    if (side.plans.empty()) return 0u;
    const BatchPlan plan = std::move(side.plans.front());
    side.plans.pop_front();
    uint32_t rows = 0;
    for (const PlanSlice& slice : plan.slices) rows += slice.count;
    StepResult result = side.model.run(plan, side.plans);
    result.compute_ns = kMillisecond + rows * 50 * kMicrosecond;
    h.event(MemberMessage{h.worker, result});
    return rows;
  };
  for (uint64_t id = 1; id <= 4; ++id) h.submit(Harness::request(id, 8, 400));
  for (int i = 0; i < 20; ++i) step();
  h.submit(Harness::request(9, 3000, 8));
  uint32_t largest = 0, steps = 0;
  while (h.tokens(9).empty()) {
    const uint32_t rows = step();
    if (++steps > 6) largest = std::max(largest, rows);
  }
  EXPECT_GT(steps, 15u);
  EXPECT_LE(largest, 200u);  // 1 ms + 180 rows of 50 us
  EXPECT_GE(largest, 120u);
}

}  // namespace
}  // namespace conclave::scheduler
