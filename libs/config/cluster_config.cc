#include "libs/config/cluster_config.h"

#include <algorithm>
#include <vector>

#include "libs/base/cpu_set.h"

namespace conclave {
namespace {

constexpr std::string_view kSpace = " \t\r";

}  // namespace

Status validate_config(const ClusterConfig& config) {
  std::vector<std::string> faults;
  const auto ordered = [&](int64_t low, int64_t high, const char* low_key, const char* high_key) {
    if (low > high) faults.push_back(std::string(low_key) + " is larger than " + high_key);
  };
  ordered(config.control.reconnect_min, config.control.reconnect_max, "control.reconnect_min_ms",
          "control.reconnect_max_ms");
  ordered(config.supervisor.restart_min, config.supervisor.restart_max, "supervisor.restart_min_ms",
          "supervisor.restart_max_ms");
  ordered(config.attention.options.exchange.deadline_floor, config.attention.options.exchange.deadline_cap,
          "attention.dispatch_deadline_floor_ms", "attention.dispatch_deadline_cap_ms");
  ordered(config.attention.options.exchange.reconnect, config.attention.options.exchange.reconnect_cap,
          "attention.shard_reconnect_ms", "attention.shard_reconnect_cap_ms");
  ordered(config.attention.options.exchange.missing_retry,
          config.attention.options.exchange.missing_retry_cap, "attention.missing_retry_ms",
          "attention.missing_retry_cap_ms");
  ordered(config.attention.options.exchange.slow_peer, config.attention.options.exchange.slow_peer_cap,
          "attention.slow_shard_ms", "attention.slow_shard_cap_ms");
  ordered(config.transport.options.keepalive_interval, config.transport.options.keepalive_timeout,
          "transport.keepalive_interval_ms", "transport.keepalive_timeout_ms");
  // A dispatch past the transport's limits is refused, and its sequences fail.
  ordered(config.attention.options.exchange.max_dispatch_rows, config.transport.options.limits.max_rows,
          "attention.max_dispatch_rows", "transport.max_rows");
  ordered(config.attention.options.exchange.max_dispatch_items, config.transport.options.limits.max_items,
          "attention.max_dispatch_items", "transport.max_items");
  // A worker that drops a plan waits for it until scheduler.step_timeout_ms. Plans that only end sequences
  // come beside steps_in_flight others, as many again.
  const uint64_t plans = 2 * uint64_t{config.scheduler.options.steps_in_flight};
  if (plans > config.attention.options.max_queued_plans) {
    faults.push_back("attention.max_queued_plans must be at least twice scheduler.steps_in_flight, " +
                     std::to_string(plans) + ", and is " +
                     std::to_string(config.attention.options.max_queued_plans));
  }
  // A new connection begins with every open request; past the queue's bound it would start over for ever.
  ordered(config.control.max_open_requests, config.control.queue_messages, "control.max_open_requests",
          "control.queue_messages");
  if (config.model.fp8_wire && config.model.precision != Precision::kBf16) {
    faults.push_back("model.fp8_wire needs model.precision bf16");
  }
  for (const auto& [key, processors] : {std::pair{"attention.cpus", &config.attention.processors},
                                        std::pair{"experts.cpus", &config.experts.processors}}) {
    // Which there are is seen where the process runs.
    if (processors->cpus.empty() || processors->cpus.starts_with("numa:")) continue;
    if (auto cpus = parse_cpus(processors->cpus, key); !cpus.ok()) {
      faults.push_back(std::string(key) + " " + message_of(cpus.status()));
    }
  }
  if (config.transport.kind == TransportKind::kUcx && config.transport.ucx.net_devices.empty()) {
    faults.push_back("transport.interface must name a network device when transport.kind is ucx");
  }
  if (Status options = config.scheduler.options.validate(); !options.ok()) {
    faults.push_back("scheduler." + field_of(options) + ": " + message_of(options));
  }
  const std::pair<const char*, const std::string*> files[] = {{"tls.ca_file", &config.tls.ca_file},
                                                              {"tls.cert_file", &config.tls.cert_file},
                                                              {"tls.key_file", &config.tls.key_file}};
  for (const auto& [key, file] : files) {
    if (config.tls.enabled() && file->empty()) {
      faults.push_back(std::string(key) +
                       " is not set; tls.ca_file, tls.cert_file and tls.key_file go together");
    }
  }
  for (const auto& [key, value] : {std::pair{"tls.server_name", &config.tls.server_name},
                                   std::pair{"tls.client_names", &config.tls.client_names}}) {
    if (!config.tls.enabled() && !value->empty())
      faults.push_back(std::string(key) +
                       " has no effect without tls.ca_file, tls.cert_file and tls.key_file");
  }
  if (faults.empty()) return OkStatus();
  std::string joined;
  for (const std::string& fault : faults) joined += (joined.empty() ? "" : "; ") + fault;
  return invalid_argument(joined);
}

StatusOr<std::vector<std::string>> parse_secrets(std::string_view text) {
  const std::string field = "transport.secret_file";
  std::vector<std::string> out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t first = line.find_first_not_of(kSpace);
    if (first == std::string_view::npos) continue;
    line = line.substr(first, line.find_last_not_of(kSpace) - first + 1);
    if (line.size() < kMinSecretBytes)
      return invalid_field(field,
                           "has a secret of fewer than " + std::to_string(kMinSecretBytes) +
                               " bytes, which could be guessed; `openssl rand -hex 32` makes a good one");
    if (std::find(out.begin(), out.end(), line) != out.end())
      return invalid_field(field, "has a secret twice");
    if (out.size() == 2)
      return invalid_field(field, "has more than two lines: the secret, and one more that is accepted");
    out.emplace_back(line);
  }
  if (out.empty()) return invalid_field(field, "is empty");
  return out;
}

}  // namespace conclave
