#include "libs/service/test_faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace conclave {
namespace {

TEST(TestFaultsTest, WordsSetProbabilitiesAndTheSeed) {
  const auto faults = parse_test_faults("seed=7,corrupt_in=0.01,drop_out=1,peer_down=0");
  ASSERT_TRUE(faults.ok()) << faults.status();
  EXPECT_EQ(faults->seed, 7u);
  EXPECT_EQ(faults->plan.corrupt_in, 0.01);
  EXPECT_EQ(faults->plan.drop_out, 1);
  EXPECT_EQ(faults->plan.drop_in, 0);
  EXPECT_TRUE(parse_test_faults("").ok());
}

TEST(TestFaultsTest, WhatIsNoFaultIsNamed) {
  for (const char* bad : {"corrupt_in", "corrupt_in=", "corrupt_in=2", "corrupt_in=-0.1", "corrupt_in=nan",
                          "corrupt_in=0.1x", "seed=-1", "=1", "corrupt=0.1"}) {
    const auto faults = parse_test_faults(std::string("seed=1,") + bad);
    ASSERT_FALSE(faults.ok()) << bad;
    EXPECT_THAT(message_of(faults.status()), ::testing::HasSubstr(std::string("'") + bad + "'"));
  }
}

TEST(TestFaultsTest, TheVariableIsTakenOnlyByABuildWithFaults) {
  unsetenv("CONCLAVE_TEST_FAULTS");
  ASSERT_TRUE(test_faults_of_environment().ok());
  EXPECT_FALSE(test_faults_of_environment()->has_value());
  setenv("CONCLAVE_TEST_FAULTS", "corrupt_in=0.5", 1);
  const auto faults = test_faults_of_environment();
  unsetenv("CONCLAVE_TEST_FAULTS");
#ifdef CONCLAVE_FAULT_INJECTION
  ASSERT_TRUE(faults.ok()) << faults.status();
  EXPECT_EQ((*faults)->plan.corrupt_in, 0.5);
#else
  EXPECT_EQ(faults.status().code(), StatusCode::kFailedPrecondition);
#endif
}

}  // namespace
}  // namespace conclave
