// How many micro-batches a step should have, learned from what steps took. More of them hide the wire behind
// the layers; each reads the weights of the experts it touches once more. Which of both counts depends on the
// network, on the shards and on the number of rows, so it is tried out.
//
// Not thread-safe. Never changes a result: a row's outputs do not depend on its batch.
#pragma once

#include <array>
#include <cstdint>

#include "libs/base/clock.h"

namespace conclave {

class MicroBatchTuner {
 public:
  // More are tried while that helps. Every so many steps of one size another count is tried; one that was
  // much slower, eight times as rarely.
  static constexpr uint32_t kTryEvery = 32;

  // Counts are powers of two up to `most`, and `most` itself, while each micro-batch keeps `min_rows` rows.
  MicroBatchTuner(uint32_t most, uint32_t min_rows);

  // For a step of so many rows; `prefill`: some of them are parts of prompts, whose cost is another.
  uint32_t choose(uint32_t rows, bool prefill);
  // That step took so long, all of it.
  void observe(uint32_t rows, bool prefill, uint32_t count, Nanos took);

 private:
  static constexpr uint32_t kSizes = 17;  // by the power of two below the rows
  static constexpr uint32_t kCounts = 6;  // 1, 2, 4, 8, 16 and `most`

  struct Size {
    std::array<double, kCounts> row_ns{};  // a mean that forgets; 0: never tried
    uint32_t steps = 0;
    uint32_t tries = 0;
  };

  uint32_t count_of(uint32_t index) const;
  Size& size_of(uint32_t rows, bool prefill);

  const uint32_t most_;
  const uint32_t min_rows_;
  std::array<Size, 2 * kSizes> sizes_{};
};

}  // namespace conclave
