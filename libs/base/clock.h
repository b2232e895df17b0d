// Time points and durations in nanoseconds. Cores never read a clock: they are handed `now` by their
// executor, which is real (steady) time in a process and virtual time in simulation. Wall time appears only
// in logs and incarnations.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace conclave {

using Nanos = int64_t;      // a duration
using TimePoint = int64_t;  // nanoseconds since an arbitrary start, monotonic

inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;
inline constexpr TimePoint kNever = std::numeric_limits<int64_t>::max();

inline TimePoint steady_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline int64_t wall_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

inline int64_t wall_now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace conclave
