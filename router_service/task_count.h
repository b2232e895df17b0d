// Counts work that others run for an object, so that the object can wait for it before it goes.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

namespace conclave::router {

// Any thread. Outlives what enter() returned.
class TaskCount {
 public:
  // To be held by the task; dropped when it is done, or was never run.
  std::shared_ptr<void> enter() {
    {
      std::lock_guard lock(mutex_);
      ++running_;
    }
    return std::shared_ptr<void>(this, [](void* self) { static_cast<TaskCount*>(self)->leave(); });
  }
  // Returns when nothing is running.
  void wait() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void leave() {
    std::lock_guard lock(mutex_);  // held while notifying: the waiter may destroy this as soon as it wakes
    if (--running_ == 0) idle_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable idle_;
  size_t running_ = 0;
};

}  // namespace conclave::router
