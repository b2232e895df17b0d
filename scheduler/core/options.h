// Bounds and times of the scheduler. Each has its unit in its name; validate() says what may not be combined.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "libs/base/ids.h"
#include "libs/base/status.h"

namespace conclave::scheduler {

struct SchedulerOptions {
  Incarnation incarnation;  // of this scheduler; set by its process

  // Admission. Beyond max_waiting_* a new submission is refused with RESOURCE_EXHAUSTED; what was accepted
  // stays.
  uint32_t max_waiting_requests = 4096;     // a request with n choices counts n times
  uint64_t max_waiting_tokens = 8'000'000;  // prompt tokens of all waiting requests together
  // Prompt log-probabilities kept for all open requests together: prompt tokens times (1 + those asked for
  // beside each). A request that alone exceeds it is invalid.
  uint64_t max_prompt_logprob_values = 8'000'000;
  uint32_t max_inbox_submissions = 16'384;  // handed to the loop and not yet read by the core
  uint32_t max_running_requests = 512;      // sequences on all workers together; further ones wait
  // The last so many percent of the queue are for tenants that hold less than that of it, and as much again
  // per step of priority below the default is closed to such requests.
  uint32_t queue_reserve_percent = 12;

  // Order. See admission_queue.h; a priority is a band, a lower number goes first.
  uint32_t band_aging_ms = 5'000;  // waiting for one band up; 0: nobody rises
  bool fair_tenants = true;
  std::map<std::string, uint32_t> tenant_weights;  // shares in contention; 1 for those not named
  uint32_t max_idle_tenants = 1'024;               // whose service is remembered while they are away
  bool deadline_order = true;
  uint32_t default_due_ms = 60'000;  // a request is due at its deadline or so long after its arrival

  // Steps.
  uint32_t step_token_budget = 2'048;  // rows of one plan (also bounded by the worker's own max_batch_tokens)
  uint32_t prefill_chunk_tokens =
      2'048;                           // of one sequence in one plan; half of what is left while others wait
  uint32_t max_batch_sequences = 256;  // of one worker at a time
  uint32_t steps_in_flight = 2;        // plans a worker holds: step N+1 is planned while step N runs
  // Prefill beside decodes is cut so that a step takes no longer than this, or than twice its decodes alone;
  // 0: only the budget counts. At least min_prefill_tokens go with every step.
  uint32_t itl_target_ms = 50;
  uint32_t min_prefill_tokens = 16;
  // The same for a step of prefill alone, for those who come while it runs.
  uint32_t prefill_target_ms = 2'000;
  // Nobody starts on a worker that owes so many rows of prefill: who waits there waits in order of admission,
  // beyond the reach of bands, fair shares and deadlines. Of one sequence an eighth of a step at
  // most counts, so that one long prompt does not keep others out. 0: no bound.
  uint32_t max_owed_prefill_tokens = 2'048;

  // A sequence starts once there is room for its known tokens and so many more, twice as many after each time
  // it was preempted. Without preemption it starts once there is room for all it may generate.
  bool preemption = true;
  uint32_t admission_reserve_tokens = 64;

  // Pages of prompts and answers are kept while nobody needs their room, for requests that begin alike.
  bool prefix_cache = true;
  // Where a request goes: each sequence that runs on a worker counts as so many tokens yet to compute.
  uint32_t running_cost_tokens = 64;

  // Membership. A member not heard for lease_ms is suspect (no new work), for dead_after_ms dead; a shard
  // about which a worker complains is dead after the shorter time. A shard that keeps its lease but fails
  // workers max_peer_troubles times within peer_trouble_window_ms is dead too: its data plane is.
  uint32_t lease_ms = 500;
  uint32_t dead_after_ms = 5'000;
  uint32_t dead_after_trouble_ms = 2'000;
  uint32_t max_peer_troubles = 12;
  uint32_t peer_trouble_window_ms = 10'000;
  // A worker that owes a step for so long, while every expert had a home, is dead however well its lease is
  // kept.
  uint32_t step_timeout_ms = 600'000;
  uint32_t max_kv_blocks_per_worker = 16'777'216;  // believed of a hello; bounds what is kept for a worker
  uint32_t max_members = 1'024;
  uint32_t max_gateways = 256;
  uint32_t max_fenced_incarnations = 4'096;  // beyond it the oldest are covered by their start time

  // Placement (docs/placement.md). Every expert has min_replicas homes where shards have room for them, a hot
  // one up to max_replicas. Every rebalance_interval_s (0: never) a layer whose busiest shard is beyond
  // rebalance_ratio times the mean is evened out, if that takes as much off it.
  uint32_t min_replicas = 2;
  uint32_t max_replicas = 8;
  uint32_t rebalance_interval_s = 30;
  double rebalance_ratio = 1.10;
  uint32_t load_half_life_s = 60;  // after which a report of load counts half
  // Shards that join within placement_settle_ms are placed together; one that is not ready in time is dead.
  uint32_t placement_settle_ms = 100;
  uint32_t placement_ready_timeout_ms = 600'000;

  // A gateway's requests outlive its connection this long, waiting to be attached again.
  uint32_t gateway_grace_ms = 30'000;

  // Resumable requests: those whose gateway sent a router_context. A context past either bound is not kept,
  // and its request not resumable. Ended ones are kept for gateway_grace_ms, the latest ones of them within
  // the last two bounds (their tokens and log-probabilities count).
  uint32_t max_router_context_bytes = 65'536;             // of one request; 0: none are kept
  uint64_t max_router_context_total_bytes = 64ull << 20;  // of all requests
  uint32_t max_resumable_requests = 4'096;                // ended
  uint64_t max_resumable_bytes = 256ull << 20;            // of these

  // A request that makes no progress for so long is reported, with what it waits for; 0: none is.
  uint32_t stall_report_ms = 30'000;

  // Requests whose timeline is kept (timelines.h): open ones and the last that ended; and steps of each, the
  // first half and the last half.
  uint32_t max_timelines = 256;  // 0: none
  uint32_t max_timeline_steps = 256;

  Status validate() const;
};

}  // namespace conclave::scheduler
