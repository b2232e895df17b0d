#include <gtest/gtest.h>

#include "libs/base/random.h"
#include "libs/text/conversation/json_text.h"
#include "tests/conversation/support.h"

namespace conclave::text {
namespace {

constexpr auto kM2 = ToolFormat::kMiniMaxM2;
constexpr auto kM1 = ToolFormat::kMiniMaxM1;

// "name(arguments)", "..." behind the arguments of a call that is not complete.
std::vector<std::string> calls_of(const AssistantMessage& message) {
  std::vector<std::string> out;
  for (const auto& call : message.calls) {
    out.push_back(call.name + "(" + call.arguments + ")" + (call.complete ? "" : "..."));
  }
  return out;
}
using Calls = std::vector<std::string>;

std::string block(const std::string& inside) {
  return "<minimax:tool_call>\n" + inside + "</minimax:tool_call>";
}

TEST(M2Tools, TextAndCalls) {
  const auto m = parse_whole(
      kM2, "Let me see.\n" +
               block("<invoke name=\"get_weather\">\n<parameter name=\"city\">Zürich</parameter>\n"
                     "<parameter name=\"days\">2</parameter>\n<parameter name=\"metric\">TRUE</parameter>\n"
                     "</invoke>\n<invoke name=\"now\">\n</invoke>\n") +
               "\nbetween\n" +
               block("<invoke name=\"search\">\n<parameter name=\"query\">a \"b\"\n\t\x01</parameter>\n"
                     "</invoke>\n") +
               "after");
  EXPECT_EQ(m.content, "Let me see.betweenafter");
  EXPECT_EQ(calls_of(m), (Calls{"get_weather({\"city\": \"Zürich\", \"days\": 2, \"metric\": true})",
                                "now({})", "search({\"query\": \"a \\\"b\\\"\\n\\t\\u0001\"})"}));
  EXPECT_EQ(m.calls[2].id, "id2");
}

TEST(M2Tools, StringsAreVerbatim) {
  for (const std::string text :
       {"", " ", "\n", "  padded \n\n", "null", "3", "{\"a\": 1}", "<tag>", "a</parameter", "<", "</para>",
        "<invoke>", "<invoke name=\"unknown\">", "<parameter name=\"x\">", "日本"}) {
    const auto m = parse_whole(
        kM2, block("<invoke name=\"search\"><parameter name=\"query\">" + text + "</parameter></invoke>"));
    ASSERT_EQ(m.calls.size(), 1u) << text;
    const auto arguments = read_json(m.calls[0].arguments);
    ASSERT_TRUE(arguments.has_value()) << m.calls[0].arguments;
    EXPECT_EQ(json_string(json_members(*arguments).at(0).value), text);
    EXPECT_EQ(m.content, "");
  }
}

TEST(M2Tools, GoodCallsSurviveBadOnes) {
  const auto expect = [](const std::string& inside, const Calls& want, const std::string& content = "") {
    const auto m = parse_whole(kM2, block(inside));
    EXPECT_EQ(calls_of(m), want) << inside;
    EXPECT_EQ(m.content, content) << inside;
  };
  const std::string good = "<invoke name=\"now\">\n</invoke>\n";
  expect("<invoke nam=\"x\"><parameter name=\"a\">1</parameter></invoke>" + good, {"now({})"});
  expect("<invoke name=\"\"></invoke>" + good, {"now({})"});
  expect("<invoke>" + good, {"now({})"});
  expect("<invoke name=\"a\nb\"></invoke>" + good, {"now({})"});
  expect("<invoke name=\"" + std::string(300, 'n') + "\"></invoke>" + good, {"now({})"});
  expect("<invoke " + std::string(5000, 'n') + "></invoke>" + good, {"now({})"});
  expect("junk " + good + " junk", {"now({})"});
  // Closing tags that are missing.
  expect("<invoke name=\"search\"><parameter name=\"query\">one</invoke>" + good,
         {"search({\"query\": \"one\"})", "now({})"});
  expect("<invoke name=\"search\"><parameter name=\"query\">one" + good,
         {"search({\"query\": \"one\"})", "now({})"});
  expect("<invoke name=\"search\"><parameter name=\"query\">one", {"search({\"query\": \"one\"})"});
  expect("<invoke name=\"search\">" + good, {"search({})", "now({})"});
  expect("<invoke name=\"search\"><parameter name=\"top\">1<parameter name=\"query\">t</parameter></invoke>",
         {"search({\"top\": 1, \"query\": \"t\"})"});
  // Parameters that cannot be read, or come twice.
  expect(
      "<invoke name=\"search\"><parameter nme=\"query\">no</parameter><parameter "
      "name=\"top\">7</parameter></invoke>",
      {"search({\"top\": 7})"});
  expect(
      "<invoke name=\"search\"><parameter name=\"top\">1</parameter><parameter "
      "name=\"top\">2</parameter></invoke>",
      {"search({\"top\": 1})"});
  // Unknown names are passed on; so are values that do not fit.
  expect("<invoke name=\"other\"><parameter name=\"a\">1</parameter></invoke>", {"other({\"a\": \"1\"})"});
  expect("<invoke name=\"get_weather\"><parameter name=\"days\">soon</parameter></invoke>",
         {"get_weather({\"days\": \"soon\"})"});
  // Heads in other spellings.
  expect(
      "<invoke name='now'></invoke><invoke name=now></invoke><invoke name = \"now\" ></invoke><invoke "
      "name=\"now\"/>"
      "<invoke name=\"now\" id=\"3\"></invoke><invoke name=\"search\"\n<parameter "
      "name=\"query\">q</parameter></invoke>",
      {"now({})", "now({})", "now({})", "now({})", "now({})", "search({\"query\": \"q\"})"});
  // No call at all: what was said comes through, the tags do not.
  expect("{\"name\": \"now\"}\n", {}, "{\"name\": \"now\"}");
  expect("<parameter name=\"x\">1</parameter>", {});
  expect("<invoke bad>x</invoke>", {});
}

TEST(M2Tools, CallsWithoutTheirBlock) {
  auto m = parse_whole(kM2,
                       "see\n<invoke name=\"search\">\n<parameter name=\"query\">q</parameter>\n</invoke>\n"
                       "<invoke name=\"now\"></invoke>\n</minimax:tool_call>\nand");
  EXPECT_EQ(m.content, "see\nand");
  EXPECT_EQ(calls_of(m), (Calls{"search({\"query\": \"q\"})", "now({})"}));
  // Of a tool that nobody declared it is text.
  m = parse_whole(kM2, "Write <invoke name=\"tool\"> and <invoke name='now'>, or <invoke name=\"now\"");
  EXPECT_EQ(m.content, "Write <invoke name=\"tool\"> and <invoke name='now'>, or ");
  EXPECT_TRUE(m.calls.empty());
}

TEST(M2Tools, NoTagIsEverContent) {
  for (const std::string& whole : m2_corpus()) {
    // Cut anywhere, as the token limit does.
    for (size_t n = 0; n <= whole.size(); ++n) {
      for (const OutputEnd end : {OutputEnd::kModel, OutputEnd::kCut}) {
        const auto m = parse_whole(kM2, whole.substr(0, n), end);
        const bool undeclared = whole.find("<invoke name=\"nothing\">") != std::string::npos ||
                                whole.find("<invoke name=\"nower\">") != std::string::npos;
        for (const char* tag : {"<min", "</mi", "<inv", "</in", "<par", "</pa"}) {
          if (undeclared && std::string(tag).find("in") != std::string::npos) continue;
          EXPECT_EQ(m.content.find(tag), std::string::npos) << whole.substr(0, n) << " -> " << m.content;
        }
        for (const auto& call : m.calls) {
          const auto arguments = read_json(call.arguments);
          EXPECT_EQ(arguments.has_value() && arguments->kind == JsonKind::kObject, call.complete)
              << call.arguments;
        }
      }
    }
  }
}

TEST(M2Tools, CutOffCallsAreNotComplete) {
  const auto at = [](const std::string& text, OutputEnd end) {
    return calls_of(parse_whole(kM2, text, end));
  };
  const std::string head = "<minimax:tool_call>\n<invoke name=\"search\">\n";
  EXPECT_EQ(at(head, OutputEnd::kCut), Calls{"search()..."});
  EXPECT_EQ(at(head, OutputEnd::kModel), Calls{"search({})"});
  const std::string half = head + "<parameter name=\"query\">rm -rf /tm";
  EXPECT_EQ(at(half, OutputEnd::kModel), Calls{"search({\"query\": \"rm -rf /tm)..."});
  const std::string whole = head + "<parameter name=\"query\">v</parameter>\n";
  EXPECT_EQ(at(whole, OutputEnd::kCut), Calls{"search({\"query\": \"v\")..."});
  EXPECT_EQ(at(whole, OutputEnd::kModel), Calls{"search({\"query\": \"v\"})"});
  EXPECT_EQ(at(head + "<parameter name=\"top\">12", OutputEnd::kCut), Calls{"search()..."});
  EXPECT_EQ(parse_whole(kM2, "a <", OutputEnd::kCut).content, "a <");
  EXPECT_EQ(parse_whole(kM2, "a <minimax:to", OutputEnd::kCut).content, "a ");
}

TEST(M2Tools, OneCallOnly) {
  const std::string text =
      "a\n" +
      block(
          "<invoke name=\"now\"></invoke><invoke name=\"search\"><parameter name=\"query\">q"
          "</parameter></invoke>") +
      "b\n" + block("<invoke name=\"now\"></invoke>") + "c";
  const auto m = parse_whole(kM2, text, OutputEnd::kModel, /*parallel=*/false);
  EXPECT_EQ(calls_of(m), Calls{"now({})"});
  EXPECT_EQ(m.content, "abc");
}

TEST(M2Tools, ReleasesTextAsSoonAsItIsNoTag) {
  auto parser = test_parser(kM2);
  std::vector<OutputEvent> out;
  const auto take = [&](std::string_view text) {
    out.clear();
    parser->push(text, out);
    std::string shown;
    for (const OutputEvent& event : out) shown += event.text;
    return shown;
  };
  EXPECT_EQ(take("Hello"), "Hello");
  EXPECT_EQ(take(" <"), " ");
  EXPECT_EQ(take("b> \n"), "<b> ");
  EXPECT_EQ(take("\n<mini"), "\n");
  EXPECT_EQ(take("max:tool_call>\n<invoke name=\"sea"), "");
  EXPECT_EQ(take("rch\">"), "search");
  EXPECT_EQ(take("\n<parameter name=\"query\">"), "{\"query\": \"");
  EXPECT_EQ(take("streamed "), "streamed ");
  EXPECT_EQ(take("text</"), "text");
  EXPECT_EQ(take("b></parameter>"), "</b>\"");
  EXPECT_EQ(take("<parameter name=\"top\">1"), "");
  EXPECT_EQ(take("2</parameter>"), ", \"top\": 12");
  EXPECT_EQ(take("</invoke>"), "}");
  EXPECT_EQ(take("</minimax:tool_call>"), "");
}

TEST(M1Tools, Lines) {
  auto expect = [](const std::string& text, const std::string& content, const Calls& want) {
    const auto m = parse_whole(kM1, text);
    EXPECT_EQ(m.content, content) << text;
    EXPECT_EQ(calls_of(m), want) << text;
  };
  expect(
      "Look.\n<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\", \"days\": "
      "\"3\"}}\n"
      "</tool_calls>",
      "Look.", {"get_weather({\"city\": \"Bern\", \"days\": 3})"});
  // A declared string keeps the digits that were written.
  expect("<tool_calls>\n{\"name\":\"search\",\"arguments\":{\"query\":12.50,\"top\":1}}\n</tool_calls>", "",
         {"search({\"query\": \"12.50\", \"top\": 1})"});
  expect(
      "<tool_calls>\n{\"name\": \"now\", \"arguments\": {}\n{\"name\": \"search\", \"arguments\": "
      "{\"query\": \"q\"}}\n"
      "</tool_calls>",
      "", {"search({\"query\": \"q\"})"});
  expect(
      "<tool_calls>\nbad\n{\"nme\": 1}\n{\"name\": \"now\", \"arguments\": 5}\n{\"name\": "
      "\"now\"}\n</tool_calls>",
      "", {"now({})"});
  expect("<tool_calls>\n{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": 1}\"}\n</tool_calls>", "",
         {"now({\"a\": 1})"});
  expect(
      "<tool_calls>\n{\n \"name\": \"search\",\n \"arguments\": {\n  \"query\": \"x\"\n }\n}\n</tool_calls>",
      "", {"search({\"query\": \"x\"})"});
  // An object inside a call is no call, one behind a malformed line is.
  expect(
      "<tool_calls>\n{\"name\": \"search\", \"arguments\": {\"query\":\n  {\"name\": \"now\", \"arguments\": "
      "{}}\n}}\n"
      "</tool_calls>",
      "", {"search({\"query\": \"{\\\"name\\\": \\\"now\\\", \\\"arguments\\\": {}}\"})"});
  expect("<tool_calls>\n{bad\n  {\"name\": \"now\", \"arguments\": {}}\n</tool_calls>", "", {"now({})"});
  std::string many = "<tool_calls>\n";
  for (int i = 0; i < 200; ++i) many += "{ \"open\":\n";
  expect(many + "{\"name\": \"now\", \"arguments\": {}}\n</tool_calls>", "", {"now({})"});
  expect("a\n<tool_calls>\nnothing\n</tool_calls>b", "a\nnothingb", {});
}

// Conversations made from what they should parse to.
TEST(M2Tools, WhatWasWrittenIsRead) {
  SplitMix64 random(31);
  const auto pick = [&](std::initializer_list<const char*> list) {
    return std::string(list.begin()[random.below(list.size())]);
  };
  const auto text = [&] {
    std::string out;
    for (uint64_t n = random.below(6); n > 0; --n) {
      out += pick({"a", " ", "<", ">", "\n", "é", "\"", "\\", "</", "<invoke", "</par", "null", "{", "\t",
                   "x=1", "<b>"});
    }
    return out;
  };
  for (int round = 0; round < 3000; ++round) {
    std::string output;
    std::string content;
    Calls want;
    for (uint64_t blocks = random.below(3); blocks > 0; --blocks) {
      output += "say\n<minimax:tool_call>\n";
      content += "say";
      for (uint64_t calls = 1 + random.below(3); calls > 0; --calls) {
        const std::string tool = pick({"search", "get_weather", "now"});
        output += "<invoke name=\"" + tool + "\">\n";
        std::string arguments;
        const auto add = [&](const std::string& key, const std::string& value, const std::string& json) {
          output += "<parameter name=\"" + key + "\">" + value + "</parameter>\n";
          arguments += (arguments.empty() ? "" : ", ") + json_quoted(key) + ": " + json;
        };
        if (tool == "search" && random.chance(0.8)) {
          const std::string value = text();
          add("query", value, json_quoted(value));
        }
        if (tool == "get_weather") {
          const std::string number = std::to_string(static_cast<int64_t>(random.below(2000)) - 1000);
          add("days", number, number);
          if (random.chance(0.5)) add("metric", "true", "true");
          const std::string value = text();
          std::string lower = value;
          if (random.chance(0.5)) add("note", value, value == "null" ? "null" : json_quoted(value));
        }
        output += "</invoke>\n";
        want.push_back(tool + "({" + arguments + "})");
      }
      output += "</minimax:tool_call>";
    }
    const auto m = parse_whole(kM2, output);
    ASSERT_EQ(calls_of(m), want) << output;
    ASSERT_EQ(m.content, content) << output;
  }
}

TEST(Tools, RandomIds) {
  auto parser = make_tool_call_parser(kM2, {test_tools(), true, {}});
  std::vector<OutputEvent> out;
  parser->push(block("<invoke name=\"now\"></invoke><invoke name=\"now\"></invoke>"), out);
  AssistantMessage m;
  m.add(out);
  ASSERT_EQ(m.calls.size(), 2u);
  EXPECT_EQ(m.calls[0].id.size(), 29u);
  EXPECT_EQ(m.calls[0].id.find_first_not_of("0123456789abcdef", 5), std::string::npos);
  EXPECT_NE(m.calls[0].id, m.calls[1].id);
  EXPECT_EQ(parser->complete_calls(), 2u);
}

}  // namespace
}  // namespace conclave::text
