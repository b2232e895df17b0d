#include "libs/runtime/sim_executor.h"

#include <algorithm>
#include <utility>

#include "libs/base/check.h"

namespace conclave {

TimePoint SimExecutor::now() const { return world_.now(); }

void SimExecutor::post(Task task) {
  if (!alive_) return;
  TimePoint when = world_.now_;
  if (world_.options_.post_jitter > 0) {
    when += static_cast<Nanos>(world_.random_.below(static_cast<uint64_t>(world_.options_.post_jitter) + 1));
  }
  when = std::max(when, last_post_);
  last_post_ = when;
  posted_.push_back(std::move(task));
  world_.push(when, {this, 0});
}

TimerId SimExecutor::post_at(TimePoint when, Task task) {
  if (!alive_) return {};
  const uint64_t id = world_.next_timer_++;
  timers_.emplace(id, std::move(task));
  world_.push(std::max(when, world_.now_), {this, id});
  return TimerId{id};
}

void SimExecutor::cancel(TimerId timer) { auto node = timers_.extract(timer.value); }

SimWorld::SimWorld(uint64_t seed, Options options)
    : seed_(seed), options_(options), random_(seed), now_(options.start) {}

SimWorld::~SimWorld() {
  // Captures may own objects whose destructors post again; dead processes drop that.
  for (auto& process : processes_) kill(*process);
}

SimExecutor& SimWorld::add_process(std::string name) {
  processes_.push_back(std::unique_ptr<SimExecutor>(
      new SimExecutor(*this, std::move(name), static_cast<uint32_t>(processes_.size()))));
  return *processes_.back();
}

void SimWorld::kill(SimExecutor& process) {
  process.alive_ = false;
  std::erase_if(queue_, [&](const auto& entry) { return entry.second.process == &process; });
  // Moved out first: the captures' destructors may post or cancel.
  auto posted = std::exchange(process.posted_, {});
  auto timers = std::exchange(process.timers_, {});
}

void SimWorld::pause(SimExecutor& process, TimePoint until) {
  process.paused_until_ = std::max(process.paused_until_, until);
}

void SimWorld::push(TimePoint when, Event event) {
  const uint64_t tie = random_.next();
  queue_.emplace(Key{when, tie, serial_++}, event);
}

void SimWorld::note(uint64_t value) { trace_ = internal::mix64(trace_ * 0x9e3779b97f4a7c15ull + value + 1); }

TimePoint SimWorld::next_time() {
  while (!queue_.empty()) {
    const auto& [key, event] = *queue_.begin();
    const TimePoint when = std::get<0>(key);
    SimExecutor& process = *event.process;
    if (event.timer != 0 && !process.timers_.contains(event.timer)) {
      queue_.erase(queue_.begin());  // cancelled
    } else if (process.paused_until_ > when) {
      const Event later = event;
      queue_.erase(queue_.begin());
      push(process.paused_until_, later);
    } else {
      return when;
    }
  }
  return kNever;
}

bool SimWorld::step() {
  if (exhausted() || next_time() == kNever) return false;
  auto node = queue_.extract(queue_.begin());
  const TimePoint when = std::get<0>(node.key());
  const Event event = node.mapped();
  SimExecutor& process = *event.process;
  CONCLAVE_CHECK(when >= now_);
  now_ = when;
  ++steps_;
  note(static_cast<uint64_t>(now_));
  note(process.index_ * 2ull + (event.timer != 0));
  Task task;
  if (event.timer != 0) {
    task = std::move(process.timers_.extract(event.timer).mapped());
  } else {
    CONCLAVE_CHECK(!process.posted_.empty());
    task = std::move(process.posted_.front());
    process.posted_.pop_front();
  }
  task();
  task = nullptr;
  if (after_step_) after_step_();
  return true;
}

void SimWorld::run_until(TimePoint until) {
  while (next_time() <= until && step()) {
  }
  if (!exhausted() && until != kNever) now_ = std::max(now_, until);
}

bool SimWorld::run_until(const std::function<bool()>& done, TimePoint until) {
  if (done()) return true;
  while (next_time() <= until && step()) {
    if (done()) return true;
  }
  return false;
}

}  // namespace conclave
