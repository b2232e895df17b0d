#include "libs/rpc/open_requests.h"

#include <algorithm>
#include <string>

namespace conclave::rpc {

TimePoint OpenRequests::expiry_of(const Open& open) const {
  const TimePoint end = open.deadline > kNever - kDeadlineGrace ? kNever : open.deadline + kDeadlineGrace;
  return std::min(end, open.wait_until);
}

void OpenRequests::schedule(RequestId id, Open& open) {
  by_arrival_[open.arrival] = id;
  expiries_.erase({open.scheduled, open.arrival});
  open.scheduled = expiry_of(open);
  expiries_.insert({open.scheduled, open.arrival});
}

void OpenRequests::add(AcceptedRequest request, std::shared_ptr<RequestObserver> observer, TimePoint now) {
  const RequestId id = request.id;
  if (open_.contains(id)) {
    observer->on_refused(make_status(StatusCode::kAlreadyExists, "a request with this id is open"));
    return;
  }
  Open& open = open_[id];
  open.patience = open.wait_until = now + submit_wait_;
  open.deadline = request.time_left > kNever - now ? kNever : now + request.time_left;
  open.request = std::move(request);
  open.request.delivered.resize(open.request.choices);
  open.choice_cancelled.resize(open.request.choices);
  for (const DeliveredChoice& choice : open.request.delivered) open.running += !choice.ended;
  open.observer = std::move(observer);
  open.arrival = next_arrival_++;
  schedule(id, open);
}

const AcceptedRequest* OpenRequests::to_submit(RequestId id, TimePoint now) {
  const auto at = open_.find(id);
  if (at == open_.end()) return nullptr;
  Open& open = at->second;
  open.request.time_left = std::max<Nanos>(open.deadline - now, 0);
  open.request.resubmitted = open.accepted;
  metrics_.resubmissions += open.ever_sent;
  open.sent = open.ever_sent = true;
  open.wait_until = kNever;
  schedule(id, open);
  return &open.request;
}

std::vector<AcceptedRequest> OpenRequests::retry(TimePoint now) {
  std::vector<RequestId> ids;
  for (const auto& [arrival, id] : by_arrival_) {
    if (!open_.at(id).sent) ids.push_back(id);
  }
  std::vector<AcceptedRequest> out;
  for (RequestId id : ids) out.push_back(*to_submit(id, now));
  return out;
}

OpenRequests::Resume OpenRequests::connected(TimePoint now) {
  Resume resume;
  resume.cancel.assign(pending_cancels_.begin(), pending_cancels_.end());
  pending_cancels_.clear();
  std::vector<RequestId> ids;
  for (const auto& [arrival, id] : by_arrival_) ids.push_back(id);
  for (RequestId id : ids) resume.submit.push_back(*to_submit(id, now));
  return resume;
}

void OpenRequests::disconnected(TimePoint now) {
  std::vector<RequestId> cancelled;
  std::vector<std::pair<RequestId, uint32_t>> choices;
  for (auto& [id, open] : open_) {
    open.sent = false;
    for (uint32_t choice = 0; choice < open.choice_cancelled.size(); ++choice) {
      if (open.choice_cancelled[choice] && !open.request.delivered[choice].ended) {
        choices.emplace_back(id, choice);
      }
    }
    if (open.cancelled) {
      cancelled.push_back(id);
    } else if (!open.accepted && open.wait_until == kNever) {
      open.patience = open.wait_until = now + submit_wait_;
      schedule(id, open);
    }
  }
  // Nobody is there to end what its client cancelled; should the scheduler come back, it is told.
  for (const auto& [id, choice] : choices) {
    const auto at = open_.find(id);
    if (at->second.cancelled) continue;
    if (at->second.running == 1) cancel_later(id);
    finish_choice(at, choice, FinishReason::kCancelled);
  }
  for (RequestId id : cancelled) {
    cancel_later(id);
    const auto at = open_.find(id);
    if (at->second.accepted) {
      finish(at, FinishReason::kCancelled, "");
    } else {
      refuse(at, conclave::cancelled("the client cancelled the request"));
    }
  }
}

void OpenRequests::adopt(const AdoptedRequest& adopted, std::shared_ptr<RequestObserver> observer,
                         TimePoint now) {
  const RequestId id = adopted.request.id;
  drop(id);
  Open& open = open_[id];
  open.deadline = adopted.request.time_left > kNever - now ? kNever : now + adopted.request.time_left;
  open.request = adopted.request;
  open.request.delivered.assign(open.request.choices, {});
  open.request.prompt_logprobs_delivered = 0;
  open.choice_cancelled.resize(open.request.choices);
  open.running = open.request.choices;
  open.observer = observer;
  open.arrival = next_arrival_++;
  open.sent = open.ever_sent = open.accepted = true;
  schedule(id, open);
  observer->on_adopted(adopted);
}

void OpenRequests::drop(RequestId id) {
  if (const auto at = open_.find(id); at != open_.end()) erase(at);
}

bool OpenRequests::release(RequestId id, const RequestObserver* observer, bool connected) {
  const auto at = open_.find(id);
  if (at == open_.end() || at->second.observer.get() != observer) return false;
  const bool tell = connected && at->second.sent;
  erase(at);
  return tell;
}

void OpenRequests::on_reply(RequestId id, const Status& status, TimePoint now, bool resumable) {
  const auto at = open_.find(id);
  if (at == open_.end()) return;
  Open& open = at->second;
  if (status.ok()) {
    if (open.accepted) return;  // a resubmission; the observer knows
    open.accepted = true;
    if (resumable) open.observer->on_resumable();
    open.observer->on_accepted();
  } else if (!open.accepted && !open.cancelled && status.code() == StatusCode::kUnavailable &&
             now < open.patience) {
    open.sent = false;
    open.not_yet = status;
    open.wait_until = open.patience;
    schedule(id, open);
  } else if (!open.accepted) {
    refuse(at, status);
  } else {
    // Rule 2 forbids the scheduler to shed it; should it say no all the same, the request ends with the
    // cause.
    finish(at, FinishReason::kError, "the scheduler did not take the request again: " + message_of(status));
  }
}

namespace {

// Drops the first `known` entries of a list that may be absent.
template <class List>
void cut(List& list, size_t known) {
  if (!list.empty()) list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(known));
}

}  // namespace

