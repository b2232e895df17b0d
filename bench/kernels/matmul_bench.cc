// Matmul against the machine's limits. Weights are cut from a gigabyte, another matrix each call, so that no
// cache serves them; each case reads bandwidth and peak right before it. Threads: CONCLAVE_BENCH_THREADS (2).
#include <benchmark/benchmark.h>

#include <cstdlib>

#include "bench/kernels/limits.h"
#include "libs/kernels/ops.h"

namespace conclave::bench {
namespace {

ThreadPool& pool() {
  static ThreadPool p([] {
    const char* n = std::getenv("CONCLAVE_BENCH_THREADS");
    return n == nullptr ? 2u : static_cast<unsigned>(std::atoi(n));
  }());
  return p;
}

kernels::Isa isa() {
  static const kernels::Isa chosen = kernels::choose_isa().value();
  return chosen;
}

// Bits of the big buffer as BF16 would hold NaN and infinities; these are tamed once per format.
const std::byte* weights(WeightDtype dtype) {
  static WeightDtype now = WeightDtype::kF32;
  auto& b = big_buffer();
  if (now == dtype) return b.data();
  now = dtype;
  for (size_t i = 0; i < b.size(); i += 2) {
    uint16_t h = static_cast<uint16_t>((i * 40503u) ^ (i >> 9));
    // BF16 in +-[2^-4, 2^-1), E4M3 as quantised normal weights are: subnormals rare.
    h = dtype == WeightDtype::kBf16 ? static_cast<uint16_t>((h & 0x807f) | ((123 + (h >> 8) % 3) << 7))
                                    : static_cast<uint16_t>((h & 0x8787) | 0x3030 | ((h >> 3) & 0x0808));
    __builtin_memcpy(&b[i], &h, 2);
  }
  return b.data();
}

void matmul_case(benchmark::State& state, WeightDtype dtype, uint32_t rows, uint32_t cols) {
  const auto m = static_cast<uint32_t>(state.range(0));
  const std::byte* base = weights(dtype);
  WeightView w;
  w.dtype = dtype;
  w.rows = rows;
  w.cols = cols;
  const std::vector<float> scales(size_t{(rows + 127) / 128} * ((cols + 127) / 128), 0.01f);
  w.scales = scales.data();
  w.scale_cols = (cols + 127) / 128;
  const size_t copies = big_buffer().size() / w.bytes();
  std::vector<Bf16> x(size_t{m} * cols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<Bf16>(0x3f00 + i * 37 % 256);
  std::vector<float> y(size_t{m} * rows);
  const kernels::Context ctx{isa(), &pool()};
  const double bandwidth = read_bandwidth(pool(), 3), peak = dot_peak(pool(), 5);
  size_t i = 0;
  for (auto _ : state) {
    w.data = base + (i++ % copies) * w.bytes();
    kernels::matmul(ctx, w, Precision::kBf16, x.data(), cols, m, y.data(), rows);
    benchmark::ClobberMemory();
  }
  const double calls = static_cast<double>(state.iterations());
  const double bytes = calls * static_cast<double>(w.bytes()), operations = calls * 2.0 * m * rows * cols;
  using benchmark::Counter;
  state.counters["GB/s"] = Counter(bytes / 1e9, Counter::kIsRate);
  state.counters["of_bandwidth"] = Counter(bytes / bandwidth, Counter::kIsRate);
  state.counters["GFLOP/s"] = Counter(operations / 1e9, Counter::kIsRate);
  state.counters["of_dot_peak"] = Counter(operations / peak, Counter::kIsRate);
}

void limits_case(benchmark::State& state) {
  double bandwidth = 0, dot = 0, fma = 0;
  for (auto _ : state) {
    bandwidth = read_bandwidth(pool(), 5);
    dot = dot_peak(pool(), 9);
    fma = fma_peak(pool(), 9);
  }
  state.counters["GB/s"] = bandwidth / 1e9;
  state.counters["dot_GFLOP/s"] = dot / 1e9;
  state.counters["fma_GFLOP/s"] = fma / 1e9;
}
BENCHMARK(limits_case)->Name("limits")->UseRealTime()->Iterations(1);

#define CONCLAVE_MATMUL_BENCH(name, dtype, rows, cols)    \
  BENCHMARK_CAPTURE(matmul_case, name, dtype, rows, cols) \
      ->Name("matmul/" #name)                             \
      ->Arg(1)                                            \
      ->Arg(2)                                            \
      ->Arg(4)                                            \
      ->Arg(8)                                            \
      ->Arg(16)                                           \
      ->Arg(32)                                           \
      ->Arg(64)                                           \
      ->Arg(256)                                          \
      ->UseRealTime()                                     \
      ->Unit(benchmark::kMicrosecond)                     \
      ->MinTime(0.4)
CONCLAVE_MATMUL_BENCH(fp8_1536x3072, WeightDtype::kFp8E4m3, 1536, 3072);
CONCLAVE_MATMUL_BENCH(fp8_3072x1536, WeightDtype::kFp8E4m3, 3072, 1536);
CONCLAVE_MATMUL_BENCH(fp8_6144x3072, WeightDtype::kFp8E4m3, 6144, 3072);
CONCLAVE_MATMUL_BENCH(bf16_1536x3072, WeightDtype::kBf16, 1536, 3072);
CONCLAVE_MATMUL_BENCH(bf16_3072x1536, WeightDtype::kBf16, 3072, 1536);
CONCLAVE_MATMUL_BENCH(bf16_6144x3072, WeightDtype::kBf16, 6144, 3072);

}  // namespace
}  // namespace conclave::bench
