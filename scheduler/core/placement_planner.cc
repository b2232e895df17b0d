#include "scheduler/core/placement_planner.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {

// The same homes without one shard's.
PlacementTable without(const PlacementTable& table, Epoch epoch, Incarnation lost) {
  std::vector<ShardEndpoint> shards;
  std::vector<int> new_index;
  for (const ShardEndpoint& shard : table.shards()) {
    const bool keep = shard.shard != lost;
    new_index.push_back(keep ? static_cast<int>(shards.size()) : -1);
    if (keep) shards.push_back(shard);
  }
  PlacementTable result(epoch, table.layers(), table.experts(), std::move(shards));
  for (uint32_t layer = 0; layer < table.layers(); ++layer) {
    for (uint32_t expert = 0; expert < table.experts(); ++expert) {
      for (const uint16_t home : table.homes(layer, expert)) {
        if (new_index[home] >= 0) result.add_home(layer, expert, static_cast<uint16_t>(new_index[home]));
      }
    }
  }
  return result;
}

}  // namespace

void PlacementPlanner::set_model(uint32_t layers, uint32_t experts) {
  layers_ = layers;
  experts_ = experts;
}

void PlacementPlanner::shard_joined(const ShardEndpoint& shard, TimePoint now) {
  CONCLAVE_CHECK(live_.emplace(shard.shard, shard).second);
  // Where workers have nowhere to go there is nothing to gain by waiting for more than the settling time
  // either: the first shard alone would have to hold everything.
  if (prepare_at_ == kNever) prepare_at_ = now + options_.placement_settle_ms * kMillisecond;
}

void PlacementPlanner::shard_lost(Incarnation shard, TimePoint now) {
  if (live_.erase(shard) == 0) return;
  if (active_.find_shard(shard) >= 0) activate(without(active_, Epoch(next_epoch_++), shard));
  if (live_.empty()) {
    target_.reset();
    waiting_for_.clear();
    prepare_at_ = kNever;
    return;
  }
  // Survivors take over at once; a join that was settling is part of it.
  const bool in_target = target_ && target_->find_shard(shard) >= 0;
  if (in_target || !active_complete_) prepare(now);
}

void PlacementPlanner::prepare(TimePoint now) {
  prepare_at_ = kNever;
  std::vector<ShardEndpoint> shards;
  for (const auto& [incarnation, endpoint] : live_) shards.push_back(endpoint);
  waiting_for_.clear();
  for (const ShardEndpoint& shard : shards) waiting_for_.insert(shard.shard);
  target_ = even_placement(Epoch(next_epoch_++), layers_, experts_, std::move(shards));
  target_since_ = now;
  out_.push_back({true, false, *target_});
}

void PlacementPlanner::activate(PlacementTable table) {
  active_ = std::move(table);
  active_complete_ = active_.complete();
  out_.push_back({false, true, active_});
}

void PlacementPlanner::shard_ready(Incarnation shard, Epoch epoch) {
  if (!target_ || target_->epoch() != epoch) return;  // of a placement that was overtaken
  waiting_for_.erase(shard);
  if (!waiting_for_.empty()) return;
  PlacementTable table = std::move(*target_);
  target_.reset();
  activate(std::move(table));
}

void PlacementPlanner::on_time(TimePoint now) {
  if (prepare_at_ <= now) prepare(now);
}

std::vector<Incarnation> PlacementPlanner::overdue(TimePoint now) const {
  if (!target_ || now < target_since_ + options_.placement_ready_timeout_ms * kMillisecond) return {};
  return {waiting_for_.begin(), waiting_for_.end()};
}

TimePoint PlacementPlanner::next_timer() const {
  const TimePoint ready_by =
      target_ ? target_since_ + options_.placement_ready_timeout_ms * kMillisecond : kNever;
  return std::min(prepare_at_, ready_by);
}

std::vector<PlacementOut> PlacementPlanner::take() {
  std::vector<PlacementOut> out;
  out.swap(out_);
  return out;
}

}  // namespace conclave::scheduler
