// Tools and outputs that the tests of the conversation core share.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/check.h"
#include "libs/text/conversation/output_event.h"
#include "libs/text/conversation/reasoning_parser.h"
#include "libs/text/conversation/tool_call_parser.h"
#include "libs/text/conversation/tool_set.h"

namespace conclave::text {

inline constexpr char kTools[] = R"json([
  {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
     "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
     "limit": {"type": ["number", "null"]}, "note": {"type": ["string", "null"]},
     "where": {"type": "object", "properties": {"lat": {"type": "number"}, "zip": {"type": "string"}}},
     "tags": {"type": "array", "items": {"type": "string"}}}}}},
  {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {
     "query": {"type": "string"}, "top": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}}},
  {"name": "now"}
])json";

inline std::shared_ptr<const ToolSet> test_tools() {
  static const std::shared_ptr<const ToolSet> tools = [] {
    auto out = ToolSet::parse(kTools);
    CONCLAVE_CHECK(out.ok());
    return *out;
  }();
  return tools;
}

inline std::unique_ptr<ToolCallParser> test_parser(ToolFormat format, bool parallel = true) {
  return make_tool_call_parser(format,
                               {test_tools(), parallel, [](uint32_t i) { return "id" + std::to_string(i); }});
}

// Events with neighbours of one kind joined: what may not depend on cuts.
inline std::vector<OutputEvent> joined(const std::vector<OutputEvent>& events) {
  std::vector<OutputEvent> out;
  for (const OutputEvent& event : events) {
    const bool is_text =
        event.kind != OutputEvent::Kind::kCallBegin && event.kind != OutputEvent::Kind::kCallEnd;
    if (is_text) {
      append_text(out, event.kind, event.text, event.call);
    } else {
      out.push_back(event);
    }
  }
  return out;
}

inline std::vector<OutputEvent> parse_pieces(ToolFormat format, const std::vector<std::string_view>& pieces,
                                             OutputEnd end = OutputEnd::kModel, bool parallel = true) {
  auto parser = test_parser(format, parallel);
  std::vector<OutputEvent> out;
  for (const std::string_view piece : pieces) parser->push(piece, out);
  parser->flush(end, out);
  return joined(out);
}

inline AssistantMessage parse_whole(ToolFormat format, std::string_view text,
                                    OutputEnd end = OutputEnd::kModel, bool parallel = true) {
  AssistantMessage out;
  out.add(parse_pieces(format, {text}, end, parallel));
  return out;
}

