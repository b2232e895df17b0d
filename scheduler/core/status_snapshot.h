// What people and metrics see of the scheduler: plain values, copied out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libs/base/ids.h"
#include "libs/model/membership.h"
#include "scheduler/core/stall_hop.h"

namespace conclave::scheduler {

struct MemberSnapshot {
  Role role = Role::kAttention;
  std::string name;
  Incarnation incarnation;
  std::string state;  // joining | ready | suspect | draining | drained
  uint32_t kv_blocks_total = 0;
  uint32_t kv_blocks_used = 0;
  uint32_t kv_blocks_cached = 0;
  uint32_t sequences = 0;
  uint32_t experts_held = 0;  // (layer, expert) pairs the active placement gives it
};

struct StatusSnapshot {
  Incarnation scheduler;
  FleetInfo fleet;
  Epoch epoch;  // the placement at the workers
  uint32_t requests_waiting = 0;
  uint32_t requests_running = 0;
  std::vector<MemberSnapshot> members;
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
  uint64_t protocol_violations = 0;
  uint64_t stalls_forgiven = 0;  // times this scheduler itself was late, so leases were extended
  uint64_t step_compute_ns = 0;
  uint64_t step_expert_wait_ns = 0;
  uint64_t step_plan_wait_ns = 0;  // workers with sequences and without a plan, between steps
  // gauges
  uint32_t requests_waiting = 0;
  uint64_t tokens_waiting = 0;
  uint32_t requests_running = 0;
  uint32_t requests_detached = 0;   // those that are kept after their end not counted
  uint32_t requests_resumable = 0;  // kept after their end
  uint64_t resumable_bytes = 0;     // of these
  uint64_t router_context_bytes = 0;
  PerStallHop<uint32_t> requests_stalled{};  // at the last look
  uint32_t workers = 0;
  uint32_t shards = 0;
  uint32_t gateways = 0;
  uint64_t kv_evictions = 0;  // cached pages given up by the workers of now
  uint64_t kv_blocks_total = 0;
  uint64_t kv_blocks_used = 0;
  uint64_t kv_blocks_cached = 0;    // kept for requests that begin alike; given up when room is needed
  uint64_t kv_blocks_reserved = 0;  // promised to running sequences, not yet given
};

}  // namespace conclave::scheduler
