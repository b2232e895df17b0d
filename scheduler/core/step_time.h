// How long a worker's steps take, learned from those it reported: what decodes alone cost, and what a row of
// prefill adds. From it the rows of prefill that a step may carry without making its decodes wait too long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "libs/base/clock.h"

namespace conclave::scheduler {

class StepTime {
 public:
  void observe(uint32_t decode_rows, uint32_t prefill_rows, Nanos took) {
    if (took <= 0 || decode_rows + prefill_rows == 0) return;
    const double time = static_cast<double>(took);
    if (prefill_rows == 0) {
      learn(decode_, time);
    } else {
      const double rest = std::max(time - (decode_rows > 0 ? decode_ : 0), time / 10);
      learn(prefill_row_, rest / prefill_rows);
    }
  }

  // Rows of prefill beside decodes so that the step takes `target`, or twice what the decodes alone take when
  // that is more: a machine too slow for the target still serves both. At least `least`, at most `most`.
  uint32_t prefill_rows(Nanos target, uint32_t least, uint32_t most) const {
    if (target <= 0 || prefill_row_ <= 0) return most;
    const double allowed = std::max(static_cast<double>(target), 2 * decode_) - decode_;
    return static_cast<uint32_t>(std::clamp(
        allowed / prefill_row_, static_cast<double>(std::min(least, most)), static_cast<double>(most)));
  }

  Nanos decode_ns() const { return static_cast<Nanos>(decode_); }
  Nanos prefill_row_ns() const { return static_cast<Nanos>(prefill_row_); }

 private:
  // A mean that forgets: a tenth of the way to each new figure, so that a machine that slowed down is
  // believed after some steps and one odd step is not.
  static void learn(double& mean, double value) { mean = mean == 0 ? value : mean + (value - mean) / 10; }

  double decode_ = 0;       // ns of a step of decodes alone
  double prefill_row_ = 0;  // ns a row of prefill adds
};

}  // namespace conclave::scheduler
