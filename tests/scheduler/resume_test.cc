// Requests that one gateway takes over from another: what is kept for that, for whom, and for how long.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::HasSubstr;

AcceptedRequest resumable(uint64_t id, uint32_t prompt, uint32_t max_tokens, std::string tenant = "") {
  AcceptedRequest r = Harness::request(id, prompt, max_tokens);
  r.router_context = "context of " + std::to_string(id);
  r.tenant = std::move(tenant);
  return r;
}

// The reply to the last adoption of a request by a gateway.
const ReplyAdopt& adopt(Harness& h, SessionId gateway, uint64_t id, std::string tenant = "") {
  const RequestId request{1, id};
  h.event(Adopt{gateway, request, std::move(tenant)});
  return h.gateways[gateway].adopt_replies.at(request).back();
}

TEST(Resume, AnotherRouterGoesOnWhenOneIsLost) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = resumable(1, 10, 12);
  h.submit(r);
  EXPECT_TRUE(h.gateways[h.gateway].resumable[r.id]);
  EXPECT_EQ(h.core.metrics().router_context_bytes, r.router_context.size());
  for (int i = 0; i < 5; ++i) h.step(h.worker);
  const size_t before = h.tokens(1).size();
  ASSERT_GT(before, 1u);
  h.event(GatewayLost{h.gateway, unavailable("killed")});
  h.step(h.worker);  // it runs on meanwhile
  h.gateway = h.join_gateway(901);
  const ReplyAdopt reply = adopt(h, h.gateway, 1);
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.adopted->request.router_context, r.router_context);
  EXPECT_EQ(reply.adopted->request.prompt, r.prompt);
  EXPECT_EQ(reply.adopted->request.sampling.max_tokens, 12u);
  EXPECT_GT(reply.adopted->generated, before);
  EXPECT_EQ(h.tokens(1).size(), reply.adopted->generated);  // all of it, from the first one on
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.core.metrics().requests_adopted, 1u);
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, WhatHasEndedIsKeptForTheGraceTimeAndCanBeTakenAgain) {
  SchedulerOptions options;
  options.gateway_grace_ms = 1000;
  Harness h(options);
  h.make_ready();
  const AcceptedRequest r = resumable(1, 10, 5);
  h.submit(r);
  h.run_all();
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.core.metrics().requests_resumable, 1u);
  EXPECT_EQ(h.core.metrics().requests_detached, 0u);
  EXPECT_GT(h.core.metrics().resumable_bytes, 15 * sizeof(TokenId));
  for (uint64_t router = 901; router < 904; ++router) {
    h.pass(900 * kMillisecond);
    h.gateway = h.join_gateway(router);
    ASSERT_TRUE(adopt(h, h.gateway, 1).status.ok());
    EXPECT_EQ(h.tokens(1), oracle_answer(r));
    EXPECT_EQ(h.finish(1), FinishReason::kLength);
    EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
  }
  h.pass(1100 * kMillisecond);
  EXPECT_EQ(adopt(h, h.gateway, 1).status.code(), StatusCode::kNotFound);
  EXPECT_THAT(message_of(adopt(h, h.gateway, 1).status), HasSubstr("gateway_grace_ms"));
  EXPECT_EQ(h.core.metrics().requests_resumable, 0u);
  EXPECT_EQ(h.core.metrics().router_context_bytes, 0u);
  EXPECT_EQ(h.core.metrics().adoptions_refused, 2u);
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, WhoseClientStaysAwayIsCancelledAfterTheGraceTime) {
  SchedulerOptions options;
  options.gateway_grace_ms = 1000;
  Harness h(options);
  h.make_ready();
  h.submit(resumable(1, 10, 500));
  h.step(h.worker);
  h.event(Release{h.gateway, RequestId{1, 1}});
  EXPECT_EQ(h.core.metrics().requests_detached, 1u);
  h.step(h.worker);
  h.pass(1100 * kMillisecond);
  EXPECT_EQ(h.core.metrics().requests_abandoned, 1u);
  EXPECT_EQ(h.core.metrics().router_context_bytes, 0u);
  EXPECT_EQ(adopt(h, h.gateway, 1).status.code(), StatusCode::kNotFound);
  h.run_all();
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, AReleasedOneRunsOnForTheSameRouter) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = resumable(1, 10, 12);
  h.submit(r);
  for (int i = 0; i < 5; ++i) h.step(h.worker);
  h.event(Release{h.gateway, r.id});
  const size_t told = h.gateways[h.gateway].events.size();
  for (int i = 0; i < 3; ++i) h.step(h.worker);
  EXPECT_EQ(h.gateways[h.gateway].events.size(), told);  // nothing goes to who let go
  ASSERT_TRUE(adopt(h, h.gateway, 1).status.ok());
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
  EXPECT_EQ(h.core.metrics().requests_released, 1u);
}

