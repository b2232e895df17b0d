// The router in one object: gateway, HTTP and gRPC fronts, metrics, readiness, drain. conclave-router wraps
// it in a process; an in-process cluster uses it as it is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/config/cluster_config.h"
#include "libs/model/model_spec.h"
#include "libs/ports/scheduler_port.h"
#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"
#include "libs/telemetry/progress_watch.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::router {

class RouterServer {
 public:
  // Listens on config.http_listen, grpc_listen and admin_listen (empty: no such front). `scheduler`, `text`
  // and `metrics` outlive the server; `metrics` may be null. `model.name` is what /v1/models shows. A port in
  // use is a one-line status.
  static StatusOr<std::unique_ptr<RouterServer>> start(const RouterConfig& config, ModelSpec model,
                                                       SchedulerPort& scheduler,
                                                       const gateway::TextCodec& text,
                                                       MetricsRegistry* metrics);
  // Stops at once; drain() first for a clean end.
  virtual ~RouterServer() = default;

  virtual std::string http_address() const = 0;  // "host:port" as really bound; empty without that front
  virtual std::string grpc_address() const = 0;
  virtual uint16_t http_port() const = 0;  // 0 without that front
  virtual uint16_t grpc_port() const = 0;
  virtual std::string admin_address() const = 0;
  // Reads the file of API keys again; the result is in the log. Any thread.
  virtual void reload_keys() = 0;
  // Why requests would be refused now. Any thread.
  virtual Readiness readiness() const = 0;
  // Until the fleet is whole and warm; UNAVAILABLE with the reason after `limit`. Any thread.
  virtual Status wait_ready(Nanos limit) = 0;
  // How far the start is, for /startupz: the fleet's weights, then the warm-up. Any thread.
  virtual StartupStep startup_step() const = 0;
  // What `watch` is to look at: the threads that serve HTTP, and those for texts. Until the returned guards
  // are destroyed, before the server.
  [[nodiscard]] virtual std::vector<std::shared_ptr<void>> watch_progress(ProgressWatch& watch) = 0;
  // Refuses new requests, lets those in progress finish within config.drain_time, ends what is left. Blocks.
  virtual void drain() = 0;
};

// Starts the template processes as the configuration says, and reads the tokenizer.
StatusOr<std::unique_ptr<gateway::TextCodec>> load_model_text(const std::string& model_dir,
                                                              const RouterConfig& config);

}  // namespace conclave::router
