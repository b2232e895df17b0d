// Admission, steps and pages of the scheduler core.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

TEST(Batching, OneRequestFromSubmissionToItsLastToken) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 40, 9);
  h.submit(r);
  EXPECT_TRUE(h.reply(1).ok());
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.workers[h.worker].model.breach(), "");
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
  const SchedulerMetrics m = h.core.metrics();
  EXPECT_EQ(m.kv_blocks_used, 0u);
  EXPECT_EQ(m.kv_blocks_reserved, 0u);
  EXPECT_EQ(m.requests_running, 0u);
  EXPECT_EQ(m.prefill_tokens, 40u);
  EXPECT_EQ(m.tokens_sampled, 9u);
}

TEST(Batching, LongPromptsArePrefilledInChunksWithinTheBudgetAndDecodesComeFirst) {
  SchedulerOptions options;
  options.step_token_budget = 20;
  options.prefill_chunk_tokens = 16;
  options.max_batch_sequences = 8;
  options.steps_in_flight = 1;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 10, 30));
  h.step(h.worker);
  h.step(h.worker);
  h.submit(Harness::request(2, 50, 4));
  h.submit(Harness::request(3, 50, 4));
  h.step(h.worker);  // planned before they came
  const BatchPlan& plan = h.workers[h.worker].plans.front();
  ASSERT_EQ(plan.slices.size(), 3u);
  EXPECT_EQ(plan.slices[0].count, 1u);
  EXPECT_TRUE(plan.slices[0].sample);
  EXPECT_EQ(plan.slices[1].count, 10u);  // half of 20 - 1, since another waits
  EXPECT_EQ(plan.slices[2].count, 9u);
  EXPECT_FALSE(plan.slices[2].sample);
  h.run_all();
  for (uint64_t id : {1, 2, 3}) EXPECT_NE(h.finish(id), FinishReason::kNone);
  EXPECT_EQ(h.workers[h.worker].model.breach(), "");
}

TEST(Batching, APromptAloneTakesAllThatItsChunkAllows) {
  for (const uint32_t chunk : {16u, 30u}) {
    SchedulerOptions options;
    options.step_token_budget = 20;
    options.prefill_chunk_tokens = chunk;
    options.max_batch_sequences = 8;
    Harness h(options);
    h.make_ready();
    h.submit(Harness::request(1, 50, 4));
    const BatchPlan& plan = h.workers[h.worker].plans.front();
    ASSERT_EQ(plan.slices.size(), 1u);
    EXPECT_EQ(plan.slices[0].count, std::min(chunk, 20u));
    h.run_all();
    EXPECT_EQ(h.workers[h.worker].model.breach(), "");
  }
}

TEST(Batching, RequestsJoinAndLeaveAtAnyStep) {
  Harness h;
  h.make_ready();
  std::vector<AcceptedRequest> all;
  for (uint64_t id = 1; id <= 12; ++id) {
    all.push_back(Harness::request(id, static_cast<uint32_t>(3 + id), static_cast<uint32_t>(2 + id % 5), id));
    h.submit(all.back());
    h.step(h.worker);
  }
  h.run_all();
  for (const AcceptedRequest& r : all) EXPECT_EQ(h.tokens(r.id.lo), oracle_answer(r));
  EXPECT_EQ(h.workers[h.worker].model.breach(), "");
}

TEST(Batching, TheNextStepIsPlannedWhileOneRuns) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 5, 6));
  const auto& plans = h.workers[h.worker].plans;
  ASSERT_EQ(plans.size(), 2u);  // steps_in_flight: the decode's token is not known to the scheduler yet
  EXPECT_EQ(plans[1].slices[0].start, 5u);
  EXPECT_EQ(plans[1].slices[0].count, 1u);
}

TEST(Batching, AStopTokenEndsARequestAndLaterSlicesAreIgnored) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = Harness::request(1, 5, 50);
  const std::vector<TokenId> free_run = oracle_answer(r);
  r.sampling.stop_token_ids = {free_run[7]};
  const std::vector<TokenId> expected = oracle_answer(r);
  ASSERT_LE(expected.size(), 8u);
  h.submit(r);
  h.run_all();
  EXPECT_EQ(h.tokens(1), expected);
  EXPECT_EQ(h.finish(1), FinishReason::kStop);
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
}

