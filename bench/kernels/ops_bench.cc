// Attention and sampling against the machine's limits.
#include <cstring>
#include <vector>

#include "bench/kernels/limits.h"
#include "bench/kernels/paired.h"
#include "libs/base/random.h"

namespace conclave::bench {
namespace {

// One decode step of `context` positions, real head geometry, each call other pages.
void decode_attention(benchmark::State& state) {
  const auto length = static_cast<uint32_t>(state.range(0));
  const auto threads = static_cast<unsigned>(state.range(1));
  const kernels::KvShape shape{48, 8, 128, Precision::kBf16};
  const size_t page_bytes = kernels::kv_page_bytes(shape);
  const uint32_t pages = (length + 15) / 16;
  const std::byte* base = filled_buffer(Fill::kBf16);
  const size_t sequences = big_buffer().size() / (page_bytes * pages);
  // A pool hands pages out in any order.
  std::vector<const std::byte*> table;
  for (uint32_t p = 0; p < sequences * pages; ++p) table.push_back(base + p * page_bytes);
  SplitMix64 rng(1);
  for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[rng.next() % i]);
  std::vector<float> q(48 * 128, 0.1f), out(q.size());
  const kernels::Context ctx = context_of(threads);
  const double pairs = 4.0 * 48 * 128 * length;
  run_paired(state, threads, {static_cast<double>(page_bytes) * pages, pairs}, [&](size_t i) {
    const kernels::AttentionSlice slice{q.data(), out.data(), length - 1, 1,
                                        table.data() + i % sequences * pages};
    kernels::paged_attention(ctx, shape, {&slice, 1});
    benchmark::ClobberMemory();
  });
}
BENCHMARK(decode_attention)
    ->ArgNames({"context", "threads"})
    ->ArgsProduct({{4096, 32'768, 131'072}, {1, 2}})
    ->Iterations(kRounds)
    ->UseManualTime();

// A chunk of 512 positions at the end of the context.
void prefill_attention(benchmark::State& state, uint32_t heads, uint32_t kv, uint32_t dim) {
  const auto length = static_cast<uint32_t>(state.range(0));
  const auto threads = static_cast<unsigned>(state.range(1));
  const kernels::KvShape shape{heads, kv, dim, Precision::kBf16};
  constexpr uint32_t kChunk = 512;
  std::vector<std::vector<std::byte>> pages;
  std::vector<const std::byte*> table;
  SplitMix64 rng(1);
  std::vector<float> k(size_t{kv} * dim), q(size_t{kChunk} * heads * dim), out(q.size());
  for (auto& x : q) x = static_cast<float>(rng.uniform());
  for (uint32_t p = 0; p < length; ++p) {
    if (p % 16 == 0) pages.emplace_back(kernels::kv_page_bytes(shape));
    for (auto& x : k) x = static_cast<float>(rng.uniform());
    kernels::kv_store(shape, pages.back().data(), p % 16, k.data(), k.data());
  }
  for (const auto& page : pages) table.push_back(page.data());
  const kernels::Context ctx = context_of(threads);
  const double pairs = (length - kChunk) * static_cast<double>(kChunk) + kChunk * (kChunk + 1) / 2.0;
  run_paired(state, threads, {0, pairs * heads * dim * 4}, [&](size_t) {
    const kernels::AttentionSlice slice{q.data(), out.data(), length - kChunk, kChunk, table.data()};
    kernels::paged_attention(ctx, shape, {&slice, 1});
    benchmark::ClobberMemory();
  });
}
#define CONCLAVE_PREFILL(name, ...)                       \
  BENCHMARK_CAPTURE(prefill_attention, name, __VA_ARGS__) \
      ->Name(#name)                                       \
      ->ArgNames({"context", "threads"})                  \
      ->Iterations(5)                                     \
      ->UseManualTime()
CONCLAVE_PREFILL(prefill_attention, 48, 8, 128)->Args({4096, 1})->Args({4096, 2});
CONCLAVE_PREFILL(prefill_attention / small_heads, 4, 2, 32)->Args({32'768, 2});

// A message's rows copied together out of those of a micro-batch, as a worker does for one of two shards: all
// that a list of pieces instead of one buffer could save on the way out.
void packing(benchmark::State& state) {
  constexpr size_t kRowBytes = 3072 * 2;
  const auto rows = static_cast<size_t>(state.range(0));
  const std::byte* from = filled_buffer(Fill::kBf16);
  const size_t batches = big_buffer().size() / (2 * rows * kRowBytes);
  std::vector<std::byte> to(rows * kRowBytes);
  run_paired(state, 1, {static_cast<double>(rows * kRowBytes), 0}, [&](size_t i) {
    const std::byte* batch = from + i % batches * 2 * rows * kRowBytes;
    for (size_t r = 0; r < rows; ++r)
      std::memcpy(to.data() + r * kRowBytes, batch + 2 * r * kRowBytes, kRowBytes);
    benchmark::ClobberMemory();
  });
}
BENCHMARK(packing)->ArgName("rows")->Arg(8)->Arg(64)->Arg(512)->Iterations(kRounds)->UseManualTime();

// `rows` rows of 200,064 logits, one after the other as a worker draws them, of other memory each.
void sampling(benchmark::State& state, float temperature, uint32_t top_k, float top_p, float min_p = 0) {
  const auto rows = static_cast<size_t>(state.range(0));
  constexpr size_t kVocab = 200'064;
  auto* logits = reinterpret_cast<float*>(filled_buffer(Fill::kF32));
  // The first rows get a distribution that is as peaked as a model's.
  constexpr size_t kRows = 64;
  SplitMix64 rng(1);
  std::vector<float> kept(logits, logits + kRows * kVocab);
  for (size_t i = 0; i < kRows * kVocab; ++i) {
    float sum = 0;
    for (int j = 0; j < 6; ++j) sum += static_cast<float>(rng.uniform());
    logits[i] = (sum - 3.0f) * 4.5f;  // nearly normal, deviation 3.2
  }
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  const kernels::Context ctx = context_of(1);
  float u = 0;
  run_paired(state, 1, {static_cast<double>(rows * kVocab * sizeof(float)), 0}, [&](size_t i) {
    for (size_t r = 0; r < rows; ++r) {
      const std::span<float> row(logits + (i * rows + r) % kRows * kVocab, kVocab);
      benchmark::DoNotOptimize(kernels::sample(ctx, row, params, u));
      u = u > 0.9f ? 0.0f : u + 0.07f;
    }
  });
  std::copy(kept.begin(), kept.end(), logits);
}
#define CONCLAVE_SAMPLING(name, ...)             \
  BENCHMARK_CAPTURE(sampling, name, __VA_ARGS__) \
      ->Name("sampling/" #name)                  \
      ->ArgName("rows")                          \
      ->Arg(1)                                   \
      ->Arg(32)                                  \
      ->Iterations(kRounds)                      \
      ->UseManualTime()
CONCLAVE_SAMPLING(greedy, 0.0f, 0, 1.0f);
CONCLAVE_SAMPLING(top_k_40, 1.0f, 40, 1.0f);
CONCLAVE_SAMPLING(top_k_1000, 1.0f, 1000, 1.0f);
CONCLAVE_SAMPLING(top_k_40_top_p, 1.0f, 40, 0.95f);
CONCLAVE_SAMPLING(top_p_95, 1.0f, 0, 0.95f);
CONCLAVE_SAMPLING(top_p_95_flat, 10.0f, 0, 0.95f);
CONCLAVE_SAMPLING(top_p_95_peaked, 0.3f, 0, 0.95f);
CONCLAVE_SAMPLING(all, 1.0f, 0, 1.0f);
CONCLAVE_SAMPLING(all_flat, 10.0f, 0, 1.0f);
CONCLAVE_SAMPLING(all_peaked, 0.3f, 0, 1.0f);
CONCLAVE_SAMPLING(min_p_05, 1.0f, 0, 1.0f, 0.05f);

}  // namespace
}  // namespace conclave::bench
