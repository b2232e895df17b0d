// Requests with several choices, prompt log-probabilities and priorities.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_harness.h"

namespace conclave::scheduler {
namespace {

using ::testing::ElementsAre;

AcceptedRequest choices(uint64_t id, uint32_t n, uint32_t prompt = 20, uint32_t max_tokens = 12) {
  AcceptedRequest r = Harness::request(id, prompt, max_tokens);
  r.choices = n;
  return r;
}

// Everything the gateway got of each choice, and that each ended once.
void expect_answers(Harness& h, const AcceptedRequest& r, FinishReason finish = FinishReason::kLength) {
  Harness::GatewaySide& side = h.gateways[h.gateway];
  for (uint32_t c = 0; c < r.choices; ++c) {
    EXPECT_EQ((side.choice_tokens[{r.id, c}]), oracle_answer(r, c)) << "choice " << c;
    EXPECT_THAT((side.choice_ends[{r.id, c}]), ElementsAre(finish)) << "choice " << c;
  }
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_EQ(h.core.metrics().requests_running + h.core.metrics().requests_waiting, 0u);
  EXPECT_TRUE(h.core.audit().ok());
}

void kill_worker(Harness& h) {
  h.event(MemberLost{h.worker, unavailable("killed")});
  h.closed[h.worker] = unavailable("killed");
}

TEST(Choices, EachIsASequenceOfItsOwnAndEndsOnce) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 3);
  h.submit(r);
  // One computes the prompt; the others go on from its pages.
  EXPECT_EQ(h.core.metrics().requests_running, 1u);
  h.step(h.worker);
  EXPECT_EQ(h.core.metrics().requests_running, 3u);
  h.run_all();
  expect_answers(h, r);
  EXPECT_NE(oracle_answer(r, 0), oracle_answer(r, 1));
  EXPECT_EQ(h.core.metrics().requests_accepted, 1u);
  EXPECT_EQ(h.core.metrics().requests_finished_length, 1u);
  EXPECT_EQ(h.workers[h.worker].model.breach(), "");
}

TEST(Choices, MoreThanRunAtATimeWaitForOneAnother) {
  SchedulerOptions options;
  options.max_batch_sequences = 2;
  Harness h(options);
  h.make_ready();
  const AcceptedRequest r = choices(1, 7);
  h.submit(r);
  h.step(h.worker);
  EXPECT_EQ(h.core.metrics().requests_running, 2u);
  EXPECT_EQ(h.core.metrics().tokens_waiting, 5 * 20u);
  h.run_all();
  expect_answers(h, r);
}

TEST(Choices, TheQueueCountsEachChoice) {
  SchedulerOptions options;
  options.max_waiting_requests = 4;
  Harness h(options);
  h.gateway = h.join_gateway();
  h.worker = h.join_worker(101);  // no shard: nothing starts
  h.submit(choices(1, 5));
  EXPECT_EQ(h.reply(1).code(), StatusCode::kResourceExhausted);
  h.submit(choices(2, 3));
  EXPECT_TRUE(h.reply(2).ok());
  h.submit(choices(3, 2));
  EXPECT_EQ(h.reply(3).code(), StatusCode::kResourceExhausted);
  h.submit(choices(4, 1));
  EXPECT_TRUE(h.reply(4).ok());
}

TEST(Choices, ALostWorkerReplaysEachWithItsOwnTokens) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 3, 20, 15);
  h.submit(r);
  for (int i = 0; i < 7; ++i) h.step(h.worker);
  EXPECT_GT(h.tokens(1).size(), 2u);
  h.join_worker(102);
  kill_worker(h);
  EXPECT_EQ(h.core.metrics().sequences_replayed, 3u);
  h.run_all();
  expect_answers(h, r);
  EXPECT_EQ(h.core.metrics().tokens_sampled, 45u);  // none twice
}

TEST(Choices, ARestartedSchedulerGoesOnWithEachAndLeavesTheEndedOnesAlone) {
  AcceptedRequest r = choices(1, 4, 20, 15);
  r.resubmitted = true;
  const auto part = [&](uint32_t c, size_t count) {
    const std::vector<TokenId> all = oracle_answer(r, c);
    return std::vector<TokenId>(all.begin(), all.begin() + static_cast<ptrdiff_t>(count));
  };
  r.delivered = {{part(0, 5), false}, {part(1, 15), true}, {part(2, 15), false}};
  Harness h;
  h.make_ready();
  Harness::GatewaySide& side = h.gateways[h.gateway];
  for (uint32_t c = 0; c < 3; ++c) side.choice_tokens[{r.id, c}] = r.delivered[c].tokens;
  h.submit(r);
  h.step(h.worker);
  EXPECT_EQ(h.core.metrics().requests_running, 2u);                                // choices 0 and 3
  EXPECT_THAT((side.choice_ends[{r.id, 2}]), ElementsAre(FinishReason::kLength));  // its end was missing
  h.run_all();
  EXPECT_TRUE((side.choice_ends[{r.id, 1}]).empty());
  side.choice_ends[{r.id, 1}] = {FinishReason::kLength};
  expect_answers(h, r);
  EXPECT_EQ(h.core.metrics().tokens_sampled, 10u + 15u);
}

