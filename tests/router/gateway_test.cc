#include "router_service/gateway/gateway.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "tests/router/gateway_fixture.h"

namespace conclave::gateway {
namespace {

using testing::byte_tokens;
using ::testing::ElementsAre;
using testing::fake_model;
using testing::FakeScheduler;
using testing::FakeText;
using ::testing::HasSubstr;
using testing::kEos;

TEST_F(GatewayTest, FillsDefaultsAndPassesWhatTheClientSaid) {
  Client plain(gateway);
  const AcceptedRequest first = begin(plain, text_request("hello"));
  EXPECT_EQ(first.prompt, byte_tokens("hello"));
  EXPECT_FLOAT_EQ(first.sampling.temperature, 0.7f);
  EXPECT_FLOAT_EQ(first.sampling.top_p, 0.95f);
  EXPECT_EQ(first.sampling.top_k, 40u);
  EXPECT_EQ(first.sampling.max_tokens, 4096u - 5);
  EXPECT_THAT(first.sampling.stop_token_ids, ElementsAre(kEos));
  EXPECT_EQ(first.sampling.vocab_limit, testing::kFakeVocab);
  EXPECT_LE(first.time_left, 600 * kSecond);
  EXPECT_GT(first.time_left, 580 * kSecond);

  GenerateRequest request;
  request.prompt = TokenPrompt{{1, 2, 3}};
  request.temperature = 0;
  request.top_p = 0.5;
  request.top_k = -1;
  request.min_p = 0.1;
  request.seed = 42;
  request.max_tokens = 7;
  request.min_tokens = 2;
  request.ignore_eos = true;
  request.stop_token_ids = {9, 9};
  request.time_left = 3 * kSecond;
  Client chosen(gateway);
  const AcceptedRequest second = begin(chosen, request, 1);
  EXPECT_THAT(second.prompt, ElementsAre(1, 2, 3));
  EXPECT_EQ(second.sampling.temperature, 0);
  EXPECT_EQ(second.sampling.top_k, 0u);
  EXPECT_EQ(second.sampling.seed, 42u);
  EXPECT_EQ(second.sampling.max_tokens, 7u);
  EXPECT_EQ(second.sampling.min_tokens, 2u);
  EXPECT_THAT(second.sampling.stop_token_ids, ElementsAre(9));
  EXPECT_LE(second.time_left, 3 * kSecond);
}

TEST_F(GatewayTest, AMissingSeedIsDrawnAtAcceptance) {
  Client a(gateway), b(gateway);
  const uint64_t first = begin(a, text_request("x")).sampling.seed;
  EXPECT_NE(begin(b, text_request("x"), 1).sampling.seed, first);
}

TEST_F(GatewayTest, RefusalsNameTheFieldBeforeAnyWork) {
  const auto field = [&](const std::function<void(GenerateRequest&)>& change) {
    GenerateRequest request = text_request("hi");
    change(request);
    const auto status = gateway.generate(request, [] {}).status();
    EXPECT_FALSE(status.ok());
    return field_of(status);
  };
  EXPECT_EQ(field([](auto& r) { r.model = "gpt-9"; }), "model");
  EXPECT_EQ(field([](auto& r) { r.temperature = -0.1; }), "temperature");
  EXPECT_EQ(field([](auto& r) { r.temperature = 1e300; }), "temperature");
  EXPECT_EQ(field([](auto& r) { r.top_p = 0; }), "top_p");
  EXPECT_EQ(field([](auto& r) { r.top_p = 1.01; }), "top_p");
  EXPECT_EQ(field([](auto& r) { r.top_k = -2; }), "top_k");
  EXPECT_EQ(field([](auto& r) { r.min_p = 2; }), "min_p");
  EXPECT_EQ(field([](auto& r) { r.max_tokens = 0; }), "max_tokens");
  EXPECT_EQ(field([](auto& r) { r.max_tokens = -5; }), "max_tokens");
  EXPECT_EQ(field([](auto& r) { r.min_tokens = -1; }), "min_tokens");
  EXPECT_EQ(field([](auto& r) { r.min_tokens = 5, r.max_tokens = 4; }), "min_tokens");
  EXPECT_EQ(field([](auto& r) { r.stop = {""}; }), "stop");
  EXPECT_EQ(field([](auto& r) { r.stop = {std::string(2000, 'x')}; }), "stop");
  EXPECT_EQ(field([](auto& r) { r.stop.assign(17, "x"); }), "stop");
  EXPECT_EQ(field([](auto& r) { r.stop_token_ids = {264}; }), "stop_token_ids");
  EXPECT_EQ(field([](auto& r) { r.prompt = TextPrompt{""}; }), "prompt");
  EXPECT_EQ(field([](auto& r) { r.prompt = TokenPrompt{}; }), "prompt");
  EXPECT_EQ(field([](auto& r) { r.prompt = TokenPrompt{{1, -1}}; }), "prompt");
  EXPECT_EQ(field([](auto& r) { r.prompt = TokenPrompt{{264}}; }), "prompt");
  EXPECT_EQ(field([](auto& r) { r.prompt = TextPrompt{std::string(5000, 'x')}; }), "prompt");
  EXPECT_EQ(field([](auto& r) { r.prompt = TokenPrompt{std::vector<int64_t>(4096, 1)}; }), "prompt");
  EXPECT_EQ(field([](auto& r) {
              r.prompt = TokenPrompt{std::vector<int64_t>(4000, 1)};
              r.max_tokens = 97;
            }),
            "max_tokens");
  EXPECT_EQ(scheduler.submitted(), 0u);
  EXPECT_EQ(gateway.counts().open, 0u);
}

TEST_F(GatewayTest, LimitsOfTheContextAreExact) {
  GenerateRequest request;
  request.prompt = TokenPrompt{std::vector<int64_t>(4000, 1)};
  request.max_tokens = 96;
  Client fits(gateway);
  EXPECT_EQ(begin(fits, request).sampling.max_tokens, 96u);
  request.prompt = TokenPrompt{std::vector<int64_t>(4095, 1)};
  request.max_tokens.reset();
  Client last(gateway);
  EXPECT_EQ(begin(last, request, 1).sampling.max_tokens, 1u);
  // A fleet that holds less than the model allows decides.
  scheduler.set_fleet({true, "", 100, "", ""});
  const auto status = gateway.generate(text_request(std::string(100, 'x')), [] {}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of(status), "context_length_exceeded");
}

TEST_F(GatewayTest, NotReadyAndDrainingAreUnavailableWithTheReason) {
  scheduler.set_fleet({false, "expert 7 of layer 3 has no home", 0, "", ""});
  auto status = gateway.generate(text_request("x"), [] {}).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(message_of(status), HasSubstr("expert 7 of layer 3"));
  scheduler.set_fleet({true, "", 0, "", ""});
  gateway.begin_drain();
  status = gateway.generate(text_request("x"), [] {}).status();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(scheduler.submitted(), 0u);
}

TEST_F(GatewayTest, APassingGapInReadinessRefusesNobody) {
  scheduler.set_fleet({false, "a shard died", 0, "", "", steady_now()});
  Client client(gateway);
  const AcceptedRequest r = begin(client, text_request("hi"));
  scheduler.emit(r.id, 0, byte_tokens("x"), FinishReason::kLength);
  ASSERT_TRUE(client.finish());
  EXPECT_TRUE(client.last.error.ok());
  EXPECT_FALSE(gateway.ready().ok());
  scheduler.set_fleet({false, "a shard died", 0, "", "", steady_now() - GatewayOptions().unready_grace});
  EXPECT_EQ(gateway.generate(text_request("x"), [] {}).status().code(), StatusCode::kUnavailable);
}

TEST(FleetInfo, RemembersWhenReadinessWasLost) {
  FleetInfo ready;
  ready.ready = true;
  const FleetInfo gone;
  FleetInfo fleet = FleetInfo().follow(gone, 5);
  EXPECT_EQ(fleet.unready_since, kNever);
  fleet = fleet.follow(ready, 10).follow(gone, 20).follow(gone, 30);
  EXPECT_EQ(fleet.unready_since, 20);
  EXPECT_EQ(fleet.follow(ready, 40).unready_since, kNever);
}

TEST_F(GatewayTest, TextAndUsageOfAPlainAnswer) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, text_request("hi"));
  scheduler.emit(r.id, 0, byte_tokens("one "));
  scheduler.emit(r.id, 4, byte_tokens("two"), FinishReason::kLength);
  ASSERT_TRUE(client.finish());
  EXPECT_TRUE(client.last.error.ok());
  EXPECT_EQ(client.text, "one two");
  EXPECT_EQ(client.finish_reason, FinishReason::kLength);
  EXPECT_EQ(client.last.usage.prompt_tokens, 2u);
  EXPECT_EQ(client.last.usage.completion_tokens, 7u);
  EXPECT_EQ(scheduler.cancelled(), 0u);
  EXPECT_EQ(gateway.counts().open, 0u);
  std::lock_guard lock(mutex);
  ASSERT_EQ(summaries.size(), 1u);
  EXPECT_EQ(summaries[0].finish, FinishReason::kLength);
  EXPECT_GE(summaries[0].to_first_token, 0);
}

