// Reading a ClusterConfig: YAML text, then CONCLAVE_* environment overrides, then checks. The only user of
// yaml-cpp is load.cc.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/status.h"
#include "libs/config/cluster_config.h"

namespace conclave {

inline constexpr size_t kMaxConfigBytes = 1 << 20;  // of one config file
inline constexpr size_t kMaxConfigFaults = 50;      // listed in one error; the rest are counted

// Names and values of environment variables; only names that begin with CONCLAVE_ are looked at.
using Environment = std::map<std::string, std::string>;
// The CONCLAVE_* variables of this process.
Environment process_environment();

struct LoadedConfig {
  ClusterConfig config;
  // One line each: CONCLAVE_* variables that are no key. Not an error, since orchestrators set variables of
  // their own (Kubernetes: CONCLAVE_SCHEDULER_PORT for a service named conclave-scheduler).
  std::vector<std::string> warnings;
};

// INVALID_ARGUMENT lists every fault, one a line, each as "file:line: section.key: what is wrong". `file` is
// what messages call the text.
StatusOr<LoadedConfig> parse_config(std::string_view yaml, std::string_view file,
                                    const Environment& environment);
// NOT_FOUND when the file cannot be read. An empty path means defaults and environment only.
StatusOr<LoadedConfig> load_config_file(const std::string& path, const Environment& environment);

}  // namespace conclave
