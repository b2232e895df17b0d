// Pauses between connection attempts: doubling from a shortest to a longest, each shortened at random by up
// to half.
#pragma once

#include <algorithm>

#include "libs/base/clock.h"
#include "libs/base/random.h"

namespace conclave::rpc {

class Backoff {
 public:
  Backoff(Nanos shortest, Nanos longest, uint64_t seed)
      : shortest_(shortest), longest_(longest), random_(seed) {}

  Nanos next() {
    const Nanos full = pause_;
    pause_ = std::min(longest_, pause_ * 2);
    return full - static_cast<Nanos>(random_.uniform() * 0.5 * static_cast<double>(full));
  }
  // After a success.
  void reset() { pause_ = shortest_; }

 private:
  const Nanos shortest_;
  const Nanos longest_;
  Nanos pause_ = shortest_;
  SplitMix64 random_;
};

}  // namespace conclave::rpc
