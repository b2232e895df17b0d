#include "libs/base/thread_pool.h"

#include <sched.h>

#include <chrono>

#include "libs/base/check.h"
#include "libs/base/cpu_set.h"

namespace conclave {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Until ready() or the time is up. On a machine with fewer cores than runnable threads the yield lets them
// run.
template <class Ready>
bool spin_until(Nanos limit, const Ready& ready) {
  constexpr int kPausesPerLook = 32;
  if (ready()) return true;
  if (limit <= 0) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit);
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (ready()) return true;
      relax();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

ThreadPool::ThreadPool(unsigned threads, Nanos spin, std::span<const uint32_t> cpus) : spin_(spin) {
  CONCLAVE_CHECK(threads >= 1);
  workers_.reserve(threads - 1);
  for (unsigned i = 1; i < threads; ++i) {
    const std::vector<uint32_t> own =
        cpus.empty() ? std::vector<uint32_t>() : std::vector<uint32_t>{cpus[i % cpus.size()]};
    workers_.emplace_back([this, own] {
      // One that is not there is an error of the configuration, found before (bind_to_cpus of all of them).
      if (!own.empty()) bind_to_cpus(own, "cpus").IgnoreError();
      work();
    });
  }
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
  CONCLAVE_CHECK(count <= kMaxCount);
  if (count == 0) return;
  if (workers_.empty() || count == 1) {
    for (uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  CONCLAVE_CHECK(body_ == nullptr);
  body_ = &body;
  finished_.store(0, std::memory_order_relaxed);
  ticket_.store(uint64_t{count} << 32, std::memory_order_release);
  // Either the store to epoch_ is seen by a thread about to park, or its parked_ is seen here.
  epoch_.fetch_add(1);
  if (parked_.load() > 0) {
    { std::lock_guard lock(mutex_); }
    start_.notify_all();
  }
  drain();
  const auto all = [&] { return finished_.load() == count; };
  if (!spin_until(spin_, all)) {
    std::unique_lock lock(mutex_);
    caller_parked_ = true;
    done_.wait(lock, all);
    caller_parked_ = false;
  }
  body_ = nullptr;
}

void ThreadPool::drain() {
  for (;;) {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acquire);
    const auto count = static_cast<uint32_t>(ticket >> 32), i = static_cast<uint32_t>(ticket);
    if (i >= count) return;
    // The loop can't end before this i is finished, so body_ is its body.
    (*body_)(i);
    if (finished_.fetch_add(1) + 1 == count && caller_parked_.load()) {
      { std::lock_guard lock(mutex_); }
      done_.notify_one();
    }
  }
}

void ThreadPool::work() {
  uint64_t seen = 0;
  const auto called = [&] { return stop_.load() || epoch_.load() != seen; };
  for (;;) {
    if (!spin_until(spin_, called)) {
      std::unique_lock lock(mutex_);
      ++parked_;
      start_.wait(lock, called);
      --parked_;
    }
    if (stop_) return;
    seen = epoch_.load();
    drain();
  }
}

}  // namespace conclave
