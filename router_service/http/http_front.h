// The OpenAI-compatible HTTP front: routes, and one object per request between its connection and its
// generation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "libs/base/status.h"
#include "libs/http/http_server.h"
#include "router_service/door/front_door.h"
#include "router_service/gateway/gateway.h"
#include "router_service/http/openai_request.h"

namespace conclave::router {

struct HttpFrontOptions {
  std::string listen = "127.0.0.1:0";
  unsigned threads = 2;
  http::HttpLimits limits;
  gateway::AdmissionLimits openai;
  door::FrontDoor* door = nullptr;  // outlives the front; null: one of its own, where everybody is trusted
  // Told of every answer: the route ("/v1/completions", "other" for unknown ones) and its HTTP status. Any
  // thread.
  std::function<void(std::string_view route, int status)> on_answer;
};

class HttpFront {
 public:
  // `gateway` outlives the front.
  static StatusOr<std::unique_ptr<HttpFront>> start(HttpFrontOptions options, gateway::Gateway& gateway);
  virtual ~HttpFront() = default;

  virtual std::string address() const = 0;
  virtual uint16_t port() const = 0;
  virtual http::HttpCounts counts() const = 0;
  // Runs the task soon on one of its threads.
  virtual void post(std::function<void()> task) = 0;
  // No new connections; idle ones are closed.
  virtual void drain() = 0;
};

}  // namespace conclave::router
