#include "router_service/gateway/generation.h"

#include <algorithm>
#include <utility>

namespace conclave::gateway {

Generation::Generation(RequestId id, SchedulerPort& scheduler, Limits limits, std::function<void()> on_update,
                       std::function<void(const Summary&)> on_end)
    : id_(id),
      scheduler_(scheduler),
      limits_(limits),
      arrived_(steady_now()),
      on_update_(std::make_shared<const std::function<void()>>(std::move(on_update))),
      on_end_(std::move(on_end)) {}

Update Generation::take() {
  std::lock_guard lock(mutex_);
  signalled_ = false;
  if (timeline_) timeline_->taken();
  Update update;
  update.accepted = accepted_;
  for (Choice& choice : choices_) {
    ChoiceUpdate part = choice.take_update();
    if (!part.empty()) update.choices.push_back(std::move(part));
  }
  update.prompt_logprobs = std::exchange(prompt_logprobs_, {});
  update.usage = usage();
  // The end stays visible to whoever asks again.
  update.ended = state_ == State::kEnded;
  update.error = error_;
  return update;
}

bool Generation::ended() const {
  std::lock_guard lock(mutex_);
  return state_ == State::kEnded;
}

std::vector<TokenId> Generation::prompt() const {
  std::lock_guard lock(mutex_);
  return prompt_;
}

std::string Generation::prompt_text() const {
  std::lock_guard lock(mutex_);
  return prompt_text_;
}

void Generation::cancel(const Status& cause) {
  After after;
  std::shared_ptr<const std::function<void()>> dropped;  // outside the lock: it may own the adapter
  {
    std::lock_guard lock(mutex_);
    dropped = std::exchange(on_update_, nullptr);
    end(FinishReason::kNone, cause, after, stream_began_ ? Leave::kRelease : Leave::kCancel);
  }
  run(std::move(after));
}

void Generation::abort(const Status& cause) {
  After after;
  {
    std::lock_guard lock(mutex_);
    end(FinishReason::kNone, cause, after, Leave::kCancel);
  }
  run(std::move(after));
}

void Generation::hand_over(const Status& cause) {
  After after;
  {
    std::lock_guard lock(mutex_);
    end(FinishReason::kNone, cause, after, Leave::kRelease);
  }
  run(std::move(after));
}

bool Generation::resumable() const {
  std::lock_guard lock(mutex_);
  return resumable_;
}

void Generation::stream_began() {
  std::lock_guard lock(mutex_);
  stream_began_ = true;
}

void Generation::submit(AcceptedRequest request, std::vector<Choice> choices, std::string prompt_text) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kPreparing) return;
    state_ = State::kSubmitting;
    submitted_at_ = steady_now();
    prompt_ = request.prompt;
    prompt_text_ = std::move(prompt_text);
    choices_ = std::move(choices);
    closed_.assign(choices_.size(), false);
    last_tokens_.assign(choices_.size(), 0);
    running_ = static_cast<uint32_t>(choices_.size());
    in_pieces_ = !request.router_context.empty();
    if (in_pieces_) held_.resize(choices_.size());
    if (timeline_) timeline_->mark(RouterMarkKind::kSubmitted, "", submitted_at_);
  }
  scheduler_.submit(std::move(request), shared_from_this());
  Leave leave = Leave::kNothing;
  {
    std::lock_guard lock(mutex_);
    leave = std::exchange(leave_wanted_, Leave::kNothing);
    if (state_ == State::kSubmitting) state_ = State::kSubmitted;
  }
  leave_with(leave);
}

void Generation::on_resumable() {
  std::lock_guard lock(mutex_);
  resumable_ = in_pieces_;
}

void Generation::on_accepted() {
  After after;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kEnded || accepted_) return;
    accepted_ = true;
    if (timeline_) timeline_->mark(RouterMarkKind::kAccepted);
    if (in_pieces_) accept_piece();
    note_update(after);
  }
  run(std::move(after));
}

void Generation::on_refused(const Status& cause) {
  After after;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kEnded) return;
    state_ = State::kPreparing;  // the scheduler does not hold it: nothing to cancel there
    end(FinishReason::kNone, cause, after, Leave::kNothing);
  }
  run(std::move(after));
}

