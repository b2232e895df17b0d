#include "scheduler/core/requests.h"

#include <algorithm>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {
// Longer than any process lives; keeps now + time_left within range.
constexpr Nanos kMaxTimeLeft = 10ll * 365 * 24 * 3600 * kSecond;
}  // namespace

Request& RequestTable::add(AcceptedRequest accepted, SessionId gateway, TimePoint now) {
  auto owned = std::make_unique<Request>();
  Request& request = *owned;
  request.accepted = std::move(accepted);
  request.arrival = next_arrival_++;
  request.deadline = now + std::clamp<Nanos>(request.accepted.time_left, 0, kMaxTimeLeft);
  request.gateway = gateway;
  request.generated = std::move(request.accepted.delivered);
  request.accepted.delivered = {};
  request.sent = static_cast<uint32_t>(request.generated.size());
  if (request.accepted.sampling.logprobs) {
    request.logprobs.resize(request.generated.size());
    request.top_logprobs.resize(request.generated.size());
  }
  CONCLAVE_CHECK(requests_.emplace(request.id(), std::move(owned)).second);
  waiting_.emplace(request.arrival, &request);
  waiting_tokens_ += request.prompt_tokens();
  set_timer(request);
  return request;
}

Request* RequestTable::find(RequestId id) {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second.get();
}

Request* RequestTable::find(SeqId seq) {
  const auto it = by_seq_.find(seq);
  return it == by_seq_.end() ? nullptr : it->second;
}

void RequestTable::erase(Request& request) {
  leave_state(request);
  if (!request.gateway) --detached_;
  const RequestId id = request.id();
  timers_.erase({timer_set_.at(id), id});
  timer_set_.erase(id);
  requests_.erase(id);
}

void RequestTable::leave_state(Request& request) {
  if (request.state == RequestState::kWaiting) {
    waiting_.erase(request.arrival);
    waiting_tokens_ -= request.prompt_tokens();
  } else if (request.state == RequestState::kRunning) {
    by_seq_.erase(request.seq);
    request.seq = {};
    request.worker = {};
  }
}

void RequestTable::set_waiting(Request& request) {
  leave_state(request);
  request.state = RequestState::kWaiting;
  waiting_.emplace(request.arrival, &request);
  waiting_tokens_ += request.prompt_tokens();
}

void RequestTable::set_running(Request& request, Incarnation worker, SeqId seq) {
  leave_state(request);
  request.state = RequestState::kRunning;
  request.worker = worker;
  request.seq = seq;
  CONCLAVE_CHECK(by_seq_.emplace(seq, &request).second);
}

void RequestTable::set_ended(Request& request, FinishReason reason, std::string error) {
  CONCLAVE_CHECK(request.state != RequestState::kEnded && reason != FinishReason::kNone);
  leave_state(request);
  request.state = RequestState::kEnded;
  request.finish = reason;
  request.error = std::move(error);
  set_timer(request);
}

void RequestTable::attach(Request& request, SessionId gateway) {
  CONCLAVE_CHECK(gateway);
  if (!request.gateway) --detached_;
  request.gateway = gateway;
  request.grace_until = kNever;
  set_timer(request);
}

void RequestTable::detach(Request& request, TimePoint grace_until) {
  if (request.gateway) ++detached_;
  request.gateway = {};
  request.grace_until = grace_until;
  set_timer(request);
}

void RequestTable::append(Request& request, const SampledToken& token) {
  request.generated.push_back(token.token);
  if (request.accepted.sampling.logprobs) {
    request.logprobs.push_back(token.logprob);
    request.top_logprobs.push_back(token.top_logprobs);
  }
}

TimePoint RequestTable::timer_of(const Request& request) {
  // An ended request has no deadline any more, only the time it is kept for its gateway.
  return request.state == RequestState::kEnded ? request.grace_until
                                               : std::min(request.deadline, request.grace_until);
}

void RequestTable::set_timer(Request& request) {
  const TimePoint when = timer_of(request);
  const auto [it, fresh] = timer_set_.emplace(request.id(), when);
  if (!fresh) {
    if (it->second == when) return;
    timers_.erase({it->second, request.id()});
    it->second = when;
  }
  timers_.emplace(when, request.id());
}

std::vector<Request*> RequestTable::running_on(Incarnation worker) {
  std::vector<Request*> result;
  for (const auto& [seq, request] : by_seq_) {
    if (request->worker == worker) result.push_back(request);
  }
  return result;
}

std::vector<Request*> RequestTable::of_gateway(SessionId gateway) {
  std::vector<Request*> result;
  for (const auto& [id, request] : requests_) {
    if (request->gateway == gateway) result.push_back(request.get());
  }
  std::sort(result.begin(), result.end(), [](Request* a, Request* b) { return a->arrival < b->arrival; });
  return result;
}

std::vector<Request*> RequestTable::expired(TimePoint now) {
  std::vector<Request*> result;
  for (const auto& [when, id] : timers_) {
    if (when > now) break;
    result.push_back(requests_.at(id).get());
  }
  return result;
}

Status RequestTable::audit() const {
  uint64_t tokens = 0;
  size_t waiting = 0;
  size_t running = 0;
  uint32_t detached = 0;
  for (const auto& [id, request] : requests_) {
    if (!request->gateway) ++detached;
    if (timer_set_.at(id) != timer_of(*request)) return internal_error("a request's timer is stale");
    if (request->state == RequestState::kWaiting) {
      ++waiting;
      tokens += request->prompt_tokens();
      const auto it = waiting_.find(request->arrival);
      if (it == waiting_.end() || it->second != request.get())
        return internal_error("a waiting request is not queued");
    } else if (request->state == RequestState::kRunning) {
      ++running;
      const auto it = by_seq_.find(request->seq);
      if (it == by_seq_.end() || it->second != request.get())
        return internal_error("a running request has no sequence");
    } else if (request->gateway) {
      return internal_error("an ended request is kept although its gateway is attached");
    }
  }
  if (waiting != waiting_.size()) return internal_error("the queue holds requests that do not wait");
  if (running != by_seq_.size()) return internal_error("a sequence has no running request");
  if (tokens != waiting_tokens_) return internal_error("waiting tokens are miscounted");
  if (detached != detached_) return internal_error("detached requests are miscounted");
  if (timers_.size() != requests_.size() || timer_set_.size() != requests_.size()) {
    return internal_error("requests and timers differ in number");
  }
  return OkStatus();
}

}  // namespace conclave::scheduler
