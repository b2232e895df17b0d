// A trace made by tools/traces/make_trace.py, whose header says what its fields mean.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"

namespace conclave::bench {

struct TraceSegment {
  uint64_t seed = 0;
  uint32_t length = 0;
};

struct TraceRequest {
  std::string tenant;
  std::string kind;
  int32_t priority = 0;
  Nanos at = 0;     // after < 0
  int after = -1;   // an earlier request of the trace
  Nanos delay = 0;  // after its end
  Nanos deadline = 0;
  uint32_t output = 0;
  uint64_t answer = 0;
  std::vector<TraceSegment> prompt;
};

// The errors name the line.
StatusOr<std::vector<TraceRequest>> read_trace(std::istream& in);

TokenId segment_token(uint64_t seed, uint32_t index, uint32_t vocab_size);
std::vector<TokenId> prompt_tokens(const TraceRequest& request, uint32_t vocab_size);

}  // namespace conclave::bench
