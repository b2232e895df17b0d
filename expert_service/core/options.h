// What a shard is told at start, and what it counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/model/numerics.h"

namespace conclave {

struct ShardOptions {
  std::string name = "expert-0";
  std::string numerics_id;
  std::string model_fingerprint;
  Precision precision = Precision::kBf16;
  bool fp8_wire = false;        // hidden rows come as FP8 (part of numerics_id)
  uint64_t capacity_bytes = 0;  // weights it may hold; 0: no limit
  uint32_t threads = 1;         // told to the scheduler; the pool itself comes with the kernel context

  // (row, expert) pairs that may wait. At the bound the shard stops taking events from its transport until a
  // group is computed; the transport's own credits then hold the workers back.
  uint32_t max_queued_items = 131072;
  // Pairs of one group. A single message larger than this still runs as one group. Small enough that a group
  // of the real geometry takes well under a second: peers get no sign of life while it runs.
  uint32_t max_group_items = 8192;
  // Replies that wait for a peer's credits. At the bound the oldest is dropped; its worker's deadline sends
  // the rows again.
  uint32_t max_waiting_replies = 1024;
  // How long a reply to a dispatch without a deadline may wait for credits.
  Nanos reply_deadline = 30 * kSecond;
  // Bytes of weights touched by one task while a placement is being prepared, so that dispatches go on; and
  // how many a second (0: no limit), but where an expert has no other home, and before the first placement.
  uint64_t warm_slice_bytes = 32ull << 20;
  uint64_t warm_bytes_per_s = 1ull << 30;
  // Whether weights are mapped files: the pages of released experts then go back to the system.
  bool weights_are_mapped = false;
  // What was computed is told to the scheduler so often, where there was anything.
  Nanos load_report = 1 * kSecond;
};

// Counters since start, except the two marked as gauges. Read on the shard's executor.
struct ShardMetrics {
  uint64_t dispatches = 0;
  uint64_t replies = 0;
  uint64_t groups = 0;                // computations; items / groups is the mean batch
  uint64_t items = 0;                 // (row, expert) pairs computed
  uint64_t expert_runs = 0;           // experts computed, each once a group: their weights are read as often
  uint64_t missing_items = 0;         // pairs answered as missing
  uint64_t expired_dispatches = 0;    // skipped: past their deadline
  uint64_t cancelled_dispatches = 0;  // skipped: cancelled, or their worker is gone
  uint64_t rejected_dispatches = 0;   // failed the checks of the shard or its transport
  uint64_t dropped_replies = 0;       // no credit in time, bound reached, or the peer is gone
  uint64_t reads_paused = 0;          // times max_queued_items was reached
  uint64_t weight_bytes_warmed = 0;
  uint64_t released_experts = 0;
  uint64_t load_reports = 0;
  uint64_t held_experts = 0;  // gauge, over all layers
  uint64_t held_bytes = 0;    // gauge: weights of these
  uint64_t cold_experts = 0;  // gauge: of these, not yet read
  uint64_t queued_items = 0;  // gauge
  Nanos compute_ns = 0;
  uint32_t experts = 0;          // of a layer
  std::vector<uint64_t> tokens;  // [layer * experts + expert] rows computed
};

}  // namespace conclave
