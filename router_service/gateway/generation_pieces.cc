// What a generation that others may go on with does differently: its tokens wait for their turn and are
// reported as pieces.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "router_service/gateway/generation.h"

namespace conclave::gateway {

std::vector<Update> Generation::take_pieces() {
  After after;
  std::vector<Update> out;
  bool in_pieces = false;
  {
    std::lock_guard lock(mutex_);
    in_pieces = in_pieces_;
    if (in_pieces) {
      if (pieces_.empty()) release_held(after);  // a backlog comes in parts
      signalled_ = false;
      if (timeline_) timeline_->taken();
      after.update = nullptr;  // the caller is here
      std::move(pieces_.begin(), pieces_.end(), std::back_inserter(out));
      pieces_.clear();
    }
  }
  if (!in_pieces) {
    Update update = take();
    std::lock_guard lock(mutex_);
    const bool accepted = update.accepted && !std::exchange(accept_said_, true);
    const bool ended = update.ended && !std::exchange(end_said_, true);
    if (accepted || ended || !update.choices.empty() || !update.prompt_logprobs.empty())
      out.push_back(std::move(update));
  }
  run(std::move(after));
  return out;
}

void Generation::adopt(std::string tenant, std::function<void(const AdoptedRequest&)> prepare) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kPreparing) return;
    state_ = State::kSubmitting;
    submitted_at_ = steady_now();
    in_pieces_ = adopted_ = resumable_ = stream_began_ = true;
    if (timeline_) timeline_->mark(RouterMarkKind::kSubmitted, "asked for its stream", submitted_at_);
    prepare_ = std::move(prepare);
  }
  scheduler_.adopt(id_, std::move(tenant), shared_from_this());
  Leave leave = Leave::kNothing;
  {
    std::lock_guard lock(mutex_);
    leave = std::exchange(leave_wanted_, Leave::kNothing);
    if (state_ == State::kSubmitting) state_ = State::kSubmitted;
  }
  leave_with(leave);
}

void Generation::on_adopted(const AdoptedRequest& adopted) {
  std::function<void(const AdoptedRequest&)> prepare;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kEnded) return;
    held_.resize(adopted.request.choices);
    closed_.assign(adopted.request.choices, false);
    last_tokens_.assign(adopted.request.choices, 0);
    generated_before_ = backlog_ = adopted.generated;
    if (timeline_) {
      timeline_->mark(RouterMarkKind::kAccepted,
                      "taken over with " + std::to_string(adopted.generated) + " tokens");
    }
    prepare = std::exchange(prepare_, nullptr);
  }
  if (prepare) prepare(adopted);
}

void Generation::begin_adopted(std::vector<TokenId> prompt, std::vector<Choice> choices,
                               std::string prompt_text) {
  After after;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kEnded) return;
    prompt_ = std::move(prompt);
    prompt_text_ = std::move(prompt_text);
    choices_ = std::move(choices);
    running_ = static_cast<uint32_t>(choices_.size());
    accepted_ = true;
    accept_piece();
    release_held(after);
    note_update(after);
  }
  run(std::move(after));
}

void Generation::hold_event(const TokenEvent& event, After& after) {
  Held& held = held_[event.choice];
  Status failure = take_prompt_logprobs(event);
  if (failure.ok() && event.index > held.received) {
    failure = internal_error("tokens " + std::to_string(held.received) + " to " +
                             std::to_string(event.index - 1) + " never came from the scheduler");
  }
  if (!failure.ok()) return end(FinishReason::kNone, failure, after, Leave::kCancel);
  const bool over = !choices_.empty() && choices_[event.choice].ended();
  // A restarted scheduler may repeat what was delivered; the index says so.
  for (size_t i = held.received - event.index; i < event.tokens.size(); ++i) {
    ++held.received;
    if (over) {  // behind the text's end
      if (backlog_ > 0) --backlog_;
      continue;
    }
    TokenOutput output;
    output.token = event.tokens[i];
    if (i < event.logprobs.size()) output.logprob = event.logprobs[i];
    if (i < event.top_logprobs.size()) output.top = event.top_logprobs[i];
    held.tokens.push_back(std::move(output));
  }
  if (event.finish != FinishReason::kNone) {
    held.finish = event.finish;
    held.error = event.error;
  }
  if (std::find(closed_.begin(), closed_.end(), false) == closed_.end()) state_ = State::kPreparing;
  if (choices_.empty()) return;  // adopted, and not begun
  accepted_ = true;
  accept_piece();
  release_held(after);
}

void Generation::accept_piece() {
  if (std::exchange(accept_said_, true)) return;
  Update piece;
  piece.accepted = true;
  piece.usage.prompt_tokens = static_cast<uint32_t>(prompt_.size());
  pieces_.push_back(std::move(piece));
}

void Generation::release_held(After& after) {
  while (state_ != State::kEnded && running_ > 0) {
    // What was there when it was adopted waits for the client here, not as pieces.
    if (backlog_ > 0 && pieces_.size() >= std::max(1u, limits_.max_pending_tokens / 2)) return;
    while (choices_[turn_].ended()) turn_ = (turn_ + 1) % choices_.size();
    Choice& choice = choices_[turn_];
    Held& held = held_[turn_];
    if (held.tokens.empty() && held.finish == FinishReason::kNone) return;
    TokenEvent one;
    one.choice = static_cast<uint32_t>(turn_);
    one.index = choice.completion_tokens();
    if (!held.tokens.empty()) {
      TokenOutput& output = held.tokens.front();
      one.tokens.push_back(output.token);
      one.logprobs.push_back(output.logprob);
      one.top_logprobs.push_back(std::move(output.top));
      held.tokens.pop_front();
      if (backlog_ > 0) --backlog_;
    }
    if (held.tokens.empty()) {
      one.finish = held.finish;
      one.error = held.error;
    }
    Status failure = choice.take(one);
    if (failure.ok()) failure = failure_of(one);
    if (choice.ended()) {
      backlog_ -= std::min<uint64_t>(backlog_, held.tokens.size());
      held.tokens.clear();
      leave_choice(one.choice, after);
    }
    Update piece;
    piece.accepted = true;
    piece.prompt_logprobs = std::exchange(prompt_logprobs_, {});
    ChoiceUpdate part = choice.take_update();
    if (!part.empty()) piece.choices.push_back(std::move(part));
    piece.usage = usage();
    if (!piece.choices.empty() || !piece.prompt_logprobs.empty()) pieces_.push_back(std::move(piece));
    turn_ = (turn_ + 1) % choices_.size();
    if (!failure.ok()) {
      end(FinishReason::kNone, failure, after, Leave::kFinish);
    } else if (running_ == 0) {
      end(one.finish == FinishReason::kLength ? FinishReason::kLength : FinishReason::kStop, OkStatus(),
          after, Leave::kFinish);
    } else if (backlog_ == 0 && pieces_.size() > limits_.max_pending_tokens) {
      slow_reader_ = true;
      end(FinishReason::kNone, slow_reader(), after, Leave::kRelease);
    }
  }
}

}  // namespace conclave::gateway
