// The scheduler's counters under their public names.
#pragma once

#include "libs/telemetry/metrics.h"
#include "scheduler/core/status_snapshot.h"
#include "scheduler/grpc_server.h"

namespace conclave::scheduler {

void export_metrics(const SchedulerMetrics& metrics, MetricSink& sink);
void export_metrics(const GrpcServerMetrics& metrics, MetricSink& sink);

}  // namespace conclave::scheduler
