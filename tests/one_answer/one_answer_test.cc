// Design rule 1: a request's logits and tokens do not depend on the batch it ran in, how its prefill was
// chunked, the number of shards, threads and micro-batches, or the instruction set.
#include <gtest/gtest.h>

#include "tests/one_answer/harness.h"

namespace conclave {
namespace {

using testing::Answer;
using testing::Geometry;
using testing::RandomModel;

struct Way {
  uint32_t shards = 1;
  unsigned threads = 1;
  uint32_t chunk = 512;        // of prefill
  uint32_t micro_batches = 1;  // more than one: of 2 rows or more
  size_t at_once = 1;
  kernels::Isa isa = kernels::Isa::kScalar;
  uint32_t workers = 1;
  bool prefix_cache = true;
  bool fp8_wire = false;
  int passes = 1;  // over all requests: from the second on, all but the last page is in the prefix cache

  std::string name() const {
    return std::to_string(shards) + " shards, " + std::to_string(threads) + " threads, chunk " +
           std::to_string(chunk) + ", " + std::to_string(micro_batches) + " micro-batches, " +
           std::to_string(at_once) + " at once, " + std::string(kernels::isa_name(isa)) + ", " +
           std::to_string(workers) + " workers" + (prefix_cache ? ", prefix cache" : "") +
           (fp8_wire ? ", FP8 wire" : "") + ", " + std::to_string(passes) + " passes";
  }
};

std::vector<Answer> run(const RandomModel& model, Precision precision, const Way& way,
                        const std::vector<AcceptedRequest>& requests) {
  LocalClusterOptions options;
  options.precision = precision;
  options.fp8_wire = way.fp8_wire;
  options.isa = way.isa;
  options.threads = way.threads;
  options.shards = way.shards;
  options.workers = way.workers;
  options.all_logits = true;
  options.scheduler.prefill_chunk_tokens = way.chunk;
  options.scheduler.prefix_cache = way.prefix_cache;
  options.worker.micro_batches = way.micro_batches;
  options.worker.micro_batch_min_rows = 2;
  auto cluster = LocalCluster::start(testing::local(model), options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  if (!cluster.ok()) return {};
  const Status ready = (*cluster)->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready;
  std::vector<Answer> got = testing::answers(**cluster, requests, way.at_once);
  for (int pass = 1; pass < way.passes; ++pass) {
    std::vector<AcceptedRequest> again = requests;
    for (AcceptedRequest& r : again) r.id.hi += static_cast<uint64_t>(pass);
    const std::vector<Answer> cached = testing::answers(**cluster, again, way.at_once);
    testing::expect_same(got, cached);
    EXPECT_LT(cached.at(3).logits.size(), got.at(3).logits.size()) << "nothing was cached";
    got = cached;
  }
  return got;
}

void check_all_ways(WeightDtype dtype, Precision precision, const Geometry& geometry, bool fp8_wire = false) {
  const RandomModel model(dtype, 42, geometry);
  const auto requests = testing::mixed_requests(model.spec, testing::kSanitized ? 4 : 16, 5);
  const std::vector<Answer> want =
      run(model, precision, Way{.prefix_cache = false, .fp8_wire = fp8_wire}, requests);
  ASSERT_EQ(want.size(), requests.size());
  // The answers must be worth comparing: not all the same, not constant.
  EXPECT_NE(want[0].completion.tokens, want[2].completion.tokens);

  std::vector<Way> ways;
  for (const kernels::Isa isa : kernels::available_isas()) {
    ways.push_back({2, 1, 7, 2, 16, isa});
    if (isa == kernels::Isa::kScalar || testing::kSanitized) continue;  // slow
    ways.push_back({1, 1, 512, 1, 1, isa});
    ways.push_back({5, 2, 64, 3, 3, isa});
  }
  const kernels::Isa best = kernels::available_isas().back();
  ways.push_back({1, 1, 1, 1, 16, best});
  ways.push_back({2, 2, 1, 2, 2, best});
  ways.push_back({2, 1, 7, 1, 5, best});
  ways.push_back({5, 1, 64, 4, 16, best});
  ways.push_back({3, 2, 512, 2, 8, best, 2});
  ways.push_back({2, 1, 24, 1, 4, best, 1, true, false, 2});
  for (Way& way : ways) {
    way.fp8_wire = fp8_wire;
    SCOPED_TRACE(way.name());
    testing::expect_same(want, run(model, precision, way, requests));
    if (::testing::Test::HasFatalFailure() || ::testing::Test::HasNonfatalFailure()) return;
  }
}

TEST(OneAnswer, Bf16Checkpoint) { check_all_ways(WeightDtype::kBf16, Precision::kBf16, {}); }

TEST(OneAnswer, Bf16CheckpointOfOddWidths) {
  Geometry g;
  g.hidden = 88;
  g.intermediate = 56;
  g.layers = 2;
  g.heads = 6;
  g.kv_heads = 3;
  g.head_dim = 20;
  g.rotary_dim = 12;
  g.experts = 7;
  g.top_k = 2;
  g.vocab = 131;
  check_all_ways(WeightDtype::kBf16, Precision::kBf16, g);
}

TEST(OneAnswer, Fp8Checkpoint) {
  Geometry g;
  g.hidden = 256;
  g.layers = 2;
  check_all_ways(WeightDtype::kFp8E4m3, Precision::kBf16, g);
}

TEST(OneAnswer, Fp8Wire) {
  Geometry g;
  g.hidden = 200;  // not of whole blocks
  g.layers = 2;
  check_all_ways(WeightDtype::kBf16, Precision::kBf16, g, true);
}

TEST(OneAnswer, F32CheckpointInBf16) {
  Geometry g;
  g.layers = 2;
  check_all_ways(WeightDtype::kF32, Precision::kBf16, g);
}

TEST(OneAnswer, F32CheckpointInF32) {
  Geometry g;
  g.layers = 2;
  check_all_ways(WeightDtype::kF32, Precision::kF32, g);
}

// A long prompt, in two different chunkings; the geometry is as small as it gets, the attention is not.
TEST(OneAnswer, PromptOf32768Tokens) {
  Geometry g;
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
  const RandomModel model(WeightDtype::kBf16, 5, g);
  AcceptedRequest request;
  request.id = {1, 1};
  SplitMix64 random(4);
  for (int i = 0; i < (testing::kSanitized ? 3000 : 32768); ++i)
    request.prompt.push_back(static_cast<TokenId>(random.below(g.vocab)));
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 4;
  std::vector<std::vector<Answer>> got;
  for (const uint32_t chunk : {512u, 300u}) {
    LocalClusterOptions options;
    options.scheduler.prefill_chunk_tokens = chunk;
    options.worker.micro_batches = chunk == 512 ? 1 : 2;
    auto cluster = LocalCluster::start(testing::local(model), options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    ASSERT_TRUE((*cluster)->wait_ready().ok());
    got.push_back(testing::answers(**cluster, {request}, 1, false));
    ASSERT_EQ(got.back().size(), 1u);
    EXPECT_EQ(got.back()[0].completion.tokens.size(), 4u);
  }
  testing::expect_same(got[0], got[1]);
}

TEST(OneAnswer, LogitsOfATokenListAreThoseOfARequest) {
  const RandomModel model(WeightDtype::kBf16, 8);
  LocalClusterOptions options;
  options.all_logits = true;
  auto cluster = LocalCluster::start(testing::local(model), options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ASSERT_TRUE((*cluster)->wait_ready().ok());
  std::vector<TokenId> tokens;
  for (TokenId t = 0; t < 70; ++t) tokens.push_back((t * 37) % model.spec.vocab_size);
  const auto all = (*cluster)->logits(tokens);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), tokens.size() * model.spec.vocab_size);
  // A prefix gives the same rows.
  const auto part = (*cluster)->logits({tokens.begin(), tokens.begin() + 21});
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(std::memcmp(part->data(), all->data(), part->size() * sizeof(float)), 0);
  EXPECT_EQ(field_of((*cluster)->logits({}).status()), "tokens");
  EXPECT_EQ(field_of((*cluster)->logits({model.spec.vocab_size}).status()), "tokens");
}

}  // namespace
}  // namespace conclave
