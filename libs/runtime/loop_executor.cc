#include "libs/runtime/loop_executor.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <ctime>
#include <iterator>
#include <utility>

#include "libs/base/check.h"

namespace conclave {

namespace {
constexpr Nanos kContendedYield = 20 * kMicrosecond;  // a yield that took longer let somebody else compute
constexpr size_t kMaxSpareTimers = 4096;
constexpr Nanos kContendedPause = 50 * kMillisecond;  // how long the loop then does not spin
}  // namespace

LoopExecutor::LoopExecutor(Options options) : options_(options), spin_now_(options.spin_ns) {
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  CONCLAVE_CHECK(wake_fd_ >= 0);
}

LoopExecutor::~LoopExecutor() { ::close(wake_fd_); }

void LoopExecutor::wake() {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the loop wakes anyway.
  [[maybe_unused]] ssize_t n = ::write(wake_fd_, &one, sizeof one);
}

void LoopExecutor::post(Task task) {
  depth_.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(task));
  }
  // The loop sets sleeping_ before it looks at the inbox for the last time under the mutex, so either it sees
  // the task or we see the flag.
  if (sleeping_.load(std::memory_order_seq_cst)) wake();
}

TimerId LoopExecutor::post_at(TimePoint when, Task task) {
  const uint64_t id = next_timer_++;
  if (spare_timers_.empty()) {
    timers_.emplace(std::pair(when, id), std::move(task));
  } else {
    spare_timers_.back().key() = {when, id};
    spare_timers_.back().mapped() = std::move(task);
    timers_.insert(std::move(spare_timers_.back()));
    spare_timers_.pop_back();
  }
  if (spare_times_.empty()) {
    timer_times_.emplace(id, when);
  } else {
    spare_times_.back().key() = id;
    spare_times_.back().mapped() = when;
    timer_times_.insert(std::move(spare_times_.back()));
    spare_times_.pop_back();
  }
  return TimerId{id};
}

void LoopExecutor::cancel(TimerId timer) {
  auto it = timer_times_.find(timer.value);
  if (it == timer_times_.end()) return;
  auto node = timers_.extract(std::pair(it->second, timer.value));
  forget_time(it);  // before the task dies: its captures may call back
  recycle(std::move(node));
}

void LoopExecutor::recycle(Timers::node_type timer) {
  { const Task over = std::exchange(timer.mapped(), nullptr); }  // its captures may call back
  if (spare_timers_.size() < kMaxSpareTimers) spare_timers_.push_back(std::move(timer));
}

void LoopExecutor::forget_time(TimerTimes::iterator it) {
  if (spare_times_.size() < kMaxSpareTimers) {
    spare_times_.push_back(timer_times_.extract(it));
  } else {
    timer_times_.erase(it);
  }
}

void LoopExecutor::add_poller(Poller* poller) { pollers_.push_back(poller); }

void LoopExecutor::remove_poller(Poller* poller) { std::erase(pollers_, poller); }

void LoopExecutor::stop() {
  stop_.store(true, std::memory_order_seq_cst);
  wake();
}

void LoopExecutor::run() {
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  while (!stop_.load(std::memory_order_relaxed)) {
    if (!turn() && !stop_.load(std::memory_order_relaxed)) idle(kNever);
  }
  stop_.store(false, std::memory_order_relaxed);
  owner_.store(std::thread::id{}, std::memory_order_relaxed);
}

bool LoopExecutor::run_until(const std::function<bool()>& done, Nanos limit) {
  const TimePoint deadline = now() + limit;
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  bool reached = done();
  while (!reached && now() < deadline && !stop_.load(std::memory_order_relaxed)) {
    const bool worked = turn();
    reached = done();
    if (!worked && !reached) idle(deadline);
  }
  stop_.store(false, std::memory_order_relaxed);
  owner_.store(std::thread::id{}, std::memory_order_relaxed);
  return reached;
}

void LoopExecutor::call(const Task& task) {
  if (on_loop_thread()) {
    task();
    return;
  }
  std::mutex mutex;
  std::condition_variable ready;
  bool done = false;
  post([&] {
    task();
    std::lock_guard lock(mutex);
    done = true;
    ready.notify_one();  // under the lock: the waiter's variables die once it sees `done`
  });
  std::unique_lock lock(mutex);
  ready.wait(lock, [&] { return done; });
}

