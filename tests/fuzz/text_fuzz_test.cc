// Seeded mutation loops over the parsers of libs/text, fast enough for every run. The libFuzzer entry of the
// same targets is text_libfuzzer.cc (built where clang is the compiler).
#include <gtest/gtest.h>

#include <vector>

#include "libs/base/random.h"
#include "tests/fuzz/text_target.h"

namespace conclave::fuzz {
namespace {

// Values that a mutation writes in place of another.
constexpr std::string_view kValues[] = {"null",
                                        "true",
                                        "-1",
                                        "1e308",
                                        "99999999999999999999",
                                        "\"\"",
                                        "[]",
                                        "{}",
                                        "16777215",
                                        "\"\\u0000\"",
                                        "\"\\ud800\"",
                                        "\"NFC\"",
                                        "\"Removed\"",
                                        "{\"type\":\"ByteLevel\"}",
                                        "256",
                                        "\"a a\""};

std::string mutated(std::string json, SplitMix64& random) {
  for (uint64_t edits = 1 + random.below(3); edits > 0 && !json.empty(); --edits) {
    const size_t at = random.below(json.size());
    switch (random.below(6)) {
      case 0:
        json[at] = static_cast<char>(random.next());
        break;
      case 1:
        json.erase(at, 1 + random.below(12));
        break;
      case 2:
        json.insert(at, json.substr(random.below(json.size()), random.below(40)));
        break;
      case 3:
        json.resize(at);
        break;
      default: {
        // A whole value: from a colon or comma to the next delimiter.
        const size_t start = json.find_first_of(":,[", at);
        if (start == std::string::npos) break;
        const size_t end = std::min(json.find_first_of(",]}", start + 1), json.size());
        json.replace(start + 1, end - start - 1, kValues[random.below(std::size(kValues))]);
      }
    }
  }
  return json;
}

TEST(TextFuzz, TokenizerFiles) {
  SplitMix64 random(1);
  const std::string seed = seed_tokenizer_json();
  ASSERT_TRUE(try_tokenizer_json(seed));
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) accepted += try_tokenizer_json(mutated(seed, random)) ? 1 : 0;
  // Some mutations are harmless and most are not.
  EXPECT_GT(accepted, 20);
  EXPECT_LT(accepted, 3000);
}

TEST(TextFuzz, SplitPatterns) {
  constexpr std::string_view parts[] = {"a",        "\\p{L}", "\\s",     "\\S",     "[",       "]",   "^",
                                        "-",        "(?:",    "(?!",     "(?i:",    "(",       ")",   "|",
                                        "+",        "*",      "?",       "{1,3}",   "{,2}",    "\\r", "\\n",
                                        "\\",       "&&",     "\\p{Lu}", "\\x{41}", "\\u00e9", "$",   ".",
                                        "\xc3\xa9", "\\d",    "\\w",     "(?<=",    "\\P{^M}", "\\z"};
  SplitMix64 random(2);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string pattern;
    for (uint64_t n = 1 + random.below(8); n > 0; --n) pattern += parts[random.below(std::size(parts))];
    accepted += try_split_pattern(pattern) ? 1 : 0;
  }
  EXPECT_GT(accepted, 500);
}

TEST(TextFuzz, AnyBytesAreText) {
  constexpr std::string_view parts[] = {
      "a",        "aa",           "hello", "<sep>",    "<mark>",       " ",           "\n", "7", "'S",
      "\xc3\xa9", "\xf0\x9f\x98", "\xff",  "\xcc\x81", "\xe4\xbd\xa0", "\xed\xa0\x80"};
  SplitMix64 random(3);
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    for (uint64_t n = random.below(20); n > 0; --n) {
      if (random.chance(0.2)) {
        text.push_back(static_cast<char>(random.next()));
      } else {
        text += parts[random.below(std::size(parts))];
      }
    }
    try_text(text);
  }
}

TEST(TextFuzz, AnyIdsAreTokens) {
  SplitMix64 random(4);
  for (int round = 0; round < 5000; ++round) {
    std::vector<uint8_t> ids(random.below(40));
    for (uint8_t& id : ids) {
      // Lead and continuation bytes often enough to make characters.
      id = static_cast<uint8_t>(random.chance(0.5) ? 0x80 + random.below(0x80) : random.next());
    }
    try_token_ids(ids, static_cast<uint8_t>(random.next()));
  }
}

}  // namespace
}  // namespace conclave::fuzz
