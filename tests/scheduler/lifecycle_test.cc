// How requests end, and what survives the loss of workers and gateways.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

TEST(Lifecycle, CancelFreesWithinAStep) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 40, 500));
  for (int i = 0; i < 5; ++i) h.step(h.worker);
  const size_t before = h.tokens(1).size();
  EXPECT_GT(before, 0u);
  h.event(Cancel{h.gateway, RequestId{1, 1}});
  EXPECT_EQ(h.finish(1), FinishReason::kCancelled);
  h.step(h.worker);  // that which runs
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  h.run_all();
  EXPECT_EQ(h.workers[h.worker].model.sequences(), 0u);
  EXPECT_EQ(h.tokens(1).size(), before);
  h.event(Cancel{h.gateway, RequestId{1, 1}});  // again: it has ended, once
  EXPECT_EQ(h.core.metrics().requests_cancelled, 1u);
}

TEST(Lifecycle, CancelOfAWaitingRequest) {
  SchedulerOptions options;
  options.max_batch_sequences = 1;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 4, 4));
  h.submit(Harness::request(2, 4, 4));
  h.event(Cancel{h.gateway, RequestId{1, 2}});
  EXPECT_EQ(h.finish(2), FinishReason::kCancelled);
  EXPECT_EQ(h.core.metrics().requests_waiting, 0u);
  h.run_all();
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
}

TEST(Lifecycle, DeadlinesHoldWhileWaitingAndWhileRunning) {
  SchedulerOptions options;
  options.max_batch_sequences = 1;
  Harness h(options);
  h.make_ready();
  AcceptedRequest running = Harness::request(1, 4, 1000);
  running.time_left = 2 * kSecond;
  AcceptedRequest waiting = Harness::request(2, 4, 4);
  waiting.time_left = 1 * kSecond;
  AcceptedRequest late = Harness::request(3, 4, 4);
  late.time_left = 0;
  h.submit(running);
  h.submit(waiting);
  h.submit(late);
  EXPECT_TRUE(h.reply(3).ok());
  EXPECT_EQ(h.finish(3), FinishReason::kDeadline);
  h.step(h.worker);
  h.pass(1500 * kMillisecond);
  EXPECT_EQ(h.finish(2), FinishReason::kDeadline);
  EXPECT_EQ(h.finish(1), FinishReason::kNone);
  h.pass(600 * kMillisecond);
  EXPECT_EQ(h.finish(1), FinishReason::kDeadline);
  h.run_all();
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_TRUE(h.core.audit().ok());
}

TEST(Lifecycle, ASequenceThatFailsEndsItsRequestWithTheCause) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 4, 10));
  const BatchPlan plan = h.workers[h.worker].plans.front();
  StepResult result;
  result.step = plan.step;
  result.failures.push_back({plan.slices[0].seq, "no finite logit"});
  h.event(MemberMessage{h.worker, result});
  EXPECT_EQ(h.finish(1), FinishReason::kError);
  EXPECT_EQ(h.gateways[h.gateway].last[(RequestId{1, 1})].error, "no finite logit");
}

TEST(Lifecycle, AResubmissionOfARunningRequestIsAttachedFromWhatWasDelivered) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 10, 12);
  h.submit(r);
  for (int i = 0; i < 6; ++i) h.step(h.worker);
  const std::vector<TokenId> all = oracle_answer(r);
  ASSERT_GE(h.tokens(1).size(), 4u);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  EXPECT_EQ(h.core.metrics().requests_detached, 1u);
  h.step(h.worker);  // it runs on meanwhile
  const SessionId old = h.gateway;
  h.gateway = h.join_gateway();
  AcceptedRequest again = r;
  again.resubmitted = true;
  again.delivered = {{{all.begin(), all.begin() + 2}, false}};  // some of what was sent had been lost
  h.gateways[h.gateway].tokens[again.id] = again.delivered[0].tokens;
  h.submit(again);
  EXPECT_TRUE(h.reply(1).ok());
  EXPECT_EQ(h.gateways[h.gateway].events.front().index, 2u);
  h.run_all();
  EXPECT_EQ(h.tokens(1), all);
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_FALSE(h.gateways[old].last.contains(RequestId{1, 1}));
  EXPECT_EQ(h.core.metrics().requests_accepted, 1u);
}

TEST(Lifecycle, ANewSessionTakesOverBeforeTheOldOnesLossIsNoticed) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 10, 12);
  h.submit(r);
  const SessionId old = h.gateway;
  h.gateway = h.join_gateway();
  h.submit(r);
  h.event(GatewayLost{old, unavailable("gone")});
  EXPECT_EQ(h.core.metrics().requests_detached, 0u);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
}

TEST(Lifecycle, AnEndReachedWithoutAGatewayIsKeptForIt) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 10, 5);
  h.submit(r);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  h.run_all();
  EXPECT_EQ(h.core.metrics().requests_finished_length, 1u);
  h.gateway = h.join_gateway();
  h.submit(r);
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.core.metrics().requests_detached, 0u);
}

