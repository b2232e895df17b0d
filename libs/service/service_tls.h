// Mutual TLS of a service process: its identity, and what logs and metrics say of those it refuses.
#pragma once

#include <memory>
#include <string_view>

#include "libs/base/status.h"
#include "libs/telemetry/metrics.h"
#include "libs/tls/identity.h"

namespace conclave {

// Null where the options name no files. Otherwise the identity of this process, whose refusals are logged, at
// most one line of each reason in 10 s. Once a process, before its first connection.
StatusOr<std::shared_ptr<tls::Identity>> start_tls(const tls::Options& options, tls::Use use);
// A line of gRPC's own log: handshakes that fail early show nowhere else.
void note_grpc_line(std::string_view line);
// The counters of this process; zeros without TLS.
void export_tls(MetricSink& sink);

}  // namespace conclave
