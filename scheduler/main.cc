// conclave-scheduler: membership, placement and batching for the whole cluster.
#include <memory>

#include "libs/base/id_text.h"
#include "libs/runtime/loop_executor.h"
#include "libs/service/service.h"
#include "libs/telemetry/log.h"
#include "scheduler/grpc_server.h"
#include "scheduler/loop.h"
#include "scheduler/metrics.h"

namespace conclave::scheduler {
namespace {

GrpcServerOptions server_options(const ClusterConfig& config, const std::string& ops_address) {
  GrpcServerOptions options;
  options.ops_address = ops_address;
  options.version = Service::version();
  options.listen = config.scheduler.listen;
  options.max_message_bytes = config.control.max_message_bytes;
  options.session_queue_messages = config.scheduler.session_queue_messages;
  options.session_queue_bytes = config.scheduler.session_queue_bytes;
  options.tls = config.control.tls;
  return options;
}

void log_stall(const ReportStall& stall) {
  log_warn(LogModule::kRequests, "a request makes no progress",
           {{"stream", id_text(stall.request)},
            {"hop", stall_hop_name(stall.hop)},
            {"detail", stall.detail},
            {"stalled_ms", stall.stalled / kMillisecond}});
}

Status run(Service& service) {
  const ClusterConfig& config = service.config();
  RETURN_IF_ERROR(service.start_ops(config.scheduler.ops_listen, "scheduler.ops_listen"));
  SchedulerOptions options = config.scheduler.options;
  options.incarnation = service.incarnation();
  options.stall_report_ms = static_cast<uint32_t>(config.logging.stall_report / kMillisecond);

  LoopThread thread(LoopExecutor::Options{.spin_ns = 0});
  std::unique_ptr<SchedulerLoop> loop;
  thread.loop().call([&] { loop = std::make_unique<SchedulerLoop>(options, thread.loop(), log_stall); });
  loop->set_on_note([](const Note& note) {
    const bool placement = note.event.find("placement") != std::string::npos;
    log_info(placement ? LogModule::kPlacement : LogModule::kMembers, note.event, {{"what", note.detail}});
  });
  auto server =
      GrpcServer::start(server_options(config, service.ops_address()), *loop, thread.loop(),
                        [](const std::string& peer, const Status& cause) {
                          log_info(LogModule::kSessions, "session ended", {{"peer", peer}, {"cause", cause}});
                        });
  Status status = server.status();
  if (server.ok()) {
    GrpcServer& grpc = **server;
    const auto collector = service.metrics().add_collector([&](MetricSink& sink) {
      export_metrics(loop->metrics(), sink);
      export_metrics(grpc.metrics(), sink);
      sink.gauge("conclave_scheduler_loop_tasks", "Tasks posted to the loop and not yet run",
                 static_cast<double>(thread.loop().depth()));
    });
    const auto ready = service.ready_unless([&loop]() -> std::vector<std::string> {
      const FleetInfo fleet = loop->fleet();
      return fleet.ready ? std::vector<std::string>{} : std::vector<std::string>{fleet.not_ready};
    });
    const auto loop_watch = service.progress().executor(
        "the scheduler's loop",
        [&thread](std::function<void()> task) { thread.loop().post(std::move(task)); });
    const auto work_watch = service.progress().work("the cluster's work", [&loop] {
      const SchedulerMetrics seen = loop->metrics();
      ProgressWatch::Work work;
      work.busy = seen.requests_waiting + seen.requests_running > 0;
      work.done = seen.steps_retired;
      work.detail = std::to_string(seen.requests_waiting) + " requests wait, " +
                    std::to_string(seen.requests_running) + " run, and no worker has finished a step";
      return work;
    });
    grpc.set_serving(true);
    service.started({{"grpc", grpc.address()}});
    service.wait_for_stop();
    Service::limit_end(config.scheduler.drain_time + 5 * kSecond);
    grpc.set_serving(false);
    // What runs goes on under the next scheduler: routers keep their requests, and workers their connections'
    // end.
    grpc.shutdown(std::min<Nanos>(config.scheduler.drain_time, kSecond));
  }
  server = Status(StatusCode::kCancelled, "");  // the server goes while the loop still runs
  thread.loop().call([&] { loop.reset(); });
  thread.stop();
  return status;
}

}  // namespace
}  // namespace conclave::scheduler

int main(int argc, char** argv) {
  conclave::ServiceSpec spec;
  spec.program = "conclave-scheduler";
  spec.role = "scheduler";
  spec.description =
      "conclave-scheduler: membership, placement and continuous batching of a Conclave cluster";
  spec.flags = {{"--listen", "scheduler.listen", "Address of the control plane; port 0: any free one"},
                {"--ops-listen", "scheduler.ops_listen", "Address of /metrics, /livez, /readyz, /startupz"}};
  return conclave::run_service(argc, argv, spec, conclave::scheduler::run);
}
