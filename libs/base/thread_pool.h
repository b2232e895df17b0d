// A fixed pool for data-parallel loops. A thread with nothing to do looks for work a short while, giving way
// to whoever else wants the core, and then parks: waking a parked thread costs tens of microseconds, as long
// as a small matmul. The caller's thread takes part.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "libs/base/clock.h"

namespace conclave {

class ThreadPool {
 public:
  static constexpr Nanos kSpin = 50 * kMicrosecond;
  static constexpr uint32_t kMaxCount = (1u << 24) - 1;

  // `threads` counts the caller: 1 makes no thread. At least 1. `spin`: how long a thread looks for work, and
  // the caller for the end of others' work, before it parks.
  // `cpus`: thread i keeps to cpus[i % n], the caller being thread 0, which keeps itself; empty: where the
  // system puts them.
  explicit ThreadPool(unsigned threads, Nanos spin = kSpin, std::span<const uint32_t> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned threads() const { return static_cast<unsigned>(workers_.size()) + 1; }

  // Calls body(i) once for each i in [0, count), on any thread of the pool, and returns when all are done; it
  // doesn't wait for threads that took no part. count at most kMaxCount. Which thread ran an i must never
  // change a result. Not reentrant, one caller at a time; body must not throw.
  void parallel_for(uint32_t count, const std::function<void(uint32_t)>& body);

 private:
  void work();
  void drain();

  const Nanos spin_;
  std::vector<std::thread> workers_;
  const std::function<void(uint32_t)>* body_ = nullptr;  // of the loop whose ticket is out
  // Upper half the loop's count, lower half the next i. One word, so that a late thread that draws from it
  // learns whether its i belongs to the loop of that moment.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> finished_{0};  // bodies of the loop that have returned
  std::atomic<uint64_t> epoch_{0};     // counts loops
  std::atomic<bool> stop_{false};

  std::mutex mutex_;  // parking only
  std::condition_variable start_;
  std::condition_variable done_;
  std::atomic<uint32_t> parked_{0};
  std::atomic<bool> caller_parked_{false};
};

}  // namespace conclave
