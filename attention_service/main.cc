// conclave-attention: an attention worker. Dense layers, KV cache, sampling; asks shards for the experts.
#include "attention_service/adapters/worker_metrics.h"
#include "attention_service/core/worker.h"
#include "libs/service/serve_member.h"

namespace conclave {
namespace {

Status run(Service& service) {
  const ClusterConfig& config = service.config();
  RETURN_IF_ERROR(bind_process(config.attention.processors, "attention"));  // before there are threads
  config.transport.ucx.export_to_environment();
  RETURN_IF_ERROR(service.start_ops(config.attention.ops_listen, "attention.ops_listen"));
  ASSIGN_OR_RETURN(const LoadedMember loaded,
                   load_member(service, config.attention.processors, config.attention.options.threads));
  WorkerOptions options = config.attention.options;
  options.name = service.name();
  options.numerics_id = loaded.settings.numerics_id;
  options.model_fingerprint = loaded.settings.model_fingerprint;
  options.precision = config.model.precision;
  options.fp8_wire = config.model.fp8_wire;
  options.threads = loaded.settings.threads;
  if (options.kv_blocks == 0) {
    ASSIGN_OR_RETURN(options.kv_blocks,
                     kv_blocks_within(loaded.model->spec, options.precision, config.attention.kv_bytes,
                                      config.scheduler.options.max_kv_blocks_per_worker));
  }
  service.startup().set("starting the data plane", config.transport.ucx.net_devices, 0.8);
  MemberProcess<Worker, WorkerMetrics> member(
      loaded.settings, [&](Executor& executor, ExpertTransport& transport, kernels::Context kernels) {
        return Worker::create(executor, transport, loaded.model->spec, loaded.model->dense, kernels, options);
      });
  const uint64_t bytes = WeightWarmer(loaded.model->dense).total();
  const auto step = [&member, bytes] {
    const uint64_t warmed = member.metrics().weight_bytes_warmed;
    return StartupStep{warmed < bytes ? "reading weights" : "",
                       bytes == 0 ? 1.0 : static_cast<double>(warmed) / static_cast<double>(bytes)};
  };
  return serve_member<Worker, WorkerMetrics>(
      service, member, {config.attention.drain_time, "joining the cluster", step, "the running step"},
      [&](const WorkerMetrics& seen, MetricSink& sink) { export_metrics(seen, options.kv_blocks, sink); },
      // What only goes round in circles, such as rows sent again, is no progress.
      [](const WorkerMetrics& seen) {
        return seen.steps + static_cast<uint64_t>(seen.attention_ns + seen.combine_ns + seen.head_ns);
      });
}

}  // namespace
}  // namespace conclave

int main(int argc, char** argv) {
  conclave::ServiceSpec spec;
  spec.program = "conclave-attention";
  spec.role = "attention";
  spec.description = "conclave-attention: an attention worker of a Conclave cluster";
  spec.flags = {{"--model", "model.path", "Directory of the checkpoint"},
                {"--name", "attention.name", "Name of this worker"},
                {"--scheduler", "scheduler.address", "Where the scheduler is"},
                {"--ops-listen", "attention.ops_listen", "Address of /metrics, /livez, /readyz, /startupz"},
                {"--threads", "attention.threads", "Threads that compute"}};
  return conclave::run_service(argc, argv, spec, conclave::run);
}