TEST_F(GatewayTest, TheEndOfSequenceTokenIsCountedAndHasNoText) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, text_request("hi"));
  scheduler.emit(r.id, 0, {'o', 'k', kEos}, FinishReason::kStop);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.text, "ok");
  EXPECT_EQ(client.last.usage.completion_tokens, 3u);
  EXPECT_EQ(client.finish_reason, FinishReason::kStop);
}

TEST_F(GatewayTest, StopStringAcrossTokensEndsAtItsToken) {
  Client client(gateway);
  GenerateRequest request = text_request("hi");
  request.stop = {"END", "nothing"};
  const AcceptedRequest r = begin(client, request);
  uint32_t index = 0;
  for (const char c : std::string("some EN")) scheduler.emit(r.id, index++, byte_tokens(std::string(1, c)));
  ASSERT_TRUE(client.take_until([&] { return client.tokens.size() == 7; }));
  EXPECT_EQ(client.text, "some ");  // "EN" may still become a stop string
  EXPECT_FALSE(client.last.ended);
  scheduler.emit(r.id, index, byte_tokens("Discarded"));  // D completes it; the rest was sampled for nothing
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.text, "some ");
  EXPECT_EQ(client.finish_reason, FinishReason::kStop);
  EXPECT_EQ(client.last.usage.completion_tokens, 8u);
  EXPECT_EQ(client.tokens.size(), 8u);
  EXPECT_TRUE(scheduler.wait_cancelled(1));
}

