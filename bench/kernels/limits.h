// What the machine can do, measured in the same process as the kernels: shares of these are what the benches
// report, since absolute speed on a shared machine changes by the hour.
#pragma once

#include <cstddef>
#include <vector>

#include "libs/base/thread_pool.h"

namespace conclave::bench {

// A gigabyte that no cache holds, filled once.
std::vector<std::byte>& big_buffer();
// Bytes per second of summing `big_buffer` on every thread of the pool: the median of `rounds`.
double read_bandwidth(ThreadPool& pool, int rounds);
// Floating-point operations per second of BF16 dot products on registers alone (64 an instruction); where the
// CPU has none, of fused multiply-adds on 512 or 256 bits.
double dot_peak(ThreadPool& pool, int rounds);
// The same of fused multiply-adds on floats.
double fma_peak(ThreadPool& pool, int rounds);

}  // namespace conclave::bench
