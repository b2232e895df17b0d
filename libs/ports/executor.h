// Where a core's code runs: one logical thread. A core does everything in tasks of its executor, reads time
// only from it, and so runs unchanged on a real event loop (libs/runtime/loop_executor.h) and in seeded
// virtual time (libs/runtime/sim_executor.h).
#pragma once

#include <cstdint>

#include "libs/base/clock.h"
#include "libs/base/task.h"

namespace conclave {

struct TimerId {
  uint64_t value = 0;
  explicit operator bool() const { return value != 0; }
};

class Executor {
 public:
  virtual ~Executor() = default;
  // Any thread (loop) or any task (simulation).
  virtual TimePoint now() const = 0;
  // Runs the task soon, after the current one returned, in the order of posting. Any thread.
  virtual void post(Task task) = 0;
  // Runs the task once at `when` or soon after. From the executor's own tasks only.
  virtual TimerId post_at(TimePoint when, Task task) = 0;
  // Forgets a timer that has not run; harmless when it has. From the executor's own tasks only.
  virtual void cancel(TimerId timer) = 0;
};

}  // namespace conclave
