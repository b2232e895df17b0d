#include "libs/base/thread_pool.h"

#include "libs/base/check.h"

namespace conclave {

ThreadPool::ThreadPool(unsigned threads) {
  CONCLAVE_CHECK(threads >= 1);
  workers_.reserve(threads - 1);
  for (unsigned i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(uint32_t count, const std::function<void(uint32_t)>& body) {
  if (count == 0) return;
  if (workers_.empty() || count == 1) {
    for (uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    CONCLAVE_CHECK(body_ == nullptr);
    body_ = &body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_ = static_cast<unsigned>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  drain();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return busy_ == 0; });
  body_ = nullptr;
}

void ThreadPool::drain() {
  for (;;) {
    const uint32_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= count_) return;
    (*body_)(i);
  }
}

void ThreadPool::work() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    lock.unlock();
    drain();
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace conclave
