// What every process says of itself: the usual process_* metrics and conclave_build_info.
#pragma once

#include <memory>
#include <string>

#include "libs/telemetry/metrics.h"

namespace conclave {

// Read from /proc at each scrape, until the returned handle is destroyed. A figure that cannot be read is
// left out.
[[nodiscard]] std::unique_ptr<MetricsRegistry::CollectorHandle> export_process(MetricsRegistry& metrics,
                                                                               const std::string& version,
                                                                               const std::string& role);

}  // namespace conclave