TEST(Resume, AStopStringsEndIsKeptWithoutGeneratingMore) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = resumable(1, 10, 500);
  h.submit(r);
  for (int i = 0; i < 5; ++i) h.step(h.worker);
  const std::vector<TokenId> before = h.tokens(1);
  h.event(Release{h.gateway, r.id, true});
  h.run_all();
  EXPECT_EQ(h.core.metrics().requests_running, 0u);
  EXPECT_EQ(h.core.metrics().requests_resumable, 1u);
  ASSERT_TRUE(adopt(h, h.gateway, 1).status.ok());
  EXPECT_EQ(h.tokens(1), before);
  EXPECT_EQ(h.finish(1), FinishReason::kCancelled);  // the text says how it ended
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, AnotherTenantsStreamLooksAsIfThereWereNone) {
  Harness h;
  h.make_ready();
  h.submit(resumable(1, 10, 50, "alice"));
  const SessionId other = h.join_gateway(901);
  const Status there = adopt(h, other, 1, "bob").status;
  const Status absent = adopt(h, other, 77, "bob").status;
  EXPECT_EQ(there.code(), StatusCode::kNotFound);
  EXPECT_EQ(there, absent);
  EXPECT_EQ(adopt(h, other, 1, "").status, absent);
  h.step(h.worker);
  EXPECT_FALSE(h.tokens(1).empty());  // who has it goes on
  EXPECT_TRUE(adopt(h, other, 1, "alice").status.ok());
}

TEST(Resume, WhoWasNotStartedAsSuchIsRefused) {
  Harness h;
  h.make_ready();
  h.submit(Harness::request(1, 10, 50));
  const SessionId other = h.join_gateway(901);
  EXPECT_EQ(adopt(h, other, 1).status.code(), StatusCode::kFailedPrecondition);
  h.run_all();
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
  EXPECT_EQ(h.core.metrics().requests_resumable, 0u);  // and is forgotten at its end
  EXPECT_EQ(adopt(h, other, 1).status.code(), StatusCode::kNotFound);
}

TEST(Resume, WhoeverHadItIsToldAndHasNoMoreSayInIt) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = resumable(1, 10, 12);
  h.submit(r);
  for (int i = 0; i < 5; ++i) h.step(h.worker);
  const SessionId old = h.gateway;
  h.gateway = h.join_gateway(901);
  ASSERT_TRUE(adopt(h, h.gateway, 1).status.ok());
  ASSERT_EQ(h.gateways[old].last.count(r.id), 1u);
  EXPECT_EQ(h.gateways[old].last[r.id].finish, FinishReason::kCancelled);
  EXPECT_THAT(h.gateways[old].last[r.id].error, HasSubstr("taken the stream over"));
  // What it still says: a client that left, a text that ended, a reconnection.
  h.event(Cancel{old, r.id});
  h.event(Cancel{old, r.id, 0});
  h.event(Release{old, r.id, true});
  h.event(Release{old, r.id});
  h.event(Submit{old, r});
  EXPECT_EQ(h.gateways[old].replies[r.id].code(), StatusCode::kFailedPrecondition);
  h.run_all();
  EXPECT_EQ(h.tokens(1), oracle_answer(r));
  EXPECT_EQ(h.finish(1), FinishReason::kLength);
}

