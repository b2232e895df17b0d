// One accepted (or refused) request between the scheduler and its client: the bounded token stream of its
// choices. The scheduler's port pushes tokens in; they become text at once, so that a stop string ends a
// choice at its token even while the client does not read; the protocol adapter takes text out whenever it
// can write.
//
// A generation ends exactly once: finished (when all its choices have), refused, failed, cancelled, or past
// its deadline. Each choice that finishes does so exactly once, with one finish reason.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libs/base/clock.h"
#include "libs/ports/scheduler_port.h"
#include "router_service/gateway/choice.h"
#include "router_service/gateway/request.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::gateway {

// Everything since the last take().
struct Update {
  bool accepted = false;              // the scheduler has it: a streamed answer may begin
  std::vector<ChoiceUpdate> choices;  // those with something new, in order of their index
  // Where asked for: of the next prompt tokens, beginning with the second. All come before the first token.
  std::vector<PromptLogprob> prompt_logprobs;
  bool ended = false;
  Status error;  // when ended: OK, or the cause
  Usage usage;   // so far
};

// How a request went, for metrics and the log; never its text.
struct Summary {
  RequestId id;
  StatusCode code = StatusCode::kOk;
  FinishReason finish = FinishReason::kNone;  // of the choice that ended last
  bool accepted = false;
  bool slow_reader = false;  // cut off because its client did not read
  Usage usage;
  uint32_t choices = 1;
  Nanos to_first_token = -1;  // from arrival; negative: there was none
  Nanos total = 0;
};

class Generation : public RequestObserver, public std::enable_shared_from_this<Generation> {
 public:
  struct Limits {
    uint32_t max_pending_tokens = 4096;  // not yet taken by the client; beyond, the request is cancelled
  };

  // `on_update` is called, from any thread, when take() has something new, and not again until take() was
  // called; it must not block. `on_end` is called once, at the end, before the last on_update.
  Generation(RequestId id, SchedulerPort& scheduler, Limits limits, std::function<void()> on_update,
             std::function<void(const Summary&)> on_end);

  RequestId id() const { return id_; }
  TimePoint arrived() const { return arrived_; }
  // Any thread, one at a time.
  Update take();
  // The client is gone: nothing more is reported, and the scheduler forgets the sequence. Any thread;
  // idempotent.
  void cancel(const Status& cause = cancelled("the client went away"));
  // As the client's own limit: ends it with this cause. Used at shutdown too.
  void abort(const Status& cause);
  bool ended() const;
  struct Progress {
    bool accepted = false;
    Usage usage;
  };
  Progress progress() const;
  // The prompt's tokens, once submitted (empty before).
  std::vector<TokenId> prompt() const;
  // The prompt as text, for echo.
  std::string prompt_text() const;

  // --- from the gateway ---
  // Its place in the queue: let go at its first event from the scheduler after the acceptance, or at its end.
  void hold(std::shared_ptr<void> place);
  // Ends it before it was submitted.
  void refuse(const Status& cause) { abort(cause); }
  // Hands it to the scheduler unless it has ended meanwhile. One choice for each of the request's.
  void submit(AcceptedRequest request, std::vector<Choice> choices, std::string prompt_text);

  // --- RequestObserver ---
  void on_accepted() override;
  void on_refused(const Status& cause) override;
  void on_tokens(const TokenEvent& event) override;

 private:
  enum class State { kPreparing, kSubmitting, kSubmitted, kEnded };

  // The rest expect the lock; `after` collects what to call once it is released.
  struct After {
    bool cancel = false;
    std::optional<uint32_t> cancel_choice;
    std::shared_ptr<void> place;
    std::optional<Summary> summary;
    std::shared_ptr<const std::function<void()>> update;
  };
  Status take_prompt_logprobs(const TokenEvent& event);
  Status failure_of(const TokenEvent& event) const;
  size_t pending_tokens() const;
  Usage usage() const;
  void end(FinishReason finish, const Status& error, After& after);
  void note_update(After& after);
  void run(After after);

  const RequestId id_;
  SchedulerPort& scheduler_;
  const Limits limits_;
  const TimePoint arrived_;

  mutable std::mutex mutex_;
  std::shared_ptr<const std::function<void()>> on_update_;  // null once nothing is reported any more
  std::function<void(const Summary&)> on_end_;
  State state_ = State::kPreparing;
  std::shared_ptr<void> place_;
  bool cancel_wanted_ = false;  // ended while the submission was on its way
  bool signalled_ = false;
  std::vector<Choice> choices_;
  std::vector<bool> closed_;                    // choices that the scheduler has ended
  uint32_t running_ = 0;                        // choices that have not ended
  std::vector<PromptLogprob> prompt_logprobs_;  // not yet taken
  uint32_t prompt_logprobs_received_ = 0;
  Status error_;
  std::vector<TokenId> prompt_;
  std::string prompt_text_;
  bool accepted_ = false;
  bool slow_reader_ = false;
  std::optional<uint32_t> cached_tokens_;  // the first that was said
  Nanos to_first_token_ = -1;
};

}  // namespace conclave::gateway