Status OpenRequests::on_tokens(const TokenEvent& event) {
  const auto at = open_.find(event.request);
  if (at == open_.end()) return OkStatus();
  Open& open = at->second;
  if (event.choice >= open.request.choices) {
    return data_loss("tokens of choice " + std::to_string(event.choice) + " of a request with " +
                     std::to_string(open.request.choices));
  }
  if (!open.accepted) {  // the acknowledgement of this connection is implied
    open.accepted = true;
    open.observer->on_accepted();
  }
  DeliveredChoice& choice = open.request.delivered[event.choice];
  if (choice.ended) return OkStatus();  // a repeat
  const uint64_t have = choice.tokens.size();
  if (event.index > have) {
    return data_loss("tokens of a request jump from index " + std::to_string(have) + " to " +
                     std::to_string(event.index));
  }
  TokenEvent fresh = event;
  if (const size_t known = std::min<size_t>(have - event.index, event.tokens.size()); known > 0) {
    metrics_.duplicate_tokens += known;
    cut(fresh.tokens, known);
    cut(fresh.logprobs, known);
    cut(fresh.top_logprobs, known);
  }
  fresh.index = static_cast<uint32_t>(have);
  if (!event.prompt_logprobs.empty()) {
    const uint32_t next = open.request.prompt_logprobs_delivered + 1;  // the position that is due
    if (event.prompt_start > next) {
      return data_loss("prompt log-probabilities of a request jump from position " + std::to_string(next) +
                       " to " + std::to_string(event.prompt_start));
    }
    cut(fresh.prompt_logprobs, std::min<size_t>(next - event.prompt_start, event.prompt_logprobs.size()));
    fresh.prompt_start = next;
    open.request.prompt_logprobs_delivered += static_cast<uint32_t>(fresh.prompt_logprobs.size());
  }
  if (fresh.tokens.empty() && fresh.prompt_logprobs.empty() && fresh.finish == FinishReason::kNone) {
    return OkStatus();
  }
  choice.tokens.insert(choice.tokens.end(), fresh.tokens.begin(), fresh.tokens.end());
  const std::shared_ptr<RequestObserver> observer = open.observer;
  if (fresh.finish != FinishReason::kNone) {
    choice.ended = true;
    if (--open.running == 0) erase(at);
  }
  observer->on_tokens(fresh);
  return OkStatus();
}

