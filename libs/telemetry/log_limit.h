// Keeps lines that a stranger can cause, as often as he likes, to one of a kind in a while.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "libs/base/clock.h"

namespace conclave {

// Any thread.
class LogLimit {
 public:
  explicit LogLimit(Nanos interval = 10 * kSecond) : interval_(interval) {}

  // How many lines were left out since the last one, when one may be written now; nothing: leave it out.
  std::optional<uint64_t> take(TimePoint now) {
    std::lock_guard lock(mutex_);
    if (written_ && now - last_ < interval_) {
      ++left_out_;
      return std::nullopt;
    }
    written_ = true;
    last_ = now;
    const uint64_t out = left_out_;
    left_out_ = 0;
    return out;
  }

 private:
  const Nanos interval_;
  std::mutex mutex_;
  bool written_ = false;
  TimePoint last_ = 0;
  uint64_t left_out_ = 0;
};

}  // namespace conclave
