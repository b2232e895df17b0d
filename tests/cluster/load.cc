#include "tests/cluster/load.h"

#include <algorithm>
#include <chrono>

#include "tests/cluster/cluster.h"

namespace conclave {
namespace {

constexpr size_t kMaxFaults = 8;  // that are told in words
constexpr std::chrono::milliseconds kAfterRefusal(50);

}  // namespace

struct Load::Shared {
  explicit Shared(std::vector<std::vector<TokenId>> tokens) : expected(std::move(tokens)) {}

  void wrong(const std::string& what) {
    ++report.wrong;
    if (report.faults.size() < kMaxFaults) report.faults.push_back(what);
  }

  const std::vector<std::vector<TokenId>> expected;
  std::mutex mutex;
  std::condition_variable changed;
  LoadReport report;
  std::map<RequestId, std::shared_ptr<Stream>> open;
  std::vector<RequestId> to_cancel;
  Nanos longest_gap = 0;
  bool stopping = false;
};

// One request; all of it is guarded by the shared mutex.
struct Load::Stream final : RequestObserver {
  Stream(std::shared_ptr<Shared> s, RequestId i, uint32_t k, size_t c)
      : shared(std::move(s)), id(i), kind(k), cancel_after(c) {}

  void on_accepted() override {
    std::lock_guard lock(shared->mutex);
    accepted = true;
  }
  void on_refused(const Status& cause) override {
    std::lock_guard lock(shared->mutex);
    if (accepted) return end("refused after it was accepted: " + std::string(message_of(cause)));
    ++shared->report.refused;
    end("");
  }
  void on_tokens(const TokenEvent& event) override {
    std::lock_guard lock(shared->mutex);
    const std::vector<TokenId>& expected = shared->expected[kind];
    if (ended) return shared->wrong(name() + ": an event after its end");
    if (event.index != seen) {
      return end("index " + std::to_string(event.index) + " after " + std::to_string(seen) + " tokens");
    }
    for (const TokenId token : event.tokens) {
      if (seen >= expected.size() || token != expected[seen]) {
        return end("another token at index " + std::to_string(seen));
      }
      ++seen;
    }
    if (!event.tokens.empty()) {
      const TimePoint now = steady_now();
      if (last != 0) shared->longest_gap = std::max(shared->longest_gap, now - last);
      last = now;
      shared->report.tokens += event.tokens.size();
    }
    if (event.finish == FinishReason::kCancelled && cancel_sent) {
      ++shared->report.cancelled;
      return end("");
    }
    if (event.finish == FinishReason::kLength && seen == expected.size()) {
      ++shared->report.completed;
      return end("");
    }
    if (event.finish != FinishReason::kNone) {
      return end("ended after " + std::to_string(seen) + " tokens: " + event.error);
    }
    if (seen >= cancel_after && !cancel_sent) {
      cancel_sent = true;
      shared->to_cancel.push_back(id);
      shared->changed.notify_all();
    }
  }

  std::string name() const { return "request of kind " + std::to_string(kind); }
  void end(const std::string& what) {
    if (!what.empty()) shared->wrong(name() + ": " + what);
    if (std::exchange(ended, true)) return;
    shared->open.erase(id);  // whoever calls still holds this
    shared->changed.notify_all();
  }

  const std::shared_ptr<Shared> shared;
  const RequestId id;
  const uint32_t kind;
  const size_t cancel_after;
  size_t seen = 0;
  TimePoint last = 0;
  bool accepted = false;
  bool cancel_sent = false;
  bool ended = false;
};

Load::Load(SchedulerPort& port, std::vector<std::vector<TokenId>> expected, LoadOptions options)
    : port_(port),
      options_(options),
      random_(options.seed),
      shared_(std::make_shared<Shared>(std::move(expected))),
      refill_([this] { refill(); }) {}

Load::~Load() {
  stop();
  std::vector<RequestId> left;
  {
    std::lock_guard lock(shared_->mutex);
    for (const auto& [id, stream] : shared_->open) left.push_back(id);
  }
  refill_.join();
  for (const RequestId id : left) port_.cancel(id);
}

void Load::refill() {
  std::unique_lock lock(shared_->mutex);
  for (uint64_t refused = 0; !shared_->stopping;) {
    if (std::exchange(refused, shared_->report.refused) != shared_->report.refused) {
      shared_->changed.wait_for(lock, kAfterRefusal, [this] { return shared_->stopping; });
      continue;
    }
    std::vector<RequestId> to_cancel;
    to_cancel.swap(shared_->to_cancel);
    std::vector<std::pair<AcceptedRequest, std::shared_ptr<Stream>>> fresh;
    while (shared_->open.size() < options_.concurrency) {
      const auto kind = static_cast<uint32_t>(next_++ % shared_->expected.size());
      const size_t tokens = shared_->expected[kind].size();
      const size_t cancel_after =
          random_.chance(options_.cancelled) ? 1 + random_.below(tokens / 2) : tokens + 1;
      AcceptedRequest request = numbered_request(kind, static_cast<uint32_t>(tokens));
      auto stream = std::make_shared<Stream>(shared_, request.id, kind, cancel_after);
      shared_->open.emplace(request.id, stream);
      fresh.emplace_back(std::move(request), std::move(stream));
    }
    lock.unlock();  // the port may call an observer from inside
    for (const RequestId id : to_cancel) port_.cancel(id);
    for (auto& [request, stream] : fresh) port_.submit(std::move(request), stream);
    lock.lock();
    shared_->changed.wait(lock, [this] {
      return shared_->stopping || !shared_->to_cancel.empty() || shared_->open.size() < options_.concurrency;
    });
  }
}

void Load::mark() {
  std::lock_guard lock(shared_->mutex);
  shared_->longest_gap = 0;
}

Nanos Load::longest_gap() const {
  std::lock_guard lock(shared_->mutex);
  Nanos longest = shared_->longest_gap;
  for (const auto& [id, stream] : shared_->open) {
    if (stream->last != 0) longest = std::max(longest, steady_now() - stream->last);
  }
  return longest;
}

bool Load::all_moved(TimePoint since) const {
  std::lock_guard lock(shared_->mutex);
  return std::all_of(shared_->open.begin(), shared_->open.end(), [since](const auto& entry) {
    return entry.second->last == 0 || entry.second->last > since;
  });
}

size_t Load::running() const {
  std::lock_guard lock(shared_->mutex);
  return static_cast<size_t>(std::count_if(shared_->open.begin(), shared_->open.end(),
                                           [](const auto& entry) { return entry.second->seen > 0; }));
}

LoadReport Load::report() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->report;
}

void Load::stop() {
  std::lock_guard lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
}

bool Load::over() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->stopping && shared_->open.empty();
}

}  // namespace conclave
