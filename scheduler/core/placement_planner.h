// Which shard holds which experts, and the protocol of changing it. A change is prepared at the shards first
// and given to the workers when every shard of it is ready, so workers keep using the old placement
// meanwhile. A lost shard's homes are taken away at once; workers hold rows that have no home until the next
// placement gives one.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/model/placement.h"
#include "scheduler/core/options.h"

namespace conclave::scheduler {

struct PlacementOut {
  bool to_shards = false;   // to every shard of the table
  bool to_workers = false;  // to every worker
  PlacementTable table;
};

class PlacementPlanner {
 public:
  explicit PlacementPlanner(const SchedulerOptions& options) : options_(options) {}

  void set_model(uint32_t layers, uint32_t experts);
  void shard_joined(const ShardEndpoint& shard, TimePoint now);
  void shard_lost(Incarnation shard, TimePoint now);
  void shard_ready(Incarnation shard, Epoch epoch);
  void on_time(TimePoint now);
  // Shards that had placement_ready_timeout_ms and did not answer.
  std::vector<Incarnation> overdue(TimePoint now) const;
  TimePoint next_timer() const;

  // What is to be sent, in order, since the last call.
  std::vector<PlacementOut> take();

  // At the workers; epoch 0 before the first.
  const PlacementTable& active() const { return active_; }
  bool active_complete() const { return active_complete_; }
  bool preparing() const { return target_.has_value(); }
  size_t shards() const { return live_.size(); }

 private:
  void prepare(TimePoint now);
  void activate(PlacementTable table);

  const SchedulerOptions& options_;
  uint32_t layers_ = 0;
  uint32_t experts_ = 0;
  uint64_t next_epoch_ = 1;
  std::map<Incarnation, ShardEndpoint> live_;
  PlacementTable active_;
  bool active_complete_ = false;
  std::optional<PlacementTable> target_;
  std::set<Incarnation> waiting_for_;  // shards of target_ that have not answered
  TimePoint prepare_at_ = kNever;      // joins settle until then
  TimePoint target_since_ = 0;
  std::vector<PlacementOut> out_;
};

}  // namespace conclave::scheduler
