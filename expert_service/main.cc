// conclave-expert: an expert shard. Holds the experts that the scheduler assigns to it and computes for every
// worker.
#include "expert_service/adapters/shard_metrics.h"
#include "expert_service/core/shard.h"
#include "libs/service/serve_member.h"

namespace conclave {
namespace {

Status run(Service& service) {
  const ClusterConfig& config = service.config();
  RETURN_IF_ERROR(bind_process(config.experts.processors, "experts"));  // before there are threads
  config.transport.ucx.export_to_environment();
  RETURN_IF_ERROR(service.start_ops(config.experts.ops_listen, "experts.ops_listen"));
  ASSIGN_OR_RETURN(const LoadedMember loaded,
                   load_member(service, config.experts.processors, config.experts.options.threads));
  ShardOptions options = config.experts.options;
  options.name = service.name();
  options.numerics_id = loaded.settings.numerics_id;
  options.model_fingerprint = loaded.settings.model_fingerprint;
  options.precision = config.model.precision;
  options.fp8_wire = config.model.fp8_wire;
  options.threads = loaded.settings.threads;
  // A tensor that lay at an odd address was copied, and pages of a copy cannot be given back.
  options.weights_are_mapped = loaded.model->copies.empty();
  service.startup().set("starting the data plane", config.transport.ucx.net_devices, 0.8);
  MemberProcess<Shard, ShardMetrics> member(
      loaded.settings,
      [&](Executor& executor, ExpertTransport& transport,
          kernels::Context kernels) -> StatusOr<std::unique_ptr<Shard>> {
        return std::make_unique<Shard>(executor, transport, loaded.model->spec, loaded.model->experts,
                                       kernels, options);
      });
  const auto warm = [&member] {
    const ShardMetrics seen = member.metrics();
    if (seen.held_experts == 0) return StartupStep{};
    return StartupStep{"",
                       1 - static_cast<double>(seen.cold_experts) / static_cast<double>(seen.held_experts)};
  };
  return serve_member<Shard, ShardMetrics>(
      service, member, {config.experts.drain_time, "warming experts", warm, "the dispatches that wait"},
      [](const ShardMetrics& seen, MetricSink& sink) { export_metrics(seen, sink); },
      [](const ShardMetrics& seen) {
        return seen.items + seen.groups + seen.expired_dispatches + seen.cancelled_dispatches;
      });
}

}  // namespace
}  // namespace conclave

int main(int argc, char** argv) {
  conclave::ServiceSpec spec;
  spec.program = "conclave-expert";
  spec.role = "expert";
  spec.description = "conclave-expert: an expert shard of a Conclave cluster";
  spec.flags = {{"--model", "model.path", "Directory of the checkpoint"},
                {"--name", "experts.name", "Name of this shard"},
                {"--scheduler", "scheduler.address", "Where the scheduler is"},
                {"--ops-listen", "experts.ops_listen", "Address of /metrics, /livez, /readyz, /startupz"},
                {"--threads", "experts.threads", "Threads that compute"}};
  return conclave::run_service(argc, argv, spec, conclave::run);
}