bool OpenRequests::cancel(RequestId id, bool connected) {
  const auto at = open_.find(id);
  if (at == open_.end()) return false;
  Open& open = at->second;
  if (connected && open.sent) {
    const bool tell = !open.cancelled;
    open.cancelled = true;
    return tell;
  }
  if (open.ever_sent) cancel_later(id);
  if (open.accepted) {
    finish(at, FinishReason::kCancelled, "");
  } else {
    refuse(at, conclave::cancelled("the client cancelled the request"));
  }
  return false;
}

bool OpenRequests::cancel_choice(RequestId id, uint32_t choice, bool connected) {
  const auto at = open_.find(id);
  if (at == open_.end()) return false;
  Open& open = at->second;
  if (choice >= open.request.choices || open.request.delivered[choice].ended) return false;
  if (connected && open.sent) {
    const bool tell = !open.cancelled && !open.choice_cancelled[choice];
    open.choice_cancelled[choice] = true;
    return tell;
  }
  if (!open.accepted) return false;
  // The next scheduler learns it from what was delivered, or, when nothing is left to submit, by its id.
  if (open.running == 1) cancel_later(id);
  finish_choice(at, choice, FinishReason::kCancelled);
  return false;
}

void OpenRequests::cancel_later(RequestId id) {
  if (pending_cancels_.size() >= kMaxPendingCancels) pending_cancels_.pop_front();
  pending_cancels_.push_back(id);
}

void OpenRequests::expire(TimePoint now, const Status& why) {
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    const auto at = open_.find(by_arrival_.at(expiries_.begin()->second));
    Open& open = at->second;
    if (open.ever_sent) cancel_later(at->first);
    if (open.accepted) {
      finish(at, FinishReason::kDeadline, "");
    } else if (open.wait_until <= now) {
      refuse(at, open.not_yet.ok() ? why : open.not_yet);
    } else {
      refuse(at, deadline_exceeded("the request's deadline passed before the scheduler accepted it"));
    }
  }
}

TimePoint OpenRequests::next_expiry() const { return expiries_.empty() ? kNever : expiries_.begin()->first; }

void OpenRequests::end_all() {
  while (!open_.empty()) {
    const auto at = open_.begin();
    if (at->second.accepted) {
      finish(at, FinishReason::kCancelled, "");
    } else {
      refuse(at, unavailable("the router is stopping"));
    }
  }
}

TokenEvent OpenRequests::end_event(const AcceptedRequest& request, uint32_t choice, FinishReason reason) {
  TokenEvent event;
  event.request = request.id;
  event.choice = choice;
  event.index = static_cast<uint32_t>(request.delivered[choice].tokens.size());
  event.finish = reason;
  return event;
}

void OpenRequests::finish(Map::iterator at, FinishReason reason, const std::string& error) {
  const std::shared_ptr<RequestObserver> observer = at->second.observer;
  std::vector<TokenEvent> events;
  for (uint32_t choice = 0; choice < at->second.request.choices; ++choice) {
    if (at->second.request.delivered[choice].ended) continue;
    events.push_back(end_event(at->second.request, choice, reason));
    events.back().error = error;
  }
  erase(at);
  for (const TokenEvent& event : events) observer->on_tokens(event);
}

void OpenRequests::finish_choice(Map::iterator at, uint32_t choice, FinishReason reason) {
  Open& open = at->second;
  const std::shared_ptr<RequestObserver> observer = open.observer;
  const TokenEvent event = end_event(open.request, choice, reason);
  open.request.delivered[choice].ended = true;
  if (--open.running == 0) erase(at);
  observer->on_tokens(event);
}

void OpenRequests::refuse(Map::iterator at, Status cause) {
  const std::shared_ptr<RequestObserver> observer = at->second.observer;
  erase(at);
  observer->on_refused(cause);
}

void OpenRequests::erase(Map::iterator at) {
  expiries_.erase({at->second.scheduled, at->second.arrival});
  by_arrival_.erase(at->second.arrival);
  open_.erase(at);
}

}  // namespace conclave::rpc
