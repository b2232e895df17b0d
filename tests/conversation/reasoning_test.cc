#include "libs/text/conversation/reasoning_parser.h"

#include <gtest/gtest.h>

namespace conclave::text {
namespace {

struct Result {
  std::string reasoning;
  std::string answer;
  uint64_t end = 0;
  bool open = false;
};

Result parse(const std::string& text, bool starts_inside, ReasoningFormat format = ReasoningFormat::kSeparate,
             std::vector<std::string> implicit_ends = {}) {
  ReasoningOptions options;
  options.starts_inside = starts_inside;
  options.format = format;
  options.implicit_ends = std::move(implicit_ends);
  ReasoningParser parser(options);
  const auto a = parser.push(text);
  const auto b = parser.flush();
  EXPECT_LE(parser.settled(), text.size());
  return {a.reasoning + b.reasoning, a.answer + b.answer, parser.end().value_or(0),
          !parser.end().has_value()};
}

void expect(const Result& got, const std::string& reasoning, const std::string& answer) {
  EXPECT_EQ(got.reasoning, reasoning);
  EXPECT_EQ(got.answer, answer);
}

TEST(Reasoning, StartsInsideWhenThePromptDid) {
  expect(parse("thought\n</think>\n\nanswer", true), "thought", "answer");
  expect(parse("thought</think>answer", true), "thought", "answer");
  // The opening tag may come nevertheless.
  expect(parse("<think>\nthought\n</think>\n\nanswer", true), "thought", "answer");
  expect(parse("\n<think>thought</think>answer", true), "thought", "answer");
  EXPECT_EQ(parse("thought\n</think>\n\nanswer", true).end, 16u);
  // Never closed: all of it is reasoning.
  const Result open = parse("thought, cut", true);
  expect(open, "thought, cut", "");
  EXPECT_TRUE(open.open);
  expect(parse("thought </thi", true), "thought ", "");
  expect(parse("thought <", true), "thought <", "");
  expect(parse("", true), "", "");
  expect(parse("</think>", true), "", "");
}

TEST(Reasoning, OutsideItNeedsItsTag) {
  expect(parse("<think>thought</think>\nanswer", false), "thought", "answer");
  expect(parse("\n\n<think>\nthought\n</think>\nanswer", false), "thought", "answer");
  expect(parse("answer </think> more", false), "", "answer </think> more");
  expect(parse("answer <think>x</think>", false), "", "answer <think>x</think>");
  expect(parse("\n answer", false), "", "\n answer");
  expect(parse("<thi", false), "", "");
  expect(parse("<", false), "", "<");
  EXPECT_EQ(parse("answer", false).end, 0u);
}

TEST(Reasoning, OnlyTheFormatsOwnNewlinesGo) {
  expect(parse("\n\nthought\n\n</think>\n\n\nanswer\n", true), "\nthought\n", "\nanswer\n");
  expect(parse(" thought </think> answer", true), " thought ", " answer");
  // Later tags are text.
  expect(parse("a</think>b</think><think>c", true), "a", "b</think><think>c");
}

TEST(Reasoning, Inline) {
  expect(parse("thought\n</think>\n\nanswer", true, ReasoningFormat::kAppend), "<think>thought\n</think>",
         "\n\nanswer");
  expect(parse("<think>\nt</think>a", true, ReasoningFormat::kAppend), "<think>\nt</think>", "a");
  expect(parse("thought\n</think>\n\nanswer", true, ReasoningFormat::kNone), "thought\n</think>",
         "\n\nanswer");
  expect(parse("open </thin", true, ReasoningFormat::kNone), "open </thin", "");
  expect(parse("plain", false, ReasoningFormat::kAppend), "", "plain");
}

TEST(Reasoning, ACallEndsIt) {
  const std::vector<std::string> ends = {"<minimax:tool_call>\n<invoke "};
  const std::string call = "<minimax:tool_call>\n<invoke name=\"x\">";
  const Result got = parse("hm\n" + call, true, ReasoningFormat::kSeparate, ends);
  expect(got, "hm", call);
  EXPECT_EQ(got.end, 3u);
  // The bare words are still thoughts.
  expect(parse("I could use <minimax:tool_call> here</think>a", true, ReasoningFormat::kSeparate, ends),
         "I could use <minimax:tool_call> here", "a");
  expect(parse("hm" + call, true, ReasoningFormat::kNone, ends), "hm", call);
}

TEST(Reasoning, TextIsReleasedAtOnce) {
  ReasoningOptions options;
  options.starts_inside = true;
  ReasoningParser parser(options);
  EXPECT_EQ(parser.push("Let").reasoning, "Let");
  EXPECT_EQ(parser.push(" me <").reasoning, " me ");
  EXPECT_EQ(parser.push("b>\n").reasoning, "<b>");
  EXPECT_EQ(parser.push("</th").reasoning, "");
  EXPECT_EQ(parser.settled(), 10u);
  EXPECT_EQ(parser.push("ink").reasoning, "");
  EXPECT_FALSE(parser.end().has_value());
  const auto last = parser.push(">\n\nYes");
  EXPECT_EQ(last.reasoning, "");
  EXPECT_EQ(last.answer, "Yes");
  EXPECT_EQ(parser.end(), 19u);
}

}  // namespace
}  // namespace conclave::text
