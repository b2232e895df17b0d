// A prompt near the end of the published context (196,608 positions): minutes of attention, so labelled
// `long`.
#include <gtest/gtest.h>

#include <vector>

#include "tests/one_answer/harness.h"

namespace conclave {
namespace {

constexpr uint32_t kPromptTokens = 190'000;

TEST(LongPrompt, Of190000TokensEqualsARunWithAnotherChunkSize) {
  testing::Geometry g;
  g.hidden = 32;
  g.intermediate = 32;
  g.layers = 1;
  g.heads = 1;
  g.kv_heads = 1;
  g.head_dim = 16;
  g.rotary_dim = 8;
  g.experts = 4;
  g.top_k = 2;
  g.vocab = 97;
  g.max_positions = 196'608;
  const testing::RandomModel model(WeightDtype::kBf16, 5, g);
  SplitMix64 random(4);
  AcceptedRequest request;
  request.id = {1, 1};
  for (uint32_t i = 0; i < kPromptTokens; ++i)
    request.prompt.push_back(static_cast<TokenId>(random.below(g.vocab)));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 8;
  request.time_left = 3600 * kSecond;
  std::vector<std::vector<TokenId>> got;
  for (const uint32_t chunk : {2048u, 333u}) {
    LocalClusterOptions options;
    options.threads = 2;
    options.scheduler.prefill_chunk_tokens = chunk;
    options.scheduler.step_token_budget = chunk;
    options.worker.kv_blocks = kPromptTokens / kBlockTokens + 8;
    auto cluster = LocalCluster::start(testing::local(model), options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    ASSERT_TRUE((*cluster)->wait_ready().ok());
    const auto done = (*cluster)->complete(request, 1500 * kSecond);
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_EQ(done->tokens.size(), 8u);
    got.push_back(done->tokens);
  }
  EXPECT_EQ(got[0], got[1]);
}

}  // namespace
}  // namespace conclave