TEST(Choices, OneCancelledLetsTheOthersGoOn) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 3, 20, 30);
  h.submit(r);
  for (int i = 0; i < 6; ++i) h.step(h.worker);
  h.event(Cancel{h.gateway, r.id, 1});
  h.event(Cancel{h.gateway, r.id, 1});
  h.event(Cancel{h.gateway, r.id, 9});  // no such choice
  Harness::GatewaySide& side = h.gateways[h.gateway];
  EXPECT_THAT((side.choice_ends[{r.id, 1}]), ElementsAre(FinishReason::kCancelled));
  EXPECT_EQ(h.core.metrics().requests_running, 2u);
  EXPECT_EQ(h.core.metrics().requests_cancelled, 0u);
  h.run_all();
  EXPECT_THAT((side.choice_ends[{r.id, 1}]), ElementsAre(FinishReason::kCancelled));
  EXPECT_EQ((side.choice_tokens[{r.id, 0}]), oracle_answer(r, 0));
  EXPECT_EQ((side.choice_tokens[{r.id, 2}]), oracle_answer(r, 2));
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_EQ(h.core.metrics().requests_cancelled, 1u);  // the worst of its ends
}

TEST(Choices, ACancelledRequestEndsAllThatHaveNotEnded) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 3, 20, 30);
  h.submit(r);
  for (int i = 0; i < 6; ++i) h.step(h.worker);
  h.event(Cancel{h.gateway, r.id, 1});
  h.event(Cancel{h.gateway, r.id});
  for (uint32_t c = 0; c < 3; ++c) {
    EXPECT_THAT((h.gateways[h.gateway].choice_ends[{r.id, c}]), ElementsAre(FinishReason::kCancelled));
  }
  h.run_all();
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
  EXPECT_TRUE(h.core.audit().ok());
}

TEST(Choices, ADeadlineEndsThoseThatRunAndThoseThatWait) {
  SchedulerOptions options;
  options.max_batch_sequences = 2;
  Harness h(options);
  h.make_ready();
  AcceptedRequest r = choices(1, 3, 20, 400);
  r.time_left = 100 * kMillisecond;
  h.submit(r);
  h.step(h.worker);
  h.advance(200 * kMillisecond);
  for (uint32_t c = 0; c < 3; ++c) {
    EXPECT_THAT((h.gateways[h.gateway].choice_ends[{r.id, c}]), ElementsAre(FinishReason::kDeadline));
  }
  h.run_all();
  EXPECT_EQ(h.core.metrics().requests_deadline, 1u);
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
}

TEST(Choices, AFailedOneIsReportedAndTheOthersGoOn) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 2, 4, 6);
  h.submit(r);
  while (h.workers[h.worker].plans.front().slices.size() < 2) h.step(h.worker);
  const BatchPlan plan = h.workers[h.worker].plans.front();
  h.workers[h.worker].plans.pop_front();
  StepResult result = h.workers[h.worker].model.run(plan);
  ASSERT_EQ(result.sampled.size(), 2u);
  result.failures.push_back({result.sampled[1].seq, "no finite logit"});
  result.sampled.pop_back();
  h.event(MemberMessage{h.worker, result});
  h.run_all();
  Harness::GatewaySide& side = h.gateways[h.gateway];
  EXPECT_THAT((side.choice_ends[{r.id, 1}]), ElementsAre(FinishReason::kError));
  EXPECT_EQ((side.choice_tokens[{r.id, 0}]), oracle_answer(r, 0));
  EXPECT_THAT((side.choice_ends[{r.id, 0}]), ElementsAre(FinishReason::kLength));
  EXPECT_EQ(h.core.metrics().requests_failed, 1u);
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
}