TEST_F(GatewayTest, AStopStringEndsItsChoiceAtTheSchedulerAndNoOther) {
  Client client(gateway);
  GenerateRequest request = text_request("hi");
  request.stop = {"END"};
  request.n = 2;
  const AcceptedRequest r = begin(client, request);
  scheduler.emit(r.id, 0, byte_tokens("some END"), FinishReason::kNone, "", 1);
  scheduler.emit(r.id, 0, byte_tokens("more"));
  ASSERT_TRUE(client.take_until([&] { return client.ends.size() == 2 && client.ends[1].size() == 1; }));
  EXPECT_THAT(scheduler.cancelled_choices(), ElementsAre(std::pair(r.id, 1u)));
  scheduler.emit(r.id, 8, {}, FinishReason::kCancelled, "", 1);  // the scheduler's own word for it
  scheduler.emit(r.id, 4, byte_tokens("END"));
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.text, "more");
  EXPECT_EQ(client.messages[1].content, "some ");
  EXPECT_EQ(client.ends[1][0].finish, FinishReason::kStop);
  EXPECT_EQ(client.finish_reason, FinishReason::kStop);
  EXPECT_TRUE(scheduler.wait_cancelled(1));
  EXPECT_EQ(scheduler.cancelled_choices().size(), 1u);  // the last choice is the request's end
}

