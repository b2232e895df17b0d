#include "router_service/gateway/admission.h"

#include "absl/strings/cord.h"

namespace conclave::gateway {
namespace {
constexpr char kLimitPayload[] = "conclave.limit";
}

std::string_view limit_name(Limit limit) {
  switch (limit) {
    case Limit::kMessages:
      return "max_messages";
    case Limit::kTools:
      return "max_tools";
    case Limit::kPrompts:
      return "max_prompts";
    case Limit::kAnswers:
      return "max_answers";
    case Limit::kChoices:
      return "max_choices";
    case Limit::kTopLogprobs:
      return "max_top_logprobs";
    case Limit::kStops:
      return "max_stops";
    case Limit::kRequests:
      return "max_requests";
    case Limit::kQueuedRequests:
      return "max_queued_requests";
    case Limit::kQueuedTokens:
      return "max_queued_tokens";
    case Limit::kWaitingTexts:
      return "max_waiting_texts";
    case Limit::kSlowReader:
      return "max_stream_events";
    case Limit::kRouterContext:
      return "max_router_context_bytes";
    case Limit::kCount:
      break;
  }
  return "";
}

Status over_limit(Limit limit, std::string_view field, std::string_view message) {
  Status status = invalid_field(field, message);
  const std::string_view name = limit_name(limit);
  status.SetPayload(kLimitPayload, absl::Cord(absl::string_view(name.data(), name.size())));
  return status;
}

std::optional<Limit> limit_of(const Status& status) {
  const auto payload = status.GetPayload(kLimitPayload);
  if (!payload) return std::nullopt;
  const std::string name(*payload);
  for (size_t i = 0; i < static_cast<size_t>(Limit::kCount); ++i)
    if (limit_name(static_cast<Limit>(i)) == name) return static_cast<Limit>(i);
  return std::nullopt;
}

}  // namespace conclave::gateway
