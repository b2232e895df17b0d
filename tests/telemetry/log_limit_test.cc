#include "libs/telemetry/log_limit.h"

#include <gtest/gtest.h>

namespace conclave {
namespace {

TEST(LogLimitTest, OneLineInAWhileAndTheNumberOfTheOthers) {
  LogLimit limit(10 * kSecond);
  EXPECT_EQ(limit.take(0), 0u) << "the first one always";
  for (int i = 1; i <= 500; ++i) EXPECT_FALSE(limit.take(i * kMillisecond));
  EXPECT_FALSE(limit.take(10 * kSecond - 1));
  EXPECT_EQ(limit.take(10 * kSecond), 501u);
  EXPECT_FALSE(limit.take(11 * kSecond));
  EXPECT_EQ(limit.take(100 * kSecond), 1u);
  EXPECT_EQ(limit.take(200 * kSecond), 0u);
}

}  // namespace
}  // namespace conclave