bool LoopExecutor::turn() {
  bool worked = false;
  {
    std::lock_guard lock(mutex_);
    batch_.swap(inbox_);
  }
  // A batch, not "until empty": tasks that post themselves must not starve timers and pollers.
  size_t ran = 0;
  while (ran < batch_.size()) {
    const Task task = std::move(batch_[ran++]);
    depth_.fetch_sub(1, std::memory_order_relaxed);
    task();
    worked = true;
    if (stop_.load(std::memory_order_relaxed)) break;
  }
  const bool stopped = ran < batch_.size();
  if (stopped) {  // in between: the rest stays queued, in order
    std::lock_guard lock(mutex_);
    inbox_.insert(inbox_.begin(), std::make_move_iterator(batch_.begin() + static_cast<ptrdiff_t>(ran)),
                  std::make_move_iterator(batch_.end()));
  }
  batch_.clear();
  if (stopped) return true;
  worked |= run_due_timers();
  for (size_t i = 0; i < pollers_.size(); ++i)
    worked |= pollers_[i]->progress();  // may add or remove pollers
  if (worked) {
    if (idle_since_ != 0) {
      const TimePoint t = now();
      // Work came while spinning, or so soon after that spinning on would have paid.
      if (t >= contended_until_ && (slept_at_ == 0 || t - slept_at_ < 2 * options_.spin_ns)) {
        spin_now_ = options_.spin_ns;
      }
      slept_at_ = 0;
      idle_since_ = 0;
    }
  }
  return worked;
}

bool LoopExecutor::run_due_timers() {
  if (timers_.empty()) return false;
  bool worked = false;
  const TimePoint t = now();
  const uint64_t newest = next_timer_;  // timers set by these timers wait for the next turn
  while (!timers_.empty()) {
    auto it = timers_.begin();
    if (it->first.first > t || it->first.second >= newest) break;
    auto node = timers_.extract(it);
    forget_time(timer_times_.find(node.key().second));
    node.mapped()();
    recycle(std::move(node));
    worked = true;
  }
  return worked;
}

void LoopExecutor::idle(TimePoint deadline) {
  const TimePoint t = now();
  if (idle_since_ == 0) idle_since_ = t;
  if (t - idle_since_ < spin_now_) {
    sched_yield();
    const TimePoint after = now();
    if (after - t > kContendedYield) {
      // Others compute on this core. A yielding loop waits a whole time slice for each of its turns; one that
      // sleeps is run at once when its event comes.
      spin_now_ = 0;
      contended_until_ = after + kContendedPause;
    }
    return;
  }
  for (Poller* poller : pollers_) {
    if (!poller->arm()) return;
  }
  spin_now_ /= 2;
  slept_at_ = t;
  sleep(deadline);
}

void LoopExecutor::sleep(TimePoint deadline) {
  sleeping_.store(true, std::memory_order_seq_cst);
  bool empty;
  {
    std::lock_guard lock(mutex_);
    empty = inbox_.empty();
  }
  if (empty && !stop_.load(std::memory_order_seq_cst)) {
    fds_.assign(1, {wake_fd_, POLLIN, 0});
    for (Poller* poller : pollers_) {
      if (int fd = poller->fd(); fd >= 0) fds_.push_back({fd, POLLIN, 0});
    }
    if (!timers_.empty()) deadline = std::min(deadline, timers_.begin()->first.first);
    timespec wait{};
    timespec* limit = nullptr;
    if (deadline != kNever) {
      const Nanos left = std::max<Nanos>(0, deadline - now());
      wait.tv_sec = left / kSecond;
      wait.tv_nsec = left % kSecond;
      limit = &wait;
    }
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    ::ppoll(fds_.data(), fds_.size(), limit, nullptr);  // EINTR is a wake-up like any other
  }
  sleeping_.store(false, std::memory_order_seq_cst);
  uint64_t count;
  [[maybe_unused]] ssize_t n = ::read(wake_fd_, &count, sizeof count);
}

}  // namespace conclave
