// Requests of many shapes run through a cluster in one process, and what each of them answered.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/random.h"
#include "libs/local_cluster/local_cluster.h"
#include "tests/support/random_model.h"
#include "tests/support/same_completion.h"

namespace conclave::testing {

// A sanitized build is 20 to 50 times slower: it runs fewer and shorter ways.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

struct Answer {
  Completion completion;
  std::vector<float> logits;  // of every position that was computed, in order
};

inline LocalModel local(const RandomModel& model) {
  return {&model.spec, &model.dense, &model.experts, "random"};
}

// Greedy and sampled requests with prompts of 1 to 100 tokens, some of them sharing their beginning.
inline std::vector<AcceptedRequest> mixed_requests(const ModelSpec& spec, size_t count, uint32_t max_tokens) {
  const std::vector<uint32_t> lengths = {5, 33, 1, 64, 16, 100, 17, 2, 31, 48, 65, 15, 32, 80, 7, 49};
  SplitMix64 random(99);
  std::vector<TokenId> shared;
  for (int i = 0; i < 40; ++i) shared.push_back(static_cast<TokenId>(random.below(spec.vocab_size)));
  std::vector<AcceptedRequest> requests;
  for (size_t i = 0; i < count; ++i) {
    AcceptedRequest r;
    r.id = {7, i + 1};
    for (uint32_t t = 0; t < lengths[i % lengths.size()]; ++t) {
      r.prompt.push_back(
          i % 3 == 0 && t < shared.size() ? shared[t] : static_cast<TokenId>(random.below(spec.vocab_size)));
    }
    r.sampling.max_tokens = max_tokens - static_cast<uint32_t>(i % 3);
    r.sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
    r.sampling.top_p = i % 4 == 1 ? 0.9f : 1.0f;
    r.sampling.top_k = i % 4 == 3 ? 20 : 0;
    r.sampling.seed = 1000 + i;
    // Everything that a request may ask of sampling, in many combinations.
    if (i % 5 == 1 || i % 5 == 3) r.sampling.repetition_penalty = i % 2 == 0 ? 1.3f : 0.8f;
    if (i % 5 == 2 || i % 5 == 3) r.sampling.presence_penalty = 0.6f;
    if (i % 5 == 3) r.sampling.frequency_penalty = 0.4f;
    if (i % 4 == 2) {
      r.sampling.logit_bias = {{static_cast<TokenId>(i), 2.5f}, {static_cast<TokenId>(i + 1), -INFINITY}};
    }
    r.sampling.logprobs = i % 3 == 1;
    r.sampling.top_logprobs = i % 3 == 1 ? static_cast<uint32_t>(i % 4) : 0;
    r.sampling.prompt_logprobs = i % 4 == 1;
    r.sampling.prompt_top_logprobs = i % 8 == 1 ? 3 : 0;
    if (i % 6 == 5) r.choices = 3;
    requests.push_back(std::move(r));
  }
  return requests;
}

// Runs the requests, `at_once` at a time, and collects their answers.
inline std::vector<Answer> answers(LocalCluster& cluster, const std::vector<AcceptedRequest>& requests,
                                   size_t at_once, bool with_logits = true) {
  std::vector<Answer> out;
  for (size_t begin = 0; begin < requests.size(); begin += at_once) {
    std::vector<std::shared_ptr<PendingCompletion>> pending;
    const size_t end = std::min(requests.size(), begin + at_once);
    for (size_t i = begin; i < end; ++i) pending.push_back(cluster.submit(requests[i]));
    for (size_t i = begin; i < end; ++i) {
      const StatusOr<Completion> done = pending[i - begin]->wait(120 * kSecond);
      EXPECT_TRUE(done.ok()) << done.status();
      if (!done.ok()) return out;
      EXPECT_EQ(done->finish, FinishReason::kLength) << done->error;
      // Choices share the request's name, so the logits of several would mix.
      const bool logits = with_logits && requests[i].choices == 1;
      if (with_logits && !logits) cluster.take_logits(requests[i].id);
      out.push_back({*done, logits ? cluster.take_logits(requests[i].id) : std::vector<float>()});
    }
  }
  return out;
}

inline void expect_same(const std::vector<Answer>& want, const std::vector<Answer>& got) {
  ASSERT_EQ(want.size(), got.size());
  for (size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE("request " + std::to_string(i));
    expect_same(want[i].completion, got[i].completion);
    if (want[i].logits.empty() || got[i].logits.empty()) continue;
    // Positions in the prefix cache were not computed again: the last ones always were.
    ASSERT_LE(got[i].logits.size(), want[i].logits.size()) << "request " << i;
    const float* tail = want[i].logits.data() + (want[i].logits.size() - got[i].logits.size());
    EXPECT_EQ(std::memcmp(tail, got[i].logits.data(), got[i].logits.size() * sizeof(float)), 0)
        << "logits of request " << i << " differ";
  }
}

}  // namespace conclave::testing
