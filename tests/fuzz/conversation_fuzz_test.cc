// Seeded mutation loops over the conversation core, fast enough for every run. The libFuzzer entry of the
// same targets is conversation_libfuzzer.cc (built where clang is the compiler).
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "libs/base/random.h"
#include "tests/fuzz/conversation_target.h"

namespace conclave::fuzz {
namespace {

// Rounds are for the release build; under a sanitizer, ten times slower, a part of them.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kDivisor = 8;
#else
constexpr int kDivisor = 1;
#endif

template <size_t kCount>
std::string assembled(const std::string_view (&parts)[kCount], uint64_t most, SplitMix64& random) {
  std::string out;
  for (uint64_t n = random.below(most); n > 0; --n) {
    std::string_view part = parts[random.below(kCount)];
    if (random.chance(0.05)) part = part.substr(0, random.below(part.size() + 1));
    out += part;
    if (random.chance(0.03)) out.push_back(static_cast<char>(random.next()));
  }
  return out;
}

TEST(ConversationFuzz, Outputs) {
  constexpr std::string_view parts[] = {"<think>",
                                        "</think>",
                                        "\n",
                                        "\n\n",
                                        "text",
                                        " ",
                                        "<",
                                        ">",
                                        "</",
                                        "é",
                                        "null",
                                        "NULL",
                                        "<minimax:tool_call>",
                                        "</minimax:tool_call>",
                                        "<minimax:tool_call>\n<invoke name=\"f\">",
                                        "<invoke name=\"f\">",
                                        "<invoke name=\"g\"/>",
                                        "<invoke name='h'",
                                        "<invoke",
                                        "</invoke>",
                                        "<parameter name=\"s\">",
                                        "<parameter name=\"i\">",
                                        "<parameter name=\"n\">",
                                        "<parameter name=\"o\">",
                                        "<parameter name=\"u\">",
                                        "<parameter",
                                        "</parameter>",
                                        "7",
                                        "{\"s\": 1}",
                                        "[1, \"2\"]",
                                        "true",
                                        "<tool_calls>",
                                        "</tool_calls>",
                                        "{\"name\": \"f\", \"arguments\": {\"s\": 1.0, \"i\": \"2\"}}",
                                        "{\"name\": \"g\"}",
                                        "{\"name\":",
                                        "\"g\",",
                                        "\"arguments\": {",
                                        "}",
                                        "}}",
                                        "{",
                                        "\"",
                                        "STOP",
                                        "\xf0\x9f\x98\x80"};
  SplitMix64 random(81);
  for (int round = 0; round < 60000 / kDivisor; ++round) {
    try_output(assembled(parts, 24, random), static_cast<uint8_t>(random.next()), random.next());
  }
}

TEST(ConversationFuzz, Coercion) {
  constexpr std::string_view schema_parts[] = {"{",
                                               "}",
                                               "[",
                                               "]",
                                               ",",
                                               ":",
                                               "\"type\":\"string\"",
                                               "\"type\":\"integer\"",
                                               "\"type\":[\"null\",\"string\"]",
                                               "\"type\":\"object\"",
                                               "\"properties\":{\"p\":",
                                               "\"p\":",
                                               "{\"type\":\"boolean\"}",
                                               "\"anyOf\":[",
                                               "\"allOf\":[",
                                               "\"$ref\":\"#\"",
                                               "\"$ref\":\"#/properties/p\"",
                                               "\"enum\":[\"a\",1,null]",
                                               "\"const\":5",
                                               "\"items\":{",
                                               "\"required\":[\"p\"]",
                                               "\"additionalProperties\":false",
                                               "{}",
                                               "null",
                                               "1",
                                               "\"x\""};
  constexpr std::string_view whole[] = {
      R"({"properties":{"p":{"anyOf":[{"type":"object","properties":{"p":{"$ref":"#/properties/p"}}},{"type":"integer"}]}}})",
      R"({"$defs":{"a":{"oneOf":[{"$ref":"#/$defs/a"},{"$ref":"#/properties/p"}]}},"properties":{"p":{"type":"array","items":{"$ref":"#/$defs/a"}}}})",
      R"({"properties":{"p":{"enum":["a","b",1,2.5,true,null,[1],{"p":1}]}}})",
      R"({"properties":{"p":{"allOf":[{"type":["string","number"]},{"const":"7"}],"nullable":true}}})"};
  constexpr std::string_view values[] = {"{",
                                         "}",
                                         "[",
                                         "]",
                                         ",",
                                         "\"p\":",
                                         "\"a\"",
                                         "1",
                                         "-0",
                                         "1e5",
                                         ".5",
                                         "2.50",
                                         "true",
                                         "null",
                                         "x",
                                         " ",
                                         "\"\\u00e9\"",
                                         "\"\\ud800\"",
                                         "{\"p\": [1, {\"p\": \"2\"}]}"};
  SplitMix64 random(82);
  int accepted = 0;
  for (int round = 0; round < 40000 / kDivisor; ++round) {
    std::string schema = random.chance(0.5) ? std::string(whole[random.below(std::size(whole))])
                                            : assembled(schema_parts, 16, random);
    if (random.chance(0.3) && !schema.empty()) schema.erase(random.below(schema.size()), 1 + random.below(8));
    accepted += try_coercion(schema, assembled(values, 10, random)) ? 1 : 0;
  }
  EXPECT_GT(accepted, 10000 / kDivisor);
  EXPECT_LT(accepted, 39000 / kDivisor);
}

TEST(ConversationFuzz, Histories) {
  constexpr std::string_view seed =
      R"([{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},"b"]},{"role":"assistant",)"
      R"("content":"<think>t</think>x","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}}]},)"
      R"({"role":"tool","tool_call_id":"1","content":"r"},{"role":"assistant","content":null,"reasoning":"q"}])";
  constexpr std::string_view values[] = {
      "null",           "1",    "\"\"",         "[]",  "{}",         "\"user\"", "\"assistant\"",
      "\"{\\\"a\\\"\"", "true", "\"</think>\"", "[1]", "\"\\ud800\""};
  SplitMix64 random(83);
  int accepted = 0;
  for (int round = 0; round < 40000 / kDivisor; ++round) {
    std::string text(seed);
    for (uint64_t edits = random.below(4); edits > 0 && !text.empty(); --edits) {
      const size_t at = random.below(text.size());
      switch (random.below(4)) {
        case 0:
          text[at] = static_cast<char>(random.next());
          break;
        case 1:
          text.erase(at, 1 + random.below(12));
          break;
        default: {
          const size_t start = text.find_first_of(":,[", at);
          if (start == std::string::npos) break;
          const size_t end = std::min(text.find_first_of(",]}", start + 1), text.size());
          text.replace(start + 1, end - start - 1, values[random.below(std::size(values))]);
        }
      }
    }
    accepted += try_history(text, static_cast<uint8_t>(random.next())) ? 1 : 0;
  }
  EXPECT_GT(accepted, 10000 / kDivisor);
  EXPECT_LT(accepted, 39000 / kDivisor);
}

}  // namespace
}  // namespace conclave::fuzz
