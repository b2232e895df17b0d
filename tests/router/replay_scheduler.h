// A SchedulerPort for tests of resumable streams: it answers with a script, as far as a gate allows, keeps
// every request, and gives it to whoever adopts it. Two routers may share it.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "libs/model/no_such_stream.h"
#include "libs/ports/scheduler_port.h"
#include "tests/router/fake_scheduler.h"

namespace conclave::testing {

class ReplayScheduler : public SchedulerPort {
 public:
  // The tokens of one choice; cut at max_tokens, else followed by a stop token.
  using Script = std::function<std::vector<TokenId>(const AcceptedRequest&, uint32_t choice)>;

  explicit ReplayScheduler(Script script) : script_(std::move(script)) {}

  // How many tokens of each choice may be said so far; of all there are from now on.
  void open_to(size_t tokens) {
    std::lock_guard lock(mutex_);
    gate_ = tokens;
    for (auto& [id, entry] : entries_) say(id, entry);
  }
  // Whole choices one after the other, or token by token in turns.
  void set_one_by_one(bool one_by_one) {
    std::lock_guard lock(mutex_);
    one_by_one_ = one_by_one;
  }
  void keep_none() {
    std::lock_guard lock(mutex_);
    keeps_ = false;
  }
  void set_fleet(FleetInfo fleet) {
    std::lock_guard lock(mutex_);
    fleet_ = std::move(fleet);
  }
  void fail(RequestId id, std::string why) {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_.at(id);
    entry.failure = std::move(why);
    say(id, entry);
  }
  RequestId last() {
    std::lock_guard lock(mutex_);
    return last_;
  }
  size_t cancels() {
    std::lock_guard lock(mutex_);
    return cancels_;
  }
  struct Releases {
    size_t unfinished = 0, finished = 0;
  };
  Releases releases() {
    std::lock_guard lock(mutex_);
    return releases_;
  }
  std::vector<std::pair<RequestId, uint32_t>> cancelled_choices() {
    std::lock_guard lock(mutex_);
    return cancelled_choices_;
  }

  // --- SchedulerPort
  void submit(AcceptedRequest request, std::shared_ptr<RequestObserver> observer) override {
    std::lock_guard lock(mutex_);
    const RequestId id = last_ = request.id;
    Entry& entry = entries_[id];
    for (uint32_t i = 0; i < request.choices; ++i) {
      Choice& choice = entry.choices.emplace_back();
      choice.tokens = script_(request, i);
      choice.finish = FinishReason::kStop;
      if (choice.tokens.size() >= request.sampling.max_tokens) {
        choice.tokens.resize(request.sampling.max_tokens);
        choice.finish = FinishReason::kLength;
      } else if (!request.sampling.stop_token_ids.empty()) {
        choice.tokens.push_back(request.sampling.stop_token_ids[0]);
      }
    }
    if (!keeps_) request.router_context.clear();
    entry.request = std::move(request);
    entry.observer = observer;
    if (!entry.request.router_context.empty()) observer->on_resumable();
    observer->on_accepted();
    say_prompt(id, entry);
    say(id, entry);
  }
  void cancel(RequestId id) override {
    std::lock_guard lock(mutex_);
    ++cancels_;
    entries_.erase(id);
  }
  void cancel_choice(RequestId id, uint32_t choice) override {
    std::lock_guard lock(mutex_);
    cancelled_choices_.emplace_back(id, choice);
    const auto at = entries_.find(id);
    if (at == entries_.end()) return;
    Choice& of = at->second.choices.at(choice);
    of.tokens.resize(of.said);
    of.finish = FinishReason::kCancelled;
    say(id, at->second);
  }
  void adopt(RequestId id, std::string tenant, std::shared_ptr<RequestObserver> observer) override {
    std::lock_guard lock(mutex_);
    const auto at = entries_.find(id);
    if (at == entries_.end() || at->second.request.tenant != tenant) {
      return observer->on_refused(no_such_stream());
    }
    Entry& entry = at->second;
    if (entry.request.router_context.empty()) {
      return observer->on_refused(failed_precondition("it is not resumable"));
    }
    if (const auto before = std::exchange(entry.observer, nullptr)) {
      for (uint32_t i = 0; i < entry.choices.size(); ++i) {
        if (entry.choices[i].ended) continue;
        TokenEvent event = event_of(id, i);
        event.index = static_cast<uint32_t>(entry.choices[i].said);
        event.finish = FinishReason::kCancelled;
        event.error = "another connection has taken the stream over";
        before->on_tokens(event);
      }
    }
    entry.observer = observer;
    AdoptedRequest adopted;
    adopted.request = entry.request;
    for (Choice& choice : entry.choices) {
      adopted.generated += choice.said;
      choice.told = 0;
      choice.ended = false;
    }
    observer->on_adopted(adopted);
    say_prompt(id, entry);
    for (uint32_t i = 0; i < entry.choices.size(); ++i) tell(id, entry, i);
    say(id, entry);
  }
  void release(RequestId id, const RequestObserver& observer, bool finished) override {
    std::lock_guard lock(mutex_);
    const auto at = entries_.find(id);
    if (at == entries_.end() || at->second.observer.get() != &observer) return;
    ++(finished ? releases_.finished : releases_.unfinished);
    at->second.observer = nullptr;
    if (!finished) return;
    for (Choice& choice : at->second.choices) {
      if (choice.said == choice.tokens.size()) continue;
      choice.tokens.resize(choice.said);
      choice.finish = FinishReason::kCancelled;
    }
  }
  FleetInfo fleet() const override {
    std::lock_guard lock(mutex_);
    return fleet_;
  }

