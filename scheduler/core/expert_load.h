// How many (token, expert) pairs each expert of each layer computes, weighted so that what is a half-life old
// counts half.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/membership.h"

namespace conclave::scheduler {

class ExpertLoadMeter {
 public:
  explicit ExpertLoadMeter(Nanos half_life) : half_life_(half_life) {}

  void set_experts(size_t count) { load_.assign(count, 0); }
  // False when an index is out of range; nothing is added then. `now` does not go back.
  bool add(Incarnation shard, const ExpertLoad& report, TimePoint now);
  void forget(Incarnation shard) { shards_.erase(shard); }

  // By layer * experts + expert, in no unit: only ratios mean something.
  const std::vector<double>& weights() const { return load_; }
  // Pairs a second.
  double rate(size_t index, TimePoint now) const { return load_[index] * per_second(now); }
  double shard_rate(Incarnation shard, TimePoint now) const;
  bool any() const { return any_; }

 private:
  // Newer counts are added with a larger weight instead of making all older ones smaller.
  double weight(TimePoint now) const;
  double per_second(TimePoint now) const;
  void rescale(TimePoint now);

  const Nanos half_life_;
  TimePoint origin_ = 0;  // weight 1
  bool any_ = false;
  std::vector<double> load_;
  std::map<Incarnation, double> shards_;
};

}  // namespace conclave::scheduler
