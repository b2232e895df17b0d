#include "scheduler/core/requests.h"

#include <algorithm>
#include <utility>

#include "libs/base/check.h"

namespace conclave::scheduler {
namespace {
// Longer than any process lives; keeps now + time_left within range.
constexpr Nanos kMaxTimeLeft = 10ll * 365 * 24 * 3600 * kSecond;
constexpr uint64_t kRequestBytes = 1024;  // of a kept request beside what it lists, about
}  // namespace

Request& RequestTable::add(AcceptedRequest accepted, SessionId gateway, TimePoint now) {
  auto owned = std::make_unique<Request>();
  Request& request = *owned;
  request.accepted = std::move(accepted);
  request.arrival = next_arrival_++;
  request.accepted_at = now;
  request.deadline = now + std::clamp<Nanos>(request.accepted.time_left, 0, kMaxTimeLeft);
  request.gateway = gateway;
  request.logprobs = request.accepted.sampling.logprobs;
  request.prompt_sent = request.accepted.prompt_logprobs_delivered;
  request.prompt_base = request.prompt_sent + 1;
  request.choices.resize(request.accepted.choices);
  request.accepted.delivered.resize(request.choices.size());
  for (Choice& choice : request.choices) {
    choice.request = &request;
    choice.index = static_cast<uint32_t>(&choice - request.choices.data());
    DeliveredChoice& delivered = request.accepted.delivered[choice.index];
    choice.progress_at = now;
    if (delivered.ended) {
      choice.state = ChoiceState::kEnded;
      choice.end_sent = true;
      if (request.resumable()) choice.generated = std::move(delivered.tokens);
      choice.sent = static_cast<uint32_t>(choice.generated.size());
      continue;
    }
    if (request.live++ == 0) request.account = queue_.arrive(request.accepted.tenant);
    choice.generated = std::move(delivered.tokens);
    choice.sent = static_cast<uint32_t>(choice.generated.size());
    if (request.accepted.sampling.logprobs) {
      choice.logprobs.resize(choice.generated.size());
      choice.top_logprobs.resize(choice.generated.size());
    }
    queue_.push(choice);
  }
  request.accepted.delivered.clear();
  prompt_values_ += request.prompt_values();
  context_bytes_ += request.accepted.router_context.size();
  CONCLAVE_CHECK(requests_.emplace(request.id(), std::move(owned)).second);
  set_timer(request);
  return request;
}

Request* RequestTable::find(RequestId id) {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second.get();
}

Choice* RequestTable::find(SeqId seq) {
  const auto it = by_seq_.find(seq);
  return it == by_seq_.end() ? nullptr : it->second;
}

void RequestTable::erase(Request& request) {
  for (Choice& choice : request.choices) leave_state(choice);
  if (request.live > 0) queue_.depart(request.account);
  prompt_values_ -= request.prompt_values();
  context_bytes_ -= request.accepted.router_context.size();
  unkeep(request);
  if (!request.gateway) --detached_;
  const RequestId id = request.id();
  timers_.erase({timer_set_.at(id), id});
  timer_set_.erase(id);
  requests_.erase(id);
}

void RequestTable::leave_state(Choice& choice) {
  if (choice.state == ChoiceState::kWaiting) {
    if (choice.parked) --choice.request->parked;
    queue_.erase(choice);
  } else if (choice.state == ChoiceState::kRunning) {
    by_seq_.erase(choice.seq);
    choice.seq = {};
    choice.worker = {};
  }
}

void RequestTable::park(Choice& choice) {
  CONCLAVE_CHECK(choice.state == ChoiceState::kWaiting);
  queue_.park(choice);
  ++choice.request->parked;
}

void RequestTable::unpark(Request& request) {
  if (request.parked == 0) return;
  for (Choice& choice : request.choices) {
    if (choice.parked) queue_.unpark(choice);
  }
  request.parked = 0;
}

void RequestTable::set_waiting(Choice& choice) {
  leave_state(choice);
  unpark(*choice.request);
  choice.state = ChoiceState::kWaiting;
  queue_.push(choice);
}

void RequestTable::set_running(Choice& choice, Incarnation worker, SeqId seq) {
  leave_state(choice);
  choice.state = ChoiceState::kRunning;
  choice.worker = worker;
  choice.seq = seq;
  CONCLAVE_CHECK(by_seq_.emplace(seq, &choice).second);
}

void RequestTable::set_ended(Choice& choice, FinishReason reason, std::string error) {
  CONCLAVE_CHECK(choice.state != ChoiceState::kEnded && reason != FinishReason::kNone);
  leave_state(choice);
  unpark(*choice.request);
  choice.state = ChoiceState::kEnded;
  choice.finish = reason;
  choice.error = std::move(error);
  Request& request = *choice.request;
  request.worst = std::max(request.worst, reason);
  if (--request.live == 0) queue_.depart(std::exchange(request.account, nullptr));
  set_timer(request);
}

void RequestTable::attach(Request& request, SessionId gateway, Incarnation holder) {
  CONCLAVE_CHECK(gateway);
  unkeep(request);
  if (!request.gateway) --detached_;
  request.gateway = gateway;
  request.holder = holder;
  request.grace_until = kNever;
  set_timer(request);
}

void RequestTable::detach(Request& request, TimePoint grace_until) {
  if (request.gateway) ++detached_;
  request.gateway = {};
  request.grace_until = grace_until;
  set_timer(request);
}

void RequestTable::keep(Request& request, TimePoint grace_until) {
  CONCLAVE_CHECK(request.ended() && request.resumable());
  if (request.kept_order != 0) return;
  if (request.gateway) detach(request, grace_until);
  uint64_t bytes = kRequestBytes + request.accepted.router_context.size() +
                   request.accepted.prompt.size() * sizeof(TokenId);
  for (const Choice& choice : request.choices) {
    bytes += choice.generated.size() * sizeof(TokenId) + choice.logprobs.size() * sizeof(float);
    for (const auto& top : choice.top_logprobs) bytes += sizeof(top) + top.size() * sizeof(TokenLogprob);
  }
  for (const PromptLogprob& one : request.prompt_logprobs) {
    bytes += sizeof(one) + one.top.size() * sizeof(TokenLogprob);
  }
  request.kept_order = next_kept_++;
  request.kept_bytes = bytes;
  kept_bytes_ += bytes;
  kept_.emplace(request.kept_order, request.id());
}

void RequestTable::unkeep(Request& request) {
  if (request.kept_order == 0) return;
  kept_.erase(std::exchange(request.kept_order, 0));
  kept_bytes_ -= std::exchange(request.kept_bytes, 0);
}

Request* RequestTable::oldest_kept() { return kept_.empty() ? nullptr : find(kept_.begin()->second); }

void RequestTable::forget_context(Request& request) {
  context_bytes_ -= request.accepted.router_context.size();
  request.accepted.router_context = {};
}

std::vector<Request*> RequestTable::all() {
  std::vector<Request*> result;
  result.reserve(requests_.size());
  for (const auto& [id, request] : requests_) result.push_back(request.get());
  std::sort(result.begin(), result.end(), [](Request* a, Request* b) { return a->arrival < b->arrival; });
  return result;
}

void RequestTable::append(Choice& choice, SampledToken& token, TimePoint now) {
  Request& request = *choice.request;
  choice.progress_at = now;
  // In pieces: most answers end long before max_tokens, and doubling copies a long one often.
  if (choice.generated.size() == choice.generated.capacity()) {
    choice.generated.reserve(choice.generated.size() + std::max<size_t>(32, choice.generated.size()));
  }
  choice.generated.push_back(token.token);
  queue_.charge(request.account, 1);
  if (request.parked > 0) unpark(request);
  if (request.logprobs) {
    choice.logprobs.push_back(token.logprob);
    choice.top_logprobs.push_back(std::move(token.top_logprobs));
  }
}

TimePoint RequestTable::timer_of(const Request& request) {
  // An ended request has no deadline any more, only the time it is kept for its gateway.
  return request.ended() ? request.grace_until : std::min(request.deadline, request.grace_until);
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

std::vector<Choice*> RequestTable::running_on(Incarnation worker) {
  std::vector<Choice*> result;
  for (const auto& [seq, choice] : by_seq_) {
    if (choice->worker == worker) result.push_back(choice);
  }
  std::sort(result.begin(), result.end(), [](Choice* a, Choice* b) { return a->seq < b->seq; });
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
  size_t waiting = 0;
  size_t running = 0;
  uint32_t detached = 0;
  uint64_t prompt_values = 0;
  size_t kept = 0;
  uint64_t kept_bytes = 0;
  uint64_t context_bytes = 0;
  for (const auto& [id, request] : requests_) {
    kept += request->kept_order != 0;
    kept_bytes += request->kept_bytes;
    context_bytes += request->accepted.router_context.size();
    if ((request->kept_order != 0) != (request->ended() && request->resumable())) {
      return internal_error("a request is kept that is not to be, or the other way round");
    }
    if (!request->gateway) ++detached;
    if (timer_set_.at(id) != timer_of(*request)) return internal_error("a request's timer is stale");
    uint32_t live = 0;
    uint32_t parked = 0;
    prompt_values += request->prompt_values();
    for (const Choice& choice : request->choices) {
      if (choice.request != request.get()) return internal_error("a choice belongs to another request");
      if (choice.state == ChoiceState::kEnded) continue;
      ++live;
      parked += choice.parked;
      if (choice.state == ChoiceState::kWaiting) {
        ++waiting;
        if (!queue_.holds(choice)) return internal_error("a waiting choice is not queued");
      } else {
        ++running;
        const auto it = by_seq_.find(choice.seq);
        if (it == by_seq_.end() || it->second != &choice) {
          return internal_error("a running choice has no sequence");
        }
      }
    }
    if ((live > 0) != (request->account != nullptr)) return internal_error("a request has no account");
    if (parked != request->parked) return internal_error("a request's parked choices are miscounted");
    if (live != request->live) return internal_error("a request's live choices are miscounted");
    if (live == 0 && request->gateway) {
      return internal_error("an ended request is kept although its gateway is attached");
    }
  }
  if (waiting != queue_.size()) return internal_error("the queue holds requests that do not wait");
  if (running != by_seq_.size()) return internal_error("a sequence has no running request");
  RETURN_IF_ERROR(queue_.audit());
  if (prompt_values != prompt_values_) return internal_error("prompt log-probabilities are miscounted");
  if (kept != kept_.size() || kept_bytes != kept_bytes_)
    return internal_error("kept requests are miscounted");
  if (context_bytes != context_bytes_) return internal_error("router contexts are miscounted");
  if (detached != detached_) return internal_error("detached requests are miscounted");
  if (timers_.size() != requests_.size() || timer_set_.size() != requests_.size()) {
    return internal_error("requests and timers differ in number");
  }
  return OkStatus();
}

}  // namespace conclave::scheduler