TEST(Resume, ACancelledOneIsNotKept) {
  Harness h;
  h.make_ready();
  h.submit(resumable(1, 10, 50));
  h.step(h.worker);
  h.event(Cancel{h.gateway, RequestId{1, 1}});
  EXPECT_EQ(h.finish(1), FinishReason::kCancelled);
  EXPECT_EQ(h.core.metrics().requests_resumable, 0u);
  EXPECT_EQ(h.core.metrics().router_context_bytes, 0u);
  EXPECT_EQ(adopt(h, h.gateway, 1).status.code(), StatusCode::kNotFound);
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, ARouterThatCameBackMayStillCancelWhatItHad) {
  Harness h;
  h.make_ready();
  h.submit(resumable(1, 10, 500));
  h.submit(resumable(2, 10, 500));
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  const SessionId stranger = h.join_gateway(901);
  const SessionId again = h.join_gateway(900);
  h.event(Cancel{stranger, RequestId{1, 1}});
  EXPECT_EQ(h.core.metrics().requests_cancelled, 0u);
  h.event(Cancel{again, RequestId{1, 1}});
  EXPECT_EQ(h.core.metrics().requests_cancelled, 1u);
}

TEST(Resume, BoundsOfContextsMakeARequestAnOrdinaryOne) {
  SchedulerOptions options;
  options.max_router_context_bytes = 20;
  options.max_router_context_total_bytes = 30;
  Harness h(options);
  h.make_ready();
  EXPECT_EQ(h.gateways[h.gateway].fleet.max_router_context_bytes, 20u);
  AcceptedRequest r = resumable(1, 10, 50);
  r.router_context.assign(21, 'x');
  h.submit(r);
  r = resumable(2, 10, 50);
  r.router_context.assign(20, 'x');
  h.submit(r);
  r = resumable(3, 10, 50);
  r.router_context.assign(11, 'x');
  h.submit(r);
  auto& side = h.gateways[h.gateway];
  for (uint64_t id = 1; id <= 3; ++id) EXPECT_TRUE(h.reply(id).ok());
  EXPECT_FALSE(side.resumable[(RequestId{1, 1})]);
  EXPECT_TRUE(side.resumable[(RequestId{1, 2})]);
  EXPECT_FALSE(side.resumable[(RequestId{1, 3})]);
  EXPECT_EQ(h.core.metrics().contexts_refused, 2u);
  EXPECT_EQ(h.core.metrics().router_context_bytes, 20u);
  h.run_all();
  for (uint64_t id = 1; id <= 3; ++id) EXPECT_EQ(h.finish(id), FinishReason::kLength);
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, TheOldestEndedOnesAreForgottenForNewerOnes) {
  SchedulerOptions options;
  options.max_resumable_requests = 3;
  Harness h(options);
  h.make_ready();
  for (uint64_t id = 1; id <= 5; ++id) {
    h.submit(resumable(id, 10, 2));
    h.run_all();
  }
  EXPECT_EQ(h.core.metrics().requests_resumable, 3u);
  EXPECT_EQ(h.core.metrics().resumable_dropped, 2u);
  EXPECT_EQ(adopt(h, h.gateway, 2).status.code(), StatusCode::kNotFound);
  EXPECT_TRUE(adopt(h, h.gateway, 3).status.ok());
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();

  options.max_resumable_requests = 100;
  options.max_resumable_bytes = 1;  // less than any
  Harness tight(options);
  tight.make_ready();
  tight.submit(resumable(1, 10, 2));
  tight.run_all();
  EXPECT_EQ(tight.finish(1), FinishReason::kLength);
  EXPECT_EQ(tight.core.metrics().requests_resumable, 0u);
  EXPECT_EQ(tight.core.metrics().resumable_bytes, 0u);
  EXPECT_TRUE(tight.core.audit().ok()) << tight.core.audit();
}

