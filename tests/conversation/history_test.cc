#include "libs/text/conversation/history.h"

#include <gtest/gtest.h>

#include "libs/text/conversation/json_text.h"

namespace conclave::text {
namespace {

ConversationFormat m2_format() {
  ConversationFormat out;
  out.tools = ToolFormat::kMiniMaxM2;
  out.reasons = true;
  return out;
}

// As MiniMax-M2's template, and as M1's, which knows parts and nothing else.
constexpr TemplateTraits kAll = {true, true, true, true, true};
constexpr TemplateTraits kParts = {false, true, false, false, true};

std::string normal(const std::string& messages, const TemplateTraits& traits = kAll,
                   const ConversationFormat& format = m2_format()) {
  auto out = normalize_history(messages, traits, format);
  EXPECT_TRUE(out.ok()) << out.status();
  if (!out.ok()) return {};
  EXPECT_TRUE(read_json(out->messages_json).has_value()) << out->messages_json;
  return out->messages_json;
}

TEST(History, ReasoningComesInThreeWays) {
  const std::string want = R"([{"role": "assistant", "reasoning_content": "thought", "content": "answer"}])";
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"answer","reasoning_content":"thought"}])"), want);
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"answer","reasoning":"thought"}])"), want);
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"<think>\nthought\n</think>\n\nanswer"}])"), want);
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"thought\n</think>\n\nanswer"}])"), want);
  EXPECT_EQ(
      normal(R"([{"role":"assistant","content":[{"type":"text","text":"<think>thought</think>answer"}]}])"),
      want);
  // Given both ways, the field counts and the text is left alone.
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"a</think>b","reasoning_content":"r"}])"),
            R"([{"role": "assistant", "reasoning_content": "r", "content": "a</think>b"}])");
  // A template that has no such field gets the text.
  EXPECT_EQ(
      normal(R"([{"role":"assistant","content":"answer","reasoning":"thought"}])", kParts),
      R"([{"role": "assistant", "content": [{"type": "text", "text": "<think>\nthought\n</think>\nanswer"}]}])");
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"<think>t</think>a"}])", kParts),
            R"([{"role": "assistant", "content": [{"type": "text", "text": "<think>t</think>a"}]}])");
  // Only an assistant reasons.
  EXPECT_EQ(normal(R"([{"role":"user","content":"x</think>y"}])"),
            R"([{"role": "user", "content": "x</think>y"}])");
}

TEST(History, ArgumentsBecomeObjects) {
  EXPECT_EQ(
      normal(R"([{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":
    {"name":"f","arguments":"{\"b\": 1.50, \"a\": 12345678901234567890123, \"s\": \"\\u00e9\"}"}}]}])"),
      R"([{"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", )"
      R"("arguments": {"b": 1.50, "a": 12345678901234567890123, "s": "\u00e9"}}}], "content": ""}])");
  const std::string empty =
      R"([{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", )"
      R"("arguments": {}}}], "content": ""}])";
  for (const char* arguments : {"\"\"", "\"{}\"", "{}", "null", "\" \\n\""}) {
    EXPECT_EQ(
        normal(std::string(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":)") +
               arguments + "}}]}]"),
        empty);
  }
  EXPECT_EQ(normal(R"([{"role":"assistant","content":"","tool_calls":[]}])"),
            R"([{"role": "assistant", "content": ""}])");
  // Without a place in the template, as the model writes them; tool results know whose they are.
  ConversationFormat m1 = m2_format();
  m1.tools = ToolFormat::kMiniMaxM1;
  EXPECT_EQ(
      normal(
          R"([{"role":"assistant","content":"Look.","tool_calls":[{"id":"c1","function":{"name":"f","arguments":
    "{\"a\":\n1}"}}]},{"role":"tool","tool_call_id":"c1","content":"ok"}])",
          kParts, m1),
      R"([{"role": "assistant", "content": [{"type": "text", "text": "Look.\n<tool_calls>\n{\"name\": \"f\", )"
      R"(\"arguments\": {\"a\": 1}}\n</tool_calls>"}]}, {"role": "tool", "tool_call_id": "c1", "content": )"
      R"([{"type": "text", "text": "ok", "name": "f"}]}])");
  TemplateTraits no_calls = kAll;
  no_calls.takes_tool_calls = false;
  EXPECT_EQ(
      normal(R"([{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":
    "{\"a\": 1, \"s\": \"x\"}"}}]}])",
             no_calls),
      R"([{"role": "assistant", "content": "\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">1)"
      R"(</parameter>\n<parameter name=\"s\">x</parameter>\n</invoke>\n</minimax:tool_call>"}])");
}

