// A fixed pool for data-parallel loops. Threads park when there is nothing to do; spinning barriers collapse
// on small machines where several processes share few cores. The caller's thread takes part.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace conclave {

class ThreadPool {
 public:
  // `threads` counts the caller: 1 makes no thread. At least 1.
  explicit ThreadPool(unsigned threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned threads() const { return static_cast<unsigned>(workers_.size()) + 1; }

  // Calls body(i) once for each i in [0, count), on any thread of the pool, and returns when all are done.
  // Which thread ran an i must never change a result. Not reentrant, one caller at a time; body must not
  // throw.
  void parallel_for(uint32_t count, const std::function<void(uint32_t)>& body);

 private:
  void work();
  void drain();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(uint32_t)>* body_ = nullptr;
  uint32_t count_ = 0;
  std::atomic<uint32_t> next_{0};
  uint64_t generation_ = 0;
  unsigned busy_ = 0;
  bool stop_ = false;
};

}  // namespace conclave