Generation::Progress Generation::progress() const {
  std::lock_guard lock(mutex_);
  return {accepted_, usage()};
}

std::optional<Generation::Stall> Generation::stall(TimePoint now) const {
  std::lock_guard lock(mutex_);
  if (state_ == State::kEnded) return std::nullopt;
  if (submitted_at_ == 0) return Stall{StallHop::kText, now - arrived_};
  if (!accepted_) return Stall{StallHop::kScheduler, now - submitted_at_};
  if (signalled_) return Stall{StallHop::kClient, now - signalled_at_};
  return std::nullopt;
}

void Generation::hold(std::shared_ptr<void> place) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kEnded) place_ = std::move(place);
}

void Generation::on_tokens(const TokenEvent& event) {
  After after;
  Nanos gap = -1;
  {
    std::lock_guard lock(mutex_);
    after.place = std::move(place_);
    if (state_ == State::kEnded || event.choice >= closed_.size()) return;
    if (event.finish != FinishReason::kNone) closed_[event.choice] = true;
    if (!event.tokens.empty()) {
      const TimePoint now = steady_now();
      const TimePoint before = std::exchange(last_tokens_[event.choice], now);
      if (before != 0) gap = now - before;
      if (to_first_token_ < 0) to_first_token_ = now - arrived_;
      if (timeline_) timeline_->tokens(event, now);
    }
    if (!cached_tokens_) cached_tokens_ = event.cached_tokens;
    if (in_pieces_) {
      hold_event(event, after);
    } else {
      take_event(event, after);
    }
    note_update(after);
  }
  if (gap >= 0 && limits_.on_token_gap) limits_.on_token_gap(gap);
  run(std::move(after));
}

void Generation::take_event(const TokenEvent& event, After& after) {
  accepted_ = true;
  Choice& choice = choices_[event.choice];
  const bool was_running = !choice.ended();
  Status failure = take_prompt_logprobs(event);
  if (failure.ok()) failure = choice.take(event);
  if (failure.ok() && was_running) failure = failure_of(event);
  if (was_running && choice.ended()) leave_choice(event.choice, after);
  // The scheduler holds nothing of it any more: nothing to cancel there.
  if (std::find(closed_.begin(), closed_.end(), false) == closed_.end()) state_ = State::kPreparing;
  if (!failure.ok()) {
    end(FinishReason::kNone, failure, after, Leave::kCancel);
  } else if (running_ == 0) {
    end(event.finish == FinishReason::kLength ? FinishReason::kLength : FinishReason::kStop, OkStatus(),
        after, Leave::kCancel);
  } else if (pending_tokens() > limits_.max_pending_tokens) {
    slow_reader_ = true;
    end(FinishReason::kNone, slow_reader(), after, Leave::kCancel);
  }
}

Status Generation::slow_reader() const {
  return resource_exhausted("the client reads too slowly: more than " +
                            std::to_string(limits_.max_pending_tokens) + " tokens were waiting for it");
}

void Generation::leave_choice(uint32_t choice, After& after) {
  --running_;
  // Its text ended it (a stop string): the scheduler, which has the request as these tokens show, need not
  // go on with it.
  if (!closed_[choice] && running_ > 0) after.cancel_choices.push_back(choice);
}

Status Generation::take_prompt_logprobs(const TokenEvent& event) {
  if (event.prompt_logprobs.empty()) return OkStatus();
  const uint32_t next = 1 + prompt_logprobs_received_;  // the first prompt token has none
  if (event.prompt_start > next || event.prompt_start == 0)
    return internal_error("log-probabilities of prompt tokens never came from the scheduler");
  // A restarted scheduler may repeat what was delivered.
  for (size_t i = next - event.prompt_start; i < event.prompt_logprobs.size(); ++i) {
    prompt_logprobs_.push_back(event.prompt_logprobs[i]);
    ++prompt_logprobs_received_;
  }
  return OkStatus();
}

