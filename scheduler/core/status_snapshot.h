// What people and metrics see of the scheduler: plain values, copied out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/time_histogram.h"
#include "libs/model/membership.h"
#include "scheduler/core/event_log.h"
#include "scheduler/core/stall_hop.h"

namespace conclave::scheduler {

// A shard as placement sees it. Loads are (token, expert) pairs a second, weighted (load_half_life_s).
struct ShardFigures {
  uint32_t homes = 0;        // (layer, expert) pairs of which the active placement names it
  uint32_t sole_homes = 0;   // of these, with no other home
  uint32_t holding = 0;      // pairs it holds, as it said last
  uint64_t slots = 0;        // pairs its memory holds; UINT64_MAX: no limit
  double load = 0;           // as it reported it
  double assigned_load = 0;  // of its experts, shared evenly by their homes
};

struct MemberSnapshot {
  Role role = Role::kAttention;
  std::string name;
  Incarnation incarnation;
  std::string state;  // joining | ready | suspect | draining | drained
  uint32_t kv_blocks_total = 0;
  uint32_t kv_blocks_used = 0;
  uint32_t kv_blocks_cached = 0;
  uint32_t sequences = 0;
  ShardFigures shard;  // expert shards
  std::string ops_address;
  std::string version;
  std::string numerics_id;
  uint32_t threads = 0;
  TimePoint joined = 0;
};

// What is known of experts: of one layer, or of all from 0 on.
struct ExpertsSnapshot {
  Epoch epoch;
  uint32_t layers = 0;
  uint32_t experts = 0;
  uint32_t first_layer = 0;
  std::vector<ShardEndpoint> shards;
  std::vector<double> load;                  // in order of (layer, expert); pairs a second, weighted
  std::vector<std::vector<uint16_t>> homes;  // the same; indices into shards
};

// What a change for balance alone does, or would do.
struct RebalanceSummary {
  uint64_t added = 0;    // homes that are mapped
  uint64_t removed = 0;  // and let go
  // Of the worst layer: load of the busiest shard over the mean.
  double busiest_before = 0;
  double busiest_after = 0;
  Epoch epoch;  // of the change that began; 0: none did
};

// Of one shard, for metrics.
struct ShardGauge {
  Incarnation shard;
  std::string name;
  uint32_t homes = 0;
  double load = 0;
  double assigned_load = 0;
};

// Of one layer, for metrics; nothing is measured where the load is 0.
struct LayerGauge {
  double load = 0;            // rows a second, all experts
  double busiest_expert = 0;  // over the mean expert
  double busy_share = 0;      // of the kBusyExperts experts that are asked for most
  double busiest_shard =
      0;  // over the mean shard of the placement, an expert's load shared evenly by its homes
};
struct ExpertGauge {
  uint32_t layer = 0;
  uint32_t expert = 0;
  double load = 0;  // rows a second
};
inline constexpr size_t kBusyExperts = 8;     // of a layer, taken together
inline constexpr size_t kListedExperts = 16;  // of all layers, one by one
struct LoadGauges {
  std::vector<LayerGauge> layers;
  std::vector<ExpertGauge> experts;  // the kListedExperts that are asked for most, in that order
};
struct MemberGauge {
  Role role = Role::kAttention;
  Incarnation member;
  std::string name;
};

// Counters only grow; gauges are of the moment.
struct SchedulerMetrics {
  // counters
  uint64_t requests_accepted = 0;
  uint64_t requests_refused_full = 0;     // a bound of the queue
  uint64_t requests_refused_invalid = 0;  // could never run here
  uint64_t requests_refused_unready = 0;  // no model is known yet
  uint64_t requests_reattached = 0;
  uint64_t requests_adopted = 0;   // by another gateway, or again by its own
  uint64_t requests_released = 0;  // by a gateway whose client went away, or whose text has ended
  uint64_t adoptions_refused = 0;
  uint64_t contexts_refused = 0;   // resumable no more for want of room for their context
  uint64_t resumable_dropped = 0;  // ended requests forgotten before their time, for newer ones
  PerStallHop<uint64_t> stalls_reported{};
  uint64_t requests_finished_stop = 0;
  uint64_t requests_finished_length = 0;
  uint64_t requests_cancelled = 0;
  uint64_t requests_abandoned = 0;  // their gateway did not come back
  uint64_t requests_deadline = 0;
  uint64_t requests_failed = 0;
  uint64_t sequences_replayed = 0;   // of a lost worker, computed again elsewhere
  uint64_t sequences_preempted = 0;  // for want of pages, and started again
  uint64_t sequences_moved = 0;      // off a draining worker
  uint64_t members_drained = 0;
  uint64_t steps_planned = 0;
  uint64_t steps_retired = 0;
  uint64_t prompt_tokens_admitted = 0;  // known tokens of sequences when they started
  uint64_t prompt_tokens_cached = 0;    // of which needed no computing
  uint64_t prefill_tokens = 0;
  uint64_t decode_slices = 0;
  uint64_t tokens_sampled = 0;
  uint64_t tokens_discarded = 0;  // sampled for a sequence that had ended here
  uint64_t members_joined = 0;
  uint64_t members_refused = 0;
  uint64_t members_lost = 0;
  uint64_t members_suspected = 0;
  uint64_t peer_troubles = 0;
  uint64_t placements_published = 0;
  uint64_t placement_changes = 0;  // begun
  uint64_t homes_added = 0;        // by these, as they were planned
  uint64_t homes_removed = 0;
  uint64_t protocol_violations = 0;
  uint64_t stalls_forgiven = 0;  // times this scheduler itself was late, so leases were extended
  uint64_t timelines_opened = 0;
  uint64_t timelines_refused = 0;  // for want of a place
  uint64_t step_compute_ns = 0;
  uint64_t step_expert_wait_ns = 0;
  uint64_t step_plan_wait_ns = 0;    // workers with sequences and without a plan, between steps
  RequestTimeHistogram queue_times;  // from a request's acceptance to the first start of one of its choices
  // gauges
  uint32_t requests_waiting = 0;
  uint64_t tokens_waiting = 0;
  uint32_t requests_running = 0;
  uint32_t requests_detached = 0;   // those that are kept after their end not counted
  uint32_t requests_resumable = 0;  // kept after their end
  uint64_t resumable_bytes = 0;     // of these
  uint64_t router_context_bytes = 0;
  PerStallHop<uint32_t> requests_stalled{};  // at the last look
  uint32_t timelines = 0;                    // kept
  uint32_t workers = 0;
  uint32_t shards = 0;
  uint32_t gateways = 0;
  uint64_t placement_epoch = 0;
  bool placement_preparing = false;
  uint32_t experts_short = 0;  // (layer, expert) pairs with fewer homes than min_replicas
  double busiest = 0;          // load of the busiest shard over the mean
  double busiest_layer = 0;    // the same of the worst layer
  std::shared_ptr<const std::vector<ShardGauge>> shard_gauges;    // null: none
  std::shared_ptr<const LoadGauges> load_gauges;                  // null: nothing is measured
  std::shared_ptr<const std::vector<MemberGauge>> member_gauges;  // null: none
  uint64_t kv_evictions = 0;  // cached pages given up by the workers of now
  uint64_t kv_blocks_total = 0;
  uint64_t kv_blocks_used = 0;
  uint64_t kv_blocks_cached = 0;    // kept for requests that begin alike; given up when room is needed
  uint64_t kv_blocks_reserved = 0;  // promised to running sequences, not yet given
};

struct StatusSnapshot {
  Incarnation scheduler;
  FleetInfo fleet;
  Epoch epoch;  // the placement at the workers
  uint32_t requests_waiting = 0;
  uint32_t requests_running = 0;
  std::vector<MemberSnapshot> members;
  uint32_t layers = 0;
  uint32_t experts = 0;   // of each layer
  Epoch preparing_epoch;  // of the placement that shards prepare; 0: none
  double busiest = 0;     // load of the busiest shard over the mean; 0: nothing is measured
  uint32_t requests_stalled = 0;
  std::vector<ClusterEvent> events;  // the oldest first
  TimePoint now = 0;                 // of the clock that the times above are of
  SchedulerMetrics totals;           // filled in by the loop
};

}  // namespace conclave::scheduler
