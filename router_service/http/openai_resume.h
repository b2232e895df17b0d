// What a router needs to go on writing a stream that another one began: kept with the request by the
// scheduler, which does not look inside.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "libs/base/status.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

// What the events of one answer say beside its tokens.
struct StreamHead {
  std::string model;
  std::string fingerprint;
  int64_t created = 0;  // seconds since 1970
};

// `body` is that of a request which was parsed without error; its messages or prompt are left out.
std::string write_stream_context(bool chat, std::string_view body, const StreamHead& head);

struct StreamContext {
  OpenAiRequest request;  // with a prompt that means nothing
  StreamHead head;
};
// FAILED_PRECONDITION for what this build cannot read, such as a stream of another protocol.
StatusOr<StreamContext> read_stream_context(std::string_view context, const gateway::AdmissionLimits& limits);

// The value of "last-event-id": events that the client has; 0 where there is none. INVALID_ARGUMENT names it.
StatusOr<uint64_t> parse_last_event_id(std::string_view text);

inline constexpr char kResumableHeader[] = "x-conclave-resumable";
inline constexpr char kLastEventIdHeader[] = "last-event-id";
inline constexpr char kStreamIdHeader[] = "x-conclave-stream-id";
inline constexpr char kNotResumableHeader[] = "x-conclave-not-resumable";
// The header's value: "1" or "true", "0" or "false", or none. INVALID_ARGUMENT names it.
StatusOr<bool> parse_resumable_header(std::string_view text);

}  // namespace conclave::router
