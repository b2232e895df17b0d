// Compares all that a request answered.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <string>

#include "libs/local_cluster/completion.h"

namespace conclave::testing {

inline bool same(const std::vector<TokenLogprob>& a, const std::vector<TokenLogprob>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TokenLogprob& x, const TokenLogprob& y) {
    return x.token == y.token && std::bit_cast<uint32_t>(x.logprob) == std::bit_cast<uint32_t>(y.logprob);
  });
}

// Tokens and log-probabilities of every choice, to the bit.
inline void expect_same(const Completion& want, const Completion& got) {
  EXPECT_EQ(want.tokens, got.tokens);
  EXPECT_EQ(want.finish, got.finish);
  ASSERT_EQ(want.logprobs.size(), got.logprobs.size());
  for (size_t i = 0; i < want.logprobs.size(); ++i) EXPECT_EQ(want.logprobs[i], got.logprobs[i]) << i;
  ASSERT_EQ(want.top_logprobs.size(), got.top_logprobs.size());
  for (size_t i = 0; i < want.top_logprobs.size(); ++i) {
    EXPECT_TRUE(same(want.top_logprobs[i], got.top_logprobs[i])) << "likely tokens at " << i;
  }
  ASSERT_EQ(want.prompt_logprobs.size(), got.prompt_logprobs.size());
  for (size_t i = 0; i < want.prompt_logprobs.size(); ++i) {
    EXPECT_EQ(want.prompt_logprobs[i].logprob, got.prompt_logprobs[i].logprob) << "prompt, " << i;
    EXPECT_TRUE(same(want.prompt_logprobs[i].top, got.prompt_logprobs[i].top)) << "prompt, " << i;
  }
  ASSERT_EQ(want.more.size(), got.more.size());
  for (size_t i = 0; i < want.more.size(); ++i) {
    SCOPED_TRACE("choice " + std::to_string(i + 1));
    expect_same(want.more[i], got.more[i]);
  }
}

}  // namespace conclave::testing
