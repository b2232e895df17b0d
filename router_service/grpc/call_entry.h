// What every gRPC method begins with: the caller's key, the rate limit, the request id, the record of the
// call.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "libs/base/status.h"
#include "router_service/door/front_door.h"

namespace conclave::router {

struct CallEntry {
  std::shared_ptr<door::Visit> visit;  // always there
  Status status;                       // UNAUTHENTICATED, or RESOURCE_EXHAUSTED by the rate limit
};

// Takes the id from the metadata "x-request-id" (or makes one) and "traceparent", and returns both in the
// initial metadata, the latter with our own span; takes
// `bytes` of request from the caller's allowance, and returns in the trailing metadata what is left of it.
CallEntry enter_call(door::FrontDoor& door, grpc::CallbackServerContext* context, std::string_view method,
                     uint64_t bytes);

}  // namespace conclave::router