TEST_F(GatewayTest, AHeldBackStopPrefixComesOutAtTheEnd) {
  Client client(gateway);
  GenerateRequest request = text_request("hi");
  request.stop = {"END"};
  const AcceptedRequest r = begin(client, request);
  scheduler.emit(r.id, 0, byte_tokens("the EN"), FinishReason::kLength);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.text, "the EN");
  EXPECT_EQ(client.finish_reason, FinishReason::kLength);
}

TEST_F(GatewayTest, AnUnfinishedCharacterComesAfterHeldText) {
  Client client(gateway);
  GenerateRequest request = text_request("hi");
  request.stop = {"E\xc3\xa9"};
  const AcceptedRequest r = begin(client, request);
  scheduler.emit(r.id, 0, byte_tokens("aE\xc3"), FinishReason::kLength);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.text, "aE\xef\xbf\xbd");
}

TEST_F(GatewayTest, StopStringsWaitForMinTokens) {
  Client client(gateway);
  GenerateRequest request = text_request("hi");
  request.stop = {"."};
  request.min_tokens = 3;
  const AcceptedRequest r = begin(client, request);
  scheduler.emit(r.id, 0, byte_tokens("a.b.c"));
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.text, "a.b");
  EXPECT_EQ(client.last.usage.completion_tokens, 4u);
}

TEST_F(GatewayTest, CharactersAreNeverCut) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, text_request("hi"));
  const std::string words = "h\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80!";
  uint32_t index = 0;
  for (const TokenId token : byte_tokens(words)) {
    scheduler.emit(r.id, index++, {token});
    client.take();
    EXPECT_EQ(client.text.find("\xef\xbf\xbd"), std::string::npos);
    if (!client.text.empty()) {
      EXPECT_EQ(words.compare(0, client.text.size(), client.text), 0);
    }
  }
  scheduler.emit(r.id, index, {}, FinishReason::kLength);
  client.take();
  EXPECT_EQ(client.text, words);
  EXPECT_TRUE(client.last.ended);
}

TEST_F(GatewayTest, RepeatedTokensAreDroppedAndAGapIsAnError) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, text_request("hi"));
  scheduler.emit(r.id, 0, byte_tokens("abc"));
  scheduler.emit(r.id, 1, byte_tokens("bcd"));  // a replay overlaps
  scheduler.emit(r.id, 0, byte_tokens("ab"));
  scheduler.emit(r.id, 4, byte_tokens("e"));
  client.take();
  EXPECT_EQ(client.text, "abcde");
  EXPECT_EQ(client.last.usage.completion_tokens, 5u);
  scheduler.emit(r.id, 7, byte_tokens("x"));
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kInternal);
  EXPECT_TRUE(scheduler.wait_cancelled(1));
}

