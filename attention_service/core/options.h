// What an attention worker is told at start, and what it counts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "attention_service/core/exchange_faults.h"
#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/time_histogram.h"
#include "libs/model/numerics.h"

namespace conclave {

// Bounds of the exchange with shards.
struct ExchangeOptions {
  // A dispatch is given up after max(floor, multiple * recent latency, multiple * items * recent time per
  // item), doubled with each retry of its rows, at most `deadline_cap`. Then its rows go to other homes.
  Nanos deadline_floor = 2 * kSecond;
  double deadline_multiple = 8;
  Nanos deadline_cap = 60 * kSecond;
  // Pause before rows are offered again to a shard that said it lacks their expert; doubles up to the cap.
  Nanos missing_retry = 2 * kMillisecond;
  Nanos missing_retry_cap = 500 * kMillisecond;
  // Pause before connecting again to a shard that the placement names and whose endpoint failed; doubles up
  // to the cap.
  Nanos reconnect = 20 * kMillisecond;
  Nanos reconnect_cap = 1 * kSecond;
  // A new placement waits so long at most for connections to its shards.
  Nanos switch_wait = 1 * kSecond;
  // Missed deadlines of one shard are reported to the scheduler at most once in this time.
  Nanos trouble_interval = 1 * kSecond;
  // A shard that missed a deadline is avoided for so long where an expert has another home; doubles up to the
  // cap until it answers in time.
  Nanos slow_peer = 1 * kSecond;
  Nanos slow_peer_cap = 30 * kSecond;
  // Bounds of one dispatch message; larger ones are sent in parts.
  uint32_t max_dispatch_rows = 4096;
  uint32_t max_dispatch_items = 32768;

  // For tests (exchange_faults.h).
  ExchangeFaults faults;
  std::function<void(const TakenRow&)> taken_observer;
};

struct WorkerOptions {
  std::string name = "attention-0";
  std::string numerics_id;
  std::string model_fingerprint;
  Precision precision = Precision::kBf16;
  bool fp8_wire = false;  // hidden rows travel as FP8 (part of numerics_id)
  uint32_t threads = 1;   // told to the scheduler; the pool itself comes with the kernel context
  uint32_t kv_blocks = 4096;
  uint32_t max_batch_tokens = 2048;  // rows one plan may have
  // Micro-batches of one step in flight: attention of one overlaps experts of another, and the wire both. A
  // step has at most so many, of at least `micro_batch_min_rows` rows each; with tuning, as many of these as
  // were the fastest for steps of its size (micro_batch_tuner.h).
  uint32_t micro_batches = 8;
  uint32_t micro_batch_min_rows = 8;
  bool micro_batch_tuning = true;
  // Plans that may wait behind the running one. A scheduler that sends more breaks the protocol: they are
  // dropped, and the worker gives up its incarnation.
  uint32_t max_queued_plans = 64;
  // Rows whose logits are computed at once.
  uint32_t max_logit_rows = 32;
  // Bytes of weights read by one task at the start, so that plans go on.
  uint64_t warm_slice_bytes = 32ull << 20;
  ExchangeOptions exchange;

  // For `conclave logits` and tests: called on the executor with every position's logits (vocab_size values,
  // borrowed for the call), in no fixed order between requests; a replayed request repeats positions. Empty:
  // logits only where a token is sampled.
  std::function<void(RequestId request, uint32_t position, std::span<const float> logits)> logits_observer;
};

// Counters since start, except those marked as gauges. Read on the worker's executor.
struct ExchangeMetrics {
  uint64_t dispatches = 0;
  uint64_t dispatched_items = 0;  // (token, expert) pairs sent, repeats included
  uint64_t combines = 0;
  uint64_t accepted_items = 0;
  uint64_t duplicate_items = 0;    // outputs for a slot that was filled already
  uint64_t late_combines = 0;      // of identities that are no longer known
  uint64_t rejected_combines = 0;  // malformed, or from another peer than the one asked
  uint64_t rejected_messages = 0;  // failed the transport's checks
  uint64_t retried_items = 0;      // sent again: deadline, endpoint error, missing expert
  uint64_t missing_items = 0;
  uint64_t deadlines = 0;      // dispatches past theirs
  uint64_t holds = 0;          // times rows found no home
  uint64_t split_experts = 0;  // experts whose rows went to several homes
  uint64_t credit_waits = 0;   // dispatches that waited for a peer's credits
  uint64_t peers_down = 0;
  uint64_t peers_up = 0;    // gauge
  uint64_t peers_slow = 0;  // times a peer was found slow
};

// Of one shard that the placement names, since this worker knows it.
struct ShardLink {
  Incarnation shard;
  std::string name;
  bool up = false;
  uint64_t outstanding_items = 0;  // gauge: (token, expert) pairs at it
  uint64_t replied_items = 0;
  Nanos compute_ns = 0;          // as its replies say: its time for the groups that they were computed in
  MessageTimeHistogram replies;  // from a dispatch to its reply, of those within their deadline
};

struct WorkerMetrics {
  uint64_t steps = 0;
  uint64_t rows = 0;  // positions computed, each once
  uint64_t sampled_tokens = 0;
  uint64_t masked_rows = 0;  // rows of sequences that ended while their step ran
  uint64_t failed_sequences = 0;
  uint64_t copied_pages = 0;  // by plans, each in every layer
  uint64_t plans_out_of_order = 0;
  uint64_t plans_dropped = 0;  // bound max_queued_plans
  uint64_t resets = 0;         // scheduler connections that made it drop its sequences
  uint64_t sequences = 0;      // gauge
  uint64_t queued_plans = 0;   // gauge
  uint64_t weight_bytes_warmed = 0;
  Nanos compute_ns = 0;
  // Of which: projections, attention and gate of all layers; making and sending dispatches; adding the
  // experts' outputs; final norm, lm_head and sampling. The rest is the embedding and copies of pages.
  Nanos attention_ns = 0;
  Nanos dispatch_ns = 0;
  Nanos combine_ns = 0;
  Nanos head_ns = 0;
  Nanos expert_wait_ns = 0;
  // Computing while another micro-batch was at the experts: until its last reply was read.
  Nanos hidden_ns = 0;
  Nanos plan_wait_ns = 0;  // between steps, without a plan though there were sequences
  RequestTimeHistogram step_times;
  ExchangeMetrics exchange;
  std::vector<ShardLink> links;
};

}  // namespace conclave
