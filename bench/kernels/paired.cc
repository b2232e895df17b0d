#include "bench/kernels/paired.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "bench/kernels/limits.h"

namespace conclave::bench {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

struct Limits {
  double plain = 0, streams = 0, dot = 0, fma = 0;
};

Limits read_limits(ThreadPool& pool, const Work& work) {
  // Another part of the buffer each time, so that no cache keeps it.
  constexpr size_t kBytes = size_t{64} << 20;
  static size_t turn = 0;
  const auto next = [] { return turn++ % (big_buffer().size() / kBytes) * kBytes; };
  Limits limits;
  if (work.bytes > 0) {
    limits.plain = read_bandwidth(pool, next(), kBytes, false);
    limits.streams = read_bandwidth(pool, next(), kBytes, true);
  }
  if (work.operations > 0) {
    limits.dot = dot_peak(pool);
    limits.fma = fma_peak(pool);
  }
  return limits;
}

}  // namespace

ThreadPool& pool_of(unsigned threads) {
  static std::map<unsigned, std::unique_ptr<ThreadPool>> pools;
  auto& pool = pools[threads];
  if (!pool) pool = std::make_unique<ThreadPool>(threads);
  return *pool;
}

kernels::Context context_of(unsigned threads) {
  static const kernels::Isa isa = kernels::choose_isa().value();
  return {isa, &pool_of(threads)};
}

void run_paired(benchmark::State& state, unsigned threads, const Work& work,
                const std::function<void(size_t)>& call) {
  constexpr double kRoundSeconds = 0.012;
  ThreadPool& pool = pool_of(threads);
  size_t number = 0;
  call(number++);  // what the first call allocates and measures is not the case's
  double start = seconds();
  call(number++);
  const int calls = std::clamp(static_cast<int>(kRoundSeconds / (seconds() - start)), 1, 10'000);
  std::vector<double> bytes, operations, plain, streams, dot, fma;
  Limits before = read_limits(pool, work);
  for (auto _ : state) {
    start = seconds();
    for (int i = 0; i < calls; ++i) call(number++);
    const double each = (seconds() - start) / calls;
    state.SetIterationTime(each);
    const Limits after = read_limits(pool, work);
    bytes.push_back(work.bytes / each);
    operations.push_back(work.operations / each);
    plain.push_back(2 * bytes.back() / (before.plain + after.plain));
    streams.push_back(2 * bytes.back() / (before.streams + after.streams));
    dot.push_back(2 * operations.back() / (before.dot + after.dot));
    fma.push_back(2 * operations.back() / (before.fma + after.fma));
    before = after;
  }
  if (work.bytes > 0) {
    state.counters["GB/s"] = median(bytes) / 1e9;
    state.counters["bw"] = median(plain);
    state.counters["bw4"] = median(streams);
  }
  if (work.operations > 0) {
    state.counters["GFLOP/s"] = median(operations) / 1e9;
    state.counters["dot"] = median(dot);
    state.counters["fma"] = median(fma);
  }
  state.counters["us"] = median([&] {
    std::vector<double> t;
    for (size_t i = 0; i < bytes.size(); ++i)
      t.push_back(1e6 * (work.bytes > 0 ? work.bytes / bytes[i] : work.operations / operations[i]));
    return t;
  }());
}

std::byte* filled_buffer(Fill fill) {
  static std::optional<Fill> now;
  auto& buffer = big_buffer();
  if (now == fill) return buffer.data();
  now = fill;
  for (size_t i = 0; i < buffer.size(); i += 4) {
    auto v = static_cast<uint32_t>(i * 0x9e3779b97f4a7c15ull >> 29) ^ static_cast<uint32_t>(i >> 9);
    switch (fill) {
      case Fill::kBf16:
        v = (v & 0x807f807fu) | 0x3d803d80u | ((v >> 9) & 0x00800080u);
        break;
      case Fill::kE4m3:
        v = (v & 0x87878787u) | 0x30303030u | ((v >> 3) & 0x08080808u);
        break;
      case Fill::kF32:
        v = (v & 0x80ffffffu) | 0x3f800000u | ((v >> 5) & 0x01000000u);
        break;
    }
    __builtin_memcpy(&buffer[i], &v, 4);
  }
  return buffer.data();
}

}  // namespace conclave::bench
