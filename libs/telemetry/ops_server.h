// The operations endpoint of a service: /metrics, /livez, /readyz, /startupz, /debug/log and /debug/process,
// on a port and a thread of its own, so that a busy or draining service still answers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/telemetry/metrics.h"

namespace conclave {

// Not ready when there is a reason not to be.
struct Readiness {
  std::vector<std::string> reasons;
  bool ready() const { return reasons.empty(); }
};

// Where a start is.
struct StartupStep {
  std::string phase;     // empty: as before
  double fraction = -1;  // of the whole start, 0..1; below 0: unknown
};

// How far a service has come in starting; shown by /startupz. Any thread.
class StartupProgress {
 public:
  StartupProgress() : started_(steady_now()) {}
  // `fraction` in 0..1 of the whole start, below 0: unknown. `detail` is free text for people.
  void set(std::string_view phase, std::string_view detail = "", double fraction = -1);
  void done();
  bool is_done() const;
  // Asks `look` before each answer, until it is done or cleared with null: for what goes on after the process
  // itself has started, such as weights that become warm. `look` calls set() or done(). Any thread.
  void follow(std::function<void(StartupProgress&)> look);
  void refresh();
  // Where it is now; "done" with fraction 1 once it is.
  StartupStep now() const;
  // {"done":..,"phase":..,"detail":..,"fraction":..,"elapsed_seconds":..}; the clock stops at done().
  std::string json() const;

 private:
  const TimePoint started_;
  mutable std::mutex mutex_;
  std::string phase_ = "starting";
  std::string detail_;
  double fraction_ = -1;
  TimePoint finished_ = kNever;
  std::mutex look_mutex_;
  std::function<void(StartupProgress&)> look_;  // guarded by look_mutex_, called under it
};

class OpsServer {
 public:
  struct Hooks {
    std::function<Readiness()> readiness;      // called per /readyz on the server's thread
    std::function<Readiness()> liveness;       // the same for /livez; none: it lives as long as it answers
    const MetricsRegistry* metrics = nullptr;  // outlives the server
    StartupProgress* startup = nullptr;        // outlives the server; null: /startupz says done
    std::function<std::string()> report;       // of /debug/process, JSON; none: 404
    bool remote_changes = false;               // log levels may be changed from other hosts than this one
  };

  // `listen` is "host:port"; port 0 takes a free one. A port in use or a bad address is a one-line status.
  static StatusOr<std::unique_ptr<OpsServer>> start(std::string_view listen, Hooks hooks);
  virtual ~OpsServer() = default;

  // "host:port" with the port really taken.
  virtual std::string address() const = 0;
  virtual uint16_t port() const = 0;
};

}  // namespace conclave
