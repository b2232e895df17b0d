// Attention, whole experts and sampling.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>

#include "bench/kernels/limits.h"
#include "libs/base/random.h"
#include "libs/kernels/ops.h"

namespace conclave::bench {
namespace {

using kernels::Context;

ThreadPool& pool() {
  static ThreadPool p(2);
  return p;
}
Context context() { return {kernels::choose_isa().value(), &pool()}; }

// One decode step of `range(0)` positions of context, real head geometry, each iteration another sequence.
void decode_attention(benchmark::State& state) {
  const auto length = static_cast<uint32_t>(state.range(0));
  const kernels::KvShape shape{48, 8, 128, Precision::kBf16};
  const size_t page_bytes = kernels::kv_page_bytes(shape);
  const uint32_t pages = (length + 15) / 16;
  auto& buffer = big_buffer();
  for (size_t i = 0; i < buffer.size(); i += 2) {
    const auto h = static_cast<uint16_t>(((i * 40503u) & 0x807f) | (124 << 7));
    __builtin_memcpy(&buffer[i], &h, 2);
  }
  const size_t sequences = buffer.size() / (page_bytes * pages);
  std::vector<float> q(48 * 128, 0.1f), out(q.size());
  const double bandwidth = read_bandwidth(pool(), 3);
  const Context ctx = context();
  size_t i = 0;
  for (auto _ : state) {
    std::vector<const std::byte*> table;
    for (uint32_t p = 0; p < pages; ++p)
      table.push_back(buffer.data() + ((i % sequences) * pages + p) * page_bytes);
    ++i;
    const kernels::AttentionSlice slice{q.data(), out.data(), length - 1, 1, table.data()};
    kernels::paged_attention(ctx, shape, {&slice, 1});
    benchmark::ClobberMemory();
  }
  const double bytes = static_cast<double>(state.iterations()) * static_cast<double>(page_bytes) * pages;
  state.counters["GB/s"] = benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_bandwidth"] = benchmark::Counter(bytes / bandwidth, benchmark::Counter::kIsRate);
}
BENCHMARK(decode_attention)->Arg(512)->Arg(4096)->Arg(32768)->UseRealTime()->Unit(benchmark::kMicrosecond);

// A chunk of 512 positions at the end of `range(0)`; heads as args: heads, kv heads, dim.
void prefill_attention(benchmark::State& state) {
  const auto length = static_cast<uint32_t>(state.range(0));
  const auto heads = static_cast<uint32_t>(state.range(1)), kv = static_cast<uint32_t>(state.range(2)),
             dim = static_cast<uint32_t>(state.range(3));
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
  const double peak = fma_peak(pool(), 5);
  const Context ctx = context();
  for (auto _ : state) {
    const kernels::AttentionSlice slice{q.data(), out.data(), length - kChunk, kChunk, table.data()};
    kernels::paged_attention(ctx, shape, {&slice, 1});
  }
  const double pairs = (length - kChunk) * static_cast<double>(kChunk) + kChunk * (kChunk + 1) / 2.0;
  const double operations = static_cast<double>(state.iterations()) * pairs * heads * dim * 4;
  state.counters["GFLOP/s"] = benchmark::Counter(operations / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_fma_peak"] = benchmark::Counter(operations / peak, benchmark::Counter::kIsRate);
}
BENCHMARK(prefill_attention)
    ->Args({4096, 48, 8, 128})
    ->Args({32768, 4, 2, 32})
    ->Args({32768, 4, 2, 16})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// `range(0)` rows each to 8 experts of real geometry in FP8, as one group.
void experts(benchmark::State& state) {
  const auto m = static_cast<uint32_t>(state.range(0));
  constexpr uint32_t kHidden = 3072, kInner = 1536, kJobs = 8;
  constexpr size_t kBytes = size_t{kHidden} * kInner;
  auto& buffer = big_buffer();
  for (auto& b : buffer) b = static_cast<std::byte>((static_cast<uint8_t>(b) & 0xc7) | 0x28);
  const std::vector<float> scales(24 * 12, 0.002f);
  const size_t copies = buffer.size() / (3 * kBytes);
  std::vector<ExpertWeights> all(copies);
  for (size_t i = 0; i < copies; ++i) {
    const std::byte* at = buffer.data() + i * 3 * kBytes;
    all[i].w1 = {at, WeightDtype::kFp8E4m3, kInner, kHidden, scales.data(), 24};
    all[i].w3 = {at + kBytes, WeightDtype::kFp8E4m3, kInner, kHidden, scales.data(), 24};
    all[i].w2 = {at + 2 * kBytes, WeightDtype::kFp8E4m3, kHidden, kInner, scales.data(), 12};
  }
  std::vector<Bf16> in(size_t{m} * kHidden, 0x3e80), out(size_t{kJobs} * m * kHidden);
  std::vector<const std::byte*> ins;
  std::vector<std::byte*> outs;
  for (uint32_t i = 0; i < m; ++i)
    ins.push_back(reinterpret_cast<const std::byte*>(&in[size_t{i} * kHidden]));
  for (uint32_t i = 0; i < m * kJobs; ++i)
    outs.push_back(reinterpret_cast<std::byte*>(&out[size_t{i} * kHidden]));
  const double bandwidth = read_bandwidth(pool(), 3), peak = dot_peak(pool(), 5);
  const Context ctx = context();
  size_t next = 0;
  for (auto _ : state) {
    std::vector<kernels::ExpertJob> jobs;
    for (uint32_t j = 0; j < kJobs; ++j)
      jobs.push_back({&all[next++ % copies], ins.data(), outs.data() + size_t{j} * m, m});
    kernels::run_experts(ctx, Precision::kBf16, jobs);
  }
  const double calls = static_cast<double>(state.iterations());
  const double bytes = calls * kJobs * 3.0 * kBytes, operations = calls * kJobs * 6.0 * kBytes * m;
  using benchmark::Counter;
  state.counters["GB/s"] = Counter(bytes / 1e9, Counter::kIsRate);
  state.counters["of_bandwidth"] = Counter(bytes / bandwidth, Counter::kIsRate);
  state.counters["GFLOP/s"] = Counter(operations / 1e9, Counter::kIsRate);
  state.counters["of_dot_peak"] = Counter(operations / peak, Counter::kIsRate);
}
BENCHMARK(experts)->Arg(1)->Arg(4)->Arg(16)->Arg(64)->Arg(256)->UseRealTime()->Unit(benchmark::kMicrosecond);

void sampling(benchmark::State& state) {
  SplitMix64 rng(1);
  std::vector<float> logits(200'064);
  for (auto& x : logits) x = static_cast<float>(rng.uniform() * 20 - 10);
  SamplingParams params;
  params.temperature = state.range(0) == 0 ? 0.0f : 1.0f;
  params.top_k = state.range(0) == 1 ? 40 : 0;
  params.top_p = state.range(0) == 3 ? 1.0f : 0.95f;
  const Context ctx = context();
  float u = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(kernels::sample(ctx, logits, params, u));
    u = u > 0.9f ? 0.0f : u + 0.07f;
  }
}
BENCHMARK(sampling)->ArgName("greedy0_topk1_topp2_all3")->DenseRange(0, 3)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace conclave::bench