TEST(Choices, AGatewayThatComesBackGetsWhatEachIsMissing) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 3, 20, 12);
  h.submit(r);
  for (int i = 0; i < 6; ++i) h.step(h.worker);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  h.run_all();  // all end without it
  h.gateway = h.join_gateway();
  AcceptedRequest again = r;
  again.resubmitted = true;
  const std::vector<TokenId> all = oracle_answer(r, 1);
  again.delivered = {{{}, false}, {{all.begin(), all.begin() + 2}, false}, {oracle_answer(r, 2), true}};
  Harness::GatewaySide& side = h.gateways[h.gateway];
  for (uint32_t c = 0; c < 3; ++c) side.choice_tokens[{r.id, c}] = again.delivered[c].tokens;
  h.submit(again);
  EXPECT_TRUE((side.choice_ends[{r.id, 2}]).empty());
  side.choice_ends[{r.id, 2}] = {FinishReason::kLength};
  expect_answers(h, r);
}

TEST(Choices, AChoiceItsGatewayEndedIsNotRunOn) {
  Harness h;
  h.make_ready();
  const AcceptedRequest r = choices(1, 2, 20, 30);
  h.submit(r);
  for (int i = 0; i < 6; ++i) h.step(h.worker);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  h.gateway = h.join_gateway();
  AcceptedRequest again = r;
  again.resubmitted = true;
  again.delivered = {{{}, false}, {{oracle_answer(r, 1)[0]}, true}};
  h.submit(again);
  EXPECT_EQ(h.core.metrics().requests_running, 1u);
  h.run_all();
  Harness::GatewaySide& side = h.gateways[h.gateway];
  EXPECT_EQ((side.choice_tokens[{r.id, 0}]), oracle_answer(r, 0));
  EXPECT_TRUE((side.choice_ends[{r.id, 1}]).empty());
  EXPECT_EQ(h.core.metrics().requests_detached, 0u);
  EXPECT_EQ(h.core.metrics().kv_blocks_used, 0u);
}

// --- prompt log-probabilities

void expect_prompt(Harness& h, const AcceptedRequest& r) {
  const auto& got = h.gateways[h.gateway].prompt_logprobs[r.id];
  ASSERT_EQ(got.size(), r.prompt.size() - 1);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].logprob, oracle_prompt_logprob(r.prompt, i + 1)) << i;
  }
}

TEST(PromptLogprobs, ComeOnceHoweverThePromptIsCut) {
  for (const uint32_t chunk : {1u, 7u, 16u, 256u}) {
    SchedulerOptions options;
    options.prefill_chunk_tokens = chunk;
    Harness h(options);
    h.make_ready();
    AcceptedRequest r = choices(1, 2, 100, 4);
    r.sampling.prompt_logprobs = true;
    h.submit(r);
    h.run_all();
    expect_prompt(h, r);
    expect_answers(h, r);
    uint32_t due = 1;
    for (const TokenEvent& event : h.gateways[h.gateway].events) {
      if (event.prompt_logprobs.empty()) continue;
      EXPECT_EQ(event.choice, 0u);
      EXPECT_EQ(event.prompt_start, due);
      due += static_cast<uint32_t>(event.prompt_logprobs.size());
    }
  }
}

TEST(PromptLogprobs, OfAPromptOfOneTokenThereAreNone) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = choices(1, 1, 1, 4);
  r.sampling.prompt_logprobs = true;
  h.submit(r);
  h.run_all();
  expect_prompt(h, r);
  expect_answers(h, r);
}

TEST(PromptLogprobs, GoOnWhereALostWorkerStopped) {
  SchedulerOptions options;
  options.prefill_chunk_tokens = 10;
  Harness h(options);
  h.make_ready();
  AcceptedRequest r = choices(1, 1, 100, 4);
  r.sampling.prompt_logprobs = true;
  h.submit(r);
  for (int i = 0; i < 3; ++i) h.step(h.worker);
  EXPECT_EQ(h.gateways[h.gateway].prompt_logprobs[r.id].size(), 30u);
  const SessionId second = h.join_worker(102);
  kill_worker(h);
  EXPECT_EQ(h.workers[second].plans.front().starts.at(0).prompt_logprobs_from, 31u);
  h.run_all();
  expect_prompt(h, r);
  expect_answers(h, r);
}

