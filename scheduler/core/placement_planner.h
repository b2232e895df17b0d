// Which shard holds which experts, and the protocol of changing it (docs/placement.md).
//
// A change is prepared at the shards first and given to the workers once every shard has what it assigns;
// workers use the old placement meanwhile. Homes that the new one does not name are let go when no worker
// uses an older one. Joins, drains, losses and rebalancing all are such changes, one at a time; a lost
// shard's homes are taken away at once, and what is to replace them overtakes whatever was being prepared.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/model/placement.h"
#include "scheduler/core/expert_balance.h"
#include "scheduler/core/expert_load.h"
#include "scheduler/core/options.h"
#include "scheduler/core/status_snapshot.h"

namespace conclave::scheduler {

struct PlacementOut {
  enum class What : uint8_t {
    kPrepare,   // to the shards of the table
    kActivate,  // to every worker
    kRelease,   // to every shard, also those that the table does not name
  };
  What what = What::kPrepare;
  PlacementTable table;
  bool urgent = false;  // PlacementUpdate::urgent
  std::string note;     // for the log: why, and what it changes
};

class PlacementPlanner {
 public:
  explicit PlacementPlanner(const SchedulerOptions& options);

  void set_model(uint32_t layers, uint32_t experts);
  // `slots`: (layer, expert) pairs its memory holds; UINT64_MAX: no limit.
  void shard_joined(const ShardEndpoint& shard, uint64_t slots, TimePoint now);
  void shard_lost(Incarnation shard, TimePoint now);
  // Its homes are to move elsewhere, for the rest of its membership.
  void shard_leaving(Incarnation shard, TimePoint now);
  void shard_ready(Incarnation shard, Epoch epoch, TimePoint now);
  // False when the report names an expert that the model lacks.
  bool shard_load(Incarnation shard, const ExpertLoad& report, TimePoint now);
  // The oldest placement that any worker still uses; no worker: Epoch(UINT64_MAX).
  void workers_use(Epoch oldest, TimePoint now);
  bool awaits_workers() const { return unreleased_; }
  // Begins what is due.
  void on_time(TimePoint now);
  // What a change for balance alone would do now, and its beginning unless `dry_run`. FAILED_PRECONDITION
  // where there is nothing to balance, or (but for a dry run) another change is on its way.
  StatusOr<RebalanceSummary> rebalance(bool dry_run, TimePoint now);

  // Whether nobody needs a leaving shard any more: no placement in use or in preparation names it, or no
  // other shard stays that could take over.
  bool free_to_go(Incarnation shard) const;
  // Whether a leaving shard goes though nobody takes over.
  bool last_to_go() const;
  // Shards that had placement_ready_timeout_ms and did not answer.
  std::vector<Incarnation> overdue(TimePoint now) const;
  TimePoint next_timer() const;

  // What is to be sent, in order, since the last call.
  std::vector<PlacementOut> take();

  // At the workers; epoch 0 before the first.
  const PlacementTable& active() const { return active_; }
  bool active_complete() const { return active_complete_; }
  bool preparing() const { return target_.has_value(); }
  Epoch preparing_epoch() const { return target_ ? target_->table.epoch() : Epoch(); }
  Epoch newest() const { return Epoch(next_epoch_ - 1); }  // of any that was made
  size_t shards() const { return live_.size(); }
  // Pairs that the shards which stay can hold together, at most UINT64_MAX.
  uint64_t slots() const;

  const ExpertLoadMeter& load() const { return load_; }
  // By shard, of the active placement. `holding` is left at 0.
  std::map<Incarnation, ShardFigures> figures(TimePoint now) const;
  // The load of the busiest shard over the mean of those that the active placement names; the worst layer's
  // if `by_layer`. 0: nothing is measured.
  double busiest(bool by_layer) const;
  uint64_t homes_added() const { return homes_added_; }
  uint64_t homes_removed() const { return homes_removed_; }
  uint64_t changes() const { return changes_; }

 private:
  struct Shard {
    ShardEndpoint endpoint;
    uint64_t slots = UINT64_MAX;
    bool leaving = false;
  };
  struct Target {
    PlacementTable table;
    bool first_aid = false;  // one home for what has none; replicas come after it
    TimePoint since = 0;
  };
  // A balance, over the shards of live_ in their order.
  struct Proposal {
    Balance balance;
    std::vector<Incarnation> order;
    bool differs = false;  // from the active placement
  };

  bool idle() const { return !target_ && !unreleased_; }
  // Without a home for every expert nothing runs: then a change need not wait for the one before.
  bool may_begin() const { return idle() || !active_complete_; }
  void want(std::string why, TimePoint when);
  Proposal propose(bool first_aid, double improve_ratio) const;
  std::vector<std::vector<uint16_t>> current_homes(const std::vector<Incarnation>& order) const;
  bool differs(const Proposal& proposal) const;
  PlacementTable table_of(const Proposal& proposal);
  // Balances, and prepares the result if it changes anything.
  void change(const std::string& why, TimePoint now);
  Epoch prepare(Proposal proposal, bool first_aid, const std::string& why, TimePoint now);
  void activate(PlacementTable table, bool urgent, std::string note);
  void release();

  const SchedulerOptions& options_;
  uint32_t layers_ = 0;
  uint32_t experts_ = 0;
  uint64_t next_epoch_ = 1;
  std::map<Incarnation, Shard> live_;
  ExpertLoadMeter load_;
  PlacementTable active_;
  bool active_complete_ = false;
  bool unreleased_ = false;  // a worker may use an older placement than the active one
  std::optional<Target> target_;
  std::set<Incarnation> waiting_for_;  // shards of target_ that have not answered
  std::string wanted_;                 // why the next change is due
  TimePoint wanted_at_ = kNever;       // when: joins settle until then
  TimePoint rebalance_at_ = kNever;
  uint64_t homes_added_ = 0;
  uint64_t homes_removed_ = 0;
  uint64_t changes_ = 0;
  std::vector<PlacementOut> out_;
};

}  // namespace conclave::scheduler
