// Replays a trace in virtual time: the real SchedulerCore, workers that take as long for a step as a cost
// model says, clients that send the next turn when the one before has ended. Deterministic; one thread.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bench/scheduler/trace.h"
#include "scheduler/core/options.h"
#include "scheduler/core/status_snapshot.h"

namespace conclave::bench {

// Microseconds a step takes: of each step, each decode row, each prefill row, and each thousand cached
// positions that its rows read.
struct StepCost {
  double step = 0;
  double decode_row = 0;
  double prefill_row = 0;
  double context_1k = 0;
};

struct ReplayOptions {
  scheduler::SchedulerOptions scheduler;
  StepCost cost;
  uint32_t workers = 4;
  uint32_t kv_blocks = 1536;  // of each worker
  uint32_t vocab_size = 200'000;
  Nanos link = 200 * kMicrosecond;  // one way between the scheduler and a worker
  std::string only_tenant;          // empty: all
};

struct RequestRecord {
  bool sent = false;      // its turn came
  bool finished = false;  // with all its tokens
  bool refused = false;   // for good
  TimePoint arrived = 0;
  TimePoint first_token = 0;
  TimePoint ended = 0;
  std::vector<Nanos> gaps;  // between its tokens
};

struct ReplayResult {
  std::vector<RequestRecord> requests;  // as in the trace
  scheduler::SchedulerMetrics metrics;
  TimePoint start = 0;
  TimePoint end = 0;  // of the last request
  Nanos busy = 0;     // of all workers together
  Nanos longest_step = 0;
};

// CHECKs that every request sent ends exactly once, and the core's audit at the end.
ReplayResult replay(const std::vector<TraceRequest>& trace, const ReplayOptions& options);

}  // namespace conclave::bench
