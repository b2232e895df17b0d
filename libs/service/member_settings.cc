#include "libs/service/member_settings.h"

#include <string>

#include "libs/kernels/ops.h"
#include "libs/telemetry/log.h"

namespace conclave {

Status bind_process(const ProcessorConfig& processors, std::string_view section) {
  if (processors.cpus.empty()) return OkStatus();
  const std::string key = std::string(section) + ".cpus";
  ASSIGN_OR_RETURN(const std::vector<uint32_t> cpus, parse_cpus(processors.cpus, key));
  return bind_to_cpus(cpus, key);
}

StatusOr<LoadedMember> load_member(Service& service, const ProcessorConfig& processors, uint32_t threads) {
  const ClusterConfig& config = service.config();
  if (config.transport.kind != TransportKind::kUcx) {
    return invalid_field(
        "transport.kind",
        "transport.kind: loopback works inside one process only; separate services need ucx");
  }
  if (config.model.path.empty()) {
    return invalid_field("model.path",
                         "model.path is not set: name the directory of the checkpoint in the "
                         "configuration or with --model");
  }
  LoadedMember out;
  MemberSettings& s = out.settings;
  s.scheduler = config.scheduler.connect_address();
  s.control = config.control;
  s.control.ops_address = service.ops_address();
  s.control.version = Service::version();
  s.transport = config.transport;
  if (!config.transport.secret_file.empty()) {
    s.secret_file.emplace(config.transport.secret_file, "transport.secret_file", kMaxSecretFileBytes);
    ASSIGN_OR_RETURN(const std::string text, s.secret_file->read());
    ASSIGN_OR_RETURN(s.secrets, parse_secrets(text));
  }
  ASSIGN_OR_RETURN(s.test_faults, test_faults_of_environment());
  if (s.test_faults)
    log_warn(LogModule::kService, "faults are injected into the data plane: CONCLAVE_TEST_FAULTS is set");
  service.startup().set("checking the kernels", "", 0.1);
  ASSIGN_OR_RETURN(s.isa, kernels::choose_isa());
  s.threads = compute_threads(threads);
  if (processors.pin_threads) s.pinned_cpus = allowed_cpus();
  s.numerics_id = numerics_id(config.model.precision, "cpu", config.model.fp8_wire);
  service.startup().set("binding the checkpoint", config.model.path, 0.2);
  const TimePoint begin = steady_now();
  auto model = load_model(config.model.path);
  if (!model.ok()) {
    return with_field(annotate(model.status(), "model.path: cannot load the checkpoint " + config.model.path),
                      "model.path");
  }
  out.model = *std::move(model);
  s.model_fingerprint = out.model->fingerprint;
  for (const std::string& note : out.model->spec.notes) log_info(LogModule::kModel, note);
  log_info(LogModule::kModel, "checkpoint bound",
           {{"path", config.model.path},
            {"tensors", static_cast<uint64_t>(out.model->tensor_count)},
            {"bytes", out.model->tensor_bytes},
            {"fingerprint", s.model_fingerprint},
            {"seconds", static_cast<double>(steady_now() - begin) * 1e-9},
            {"isa", kernels::isa_name(s.isa)},
            {"threads", static_cast<uint64_t>(s.threads)},
            {"numerics_id", s.numerics_id}});
  return out;
}

void export_transport(const TransportStats& stats, uint64_t incarnations, MetricSink& sink) {
  const auto counter = [&sink](const char* name, const char* help, uint64_t value) {
    sink.counter(name, help, static_cast<double>(value));
  };
  counter("conclave_member_incarnations_total", "Times this process joined under a new incarnation",
          incarnations);
  counter("conclave_transport_sent_messages_total", "Messages sent", stats.sent_messages);
  counter("conclave_transport_sent_bytes_total", "Bytes sent", stats.sent_bytes);
  counter("conclave_transport_received_messages_total", "Messages received", stats.received_messages);
  counter("conclave_transport_received_bytes_total", "Bytes received", stats.received_bytes);
  counter("conclave_transport_rejected_messages_total", "Messages that failed their checks",
          stats.rejected_messages);
  counter("conclave_transport_late_messages_total", "Messages of peers that were gone", stats.late_messages);
  counter("conclave_transport_blocked_sends_total", "Sends that met a bound", stats.blocked);
  for (size_t i = 0; i < kHelloRefusals; ++i) {
    sink.counter("conclave_transport_refused_hellos_total", "Peers of the data plane refused by this process",
                 static_cast<double>(stats.hellos_refused_by[i]),
                 {{"reason", std::string(hello_refusal_name(static_cast<HelloRefusal>(i)))}});
  }
  counter("conclave_transport_lost_peers_total", "Peers lost", stats.peers_lost);
  sink.gauge("conclave_transport_peers", "Peers up", static_cast<double>(stats.peers));
  for (const LinkStats& link : stats.links) {
    // Its name is in conclave_scheduler_member_info.
    const MetricLabels labels = {{"member", std::to_string(link.peer.value)}};
    const auto of_link = [&](const char* name, const char* help, uint64_t value) {
      sink.counter(name, help, static_cast<double>(value), labels);
    };
    of_link("conclave_transport_link_sent_bytes_total", "Bytes sent to a peer, on the connection of now",
            link.sent_bytes);
    of_link("conclave_transport_link_received_bytes_total",
            "Bytes received from a peer, on the connection of now", link.received_bytes);
    of_link("conclave_transport_link_sent_messages_total",
            "Messages sent to a peer, on the connection of now", link.sent_messages);
    of_link("conclave_transport_link_received_messages_total",
            "Messages received from a peer, on the connection of now", link.received_messages);
    sink.gauge("conclave_transport_link_unacknowledged_bytes",
               "Bytes sent to a peer that its owner has not taken yet",
               static_cast<double>(link.inflight_bytes), labels);
  }
}

}  // namespace conclave
