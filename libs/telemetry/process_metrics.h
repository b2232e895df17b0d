// What every process says of itself: the usual process_* metrics and conclave_build_info.
#pragma once

#include <memory>
#include <string>

#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"

namespace conclave {

// Read from /proc at each scrape, until the returned handle is destroyed. A figure that cannot be read is
// left out.
[[nodiscard]] std::unique_ptr<MetricsRegistry::CollectorHandle> export_process(MetricsRegistry& metrics,
                                                                               const std::string& version,
                                                                               const std::string& role);

// How far a start is: conclave_start_phase_info names the phase of now, which is one of a few words of ours,
// and conclave_start_fraction_ratio is left out while nobody knows. `startup` outlives the handle.
[[nodiscard]] std::unique_ptr<MetricsRegistry::CollectorHandle> export_startup(MetricsRegistry& metrics,
                                                                               StartupProgress& startup);

}  // namespace conclave
