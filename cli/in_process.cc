#include "cli/in_process.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>

#include "attention_service/core/kv_store.h"
#include "cli/progress.h"
#include "libs/checkpoint/model_config.h"
#include "libs/local_cluster/local_cluster.h"
#include "libs/service/service.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"
#include "router_service/router_server.h"

namespace conclave::cli {
namespace {

// Leases stay the local cluster's own, and peers need no sign of life: here nothing hangs or dies alone.
StatusOr<LocalClusterOptions> cluster_options(const ClusterConfig& config) {
  LocalClusterOptions options;
  options.workers = config.supervisor.attention_workers;
  options.shards = config.supervisor.expert_shards;
  options.precision = config.model.precision;
  options.fp8_wire = config.model.fp8_wire;
  options.threads =
      compute_threads(std::max(config.attention.options.threads, config.experts.options.threads));
  const scheduler::SchedulerOptions leases = options.scheduler;
  options.scheduler = config.scheduler.options;
  options.scheduler.lease_ms = leases.lease_ms;
  options.scheduler.dead_after_ms = leases.dead_after_ms;
  options.scheduler.dead_after_trouble_ms = leases.dead_after_trouble_ms;
  options.worker = config.attention.options;
  options.shard = config.experts.options;
  options.transport = config.transport.options;
  options.transport.keepalive_interval = 0;
  options.transport.rows_crc = false;
  if (options.worker.kv_blocks == 0) {
    ASSIGN_OR_RETURN(const ModelSpec spec, read_model_spec(config.model.path));
    ASSIGN_OR_RETURN(options.worker.kv_blocks,
                     kv_blocks_within(spec, options.precision, config.attention.kv_bytes,
                                      config.scheduler.options.max_kv_blocks_per_worker));
  }
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

  MetricsRegistry metrics;
  StartupProgress startup;
  OpsServer::Hooks hooks;
  hooks.metrics = &metrics;
  hooks.startup = &startup;
  std::mutex mutex;
  router::RouterServer* shown = nullptr;  // guarded by mutex: the router, while there is one
  hooks.readiness = [&] {
    std::lock_guard lock(mutex);
    return shown == nullptr ? Readiness{{"starting"}} : shown->readiness();
  };
  // The operations port comes first, so that a slow start can be watched.
  ASSIGN_OR_RETURN(const auto ops, OpsServer::start(config.router.ops_listen, hooks));
  startup.set("mapping the weights", config.model.path, 0.01);
  show_line("loading " + config.model.path);
  auto options = cluster_options(config);
  RETURN_IF_ERROR(options.status());
  auto cluster = LocalCluster::load(config.model.path, *std::move(options));
  clear_line();
  RETURN_IF_ERROR(cluster.status());
  startup.set("loading the tokenizer and the chat template", config.model.path, 0.02);
  ASSIGN_OR_RETURN(const auto text, router::load_model_text(config.model.path, config.router));
  ModelSpec spec = (*cluster)->spec();
  if (!config.model.name.empty()) spec.name = config.model.name;
  ASSIGN_OR_RETURN(const auto server,
                   router::RouterServer::start(config.router, spec, (*cluster)->port(), *text, &metrics));
  const auto show = [&](router::RouterServer* now) {
    std::lock_guard lock(mutex);
    shown = now;
  };
  show(server.get());
  const std::shared_ptr<void> hidden(nullptr, [&show](void*) { show(nullptr); });
  startup.follow([&](StartupProgress& progress) {
    std::lock_guard lock(mutex);
    if (shown == nullptr) return;
    const Readiness now = shown->readiness();
    if (now.ready()) return progress.done();
    const StartupStep step = shown->startup_step();
    progress.set(step.phase, now.reasons.front(), step.fraction);
  });
  // The fleet whole, and a token through all of it.
  RETURN_IF_ERROR(server->wait_ready(config.supervisor.start_deadline));
  startup.done();
  RETURN_IF_ERROR(ready());

  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  server->drain();
  return OkStatus();
}

}  // namespace conclave::cli
