#include "libs/rpc/open_requests.h"

#include <algorithm>

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
  for (auto& [id, open] : open_) {
    open.sent = false;
    if (open.cancelled) {
      cancelled.push_back(id);
    } else if (!open.accepted && open.wait_until == kNever) {
      open.patience = open.wait_until = now + submit_wait_;
      schedule(id, open);
    }
  }
  // Nobody is there to end what its client cancelled; should the scheduler come back, it is told.
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

void OpenRequests::on_reply(RequestId id, const Status& status, TimePoint now) {
  const auto at = open_.find(id);
  if (at == open_.end()) return;
  Open& open = at->second;
  if (status.ok()) {
    if (open.accepted) return;  // a resubmission; the observer knows
    open.accepted = true;
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

Status OpenRequests::on_tokens(const TokenEvent& event) {
  const auto at = open_.find(event.request);
  if (at == open_.end()) return OkStatus();
  Open& open = at->second;
  if (!open.accepted) {  // the acknowledgement of this connection is implied
    open.accepted = true;
    open.observer->on_accepted();
  }
  std::vector<TokenId>& delivered = open.request.delivered;
  const uint64_t have = delivered.size();
  if (event.index > have) {
    return data_loss("tokens of a request jump from index " + std::to_string(have) + " to " +
                     std::to_string(event.index));
  }
  const size_t known = std::min<size_t>(have - event.index, event.tokens.size());
  metrics_.duplicate_tokens += known;
  TokenEvent fresh = event;
  if (known > 0) {
    const auto cut = [known](auto& list) {
      if (!list.empty()) list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(known));
    };
    cut(fresh.tokens);
    cut(fresh.logprobs);
    cut(fresh.top_logprobs);
  }
  fresh.index = static_cast<uint32_t>(have);
  if (fresh.tokens.empty() && fresh.finish == FinishReason::kNone) return OkStatus();
  delivered.insert(delivered.end(), fresh.tokens.begin(), fresh.tokens.end());
  const std::shared_ptr<RequestObserver> observer = open.observer;
  if (fresh.finish != FinishReason::kNone) erase(at);
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

void OpenRequests::finish(Map::iterator at, FinishReason reason, const std::string& error) {
  TokenEvent event;
  event.request = at->first;
  event.index = static_cast<uint32_t>(at->second.request.delivered.size());
  event.finish = reason;
  event.error = error;
  const std::shared_ptr<RequestObserver> observer = at->second.observer;
  erase(at);
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
