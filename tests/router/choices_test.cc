// Requests of several choices, and what the scheduler's events mean for each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/router/gateway_fixture.h"

namespace conclave::gateway {
namespace {

using testing::byte_tokens;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kEos;

GenerateRequest choices(int64_t n) {
  GenerateRequest request = text_request("hi");
  request.n = n;
  return request;
}

TEST_F(GatewayTest, EachChoiceEndsOnceAndTheRequestWithTheLast) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, choices(3));
  EXPECT_EQ(r.choices, 3u);
  scheduler.emit(r.id, 0, byte_tokens("b"), FinishReason::kNone, "", 1);
  scheduler.emit(r.id, 0, byte_tokens("ccc"), FinishReason::kLength, "", 2);
  scheduler.emit(r.id, 0, {'a', kEos}, FinishReason::kStop, "", 0);
  client.take();
  EXPECT_FALSE(client.last.ended);
  ASSERT_EQ(client.messages.size(), 3u);
  EXPECT_EQ(client.ends[0].size(), 1u);
  EXPECT_EQ(client.ends[1].size(), 0u);
  scheduler.emit(r.id, 3, byte_tokens("late"), FinishReason::kNone, "", 2);  // after its end: ignored
  scheduler.emit(r.id, 1, byte_tokens("b"), FinishReason::kLength, "", 1);
  ASSERT_TRUE(client.finish());
  EXPECT_TRUE(client.last.error.ok());
  EXPECT_EQ(client.messages[0].content, "a");
  EXPECT_EQ(client.messages[1].content, "bb");
  EXPECT_EQ(client.messages[2].content, "ccc");
  for (const auto& ends : client.ends) EXPECT_EQ(ends.size(), 1u);
  EXPECT_EQ(client.ends[0][0].finish, FinishReason::kStop);
  EXPECT_EQ(client.ends[2][0].finish, FinishReason::kLength);
  EXPECT_EQ(client.last.usage.completion_tokens, 7u);
  EXPECT_EQ(client.last.usage.prompt_tokens, 2u);
  EXPECT_EQ(scheduler.cancelled(), 0u);
  EXPECT_EQ(gateway.counts().open, 0u);
}

TEST_F(GatewayTest, AStopStringEndsItsOwnChoiceOnly) {
  Client client(gateway);
  GenerateRequest request = choices(2);
  request.stop = {"."};
  const AcceptedRequest r = begin(client, request);
  scheduler.emit(r.id, 0, byte_tokens("one. more"), FinishReason::kNone, "", 0);
  client.take();
  EXPECT_EQ(client.ends[0].size(), 1u);
  EXPECT_EQ(client.ends[0][0].stop_string, ".");
  EXPECT_FALSE(client.last.ended);
  EXPECT_EQ(scheduler.cancelled(), 0u);
  scheduler.emit(r.id, 0, byte_tokens("two. more"), FinishReason::kNone, "", 1);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.messages[0].content, "one");
  EXPECT_EQ(client.messages[1].content, "two");
  EXPECT_EQ(client.last.usage.completion_tokens, 8u);  // what came after the stop strings is not counted
  EXPECT_TRUE(scheduler.wait_cancelled(1));            // it was still generating for nothing
}

TEST_F(GatewayTest, AFailedChoiceFailsTheRequest) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, choices(2));
  scheduler.emit(r.id, 0, byte_tokens("a"), FinishReason::kLength, "", 0);
  scheduler.emit(r.id, 0, {}, FinishReason::kError, "the cause", 1);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kInternal);
  EXPECT_THAT(message_of(client.last.error), HasSubstr("the cause"));
  Client other(gateway);
  const AcceptedRequest second = begin(other, choices(2), 1);
  scheduler.emit(second.id, 0, {}, FinishReason::kError, "the cause", 0);
  ASSERT_TRUE(other.finish());
  EXPECT_TRUE(scheduler.wait_cancelled(1));  // choice 1 was running
}

TEST_F(GatewayTest, GapsAndRepeatsAreOfTheChoiceThatHasThem) {
  Client client(gateway);
  const AcceptedRequest r = begin(client, choices(2));
  scheduler.emit(r.id, 0, byte_tokens("abc"), FinishReason::kNone, "", 0);
  scheduler.emit(r.id, 1, byte_tokens("bcd"), FinishReason::kNone, "", 0);  // a replay overlaps
  scheduler.emit(r.id, 0, byte_tokens("x"), FinishReason::kNone, "", 1);
  scheduler.emit(r.id, 9, byte_tokens("x"), FinishReason::kNone, "", 7);  // no such choice
  client.take();
  EXPECT_EQ(client.messages[0].content, "abcd");
  EXPECT_EQ(client.messages[1].content, "x");
  scheduler.emit(r.id, 4, byte_tokens("x"), FinishReason::kNone, "", 1);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kInternal);
}

