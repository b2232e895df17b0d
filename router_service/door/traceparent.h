// The header "traceparent" of W3C Trace Context (https://www.w3.org/TR/trace-context/): what a client's
// tracer says of the request, and what we say back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "libs/model/request.h"

namespace conclave::door {

inline constexpr char kTraceparentHeader[] = "traceparent";

struct Traceparent {
  uint64_t trace_hi = 0, trace_lo = 0;
  uint64_t parent = 0;
  bool sampled = false;
};

// Nothing where it breaks the standard, which then wants it ignored: wrong lengths, upper case, version ff,
// zeros for an id. Of later versions the part that version 00 knows is read.
std::optional<Traceparent> parse_traceparent(std::string_view text);

// Version 00 with our own span as the parent; sampled: the request is followed.
std::string write_traceparent(const TraceContext& trace);
// The trace id: 32 hexadecimal digits.
std::string trace_id_text(const TraceContext& trace);

// Continues the client's trace, or begins one where there is none. The request is followed when the client's
// tracer samples it, and else for `share` of the requests.
TraceContext begin_trace(std::string_view traceparent, double share);

}  // namespace conclave::door
