// The gRPC front: conclave.v1.Inference with the standard health and reflection services.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "router_service/door/front_door.h"
#include "router_service/gateway/gateway.h"

namespace conclave::router {

struct GrpcFrontOptions {
  std::string listen = "127.0.0.1:0";
  uint64_t max_message_bytes = 16ull << 20;
  uint32_t max_metadata_bytes = 32 << 10;
  door::FrontDoor* door = nullptr;  // outlives the front; null: one of its own, where everybody is trusted
  // Told of every answer: the method ("Generate", "GenerateStream") and its gRPC code. Any thread.
  std::function<void(std::string_view method, int code)> on_answer;
};

class GrpcFront {
 public:
  // `gateway` outlives the front. A port in use is a one-line status.
  static StatusOr<std::unique_ptr<GrpcFront>> start(GrpcFrontOptions options, gateway::Gateway& gateway);
  // Cancels what is left.
  virtual ~GrpcFront() = default;

  virtual std::string address() const = 0;
  virtual uint16_t port() const = 0;
  // What the health service says, for "" and "conclave.v1.Inference".
  virtual void set_serving(bool serving) = 0;
  // Takes no new calls, waits until those in progress are done, and cancels what is left after `wait`.
  virtual void shutdown(Nanos wait) = 0;
};

}  // namespace conclave::router
