// The kernels take nothing from the heap once a thread has seen its largest call.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "libs/kernels/ops.h"
#include "tests/allocation/count.h"
#include "tests/support/random_model.h"

namespace conclave {
namespace {

using testing::allocations;
using testing::RandomModel;

constexpr testing::Geometry kGeometry = {.hidden = 256, .intermediate = 256, .experts = 12, .vocab = 5000};

class AllocationTest : public ::testing::TestWithParam<unsigned> {
 protected:
  AllocationTest() : pool(GetParam()) {
    ctx.isa = kernels::available_isas().back();
    ctx.pool = GetParam() > 1 ? &pool : nullptr;
  }
  // The least over some calls after the first ones: which thread of a pool gets which part of a call is luck,
  // and each has its first time.
  template <class Call>
  uint64_t least(const Call& call) {
    uint64_t fewest = std::numeric_limits<uint64_t>::max();
    for (int i = 0; i < 50; ++i) {
      const uint64_t before = allocations();
      call();
      if (i > 1) fewest = std::min(fewest, allocations() - before);
    }
    return fewest;
  }
  std::vector<float> random(size_t n) {
    std::vector<float> out(n);
    for (float& x : out) x = static_cast<float>(rng.uniform() - 0.5);
    return out;
  }

  ThreadPool pool;
  kernels::Context ctx;
  SplitMix64 rng{3};
  RandomModel model{WeightDtype::kFp8E4m3, 5, kGeometry};
};

TEST_P(AllocationTest, TheCounterCounts) {
  EXPECT_EQ(least([] {
              std::vector<int> some(100);
              ::testing::Test::RecordProperty("n", int(some.size()));
            }) > 0,
            true);
}

TEST_P(AllocationTest, Matmuls) {
  const uint32_t hidden = kGeometry.hidden;
  for (const uint32_t m : {1u, 7u, 64u}) {
    std::vector<float> x = random(size_t{m} * hidden), y(size_t{m} * kGeometry.vocab);
    std::vector<Bf16> rounded(x.size());
    kernels::to_bf16(ctx, x.data(), x.size(), rounded.data());
    EXPECT_EQ(least([&] {
                kernels::matmul(ctx, model.dense.lm_head, Precision::kBf16, rounded.data(), hidden, m,
                                y.data(), kGeometry.vocab);
                kernels::matmul(ctx, model.dense.layers[0].q_proj, Precision::kF32, x.data(), hidden, m,
                                y.data(), model.spec.q_size());
              }),
              0u)
        << m;
  }
}

TEST_P(AllocationTest, GateAndExperts) {
  const uint32_t hidden = kGeometry.hidden, experts = kGeometry.experts, top_k = kGeometry.top_k;
  for (const uint32_t m : {1u, 9u, 70u}) {
    const std::vector<float> logits = random(size_t{m} * experts);
    std::vector<uint16_t> ids(size_t{m} * top_k);
    std::vector<float> weights(ids.size());
    EXPECT_EQ(least([&] {
                kernels::route(ctx, logits.data(), nullptr, m, experts, top_k, ids.data(), weights.data());
              }),
              0u);
    std::vector<Bf16> in(size_t{m} * hidden), out(ids.size() * hidden);
    std::vector<std::vector<const std::byte*>> from(experts);
    std::vector<std::vector<std::byte*>> to(experts);
    for (size_t i = 0; i < ids.size(); ++i) {
      from[ids[i]].push_back(reinterpret_cast<const std::byte*>(in.data() + i / top_k * hidden));
      to[ids[i]].push_back(reinterpret_cast<std::byte*>(out.data() + i * hidden));
    }
    std::vector<kernels::ExpertJob> jobs;
    for (uint32_t e = 0; e < experts; ++e) {
      jobs.push_back(
          {&model.experts[0][e], from[e].data(), to[e].data(), static_cast<uint32_t>(from[e].size())});
    }
    EXPECT_EQ(least([&] { kernels::run_experts(ctx, Precision::kBf16, jobs); }), 0u) << m;
  }
}

TEST_P(AllocationTest, NormsRopeAndAttention) {
  const uint32_t hidden = kGeometry.hidden, heads = kGeometry.heads, dim = kGeometry.head_dim;
  const kernels::KvShape shape{heads, kGeometry.kv_heads, dim, Precision::kBf16};
  constexpr uint32_t kPositions = 2000;
  std::vector<std::vector<std::byte>> pages(kPositions / 16 + 1,
                                            std::vector<std::byte>(kernels::kv_page_bytes(shape)));
  std::vector<const std::byte*> table;
  for (const auto& page : pages) table.push_back(page.data());
  const kernels::Rope rope(dim, kGeometry.rotary_dim, 5e6);
  uint32_t at = 0;  // other positions each time, as in decode
  for (const uint32_t rows : {1u, 40u}) {
    std::vector<float> x = random(size_t{rows} * std::max(hidden, heads * dim)), y(x.size());
    std::vector<uint32_t> positions(rows);
    EXPECT_EQ(least([&] {
                std::iota(positions.begin(), positions.end(), at++ % 1500);
                kernels::rms_norm(ctx, x.data(), model.dense.final_norm.data(), 1e-6f, rows, hidden,
                                  y.data());
                rope.apply(ctx, x.data(), rows, heads, positions.data());
                kernels::kv_store(shape, pages[at % pages.size()].data(), at % 16, y.data(), y.data());
                // One long slice, and a prompt's chunk.
                const kernels::AttentionSlice slices[] = {
                    {x.data(), y.data(), kPositions - rows, rows, table.data()}};
                kernels::paged_attention(ctx, shape, slices);
              }),
              0u)
        << rows;
  }
}

TEST_P(AllocationTest, Sampling) {
  const std::vector<float> logits = random(size_t{4} * kGeometry.vocab);
  SamplingParams greedy, cut, flat, biased;
  greedy.temperature = 0;
  cut.top_k = 40;
  cut.top_p = 0.9f;
  flat.top_p = 0.95f;
  flat.temperature = 3;
  biased.logit_bias = {{7, 2.0f}};
  biased.top_k = 1000;
  for (const SamplingParams* params : {&greedy, &cut, &flat, &biased}) {
    std::vector<float> copy = logits;
    std::vector<kernels::SampleRow> rows(4);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].logits = std::span(copy).subspan(i * kGeometry.vocab, kGeometry.vocab);
      rows[i].params = params;
      rows[i].u = 0.2f * static_cast<float>(i);
    }
    EXPECT_EQ(least([&] { kernels::sample_rows(ctx, rows); }), 0u);
    for (const auto& row : rows) EXPECT_TRUE(row.result.ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, AllocationTest, ::testing::Values(1u, 2u));

}  // namespace
}  // namespace conclave
