#include "attention_service/core/micro_batch_tuner.h"

#include <algorithm>
#include <bit>

#include "libs/base/check.h"

namespace conclave {
namespace {

constexpr double kMuchSlower = 1.3;

}  // namespace

MicroBatchTuner::MicroBatchTuner(uint32_t most, uint32_t min_rows)
    : most_(most), min_rows_(std::max(min_rows, 1u)) {
  CONCLAVE_CHECK(most_ >= 1);
}

uint32_t MicroBatchTuner::count_of(uint32_t index) const { return std::min(1u << index, most_); }

MicroBatchTuner::Size& MicroBatchTuner::size_of(uint32_t rows, bool prefill) {
  const auto power = static_cast<uint32_t>(std::bit_width(std::max(rows, 1u))) - 1;
  return sizes_[std::min(power, kSizes - 1) + (prefill ? kSizes : 0)];
}

uint32_t MicroBatchTuner::choose(uint32_t rows, bool prefill) {
  // Indices 0 .. usable - 1 are different counts that leave enough rows each.
  uint32_t usable = 1;
  while (usable < kCounts && count_of(usable) > count_of(usable - 1) && rows / count_of(usable) >= min_rows_)
    ++usable;
  if (usable == 1) return 1;
  Size& size = size_of(rows, prefill);
  ++size.steps;
  // First upwards for as long as it helps. A first step that was slow by chance is found out by the later
  // tries.
  uint32_t best = 0;
  for (uint32_t i = 0; i < usable; ++i) {
    if (size.row_ns[i] == 0) {
      if (i <= best + 1) return count_of(i);
      continue;
    }
    if (size.row_ns[i] < size.row_ns[best]) best = i;
  }
  if (size.steps % kTryEvery != 0) return count_of(best);
  // A neighbour, one after the other: the cost has one valley.
  const uint32_t turn = size.tries++;
  const uint32_t other = turn % 2 == 0 ? best + 1 : best - 1;
  if (other >= usable) return count_of(best);
  const bool hopeless = size.row_ns[other] > kMuchSlower * size.row_ns[best];
  return count_of(hopeless && turn / 2 % 8 != 0 ? best : other);
}

void MicroBatchTuner::observe(uint32_t rows, bool prefill, uint32_t count, Nanos took) {
  if (rows == 0 || took <= 0) return;
  uint32_t index = 0;
  while (index + 1 < kCounts && count_of(index) < count) ++index;
  if (count_of(index) != count) return;
  double& mean = size_of(rows, prefill).row_ns[index];
  const double value = static_cast<double>(took) / rows;
  // Good news is believed sooner, and very good news at once: the first steps wait for the disk.
  if (mean == 0 || value < mean / 2)
    mean = value;
  else
    mean += (value - mean) / (value < mean ? 2 : 8);
}

}  // namespace conclave
