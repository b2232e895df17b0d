// Whether a process gets on with what it has to do. Executors are asked by a task of ours that is to run
// soon; work is watched by a figure that grows with it. What has stood still for the limit is logged once,
// shown as the gauge conclave_stalled_parts, and named to health checks.
//
// The looks come from a thread of the watch's own, a few within the limit, so that nothing is done on the way
// of requests. A process that was itself stopped blames nobody for that time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/telemetry/metrics.h"

namespace conclave {

class ProgressWatch {
 public:
  // Nothing is watched with a limit of 0.
  explicit ProgressWatch(Nanos limit);
  ~ProgressWatch();
  ProgressWatch(const ProgressWatch&) = delete;
  ProgressWatch& operator=(const ProgressWatch&) = delete;

  // Begins to look, with a thread; else look() is called by hand.
  void start(MetricsRegistry& metrics);

  struct Work {
    bool busy = false;
    uint64_t done = 0;   // any change is progress
    std::string detail;  // for people: what it waits for
  };
  // Watched until the returned guard is destroyed, which waits for a look in progress; the functions are
  // called on the watch's thread. `post` is to have its task run on the executor, once and soon.
  [[nodiscard]] std::shared_ptr<void> executor(std::string what,
                                               std::function<void(std::function<void()>)> post);
  // `threads`: it is threads that stand still, as with an executor.
  [[nodiscard]] std::shared_ptr<void> work(std::string what, std::function<Work()> look,
                                           bool threads = false);

  // Times only go forward. One thread at a time.
  void look(TimePoint now);

  struct Stall {
    std::string what;
    std::string detail;
    Nanos time = 0;
    bool executor = false;  // its thread itself is stuck: nothing but a restart helps
  };
  // As of the last look. Any thread.
  std::vector<Stall> stalls() const;
  // "the scheduler's loop has made no progress for 31 s", for health checks.
  static std::string text(const Stall& stall);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace conclave