TEST_F(GatewayTest, TheBoundOnWaitingTokensIsOfAllChoices) {
  GatewayOptions options;
  options.stream.max_pending_tokens = 8;
  Gateway small(options, testing::fake_model(), scheduler, text);
  Client client(small);
  const AcceptedRequest r = begin(client, choices(2));
  scheduler.emit(r.id, 0, byte_tokens("12345"), FinishReason::kNone, "", 0);
  EXPECT_FALSE(client.generation->ended());
  scheduler.emit(r.id, 0, byte_tokens("12345"), FinishReason::kNone, "", 1);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kResourceExhausted);
}

TEST_F(GatewayTest, PromptLogprobsComeOnceAndInOrder) {
  Client client(gateway);
  GenerateRequest request = text_request("abcd");
  request.prompt_logprobs = 0;
  const AcceptedRequest r = begin(client, request);
  TokenEvent event;
  event.request = r.id;
  event.prompt_start = 1;
  event.prompt_logprobs = {{-1, {}}, {-2, {}}};
  scheduler.emit(event);
  scheduler.emit(event);  // repeated by a restarted scheduler
  event.prompt_start = 2;
  event.prompt_logprobs = {{-2, {}}, {-3, {}}};
  scheduler.emit(event);
  client.take();
  std::vector<float> seen;
  for (const PromptLogprob& at : client.last.prompt_logprobs) seen.push_back(at.logprob);
  EXPECT_THAT(seen, ElementsAre(-1, -2, -3));
  event.prompt_start = 9;
  scheduler.emit(event);
  ASSERT_TRUE(client.finish());
  EXPECT_EQ(client.last.error.code(), StatusCode::kInternal);
}

TEST_F(GatewayTest, ReasoningAndCallsOfEachChoiceAreItsOwn) {
  text.starts_in_reasoning = true;
  Client client(gateway);
  GenerateRequest request = choices(2);
  request.prompt = chat_prompt(R"([{"role":"user","content":"hi"}])");
  request.conversation = true;
  request.tools = text::ToolSet::parse(R"([{"name":"now"}])").value();
  const AcceptedRequest r = begin(client, request);
  scheduler.emit(r.id, 0, byte_tokens("why</think>\n\nyes"), FinishReason::kNone, "", 0);
  scheduler.emit(
      r.id, 0,
      byte_tokens(
          "hm</think>\n\n<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>"),
      FinishReason::kNone, "", 1);
  scheduler.emit(r.id, 16, {kEos}, FinishReason::kStop, "", 0);
  const auto made = static_cast<uint32_t>(
      std::string("hm</think>\n\n<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>")
          .size());
  scheduler.emit(r.id, made, {kEos}, FinishReason::kStop, "", 1);
  ASSERT_TRUE(client.finish());
  EXPECT_TRUE(client.last.error.ok()) << client.last.error;
  EXPECT_EQ(client.messages[0].reasoning, "why");
  EXPECT_EQ(client.messages[0].content, "yes");
  EXPECT_EQ(client.ends[0][0].chat_finish, text::ChatFinish::kStop);
  EXPECT_EQ(client.messages[1].calls.size(), 1u);
  EXPECT_EQ(client.ends[1][0].chat_finish, text::ChatFinish::kToolCalls);
  EXPECT_EQ(client.last.usage.reasoning_tokens, 11u + 10u);
}

TEST_F(GatewayTest, AConversationThatCannotFitIsNotRendered) {
  GenerateRequest request;
  ChatPrompt chat = chat_prompt(R"([{"role":"user","content":"hi"}])");
  chat.text_bytes = 12 << 20;
  chat.largest_field = "messages[3].content";
  request.prompt = chat;
  request.prompt_field = "messages";
  const auto refused = gateway.generate(request, [] {}).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(field_of(refused), "messages[3].content");
  EXPECT_EQ(code_of(refused), "context_length_exceeded");
  EXPECT_EQ(text.chats.load(), 0);
}

TEST(RequestIds, AreTextAndBack) {
  const RequestId id{0x0123456789abcdef, 7};
  EXPECT_EQ(id_text(id), "0123456789abcdef0000000000000007");
  EXPECT_EQ(parse_id(id_text(id)), id);
  EXPECT_EQ(parse_id("chatcmpl-" + id_text(id)), id);
  EXPECT_EQ(parse_id("cmpl-" + id_text(id)), id);
  for (const char* bad : {"", "0123", "0123456789abcdef000000000000000g", "0123456789abcdef00000000000000070",
                          "-123456789abcdef0000000000000007", "chatcmpl-"})
    EXPECT_EQ(parse_id(bad), std::nullopt) << bad;
}

}  // namespace
}  // namespace conclave::gateway
