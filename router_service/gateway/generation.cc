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
  Update update = std::exchange(pending_, Update{});
  update.accepted = accepted_;
  update.usage = {static_cast<uint32_t>(prompt_.size()), received_};
  // The end stays visible to whoever asks again.
  pending_.ended = update.ended;
  pending_.finish = update.finish;
  pending_.error = update.error;
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

void Generation::submit(AcceptedRequest request, std::unique_ptr<TokenText> decoder,
                        text::StopStringMatcher stops) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kPreparing) return;
    state_ = State::kSubmitting;
    sampling_ = request.sampling;
    prompt_ = request.prompt;
    decoder_ = std::move(decoder);
    stops_.emplace(std::move(stops));
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
  return {accepted_, {static_cast<uint32_t>(prompt_.size()), received_}};
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
    if (state_ == State::kEnded || event.choice != 0) return;
    if (event.index > received_) {
      end(FinishReason::kNone,
          internal_error("tokens " + std::to_string(received_) + " to " + std::to_string(event.index - 1) +
                         " never came from the scheduler"),
          after);
    }
    accepted_ = true;
    // A restarted scheduler may repeat what was delivered; the index says so.
    const size_t repeated = received_ - std::min(event.index, received_);
    for (size_t i = repeated; i < event.tokens.size() && state_ != State::kEnded; ++i) {
      const bool last = event.finish == FinishReason::kStop && i + 1 == event.tokens.size();
      const auto& ids = sampling_.stop_token_ids;
      const bool stop_token = last && std::find(ids.begin(), ids.end(), event.tokens[i]) != ids.end();
      take_token(event.tokens[i], stop_token, after);
    }
    if (state_ != State::kEnded && event.finish != FinishReason::kNone) {
      // The sequence has ended at the scheduler: nothing to cancel there.
      state_ = State::kPreparing;
      switch (event.finish) {
        case FinishReason::kStop:
        case FinishReason::kLength:
          finish_text();
          end(event.finish, OkStatus(), after);
          break;
        case FinishReason::kDeadline:
          end(FinishReason::kNone, deadline_exceeded("the request passed its deadline"), after);
          break;
        case FinishReason::kCancelled:
          end(FinishReason::kNone, cancelled("the request was cancelled"), after);
          break;
        case FinishReason::kError:
        case FinishReason::kNone:
          end(FinishReason::kNone, internal_error(event.error.empty() ? "the request failed" : event.error),
              after);
          break;
      }
    } else if (state_ != State::kEnded && pending_.tokens.size() > limits_.max_pending_tokens) {
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

void Generation::take_token(TokenId token, bool stop_token, After& after) {
  if (received_ == 0) to_first_token_ = steady_now() - arrived_;
  ++received_;
  pending_.tokens.push_back(token);
  if (stop_token) return;  // it ends the text and is not part of it
  std::string piece;
  decoder_->push(token, piece);
  if (received_ <= sampling_.min_tokens) {
    pending_.text += piece;
    return;
  }
  pending_.text += stops_->push(piece, received_ - 1);
  if (stops_->match()) end(FinishReason::kStop, OkStatus(), after);
}

void Generation::finish_text() {
  std::string rest;
  decoder_->flush(rest);
  pending_.text += stops_->push(rest, received_);
  if (!stops_->match()) pending_.text += stops_->flush();
}

void Generation::end(FinishReason finish, const Status& error, After& after) {
  if (state_ == State::kEnded) return;
  after.cancel = state_ == State::kSubmitted;
  cancel_wanted_ = state_ == State::kSubmitting;
  state_ = State::kEnded;
  if (place_) after.place = std::move(place_);
  pending_.ended = true;
  pending_.finish = finish;
  pending_.error = error;
  Summary summary;
  summary.id = id_;
  summary.code = error.code();
  summary.finish = finish;
  summary.accepted = accepted_;
  summary.slow_reader = slow_reader_;
  summary.usage = {static_cast<uint32_t>(prompt_.size()), received_};
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
  if (after.cancel) scheduler_.cancel(id_);
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
