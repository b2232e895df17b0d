#include "libs/text/stop_strings.h"

#include <gtest/gtest.h>

#include "libs/base/random.h"

namespace conclave::text {
namespace {

struct Outcome {
  std::string shown;
  bool stopped = false;
  size_t stop = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  bool operator==(const Outcome&) const = default;
};

// The definition, on the whole text: the earliest end; the longest among equals, then the first in the list.
Outcome one_shot(const std::string& text, const std::vector<std::string>& stops) {
  Outcome best;
  best.shown = text;
  for (size_t k = 0; k < stops.size(); ++k) {
    const size_t at = text.find(stops[k]);
    if (at == std::string::npos) continue;
    const size_t end = at + stops[k].size();
    if (best.stopped && (end > best.end || (end == best.end && at >= best.begin))) continue;
    best = {text.substr(0, at), true, k, at, end};
  }
  return best;
}

TEST(StopStrings, EveryCutEqualsOneShot) {
  SplitMix64 random(21);
  for (int round = 0; round < 20000; ++round) {
    const auto word = [&](uint64_t longest) {
      std::string out;
      for (uint64_t i = 0, n = 1 + random.below(longest); i < n; ++i) out.push_back("ab\n"[random.below(3)]);
      return out;
    };
    std::vector<std::string> stops;
    for (uint64_t i = 0, n = random.below(4); i < n; ++i) stops.push_back(word(6));
    const std::string text = word(24);
    const Outcome want = one_shot(text, stops);

    auto matcher = StopStringMatcher::create(stops);
    ASSERT_TRUE(matcher.ok());
    std::string got;
    uint64_t token = 100;
    uint64_t matched_token = 0;
    uint64_t taken = 0;
    for (size_t at = 0; at < text.size(); ++token) {
      const size_t n = random.below(5);  // empty pieces too
      const std::string piece = text.substr(at, n);
      at += piece.size();
      got += matcher->push(piece, token);
      // Never more than the final answer, whatever comes.
      ASSERT_EQ(got, want.shown.substr(0, got.size()));
      if (want.stopped && taken < want.end && taken + piece.size() >= want.end) matched_token = token;
      taken += piece.size();
      ASSERT_EQ(matcher->match().has_value(), want.stopped && taken >= want.end);
    }
    got += matcher->flush();
    Outcome outcome{got, matcher->match().has_value(), 0, 0, 0};
    if (outcome.stopped) {
      outcome.stop = matcher->match()->stop;
      outcome.begin = matcher->match()->begin;
      outcome.end = matcher->match()->end;
      EXPECT_EQ(matcher->match()->token_index, matched_token);
    }
    EXPECT_EQ(outcome, want) << ::testing::PrintToString(text) << ::testing::PrintToString(stops);
  }
}

TEST(StopStrings, HoldsBackOnlyWhatMayMatch) {
  auto m = StopStringMatcher::create({"STOP"});
  ASSERT_TRUE(m.ok());
  EXPECT_EQ(m->push("hello ST", 0), "hello ");
  EXPECT_EQ(m->held(), 2u);
  EXPECT_EQ(m->push("A", 1), "STA");
  EXPECT_EQ(m->push("SSTO", 2), "S");
  EXPECT_EQ(m->push("P and more", 3), "");
  ASSERT_TRUE(m->match().has_value());
  EXPECT_EQ(m->match()->token_index, 3u);
  EXPECT_EQ(m->match()->begin, 10u);
  EXPECT_EQ(m->push("after", 4), "");
  EXPECT_EQ(m->flush(), "");
}

TEST(StopStrings, KeepsTheStopWhenAsked) {
  auto m = StopStringMatcher::create({"\n\n"}, true);
  ASSERT_TRUE(m.ok());
  EXPECT_EQ(m->push("a\n", 0), "a");
  EXPECT_EQ(m->push("\nb", 1), "\n\n");
}

TEST(StopStrings, BadListsAreNamed) {
  EXPECT_EQ(field_of(StopStringMatcher::create({"a", ""}).status()), "stop[1]");
  EXPECT_EQ(field_of(StopStringMatcher::create({std::string(5000, 'x')}).status()), "stop[0]");
  EXPECT_EQ(field_of(StopStringMatcher::create(std::vector<std::string>(65, "x")).status()), "stop");
  auto none = StopStringMatcher::create({});
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->push("anything", 0), "anything");
}

}  // namespace
}  // namespace conclave::text