TEST(Lifecycle, RequestsOfAGatewayThatStaysAwayAreCancelled) {
  SchedulerOptions options;
  options.gateway_grace_ms = 1000;
  Harness h(options);
  h.make_ready();
  h.submit(Harness::request(1, 10, 500));
  h.submit(Harness::request(2, 10, 2));
  h.step(h.worker);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  h.step(h.worker);
  h.step(h.worker);
  h.step(h.worker);
  h.pass(900 * kMillisecond);
  EXPECT_EQ(h.core.metrics().requests_detached, 2u);
  h.pass(200 * kMillisecond);
  EXPECT_EQ(h.core.metrics().requests_detached, 0u);
  EXPECT_EQ(h.core.metrics().requests_abandoned, 1u);  // the other had ended
  h.run_all();
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_TRUE(h.core.audit().ok());
}

TEST(Lifecycle, ARestartedSchedulerGoesOnBehindWhatWasDelivered) {
  AcceptedRequest r = Harness::request(1, 10, 12);
  const std::vector<TokenId> all = oracle_answer(r);
  r.delivered = {{{all.begin(), all.begin() + 5}, false}};
  r.resubmitted = true;
  Harness h;
  h.gateway = h.join_gateway();
  h.submit(r);  // before any member is back
  EXPECT_TRUE(h.reply(1).ok());
  h.worker = h.join_worker(101);
  h.join_shard(201);
  const BatchPlan& plan = h.workers[h.worker].plans.front();
  EXPECT_EQ(plan.starts[0].tokens.size(), 15u);
  EXPECT_EQ(plan.starts[0].prompt_tokens, 10u);
  h.run_all();
  EXPECT_EQ(h.gateways[h.gateway].events.front().index, 5u);
  EXPECT_EQ(h.core.metrics().tokens_sampled, 7u);  // none of the delivered ones again
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
}

TEST(Lifecycle, AReplayThatHasEverythingEndsAtOnce) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = Harness::request(1, 10, 3);
  r.delivered = {{oracle_answer(r), false}};
  h.submit(r);
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.gateways[h.gateway].events.back().index, 3u);
  r = Harness::request(2, 10, 30);
  r.delivered = {{{5, 6}, false}};
  r.sampling.stop_token_ids = {6};
  h.submit(r);
  EXPECT_EQ(h.finish(2), FinishReason::kStop);
  EXPECT_EQ(h.core.metrics().steps_planned, 0u);
}

TEST(Lifecycle, AnInvalidReplayIsAnsweredWithAnErrorOnceTheModelIsKnown) {
  Harness h;
  h.gateway = h.join_gateway();
  AcceptedRequest r = Harness::request(1, 10, 5000);
  r.resubmitted = true;
  h.submit(r);
  EXPECT_TRUE(h.reply(1).ok());
  h.join_worker(101);
  h.join_shard(201);
  EXPECT_EQ(h.finish(1), FinishReason::kError);
  EXPECT_THAT(h.gateways[h.gateway].last[(RequestId{1, 1})].error, HasSubstr("context of 4096"));
}

TEST(Lifecycle, AnotherRequestUnderTheSameIdIsRefused) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 10, 3);
  h.submit(r);
  AcceptedRequest other = Harness::request(1, 11, 3);
  h.submit(other);
  EXPECT_EQ(field_of(h.reply(1)), "id");
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
}

TEST(Lifecycle, ALostWorkersSequencesReplayOnAnotherWithAllTheirTokens) {
  Harness h;
  h.make_ready();
  std::vector<AcceptedRequest> all;
  for (uint64_t id = 1; id <= 4; ++id) {
    all.push_back(Harness::request(id, 20, 15, id));
    h.submit(all.back());
  }
  for (int i = 0; i < 7; ++i) h.step(h.worker);
  const size_t before = h.tokens(1).size();
  EXPECT_GT(before, 2u);
  const SessionId second = h.join_worker(102);
  h.event(MemberLost{h.worker, unavailable("killed")});
  h.closed[h.worker] = unavailable("killed");
  EXPECT_EQ(h.core.metrics().sequences_replayed, 4u);
  ASSERT_FALSE(h.workers[second].plans.empty());
  EXPECT_EQ(h.workers[second].plans.front().starts[0].tokens.size(), 20 + before);
  h.run_all();
  for (const AcceptedRequest& r : all) EXPECT_EQ(h.tokens(r.id.lo), oracle_answer(r));
  EXPECT_EQ(h.workers[second].model.breach(), "");
  EXPECT_EQ(h.core.metrics().tokens_sampled, 60u);  // none twice
}

TEST(Lifecycle, WithoutAnotherWorkerTheyWaitForOne) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = Harness::request(1, 20, 15);
  h.submit(r);
  for (int i = 0; i < 7; ++i) h.step(h.worker);
  h.event(MemberLost{h.worker, unavailable("killed")});
  h.closed[h.worker] = unavailable("killed");
  EXPECT_FALSE(h.gateways[h.gateway].fleet.ready);
  h.submit(Harness::request(2, 4, 4));  // the model is known: it waits too
  EXPECT_TRUE(h.reply(2).ok());
  h.join_worker(102);
  EXPECT_TRUE(h.gateways[h.gateway].fleet.ready);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
  EXPECT_EQ(h.finish(2), FinishReason::kLength);
}

}  // namespace
}  // namespace conclave::scheduler
