// Reasoning, tools and conversations over the OpenAI-compatible surface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/router/openai_fixture.h"

namespace conclave::router {
namespace {

using ::testing::HasSubstr;

constexpr char kTools[] =
    R"("tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":)"
    R"({"city":{"type":"string"},"days":{"type":"integer"}}}}},)"
    R"({"type":"function","function":{"name":"now","parameters":{"type":"object","properties":{}}}}])";
constexpr char kCalls[] =
    "I should look.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n"
    "<parameter name=\"city\">K\xc3\xb6ln \"am\" Rhein</parameter>\n<parameter "
    "name=\"days\">3</parameter>\n</invoke>\n"
    "<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";

TEST(OpenAi, ReasoningAndToolCalls) {
  Scripted server(kCalls);
  server.text.starts_in_reasoning = true;
  const json::object body = chat(server, kTools);
  const json::object& message = choice_at(body, 0).at("message").as_object();
  EXPECT_EQ(message.at("reasoning_content"), "I should look.");
  EXPECT_EQ(message.at("reasoning"), "I should look.");
  EXPECT_EQ(message.at("content"), "Let me see.");
  const json::array& calls = message.at("tool_calls").as_array();
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].at("type"), "function");
  EXPECT_EQ(calls[0].at("function").at("name"), "get_weather");
  EXPECT_EQ(parse(text_of(calls[0].at("function").at("arguments"))),
            (json::object{{"city", "K\xc3\xb6ln \"am\" Rhein"}, {"days", 3}}));
  EXPECT_EQ(calls[1].at("function").at("arguments"), "{}");
  EXPECT_NE(calls[0].at("id"), calls[1].at("id"));
  EXPECT_EQ(choice_at(body, 0).at("finish_reason"), "tool_calls");
  // "I should look.\n</think>": one token a byte here.
  EXPECT_EQ(body.at("usage").at("completion_tokens_details").at("reasoning_tokens"), 23);

  auto all = accumulate(
      stream(server, "/v1/chat/completions", chat_body(std::string(kTools) + R"(,"stream":true)")));
  const Accumulated& streamed = all[0];
  EXPECT_EQ(streamed.reasoning, "I should look.");
  EXPECT_EQ(streamed.content, "Let me see.");
  EXPECT_EQ(streamed.finish, "tool_calls");
  EXPECT_EQ(streamed.finishes, 1);
  ASSERT_EQ(streamed.calls.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(streamed.calls[i].type, "function");
    EXPECT_EQ(streamed.calls[i].name, text_of(calls[i].at("function").at("name")));
    EXPECT_EQ(streamed.calls[i].arguments, text_of(calls[i].at("function").at("arguments")));
    EXPECT_FALSE(streamed.calls[i].id.empty());
  }

  // One call only; none where the client wants none; text where there are no tools.
  const json::object single = chat(server, std::string(kTools) + R"(,"parallel_tool_calls":false)");
  EXPECT_EQ(choice_at(single, 0).at("message").at("tool_calls").as_array().size(), 1u);
  for (const std::string& fields : {std::string(kTools) + R"(,"tool_choice":"none")", std::string()}) {
    const json::object plain = chat(server, fields);
    EXPECT_FALSE(choice_at(plain, 0).at("message").as_object().contains("tool_calls"));
    EXPECT_EQ(choice_at(plain, 0).at("finish_reason"), "stop");
    EXPECT_THAT(text_of(choice_at(plain, 0).at("message").at("content")), HasSubstr("get_weather"));
  }
}

TEST(OpenAi, ACallCutOffByTheLimitEndsWithLength) {
  Scripted server(kCalls);
  server.text.starts_in_reasoning = true;
  const std::string fields = std::string(kTools) + R"(,"max_tokens":130)";
  const json::object body = chat(server, fields);
  EXPECT_EQ(choice_at(body, 0).at("finish_reason"), "length");
  auto all = accumulate(stream(server, "/v1/chat/completions", chat_body(fields + R"(,"stream":true)")));
  EXPECT_EQ(all[0].finish, "length");
  const json::object& message = choice_at(body, 0).at("message").as_object();
  ASSERT_TRUE(message.contains("tool_calls"));
  ASSERT_EQ(message.at("tool_calls").as_array().size(), all[0].calls.size());
  EXPECT_EQ(message.at("tool_calls").as_array()[0].at("function").at("arguments"),
            json::string(all[0].calls[0].arguments));
}

TEST(OpenAi, ContentIsNullBesideCallsAlone) {
  Scripted server("hm</think>\n<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>");
  server.text.starts_in_reasoning = true;
  EXPECT_TRUE(choice_at(chat(server, kTools), 0).at("message").at("content").is_null());
}

TEST(OpenAi, ReasoningFormats) {
  Scripted server("because\n</think>\n\nso");
  server.text.starts_in_reasoning = true;
  const auto message = [&](const std::string& fields) {
    return choice_at(chat(server, fields), 0).at("message").as_object();
  };
  EXPECT_EQ(message(R"("reasoning_format":"separate")").at("content"), "so");
  json::object appended = message(R"("reasoning_format":"append")");
  EXPECT_FALSE(appended.contains("reasoning_content"));
  EXPECT_THAT(text_of(appended.at("content")), HasSubstr("<think>"));
  EXPECT_THAT(text_of(appended.at("content")), HasSubstr("so"));
  for (const char* fields : {R"("reasoning_format":"none")", R"("separate_reasoning":false)"})
    EXPECT_EQ(message(fields).at("content"), "because\n</think>\n\nso");
  const json::object hidden = message(R"("include_reasoning":false)");
  EXPECT_FALSE(hidden.contains("reasoning_content"));
  EXPECT_EQ(hidden.at("content"), "so");
  // Completions are what the model says, to the byte.
  EXPECT_EQ(choice_at(completion(server, R"({"prompt":"a","max_tokens":99})"), 0).at("text"),
            "because\n</think>\n\nso");
}

TEST(OpenAi, WhatTheTemplateSees) {
  Server server;
  const json::object body = post(
      server, "/v1/chat/completions",
      R"({"messages":[{"role":"developer","content":"s"},{"role":"user","content":"q"},{"role":"assistant",)"
      R"("content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"now",)"
      R"("arguments":"{\"a\": 1.0, \"b\": 12345678901234567890123}"}}]},{"role":"tool","tool_call_id":"call_1",)"
      R"("content":"noon"}],"tools":[{"type":"function","function":{"name":"now","parameters":{"x":1.50}}}],)"
      R"("chat_template_kwargs":{"enable_thinking": false},"reasoning_effort":"high"})");
  const std::string seen = text_of(choice_at(body, 0).at("message").at("content"));
  EXPECT_THAT(seen, HasSubstr(R"("role": "system")"));
  EXPECT_THAT(seen,
              HasSubstr(R"({"a": 1.0, "b": 12345678901234567890123})"));  // numbers as they were written
  EXPECT_THAT(seen, HasSubstr(R"("parameters":{"x":1.50})"));
  EXPECT_THAT(seen, HasSubstr(R"({"reasoning_effort": "high", "enable_thinking": false})"));
}

}  // namespace
}  // namespace conclave::router
