#include "libs/config/cluster_config.h"

#include <fstream>
#include <iterator>
#include <vector>

#include "libs/base/cpu_set.h"

namespace conclave {
namespace {

constexpr size_t kMaxSecretBytes = 4096;

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
  if (faults.empty()) return OkStatus();
  std::string joined;
  for (const std::string& fault : faults) joined += (joined.empty() ? "" : "; ") + fault;
  return invalid_argument(joined);
}

StatusOr<std::string> read_secret(const TransportConfig& transport) {
  if (transport.secret_file.empty()) return std::string();
  const std::string field = "transport.secret_file";
  std::ifstream in(transport.secret_file, std::ios::binary);
  std::string secret(kMaxSecretBytes + 1, '\0');
  if (!in || !in.read(secret.data(), static_cast<std::streamsize>(secret.size())).eof()) {
    return invalid_field(field,
                         "'" + transport.secret_file + "' cannot be read, or is longer than 4096 bytes");
  }
  secret.resize(static_cast<size_t>(in.gcount()));
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r' || secret.back() == ' '))
    secret.pop_back();
  if (secret.empty()) return invalid_field(field, "'" + transport.secret_file + "' is empty");
  return secret;
}

}  // namespace conclave
