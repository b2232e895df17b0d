// What the machine can do, measured in the same process as the kernels: shares of these are what the benches
// report, since absolute speed on a shared machine changes by the hour.
#pragma once

#include <cstddef>
#include <vector>

#include "libs/base/thread_pool.h"

namespace conclave::bench {

// More than a gigabyte that no cache holds, large enough for the output layer in BF16.
std::vector<std::byte>& big_buffer();
// Bytes per second of summing `bytes` of `big_buffer` from `offset` on (both multiples of a megabyte) on
// every thread of the pool: plain loads in ascending order, or, with `streams`, four streams a thread with
// prefetch.
double read_bandwidth(ThreadPool& pool, size_t offset, size_t bytes, bool streams);
// Plain loads of a gigabyte, the median of `rounds`.
double read_bandwidth(ThreadPool& pool, int rounds);
// Floating-point operations per second of BF16 dot products on registers alone (64 an instruction); where the
// CPU has none, 0. The median of `rounds` of about two milliseconds.
double dot_peak(ThreadPool& pool, int rounds = 1);
// The same of fused multiply-adds on floats, 512 or 256 bits.
double fma_peak(ThreadPool& pool, int rounds = 1);

}  // namespace conclave::bench
