#include "libs/telemetry/progress_watch.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "libs/telemetry/log.h"

namespace conclave {
namespace {

constexpr Nanos kLooks = 8;  // within the limit
constexpr Nanos kShortestPeriod = 5 * kMillisecond;
constexpr Nanos kLongestPeriod = 5 * kSecond;

}  // namespace

struct ProgressWatch::Impl {
  struct Part {
    std::string what;
    std::function<void(std::function<void()>)> post;  // of an executor
    std::function<Work()> look;                       // of work
    std::shared_ptr<std::atomic<bool>> ran;           // an executor's task; null: none is out
    std::optional<uint64_t> done;
    TimePoint since = 0;  // without progress
    std::string detail;
    bool stalled = false;
    bool threads = false;
  };

  explicit Impl(Nanos l) : limit(l), period(std::clamp(l / kLooks, kShortestPeriod, kLongestPeriod)) {}

  void look_at(Part& part, TimePoint now) {
    bool progress = true;
    if (part.post) {
      if (part.ran == nullptr || part.ran->load()) {
        part.ran = std::make_shared<std::atomic<bool>>(false);
        part.post([ran = part.ran] { ran->store(true); });
      } else {
        progress = false;
      }
    } else {
      Work work = part.look();
      progress = !work.busy || part.done != work.done;
      part.done = work.done;
      part.detail = std::move(work.detail);
    }
    if (progress) part.since = now;
  }

  void look(TimePoint now) {
    std::lock_guard looking(look_mutex);
    const Nanos late = last_look == 0 ? 0 : now - last_look - period;
    last_look = now;
    std::vector<Stall> found;
    for (auto& [number, part] : parts) {
      if (part.since == 0) part.since = now;
      if (late > period) part.since = std::min(now, part.since + late);
      look_at(part, now);
      const Nanos time = now - part.since;
      const bool is_stalled = time >= limit;
      if (is_stalled) found.push_back({part.what, part.detail, time, part.threads});
      if (is_stalled == std::exchange(part.stalled, is_stalled)) continue;
      if (is_stalled) {
        log_error(LogModule::kService, "no progress",
                  {{"part", part.what}, {"detail", part.detail}, {"stalled_ms", time / kMillisecond}});
      } else {
        log_info(LogModule::kService, "progress again", {{"part", part.what}});
      }
    }
    std::lock_guard lock(mutex);
    shown = std::move(found);
  }

  std::shared_ptr<void> add(const std::shared_ptr<Impl>& self, Part part) {
    uint64_t number = 0;
    {
      std::lock_guard looking(look_mutex);
      number = next++;
      parts.emplace(number, std::move(part));
    }
    return std::shared_ptr<void>(nullptr, [self, number](void*) {
      std::lock_guard looking(self->look_mutex);
      self->parts.erase(number);
    });
  }

  const Nanos limit;
  const Nanos period;

  std::mutex look_mutex;  // held while looking
  std::map<uint64_t, Part> parts;
  uint64_t next = 1;
  TimePoint last_look = 0;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<Stall> shown;
  bool stopping = false;

  std::thread thread;
  std::unique_ptr<MetricsRegistry::CollectorHandle> collector;
};

ProgressWatch::ProgressWatch(Nanos limit) : impl_(std::make_shared<Impl>(limit)) {}

ProgressWatch::~ProgressWatch() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
  impl_->collector.reset();
}

void ProgressWatch::start(MetricsRegistry& metrics) {
  if (impl_->limit <= 0) return;
  impl_->collector = metrics.add_collector([impl = impl_.get()](MetricSink& sink) {
    std::lock_guard lock(impl->mutex);
    double executors = 0, work = 0;
    for (const Stall& stall : impl->shown) ++(stall.executor ? executors : work);
    sink.gauge("conclave_stalled_parts", "Parts of this process without progress though they have work",
               executors, {{"kind", "executor"}});
    sink.gauge("conclave_stalled_parts", "Parts of this process without progress though they have work", work,
               {{"kind", "work"}});
  });
  impl_->thread = std::thread([impl = impl_.get()] {
    std::unique_lock lock(impl->mutex);
    while (!impl->stopping) {
      lock.unlock();
      impl->look(steady_now());
      lock.lock();
      impl->changed.wait_for(lock, std::chrono::nanoseconds(impl->period), [impl] { return impl->stopping; });
    }
  });
}

std::shared_ptr<void> ProgressWatch::executor(std::string what,
                                              std::function<void(std::function<void()>)> post) {
  Impl::Part part;
  part.what = std::move(what);
  part.post = std::move(post);
  part.threads = true;
  return impl_->add(impl_, std::move(part));
}

std::shared_ptr<void> ProgressWatch::work(std::string what, std::function<Work()> look, bool threads) {
  Impl::Part part;
  part.what = std::move(what);
  part.look = std::move(look);
  part.threads = threads;
  return impl_->add(impl_, std::move(part));
}

void ProgressWatch::look(TimePoint now) { impl_->look(now); }

std::vector<ProgressWatch::Stall> ProgressWatch::stalls() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->shown;
}

std::string ProgressWatch::text(const Stall& stall) {
  std::string out = stall.what + " has made no progress for " + std::to_string(stall.time / kSecond) + " s";
  if (!stall.detail.empty()) out += ": " + stall.detail;
  return out;
}

}  // namespace conclave