TEST(Resume, AllChoicesAndTheirLogProbabilitiesComeAgain) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = resumable(1, 20, 9);
  r.choices = 3;
  r.sampling.logprobs = true;
  r.sampling.prompt_logprobs = true;
  h.submit(r);
  for (int i = 0; i < 6; ++i) h.step(h.worker);
  h.event(GatewayLost{h.gateway, unavailable("killed")});
  h.gateway = h.join_gateway(901);
  ASSERT_TRUE(adopt(h, h.gateway, 1).status.ok());
  h.run_all();
  auto& side = h.gateways[h.gateway];
  EXPECT_EQ(side.prompt_logprobs[r.id].size(), 19u);
  std::map<uint32_t, size_t> logprobs;
  for (const TokenEvent& event : side.events) logprobs[event.choice] += event.logprobs.size();
  for (uint32_t choice = 0; choice < 3; ++choice) {
    EXPECT_EQ((side.choice_tokens[{r.id, choice}]), oracle_answer(r.prompt, r.sampling, choice));
    EXPECT_EQ(logprobs[choice], 9u);
    EXPECT_EQ((side.choice_ends[{r.id, choice}].size()), 1u);
  }
}

TEST(Resume, ARestartedSchedulerHasWhatTheRouterSubmitsAgain) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = resumable(1, 10, 12);
  const std::vector<TokenId> all = oracle_answer(r);
  r.resubmitted = true;
  r.delivered = {{{all.begin(), all.begin() + 5}, false}};
  h.submit(r);
  EXPECT_TRUE(h.gateways[h.gateway].resumable[r.id]);
  const SessionId other = h.join_gateway(901);
  h.event(GatewayLost{h.gateway, unavailable("killed")});
  h.gateway = other;
  ASSERT_TRUE(adopt(h, other, 1).status.ok());
  h.run_all();
  EXPECT_EQ(h.tokens(1), all);

  // A choice that ended before the restart is there with its tokens and its end.
  r = resumable(2, 10, 12);
  r.choices = 2;
  const std::vector<TokenId> second = oracle_answer(r.prompt, r.sampling, 1);
  r.resubmitted = true;
  r.delivered = {{{5, 6, 7}, true}, {{second.begin(), second.begin() + 2}, false}};
  h.submit(r);
  const SessionId third = h.join_gateway(902);
  ASSERT_TRUE(adopt(h, third, 2).status.ok());
  h.gateway = third;
  h.run_all();
  auto& side = h.gateways[third];
  EXPECT_EQ((side.choice_tokens[{r.id, 0}]), (std::vector<TokenId>{5, 6, 7}));
  EXPECT_EQ((side.choice_ends[{r.id, 0}]), std::vector{FinishReason::kCancelled});
  EXPECT_EQ((side.choice_tokens[{r.id, 1}]), second);

  // Log-probabilities of tokens that were delivered are in no resubmission.
  r = resumable(3, 10, 12);
  r.sampling.logprobs = true;
  r.resubmitted = true;
  r.delivered = {{{1, 2}, false}};
  h.submit(r);
  const Status lost = adopt(h, other, 3).status;
  EXPECT_EQ(lost.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(message_of(lost), HasSubstr("log-probabilities"));
  EXPECT_TRUE(h.core.audit().ok()) << h.core.audit();
}

TEST(Resume, LongAnswersComeInParts) {
  Harness h;
  h.gateway = h.join_gateway();
  Hello worker = Harness::member_hello(Role::kAttention, 101, 1024);
  Hello shard = Harness::member_hello(Role::kExpert, 201);
  worker.max_positions = shard.max_positions = 16'000;
  h.worker = h.join(worker);
  h.join(shard);
  h.advance(h.options.placement_settle_ms * kMillisecond);
  h.ready_all();
  AcceptedRequest r = resumable(1, 4, 10'000);
  r.resubmitted = true;
  std::vector<TokenId> all;
  for (uint32_t i = 0; i < 9'999; ++i) all.push_back(i % kOracleVocab);
  r.delivered = {{all, false}};
  h.submit(r);
  h.run_all();
  const SessionId other = h.join_gateway(901);
  ASSERT_TRUE(adopt(h, other, 1).status.ok());
  EXPECT_EQ(h.gateways[other].tokens[r.id].size(), 10'000u);
  EXPECT_GE(h.gateways[other].events.size(), 3u);
  uint32_t next = 0;
  for (const TokenEvent& event : h.gateways[other].events) {
    EXPECT_EQ(event.index, next);
    next += static_cast<uint32_t>(event.tokens.size());
    EXPECT_LE(event.tokens.size(), 4096u);
  }
}

}  // namespace
}  // namespace conclave::scheduler
