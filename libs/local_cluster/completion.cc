#include "libs/local_cluster/completion.h"

#include <chrono>

namespace conclave {

void PendingCompletion::on_refused(const Status& cause) {
  std::lock_guard lock(mutex_);
  status_ = cause;
  ended_ = true;
  changed_.notify_all();
}

void PendingCompletion::on_tokens(const TokenEvent& event) {
  std::lock_guard lock(mutex_);
  if (event.choice > completion_.more.size()) {
    status_ = internal_error("an event of choice " + std::to_string(event.choice));
    return;
  }
  Completion& choice = event.choice == 0 ? completion_ : completion_.more[event.choice - 1];
  if (ended_ || choice.finish != FinishReason::kNone) status_ = internal_error("an event after the end");
  if (event.index != choice.tokens.size()) {
    status_ = internal_error("token index " + std::to_string(event.index) + " after " +
                             std::to_string(choice.tokens.size()) + " tokens");
  }
  if (!event.prompt_logprobs.empty() && event.prompt_start != completion_.prompt_logprobs.size() + 1) {
    status_ = internal_error("prompt log-probabilities from position " + std::to_string(event.prompt_start) +
                             " after " + std::to_string(completion_.prompt_logprobs.size()));
  }
  const auto add = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  add(completion_.prompt_logprobs, event.prompt_logprobs);
  add(choice.tokens, event.tokens);
  add(choice.logprobs, event.logprobs);
  add(choice.top_logprobs, event.top_logprobs);
  if (event.finish != FinishReason::kNone) {
    choice.finish = event.finish;
    choice.error = event.error;
    ended_ = --running_ == 0;
  }
  changed_.notify_all();
}

StatusOr<Completion> PendingCompletion::wait(Nanos limit) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::nanoseconds(limit), [&] { return ended_; })) {
    return deadline_exceeded("the request did not end in time; it has " +
                             std::to_string(completion_.tokens.size()) + " tokens");
  }
  if (!status_.ok()) return status_;
  return completion_;
}

size_t PendingCompletion::tokens() const {
  std::lock_guard lock(mutex_);
  return completion_.tokens.size();
}

bool PendingCompletion::wait_for_tokens(size_t count, Nanos limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::nanoseconds(limit),
                           [&] { return ended_ || completion_.tokens.size() >= count; });
}

}  // namespace conclave
