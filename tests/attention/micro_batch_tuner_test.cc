#include "attention_service/core/micro_batch_tuner.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "libs/base/random.h"

namespace conclave {
namespace {

// Runs `steps` steps that take `cost(count)` give or take a tenth; how often each count was used in the last
// half of them.
std::map<uint32_t, uint32_t> used(MicroBatchTuner& tuner, uint32_t rows, uint32_t steps,
                                  const std::function<double(uint32_t)>& cost, bool prefill = false) {
  SplitMix64 random(3);
  std::map<uint32_t, uint32_t> counts;
  for (uint32_t i = 0; i < steps; ++i) {
    const uint32_t count = tuner.choose(rows, prefill);
    tuner.observe(rows, prefill, count, static_cast<Nanos>(cost(count) * (0.95 + 0.1 * random.uniform())));
    if (i >= steps / 2) ++counts[count];
  }
  return counts;
}

// One layer: half the compute here, half there, a round trip between; with more parts the rest of one hides
// in the wire of another, and the weights are read again for each.
std::function<double(uint32_t)> layer(double compute, double wire, double weights) {
  return [=](uint32_t n) { return compute / n + wire + weights * n + compute / 2 * (n - 1) / n; };
}

TEST(MicroBatchTuner, SlowWireAndHeavyRowsWantMany) {
  MicroBatchTuner tuner(8, 4);
  const auto counts = used(tuner, 256, 1000, layer(10e6, 10e6, 0.01e6));
  EXPECT_GT(counts.at(8), 450u);
}

TEST(MicroBatchTuner, WeightsThatAreReadAgainWantOne) {
  MicroBatchTuner tuner(8, 4);
  auto counts = used(tuner, 256, 1000, layer(1e6, 0.1e6, 10e6));
  EXPECT_GT(counts[1], 490u) << "much slower counts are hardly tried again";
}

TEST(MicroBatchTuner, NoFurtherWhereTwoWereSlowerThanOne) {
  MicroBatchTuner tuner(16, 1);
  const auto cost = layer(1e6, 0, 5e6);
  for (int i = 0; i < 31; ++i) {
    const uint32_t count = tuner.choose(256, false);
    ASSERT_EQ(count, i == 1 ? 2u : 1u) << "step " << i;
    tuner.observe(256, false, count, static_cast<Nanos>(cost(count)));
  }
}

TEST(MicroBatchTuner, FindsTheValleyBetween) {
  MicroBatchTuner tuner(16, 1);
  auto counts = used(tuner, 256, 2000, [](uint32_t n) { return 1e6 * (8.0 / n + n); });
  EXPECT_GT(counts[2] + counts[4], 900u);
}

TEST(MicroBatchTuner, FollowsANetworkThatChanges) {
  MicroBatchTuner tuner(4, 4);
  EXPECT_GT(used(tuner, 128, 400, layer(10e6, 0, 5e6))[1], 190u);
  EXPECT_GT(used(tuner, 128, 4000, layer(10e6, 30e6, 0.01e6))[4], 1800u);
}

TEST(MicroBatchTuner, SizesAndPrefillAreLearnedApart) {
  MicroBatchTuner tuner(4, 4);
  used(tuner, 128, 400, layer(1e6, 0, 5e6));
  EXPECT_GT(used(tuner, 1024, 400, layer(100e6, 100e6, 0))[4], 180u);
  EXPECT_GT(used(tuner, 128, 400, layer(100e6, 100e6, 0), true)[4], 180u);
  EXPECT_GT(used(tuner, 128, 400, layer(1e6, 0, 5e6))[1], 190u);
}

TEST(MicroBatchTuner, OneColdStepIsForgotten) {
  MicroBatchTuner tuner(2, 4);
  tuner.observe(64, false, tuner.choose(64, false), 60 * kSecond);
  auto counts = used(tuner, 64, 4000, layer(1e6, 0, 5e6));
  EXPECT_GT(counts[1], 1900u);
}

TEST(MicroBatchTuner, KeepsToItsBounds) {
  SplitMix64 random(7);
  for (uint32_t most : {1u, 2u, 3u, 6u, 16u}) {
    for (uint32_t min_rows : {0u, 1u, 5u, 64u}) {
      MicroBatchTuner tuner(most, min_rows);
      for (int i = 0; i < 2000; ++i) {
        const auto rows = static_cast<uint32_t>(1 + random.below(i % 3 == 0 ? 1u << 20 : 200));
        const uint32_t count = tuner.choose(rows, i % 2 == 0);
        ASSERT_GE(count, 1u);
        ASSERT_LE(count, most);
        ASSERT_TRUE(count == 1 || rows / count >= min_rows) << rows << " rows in " << count;
        tuner.observe(rows, i % 2 == 0, count, static_cast<Nanos>(random.below(1 << 20)));
      }
    }
  }
}

}  // namespace
}  // namespace conclave
