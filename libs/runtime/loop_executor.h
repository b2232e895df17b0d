// The executor of a real process: tasks, timers and pollers (UCX) on one thread.
//
// The loop runs what was posted, then due timers, then asks every poller for progress. With nothing to do it
// spins for a short while, yielding the core at each turn, then arms the pollers and sleeps until a post, a
// timer or a poller's file descriptor wakes it. An idle loop uses no CPU.
//
// The task queue has no bound of its own: a post can't fail, so the bound is the poster's (each poster in
// this code base holds a bounded queue or coalesces its posts to one). `depth()` is exported so that a leak
// of that rule shows.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "libs/ports/executor.h"

namespace conclave {

// A source of events that must be polled, on the loop's thread alone. Not owned by the loop.
class Poller {
 public:
  virtual ~Poller() = default;
  // Does what can be done without waiting; true if it did something.
  virtual bool progress() = 0;
  // Readable when progress() has something to do after arm(); -1: none, the poller is then only asked when
  // awake.
  virtual int fd() = 0;
  // Called before the loop sleeps; false when there is work after all, and the loop then goes round again.
  virtual bool arm() = 0;
};

class LoopExecutor final : public Executor {
 public:
  struct Options {
    // How long an idle loop spins (yielding) before it sleeps; 0: never. The time used adapts between 0 and
    // this: it halves when a spin was in vain, is restored when work came soon after, and is 0 for a while
    // when a yield shows that others compute on the core.
    Nanos spin_ns = 50 * kMicrosecond;
  };

  LoopExecutor() : LoopExecutor(Options{}) {}
  explicit LoopExecutor(Options options);
  ~LoopExecutor() override;
  LoopExecutor(const LoopExecutor&) = delete;
  LoopExecutor& operator=(const LoopExecutor&) = delete;

  TimePoint now() const override { return steady_now(); }
  void post(Task task) override;
  // post_at, cancel and the pollers: from the loop's own tasks, or from anywhere while no thread is inside
  // run().
  TimerId post_at(TimePoint when, Task task) override;
  void cancel(TimerId timer) override;
  void add_poller(Poller* poller);
  void remove_poller(Poller* poller);

  // Runs on the calling thread until stop(). May be called again afterwards.
  void run();
  // Runs until `done` (asked after each turn) or for `limit`; true if done. For programs' ends and tests.
  bool run_until(const std::function<bool()>& done, Nanos limit);
  // Any thread, also from a signal handler: run() returns after its current turn. A stop before run() counts.
  void stop();
  // Runs `task` on the loop's thread and returns when it has run; directly when called on that thread. Any
  // thread, while some thread runs the loop.
  void call(const Task& task);
  bool on_loop_thread() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // Tasks posted and not yet run. Any thread.
  size_t depth() const { return depth_.load(std::memory_order_relaxed); }
  // Times the loop went to sleep. Any thread.
  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  using Timers = std::map<std::pair<TimePoint, uint64_t>, Task>;
  using TimerTimes = std::unordered_map<uint64_t, TimePoint>;

  bool turn();                    // one pass over tasks, timers, pollers; true if anything ran
  void idle(TimePoint deadline);  // spins or sleeps, at most until `deadline`
  void sleep(TimePoint deadline);
  void wake();
  bool run_due_timers();
  void recycle(Timers::node_type timer);
  void forget_time(TimerTimes::iterator it);

  const Options options_;
  int wake_fd_ = -1;  // eventfd
  std::atomic<bool> stop_{false};
  std::atomic<bool> sleeping_{false};
  std::atomic<size_t> depth_{0};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<std::thread::id> owner_{};

  mutable std::mutex mutex_;
  std::vector<Task> inbox_;  // guarded by mutex_

  std::vector<Task> batch_;  // the loop's thread only, from here on
  Timers timers_;
  TimerTimes timer_times_;
  // Of timers that are over, kept for their memory.
  std::vector<Timers::node_type> spare_timers_;
  std::vector<TimerTimes::node_type> spare_times_;
  uint64_t next_timer_ = 1;
  std::vector<Poller*> pollers_;
  std::vector<pollfd> fds_;  // of a sleep
  Nanos spin_now_ = 0;
  TimePoint idle_since_ = 0;  // 0: the last turn did something
  TimePoint slept_at_ = 0;
  TimePoint contended_until_ = 0;  // no spinning before: the core is needed by others
};

// A loop on a thread of its own; stops and joins when destroyed.
class LoopThread {
 public:
  LoopThread() : LoopThread(LoopExecutor::Options{}) {}
  explicit LoopThread(LoopExecutor::Options options) : loop_(options), thread_([this] { loop_.run(); }) {}
  ~LoopThread() { stop(); }
  LoopExecutor& loop() { return loop_; }
  // Returns when the thread has ended; tasks that have not run by then never run.
  void stop() {
    loop_.stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  LoopExecutor loop_;
  std::thread thread_;
};

}  // namespace conclave
