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
  if (ended_) status_ = internal_error("an event after the end");
  if (event.index != completion_.tokens.size()) {
    status_ = internal_error("token index " + std::to_string(event.index) + " after " +
                             std::to_string(completion_.tokens.size()) + " tokens");
  }
  completion_.tokens.insert(completion_.tokens.end(), event.tokens.begin(), event.tokens.end());
  completion_.logprobs.insert(completion_.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
  if (event.finish != FinishReason::kNone) {
    completion_.finish = event.finish;
    completion_.error = event.error;
    ended_ = true;
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
