// The gateway's session: submissions, acknowledgements, tokens, the fleet.
#include "libs/rpc/convert.h"
#include "libs/rpc/convert_checks.h"
#include "libs/rpc/convert_logprobs.h"

namespace conclave::rpc {

void to_proto(const AcceptedRequest& from, pb::SubmitRequest* to) {
  to_proto(from.id, to->mutable_id());
  to->mutable_prompt()->Assign(from.prompt.begin(), from.prompt.end());
  to_proto(from.sampling, to->mutable_sampling());
  to->set_choices(from.choices);
  to->set_time_left_ns(from.time_left);
  to->set_tenant(wire_text(from.tenant, kMaxNameBytes));
  for (const DeliveredChoice& choice : from.delivered) {
    pb::DeliveredChoice* out = to->add_delivered();
    out->mutable_tokens()->Assign(choice.tokens.begin(), choice.tokens.end());
    out->set_ended(choice.ended);
  }
  to->set_prompt_logprobs_delivered(from.prompt_logprobs_delivered);
  to->set_resubmitted(from.resubmitted);
  to->set_priority(from.priority);
  to->set_cache_salt(wire_text(from.cache_salt, kMaxCacheSaltBytes));
  to->set_router_context(from.router_context);
  const TraceContext& trace = from.trace;
  if (trace.followed || (trace.trace_hi | trace.trace_lo) != 0) to_proto(trace, to->mutable_trace());
}

StatusOr<AcceptedRequest> from_proto(const pb::SubmitRequest& from) {
  AcceptedRequest to;
  ASSIGN_OR_RETURN(to.id, from_proto(from.id()));
  if (from.prompt_size() == 0) return invalid_field("prompt", "prompt is empty");
  RETURN_IF_ERROR(check_count("prompt", from.prompt_size(), kMaxPositions));
  for (uint32_t token : from.prompt()) RETURN_IF_ERROR(check_at_most("prompt", token, kMaxVocab));
  ASSIGN_OR_RETURN(to.sampling, from_proto(from.sampling()));
  RETURN_IF_ERROR(check_nonzero("choices", from.choices()));
  RETURN_IF_ERROR(check_at_most("choices", from.choices(), kMaxChoices));
  RETURN_IF_ERROR(check_duration("time_left_ns", from.time_left_ns(), kMaxDuration));
  RETURN_IF_ERROR(check_text("tenant", from.tenant(), kMaxNameBytes));
  RETURN_IF_ERROR(check_text("cache_salt", from.cache_salt(), kMaxCacheSaltBytes));
  to.prompt.assign(from.prompt().begin(), from.prompt().end());
  to.choices = from.choices();
  to.time_left = from.time_left_ns();
  to.tenant = from.tenant();
  RETURN_IF_ERROR(check_count("delivered", from.delivered_size(), from.choices()));
  for (const pb::DeliveredChoice& choice : from.delivered()) {
    RETURN_IF_ERROR(check_count("delivered.tokens", choice.tokens_size(), kMaxPositions));
    for (uint32_t token : choice.tokens())
      RETURN_IF_ERROR(check_at_most("delivered.tokens", token, kMaxVocab));
    to.delivered.push_back({{choice.tokens().begin(), choice.tokens().end()}, choice.ended()});
  }
  RETURN_IF_ERROR(
      check_at_most("prompt_logprobs_delivered", from.prompt_logprobs_delivered(), to.prompt.size()));
  to.prompt_logprobs_delivered = from.prompt_logprobs_delivered();
  to.resubmitted = from.resubmitted();
  to.priority = from.priority();
  to.cache_salt = from.cache_salt();
  RETURN_IF_ERROR(check_text("router_context", from.router_context(), kMaxRouterContextBytes));
  to.router_context = from.router_context();
  if (from.has_trace()) to.trace = from_proto(from.trace());
  return to;
}

void to_proto(RequestId id, const Status& status, pb::SubmitReply* to) {
  to_proto(id, to->mutable_id());
  to->set_code(static_cast<uint32_t>(status.code()));
  to->set_message(wire_text(message_of(status)));
  to->set_field(wire_text(field_of(status), kMaxNameBytes));
  to->set_retry_after_ns(retry_after_of(status));
}

StatusOr<SubmitAnswer> from_proto(const pb::SubmitReply& from) {
  SubmitAnswer to;
  ASSIGN_OR_RETURN(to.id, from_proto(from.id()));
  RETURN_IF_ERROR(check_enum("submit_reply.code", static_cast<int>(from.code()), 0, 16));
  RETURN_IF_ERROR(check_text("submit_reply.message", from.message(), kMaxTextBytes));
  RETURN_IF_ERROR(check_text("submit_reply.field", from.field(), kMaxNameBytes));
  if (from.code() != 0) {
    to.status = make_status(static_cast<StatusCode>(from.code()), from.message());
    if (!from.field().empty()) to.status = with_field(to.status, from.field());
    RETURN_IF_ERROR(check_duration("submit_reply.retry_after_ns", from.retry_after_ns(), kMaxDuration));
    to.status = with_retry_after(to.status, from.retry_after_ns());
  }
  to.resumable = from.resumable();
  return to;
}

void to_proto(RequestId id, const Status& status, const AdoptedRequest* adopted, pb::AdoptReply* to) {
  to_proto(id, to->mutable_id());
  to->set_code(static_cast<uint32_t>(status.code()));
  to->set_message(wire_text(message_of(status)));
  if (adopted == nullptr) return;
  to_proto(adopted->request, to->mutable_request());
  to->set_generated(adopted->generated);
}

StatusOr<AdoptAnswer> from_proto(const pb::AdoptReply& from) {
  AdoptAnswer to;
  ASSIGN_OR_RETURN(to.id, from_proto(from.id()));
  RETURN_IF_ERROR(check_enum("adopt_reply.code", static_cast<int>(from.code()), 0, 16));
  RETURN_IF_ERROR(check_text("adopt_reply.message", from.message(), kMaxTextBytes));
  if (from.code() != 0) {
    to.status = make_status(static_cast<StatusCode>(from.code()), from.message());
    return to;
  }
  ASSIGN_OR_RETURN(to.adopted.request, from_proto(from.request()));
  if (!(to.adopted.request.id == to.id)) {
    return invalid_field("adopt_reply.request.id", "adopt_reply.request.id is another request's");
  }
  to.adopted.generated = from.generated();
  return to;
}

void to_proto(const TokenEvent& from, pb::TokenEvent* to) {
  to_proto(from.request, to->mutable_id());
  to->set_choice(from.choice);
  to->set_index(from.index);
  to->mutable_tokens()->Assign(from.tokens.begin(), from.tokens.end());
  to->mutable_logprobs()->Assign(from.logprobs.begin(), from.logprobs.end());
  for (const std::vector<TokenLogprob>& list : from.top_logprobs) {
    to_proto(list, to->add_top_logprobs()->mutable_entries());
  }
  to->set_finish(static_cast<pb::FinishReason>(from.finish));
  to->set_error(wire_text(from.error));
  to->set_prompt_start(from.prompt_start);
  to_proto(from.prompt_logprobs, to->mutable_prompt_logprobs());
  if (from.cached_tokens) to->set_cached_tokens(*from.cached_tokens);
}

StatusOr<TokenEvent> from_proto(const pb::TokenEvent& from) {
  TokenEvent to;
  ASSIGN_OR_RETURN(to.request, from_proto(from.id()));
  RETURN_IF_ERROR(check_at_most("tokens.choice", from.choice(), kMaxChoices - 1));
  RETURN_IF_ERROR(check_at_most("tokens.index", from.index(), kMaxPositions));
  RETURN_IF_ERROR(check_count("tokens.tokens", from.tokens_size(), kMaxPositions));
  if (from.logprobs_size() != 0 && from.logprobs_size() != from.tokens_size()) {
    return invalid_field("tokens.logprobs", "tokens.logprobs has another length than tokens.tokens");
  }
  if (from.top_logprobs_size() != 0 && from.top_logprobs_size() != from.tokens_size()) {
    return invalid_field("tokens.top_logprobs", "tokens.top_logprobs has another length than tokens.tokens");
  }
  RETURN_IF_ERROR(check_enum("tokens.finish", from.finish(), 0, static_cast<int>(FinishReason::kError)));
  RETURN_IF_ERROR(check_text("tokens.error", from.error(), kMaxTextBytes));
  for (uint32_t token : from.tokens()) RETURN_IF_ERROR(check_at_most("tokens.tokens", token, kMaxVocab));
  for (float value : from.logprobs()) RETURN_IF_ERROR(check_logprob("tokens.logprobs", value));
  to.choice = from.choice();
  to.index = from.index();
  to.tokens.assign(from.tokens().begin(), from.tokens().end());
  to.logprobs.assign(from.logprobs().begin(), from.logprobs().end());
  for (const pb::TopLogprobs& list : from.top_logprobs()) {
    ASSIGN_OR_RETURN(std::vector<TokenLogprob> top,
                     top_logprobs_from_proto("tokens.top_logprobs", list.entries()));
    to.top_logprobs.push_back(std::move(top));
  }
  ASSIGN_OR_RETURN(to.prompt_logprobs,
                   prompt_logprobs_from_proto(from.prompt_start(), from.prompt_logprobs()));
  to.prompt_start = from.prompt_start();
  if (from.has_cached_tokens()) {
    RETURN_IF_ERROR(check_at_most("tokens.cached_tokens", from.cached_tokens(), kMaxPositions));
    to.cached_tokens = from.cached_tokens();
  }
  to.finish = static_cast<FinishReason>(from.finish());
  to.error = from.error();
  return to;
}

StatusOr<std::vector<TokenEvent>> from_proto(const pb::TokenBatch& from) {
  const int size = from.token_size();
  RETURN_IF_ERROR(check_count("token_batch", size, kMaxPlanEntries));
  RETURN_IF_ERROR(check_column("token_batch.id_hi", from.id_hi_size(), size));
  RETURN_IF_ERROR(check_column("token_batch.id_lo", from.id_lo_size(), size));
  RETURN_IF_ERROR(check_column("token_batch.index", from.index_size(), size));
  if (from.choice_size() != 0) RETURN_IF_ERROR(check_column("token_batch.choice", from.choice_size(), size));
  if (from.finish_size() != 0) RETURN_IF_ERROR(check_column("token_batch.finish", from.finish_size(), size));
  RETURN_IF_ERROR(check_all_at_most("token_batch.choice", from.choice(), kMaxChoices - 1));
  RETURN_IF_ERROR(check_all_at_most("token_batch.index", from.index(), kMaxPositions));
  RETURN_IF_ERROR(check_all_at_most("token_batch.token", from.token(), kMaxVocab));
  for (const int finish : from.finish()) {
    RETURN_IF_ERROR(check_enum("token_batch.finish", finish, 0, static_cast<int>(FinishReason::kError)));
  }
  std::vector<TokenEvent> to(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) {
    TokenEvent& event = to[static_cast<size_t>(i)];
    event.request = RequestId{from.id_hi(i), from.id_lo(i)};
    if (event.request == RequestId{}) return invalid_field("token_batch.id", "token_batch.id is missing");
    event.index = from.index(i);
    event.tokens.assign(1, from.token(i));
    if (from.choice_size() != 0) event.choice = from.choice(i);
    if (from.finish_size() != 0) event.finish = static_cast<FinishReason>(from.finish(i));
  }
  return to;
}

void to_proto(const FleetInfo& from, pb::FleetInfo* to) {
  to->set_ready(from.ready);
  to->set_not_ready(wire_text(from.not_ready));
  to->set_max_positions(from.max_positions);
  to->set_numerics_id(wire_text(from.numerics_id, kMaxNameBytes));
  to->set_model_fingerprint(wire_text(from.model_fingerprint, kMaxNameBytes));
  to->set_loaded_permille(from.loaded_permille);
  to->set_shard_set(from.shard_set);
  to->set_max_router_context_bytes(from.max_router_context_bytes.value_or(0));
}

StatusOr<FleetInfo> from_proto(const pb::FleetInfo& from) {
  RETURN_IF_ERROR(check_text("fleet.not_ready", from.not_ready(), kMaxTextBytes));
  RETURN_IF_ERROR(check_at_most("fleet.max_positions", from.max_positions(), kMaxPositions));
  RETURN_IF_ERROR(check_text("fleet.numerics_id", from.numerics_id(), kMaxNameBytes));
  RETURN_IF_ERROR(check_text("fleet.model_fingerprint", from.model_fingerprint(), kMaxNameBytes));
  RETURN_IF_ERROR(check_at_most("fleet.loaded_permille", from.loaded_permille(), 1000));
  FleetInfo to;
  to.loaded_permille = from.loaded_permille();
  to.shard_set = from.shard_set();
  RETURN_IF_ERROR(check_at_most("fleet.max_router_context_bytes", from.max_router_context_bytes(),
                                kMaxRouterContextBytes));
  to.max_router_context_bytes = from.max_router_context_bytes();
  to.ready = from.ready();
  to.not_ready = from.not_ready();
  to.max_positions = from.max_positions();
  to.numerics_id = from.numerics_id();
  to.model_fingerprint = from.model_fingerprint();
  return to;
}

}  // namespace conclave::rpc
