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
    end(FinishReason::kNone, cause, after);
  }
  run(std::move(after));
}

void Generation::abort(const Status& cause) {
  After after;
  {
    std::lock_guard lock(mutex_);
    end(FinishReason::kNone, cause, after);
  }
  run(std::move(after));
}

void Generation::submit(AcceptedRequest request, std::vector<Choice> choices, std::string prompt_text) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kPreparing) return;
    state_ = State::kSubmitting;
    prompt_ = request.prompt;
    prompt_text_ = std::move(prompt_text);
    choices_ = std::move(choices);
    closed_.assign(choices_.size(), false);
    running_ = static_cast<uint32_t>(choices_.size());
  }
  scheduler_.submit(std::move(request), shared_from_this());
  bool cancel_now = false;
  {
    std::lock_guard lock(mutex_);
    cancel_now = cancel_wanted_;
    cancel_wanted_ = false;
    if (state_ == State::kSubmitting) state_ = State::kSubmitted;
  }
  if (cancel_now) scheduler_.cancel(id_);
}

void Generation::on_accepted() {
  After after;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kEnded || accepted_) return;
    accepted_ = true;
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
    end(FinishReason::kNone, cause, after);
  }
  run(std::move(after));
}

Generation::Progress Generation::progress() const {
  std::lock_guard lock(mutex_);
  return {accepted_, usage()};
}

void Generation::hold(std::shared_ptr<void> place) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kEnded) place_ = std::move(place);
}

void Generation::on_tokens(const TokenEvent& event) {
  After after;
  {
    std::lock_guard lock(mutex_);
    after.place = std::move(place_);
    if (state_ == State::kEnded || event.choice >= choices_.size()) return;
    accepted_ = true;
    if (event.finish != FinishReason::kNone) closed_[event.choice] = true;
    if (to_first_token_ < 0 && !event.tokens.empty()) to_first_token_ = steady_now() - arrived_;
    if (!cached_tokens_) cached_tokens_ = event.cached_tokens;
    Choice& choice = choices_[event.choice];
    const bool was_running = !choice.ended();
    Status failure = take_prompt_logprobs(event);
    if (failure.ok()) failure = choice.take(event);
    if (failure.ok() && was_running) failure = failure_of(event);
    if (was_running && choice.ended()) --running_;
    // Its text ended it (a stop string): the scheduler, which has the request as these tokens show, need not
    // go on with it.
    if (was_running && choice.ended() && !closed_[event.choice] && running_ > 0) {
      after.cancel_choice = event.choice;
    }
    // The scheduler holds nothing of it any more: nothing to cancel there.
    if (std::find(closed_.begin(), closed_.end(), false) == closed_.end()) state_ = State::kPreparing;
    if (!failure.ok()) {
      end(FinishReason::kNone, failure, after);
    } else if (running_ == 0) {
      end(event.finish == FinishReason::kLength ? FinishReason::kLength : FinishReason::kStop, OkStatus(),
          after);
    } else if (pending_tokens() > limits_.max_pending_tokens) {
      slow_reader_ = true;
      end(FinishReason::kNone,
          resource_exhausted("the client reads too slowly: more than " +
                             std::to_string(limits_.max_pending_tokens) + " tokens were waiting for it"),
          after);
    }
    note_update(after);
  }
  run(std::move(after));
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
      return cancelled("the request was cancelled");
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

void Generation::end(FinishReason finish, const Status& error, After& after) {
  if (state_ == State::kEnded) return;
  after.cancel = state_ == State::kSubmitted;
  cancel_wanted_ = state_ == State::kSubmitting;
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
  summary.choices = static_cast<uint32_t>(std::max<size_t>(choices_.size(), 1));
  summary.to_first_token = to_first_token_;
  summary.total = steady_now() - arrived_;
  after.summary = summary;
  note_update(after);
}

void Generation::note_update(After& after) {
  if (signalled_ || !on_update_) return;
  signalled_ = true;
  after.update = on_update_;
}

void Generation::run(After after) {
  after.place.reset();  // before anybody is told
  if (after.cancel) {
    scheduler_.cancel(id_);
  } else if (after.cancel_choice) {
    scheduler_.cancel_choice(id_, *after.cancel_choice);
  }
  std::shared_ptr<const std::function<void()>> dropped;
  if (after.summary) {
    std::function<void(const Summary&)> on_end;
    {
      std::lock_guard lock(mutex_);
      on_end = std::exchange(on_end_, nullptr);
      dropped = std::exchange(on_update_, nullptr);  // adapters and generations hold each other until here
    }
    if (on_end) on_end(*after.summary);
  }
  if (after.update) (*after.update)();
}

}  // namespace conclave::gateway
