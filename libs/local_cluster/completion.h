// One request followed to its end by a thread that waits.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/status.h"
#include "libs/ports/scheduler_port.h"

namespace conclave {

struct Completion {
  // Of choice 0.
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;  // one per token where asked for
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  FinishReason finish = FinishReason::kNone;
  std::string error;  // finish == kError: the cause
  // Of the prompt's tokens from the second on, where asked for.
  std::vector<PromptLogprob> prompt_logprobs;
  // Choices 1, 2, ...: the same, but for the prompt.
  std::vector<Completion> more;
};

// Give it to SchedulerPort::submit and wait. Checks on the way that token indices are contiguous and that
// each choice ends once.
class PendingCompletion final : public RequestObserver {
 public:
  explicit PendingCompletion(uint32_t choices = 1) : running_(choices) {
    completion_.more.resize(choices - 1);
  }

  void on_accepted() override {}
  void on_refused(const Status& cause) override;
  void on_tokens(const TokenEvent& event) override;

  // Any thread. The refusal; INTERNAL for a gap, a repeat or a second end; DEADLINE_EXCEEDED after `limit` of
  // real time.
  StatusOr<Completion> wait(Nanos limit);
  // Tokens of choice 0 so far. Any thread.
  size_t tokens() const;
  // Blocks until choice 0 has `count` tokens or the end; false after `limit`.
  bool wait_for_tokens(size_t count, Nanos limit);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Completion completion_;
  Status status_;
  uint32_t running_;  // choices that have not ended
  bool ended_ = false;
};

}  // namespace conclave
