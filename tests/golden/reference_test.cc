// The plain reference of this directory against transformers' logits: it agrees, and with any of the faults
// that an implementation is known to make, it does not. So the golden files can tell right from wrong.
#include "tests/golden/reference_forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "tests/checkpoint/test_files.h"
#include "tests/golden/golden_data.h"

namespace conclave {
namespace {

using golden::Case;
using golden::Prompt;
using reference::Options;

constexpr double kLogitTolerance = 1e-4;  // of the largest |logit|
constexpr size_t kFaultPrompt = 7;        // longest prompt that faults are tried on
constexpr double kMeanKl = 1e-3;
constexpr double kGreedyMargin = 0.01;  // of the largest |logit|

const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = [] {
    auto read = golden::read_cases();
    if (!read.ok()) {
      ADD_FAILURE() << message_of(read.status());
      return std::vector<Case>();
    }
    return std::move(*read);
  }();
  return kCases;
}

struct Loaded {
  testing::TempDir dir;
  std::unique_ptr<BoundModel> model;
};

std::unique_ptr<Loaded> load(const Case& c) {
  auto out = std::make_unique<Loaded>();
  auto model = golden::make_and_load(c, out->dir / c.name);
  if (!model.ok()) {
    ADD_FAILURE() << message_of(model.status());
    return nullptr;
  }
  out->model = std::move(*model);
  return out;
}

TokenId greedy(const std::vector<double>& logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Feeds the prompt; the largest error at its stored positions.
double prompt_error(const Case& c, const Prompt& p, reference::Sequence& s) {
  double worst = 0;
  size_t next = 0;
  for (uint32_t t = 0; t < p.tokens.size(); ++t) {
    s.feed(p.tokens[t]);
    if (next == p.positions.size() || p.positions[next] != t) continue;
    if (std::find(p.tied.begin(), p.tied.end(), t) == p.tied.end()) {
      worst = std::max(worst, golden::relative_error(s.logits(), c.row(p.row + next)));
    }
    ++next;
  }
  return worst;
}

TEST(GoldenFiles, CoverWhatTheyShould) {
  size_t f32 = 0, bf16 = 0, fp8 = 0, partial = 0, full = 0, rows = 0, ties = 0;
  for (const Case& c : cases()) {
    (c.dtype == "f32" ? f32 : c.dtype == "bf16" ? bf16 : fp8) += 1;
    auto field = [&](const std::string& key) {
      for (const auto& [k, v] : c.set) {
        if (k == key) return std::stoi(v);
      }
      return -1;
    };
    (field("rotary_dim") == field("head_dim") ? full : partial) += 1;
    EXPECT_GT(c.bias_changed, 0u) << c.name;
    size_t longest = 0, shortest = 1000;
    for (const Prompt& p : c.prompts) {
      longest = std::max(longest, p.tokens.size());
      shortest = std::min(shortest, p.tokens.size());
      rows += p.positions.size();
      EXPECT_EQ(p.continuation.size(), 64u) << c.name;
    }
    EXPECT_EQ(longest, 300u) << c.name;
    EXPECT_EQ(shortest, 1u) << c.name;
    ties += c.ties;
  }
  EXPECT_GE(f32, 5u);
  EXPECT_GE(bf16, 1u);
  EXPECT_GE(fp8, 1u);
  EXPECT_GE(partial, 1u);
  EXPECT_GE(full, 1u);
  EXPECT_LT(static_cast<double>(ties), 0.02 * static_cast<double>(rows));
  std::printf("%zu rows of logits, %zu left out for ties\n", rows, ties);
}

TEST(Reference, AgreesWithTransformersAndContinuesLikeIt) {
  for (const Case& c : cases()) {
    const auto loaded = load(c);
    ASSERT_NE(loaded, nullptr);
    const reference::Model model(*loaded->model, {});
    double worst = 0;
    for (const Prompt& p : c.prompts) {
      reference::Sequence s(model);
      worst = std::max(worst, prompt_error(c, p, s));
      std::vector<TokenId> made;
      while (made.size() < p.continuation.size()) {
        made.push_back(greedy(s.logits()));
        s.feed(made.back());
      }
      EXPECT_EQ(made, p.continuation) << c.name << ", prompt of " << p.tokens.size();
    }
    std::printf("%-20s largest error %.1e of the largest logit\n", c.name.c_str(), worst);
    EXPECT_LT(worst, kLogitTolerance) << c.name;
  }
}

// What rounding to BF16 alone costs, on the terms the engine is held to.
TEST(Reference, Bf16RoundingStaysNear) {
  for (const Case& c : cases()) {
    if (c.dtype == "f32") continue;
    const auto loaded = load(c);
    ASSERT_NE(loaded, nullptr);
    Options options;
    options.bf16 = true;
    const reference::Model model(*loaded->model, options);
    double kl = 0, spread = 0;
    size_t rows = 0, decided = 0, differing = 0;
    for (const Prompt& p : c.prompts) {
      reference::Sequence s(model);
      size_t next = 0;
      for (uint32_t t = 0; t < p.tokens.size(); ++t) {
        s.feed(p.tokens[t]);
        if (next == p.positions.size() || p.positions[next] != t) continue;
        const bool tied = std::find(p.tied.begin(), p.tied.end(), t) != p.tied.end();
        const std::span<const float> expected = c.row(p.row + next++);
        if (tied) continue;
        const std::vector<double> logits = s.logits();
        kl += golden::kl_divergence(logits, expected);
        double mean = 0, square = 0;
        for (const float v : expected) mean += v, square += static_cast<double>(v) * v;
        mean /= static_cast<double>(expected.size());
        spread += std::sqrt(square / static_cast<double>(expected.size()) - mean * mean);
        std::vector<float> sorted(expected.begin(), expected.end());
        std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
        float largest = 0;
        for (const float v : expected) largest = std::max(largest, std::abs(v));
        if (sorted[0] - sorted[1] > kGreedyMargin * largest) {
          ++decided;
          const auto best = std::max_element(expected.begin(), expected.end()) - expected.begin();
          differing += greedy(logits) != static_cast<TokenId>(best);
        }
        ++rows;
      }
    }
    kl /= static_cast<double>(rows);
    spread /= static_cast<double>(rows);
    std::printf("%-20s mean KL %.1e, logit deviation %.2f, greedy differs in %zu of %zu clear positions\n",
                c.name.c_str(), kl, spread, differing, decided);
    EXPECT_LT(kl, kMeanKl) << c.name;
    EXPECT_GE(spread, 1.0) << c.name;
    EXPECT_EQ(differing, 0u) << c.name;
  }
}

// Each fault must show on every case in which it changes the computation.
TEST(PlantedFaults, FailTheGoldens) {
  struct Planted {
    const char* name;
    bool reference::Faults::*flag;
  };
  const Planted kPlanted[] = {
      {"interleaved rotation", &reference::Faults::interleaved_rotation},
      {"full rotation", &reference::Faults::full_rotation},
      {"per-head norm", &reference::Faults::per_head_norm},
      {"biased weights", &reference::Faults::biased_weights},
      {"no renormalising", &reference::Faults::no_renormalize},
      {"bias ignored", &reference::Faults::ignore_bias},
      {"w1 and w3 swapped", &reference::Faults::swap_w1_w3},
      {"transposed scales", &reference::Faults::transposed_scales},
  };
  size_t applicable[std::size(kPlanted)] = {};
  double least[std::size(kPlanted)];
  std::fill(std::begin(least), std::end(least), HUGE_VAL);
  for (const Case& c : cases()) {
    const auto loaded = load(c);
    ASSERT_NE(loaded, nullptr);
    const ModelSpec& s = loaded->model->spec;
    for (size_t i = 0; i < std::size(kPlanted); ++i) {
      const Planted& planted = kPlanted[i];
      if (planted.flag == &reference::Faults::full_rotation && s.rotary_dim == s.head_dim) continue;
      if (planted.flag == &reference::Faults::transposed_scales && c.dtype != "fp8") continue;
      // With one expert a token its weight is 1 whatever its score.
      if (planted.flag == &reference::Faults::biased_weights && s.experts_per_token == 1) continue;
      ++applicable[i];
      Options options;
      options.faults.*planted.flag = true;
      const reference::Model wrong(*loaded->model, options);
      double error = 0;
      for (const Prompt& p : c.prompts) {
        if (p.tokens.size() > kFaultPrompt) continue;
        reference::Sequence sequence(wrong);
        error = std::max(error, prompt_error(c, p, sequence));
      }
      least[i] = std::min(least[i], error);
      EXPECT_GT(error, 10 * kLogitTolerance) << planted.name << " passes on " << c.name;
    }
  }
  for (size_t i = 0; i < std::size(kPlanted); ++i) {
    EXPECT_GE(applicable[i], 1u) << kPlanted[i].name;
    std::printf("%-22s fails %zu cases, the nearest by %.1e of the largest logit\n", kPlanted[i].name,
                applicable[i], least[i]);
  }
}

}  // namespace
}  // namespace conclave
