#include "libs/kernels/weight_index.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace conclave::kernels {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr size_t kSortAtOnce = 64;

uint32_t bin_of(uint32_t bits) {
  const uint32_t bin = bits >> kWeightBinShift;
  return bin <= kFirstWeightBin ? 0 : std::min(bin - kFirstWeightBin, kWeightBins - 1);
}
uint32_t bin_begin(uint32_t bin) { return bin == 0 ? 0 : (bin + kFirstWeightBin) << kWeightBinShift; }
uint32_t bin_end(uint32_t bin) { return bin + 1 == kWeightBins ? kInfinityBits : bin_begin(bin + 1); }

// Hands out pieces of one buffer.
class Pieces {
 public:
  explicit Pieces(std::byte* at) : at_(at) {}
  template <class T>
  T* take(size_t count) {
    T* const piece = reinterpret_cast<T*>(at_);
    at_ += padded<T>(count);
    return piece;
  }
  template <class T>
  static size_t padded(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  std::byte* at_;
};

}  // namespace

WeightIndex::WeightIndex(const Table& table, std::span<const float> logits, float max, float inverse)
    : table_(table), logits_(logits), max_(max), inverse_(inverse) {
  const size_t n = logits.size();
  const size_t bytes = 2 * Pieces::padded<double>(kWeightSlots) + Pieces::padded<uint32_t>(n + 16) +
                       4 * Pieces::padded<float>(n) + Pieces::padded<uint64_t>(n);
  Pieces pieces(static_cast<std::byte*>(thread_scratch(Scratch::kWeights, bytes)));
  double* const even = sums_ = pieces.take<double>(kWeightSlots);
  double* const odd = pieces.take<double>(kWeightSlots);
  ids_ = pieces.take<uint32_t>(n + 16);
  loaded_logits_ = pieces.take<float>(n);
  bits_ = pieces.take<uint32_t>(n);
  weights_ = pieces.take<float>(n);
  ordered_ = pieces.take<float>(n);
  keys_ = pieces.take<uint64_t>(n);

  std::fill_n(even, kWeightSlots, 0.0);
  std::fill_n(odd, kWeightSlots, 0.0);
  total_ = table.exp_bins(logits.data(), n, max, inverse, even, odd);
  double sum = 0;
  for (uint32_t b = 0; b < kWeightBins; ++b) {
    const double bin = even[b] + odd[b];
    sums_[b] = sum;
    sum += bin;
  }
  sums_[kWeightBins] = sum;
  // n additions of numbers above 0, in any order, are wrong by at most n 2^-53 of their sum, and ours by no
  // more than n + 4096 are; the sum that a draw is a share of is as uncertain again.
  margin_ = (static_cast<double>(n) + 4096) * 0x1p-51 * sum;
}

void WeightIndex::load(uint32_t begin, uint32_t end) {
  if (begin == begin_ && end == end_) return;
  begin_ = begin;
  end_ = end;
  loaded_ = table_.collect(logits_.data(), logits_.size(), max_, inverse_, begin, end, ids_);
  for (size_t i = 0; i < loaded_; ++i) loaded_logits_[i] = logits_[ids_[i]];
  for (size_t i = 0; i < loaded_; ++i) bits_[i] = bits_of(loaded_logits_[i]);
  table_.exp_of(loaded_logits_, loaded_, max_, inverse_, weights_);
}

size_t WeightIndex::order(uint32_t begin, uint32_t span) {
  size_t count = 0;
  for (size_t i = 0; i < loaded_; ++i)
    if (bits_[i] - begin < span) keys_[count++] = key_of(loaded_logits_[i], ids_[i]);
  if (!std::is_sorted(keys_, keys_ + count)) std::sort(keys_, keys_ + count);
  for (size_t i = 0; i < count; ++i) ordered_[i] = logits_[id_of(keys_[i])];
  table_.exp_of(ordered_, count, max_, inverse_, ordered_);
  return count;
}

std::optional<WeightIndex::Place> WeightIndex::find(double value) {
  const double* const ends = sums_ + 1;
  const double* const end = std::upper_bound(ends, ends + kWeightBins, value);
  if (end == ends + kWeightBins) return std::nullopt;
  const auto bin = static_cast<uint32_t>(end - ends);
  load(bin_begin(bin), bin_end(bin));
  double sum = sums_[bin];  // of what comes before [begin, begin + span)
  uint32_t begin = begin_, span = end_ - begin_;
  if (loaded_ > kSortAtOnce) {
    const auto [low, high] = std::minmax_element(bits_, bits_ + loaded_);
    begin = *low;
    span = *high - begin + 1;
  }
  for (size_t count = loaded_; count > kSortAtOnce && span > 1;) {
    constexpr int kPartBits = 9;
    const int shift = std::max(0, static_cast<int>(std::bit_width(span - 1)) - kPartBits);
    std::array<double, size_t{1} << kPartBits> part_sums = {};
    std::array<uint32_t, size_t{1} << kPartBits> part_counts = {};
    for (size_t i = 0; i < loaded_; ++i) {
      const uint32_t at = bits_[i] - begin;
      if (at >= span) continue;
      part_sums[at >> shift] += weights_[i];
      ++part_counts[at >> shift];
    }
    uint32_t part = 0;
    for (; part < part_sums.size() && !(sum + part_sums[part] > value); ++part) sum += part_sums[part];
    if (part == part_sums.size()) return std::nullopt;
    count = part_counts[part];
    begin += part << shift;
    span = std::min(span - (part << shift), 1u << shift);
  }
  const size_t count = order(begin, span);
  for (size_t i = 0; i < count; ++i) {
    const double with = sum + ordered_[i];
    if (with > value) {
      // Nothing comes before the first token, so that a sum of 0 is certain.
      if (!(sum == 0 || sum + margin_ <= value) || !(with >= value + margin_)) return std::nullopt;
      return Place{id_of(keys_[i]), with};
    }
    sum = with;
  }
  return std::nullopt;
}

std::optional<double> WeightIndex::sum_from(float min_p) {
  // Tokens nearer than `begin` have weights above min_p and those from `end` on below, whatever exp rounds
  // to.
  constexpr double kMore = 1e-5;
  constexpr size_t kMost = 4096;
  const double edge = -std::log(static_cast<double>(min_p));
  const auto near = static_cast<float>(edge - kMore * (1 + edge));
  const auto far = static_cast<float>(edge + kMore * (1 + edge));
  const uint32_t begin = near > 0 ? std::bit_cast<uint32_t>(near) : 0;
  const uint32_t end = std::min(std::bit_cast<uint32_t>(far) + 1, kInfinityBits);
  const uint32_t bin = bin_of(begin);
  load(bin_begin(bin), begin);
  double sum = sums_[bin];
  for (size_t i = 0; i < loaded_; ++i) sum += weights_[i];
  load(begin, end);
  if (loaded_ > kMost) return std::nullopt;
  const size_t count = order(begin, end - begin);
  for (size_t i = 0; i < count && ordered_[i] >= min_p; ++i) sum += ordered_[i];
  return sum;
}

}  // namespace conclave::kernels
