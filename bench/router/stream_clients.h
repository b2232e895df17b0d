// Many SSE clients in one thread: each opens a stream and notes when each of its tokens came.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libs/base/clock.h"

namespace conclave::bench {

// When each token left the scheduler; in memory that both processes map. 0: not yet.
struct SentTimes {
  int64_t* times = nullptr;
  uint32_t streams = 0;
  uint32_t tokens = 0;  // of each stream
  int64_t& at(uint32_t stream, uint32_t token) const {
    return times[static_cast<uint64_t>(stream) * tokens + token];
  }
};

struct ClientReport {
  uint64_t tokens = 0;  // that came after `skip`
  uint64_t broken = 0;  // streams that did not get all of their tokens
  uint64_t reads = 0;   // system calls that returned bytes
  uint64_t bytes = 0;   // received
  double p50_ms = 0, p90_ms = 0, p99_ms = 0, p999_ms = 0, max_ms = 0;
  double cpu_seconds = 0;  // of the clients
};

// Opens `sent.streams` connections to 127.0.0.1:port, sends one request each and reads until all have ended
// or `limit` has passed. The answer of stream i has one 'x' of content for each token. Latencies of the first
// `skip` tokens of each stream are not counted, as streams begin one after the other then.
ClientReport run_clients(uint16_t port, const std::string& path, const SentTimes& sent, uint32_t skip,
                         Nanos limit);

}  // namespace conclave::bench
