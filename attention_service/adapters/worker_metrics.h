// The worker's counters under their public names.
#pragma once

#include <cstdint>

#include "attention_service/core/options.h"
#include "libs/telemetry/metrics.h"

namespace conclave {

void export_metrics(const WorkerMetrics& metrics, uint32_t kv_blocks, MetricSink& sink);

}  // namespace conclave
