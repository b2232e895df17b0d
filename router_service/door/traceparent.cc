#include "router_service/door/traceparent.h"

#include <cstdio>

#include "libs/base/random.h"

namespace conclave::door {
namespace {

constexpr size_t kLength = 55;  // of version 00: 2 + 1 + 32 + 1 + 16 + 1 + 2
constexpr uint64_t kSampledFlag = 1;

// Lower-case digits only.
bool read_hex(std::string_view text, uint64_t& value) {
  value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return false;
    value = value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return true;
}

uint64_t draw() {
  for (;;) {
    if (const uint64_t value = system_random_u64(); value != 0) return value;
  }
}

}  // namespace

std::optional<Traceparent> parse_traceparent(std::string_view text) {
  if (text.size() < kLength || text[2] != '-' || text[35] != '-' || text[52] != '-') return std::nullopt;
  uint64_t version = 0, flags = 0;
  Traceparent out;
  if (!read_hex(text.substr(0, 2), version) || !read_hex(text.substr(3, 16), out.trace_hi) ||
      !read_hex(text.substr(19, 16), out.trace_lo) || !read_hex(text.substr(36, 16), out.parent) ||
      !read_hex(text.substr(53, 2), flags)) {
    return std::nullopt;
  }
  if (version == 0xff || (out.trace_hi | out.trace_lo) == 0 || out.parent == 0) return std::nullopt;
  if (text.size() > kLength && (version == 0 || text[kLength] != '-')) return std::nullopt;
  out.sampled = (flags & kSampledFlag) != 0;
  return out;
}

std::string trace_id_text(const TraceContext& trace) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%016llx%016llx", static_cast<unsigned long long>(trace.trace_hi),
                static_cast<unsigned long long>(trace.trace_lo));
  return buffer;
}

std::string write_traceparent(const TraceContext& trace) {
  char span[20];
  std::snprintf(span, sizeof span, "%016llx", static_cast<unsigned long long>(trace.span));
  return "00-" + trace_id_text(trace) + "-" + span + (trace.followed ? "-01" : "-00");
}

TraceContext begin_trace(std::string_view traceparent, double share) {
  TraceContext trace;
  trace.span = draw();
  const auto parent = parse_traceparent(traceparent);
  trace.trace_hi = parent ? parent->trace_hi : draw();
  trace.trace_lo = parent ? parent->trace_lo : draw();
  // 53 bits, which a double holds.
  trace.followed =
      (parent && parent->sampled) || static_cast<double>(system_random_u64() >> 11) * 0x1p-53 < share;
  return trace;
}

}  // namespace conclave::door