// Why the whole request fails with this event, if it does.
Status Generation::failure_of(const TokenEvent& event) const {
  if (choices_[event.choice].ended()) return OkStatus();
  switch (event.finish) {
    case FinishReason::kDeadline:
      return deadline_exceeded("the request passed its deadline");
    case FinishReason::kCancelled:
      return cancelled(event.error.empty() ? "the request was cancelled" : event.error);
    case FinishReason::kError:
      return internal_error(event.error.empty() ? "the request failed" : event.error);
    case FinishReason::kNone:
    case FinishReason::kStop:
    case FinishReason::kLength:
      break;
  }
  return OkStatus();
}

size_t Generation::pending_tokens() const {
  size_t sum = 0;
  for (const Choice& choice : choices_) sum += choice.pending_tokens();
  return sum;
}

Usage Generation::usage() const {
  Usage out;
  out.prompt_tokens = static_cast<uint32_t>(prompt_.size());
  out.cached_tokens = cached_tokens_;
  for (const Choice& choice : choices_) {
    out.completion_tokens += choice.completion_tokens();
    out.reasoning_tokens += choice.reasoning_tokens();
  }
  return out;
}

void Generation::end(FinishReason finish, const Status& error, After& after, Leave leave) {
  if (state_ == State::kEnded) return;
  if (!resumable_ && leave != Leave::kNothing) leave = Leave::kCancel;
  if (state_ == State::kSubmitted) after.leave = leave;
  if (state_ == State::kSubmitting) leave_wanted_ = leave;
  state_ = State::kEnded;
  if (place_) after.place = std::move(place_);
  error_ = error;
  Summary summary;
  summary.id = id_;
  summary.code = error.code();
  summary.finish = finish;
  summary.accepted = accepted_;
  summary.slow_reader = slow_reader_;
  summary.usage = usage();
  if (adopted_) {  // whoever had it before accounts for that
    summary.usage.prompt_tokens = 0;
    summary.usage.completion_tokens -=
        static_cast<uint32_t>(std::min<uint64_t>(summary.usage.completion_tokens, generated_before_));
  }
  summary.choices = static_cast<uint32_t>(std::max<size_t>(choices_.size(), 1));
  summary.to_first_token = to_first_token_;
  summary.total = steady_now() - arrived_;
  after.summary = summary;
  if (timeline_) {
    timeline_->end(error.ok() ? finish == FinishReason::kLength ? "length" : "stop"
                              : std::string(absl::StatusCodeToString(error.code())),
                   usage());
  }
  if (in_pieces_) {
    Update last;
    last.accepted = accepted_;
    last.ended = true;
    last.error = error;
    last.released = leave == Leave::kRelease;
    last.usage = usage();
    pieces_.push_back(std::move(last));
  }
  note_update(after);
}

void Generation::leave_with(Leave leave) {
  switch (leave) {
    case Leave::kNothing:
      return;
    case Leave::kCancel:
      return scheduler_.cancel(id_);
    case Leave::kRelease:
      return scheduler_.release(id_, *this, false);
    case Leave::kFinish:
      return scheduler_.release(id_, *this, true);
  }
}

void Generation::note_update(After& after) {
  if (signalled_ || !on_update_) return;
  signalled_ = true;
  signalled_at_ = steady_now();
  after.update = on_update_;
}

void Generation::run(After after) {
  after.place.reset();  // before anybody is told
  if (after.leave == Leave::kNothing) {
    for (const uint32_t choice : after.cancel_choices) scheduler_.cancel_choice(id_, choice);
  }
  leave_with(after.leave);
  std::shared_ptr<const std::function<void()>> dropped;
  std::function<void(const AdoptedRequest&)> dropped_too;
  if (after.summary) {
    std::function<void(const Summary&)> on_end;
    {
      std::lock_guard lock(mutex_);
      on_end = std::exchange(on_end_, nullptr);
      dropped_too = std::exchange(prepare_, nullptr);
      dropped = std::exchange(on_update_, nullptr);  // adapters and generations hold each other until here
    }
    if (on_end) on_end(*after.summary);
  }
  if (after.update) (*after.update)();
}

}  // namespace conclave::gateway