// Outputs, good and bad, behind the reasoning.
inline const std::vector<std::string>& m2_corpus() {
  static const std::vector<std::string> corpus = {
      "", "Plain text, with < and <b>tags</b> &amp; \n\nnewlines\n",
      "Let me see.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter "
      "name=\"city\">Zürich</parameter>\n"
      "<parameter name=\"days\">2</parameter>\n</invoke>\n</minimax:tool_call>",
      "<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"now\"></invoke><invoke name=now></invoke></minimax:tool_call>",
      "a\n<minimax:tool_call>\n<invoke name=\"search\">\n<parameter name=\"query\">x \"y\" \\ "
      "z\n</parameter>\n</invoke>\n"
      "<invoke name=\"search\">\n<parameter name=\"top\">3</parameter>\n</invoke>\n</minimax:tool_call>\nb",
      "<minimax:tool_call>\n<invoke "
      "name=\"now\">\n</invoke>\n</minimax:tool_call>\nbetween\n<minimax:tool_call>\n"
      "<invoke name='search'>\n<parameter name='query'>q</parameter></invoke></minimax:tool_call>after",
      // Strings that look like tags, empty and null values.
      "<minimax:tool_call><invoke name=\"search\"><parameter name=\"query\"><b>&lt;</para></invok "
      "<x</parameter>"
      "</invoke></minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"search\"><parameter "
      "name=\"query\"></parameter></invoke></minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"get_weather\"><parameter name=\"note\">null</parameter>"
      "<parameter name=\"limit\"> NULL </parameter></invoke></minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"get_weather\"><parameter name=\"note\">nullable</parameter>"
      "<parameter name=\"limit\">1.50</parameter></invoke></minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"get_weather\"><parameter name=\"where\">{\"lat\": \"1.5\", \"zip\": "
      "8001}"
      "</parameter><parameter name=\"tags\">[1, \"b\"]</parameter></invoke></minimax:tool_call>",
      // What does not fit, an unknown tool, an unknown and a repeated parameter.
      "<minimax:tool_call><invoke name=\"get_weather\"><parameter name=\"days\">soon</parameter>"
      "<parameter name=\"where\">{bad</parameter></invoke><invoke name=\"other\"><parameter "
      "name=\"a\">1</parameter>"
      "</invoke><invoke name=\"now\"><parameter name=\"z\">1</parameter><parameter "
      "name=\"z\">2</parameter></invoke>"
      "</minimax:tool_call>",
      // Malformed calls beside good ones.
      "<minimax:tool_call><invoke nam=\"x\"><parameter name=\"a\">1</parameter></invoke><invoke "
      "name=\"now\"></invoke>"
      "</minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"\"></invoke><invoke><invoke "
      "name=\"now\"></invoke></minimax:tool_call>t",
      "<minimax:tool_call><invoke name=\"search\"><parameter name=\"query\">one</invoke><invoke "
      "name=\"now\"></invoke>"
      "</minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"search\"><parameter name=\"query\">one<invoke name=\"now\"></invoke>"
      "<invoke name=\"search\"><parameter name=\"top\">1<parameter "
      "name=\"query\">t</parameter></minimax:tool_call>x",
      "<minimax:tool_call><invoke name=\"search\"><parameter nme=\"query\">no</parameter><parameter "
      "name=\"top\">7"
      "</parameter></invoke></minimax:tool_call>",
      "<minimax:tool_call><invoke name=\"search\"\n<parameter "
      "name=\"query\">q</parameter></invoke><parameter name=\"s\">"
      "stray</parameter><invoke name=\"now\"/></minimax:tool_call>",
      "<minimax:tool_call>\n{\"name\": \"now\"}\n</minimax:tool_call>\n",
      "text\n<minimax:tool_call>not a call</minimax:tool_call>more",
      "</minimax:tool_call>stray </minimax:tool_call> closing",
      // Calls without their block.
      "see\n<invoke name=\"search\">\n<parameter name=\"query\">q</parameter>\n</invoke>\n<invoke "
      "name=\"now\"></invoke>\n"
      "</minimax:tool_call>\nand <invoke name=\"nothing\">text</invoke>",
      "<invoke name=\"now\">\n<minimax:tool_call><invoke name=\"other\"></invoke></minimax:tool_call><invoke "
      "name=\"nower\">",
      // Cut off.
      "text <", "text <minimax:tool", "text\n<minimax:tool_call", "<minimax:tool_call>\n<inv",
      "<minimax:tool_call>\n<invoke name=\"sea",
      "<minimax:tool_call>\n<invoke name=\"search\">\n<parameter name=\"query\">half a va",
      "<minimax:tool_call>\n<invoke name=\"search\">\n<parameter name=\"query\">v</para",
      "<minimax:tool_call>\n<invoke name=\"search\">\n<parameter name=\"query\">v</parameter>\n</inv",
      "<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool",
      "<minimax:tool_call>\n<minimax:tool_call><invoke "
      "name=\"now\"></invoke></minimax:tool_call></minimax:tool_call>"};
  return corpus;
}

inline const std::vector<std::string>& m1_corpus() {
  static const std::vector<std::string> corpus = {
      "",
      "no calls <here> {\"name\": \"now\"}\n",
      "Look.\n<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\", \"days\": "
      "\"3\"}}\n"
      "</tool_calls>",
      "<tool_calls>\n{\"name\": \"now\"}\n{\"name\": \"search\", \"arguments\": {\"query\": 12.50, \"top\": "
      "1}}\n"
      "</tool_calls>\nand\n<tool_calls>{\"name\": \"now\", \"arguments\": {}}</tool_calls>!",
      "<tool_calls>\n{\"name\": \"now\", \"arguments\": {}\n{\"name\": \"search\", \"arguments\": "
      "{\"query\": \"q\"}}\n"
      "</tool_calls>",
      "<tool_calls>\nbad line\n{\"nme\": 1}\n{\"name\": \"now\", \"arguments\": 5}\n"
      "{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": 1}\"}\n</tool_calls>",
      "<tool_calls>\n{\n  \"name\": \"search\",\n  \"arguments\": {\n    \"query\": \"x\"\n  "
      "}\n}\n</tool_calls>",
      "<tool_calls>\n{bad\n  {\"name\": \"now\", \"arguments\": {}}\n</tool_calls>",
      "<tool_calls>\nnothing here\n</tool_calls>rest",
      "text </tool_calls> stray",
      "text\n<tool_ca",
      "<tool_calls>\n{\"name\": \"now\", \"argu",
      "<tool_calls>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_c",
      "<tool_calls>\n{\"name\": \"now\", \"arguments\": {}}"};
  return corpus;
}

}  // namespace conclave::text
