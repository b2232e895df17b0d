#include "router_service/gateway/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "libs/base/random.h"

namespace conclave::gateway {
namespace {

Status check_range(std::optional<double> value, double low, double high, bool low_open,
                   std::string_view field, std::string_view rule) {
  if (!value) return OkStatus();
  if (!std::isfinite(*value) || *value < low || *value > high || (low_open && *value == low))
    return invalid_field(field, rule);
  return OkStatus();
}

Status check_count(std::optional<int64_t> value, int64_t low, int64_t high, std::string_view field,
                   std::optional<Limit> limit = std::nullopt) {
  if (!value || (*value >= low && *value <= high)) return OkStatus();
  const std::string rule = "must be from " + std::to_string(low) + " to " + std::to_string(high);
  return limit && *value > high ? over_limit(*limit, field, rule) : invalid_field(field, rule);
}

Status check_stops(const GenerateRequest& request, const AdmissionLimits& limits) {
  if (request.stop.size() > limits.max_stop_strings)
    return over_limit(Limit::kStops, "stop",
                      "has more than " + std::to_string(limits.max_stop_strings) + " strings");
  for (const std::string& stop : request.stop) {
    if (stop.empty()) return invalid_field("stop", "a stop string must not be empty");
    if (stop.size() > limits.max_stop_string_bytes)
      return invalid_field(
          "stop", "a stop string is longer than " + std::to_string(limits.max_stop_string_bytes) + " bytes");
  }
  if (request.stop_token_ids.size() > limits.max_stop_token_ids)
    return over_limit(Limit::kStops, "stop_token_ids",
                      "has more than " + std::to_string(limits.max_stop_token_ids) + " ids");
  return OkStatus();
}

StatusOr<TokenId> token_in_vocabulary(int64_t id, const ModelSpec& model, std::string_view field) {
  if (id < 0 || id >= static_cast<int64_t>(model.vocab_size))
    return invalid_field(field, "the id " + std::to_string(id) + " is not in the vocabulary of " +
                                    std::to_string(model.vocab_size));
  return static_cast<TokenId>(id);
}

Status check_plain(const GenerateRequest& request, const AdmissionLimits& limits) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  RETURN_IF_ERROR(check_range(request.temperature, 0, 1e6, false, "temperature",
                              "must be between 0 (greedy) and 1000000"));
  RETURN_IF_ERROR(check_range(request.top_p, 0, 1, true, "top_p", "must be above 0 and at most 1"));
  RETURN_IF_ERROR(check_range(request.min_p, 0, 1, false, "min_p", "must be from 0 to 1"));
  if (request.top_k && (*request.top_k < -1 || *request.top_k > kMost))
    return invalid_field("top_k", "must be a positive number, or 0 or -1 for all tokens");
  const bool only_prompt = request.echo && request.max_tokens == 0;
  if (request.max_tokens && *request.max_tokens < 1 && !only_prompt)
    return invalid_field(request.max_tokens_field, "must be at least 1");
  if (request.min_tokens && *request.min_tokens < 0)
    return invalid_field("min_tokens", "must not be negative");
  if (request.min_tokens && request.max_tokens && *request.min_tokens > *request.max_tokens)
    return invalid_field("min_tokens", "must not be more than " + request.max_tokens_field);
  RETURN_IF_ERROR(check_count(request.n, 1, std::min(limits.max_choices, kMaxChoices), "n", Limit::kChoices));
  RETURN_IF_ERROR(check_count(request.top_logprobs, 0, limits.max_top_logprobs, request.top_logprobs_field,
                              Limit::kTopLogprobs));
  RETURN_IF_ERROR(check_count(request.prompt_logprobs, 0, limits.max_top_logprobs, "prompt_logprobs",
                              Limit::kTopLogprobs));
  RETURN_IF_ERROR(check_count(request.priority, std::numeric_limits<int32_t>::min(), kMost, "priority"));
  if (request.cache_salt.size() > kMaxCacheSaltBytes)
    return invalid_field("cache_salt", "is longer than " + std::to_string(kMaxCacheSaltBytes) + " bytes");
  if (request.name.size() > limits.max_name_bytes)
    return invalid_field("request_id", "is longer than " + std::to_string(limits.max_name_bytes) + " bytes");
  return check_stops(request, limits);
}

}  // namespace

StatusOr<SamplingParams> make_sampling(const GenerateRequest& request, const ModelSpec& model,
                                       uint32_t vocab_limit, const AdmissionLimits& limits) {
  RETURN_IF_ERROR(check_plain(request, limits));
  SamplingParams out;
  out.temperature =
      static_cast<float>(request.temperature.value_or(model.default_temperature.value_or(1.0f)));
  out.top_p = static_cast<float>(request.top_p.value_or(model.default_top_p.value_or(1.0f)));
  const int64_t top_k = request.top_k.value_or(model.default_top_k.value_or(0));
  out.top_k = top_k <= 0 ? 0 : static_cast<uint32_t>(top_k);
  out.min_p = static_cast<float>(request.min_p.value_or(model.default_min_p.value_or(0)));
  out.repetition_penalty =
      static_cast<float>(request.repetition_penalty.value_or(model.default_repetition_penalty.value_or(1)));
  out.presence_penalty = static_cast<float>(request.presence_penalty.value_or(0));
  out.frequency_penalty = static_cast<float>(request.frequency_penalty.value_or(0));
  for (const auto& [id, bias] : request.logit_bias) {
    ASSIGN_OR_RETURN(const TokenId token, token_in_vocabulary(id, model, "logit_bias"));
    out.logit_bias.push_back({token, static_cast<float>(bias)});
  }
  out.seed = request.seed ? static_cast<uint64_t>(*request.seed) : system_random_u64();
  out.ignore_eos = request.ignore_eos.value_or(false);
  if (!out.ignore_eos) out.stop_token_ids = model.stop_token_ids;
  for (const int64_t stop : request.stop_token_ids) {
    ASSIGN_OR_RETURN(const TokenId token, token_in_vocabulary(stop, model, "stop_token_ids"));
    auto& ids = out.stop_token_ids;
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  }
  out.vocab_limit = std::min(vocab_limit, model.vocab_size);
  out.logprobs = request.logprobs;
  out.top_logprobs = request.logprobs ? static_cast<uint32_t>(request.top_logprobs.value_or(0)) : 0;
  out.prompt_logprobs = request.prompt_logprobs.has_value();
  out.prompt_top_logprobs = static_cast<uint32_t>(request.prompt_logprobs.value_or(0));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  out.max_tokens = static_cast<uint32_t>(std::min(request.max_tokens.value_or(0), kMost));
  out.min_tokens = static_cast<uint32_t>(std::min(request.min_tokens.value_or(0), kMost));
  // The ranges that hold for all, before any work is spent.
  SamplingParams whole = out;
  if (whole.max_tokens == 0) whole.max_tokens = kMost;
  RETURN_IF_ERROR(validate(whole, model.vocab_size));
  return out;
}

}  // namespace conclave::gateway
