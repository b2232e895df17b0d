// Status and StatusOr for every fallible path. The code says who must act:
//   INVALID_ARGUMENT    the caller's input is wrong; field_of() names the offending field, tensor or key
//   NOT_FOUND           a name the caller gave does not exist
//   RESOURCE_EXHAUSTED  a named bound was reached; retry later
//   UNAVAILABLE         a peer is not there (yet); retry with back-off
//   DEADLINE_EXCEEDED, CANCELLED, FAILED_PRECONDITION, DATA_LOSS as in gRPC; INTERNAL is our own bug.
// Debian's Abseil has a string_view of its own, so our headers speak std types and convert here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace conclave {

using absl::OkStatus;
using absl::Status;
using absl::StatusCode;
using absl::StatusOr;

Status make_status(StatusCode code, std::string_view message);
// INVALID_ARGUMENT that names the field, tensor, flag or key at fault.
Status invalid_field(std::string_view field, std::string_view message);
// Adds (or replaces) the field name on any non-OK status.
Status with_field(Status status, std::string_view field);
// The field a status names; empty when it names none.
std::string field_of(const Status& status);
// Adds to a RESOURCE_EXHAUSTED status when trying again is worth while, in nanoseconds from now.
Status with_retry_after(Status status, int64_t nanos);
// What with_retry_after() told; 0: nothing.
int64_t retry_after_of(const Status& status);
// The message alone, as a std::string.
std::string message_of(const Status& status);
// Same code, field and retry time, the message prefixed with "context: ".
Status annotate(const Status& status, std::string_view context);

inline Status invalid_argument(std::string_view m) { return make_status(StatusCode::kInvalidArgument, m); }
inline Status not_found(std::string_view m) { return make_status(StatusCode::kNotFound, m); }
inline Status unavailable(std::string_view m) { return make_status(StatusCode::kUnavailable, m); }
inline Status resource_exhausted(std::string_view m) {
  return make_status(StatusCode::kResourceExhausted, m);
}
inline Status failed_precondition(std::string_view m) {
  return make_status(StatusCode::kFailedPrecondition, m);
}
inline Status data_loss(std::string_view m) { return make_status(StatusCode::kDataLoss, m); }
inline Status internal_error(std::string_view m) { return make_status(StatusCode::kInternal, m); }
inline Status cancelled(std::string_view m) { return make_status(StatusCode::kCancelled, m); }
inline Status deadline_exceeded(std::string_view m) { return make_status(StatusCode::kDeadlineExceeded, m); }

}  // namespace conclave

#define CONCLAVE_CONCAT_INNER(a, b) a##b
#define CONCLAVE_CONCAT(a, b) CONCLAVE_CONCAT_INNER(a, b)

// Returns from the enclosing function when `expression` (a Status) is not OK.
#define RETURN_IF_ERROR(expression)                                                            \
  do {                                                                                         \
    if (auto conclave_status_ = (expression); !conclave_status_.ok()) return conclave_status_; \
  } while (false)

// ASSIGN_OR_RETURN(auto x, f()): x takes the value of a StatusOr, or its status is returned.
#define ASSIGN_OR_RETURN(lhs, expression) \
  ASSIGN_OR_RETURN_IMPL(CONCLAVE_CONCAT(status_or_, __LINE__), lhs, expression)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expression) \
  auto tmp = (expression);                          \
  if (!tmp.ok()) return tmp.status();               \
  lhs = std::move(tmp).value()
