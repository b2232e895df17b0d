#include "scheduler/core/expert_load.h"

#include <cmath>

namespace conclave::scheduler {
namespace {
constexpr double kRescaleHalfLives = 256;  // far from the range of a double
}  // namespace

double ExpertLoadMeter::weight(TimePoint now) const {
  return std::exp2(static_cast<double>(now - origin_) / static_cast<double>(half_life_));
}

double ExpertLoadMeter::per_second(TimePoint now) const {
  // A steady stream of r pairs a second sums up to r * half-life / ln 2.
  const double seconds = static_cast<double>(half_life_) / static_cast<double>(kSecond);
  return std::log(2.0) / (seconds * weight(now));
}

void ExpertLoadMeter::rescale(TimePoint now) {
  const double factor = 1 / weight(now);
  for (double& load : load_) load *= factor;
  for (auto& [shard, load] : shards_) load *= factor;
  origin_ = now;
}

bool ExpertLoadMeter::add(Incarnation shard, const ExpertLoad& report, TimePoint now) {
  // Indices ascend.
  if (!report.entries.empty() && report.entries.back().index >= load_.size()) return false;
  if (static_cast<double>(now - origin_) > kRescaleHalfLives * static_cast<double>(half_life_)) rescale(now);
  const double one = weight(now);
  double sum = 0;
  for (const ExpertLoad::Entry& entry : report.entries) {
    const double added = static_cast<double>(entry.count) * one;
    load_[entry.index] += added;
    sum += added;
  }
  shards_[shard] += sum;
  any_ = any_ || sum > 0;
  return true;
}

double ExpertLoadMeter::shard_rate(Incarnation shard, TimePoint now) const {
  const auto it = shards_.find(shard);
  return it == shards_.end() ? 0 : it->second * per_second(now);
}

}  // namespace conclave::scheduler
