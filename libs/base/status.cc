#include "libs/base/status.h"

#include "absl/strings/cord.h"

namespace conclave {
namespace {

constexpr char kFieldPayload[] = "conclave.field";
constexpr char kRetryPayload[] = "conclave.retry_after_ns";

absl::string_view to_absl(std::string_view s) { return absl::string_view(s.data(), s.size()); }

}  // namespace

Status make_status(StatusCode code, std::string_view message) { return Status(code, to_absl(message)); }

Status invalid_field(std::string_view field, std::string_view message) {
  return with_field(invalid_argument(message), field);
}

Status with_field(Status status, std::string_view field) {
  if (!status.ok()) status.SetPayload(kFieldPayload, absl::Cord(to_absl(field)));
  return status;
}

std::string field_of(const Status& status) {
  auto payload = status.GetPayload(kFieldPayload);
  return payload.has_value() ? std::string(*payload) : std::string();
}

Status with_retry_after(Status status, int64_t nanos) {
  if (!status.ok() && nanos > 0) status.SetPayload(kRetryPayload, absl::Cord(std::to_string(nanos)));
  return status;
}

int64_t retry_after_of(const Status& status) {
  auto payload = status.GetPayload(kRetryPayload);
  return payload.has_value() ? std::stoll(std::string(*payload)) : 0;
}

std::string message_of(const Status& status) {
  return std::string(status.message().data(), status.message().size());
}

Status annotate(const Status& status, std::string_view context) {
  if (status.ok()) return status;
  Status out = make_status(status.code(), std::string(context) + ": " + message_of(status));
  out = with_retry_after(std::move(out), retry_after_of(status));
  std::string field = field_of(status);
  return field.empty() ? out : with_field(std::move(out), field);
}

}  // namespace conclave
