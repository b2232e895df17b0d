// A few threads for work that may block for milliseconds (tokenizing, templates), behind a bounded queue, so
// that I/O threads never do it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "libs/base/bounded_queue.h"

namespace conclave::gateway {

class WorkPool {
 public:
  WorkPool(unsigned threads, size_t max_waiting) : queue_(max_waiting) {
    for (unsigned i = 0; i < threads; ++i) {
      threads_.emplace_back([this] {
        while (auto work = queue_.pop()) {
          (*work)();
          done_.fetch_add(1, std::memory_order_relaxed);
        }
      });
    }
  }
  // Runs what is queued, then ends.
  ~WorkPool() {
    queue_.close();
    for (std::thread& thread : threads_) thread.join();
  }
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // False at the bound; the work was not taken.
  bool try_submit(std::function<void()> work) { return queue_.try_push(std::move(work)); }
  size_t waiting() const { return queue_.size(); }
  // Pieces of work that were done.
  uint64_t done() const { return done_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> done_{0};
  BoundedQueue<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace conclave::gateway