TEST(Batching, PagesReturnOnlyWhenTheEndWasReported) {
  Harness h;
  h.worker = h.join_worker(101, 4);
  h.join_shard(201);
  h.gateway = h.join_gateway();
  h.submit(Harness::request(1, 33, 20));  // 53 positions: all 4 pages
  h.submit(Harness::request(2, 33, 20));
  EXPECT_EQ(h.core.metrics().requests_running, 1u);
  h.step(h.worker);
  h.event(Cancel{h.gateway, RequestId{1, 1}});
  EXPECT_EQ(h.finish(1), FinishReason::kCancelled);  // at once for the client
  while (h.core.metrics().requests_running == 0) {   // the pages are still named by plans in flight
    EXPECT_GT(h.core.metrics().kv_blocks_used, 0u);
    ASSERT_TRUE(h.step(h.worker));
  }
  h.run_all();
  EXPECT_EQ(h.finish(2), FinishReason::kLength);
  EXPECT_EQ(h.workers[h.worker].model.breach(), "");
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
}

TEST(Batching, ARequestThatCanNeverFitIsRefusedWithTheNumbers) {
  Harness h;
  h.worker = h.join_worker(101, 4);
  h.join_shard(201);
  h.gateway = h.join_gateway();
  h.submit(Harness::request(1, 60, 5));
  EXPECT_EQ(h.reply(1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(h.reply(1)), "max_tokens");
  EXPECT_THAT(message_of(h.reply(1)), HasSubstr("need 5 pages"));
  EXPECT_THAT(message_of(h.reply(1)), HasSubstr("has 4"));
  EXPECT_EQ(h.core.metrics().kv_blocks_reserved, 0u);  // a refusal strands nothing
}

TEST(Batching, RequestsGoToTheLeastLoadedWorker) {
  Harness h;
  h.make_ready();
  const SessionId second = h.join_worker(102);
  for (uint64_t id = 1; id <= 6; ++id) h.submit(Harness::request(id, 4, 4, id));
  for (const MemberSnapshot& member : h.core.status().members) {
    if (member.role == Role::kAttention) {
      EXPECT_EQ(member.sequences, 3u);
    }
  }
  h.run_all();
  for (uint64_t id = 1; id <= 6; ++id) EXPECT_EQ(h.finish(id), FinishReason::kLength);
  EXPECT_EQ(h.workers[second].model.breach(), "");
  EXPECT_EQ(h.workers[h.worker].model.breach(), "");
}

TEST(Batching, ABigRequestIsNotOvertakenOnItsWorkerAndHoldsUpNoOther) {
  SchedulerOptions options;
  options.preemption = false;  // what runs is promised all its pages
  Harness h(options);
  h.worker = h.join_worker(101, 8);
  const SessionId small = h.join_worker(102, 2);
  h.join_shard(201);
  h.gateway = h.join_gateway();
  h.submit(Harness::request(1, 60, 40));  // 7 pages: the large worker
  h.submit(Harness::request(2, 60, 40));  // waits for it
  h.submit(Harness::request(3, 4, 4));    // fits the small one, which the waiting request can never use
  h.submit(Harness::request(4, 4, 4));
  EXPECT_EQ(h.core.metrics().requests_running, 3u);
  h.submit(
      Harness::request(5, 14, 4));  // 2 pages: none free anywhere; must not take the large worker's last one
  EXPECT_EQ(h.core.metrics().requests_waiting, 2u);
  h.run_all();
  for (uint64_t id = 1; id <= 5; ++id) EXPECT_EQ(h.finish(id), FinishReason::kLength) << id;
  EXPECT_EQ(h.workers[small].model.breach(), "");
}

TEST(Batching, AFullQueueRefusesAndNeverShedsWhatItAccepted) {
  SchedulerOptions options;
  options.max_waiting_requests = 2;
  options.max_waiting_tokens = 100;
  options.queue_reserve_percent = 0;
  options.max_batch_sequences = 1;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 4, 4));
  h.submit(Harness::request(2, 90, 4));
  h.submit(Harness::request(3, 20, 4));
  EXPECT_EQ(h.reply(3).code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(message_of(h.reply(3)), HasSubstr("max_waiting_tokens"));
  h.submit(Harness::request(4, 4, 4));
  h.submit(Harness::request(5, 4, 4));
  EXPECT_EQ(h.reply(5).code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(message_of(h.reply(5)), HasSubstr("max_waiting_requests"));
  AcceptedRequest again = Harness::request(6, 4, 4);
  again.resubmitted = true;  // a scheduler acknowledged it before
  h.submit(again);
  EXPECT_TRUE(h.reply(6).ok());
  h.run_all();
  for (uint64_t id : {1, 2, 4, 6}) EXPECT_EQ(h.finish(id), FinishReason::kLength) << id;
  EXPECT_EQ(h.core.metrics().requests_refused_full, 2u);
}

TEST(Batching, NoMoreThanTheBoundRunAtATime) {
  SchedulerOptions options;
  options.max_running_requests = 3;
  Harness h(options);
  h.make_ready();
  for (uint64_t id = 1; id <= 6; ++id) h.submit(Harness::request(id, 4, 4));
  EXPECT_EQ(h.core.metrics().requests_running, 3u);
  EXPECT_EQ(h.core.metrics().requests_waiting, 3u);
  h.run_all();
  EXPECT_EQ(h.core.metrics().requests_finished_length, 6u);
}

TEST(Batching, BadRequestsAreRefusedByField) {
  Harness h;
  h.make_ready();
  const auto field = [&](AcceptedRequest r) {
    h.submit(r);
    EXPECT_EQ(h.reply(r.id.lo).code(), StatusCode::kInvalidArgument);
    return field_of(h.reply(r.id.lo));
  };
  AcceptedRequest r = Harness::request(1, 0, 4);
  EXPECT_EQ(field(r), "prompt");
  EXPECT_EQ(field(Harness::request(2, 4, 0)), "max_tokens");
  EXPECT_EQ(field(Harness::request(3, 4096, 4)), "prompt");
  EXPECT_EQ(field(Harness::request(4, 4000, 97)), "max_tokens");
  EXPECT_EQ(field(Harness::request(5, 4, 4294967295u)), "max_tokens");
  r = Harness::request(6, 4, 4);
  r.prompt[2] = kOracleVocab;
  EXPECT_EQ(field(r), "prompt");
  r = Harness::request(7, 4, 4);
  r.choices = kMaxChoices + 1;
  EXPECT_EQ(field(r), "n");
  r = Harness::request(8, 4, 2);
  r.delivered = {{{1, 2, 3}, false}};
  EXPECT_EQ(field(r), "delivered");
  r = Harness::request(9, 4, 4);
  r.sampling.temperature = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(field(r), "temperature");
  r = Harness::request(10, 4, 4);
  r.choices = 0;
  EXPECT_EQ(field(r), "n");
  r = Harness::request(11, 4, 4);
  r.sampling.logit_bias = {{kOracleVocab, 1.0f}};
  EXPECT_EQ(field(r), "logit_bias");
  r = Harness::request(12, 4, 4);
  r.sampling.repetition_penalty = 0;
  EXPECT_EQ(field(r), "repetition_penalty");
  r = Harness::request(13, 4, 4);
  r.delivered.resize(2);
  EXPECT_EQ(field(r), "delivered");
  EXPECT_EQ(h.core.metrics().requests_refused_invalid, 13u);
  EXPECT_TRUE(h.core.audit().ok());
}

TEST(Batching, LogProbabilitiesComeWithTheirTokens) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = Harness::request(1, 4, 3);
  r.sampling.logprobs = true;
  h.submit(r);
  h.run_all();
  for (const TokenEvent& event : h.gateways[h.gateway].events) {
    ASSERT_EQ(event.logprobs.size(), event.tokens.size());
    ASSERT_EQ(event.top_logprobs.size(), event.tokens.size());
    for (size_t i = 0; i < event.tokens.size(); ++i)
      EXPECT_EQ(event.logprobs[i], -static_cast<float>(event.tokens[i]));
  }
}

}  // namespace
}  // namespace conclave::scheduler
