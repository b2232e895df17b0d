// A fleet for benches: sessions, hellos and one shard that holds every expert, spoken to a SchedulerCore
// directly. One thread.
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/core/core.h"

namespace conclave::bench {

struct FleetShape {
  uint32_t workers = 1;
  uint32_t kv_blocks = 1024;  // of each worker
  uint32_t max_batch_tokens = 0;
  uint32_t max_positions = 1u << 20;
  uint32_t vocab_size = 200'000;
};

struct Fleet {
  std::vector<scheduler::SessionId> workers;
  scheduler::SessionId shard;
  scheduler::SessionId gateway;
};

// Members, a gateway and a placement; advances `now`. CHECKs that the core calls the fleet ready.
Fleet join_fleet(scheduler::SchedulerCore& core, const scheduler::SchedulerOptions& options,
                 const FleetShape& shape, TimePoint& now);

}  // namespace conclave::bench
