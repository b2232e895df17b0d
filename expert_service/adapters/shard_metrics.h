// The shard's counters under their public names.
#pragma once

#include "expert_service/core/options.h"
#include "libs/telemetry/metrics.h"

namespace conclave {

void export_metrics(const ShardMetrics& metrics, MetricSink& sink);

}  // namespace conclave
