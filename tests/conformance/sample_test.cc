#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <string>

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

TokenId token(const std::vector<float>& logits, const SamplingParams& p, float u,
              const SampleState& state = {}) {
  TokenId first = 0;
  bool have = false;
  for (const Way& way : all_ways()) {
    std::vector<float> row = logits;
    const auto s = sample(way.ctx, row, p, u, state);
    EXPECT_TRUE(s.ok()) << way.name;
    if (!s.ok()) return 0;
    EXPECT_EQ(std::memcmp(row.data(), logits.data(), row.size() * sizeof(float)), 0) << way.name;
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
    std::vector<float> logits = draw.normals(n, 3.0f);
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
  std::vector<std::vector<float>> rows = {
      {}, {NAN, NAN}, {-INFINITY, -INFINITY}, {1.0f, NAN, 2.0f}, {1.0f, INFINITY}};
  for (std::vector<float>& bad : rows) {
    EXPECT_EQ(token_logprob({}, bad, 0, 0, 1).status().code(), StatusCode::kInternal);
    for (const float t : {0.0f, 1.0f}) {
      const auto s = sample({}, bad, params(t), 0.5f);
      ASSERT_FALSE(s.ok());
      EXPECT_EQ(s.status().code(), StatusCode::kInternal);
    }
  }
}

// --- what a request changes in the logits

// A history, and the state that a worker would make of it.
struct History {
  std::vector<TokenId> prompt, output, forbidden;
  std::vector<SeenToken> seen;

  SampleState state() {
    seen.clear();
    std::map<TokenId, uint32_t> counts;
    for (const TokenId t : prompt) counts[t];
    for (const TokenId t : output) ++counts[t];
    for (const auto& [t, count] : counts) seen.push_back({t, count});
    return {seen, forbidden};
  }
};

// A grid of u hits each token for as much as the reference gives it probability.
void follows_reference(const std::vector<float>& logits, const SamplingParams& p, History& history,
                       const std::string& what) {
  const ref::Vector changed = ref::adjusted(logits, p, history.prompt, history.output, history.forbidden);
  const ref::Vector want = ref::distribution(changed, p);
  std::vector<uint32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return changed[a] > changed[b]; });
  for (int step = 0; step < 20; ++step) {
    const float u = static_cast<float>(step) / 20.0f + 0.007f;
    const TokenId got = token(logits, p, u, history.state());
    double before = 0;
    for (const uint32_t id : order) {
      if (id == got) break;
      before += want[id];
    }
    EXPECT_GT(want[got], 0) << what;
    EXPECT_LT(before, u + 1e-4) << what << " u=" << u << " token " << got;
    EXPECT_GT(before + want[got], u - 1e-4) << what << " u=" << u << " token " << got;
  }
}

