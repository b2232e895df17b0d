// A SchedulerPort for tests. Requests are held until the test says what happens to them (accept, refuse,
// emit), or are answered by a thread of its own, one token a round for every open request.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "libs/ports/scheduler_port.h"

namespace conclave::testing {

inline float fake_logprob(TokenId token) { return -static_cast<float>(token) / 64; }

class FakeScheduler : public SchedulerPort {
 public:
  // What a request is answered with, without the end of sequence: tokens 0.. of the result, cut at
  // max_tokens.
  using Answer = std::function<std::vector<TokenId>(const AcceptedRequest&)>;

  FakeScheduler() = default;
  // Answers by itself, every choice alike, with made-up log-probabilities where they are asked for (see
  // fake_logprob); `pause` between rounds.
  explicit FakeScheduler(Answer answer, std::chrono::microseconds pause = {})
      : answer_(std::move(answer)), pause_(pause), thread_([this] { run(); }) {}
  ~FakeScheduler() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) override {
    std::lock_guard lock(mutex_);
    const RequestId id = request.id;
    order_.push_back(id);
    Entry entry;
    if (answer_) {
      entry.tokens = answer_(request);
      entry.finish = FinishReason::kStop;
      if (entry.tokens.size() >= request.sampling.max_tokens) {
        entry.tokens.resize(request.sampling.max_tokens);
        entry.finish = FinishReason::kLength;
      } else if (!request.sampling.stop_token_ids.empty()) {
        entry.tokens.push_back(request.sampling.stop_token_ids[0]);
      }
    }
    entry.request = std::move(request);
    entry.observer = std::move(observer);
    open_.emplace(id, std::move(entry));
    changed_.notify_all();
  }
  void cancel(RequestId id) override {
    std::lock_guard lock(mutex_);
    cancelled_.push_back(id);
    open_.erase(id);
    changed_.notify_all();
  }
  void cancel_choice(RequestId id, uint32_t choice) override {
    std::lock_guard lock(mutex_);
    cancelled_choices_.emplace_back(id, choice);
    changed_.notify_all();
  }
  FleetInfo fleet() const override {
    std::lock_guard lock(mutex_);
    return fleet_;
  }

  // --- the test's side ---
  void set_fleet(FleetInfo fleet) {
    std::lock_guard lock(mutex_);
    fleet_ = std::move(fleet);
  }
  // Waits for the nth submission (from 0); a default one when none came in 10 s.
  AcceptedRequest wait_submitted(size_t n = 0) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(10), [&] { return order_.size() > n; })) return {};
    const auto at = open_.find(order_[n]);
    return at == open_.end() ? AcceptedRequest{} : at->second.request;
  }
  bool wait_cancelled(size_t count, std::chrono::milliseconds wait = std::chrono::seconds(10)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, wait, [&] { return cancelled_.size() >= count; });
  }
  size_t cancelled() const {
    std::lock_guard lock(mutex_);
    return cancelled_.size();
  }
  std::vector<std::pair<RequestId, uint32_t>> cancelled_choices() const {
    std::lock_guard lock(mutex_);
    return cancelled_choices_;
  }
  size_t submitted() const {
    std::lock_guard lock(mutex_);
    return order_.size();
  }
  size_t open() const {
    std::lock_guard lock(mutex_);
    return open_.size();
  }
  void accept(RequestId id) {
    if (auto observer = find(id)) observer->on_accepted();
  }
  // One that answers by itself refuses everything from now on.
  void refuse_all(Status cause) {
    std::lock_guard lock(mutex_);
    refusal_ = std::move(cause);
  }
  void refuse(RequestId id, const Status& cause) {
    if (auto observer = find(id)) observer->on_refused(cause);
  }
  void emit(RequestId id, uint32_t index, std::vector<TokenId> tokens,
            FinishReason finish = FinishReason::kNone, std::string error = "", uint32_t choice = 0) {
    TokenEvent event;
    event.request = id;
    event.choice = choice;
    event.index = index;
    event.tokens = std::move(tokens);
    event.finish = finish;
    event.error = std::move(error);
    emit(event);
  }
  void emit(const TokenEvent& event) {
    if (auto observer = find(event.request)) observer->on_tokens(event);
  }

 private:
  struct Entry {
    AcceptedRequest request;
    std::shared_ptr<RequestObserver> observer;
    std::vector<TokenId> tokens;
    size_t next = 0;
    bool accepted = false;
    FinishReason finish = FinishReason::kNone;
  };

  static std::vector<TokenLogprob> alternatives(TokenId token, uint32_t count) {
    std::vector<TokenLogprob> out;
    for (uint32_t i = 0; i < count; ++i)
      out.push_back({token + i, fake_logprob(token) - static_cast<float>(i)});
    return out;
  }

  std::shared_ptr<RequestObserver> find(RequestId id) {
    std::lock_guard lock(mutex_);
    const auto at = open_.find(id);
    return at == open_.end() ? nullptr : at->second.observer;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || !open_.empty(); });
      if (stop_) return;
      std::vector<RequestId> ids;
      for (const auto& [id, entry] : open_) ids.push_back(id);
      for (const RequestId id : ids) {
        const auto at = open_.find(id);
        if (at == open_.end()) continue;
        Entry& entry = at->second;
        auto observer = entry.observer;
        if (!refusal_.ok()) {
          const Status cause = refusal_;
          open_.erase(at);
          lock.unlock();
          observer->on_refused(cause);
          lock.lock();
          continue;
        }
        const bool fresh = !std::exchange(entry.accepted, true);
        TokenEvent event;
        event.request = id;
        const AcceptedRequest& request = entry.request;
        const uint32_t choices = request.choices;
        TokenEvent prompt = event;
        if (fresh && request.sampling.prompt_logprobs) {
          prompt.prompt_start = 1;
          for (size_t i = 1; i < request.prompt.size(); ++i)
            prompt.prompt_logprobs.push_back(
                {fake_logprob(request.prompt[i]),
                 alternatives(request.prompt[i], request.sampling.prompt_top_logprobs)});
        }
        event.index = static_cast<uint32_t>(entry.next);
        if (entry.next < entry.tokens.size()) event.tokens = {entry.tokens[entry.next++]};
        if (request.sampling.logprobs) {
          for (const TokenId token : event.tokens) {
            event.logprobs.push_back(fake_logprob(token));
            event.top_logprobs.push_back(alternatives(token, request.sampling.top_logprobs));
          }
        }
        if (entry.next == entry.tokens.size()) event.finish = entry.finish;
        if (event.finish != FinishReason::kNone) open_.erase(at);
        lock.unlock();
        if (fresh) observer->on_accepted();
        if (!prompt.prompt_logprobs.empty()) observer->on_tokens(prompt);
        for (event.choice = 0; event.choice < choices; ++event.choice) observer->on_tokens(event);
        lock.lock();
      }
      if (pause_.count() > 0) changed_.wait_for(lock, pause_, [this] { return stop_; });
    }
  }

  const Answer answer_;
  const std::chrono::microseconds pause_{};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  FleetInfo fleet_{true, "", 0, "k1-test", "fp"};
  std::vector<RequestId> order_;
  std::vector<RequestId> cancelled_;
  std::vector<std::pair<RequestId, uint32_t>> cancelled_choices_;
  std::map<RequestId, Entry> open_;
  Status refusal_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace conclave::testing
