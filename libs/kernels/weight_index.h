// Sums of a row's weights in the order in which they are drawn from (docs/numerics.md, "Sampling"), without
// sorting the row. For one thread.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <span>

#include "libs/kernels/cpu/table.h"

namespace conclave::kernels {

// Orders by descending logit, then ascending id, as one integer; +0 and -0 are one logit.
inline uint64_t key_of(float logit, uint32_t id) {
  const uint32_t u = std::bit_cast<uint32_t>(logit + 0.0f);
  const uint32_t ascending = (u & 0x80000000u) ? ~u : u | 0x80000000u;
  return (static_cast<uint64_t>(~ascending) << 32) | id;
}
inline uint32_t id_of(uint64_t key) { return static_cast<uint32_t>(key); }

// The weights are exp((logit - max) * inverse). They are added up in bins of their distance from the largest
// logit; only the bin in which a sum is looked for is looked into, and only some tens of its tokens are
// sorted.
//
// The contract adds weights one by one in order, in double. Here they are added in another order, so every
// sum is uncertain by what rounding can have done to either (some 1e-10 of the total for 200,000 tokens), and
// a question whose answer hangs on less than that is not answered: the caller then adds one by one.
class WeightIndex {
 public:
  // `max` is the largest of the logits, which must not change while this lives. Uses the calling thread's
  // scratch: one at a time. Within a FlushScope.
  WeightIndex(const Table& table, std::span<const float> logits, float max, float inverse);
  WeightIndex(const WeightIndex&) = delete;
  WeightIndex& operator=(const WeightIndex&) = delete;

  // Bit for bit what table.exp_sum() gives; NaN when a logit is NaN.
  float total() const { return total_; }

  struct Place {
    uint32_t id = 0;
    double sum = 0;  // of the weights up to and with this token's
  };
  // The first token, in order, at which the sum of the weights exceeds `value` (>= 0); it is also the first
  // at which the sum reaches it. Nothing when that is uncertain or no sum does.
  std::optional<Place> find(double value);

  // The sum of all weights in order before the first that is below min_p, in (0, 1]. Nothing when that would
  // take long.
  std::optional<double> sum_from(float min_p);

 private:
  // Tokens with distance bits in [begin, end), in order of their ids.
  void load(uint32_t begin, uint32_t end);
  // Of the loaded tokens those with bits in [begin, begin + span), sorted: keys_ and ordered_ (their
  // weights).
  size_t order(uint32_t begin, uint32_t span);
  uint32_t bits_of(float logit) const {
    return std::bit_cast<uint32_t>((logit - max_) * inverse_) & 0x7fffffffu;
  }

  const Table& table_;
  std::span<const float> logits_;
  float max_;
  float inverse_;
  float total_ = 0;
  double margin_ = 0;
  // In the thread's scratch. sums_[b] is the sum of all bins before b.
  double* sums_ = nullptr;
  uint32_t* ids_ = nullptr;
  float* loaded_logits_ = nullptr;
  uint32_t* bits_ = nullptr;
  float* weights_ = nullptr;
  uint64_t* keys_ = nullptr;
  float* ordered_ = nullptr;
  uint32_t begin_ = 0, end_ = 0;  // what is loaded
  size_t loaded_ = 0;
};

}  // namespace conclave::kernels