TEST(PromptLogprobs, ARestartedSchedulerSendsOnlyWhatIsMissing) {
  AcceptedRequest r = choices(1, 1, 50, 4);
  r.sampling.prompt_logprobs = true;
  r.resubmitted = true;
  for (const uint32_t have : {20u, 49u}) {
    Harness h;
    h.make_ready();
    r.prompt_logprobs_delivered = have;
    auto& got = h.gateways[h.gateway].prompt_logprobs[r.id];
    for (uint32_t i = 0; i < have; ++i) got.push_back({oracle_prompt_logprob(r.prompt, i + 1), {}});
    h.submit(r);
    h.run_all();
    expect_prompt(h, r);
    expect_answers(h, r);
    if (have == 49) {
      for (const TokenEvent& event : h.gateways[h.gateway].events) EXPECT_TRUE(event.prompt_logprobs.empty());
    }
  }
}

TEST(PromptLogprobs, AGatewayThatComesBackGetsTheRest) {
  Harness h;
  h.make_ready();
  AcceptedRequest r = choices(1, 1, 100, 4);
  r.sampling.prompt_logprobs = true;
  h.submit(r);
  h.event(GatewayLost{h.gateway, unavailable("gone")});
  h.run_all();
  h.gateway = h.join_gateway();
  AcceptedRequest again = r;
  again.resubmitted = true;
  again.prompt_logprobs_delivered = 12;
  auto& got = h.gateways[h.gateway].prompt_logprobs[r.id];
  for (uint32_t i = 0; i < 12; ++i) got.push_back({oracle_prompt_logprob(r.prompt, i + 1), {}});
  h.submit(again);
  expect_prompt(h, r);
  expect_answers(h, r);
}

TEST(PromptLogprobs, TheirNumberIsBounded) {
  SchedulerOptions options;
  options.max_prompt_logprob_values = 100;
  Harness h(options);
  h.make_ready();
  AcceptedRequest r = choices(1, 1, 51, 4);
  r.sampling.prompt_logprobs = true;
  r.sampling.prompt_top_logprobs = 1;
  h.submit(r);
  EXPECT_EQ(field_of(h.reply(1)), "prompt_logprobs");
  r = choices(2, 1, 40, 4);
  r.sampling.prompt_logprobs = true;
  r.sampling.prompt_top_logprobs = 1;
  h.submit(r);
  EXPECT_TRUE(h.reply(2).ok());
  r.id.lo = 3;
  h.submit(r);
  EXPECT_EQ(h.reply(3).code(), StatusCode::kResourceExhausted);
  h.run_all();
  r.id.lo = 4;
  h.submit(r);
  EXPECT_TRUE(h.reply(4).ok());
}

TEST(PromptLogprobs, AWorkerThatReportsOthersThanAreDueIsNotBelieved) {
  using Edit = void (*)(StepResult&);
  const std::vector<Edit> edits = {
      [](StepResult& s) { s.prompt_logprobs.clear(); },
      [](StepResult& s) { s.prompt_logprobs[0].tokens.pop_back(); },
      [](StepResult& s) { ++s.prompt_logprobs[0].start; },
      [](StepResult& s) { s.prompt_logprobs.push_back(s.prompt_logprobs[0]); },
      [](StepResult& s) { s.prompt_logprobs[0].seq = SeqId(77); },
      [](StepResult& s) { s.released.push_back(s.prompt_logprobs[0].seq); },
      [](StepResult& s) { s.released.push_back(SeqId(77)); },
  };
  for (size_t i = 0; i < edits.size(); ++i) {
    Harness h;
    h.make_ready();
    AcceptedRequest r = choices(1, 1, 30, 4);
    r.sampling.prompt_logprobs = true;
    h.submit(r);
    StepResult result = h.workers[h.worker].model.run(h.workers[h.worker].plans.front());
    edits[i](result);
    h.event(MemberMessage{h.worker, result});
    EXPECT_EQ(h.core.metrics().protocol_violations, 1u) << i;
    EXPECT_TRUE(h.closed.contains(h.worker)) << i;
  }
}

TEST(Priority, TheLowerNumberIsAdmittedFirstThenTheEarlier) {
  SchedulerOptions options;
  options.max_batch_sequences = 1;
  Harness h(options);
  h.make_ready();
  const auto submit = [&](uint64_t id, int32_t priority) {
    AcceptedRequest r = Harness::request(id, 4, 3);
    r.priority = priority;
    h.submit(r);
  };
  submit(1, 0);  // runs
  submit(2, 0);
  submit(3, 5);
  submit(4, -1);
  submit(5, 0);
  std::vector<uint64_t> order;
  h.run_all();
  for (const TokenEvent& event : h.gateways[h.gateway].events) {
    if (event.finish != FinishReason::kNone) order.push_back(event.request.lo);
  }
  EXPECT_THAT(order, ElementsAre(1, 4, 2, 5, 3));
}

}  // namespace
}  // namespace conclave::scheduler
