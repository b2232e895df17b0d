// The engine's own cores and kernels against transformers' logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "tests/checkpoint/test_files.h"
#include "tests/golden/engine.h"
#include "tests/golden/golden_data.h"

namespace conclave {
namespace {

using golden::Case;
using golden::Engine;
using golden::Prompt;

constexpr double kLogitTolerance = 1e-4;  // of the largest |logit|
constexpr double kMeanKl = 1e-3;          // nats
constexpr double kMeanKlFp8Wire = 1e-2;
constexpr double kGreedyMargin = 0.01;  // of the largest |logit|

class GoldenEngine : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    auto read = golden::read_cases();
    ASSERT_TRUE(read.ok()) << message_of(read.status());
    ASSERT_LT(GetParam(), read->size());
    golden_ = std::move((*read)[GetParam()]);
    auto model = golden::make_and_load(golden_, dir_ / golden_.name);
    ASSERT_TRUE(model.ok()) << message_of(model.status());
    model_ = std::move(*model);
    auto isa = kernels::choose_isa();
    ASSERT_TRUE(isa.ok()) << message_of(isa.status());
    isa_ = *isa;
  }

  testing::TempDir dir_;
  Case golden_;
  std::unique_ptr<BoundModel> model_;
  kernels::Isa isa_ = kernels::Isa::kScalar;
};

TEST_P(GoldenEngine, F32LogitsAndContinuationsAreTransformers) {
  Engine engine(*model_, Precision::kF32, isa_);
  ASSERT_TRUE(engine.ok());
  double worst = 0;
  size_t compared = 0;
  for (const Prompt& p : golden_.prompts) {
    const Engine::Answer answer = engine.run(p.tokens, static_cast<uint32_t>(p.continuation.size()));
    EXPECT_EQ(answer.tokens, p.continuation) << "prompt of " << p.tokens.size();
    for (size_t i = 0; i < p.positions.size(); ++i) {
      if (std::find(p.tied.begin(), p.tied.end(), p.positions[i]) != p.tied.end()) continue;
      ASSERT_LT(p.positions[i], answer.logits.size());
      const std::vector<float>& got = answer.logits[p.positions[i]];
      ASSERT_EQ(got.size(), golden_.vocab);
      worst = std::max(
          worst, golden::relative_error(std::vector<double>(got.begin(), got.end()), golden_.row(p.row + i)));
      ++compared;
    }
  }
  std::printf("%s: %zu rows, largest error %.1e of the largest logit\n", golden_.name.c_str(), compared,
              worst);
  EXPECT_GT(compared, 40u);
  EXPECT_LT(worst, kLogitTolerance);
}

// BF16 and FP8 checkpoints: what the F32 ones are made of is no BF16 number, and rounding it is no fault of
// the engine.
class GoldenEngineBf16 : public GoldenEngine {
 protected:
  struct Distance {
    double kl = 0, spread = 0;  // means over the rows
    size_t rows = 0, decided = 0, differing = 0;
  };
  void measure(Engine& engine, Distance& out);
};

void GoldenEngineBf16::measure(Engine& engine, Distance& out) {
  auto& [kl, spread, rows, decided, differing] = out;
  for (const Prompt& p : golden_.prompts) {
    const Engine::Answer answer = engine.run(p.tokens, 0);
    for (size_t i = 0; i < p.positions.size(); ++i) {
      if (std::find(p.tied.begin(), p.tied.end(), p.positions[i]) != p.tied.end()) continue;
      ASSERT_LT(p.positions[i], answer.logits.size());
      const std::vector<float>& got = answer.logits[p.positions[i]];
      const std::span<const float> expected = golden_.row(p.row + i);
      kl += golden::kl_divergence(std::vector<double>(got.begin(), got.end()), expected);
      double mean = 0, square = 0;
      float largest = 0;
      for (const float v : expected) {
        mean += v;
        square += static_cast<double>(v) * v;
        largest = std::max(largest, std::abs(v));
      }
      mean /= static_cast<double>(expected.size());
      spread += std::sqrt(square / static_cast<double>(expected.size()) - mean * mean);
      std::vector<float> sorted(expected.begin(), expected.end());
      std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
      if (sorted[0] - sorted[1] > kGreedyMargin * static_cast<double>(largest)) {
        ++decided;
        differing += std::max_element(got.begin(), got.end()) - got.begin() !=
                     std::max_element(expected.begin(), expected.end()) - expected.begin();
      }
      ++rows;
    }
  }
  kl /= static_cast<double>(rows);
  spread /= static_cast<double>(rows);
  std::printf(
      "%s: mean KL %.1e over %zu rows, logit deviation %.2f, greedy differs in %zu of %zu clear positions\n",
      golden_.name.c_str(), kl, rows, spread, differing, decided);
  EXPECT_GT(rows, 40u);
  EXPECT_GE(spread, 1.0);
}

TEST_P(GoldenEngineBf16, Bf16StaysNearTransformersInF32) {
  ASSERT_NE(golden_.dtype, "f32");
  Engine engine(*model_, Precision::kBf16, isa_);
  ASSERT_TRUE(engine.ok());
  Distance d;
  measure(engine, d);
  EXPECT_LT(d.kl, kMeanKl);
  EXPECT_EQ(d.differing, 0u);
}

TEST_P(GoldenEngineBf16, Fp8WireIsFurtherButNear) {
  Engine plain(*model_, Precision::kBf16, isa_);
  Engine fp8(*model_, Precision::kBf16, isa_, 2, true);
  ASSERT_TRUE(plain.ok() && fp8.ok());
  Distance without, with;
  measure(plain, without);
  measure(fp8, with);
  EXPECT_LT(with.kl, kMeanKlFp8Wire);
  EXPECT_GT(with.kl, without.kl) << "rows did not travel as FP8";
}

constexpr size_t kF32Cases = 5;  // the first ones
constexpr size_t kCases = 9;
INSTANTIATE_TEST_SUITE_P(Cases, GoldenEngine, ::testing::Range(size_t{0}, kCases));
INSTANTIATE_TEST_SUITE_P(Cases, GoldenEngineBf16, ::testing::Range(kF32Cases, kCases));

// A case added to the files is a case added to the ranges above.
TEST(GoldenEngineCases, AllRun) {
  const auto read = golden::read_cases();
  ASSERT_TRUE(read.ok());
  ASSERT_EQ(read->size(), kCases);
  for (size_t i = 0; i < kCases; ++i) EXPECT_EQ((*read)[i].dtype == "f32", i < kF32Cases);
}

}  // namespace
}  // namespace conclave
