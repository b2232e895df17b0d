// What every service process does alike: flags, configuration, logs, the operations port, the ready file,
// signals.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/config/cluster_config.h"
#include "libs/telemetry/metrics.h"
#include "libs/telemetry/ops_server.h"
#include "libs/telemetry/progress_watch.h"

namespace conclave {

// A flag that overrides one config key, e.g. {"--listen", "scheduler.listen", "..."}.
struct ServiceFlag {
  std::string flag;
  std::string key;
  std::string help;
};

struct ServiceSpec {
  std::string program;      // "conclave-scheduler"
  std::string role;         // "scheduler", in every log line
  std::string description;  // of --help
  std::vector<ServiceFlag> flags;
};

struct ServiceState;

class Service {
 public:
  const ClusterConfig& config() const { return config_; }
  // The configured name, or one made from role, host and process id.
  const std::string& name() const { return name_; }
  Incarnation incarnation() const { return incarnation_; }
  const std::string& role() const { return role_; }
  // Of this build.
  static const char* version();
  // Where /metrics is served, with the port really taken; empty before start_ops().
  std::string ops_address() const { return ops_ ? ops_->address() : ""; }
  MetricsRegistry& metrics() { return metrics_; }
  StartupProgress& startup() { return startup_; }
  // What gets on with its work, or is to be reported (logging.stall_report_s). /readyz fails while anything
  // does not, /livez while an executor does not: that alone is cured by a restart. After start_ops().
  ProgressWatch& progress() { return *progress_; }

  // Serves /metrics, /livez, /readyz, /startupz, /debug/log and /debug/process, and writes the ready file a
  // first time. `key` names the config key in errors.
  Status start_ops(const std::string& listen, const std::string& key);
  // Why the service is not ready, once started; empty: it is. Asked on the operations server's thread until
  // the returned guard is destroyed.
  [[nodiscard]] std::shared_ptr<void> ready_unless(std::function<std::vector<std::string>()> reasons);
  // The service has started and listens on these (name, host:port); goes to the log and the ready file.
  // /startupz is done once the service has been ready for the first time; until then it shows the first
  // reason not to be as the detail of `phase`, or of what `step` (null: none) says instead.
  void started(const std::vector<std::pair<std::string, std::string>>& addresses, std::string phase = "",
               std::function<StartupStep()> step = nullptr);
  // Adds what `json` returns, one JSON value, under `key` to /debug/process, until the returned guard is
  // destroyed. Called on the operations server's thread, under a lock.
  [[nodiscard]] std::shared_ptr<void> describe(std::string key, std::function<std::string()> json);
  // What SIGHUP means to this service, until the returned guard is destroyed; without one it is only logged.
  // Called on the thread that waits for the stop.
  [[nodiscard]] std::shared_ptr<void> on_hangup(std::function<void()> reload);
  // Returns at SIGTERM or SIGINT. From then on /readyz says that the service is stopping.
  void wait_for_stop();
  // After wait_for_stop(), while work is brought to its end: returns when end_wait() was called, at another
  // SIGTERM or SIGINT, or after `limit`.
  enum class Ending : uint8_t { kDone, kSignal, kTimeout };
  Ending wait_for_end(Nanos limit);
  // Any thread.
  void end_wait();
  // Ends the process, with a log line, when what is left to do takes longer than this. After wait_for_stop().
  static void limit_end(Nanos limit);

 private:
  friend int run_service(int argc, char** argv, const ServiceSpec& spec,
                         const std::function<Status(Service&)>& body);
  Service() = default;
  Status write_ready_file(bool is_started) const;
  std::function<std::string()> reporter() const;

  ClusterConfig config_;
  std::string role_;
  std::string name_;
  std::string ready_file_;
  Incarnation incarnation_;
  MetricsRegistry metrics_;
  StartupProgress startup_;
  std::shared_ptr<ServiceState> state_;
  std::unique_ptr<ProgressWatch> progress_;  // before what asks it
  std::unique_ptr<MetricsRegistry::CollectorHandle> process_metrics_, startup_metrics_, tls_metrics_;
  std::unique_ptr<OpsServer> ops_;
  std::vector<std::pair<std::string, std::string>> addresses_;
};

// The exit code of a service that can't start as it was told to: wrong flags or configuration, a port in use,
// a broken checkpoint. Starting it again does not help.
inline constexpr int kExitCannotStart = 2;

// The whole of main(): parses flags, reads the configuration, sets up logs and signals, runs `body`. Returns
// the exit code: 0, or kExitCannotStart with one readable line on stderr.
int run_service(int argc, char** argv, const ServiceSpec& spec, const std::function<Status(Service&)>& body);

// Threads to compute with: what is configured, or the cores this process may use.
uint32_t compute_threads(uint32_t configured);

}  // namespace conclave
