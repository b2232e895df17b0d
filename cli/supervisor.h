// Keeps child processes running: restarts what dies, with back-off, and stops all of them in order. One
// thread: the caller's. SIGCHLD, SIGINT and SIGTERM must be blocked in the process before the first child
// starts (block_signals); run() waits for them.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"

namespace conclave::cli {

struct SupervisorOptions {
  // The first restart is immediate; each further one waits twice as long, from min to max, until a child has
  // lived for healthy_after_ms.
  int64_t backoff_min_ms = 100;
  int64_t backoff_max_ms = 5000;
  int64_t healthy_after_ms = 10'000;
  // SIGTERM, then SIGKILL after this.
  int64_t stop_grace_ms = 15'000;
};

struct ChildSpec {
  std::string name;
  std::vector<std::string> argv;  // argv[0] is the program's path
  std::string log_path;           // its stdout and stderr, appended
};

class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options) : options_(options) {}
  ~Supervisor();  // kills what still runs

  // Blocks the signals run() waits for. Call before any thread starts.
  static void block_signals();

  // Starts a child at once.
  Status start(ChildSpec spec);

  // Until then a child that ends by itself with an error ends the whole start: its configuration, checkpoint
  // or port is wrong. From now on every child that ends is started again: it has worked before.
  void started() { started_ = true; }

  // Waits for signals: returns OK after SIGINT or SIGTERM, or the cause when a child failed before started().
  // `on_restart(name, exit description)` is called for each child that ended and will be started again.
  // `tick` is called at least every tick_ms and ends the wait when it returns true.
  Status run(const std::function<void(const std::string&, const std::string&)>& on_restart,
             const std::function<bool()>& tick, int64_t tick_ms);

  // SIGTERM to the last started alone, which is what takes requests: what it has open may end. Then to all
  // others at once, last started first. Each of the two is given the grace, then comes SIGKILL. Another
  // SIGINT or SIGTERM to this process ends the first wait and leaves a second for the rest.
  void stop();

 private:
  struct Child {
    ChildSpec spec;
    pid_t pid = -1;       // -1: not running
    long log_offset = 0;  // where this life's part of the log begins
    TimePoint started = 0;
    TimePoint restart_at = 0;
    int64_t backoff_ms = 0;
  };

  using Children = std::vector<Child>;

  Status spawn(Child& child);
  // False when it was asked to hurry, and is `impatient`.
  bool stop(Children::iterator from, Children::iterator to, bool impatient, int64_t grace_ms);
  Status reap(const std::function<void(const std::string&, const std::string&)>& on_restart);
  TimePoint restart_due();

  SupervisorOptions options_;
  Children children_;
  bool started_ = false;
};

// What a program that failed wrote since `offset` bytes into its log, without its JSON log lines: its error,
// at most max_lines of it. Empty when there is none.
std::string error_lines(const std::string& path, long offset, size_t max_lines);

}  // namespace conclave::cli
