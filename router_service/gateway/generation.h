// One accepted (or refused) request between the scheduler and its client: the bounded token stream of its
// choices. The scheduler's port pushes tokens in; they become text at once, so that a stop string ends a
// choice at its token even while the client does not read; the protocol adapter takes text out whenever it
// can write.
//
// One that others may go on with (a resumable stream) reports in pieces of one token each, in an order that
// follows from the tokens alone: token by token, the choices in turn. So whoever replays the tokens reports
// the same pieces.
//
// A generation ends exactly once: finished (when all its choices have), refused, failed, cancelled, or past
// its deadline. Each choice that finishes does so exactly once, with one finish reason.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libs/base/clock.h"
#include "libs/ports/scheduler_port.h"
#include "router_service/gateway/choice.h"
#include "router_service/gateway/request.h"
#include "router_service/gateway/text_codec.h"
#include "router_service/gateway/timeline.h"

namespace conclave::gateway {

// Everything since the last take().
struct Update {
  bool accepted = false;              // the scheduler has it: a streamed answer may begin
  std::vector<ChoiceUpdate> choices;  // those with something new, in order of their index
  // Where asked for: of the next prompt tokens, beginning with the second. All come before the first token.
  std::vector<PromptLogprob> prompt_logprobs;
  bool ended = false;
  Status error;           // when ended: OK, or the cause
  bool released = false;  // when ended with an error: it goes on at the scheduler, to be resumed
  Usage usage;            // so far
};

// What a request waits for at a router.
enum class StallHop : uint8_t {
  kText,       // a thread that tokenizes
  kScheduler,  // its acceptance by the scheduler
  kClient,     // a client that does not read
  kCount
};
constexpr std::string_view stall_hop_name(StallHop hop) {
  constexpr std::string_view kNames[] = {"router_text", "router_scheduler", "client"};
  return kNames[static_cast<size_t>(hop)];
}

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
    // Told of the time between two events with tokens of one choice, on the port's thread; may be empty.
    std::function<void(Nanos)> on_token_gap = nullptr;
  };

  // `on_update` is called, from any thread, when take() has something new, and not again until take() was
  // called; it must not block. `on_end` is called once, at the end, before the last on_update.
  Generation(RequestId id, SchedulerPort& scheduler, Limits limits, std::function<void()> on_update,
             std::function<void(const Summary&)> on_end);

  RequestId id() const { return id_; }
  TimePoint arrived() const { return arrived_; }
  // Any thread, one at a time.
  Update take();
  // The same as pieces, where it reports such; else one, if there is anything new. There may be more at once:
  // who has dealt with these asks again, until there are none.
  std::vector<Update> take_pieces();
  // The client is gone: nothing more is reported. The scheduler forgets the sequence, or, once its client
  // knew of a resumable stream, keeps it for the grace time. Any thread; idempotent.
  void cancel(const Status& cause = cancelled("the client went away"));
  // As the client's own limit: ends it with this cause.
  void abort(const Status& cause);
  // The same, but a resumable one goes on at the scheduler. Used at shutdown, and when another connection
  // takes it over.
  void hand_over(const Status& cause);
  bool ended() const;
  // Others may go on with it; known once it is accepted.
  bool resumable() const;
  // The client knows its id.
  void stream_began();
  struct Progress {
    bool accepted = false;
    Usage usage;
  };
  Progress progress() const;
  struct Stall {
    StallHop hop = StallHop::kText;
    Nanos time = 0;
  };
  // What it waits for at this router, and how long it has; nothing while its next tokens are due.
  std::optional<Stall> stall(TimePoint now) const;
  // The prompt's tokens, once submitted (empty before).
  std::vector<TokenId> prompt() const;
  // The prompt as text, for echo.
  std::string prompt_text() const;

  // --- from the gateway ---
  // Its place in the queue: let go at its first event from the scheduler after the acceptance, or at its end.
  void hold(std::shared_ptr<void> place);
  // Notes there what it does, from before anything else; null: nothing is noted.
  void follow(std::shared_ptr<RouterTimeline> timeline) { timeline_ = std::move(timeline); }
  const std::shared_ptr<RouterTimeline>& timeline() const { return timeline_; }
  // Ends it before it was submitted.
  void refuse(const Status& cause) { abort(cause); }
  // Hands it to the scheduler unless it has ended meanwhile. One choice for each of the request's.
  void submit(AcceptedRequest request, std::vector<Choice> choices, std::string prompt_text);
  // Instead of submit(): asks the scheduler for the request of this id. Once it is here `prepare` is called,
  // on the port's thread, and is to have begin_adopted() called; tokens wait for that.
  void adopt(std::string tenant, std::function<void(const AdoptedRequest&)> prepare);
  void begin_adopted(std::vector<TokenId> prompt, std::vector<Choice> choices, std::string prompt_text);

  // --- RequestObserver ---
  void on_accepted() override;
  void on_resumable() override;
  void on_adopted(const AdoptedRequest& adopted) override;
  void on_refused(const Status& cause) override;
  void on_tokens(const TokenEvent& event) override;

 private:
  enum class State { kPreparing, kSubmitting, kSubmitted, kEnded };
  // What becomes of it at the scheduler when it ends here.
  enum class Leave { kNothing, kCancel, kRelease, kFinish };
  // Tokens of a choice whose turn has not come.
  struct Held {
    std::deque<TokenOutput> tokens;
    uint32_t received = 0;
    FinishReason finish = FinishReason::kNone;
    std::string error;
  };

  // The rest expect the lock; `after` collects what to call once it is released.
  struct After {
    Leave leave = Leave::kNothing;
    std::vector<uint32_t> cancel_choices;
    std::shared_ptr<void> place;
    std::optional<Summary> summary;
    std::shared_ptr<const std::function<void()>> update;
  };
  Status take_prompt_logprobs(const TokenEvent& event);
  Status failure_of(const TokenEvent& event) const;
  Status slow_reader() const;
  size_t pending_tokens() const;
  Usage usage() const;
  void take_event(const TokenEvent& event, After& after);
  void hold_event(const TokenEvent& event, After& after);
  // Makes pieces of what is held, as far as it goes.
  void release_held(After& after);
  void accept_piece();
  void leave_choice(uint32_t choice, After& after);
  void end(FinishReason finish, const Status& error, After& after, Leave leave);
  void leave_with(Leave leave);
  void note_update(After& after);
  void run(After after);

  const RequestId id_;
  SchedulerPort& scheduler_;
  const Limits limits_;
  const TimePoint arrived_;
  std::shared_ptr<RouterTimeline> timeline_;  // set before others know of it

  mutable std::mutex mutex_;
  std::shared_ptr<const std::function<void()>> on_update_;  // null once nothing is reported any more
  std::function<void(const Summary&)> on_end_;
  State state_ = State::kPreparing;
  std::shared_ptr<void> place_;
  Leave leave_wanted_ = Leave::kNothing;  // ended while the submission was on its way
  bool signalled_ = false;
  TimePoint signalled_at_ = 0;
  TimePoint submitted_at_ = 0;
  std::vector<Choice> choices_;
  std::vector<bool> closed_;                    // choices that the scheduler has ended
  uint32_t running_ = 0;                        // choices that have not ended
  std::vector<PromptLogprob> prompt_logprobs_;  // not yet taken
  uint32_t prompt_logprobs_received_ = 0;
  Status error_;
  std::vector<TokenId> prompt_;
  std::string prompt_text_;
  // Of one that reports in pieces.
  bool in_pieces_ = false;
  bool resumable_ = false;
  bool stream_began_ = false;
  bool accept_said_ = false;
  bool end_said_ = false;
  std::function<void(const AdoptedRequest&)> prepare_;
  std::vector<Held> held_;  // by choice
  size_t turn_ = 0;         // the choice that comes next
  std::deque<Update> pieces_;
  bool adopted_ = false;
  uint64_t generated_before_ = 0;  // tokens, when it was adopted
  uint64_t backlog_ = 0;           // of these, not yet made into pieces
  bool accepted_ = false;
  bool slow_reader_ = false;
  std::optional<uint32_t> cached_tokens_;  // the first that was said
  Nanos to_first_token_ = -1;
  std::vector<TimePoint> last_tokens_;  // by choice; 0: none yet
};

}  // namespace conclave::gateway
