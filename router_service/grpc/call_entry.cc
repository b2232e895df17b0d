#include "router_service/grpc/call_entry.h"

#include <string>
#include <utility>

#include "router_service/door/traceparent.h"

namespace conclave::router {
namespace {

constexpr uint64_t kBytesPerToken = 4;  // of a message, about

std::string_view metadata(const grpc::CallbackServerContext& context, const char* name) {
  const auto at = context.client_metadata().find(name);
  if (at == context.client_metadata().end()) return {};
  return {at->second.data(), at->second.size()};
}

// Several of them say nothing.
std::string_view traceparent_of(const grpc::CallbackServerContext& context) {
  if (context.client_metadata().count(door::kTraceparentHeader) != 1) return {};
  return metadata(context, door::kTraceparentHeader);
}

}  // namespace

CallEntry enter_call(door::FrontDoor& door, grpc::CallbackServerContext* context, std::string_view method,
                     uint64_t bytes) {
  const std::string_view wanted = metadata(*context, "x-request-id");
  std::string id = door::usable_request_id(wanted) ? std::string(wanted) : door::make_request_id();
  context->AddInitialMetadata("x-request-id", id);
  auto tenant = door.identify(metadata(*context, "authorization"));
  CallEntry entry;
  entry.visit =
      door.enter("grpc", method, std::move(id), tenant.ok() ? *tenant : nullptr, traceparent_of(*context));
  context->AddInitialMetadata(door::kTraceparentHeader, door::write_traceparent(entry.visit->trace()));
  entry.status = tenant.ok() ? entry.visit->charge(bytes / kBytesPerToken) : tenant.status();
  if (tenant.ok())
    for (const auto& [name, value] : entry.visit->headers()) context->AddTrailingMetadata(name, value);
  return entry;
}

}  // namespace conclave::router