TEST_F(GatewayTest, RefusalsAndFailuresOfTheScheduler) {
  Client refused(gateway);
  ASSERT_TRUE(refused.start(text_request("hi")).ok());
  scheduler.refuse(scheduler.wait_submitted().id, resource_exhausted("queue full"));
  ASSERT_TRUE(refused.finish());
  EXPECT_EQ(refused.last.error.code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(refused.last.accepted);

  const std::vector<std::pair<FinishReason, StatusCode>> ends = {
      {FinishReason::kError, StatusCode::kInternal},
      {FinishReason::kDeadline, StatusCode::kDeadlineExceeded},
      {FinishReason::kCancelled, StatusCode::kCancelled}};
  size_t n = 1;
  for (const auto& [finish, code] : ends) {
    Client client(gateway);
    const AcceptedRequest r = begin(client, text_request("hi"), n++);
    scheduler.emit(r.id, 0, byte_tokens("a"));
    scheduler.emit(r.id, 1, {}, finish, "the cause");
    ASSERT_TRUE(client.finish());
    EXPECT_EQ(client.last.error.code(), code);
    EXPECT_EQ(client.text, "a");
  }
  EXPECT_EQ(scheduler.cancelled(), 0u);  // the scheduler had ended them itself
  EXPECT_EQ(gateway.counts().open, 0u);
}

TEST_F(GatewayTest, ACancelledClientEndsTheSequenceOnceAndIsSilent) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, text_request("hi"));
  client.generation->cancel();
  client.generation->cancel();
  EXPECT_TRUE(scheduler.wait_cancelled(1));
  EXPECT_FALSE(scheduler.wait_cancelled(2, std::chrono::milliseconds(20)));
  scheduler.emit(r.id, 0, byte_tokens("late"));
  client.take();
  EXPECT_EQ(client.text, "");
  EXPECT_EQ(gateway.counts().open, 0u);
  EXPECT_TRUE(gateway.wait_idle(0));
}

TEST_F(GatewayTest, ASlowClientIsCutOffAtTheBound) {
  GatewayOptions options;
  options.stream.max_pending_tokens = 8;
  Gateway small(options, fake_model(), scheduler, text);
  Client client(small);
  const AcceptedRequest r = begin(client, text_request("hi"));
  scheduler.emit(r.id, 0, byte_tokens("12345678"));
  EXPECT_FALSE(client.generation->ended());
  scheduler.emit(r.id, 8, byte_tokens("9"));
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(scheduler.wait_cancelled(1));
}

TEST_F(GatewayTest, WhatARequestWaitsForHereIsTold) {
  const Nanos limit = 30 * kSecond;
  const auto stalled = [&](Nanos after) { return gateway.stalled(steady_now() + after, limit); };
  Client client(gateway);
  ASSERT_TRUE(client.start(text_request("hi")).ok());
  const AcceptedRequest r = scheduler.wait_submitted();
  EXPECT_TRUE(stalled(10 * kSecond).empty());
  ASSERT_EQ(stalled(60 * kSecond).size(), 1u);
  EXPECT_EQ(stalled(60 * kSecond)[0].id, r.id);
  EXPECT_EQ(stalled(60 * kSecond)[0].hop, StallHop::kScheduler);
  scheduler.accept(r.id);
  scheduler.emit(r.id, 0, byte_tokens("x"));
  ASSERT_EQ(stalled(60 * kSecond).size(), 1u);
  EXPECT_EQ(stalled(60 * kSecond)[0].hop, StallHop::kClient);
  client.take();
  EXPECT_TRUE(stalled(3600 * kSecond).empty());  // its tokens are the scheduler's business
  scheduler.emit(r.id, 1, byte_tokens("y"), FinishReason::kLength);
  EXPECT_TRUE(stalled(3600 * kSecond).empty());  // it has ended
  ASSERT_TRUE(client.finish());

  text.stall.store(true);  // the template takes its time
  GenerateRequest chat = text_request("");
  ChatPrompt prompt;
  prompt.request.messages_json = R"([{"role":"user","content":"hi"}])";
  chat.prompt = std::move(prompt);
  chat.conversation = true;
  chat.time_left = 500 * kMillisecond;
  Client waits(gateway);
  ASSERT_TRUE(waits.start(std::move(chat)).ok());
  for (const StalledRequest& one : stalled(60 * kSecond)) EXPECT_EQ(one.hop, StallHop::kText);
  ASSERT_TRUE(waits.finish());
}

TEST_F(GatewayTest, ADeadlineThatHasPassedIsNotSubmitted) {
  GenerateRequest request = text_request("hi");
  request.time_left = 0;
  Client client(gateway);
  ASSERT_TRUE(client.start(request).ok());
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(scheduler.submitted(), 0u);
}

