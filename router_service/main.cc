// conclave-router: HTTP and gRPC in, the scheduler behind.
#include <algorithm>

#include "libs/checkpoint/model_config.h"
#include "libs/rpc/scheduler_client.h"
#include "libs/service/service.h"
#include "libs/telemetry/log.h"
#include "router_service/router_server.h"

namespace conclave::router {
namespace {

void export_metrics(const rpc::SchedulerClientMetrics& counts, MetricSink& sink) {
  sink.counter("conclave_router_scheduler_connections_total", "Connections that the scheduler welcomed",
               static_cast<double>(counts.connections));
  sink.counter("conclave_router_resubmitted_requests_total", "Requests sent again after a lost connection",
               static_cast<double>(counts.resubmissions));
  sink.counter("conclave_router_adopted_requests_total", "Resumed streams taken over from the scheduler",
               static_cast<double>(counts.adoptions));
  sink.counter("conclave_router_duplicate_tokens_total", "Tokens dropped because they had been delivered",
               static_cast<double>(counts.duplicate_tokens));
  sink.counter("conclave_router_invalid_scheduler_messages_total", "Messages that ended their connection",
               static_cast<double>(counts.invalid_messages));
}

// What the model-server protocol of the Gateway API Inference Extension asks of each endpoint of a pool.
void export_load(const rpc::FleetLoad& load, MetricSink& sink) {
  sink.gauge("conclave_router_fleet_waiting_requests",
             "Requests of the router's cluster accepted and not yet running, as its scheduler says",
             load.waiting);
  sink.gauge("conclave_router_fleet_running_requests", "Requests of the router's cluster that run",
             load.running);
  sink.gauge("conclave_router_fleet_kv_usage_ratio", "KV pages in use of all pages of the router's cluster",
             load.kv_usage);
}

constexpr Nanos kLoadLimit = 500 * kMillisecond;  // for the scheduler's answer, of a scrape

Status run(Service& service) {
  const ClusterConfig& config = service.config();
  if (config.model.path.empty()) {
    return invalid_field(
        "model.path",
        "model.path is not set: name the directory of the checkpoint in the configuration or "
        "with --model");
  }
  // The operations port comes first, so that a slow start can be watched.
  RETURN_IF_ERROR(service.start_ops(config.router.ops_listen, "router.ops_listen"));
  service.startup().set("reading the model's configuration", config.model.path, 0.01);
  ASSIGN_OR_RETURN(ModelSpec model, read_model_spec(config.model.path));
  if (!config.model.name.empty()) model.name = config.model.name;
  service.startup().set("loading the tokenizer and the chat template", config.model.path, 0.02);
  ASSIGN_OR_RETURN(const auto text, load_model_text(config.model.path, config.router));
  service.startup().set("listening", config.router.http_listen, 0.04);
  rpc::ClientOptions control = config.control;
  control.target = config.scheduler.connect_address();
  control.ops_address = service.ops_address();
  control.version = Service::version();
  rpc::SchedulerClient scheduler(control, service.name(), service.incarnation());
  RouterConfig router = config.router;
  router.stall_report = config.logging.stall_report;
  ASSIGN_OR_RETURN(const auto server,
                   RouterServer::start(router, model, scheduler, *text, &service.metrics()));
  auto watched = server->watch_progress(service.progress());
  watched.push_back(service.progress().executor(
      "the scheduler client's loop",
      [&scheduler](std::function<void()> task) { scheduler.post(std::move(task)); }));
  const auto collector = service.metrics().add_collector([&scheduler](MetricSink& sink) {
    export_metrics(scheduler.metrics(), sink);
    if (const auto load = scheduler.load(kLoadLimit)) export_load(*load, sink);
  });
  const auto ready = service.ready_unless([&server] { return server->readiness().reasons; });
  std::vector<std::pair<std::string, std::string>> addresses;
  if (!server->http_address().empty()) addresses.push_back({"http", server->http_address()});
  if (!server->grpc_address().empty()) addresses.push_back({"grpc", server->grpc_address()});
  if (!server->admin_address().empty()) addresses.push_back({"admin", server->admin_address()});
  const auto reload = service.on_hangup([&server] { server->reload_keys(); });
  service.started(addresses, "waiting for the cluster", [&server] { return server->startup_step(); });
  service.wait_for_stop();
  Service::limit_end(config.router.drain_time + 5 * kSecond);
  server->drain();
  return OkStatus();
}

}  // namespace
}  // namespace conclave::router

int main(int argc, char** argv) {
  conclave::ServiceSpec spec;
  spec.program = "conclave-router";
  spec.role = "router";
  spec.description =
      "conclave-router: the OpenAI-compatible HTTP API and gRPC in front of a Conclave cluster";
  spec.flags = {
      {"--model", "model.path", "Directory of the checkpoint"},
      {"--scheduler", "scheduler.address", "Where the scheduler is"},
      {"--http-listen", "router.http_listen", "Address of the HTTP API; port 0: any free one"},
      {"--grpc-listen", "router.grpc_listen", "Address of the gRPC API; port 0: any free one"},
      {"--admin-listen", "router.admin_listen", "Address of the admin routes; port 0: any free one"},
      {"--ops-listen", "router.ops_listen", "Address of /metrics, /livez, /readyz, /startupz"}};
  return conclave::run_service(argc, argv, spec, conclave::router::run);
}
