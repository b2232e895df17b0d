// Requests that another gateway can take over: what is kept for that, who may take them, and who may still
// end them.
#include <algorithm>
#include <string>

#include "libs/model/no_such_stream.h"
#include "scheduler/core/core.h"

namespace conclave::scheduler {
namespace {

// Of tokens and log-probabilities that one adoption sends at once; a gateway's connection holds several of
// them.
constexpr uint64_t kMaxReplayBytes = 16ull << 20;
// A gateway has this long to get all of a request that has ended.
constexpr Nanos kReplayTime = 60 * kSecond;

uint64_t replay_bytes(const Request& request) {
  uint64_t bytes = 0;
  for (const Choice& choice : request.choices) {
    bytes += choice.generated.size() * sizeof(TokenId) + choice.logprobs.size() * sizeof(float);
    for (const auto& top : choice.top_logprobs) bytes += top.size() * sizeof(TokenLogprob);
  }
  for (const PromptLogprob& one : request.prompt_logprobs) {
    bytes += sizeof(float) + one.top.size() * sizeof(TokenLogprob);
  }
  return bytes;
}

}  // namespace

void SchedulerCore::bound_context(AcceptedRequest& request) {
  const uint64_t bytes = request.router_context.size();
  if (bytes == 0) return;
  if (bytes <= options_.max_router_context_bytes &&
      requests_.context_bytes() + bytes <= options_.max_router_context_total_bytes) {
    return;
  }
  request.router_context = {};
  ++counters_.contexts_refused;
}

bool SchedulerCore::misses_logprobs(const AcceptedRequest& request) {
  if (request.sampling.prompt_logprobs && request.prompt_logprobs_delivered > 0) return true;
  return request.sampling.logprobs &&
         std::any_of(request.delivered.begin(), request.delivered.end(),
                     [](const DeliveredChoice& choice) { return !choice.tokens.empty(); });
}

bool SchedulerCore::may_cancel(const Request& request, SessionId gateway) const {
  if (!request.resumable()) return true;
  if (request.gateway) return request.gateway == gateway;
  // Its last holder may have come back on another connection.
  const auto it = gateways_.find(gateway);
  return it != gateways_.end() && it->second.hello.incarnation == request.holder;
}

Status SchedulerCore::check_adoptable(const Request& request) const {
  if (!request.resumable()) {
    return failed_precondition(
        "this request is not resumable: it was not started as such, or was cancelled, "
        "or there was no room for what that needs (max_router_context_bytes, "
        "max_router_context_total_bytes)");
  }
  if (request.incomplete) {
    return failed_precondition(
        "log-probabilities of this stream were lost with a scheduler that was restarted");
  }
  if (const uint64_t bytes = replay_bytes(request); bytes > kMaxReplayBytes) {
    return failed_precondition("this stream has " + std::to_string(bytes) +
                               " bytes of tokens and log-probabilities; at most " +
                               std::to_string(kMaxReplayBytes) + " can be resumed");
  }
  return OkStatus();
}

void SchedulerCore::handle(Adopt& event, TimePoint now) {
  const auto gateway = gateways_.find(event.gateway);
  if (gateway == gateways_.end()) return;
  Request* const request = requests_.find(event.request);
  Status status;
  // Another tenant's request looks as if there were none.
  if (request == nullptr || request->accepted.tenant != event.tenant) {
    status = no_such_stream();
  } else {
    status = check_adoptable(*request);
  }
  if (!status.ok()) {
    ++counters_.adoptions_refused;
    emit(ReplyAdopt{event.gateway, event.request, status});
    return;
  }
  ++counters_.requests_adopted;
  mark(*request, TimelineMarkKind::kAdopted);
  if (request->gateway && request->gateway != event.gateway) take_from_gateway(*request);
  requests_.attach(*request, event.gateway, gateway->second.hello.incarnation);
  request->prompt_sent = 0;
  request->cached_sent = false;
  auto adopted = std::make_shared<AdoptedRequest>();
  adopted->request = request->accepted;
  adopted->request.time_left = request->ended() ? kReplayTime : std::max<Nanos>(request->deadline - now, 0);
  for (Choice& choice : request->choices) {
    choice.sent = 0;
    choice.end_sent = false;
    adopted->generated += choice.generated.size();
  }
  emit(ReplyAdopt{event.gateway, event.request, OkStatus(), std::move(adopted)});
  flush(*request);
}

void SchedulerCore::take_from_gateway(Request& request) {
  for (Choice& choice : request.choices) {
    if (choice.end_sent) continue;
    TokenEvent event;
    event.request = request.id();
    event.choice = choice.index;
    event.index = std::min(choice.sent, static_cast<uint32_t>(choice.generated.size()));
    event.finish = FinishReason::kCancelled;
    event.error = "another connection has taken the stream over";
    emit(SendTokens{request.gateway, std::move(event)});
  }
}

void SchedulerCore::handle(Release& event, TimePoint now) {
  Request* const request = requests_.find(event.request);
  if (request == nullptr || !event.gateway || request->gateway != event.gateway) return;
  if (!request->resumable()) return end_request(*request, FinishReason::kCancelled, "");
  ++counters_.requests_released;
  mark(*request, TimelineMarkKind::kReleased);
  requests_.detach(*request, grace_from(now));
  if (!event.finished) return;
  for (Choice& choice : request->choices) {
    if (choice.state != ChoiceState::kEnded) stop_choice(choice, FinishReason::kCancelled, "");
  }
  flush(*request);
}

void SchedulerCore::trim_kept() {
  while (requests_.kept() > options_.max_resumable_requests ||
         requests_.kept_bytes() > options_.max_resumable_bytes) {
    ++counters_.resumable_dropped;
    requests_.erase(*requests_.oldest_kept());
  }
}

}  // namespace conclave::scheduler