TEST(SampleAdjusted, EachParameterAndAllTogetherFollowTheReference) {
#ifdef CONCLAVE_SMALL_SHAPES
  constexpr uint32_t kLargest = 200;
#else
  constexpr uint32_t kLargest = 1200;
#endif
  uint64_t seed = 2000;
  for (const uint32_t n : {7u, 60u, kLargest}) {
    for (const float temperature : {0.0f, 0.7f, 1.3f}) {
      for (uint32_t kinds = 0; kinds < 32; ++kinds) {
        Draw draw(++seed);
        const std::vector<float> logits = draw.normals(n, 2.0f);
        History history;
        for (uint32_t i = 0; i < n / 2 + 3; ++i) {
          history.prompt.push_back(static_cast<TokenId>(draw.rng().below(n)));
          history.output.push_back(static_cast<TokenId>(draw.rng().below(n / 3 + 1)));
        }
        SamplingParams p = params(temperature);
        if (kinds & 1) p.repetition_penalty = seed % 2 == 0 ? 1.4f : 0.7f;
        if (kinds & 2) p.presence_penalty = seed % 3 == 0 ? -0.8f : 0.9f;
        if (kinds & 4) p.frequency_penalty = seed % 5 == 0 ? -0.1f : 0.3f;
        if (kinds & 8) {
          p.logit_bias = {{0, 3.0f}, {n / 2, -2.0f}, {n - 1, -INFINITY}};
          history.forbidden = {n / 3};
        }
        if (kinds & 16) {
          p.top_k = n / 2 + 1;
          p.top_p = 0.95f;
          p.min_p = 0.001f;
        }
        follows_reference(logits, p, history,
                          "n=" + std::to_string(n) + " T=" + std::to_string(temperature) +
                              " kinds=" + std::to_string(kinds));
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(SampleAdjusted, PenaltiesByTheNumbers) {
  // Prompt: 1, 2. Output: 2, 3, 3.
  History history{{1, 2}, {2, 3, 3}, {}, {}};
  const std::vector<float> logits = {1.0f, 4.0f, -2.0f, 3.0f};
  SamplingParams p = params(0);
  p.repetition_penalty = 2.0f;
  ref::Vector y = ref::adjusted(logits, p, history.prompt, history.output, {});
  EXPECT_EQ(y, (ref::Vector{1.0, 2.0, -4.0, 1.5}));
  EXPECT_EQ(token(logits, p, 0, history.state()), 1u);
  p.repetition_penalty = 4.5f;
  EXPECT_EQ(token(logits, p, 0, history.state()), 0u);
  p = params(0);
  p.presence_penalty = 2.0f;  // 3: 1, 2: -4; 1 is only in the prompt
  EXPECT_EQ(token(logits, p, 0, history.state()), 1u);
  p.logit_bias = {{1, -INFINITY}};
  EXPECT_EQ(token(logits, p, 0, history.state()), 0u);  // a tie of 1.0: the lower id
  p.presence_penalty = 1.9f;
  EXPECT_EQ(token(logits, p, 0, history.state()), 3u);
  p.presence_penalty = 0;
  p.frequency_penalty = 1.1f;  // twice
  EXPECT_EQ(token(logits, p, 0, history.state()), 0u);
}

TEST(SampleAdjusted, Extremes) {
  Draw draw(3000);
  for (const uint32_t n : {50u, 20'064u}) {
    const std::vector<float> logits = draw.normals(n, 3.0f);
    const auto best = static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    const TokenId other = best == 7 ? 8 : 7;
    for (const float t : {0.0f, 1e-3f, 1.0f, 1e6f}) {
      SamplingParams p = params(t);
      p.logit_bias = {{other, kMaxLogitBiasValue}};
      if (t < 1e6f) {
        EXPECT_EQ(token(logits, p, 0.999f), other) << t;
      }
      p.logit_bias = {{best, -kMaxLogitBiasValue}};
      for (const float u : {0.0f, 0.5f, 0.999f}) {
        if (t < 1e6f) {
          EXPECT_NE(token(logits, p, u), best) << t;
        }
      }
      p.logit_bias = {{best, -INFINITY}};
      for (const float u : {0.0f, 0.5f, 0.999f}) EXPECT_NE(token(logits, p, u), best) << t;
      // Ids outside the row, or beyond vocab_limit, change nothing.
      p.logit_bias = {{n, 1e9f}, {n + 5, -INFINITY}};
      EXPECT_EQ(token(logits, p, 0.5f), token(logits, params(t), 0.5f)) << t;
      p.vocab_limit = n - 1;
      p.logit_bias = {{n - 1, 1e9f}};
      EXPECT_NE(token(logits, p, 0.5f), n - 1) << t;
    }
  }
}

TEST(SampleAdjusted, WhenEveryTokenIsForbiddenItIsAnErrorThatSaysSo) {
  std::vector<float> logits = {1, 2, 3};
  const std::vector<float> before = logits;
  for (const float t : {0.0f, 1.0f}) {
    SamplingParams p = params(t);
    p.logit_bias = {{0, -INFINITY}, {1, -INFINITY}};
    const std::vector<TokenId> forbidden = {2};
    EXPECT_EQ(sample({}, logits, p, 0.5f)->token, 2u);
    const auto none = sample({}, logits, p, 0.5f, {{}, forbidden});
    EXPECT_EQ(none.status().code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(logits, before);
  }
}

TEST(SampleAdjusted, LogprobsAreOfTheModelsOwnDistribution) {
  Draw draw(3001);
  std::vector<float> logits = draw.normals(300, 2.0f);
  SamplingParams p = params(0.7f, 20);
  p.top_logprobs = 5;
  for (const Way& way : all_ways()) {
    const auto plain = sample(way.ctx, logits, p, 0.3f);
    ASSERT_TRUE(plain.ok());
    SamplingParams q = p;
    q.repetition_penalty = 1.7f;
    q.presence_penalty = 2.0f;
    q.logit_bias = {{plain->top[0].token, -INFINITY}, {250, 1e9f}};
    History history{{1, 2, 3}, {4, 5, plain->top[1].token}, {}, {}};
    const auto changed = sample(way.ctx, logits, q, 0.3f, history.state());
    ASSERT_TRUE(changed.ok());
    EXPECT_EQ(changed->token, 250u);
    ASSERT_EQ(changed->top.size(), 5u);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(changed->top[i].token, plain->top[i].token) << way.name;
      EXPECT_EQ(changed->top[i].logprob, plain->top[i].logprob) << way.name;
    }
    // The same numbers as for a token of the prompt.
    const auto alone = token_logprob(way.ctx, logits, 0, 250, 5);
    ASSERT_TRUE(alone.ok());
    EXPECT_EQ(alone->logprob, changed->logprob) << way.name;
    EXPECT_EQ(alone->top[4].logprob, plain->top[4].logprob) << way.name;
    EXPECT_EQ(token_logprob(way.ctx, logits, 200, 250, 0)->logprob, -INFINITY);
  }
}

}  // namespace
}  // namespace conclave::kernels::testing
