// Seeded virtual time: several simulated processes, each an Executor, on one event queue and no threads. A
// run is a function of its seed; two runs with the same seed and the same code have the same trace hash.
//
// Order: an event runs at its virtual time; events of one time run in a seeded order, except that what is
// posted to one process runs in the order of posting (the executor's contract). Time advances only between
// events.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "libs/base/random.h"
#include "libs/ports/executor.h"

namespace conclave {

class SimWorld;

// One simulated process. Owned by its world and valid as long as the world, also after its process was
// killed: what is then posted to it is dropped.
class SimExecutor final : public Executor {
 public:
  TimePoint now() const override;
  void post(Task task) override;  // from any task of the world
  TimerId post_at(TimePoint when, Task task) override;
  void cancel(TimerId timer) override;

  const std::string& name() const { return name_; }
  bool alive() const { return alive_; }

 private:
  friend class SimWorld;
  SimExecutor(SimWorld& world, std::string name, uint32_t index)
      : world_(world), name_(std::move(name)), index_(index) {}

  SimWorld& world_;
  const std::string name_;
  const uint32_t index_;
  bool alive_ = true;
  TimePoint paused_until_ = 0;
  TimePoint last_post_ = 0;                    // posts keep their order under jitter
  std::deque<Task> posted_;                    // one queue event each
  std::unordered_map<uint64_t, Task> timers_;  // by id; a queue event without its entry here is void
};

class SimWorld {
 public:
  struct Options {
    TimePoint start = 1 * kSecond;
    Nanos post_jitter = 0;            // each post is delayed by a uniform time up to this
    uint64_t max_steps = 50'000'000;  // run_* stop there; exhausted() says so
  };

  explicit SimWorld(uint64_t seed) : SimWorld(seed, Options{}) {}
  SimWorld(uint64_t seed, Options options);
  ~SimWorld();

  // A new process. Names are for people; a restarted process is a new one, maybe with an old name.
  SimExecutor& add_process(std::string name);
  // SIGKILL: drops its tasks and timers for ever (their captures are destroyed now). Destroying the objects
  // of the process is the caller's; inside a task of that very process that must wait until the task has
  // returned.
  void kill(SimExecutor& process);
  // SIGSTOP until `until`: its events wait, in order.
  void pause(SimExecutor& process, TimePoint until);

  // Runs the next event; false when there is none or the step limit is reached.
  bool step();
  // Runs every event up to and including time `until`, which is then the time.
  void run_until(TimePoint until);
  // Runs until `done` (asked before the first and after each event); false when the queue ran dry, `until`
  // passed or the step limit was reached.
  bool run_until(const std::function<bool()>& done, TimePoint until = kNever);

  TimePoint now() const { return now_; }
  uint64_t steps() const { return steps_; }
  bool exhausted() const { return steps_ >= options_.max_steps; }
  size_t pending() const { return queue_.size(); }
  uint64_t seed() const { return seed_; }
  // Covers time, process and kind of each event run so far, and what notes() added.
  uint64_t trace_hash() const { return trace_; }
  // Adds to the trace hash: cores' decisions can be part of "the same run".
  void note(uint64_t value);
  // The world's own generator, for harness and models that must be functions of the seed.
  SplitMix64& random() { return random_; }
  // Called after each event: invariant checkers.
  void set_after_step(std::function<void()> check) { after_step_ = std::move(check); }

 private:
  friend class SimExecutor;
  struct Event {
    SimExecutor* process;
    uint64_t timer;  // 0: the front of process->posted_
  };
  using Key = std::tuple<TimePoint, uint64_t, uint64_t>;  // time, seeded tie-break, serial

  void push(TimePoint when, Event event);
  // The time of the next event that will run, past cancelled timers; kNever when there is none.
  TimePoint next_time();

  const uint64_t seed_;
  const Options options_;
  SplitMix64 random_;
  TimePoint now_;
  uint64_t steps_ = 0;
  uint64_t serial_ = 0;
  uint64_t next_timer_ = 1;
  uint64_t trace_ = 0;
  std::map<Key, Event> queue_;
  std::vector<std::unique_ptr<SimExecutor>> processes_;
  std::function<void()> after_step_;
};

}  // namespace conclave
