#include <algorithm>
#include <numeric>

#include "tests/conformance/support.h"

namespace conclave::kernels::testing {
namespace {

SamplingParams params(float temperature, uint32_t top_k = 0, float top_p = 1, float min_p = 0) {
  SamplingParams p;
  p.temperature = temperature;
  p.top_k = top_k;
  p.top_p = top_p;
  p.min_p = min_p;
  return p;
}

TokenId token(const std::vector<float>& logits, const SamplingParams& p, float u) {
  TokenId first = 0;
  bool have = false;
  for (const Way& way : all_ways()) {
    const auto s = sample(way.ctx, logits, p, u);
    EXPECT_TRUE(s.ok()) << way.name;
    if (!s.ok()) return 0;
    if (have) {
      EXPECT_EQ(s->token, first) << way.name;
    }
    first = s->token;
    have = true;
  }
  return first;
}

TEST(Sample, GreedyTakesTheLowerIdOfATie) {
  EXPECT_EQ(token({1, 3, 2, 3, 3}, params(0), 0.9f), 1u);
  EXPECT_EQ(token({-0.0f, 0.0f}, params(0), 0.9f), 0u);
  std::vector<float> logits(200'064, -5.0f);
  logits[150'001] = logits[200'060] = 4.0f;
  logits[200'063] = 9.0f;
  SamplingParams p = params(0);
  EXPECT_EQ(token(logits, p, 0), 200'063u);
  p.vocab_limit = 200'054;
  EXPECT_EQ(token(logits, p, 0), 150'001u);
  p.temperature = 1e-3f;
  EXPECT_EQ(token(logits, p, 0.99f), 150'001u);
}

// A grid of u must hit every token for as much of [0, 1) as the reference gives it probability, in descending
// order.
TEST(Sample, FollowsTheReferenceDistribution) {
  uint64_t seed = 900;
  for (const uint32_t n : {1u, 2u, 7u, 40u, 700u, 5000u}) {
    for (const SamplingParams& base :
         {params(1), params(0.7f), params(1.5f, 5), params(1, 1), params(1, 40, 0.95f), params(1, 0, 0.5f),
          params(1, 0, 0.999f), params(1, 0, 1, 0.2f), params(0.8f, 30, 0.9f, 0.05f),
          params(2, 600, 0.99f)}) {
      for (const bool ties : {false, true}) {
        Draw draw(++seed);
        std::vector<float> logits = draw.normals(n, 2.0f);
        if (ties)
          for (float& x : logits) x = std::round(x);
        SamplingParams p = base;
        if (seed % 4 == 0) p.vocab_limit = n / 2 + 1;
        const ref::Vector want = ref::distribution(logits, p);
        std::vector<uint32_t> order(n);
        std::iota(order.begin(), order.end(), 0u);
        std::stable_sort(order.begin(), order.end(),
                         [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
        if (p.vocab_limit != 0) std::erase_if(order, [&](uint32_t id) { return id >= p.vocab_limit; });
        for (int step = 0; step < 40; ++step) {
          const float u = static_cast<float>(step) / 40.0f + 0.003f;
          double sum = 0;
          size_t i = 0;
          bool near_border = false;
          for (;; ++i) {
            sum += want[order[i]];
            near_border = near_border || std::abs(sum - u) < 1e-4;
            if (sum > u || i + 1 == order.size()) break;
          }
          if (near_border) continue;
          ASSERT_EQ(token(logits, p, u), order[i])
              << "n=" << n << " u=" << u << " T=" << p.temperature << " k=" << p.top_k << " p=" << p.top_p
              << " min_p=" << p.min_p << " ties=" << ties;
        }
      }
    }
  }
}

TEST(Sample, NeverDrawsWhatIsCut) {
  Draw draw(1000);
  std::vector<float> logits = draw.normals(3000);
  for (size_t i = 0; i < logits.size(); i += 2) logits[i] = -INFINITY;
  for (const SamplingParams& p :
       {params(1), params(3, 7), params(1, 0, 0.3f), params(1, 0, 1, 0.1f), params(1, 2900)}) {
    const ref::Vector want = ref::distribution(logits, p);
    for (const float u : {0.0f, 0.25f, 0.5f, 0.999f, 0x1.fffffep-1f}) {
      const TokenId id = token(logits, p, u);
      EXPECT_GT(want[id], 0) << id << " at " << u;
    }
  }
  EXPECT_EQ(token(logits, params(1), 0.0f), std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST(Sample, LargeVocabularyWithoutCuts) {
  Draw draw(1001);
  const std::vector<float> logits = draw.normals(200'064, 0.1f);  // nearly flat: the draw walks far
  for (const float u : {0.0f, 0.3f, 0.9999f}) {
    const TokenId id = token(logits, params(1), u);
    EXPECT_LT(id, 200'064u);
  }
}

TEST(Sample, LogprobsAreOfTheUntemperedDistribution) {
  Draw draw(1002);
  for (const uint32_t n : {3u, 100u, 20'000u}) {
    const std::vector<float> logits = draw.normals(n, 3.0f);
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    SamplingParams p = params(0.5f, 3);
    p.top_logprobs = 20;
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
    float contract = 0;
    for (const Way& way : all_ways()) {
      const auto s = sample(way.ctx, logits, p, 0.4f);
      ASSERT_TRUE(s.ok());
      EXPECT_NEAR(s->logprob, logits[s->token] - std::log(sum), 2e-5);
      ASSERT_EQ(s->top.size(), std::min(20u, n));
      for (size_t i = 0; i < s->top.size(); ++i) {
        EXPECT_EQ(s->top[i].token, order[i]);
        EXPECT_NEAR(s->top[i].logprob, logits[order[i]] - std::log(sum), 2e-5);
      }
      if (&way == &all_ways().front()) contract = s->logprob;
      EXPECT_EQ(s->logprob, contract) << way.name;
    }
  }
}

TEST(Sample, NoFiniteLogitIsAnError) {
  for (const auto& bad : std::vector<std::vector<float>>{
           {}, {NAN, NAN}, {-INFINITY, -INFINITY}, {1.0f, NAN, 2.0f}, {1.0f, INFINITY}}) {
    for (const float t : {0.0f, 1.0f}) {
      const auto s = sample({}, bad, params(t), 0.5f);
      ASSERT_FALSE(s.ok());
      EXPECT_EQ(s.status().code(), StatusCode::kInternal);
    }
  }
}

}  // namespace
}  // namespace conclave::kernels::testing
