// A whole cluster in this process: cores on threads of their own, hidden states over loopback, the router in
// front.
#pragma once

#include <functional>

#include "libs/base/status.h"
#include "libs/config/cluster_config.h"

namespace conclave::cli {

// Runs until SIGINT or SIGTERM; calls `ready` once requests are answered, and ends when it fails.
Status run_in_process(const ClusterConfig& config, const std::function<Status()>& ready);

}  // namespace conclave::cli
