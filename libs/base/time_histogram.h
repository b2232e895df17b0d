// Counts of times by their size, for cores that keep plain counters: no lock, no allocation, one writer. What
// a scrape shows of one is MetricSink's business.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "libs/base/clock.h"

namespace conclave {

// Upper bounds of buckets, inclusive, ascending.
// Of requests: 1 ms to 100 s, five a decade.
inline constexpr std::array<Nanos, 26> kRequestTimes = {
    1 * kMillisecond,   2 * kMillisecond,   3 * kMillisecond,   5 * kMillisecond,   7 * kMillisecond,
    10 * kMillisecond,  20 * kMillisecond,  30 * kMillisecond,  50 * kMillisecond,  70 * kMillisecond,
    100 * kMillisecond, 200 * kMillisecond, 300 * kMillisecond, 500 * kMillisecond, 700 * kMillisecond,
    1 * kSecond,        2 * kSecond,        3 * kSecond,        5 * kSecond,        7 * kSecond,
    10 * kSecond,       20 * kSecond,       30 * kSecond,       50 * kSecond,       70 * kSecond,
    100 * kSecond};
// Of single messages and their answers: 20 us to 20 s, three a decade.
inline constexpr std::array<Nanos, 19> kMessageTimes = {
    20 * kMicrosecond, 50 * kMicrosecond,  100 * kMicrosecond, 200 * kMicrosecond, 500 * kMicrosecond,
    1 * kMillisecond,  2 * kMillisecond,   5 * kMillisecond,   10 * kMillisecond,  20 * kMillisecond,
    50 * kMillisecond, 100 * kMillisecond, 200 * kMillisecond, 500 * kMillisecond, 1 * kSecond,
    2 * kSecond,       5 * kSecond,        10 * kSecond,       20 * kSecond};

template <const auto& kBounds>
class TimeHistogram {
 public:
  // Negative times count as 0.
  void observe(Nanos time) {
    time = std::max<Nanos>(time, 0);
    ++counts_[static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), time) - kBounds.begin())];
    sum_ += time;
  }

  static std::span<const Nanos> bounds() { return kBounds; }
  // By bucket, not added up; the last one is of what is beyond every bound.
  std::span<const uint64_t> counts() const { return counts_; }
  uint64_t count() const {
    uint64_t all = 0;
    for (const uint64_t one : counts_) all += one;
    return all;
  }
  Nanos sum() const { return sum_; }

 private:
  std::array<uint64_t, kBounds.size() + 1> counts_{};
  Nanos sum_ = 0;
};

using RequestTimeHistogram = TimeHistogram<kRequestTimes>;
using MessageTimeHistogram = TimeHistogram<kMessageTimes>;

}  // namespace conclave