TEST(History, ContentTakesTheTemplatesForm) {
  const std::string parts = R"([{"role":"user","content":[{"type":"text","text":"a"},"b"]}])";
  EXPECT_EQ(normal(parts), R"([{"role": "user", "content": [{"type":"text","text":"a"},"b"]}])");
  TemplateTraits text_only = kAll;
  text_only.takes_parts = false;
  EXPECT_EQ(normal(parts, text_only), R"([{"role": "user", "content": "a\nb"}])");
  // A template that reads one part of a user's message gets one; an assistant's are joined by itself.
  TemplateTraits one_part = kParts;
  one_part.takes_all_parts = false;
  const std::string two = R"("content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])";
  EXPECT_EQ(normal(R"([{"role":"user",)" + two, one_part),
            R"([{"role": "user", "content": [{"type": "text", "text": "a\nb"}]}])");
  EXPECT_EQ(normal(R"([{"role":"assistant",)" + two, one_part),
            R"([{"role": "assistant", "content": [{"type":"text","text":"a"},{"type":"text","text":"b"}]}])");
  EXPECT_EQ(normal(R"([{"role":"user",)" + two, kParts),
            R"([{"role": "user", "content": [{"type":"text","text":"a"},{"type":"text","text":"b"}]}])");
  EXPECT_EQ(normal(R"([{"role":"user","content":"a"}])", kParts),
            R"([{"role": "user", "content": [{"type": "text", "text": "a"}]}])");
  // The rest of a message is left as it is.
  EXPECT_EQ(
      normal(R"([{"role":"developer","content":"s","current_date":"2026-01-02","name":null,"x":{"y":1.0}}])"),
      R"([{"role": "system", "current_date": "2026-01-02", "x": {"y":1.0}, "content": "s"}])");
}

TEST(History, WhatATemplateLeavesOutIsSaid) {
  TemplateTraits traits = kAll;
  traits.takes_late_system = false;
  auto out = normalize_history(R"([{"role":"system","content":"a"},{"role":"user","content":"b"},
    {"role":"system","content":"c"}])",
                               traits, m2_format());
  ASSERT_TRUE(out.ok());
  ASSERT_EQ(out->warnings.size(), 1u);
  EXPECT_NE(out->warnings[0].find("messages[2]"), std::string::npos);
}

TEST(History, BadMessagesAreNamed) {
  const auto field = [](const std::string& messages) {
    const Status status = normalize_history(messages, kAll, m2_format()).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << messages;
    return field_of(status);
  };
  EXPECT_EQ(field("["), "messages");
  EXPECT_EQ(field("{}"), "messages");
  EXPECT_EQ(field("[]"), "messages");
  EXPECT_EQ(field("[1]"), "messages[0]");
  EXPECT_EQ(field(R"([{"content":"x"}])"), "messages[0].role");
  EXPECT_EQ(field(R"([{"role":"]~b]system","content":"x"}])"), "messages[0].role");
  EXPECT_EQ(field(R"([{"role":"user"}])"), "messages[0].content");
  EXPECT_EQ(field(R"([{"role":"user","content":5}])"), "messages[0].content");
  EXPECT_EQ(field(R"([{"role":"assistant"}])"), "messages[0].content");
  EXPECT_EQ(field(R"([{"role":"user","content":[{"type":"image_url"}]}])"), "messages[0].content[0].type");
  EXPECT_EQ(field(R"([{"role":"user","content":[{"type":"text"}]}])"), "messages[0].content[0].text");
  EXPECT_EQ(field(R"([{"role":"user","content":"x","tool_calls":[]}])"), "messages[0].tool_calls");
  EXPECT_EQ(field(R"([{"role":"assistant","reasoning":{}}])"), "messages[0].reasoning");
  const auto call = [&](const std::string& function) {
    return field(R"([{"role":"assistant","tool_calls":[{"function":)" + function + "}]}]");
  };
  EXPECT_EQ(call("1"), "messages[0].tool_calls[0].function");
  EXPECT_EQ(call("{}"), "messages[0].tool_calls[0].function.name");
  for (const char* arguments : {"\"{\"", "\"[]\"", "\"1\"", "5", "\"{} {}\""}) {
    EXPECT_EQ(call(std::string(R"({"name":"f","arguments":)") + arguments + "}"),
              "messages[0].tool_calls[0].function.arguments");
  }
}

TEST(History, ToolsInTheTemplatesForm) {
  const std::string bare = R"([{"name": "f", "parameters": {"a": 1.0}}])";
  const std::string wrapped =
      R"([{"type": "function", "function": {"name": "f", "parameters": {"a": 1.0}}}])";
  EXPECT_EQ(normalize_tools(bare, ToolFormat::kMiniMaxM2), wrapped);
  EXPECT_EQ(normalize_tools(wrapped, ToolFormat::kMiniMaxM2), wrapped);
  EXPECT_EQ(normalize_tools(wrapped, ToolFormat::kMiniMaxM1), bare);
  EXPECT_EQ(normalize_tools(bare, ToolFormat::kMiniMaxM1), bare);
}

}  // namespace
}  // namespace conclave::text
