// Whole experts, single matrices and the output layer against the machine's limits. Weights are cut from more
// than a gigabyte, others each call, so that no cache serves them.
#include <vector>

#include "bench/kernels/limits.h"
#include "bench/kernels/paired.h"

namespace conclave::bench {
namespace {

// The limits by themselves.
void limits_case(benchmark::State& state) {
  ThreadPool& pool = pool_of(static_cast<unsigned>(state.range(0)));
  constexpr size_t kBytes = size_t{1} << 30;
  for (auto _ : state) {
    state.counters["plain_GB/s"] = read_bandwidth(pool, 0, kBytes, false) / 1e9;
    state.counters["streams_GB/s"] = read_bandwidth(pool, 0, kBytes, true) / 1e9;
    state.counters["dot_GFLOP/s"] = dot_peak(pool) / 1e9;
    state.counters["fma_GFLOP/s"] = fma_peak(pool) / 1e9;
  }
}
BENCHMARK(limits_case)->Name("limits")->ArgName("threads")->Arg(1)->Arg(2)->Iterations(3)->UseRealTime();

// One matrix, `m` rows.
void matmul_case(benchmark::State& state, WeightDtype dtype, uint32_t rows, uint32_t cols) {
  const auto m = static_cast<uint32_t>(state.range(0));
  const auto threads = static_cast<unsigned>(state.range(1));
  const std::byte* base = filled_buffer(dtype == WeightDtype::kBf16 ? Fill::kBf16 : Fill::kE4m3);
  const std::vector<float> scales(size_t{(rows + 127) / 128} * ((cols + 127) / 128), 0.01f);
  WeightView w{base, dtype, rows, cols, scales.data(), (cols + 127) / 128};
  const size_t copies = big_buffer().size() / w.bytes();
  std::vector<Bf16> x(size_t{m} * cols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<Bf16>(0x3f00 + i * 37 % 256);
  std::vector<float> y(size_t{m} * rows);
  const kernels::Context ctx = context_of(threads);
  run_paired(state, threads, {static_cast<double>(w.bytes()), 2.0 * m * rows * cols}, [&](size_t i) {
    w.data = base + i % copies * w.bytes();
    kernels::matmul(ctx, w, Precision::kBf16, x.data(), cols, m, y.data(), rows);
    benchmark::ClobberMemory();
  });
}

// `jobs` experts of the real geometry in FP8 as one group, `m` rows each.
void expert_case(benchmark::State& state, uint32_t jobs) {
  const auto m = static_cast<uint32_t>(state.range(0));
  const auto threads = static_cast<unsigned>(state.range(1));
  constexpr uint32_t kHidden = 3072, kInner = 1536;
  constexpr size_t kBytes = size_t{kHidden} * kInner;
  const std::byte* base = filled_buffer(Fill::kE4m3);
  const std::vector<float> scales(24 * 12, 0.002f);
  std::vector<ExpertWeights> all(big_buffer().size() / (3 * kBytes));
  for (size_t i = 0; i < all.size(); ++i) {
    const std::byte* at = base + i * 3 * kBytes;
    all[i].w1 = {at, WeightDtype::kFp8E4m3, kInner, kHidden, scales.data(), 24};
    all[i].w3 = {at + kBytes, WeightDtype::kFp8E4m3, kInner, kHidden, scales.data(), 24};
    all[i].w2 = {at + 2 * kBytes, WeightDtype::kFp8E4m3, kHidden, kInner, scales.data(), 12};
  }
  std::vector<Bf16> in(size_t{m} * kHidden, 0x3e80), out(size_t{jobs} * m * kHidden);
  std::vector<const std::byte*> ins;
  std::vector<std::byte*> outs;
  for (uint32_t i = 0; i < m; ++i)
    ins.push_back(reinterpret_cast<const std::byte*>(&in[size_t{i} * kHidden]));
  for (uint32_t i = 0; i < m * jobs; ++i)
    outs.push_back(reinterpret_cast<std::byte*>(&out[size_t{i} * kHidden]));
  std::vector<kernels::ExpertJob> group(jobs);
  const kernels::Context ctx = context_of(threads);
  run_paired(state, threads, {3.0 * jobs * kBytes, 6.0 * jobs * m * kBytes}, [&](size_t i) {
    for (uint32_t j = 0; j < jobs; ++j)
      group[j] = {&all[(i * jobs + j) % all.size()], ins.data(), outs.data() + size_t{j} * m, m};
    kernels::run_experts(ctx, Precision::kBf16, group);
    benchmark::ClobberMemory();
  });
}

#define CONCLAVE_PAIRED(function, name, ...)     \
  BENCHMARK_CAPTURE(function, name, __VA_ARGS__) \
      ->Name(#name)                              \
      ->ArgNames({"m", "threads"})               \
      ->Iterations(kRounds)                      \
      ->UseManualTime()
CONCLAVE_PAIRED(expert_case, expert_fp8, 1)->ArgsProduct({{1, 2, 4, 8, 16, 32, 64, 256}, {1, 2}});
CONCLAVE_PAIRED(expert_case, experts8_fp8, 8)->ArgsProduct({{1, 4, 16, 64}, {2}});
CONCLAVE_PAIRED(matmul_case, matmul / fp8_1536x3072, WeightDtype::kFp8E4m3, 1536, 3072)
    ->ArgsProduct({{1, 16, 256}, {1, 2}});
CONCLAVE_PAIRED(matmul_case, lm_head_fp8, WeightDtype::kFp8E4m3, 200'064, 3072)
    ->ArgsProduct({{1, 8, 32, 64}, {2}});
CONCLAVE_PAIRED(matmul_case, lm_head_bf16, WeightDtype::kBf16, 200'064, 3072)->ArgsProduct({{1, 8, 32, 64}, {2}});
CONCLAVE_PAIRED(matmul_case, matmul / bf16_1536x3072, WeightDtype::kBf16, 1536, 3072)
    ->ArgsProduct({{1, 16, 256}, {1, 2}});
CONCLAVE_PAIRED(matmul_case, matmul / bf16_6144x3072, WeightDtype::kBf16, 6144, 3072)
    ->ArgsProduct({{1, 16, 256}, {1, 2}});

}  // namespace
}  // namespace conclave::bench
