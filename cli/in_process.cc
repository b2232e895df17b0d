#include "cli/in_process.h"

#include <signal.h>

#include <cstdio>

#include "cli/progress.h"
#include "libs/local_cluster/local_cluster.h"
#include "libs/service/service.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"
#include "router_service/router_server.h"

namespace conclave::cli {
namespace {

LocalClusterOptions cluster_options(const ClusterConfig& config) {
  LocalClusterOptions options;
  options.workers = config.supervisor.attention_workers;
  options.shards = config.supervisor.expert_shards;
  options.precision = config.model.precision;
  options.threads = compute_threads(config.attention.options.threads);
  return options;
}

}  // namespace

Status run_in_process(const ClusterConfig& config, const std::function<Status()>& ready) {
  // Before any thread starts, so that the signals come to sigwait alone.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGINT);
  sigaddset(&stop_signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  log_threshold(LogLevel::kWarn);  // the terminal belongs to the person who started us

  show_line("loading " + config.model.path);
  auto cluster = LocalCluster::load(config.model.path, cluster_options(config));
  clear_line();
  RETURN_IF_ERROR(cluster.status());
  MetricsRegistry metrics;
  ASSIGN_OR_RETURN(const auto text, router::load_model_text(config.model.path, config.router));
  ModelSpec spec = (*cluster)->spec();
  if (!config.model.name.empty()) spec.name = config.model.name;
  ASSIGN_OR_RETURN(const auto server,
                   router::RouterServer::start(config.router, spec, (*cluster)->port(), *text, &metrics));
  OpsServer::Hooks hooks;
  hooks.metrics = &metrics;
  hooks.readiness = [&] { return server->readiness(); };
  ASSIGN_OR_RETURN(const auto ops, OpsServer::start(config.router.ops_listen, hooks));
  RETURN_IF_ERROR((*cluster)->wait_ready(config.supervisor.start_deadline));
  RETURN_IF_ERROR(ready());

  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  server->drain();
  return OkStatus();
}

}  // namespace conclave::cli
