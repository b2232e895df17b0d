// A seeded mutation loop over the bodies that the HTTP API takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "libs/base/random.h"
#include "tests/fuzz/http_body_target.h"

namespace conclave::fuzz {
namespace {

constexpr std::string_view kCompletion =
    R"({"model":"m","prompt":[1,2,3],"max_tokens":16,"min_tokens":1,"temperature":0.5,"top_p":0.9,"top_k":40,)"
    R"("min_p":0.1,"seed":7,"stop":["a","b"],"stop_token_ids":[5],"ignore_eos":false,"n":1,"echo":false,)"
    R"("logit_bias":{"5":-1.5},"repetition_penalty":1.1,"presence_penalty":0.5,"logprobs":3,"timeout":2.5,)"
    R"("priority":-1,"cache_salt":"s","best_of":1,"guided_json":null,"nobody":1,"stream":true,"stream_options":{"include_usage":true},"user":"u"})";
constexpr std::string_view kChat =
    R"({"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"h\u00e9"}]},)"
    R"({"role":"assistant","content":null,"reasoning_content":"r"},{"role":"user","content":"x","name":"n"}],)"
    R"("max_completion_tokens":9,"response_format":{"type":"text"},"temperature":1,"logprobs":true,"top_logprobs":2,)"
    R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}],)"
    R"("tool_choice":"auto","parallel_tool_calls":true,"chat_template_kwargs":{"a":1e2},"reasoning_effort":"low",)"
    R"("reasoning_format":"separate"})";
constexpr std::string_view kValues[] = {"null",  "true", "-1",        "1e308",         "99999999999999999999",
                                        "\"\"",  "[]",   "{}",        "\"\\u0000\"",   "\"\\ud800\"",
                                        "[[[[",  "0",    "[1,\"a\"]", "{\"a\":{}}",    "\"text\"",
                                        "1.5",   "-0.0", "[[1],[2]]", "\"assistant\"", "1e-400",
                                        "[null]"};

std::string mutated(std::string body, SplitMix64& random) {
  for (uint64_t edits = 1 + random.below(3); edits > 0 && !body.empty(); --edits) {
    const size_t at = random.below(body.size());
    switch (random.below(6)) {
      case 0:
        body[at] = static_cast<char>(random.next());
        break;
      case 1:
        body.erase(at, 1 + random.below(12));
        break;
      case 2:
        body.insert(at, body.substr(random.below(body.size()), random.below(60)));
        break;
      case 3:
        body.resize(at);
        break;
      default: {
        const size_t start = body.find_first_of(":,[", at);
        if (start == std::string::npos) break;
        const size_t end = std::min(body.find_first_of(",]}", start + 1), body.size());
        body.replace(start + 1, end - start - 1, kValues[random.below(std::size(kValues))]);
      }
    }
  }
  return body;
}

TEST(HttpBodyFuzz, MutatedBodiesAreAcceptedOrRefusedByField) {
  ASSERT_TRUE(try_http_body(kCompletion, false));
  ASSERT_TRUE(try_http_body(kChat, true));
  for (const bool chat : {false, true}) {
    SplitMix64 random(chat ? 1 : 2);
    int accepted = 0;
    for (int round = 0; round < 30000; ++round)
      accepted += try_http_body(mutated(std::string(chat ? kChat : kCompletion), random), chat) ? 1 : 0;
    EXPECT_GT(accepted, 300);  // some mutations are harmless
    EXPECT_LT(accepted, 20000);
  }
}

TEST(HttpBodyFuzz, MutatedTextBodies) {
  for (const bool tokenize : {false, true}) {
    const std::string good = tokenize ? std::string(kChat) : R"({"model":"m","tokens":[1,2,3,4,5,6,7,8,9]})";
    ASSERT_TRUE(try_text_body(good, tokenize));
    SplitMix64 random(tokenize ? 4 : 5);
    int accepted = 0;
    for (int round = 0; round < 5000; ++round)
      accepted += try_text_body(mutated(good, random), tokenize) ? 1 : 0;
    EXPECT_GT(accepted, 50);
    EXPECT_LT(accepted, 4500);
  }
}

TEST(HttpBodyFuzz, AnyBytes) {
  SplitMix64 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::string body;
    for (uint64_t n = random.below(40); n > 0; --n) body.push_back(static_cast<char>(random.next()));
    try_http_body(body, random.chance(0.5));
    try_text_body(body, random.chance(0.5));
  }
}

}  // namespace
}  // namespace conclave::fuzz
