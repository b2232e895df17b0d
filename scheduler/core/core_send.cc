// Ends of choices and requests, and what gateways are sent.
#include <algorithm>
#include <string>
#include <string_view>

#include "libs/base/check.h"
#include "scheduler/core/core.h"

namespace conclave::scheduler {
namespace {

// Prompt tokens whose log-probabilities one event carries.
constexpr uint32_t kPromptPiece = 256;
// Tokens of one event: a gateway that takes a request up again may lack many.
constexpr uint32_t kTokenPiece = 4096;

std::string_view finish_name(FinishReason reason) {
  constexpr std::string_view kNames[] = {"none", "stop", "length", "cancelled", "deadline", "error"};
  return kNames[static_cast<size_t>(reason)];
}

}  // namespace

// Without sending anything.
void SchedulerCore::stop_choice(Choice& choice, FinishReason reason, const std::string& error) {
  if (choice.state == ChoiceState::kRunning) {
    const auto worker = workers_.find(choice.worker);
    CONCLAVE_CHECK(worker != workers_.end() || faults_.forget_lost_worker);
    if (worker != workers_.end()) worker->second.end(choice.seq);
    due_.push_back(choice.worker);
  }
  requests_.set_ended(choice, reason, error);
  if (choice.request->timeline != nullptr) {
    const std::string why(finish_name(reason));
    mark(*choice.request, TimelineMarkKind::kEnded, choice.index, error.empty() ? why : why + ": " + error);
    if (choice.request->ended()) choice.request->timeline->end();
  }
  if (!choice.request->ended()) return;
  switch (choice.request->worst) {
    case FinishReason::kStop:
      ++counters_.requests_finished_stop;
      break;
    case FinishReason::kLength:
      ++counters_.requests_finished_length;
      break;
    case FinishReason::kCancelled:
      ++counters_.requests_cancelled;
      break;
    case FinishReason::kDeadline:
      ++counters_.requests_deadline;
      break;
    case FinishReason::kError:
    case FinishReason::kNone:
      ++counters_.requests_failed;
      break;
  }
}

void SchedulerCore::end_choice(Choice& choice, FinishReason reason, const std::string& error) {
  if (choice.state == ChoiceState::kEnded) return;
  stop_choice(choice, reason, error);
  flush(*choice.request);
}

void SchedulerCore::end_request(Request& request, FinishReason reason, const std::string& error) {
  for (Choice& choice : request.choices) {
    if (choice.state != ChoiceState::kEnded) stop_choice(choice, reason, error);
  }
  flush(request);
}

void SchedulerCore::flush(Request& request) {
  if (request.gateway) {
    send_prompt_logprobs(request);
    for (Choice& choice : request.choices) send_choice(choice);
  }
  if (!request.ended()) return;
  if (request.resumable()) {
    requests_.keep(request, grace_from(last_now_));
  } else if (request.gateway) {
    requests_.erase(request);
  }
}

void SchedulerCore::send_prompt_logprobs(Request& request) {
  if (!request.gateway) return;
  while (request.prompt_sent + 1 < request.prompt_next()) {
    TokenEvent event;
    event.request = request.id();
    event.index =
        std::min(request.choices[0].sent, static_cast<uint32_t>(request.choices[0].generated.size()));
    event.prompt_start = request.prompt_sent + 1;
    const uint32_t count = std::min(request.prompt_next() - event.prompt_start, kPromptPiece);
    const auto from = request.prompt_logprobs.begin() + (event.prompt_start - request.prompt_base);
    event.prompt_logprobs.assign(from, from + count);
    request.prompt_sent += count;
    emit(SendTokens{request.gateway, std::move(event)});
  }
}

void SchedulerCore::send_choice(Choice& choice) {
  Request& request = *choice.request;
  if (!request.gateway || choice.end_sent) return;
  const bool ended = choice.state == ChoiceState::kEnded;
  const uint32_t count = static_cast<uint32_t>(choice.generated.size());
  uint32_t from = std::min(choice.sent, count);
  if (from == count && !ended) return;
  for (;;) {
    const uint32_t to = std::min(count, from + kTokenPiece);
    TokenEvent event;
    event.request = request.id();
    event.choice = choice.index;
    event.index = from;
    event.tokens.assign(choice.generated.begin() + from, choice.generated.begin() + to);
    if (request.logprobs) {
      event.logprobs.assign(choice.logprobs.begin() + from, choice.logprobs.begin() + to);
      event.top_logprobs.assign(choice.top_logprobs.begin() + from, choice.top_logprobs.begin() + to);
    }
    if (!request.cached_sent && !event.tokens.empty()) {
      event.cached_tokens = request.cached_tokens;
      request.cached_sent = true;
    }
    if (to == count) {
      event.finish = choice.finish;
      event.error = choice.error;
    }
    emit(SendTokens{request.gateway, std::move(event)});
    from = to;
    if (from == count) break;
  }
  choice.sent = std::max(choice.sent, count);
  choice.end_sent = ended;
}

}  // namespace conclave::scheduler
