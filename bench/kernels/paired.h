// A case in rounds, each beside a reading of the machine's limits, with medians of figures and shares: on a
// machine whose speed changes within a second only neighbours can be compared.
#pragma once

#include <benchmark/benchmark.h>

#include <functional>

#include "libs/kernels/ops.h"

namespace conclave::bench {

inline constexpr int kRounds = 15;

// A pool of that many threads, kept; and the context of the best instruction set with it.
ThreadPool& pool_of(unsigned threads);
kernels::Context context_of(unsigned threads);

// What one call reads from memory and computes; 0 leaves that share out.
struct Work {
  double bytes = 0;
  double operations = 0;
};

// Each iteration of `state` (kRounds of them, manual time) is a round: limits, calls for some milliseconds,
// limits again. `call` gets a running number, for another piece of the big buffer each time. Counters: GB/s,
// bw (share of plain loads' read bandwidth), bw4 (of four prefetched streams'), GFLOP/s, dot and fma (shares
// of the two peaks).
void run_paired(benchmark::State& state, unsigned threads, const Work& work,
                const std::function<void(size_t)>& call);

// Formats of the big buffer's contents, written when they differ from what it holds: BF16 in +-[2^-4, 2^-1),
// E4M3 as quantised normal weights are (zeros and subnormals rare), floats in +-[1, 16).
enum class Fill : uint8_t { kBf16, kE4m3, kF32 };
std::byte* filled_buffer(Fill fill);

}  // namespace conclave::bench