TEST_F(GatewayTest, OpenRequestsAreBounded) {
  GatewayOptions options;
  options.limits.max_requests = 2;
  Gateway small(options, fake_model(), scheduler, text);
  Client a(small), b(small);
  const AcceptedRequest first = begin(a, text_request("a"));
  begin(b, text_request("b"), 1);
  EXPECT_EQ(small.generate(text_request("c"), [] {}).status().code(), StatusCode::kResourceExhausted);
  scheduler.emit(first.id, 0, byte_tokens("x"), FinishReason::kLength);
  Client c(small);
  begin(c, text_request("c"), 2);
}

TEST_F(GatewayTest, TemplatesThatRefuseNameTheMessages) {
  GenerateRequest request;
  request.prompt = chat_prompt("[{\"role\":\"user\",\"content\":\"refuse-me\"}]");
  request.prompt_field = "messages";
  Client client(gateway);
  ASSERT_TRUE(client.start(request).ok());
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(client.last.error), "messages");
  EXPECT_EQ(scheduler.submitted(), 0u);
}

TEST_F(GatewayTest, ShutdownEndsWhatIsOpen) {
  auto inner = std::make_unique<Gateway>(GatewayOptions{}, fake_model(), scheduler, text);
  Client client(*inner);
  begin(client, text_request("hi"));
  EXPECT_FALSE(inner->wait_idle(1 * kMillisecond));
  inner.reset();
  client.take();
  EXPECT_EQ(client.last.error.code(), StatusCode::kUnavailable);
  EXPECT_TRUE(scheduler.wait_cancelled(1));
}

// An end that another thread is just reporting: the gateway must not go away under it.
TEST(GatewayEnds, TheGatewayWaitsForAnEndThatIsBeingReported) {
  FakeScheduler scheduler;
  FakeText text;
  std::promise<void> reporting, go_on;
  std::atomic<bool> reported{false};
  auto gateway =
      std::make_unique<Gateway>(GatewayOptions{}, fake_model(), scheduler, text, [&](const Summary&) {
        reporting.set_value();
        go_on.get_future().wait();
        reported = true;
      });
  Client client(*gateway);
  ASSERT_TRUE(client.start(text_request("hi")).ok());
  const RequestId id = scheduler.wait_submitted().id;
  std::thread emitting([&] { scheduler.emit(id, 0, {'x'}, FinishReason::kLength); });
  reporting.get_future().wait();
  auto gone = std::async(std::launch::async, [&] {
    gateway.reset();
    return reported.load();
  });
  EXPECT_EQ(gone.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  go_on.set_value();
  EXPECT_TRUE(gone.get());
  emitting.join();
}

// Many requests through an answering scheduler, some cancelled at once: every one ends exactly once.
TEST(GatewayLoad, EveryRequestEndsOnce) {
  FakeScheduler scheduler([](const AcceptedRequest& r) { return r.prompt; });
  FakeText text;
  std::atomic<int> ends{0};
  {
    Gateway gateway(GatewayOptions{}, fake_model(), scheduler, text, [&](const Summary&) { ++ends; });
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 200; ++i) {
      clients.push_back(std::make_unique<Client>(gateway));
      ASSERT_TRUE(clients.back()->start(text_request("prompt " + std::to_string(i))).ok());
      if (i % 5 == 0) clients.back()->generation->cancel();
    }
    for (int i = 0; i < 200; ++i) {
      if (i % 5 == 0) continue;
      ASSERT_TRUE(clients[i]->finish());
      EXPECT_EQ(clients[i]->text, "prompt " + std::to_string(i));
    }
    EXPECT_TRUE(gateway.wait_idle(10 * kSecond));
  }
  EXPECT_EQ(ends.load(), 200);
}

}  // namespace
}  // namespace conclave::gateway
