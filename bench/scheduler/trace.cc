#include "bench/scheduler/trace.h"

#include <sstream>

namespace conclave::bench {
namespace {

constexpr uint32_t kMaxSegmentTokens = 1u << 20;
constexpr int64_t kMaxMs = 100ll * 24 * 3600 * 1000;

bool read_request(const std::string& line, size_t number, TraceRequest& request) {
  std::istringstream in(line);
  int64_t at = 0, delay = 0, deadline = 0;
  std::string prompt;
  in >> request.tenant >> request.kind >> request.priority >> at >> request.after >> delay >> deadline >>
      request.output >> request.answer >> prompt;
  std::string more;
  if (in.fail() || (in >> more)) return false;
  const bool first = request.after < 0;
  if (first ? at < 0 || at > kMaxMs : static_cast<size_t>(request.after) >= number) return false;
  if (delay < 0 || delay > kMaxMs || deadline < 1 || deadline > kMaxMs || request.output < 1) return false;
  request.at = at * kMillisecond;
  request.delay = delay * kMillisecond;
  request.deadline = deadline * kMillisecond;
  std::istringstream segments(prompt);
  TraceSegment segment;
  for (char colon = 0; segments >> segment.seed >> colon >> segment.length; segments.ignore(1, ',')) {
    if (colon != ':' || segment.length < 1 || segment.length > kMaxSegmentTokens) return false;
    request.prompt.push_back(segment);
  }
  return !request.prompt.empty() && segments.eof();
}

}  // namespace

StatusOr<std::vector<TraceRequest>> read_trace(std::istream& in) {
  std::vector<TraceRequest> trace;
  size_t lines = 0;
  for (std::string line; std::getline(in, line);) {
    ++lines;
    if (line.empty() || line[0] == '#') continue;
    TraceRequest request;
    if (!read_request(line, trace.size(), request)) {
      return invalid_argument("line " + std::to_string(lines) + " of the trace is not a request");
    }
    trace.push_back(std::move(request));
  }
  if (trace.empty()) return invalid_argument("the trace has no requests");
  return trace;
}

TokenId segment_token(uint64_t seed, uint32_t index, uint32_t vocab_size) {
  return static_cast<TokenId>(internal::mix64(seed * 0x9e3779b97f4a7c15ull + index) % vocab_size);
}

std::vector<TokenId> prompt_tokens(const TraceRequest& request, uint32_t vocab_size) {
  std::vector<TokenId> tokens;
  for (const TraceSegment& segment : request.prompt) {
    for (uint32_t i = 0; i < segment.length; ++i) {
      tokens.push_back(segment_token(segment.seed, i, vocab_size));
    }
  }
  return tokens;
}

}  // namespace conclave::bench
