// Seeded mutation loops over the headers that the front door reads, and over its file of keys.
#include <gtest/gtest.h>

#include <iterator>
#include <string>

#include "libs/base/random.h"
#include "tests/fuzz/front_door_target.h"

namespace conclave::fuzz {
namespace {

template <size_t kCount>
std::string assembled(const std::string_view (&parts)[kCount], uint64_t most, SplitMix64& random) {
  std::string out;
  for (uint64_t n = random.below(most); n > 0; --n) {
    out += parts[random.below(kCount)];
    if (random.chance(0.1)) out.push_back(static_cast<char>(random.next()));
  }
  return out;
}

TEST(FrontDoorFuzz, Authorizations) {
  constexpr std::string_view parts[] = {"Bearer ", "bearer", "BEARER ", " ", "ck-known",
                                        "ck-",     "known",  "Basic ",  "\t"};
  ASSERT_TRUE(try_authorization("Bearer ck-known"));
  SplitMix64 random(91);
  int taken = 0;
  for (int round = 0; round < 20000; ++round) taken += try_authorization(assembled(parts, 6, random)) ? 1 : 0;
  EXPECT_GT(taken, 50);
  EXPECT_LT(taken, 10000);
}

TEST(FrontDoorFuzz, Timeouts) {
  constexpr std::string_view parts[] = {"1", "0",   ".",   "5",  "e",      "-",      "+",
                                        "3", "inf", "nan", "0x", "604800", "1e-400", " "};
  SplitMix64 random(92);
  int taken = 0;
  for (int round = 0; round < 50000; ++round) taken += try_timeout(assembled(parts, 6, random)) ? 1 : 0;
  EXPECT_GT(taken, 1000);
  EXPECT_LT(taken, 40000);
}

TEST(FrontDoorFuzz, RequestIds) {
  constexpr std::string_view parts[] = {
      "a", "Z9", "-", "\r\n", " ", "\x7f", "0123456789012345678901234567890123456789"};
  SplitMix64 random(93);
  int taken = 0;
  for (int round = 0; round < 20000; ++round) taken += try_request_id(assembled(parts, 8, random)) ? 1 : 0;
  EXPECT_GT(taken, 500);
  EXPECT_LT(taken, 15000);
}

TEST(FrontDoorFuzz, KeyFiles) {
  constexpr std::string_view values[] = {"sha256:",
                                         "name=",
                                         "requests_per_minute=",
                                         "tokens_per_minute=18446744073709551616",
                                         "trusted",
                                         "\n",
                                         "#",
                                         " ",
                                         "name=alice",
                                         "=",
                                         "\r\n",
                                         "0",
                                         "-1",
                                         "\t"};
  const std::string seed = seed_key_file();
  ASSERT_TRUE(try_key_file(seed));
  SplitMix64 random(94);
  int taken = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = seed;
    for (uint64_t edits = 1 + random.below(3); edits > 0 && !text.empty(); --edits) {
      const size_t at = random.below(text.size());
      switch (random.below(5)) {
        case 0:
          text[at] = static_cast<char>(random.next());
          break;
        case 1:
          text.erase(at, 1 + random.below(12));
          break;
        case 2:
          text.insert(at, text.substr(random.below(text.size()), random.below(100)));
          break;
        case 3:
          text.resize(at);
          break;
        default:
          text.insert(at, values[random.below(std::size(values))]);
      }
    }
    taken += try_key_file(text) ? 1 : 0;
  }
  EXPECT_GT(taken, 500);
  EXPECT_LT(taken, 18000);
}

}  // namespace
}  // namespace conclave::fuzz
