#include "bench/kernels/limits.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace conclave::bench {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::atomic<uint64_t> sink;

__attribute__((target("avx512f"))) uint64_t sum512(const std::byte* p, size_t bytes) {
  __m512i s[8];
  for (auto& v : s) v = _mm512_setzero_si512();
  for (size_t i = 0; i + 512 <= bytes; i += 512) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) s[j] = _mm512_add_epi64(s[j], _mm512_loadu_si512(p + i + j * 64));
  }
  for (int j = 1; j < 8; ++j) s[0] = _mm512_add_epi64(s[0], s[j]);
  alignas(64) uint64_t out[8];
  _mm512_store_si512(out, s[0]);
  return out[0] + out[1];
}
uint64_t sum64(const std::byte* p, size_t bytes) {
  uint64_t s[4] = {};
  for (size_t i = 0; i + 32 <= bytes; i += 32)
    for (int j = 0; j < 4; ++j) {
      uint64_t v;
      __builtin_memcpy(&v, p + i + j * 8, 8);
      s[j] += v;
    }
  return s[0] + s[1] + s[2] + s[3];
}

// Four streams a quarter of the piece apart, each line asked for ahead of its use.
__attribute__((target("avx512f"))) uint64_t sum_streams(const std::byte* p, size_t bytes) {
  constexpr size_t kAhead = 2048;
  const size_t quarter = bytes / 4;
  __m512i s[8];
  for (auto& v : s) v = _mm512_setzero_si512();
  for (size_t i = 0; i + 128 <= quarter; i += 128) {
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; ++j) {
      const std::byte* at = p + j / 2 * quarter + i + j % 2 * 64;
      _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
      s[j] = _mm512_add_epi64(s[j], _mm512_loadu_si512(at));
    }
  }
  for (int j = 1; j < 8; ++j) s[0] = _mm512_add_epi64(s[0], s[j]);
  alignas(64) uint64_t out[8];
  _mm512_store_si512(out, s[0]);
  return out[0] + out[1];
}

constexpr long kIterations = 6'000;
constexpr int kChains = 24;
constexpr int kFewChains = 12;

// The multiplication itself is in the asm, and every loop over the chains is unrolled: an accumulator that
// the compiler keeps in memory would halve the limit that is read here.
#define CONCLAVE_PEAK_LOOP(name, isa, vector, zero, one, chains, count, text, add)                 \
  __attribute__((target(isa))) float name() {                                                      \
    vector acc[chains];                                                                            \
    _Pragma("GCC unroll 32") for (int j = 0; j < chains; ++j) acc[j] = zero;                       \
    const vector x = one;                                                                          \
    for (long i = 0; i < count; ++i) {                                                             \
      _Pragma("GCC unroll 32") for (int j = 0; j < chains;                                         \
                                    ++j) asm volatile(text " %1, %1, %0" : "+v"(acc[j]) : "v"(x)); \
    }                                                                                              \
    _Pragma("GCC unroll 32") for (int j = 1; j < chains; ++j) acc[0] = add(acc[0], acc[j]);        \
    return acc[0][0];                                                                              \
  }
CONCLAVE_PEAK_LOOP(dot_loop, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(),
                   _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80)), kChains, kIterations, "vdpbf16ps",
                   _mm512_add_ps)
CONCLAVE_PEAK_LOOP(fma512_loop, "avx512f", __m512, _mm512_setzero_ps(), _mm512_set1_ps(1.0f), kChains,
                   kIterations, "vfmadd231ps", _mm512_add_ps)
CONCLAVE_PEAK_LOOP(fma256_loop, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1.0f), kFewChains,
                   kIterations * 2, "vfmadd231ps", _mm256_add_ps)
#undef CONCLAVE_PEAK_LOOP

template <class F>
double median_of(int rounds, const F& read) {
  std::vector<double> v;
  for (int i = 0; i < rounds; ++i) v.push_back(read());
  std::nth_element(v.begin(), v.begin() + rounds / 2, v.end());
  return v[static_cast<size_t>(rounds / 2)];
}

template <class F>
double flops(ThreadPool& pool, double per_call, F loop) {
  // More pieces than threads, so that a thread that is held up for a moment is not waited for.
  const unsigned n = pool.threads() * 8;
  const double start = seconds();
  pool.parallel_for(n, [&](uint32_t) { sink += static_cast<uint64_t>(loop()); });
  return per_call * n / (seconds() - start);
}

}  // namespace

std::vector<std::byte>& big_buffer() {
  static std::vector<std::byte> buffer = [] {
    std::vector<std::byte> b(size_t{5} << 28);
    for (size_t i = 0; i < b.size(); i += 8) {
      const uint64_t v = (i * 0x9e3779b97f4a7c15ull) ^ (i >> 7);
      __builtin_memcpy(&b[i], &v, 8);
    }
    return b;
  }();
  return buffer;
}

double read_bandwidth(ThreadPool& pool, size_t offset, size_t bytes, bool streams) {
  const std::byte* from = big_buffer().data() + offset;
  constexpr size_t kPiece = size_t{1} << 20;
  const bool wide = __builtin_cpu_supports("avx512f");
  const double start = seconds();
  pool.parallel_for(static_cast<uint32_t>(bytes / kPiece), [&](uint32_t i) {
    const std::byte* piece = from + i * kPiece;
    sink += !wide ? sum64(piece, kPiece) : streams ? sum_streams(piece, kPiece) : sum512(piece, kPiece);
  });
  return static_cast<double>(bytes) / (seconds() - start);
}

double read_bandwidth(ThreadPool& pool, int rounds) {
  return median_of(rounds, [&] { return read_bandwidth(pool, 0, size_t{1} << 30, false); });
}

double fma_peak(ThreadPool& pool, int rounds) {
  return median_of(rounds, [&] {
    if (__builtin_cpu_supports("avx512f"))
      return flops(pool, 32.0 * kChains * kIterations, [] { return fma512_loop(); });
    return flops(pool, 16.0 * kFewChains * 2 * kIterations, [] { return fma256_loop(); });
  });
}

double dot_peak(ThreadPool& pool, int rounds) {
  if (!__builtin_cpu_supports("avx512bf16")) return 0;
  return median_of(rounds,
                   [&] { return flops(pool, 64.0 * kChains * kIterations, [] { return dot_loop(); }); });
}

}  // namespace conclave::bench