 private:
  struct Choice {
    std::vector<TokenId> tokens;
    FinishReason finish = FinishReason::kNone;
    size_t said = 0;  // generated
    size_t told = 0;  // of these, to the observer
    bool ended = false;
  };
  struct Entry {
    AcceptedRequest request;
    std::shared_ptr<RequestObserver> observer;
    std::vector<Choice> choices;
    std::string failure;
  };

  static TokenEvent event_of(RequestId id, uint32_t choice) {
    TokenEvent event;
    event.request = id;
    event.choice = choice;
    return event;
  }
  static void say_prompt(RequestId id, Entry& entry) {
    const AcceptedRequest& request = entry.request;
    if (!request.sampling.prompt_logprobs) return;
    TokenEvent event = event_of(id, 0);
    event.prompt_start = 1;
    for (size_t i = 1; i < request.prompt.size(); ++i)
      event.prompt_logprobs.push_back({fake_logprob(request.prompt[i]), {}});
    if (const auto observer = entry.observer) observer->on_tokens(event);
  }
  // Generates as far as the gate allows, and tells it.
  void say(RequestId id, Entry& entry) {
    for (bool more = true; more;) {
      more = false;
      for (uint32_t i = 0; i < entry.choices.size(); ++i) {
        Choice& choice = entry.choices[i];
        const size_t until = std::min(gate_, choice.tokens.size());
        while (choice.said < until) {
          ++choice.said;
          tell(id, entry, i);
          if (one_by_one_) continue;
          more = true;
          break;
        }
        tell(id, entry, i);  // an end without a token
      }
    }
  }
  // What was generated and not told yet.
  static void tell(RequestId id, Entry& entry, uint32_t index) {
    Choice& choice = entry.choices[index];
    const std::shared_ptr<RequestObserver> observer = entry.observer;
    if (!observer || choice.ended) return;
    TokenEvent event = event_of(id, index);
    event.index = static_cast<uint32_t>(choice.told);
    const AcceptedRequest& request = entry.request;
    for (size_t i = choice.told; i < choice.said; ++i) {
      const TokenId token = choice.tokens[i];
      event.tokens.push_back(token);
      if (!request.sampling.logprobs) continue;
      event.logprobs.push_back(fake_logprob(token));
      event.top_logprobs.emplace_back();
      for (uint32_t k = 0; k < request.sampling.top_logprobs; ++k)
        event.top_logprobs.back().push_back({token + k, fake_logprob(token) - static_cast<float>(k)});
    }
    choice.told = choice.said;
    if (choice.said == choice.tokens.size()) event.finish = choice.finish;
    if (!entry.failure.empty() && event.finish == FinishReason::kNone) {
      event.finish = FinishReason::kError;
      event.error = entry.failure;
    }
    if (event.tokens.empty() && event.finish == FinishReason::kNone) return;
    choice.ended = event.finish != FinishReason::kNone;
    observer->on_tokens(event);
  }

  const Script script_;
  mutable std::recursive_mutex mutex_;  // held while observers are called, which may call back
  std::map<RequestId, Entry> entries_;
  size_t gate_ = ~size_t{0};
  bool one_by_one_ = false;
  bool keeps_ = true;
  FleetInfo fleet_ = [] {
    FleetInfo info{true, "", 0, "k1-test", "fp"};
    info.max_router_context_bytes = 4096;
    return info;
  }();
  RequestId last_;
  size_t cancels_ = 0;
  Releases releases_;
  std::vector<std::pair<RequestId, uint32_t>> cancelled_choices_;
};

}  // namespace conclave::testing
