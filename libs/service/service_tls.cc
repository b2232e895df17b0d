#include "libs/service/service_tls.h"

#include <array>
#include <atomic>
#include <string>

#include "libs/rpc/tls_credentials.h"
#include "libs/telemetry/log.h"
#include "libs/telemetry/log_limit.h"

namespace conclave {
namespace {

// gRPC's threads may log until the very end of the process, so neither is ever destroyed.
std::atomic<tls::Identity*> g_identity{nullptr};

LogLimit& limit_of(tls::Refusal refusal) {
  static auto& limits = *new std::array<LogLimit, tls::kRefusals>();
  return limits[static_cast<size_t>(refusal)];
}

void log_refusal(tls::Refusal refusal, const std::string& detail) {
  if (const auto left_out = limit_of(refusal).take(steady_now())) {
    log_warn(LogModule::kSessions, "a TLS connection was refused",
             {{"reason", tls::refusal_name(refusal)}, {"detail", detail}, {"lines_left_out", *left_out}});
  }
}

}  // namespace

StatusOr<std::shared_ptr<tls::Identity>> start_tls(const tls::Options& options, tls::Use use) {
  if (!options.enabled()) return std::shared_ptr<tls::Identity>();
  ASSIGN_OR_RETURN(std::shared_ptr<tls::Identity> identity, tls::Identity::load(options, use));
  tls::Identity::Observer observer;
  observer.refused = log_refusal;
  observer.reloaded = [](const Status& outcome) {
    if (outcome.ok()) return log_info(LogModule::kSessions, "certificates read again");
    log_error(LogModule::kSessions, "certificates not taken; peers are judged by the old ones",
              {{"cause", outcome}});
  };
  identity->observe(std::move(observer));
  g_identity.store((new std::shared_ptr<tls::Identity>(identity))->get());
  return identity;
}

void note_grpc_line(std::string_view line) {
  tls::Identity* const identity = g_identity.load();
  if (identity == nullptr) return;
  if (const auto refusal = rpc::failed_handshake(line)) identity->count(*refusal, std::string(line));
}

void export_tls(MetricSink& sink) {
  tls::Identity* const identity = g_identity.load();
  const tls::Identity::Figures figures = identity == nullptr ? tls::Identity::Figures{} : identity->figures();
  for (size_t i = 0; i < tls::kRefusals; ++i) {
    sink.counter("conclave_tls_refused_handshakes_total",
                 "TLS connections of the control plane that failed or were refused at this end",
                 static_cast<double>(figures.refused[i]),
                 {{"reason", std::string(tls::refusal_name(static_cast<tls::Refusal>(i)))}});
  }
  sink.counter("conclave_tls_reloads_total", "Times changed certificates were read and taken",
               static_cast<double>(figures.reloads));
  sink.counter("conclave_tls_failed_reloads_total", "Times changed certificates were read and not taken",
               static_cast<double>(figures.failed_reloads));
  sink.gauge("conclave_tls_certificate_expiry_seconds",
             "When the first certificate of this process's own chain ends, seconds since 1970; 0: TLS is off",
             static_cast<double>(figures.expires_s));
}

}  // namespace conclave
