// conclave-router: HTTP and gRPC in, the scheduler behind.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <mutex>
#include <string>

#include "libs/base/random.h"
#include "libs/checkpoint/model_config.h"
#include "libs/config/load.h"
#include "libs/rpc/client_options.h"
#include "libs/rpc/grpc_setup.h"
#include "libs/rpc/scheduler_client.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"
#include "router_service/router_server.h"

namespace conclave::router {
namespace {

rpc::ClientOptions client_options(const ClusterConfig& config) {
  rpc::ClientOptions options;
  options.target = config.scheduler.connect_address();
  options.reconnect_min = config.control.reconnect_min;
  options.reconnect_max = config.control.reconnect_max;
  options.connect_deadline = config.control.connect_deadline;
  options.queue_messages = config.control.queue_messages;
  options.max_message_bytes = config.control.max_message_bytes;
  options.submit_wait = config.control.submit_wait;
  options.max_open_requests = config.control.max_open_requests;
  return options;
}

std::string router_name() {
  char host[256] = "router";
  gethostname(host, sizeof host - 1);
  return std::string(host) + "-" + std::to_string(getpid());
}

// One readable line: the field where one is at fault, and what is wrong.
std::string error_text(const Status& status) {
  const std::string field = field_of(status);
  return field.empty() ? message_of(status) : field + ": " + message_of(status);
}

Status run(const std::string& config_path, const sigset_t& stop_signals) {
  ASSIGN_OR_RETURN(const LoadedConfig loaded, load_config_file(config_path, process_environment()));
  const ClusterConfig& config = loaded.config;
  ASSIGN_OR_RETURN(const LogLevel level, parse_log_level(config.logging.level, "logging.level"));
  const std::string name = router_name();
  const Incarnation incarnation = make_incarnation();
  log_threshold(level);
  log_identity("router", name, incarnation);
  for (const std::string& warning : loaded.warnings) log_warn(warning);
  // gRPC's own errors: what matters of them comes back as a status.
  rpc::route_grpc_logs([](const char* file, int line, const char* message) {
    log_debug("grpc", {{"file", file}, {"line", line}, {"text", message}});
  });
  if (config.model.path.empty())
    return invalid_field("model.path", "is not set: name the directory of the checkpoint");

  // The operations port comes first, so that a slow start can be watched.
  MetricsRegistry metrics;
  StartupProgress startup;
  std::mutex mutex;
  RouterServer* running = nullptr;  // guarded by mutex
  OpsServer::Hooks hooks;
  hooks.metrics = &metrics;
  hooks.startup = &startup;
  hooks.readiness = [&] {
    std::lock_guard lock(mutex);
    return running ? running->readiness()
                   : Readiness{{"the router is starting; /startupz says how far it is"}};
  };
  auto ops = OpsServer::start(config.router.ops_listen, hooks);
  if (!ops.ok()) return annotate(ops.status(), "router.ops_listen");

  startup.set("reading the model's configuration", config.model.path, 0.1);
  ASSIGN_OR_RETURN(ModelSpec model, read_model_spec(config.model.path));
  if (!config.model.name.empty()) model.name = config.model.name;
  startup.set("loading the tokenizer and the chat template", config.model.path, 0.2);
  ASSIGN_OR_RETURN(const auto text, load_model_text(config.model.path, config.router));
  startup.set("listening", config.router.http_listen, 0.9);
  rpc::SchedulerClient scheduler(client_options(config), name, incarnation);
  ASSIGN_OR_RETURN(const auto server, RouterServer::start(config.router, model, scheduler, *text, &metrics));
  const auto client_metrics = metrics.add_collector([&scheduler](MetricSink& sink) {
    const rpc::SchedulerClientMetrics counts = scheduler.metrics();
    sink.counter("conclave_router_scheduler_connections_total", "Connections that the scheduler welcomed",
                 static_cast<double>(counts.connections));
    sink.counter("conclave_router_resubmitted_requests_total", "Requests sent again after a lost connection",
                 static_cast<double>(counts.resubmissions));
    sink.counter("conclave_router_duplicate_tokens_total", "Tokens dropped because they had been delivered",
                 static_cast<double>(counts.duplicate_tokens));
    sink.counter("conclave_router_invalid_scheduler_messages_total", "Messages that ended their connection",
                 static_cast<double>(counts.invalid_messages));
  });
  {
    std::lock_guard lock(mutex);
    running = server.get();
  }
  startup.done();
  log_info("listening", {{"http", server->http_address()},
                         {"grpc", server->grpc_address()},
                         {"ops", (*ops)->address()},
                         {"model", model.name},
                         {"scheduler", config.scheduler.connect_address()}});

  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  log_info("draining", {{"signal", signal_number}});
  server->drain();
  {
    std::lock_guard lock(mutex);
    running = nullptr;
  }
  log_info("stopped");
  return OkStatus();
}

}  // namespace
}  // namespace conclave::router

int main(int argc, char** argv) {
  CLI::App app("conclave-router: the OpenAI-compatible HTTP API and gRPC in front of a Conclave cluster");
  std::string config;
  app.add_option("--config", config, "Cluster configuration (YAML); CONCLAVE_* variables override it");
  CLI11_PARSE(app, argc, argv);

  // Every thread inherits this: the signals are taken by sigwait alone, and a closed socket is an error, not
  // an end.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  const conclave::Status status = conclave::router::run(config, stop_signals);
  if (status.ok()) return 0;
  std::fprintf(stderr, "conclave-router: %s\n", conclave::router::error_text(status).c_str());
  return 1;
}
