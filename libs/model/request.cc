#include "libs/model/request.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace conclave {
namespace {

Status check_range(std::string_view field, float value, float low, float high) {
  if (std::isfinite(value) && value >= low && value <= high) return OkStatus();
  return invalid_field(field, "must be a number from " + std::to_string(low) + " to " + std::to_string(high));
}

Status check_count(std::string_view field, size_t count, size_t limit) {
  if (count <= limit) return OkStatus();
  return invalid_field(
      field, "has " + std::to_string(count) + " entries; at most " + std::to_string(limit) + " are accepted");
}

Status check_at_most(std::string_view field, uint64_t value, uint64_t limit) {
  if (value <= limit) return OkStatus();
  return invalid_field(field, "is " + std::to_string(value) + "; at most " + std::to_string(limit));
}

}  // namespace

Status validate(const SamplingParams& p) {
  RETURN_IF_ERROR(check_range("temperature", p.temperature, 0, 1e6f));
  RETURN_IF_ERROR(check_range("top_p", p.top_p, 0, 1));
  RETURN_IF_ERROR(check_range("min_p", p.min_p, 0, 1));
  if (p.max_tokens == 0) return invalid_field("max_tokens", "must be at least 1");
  if (p.min_tokens > p.max_tokens) return invalid_field("min_tokens", "must not be more than max_tokens");
  RETURN_IF_ERROR(check_count("stop_token_ids", p.stop_token_ids.size(), kMaxStopTokenIds));
  RETURN_IF_ERROR(check_at_most("top_logprobs", p.top_logprobs, kMaxTopLogprobs));
  RETURN_IF_ERROR(check_at_most("prompt_logprobs", p.prompt_top_logprobs, kMaxTopLogprobs));
  RETURN_IF_ERROR(check_range("repetition_penalty", p.repetition_penalty, kMinRepetitionPenalty,
                              1.0f / kMinRepetitionPenalty));
  RETURN_IF_ERROR(check_range("presence_penalty", p.presence_penalty, -kMaxPenalty, kMaxPenalty));
  RETURN_IF_ERROR(check_range("frequency_penalty", p.frequency_penalty, -kMaxPenalty, kMaxPenalty));
  RETURN_IF_ERROR(check_count("logit_bias", p.logit_bias.size(), kMaxLogitBias));
  std::vector<TokenId> biased;
  for (const TokenBias& entry : p.logit_bias) {
    if (entry.bias != -INFINITY) {
      RETURN_IF_ERROR(check_range("logit_bias", entry.bias, -kMaxLogitBiasValue, kMaxLogitBiasValue));
    }
    biased.push_back(entry.token);
  }
  std::sort(biased.begin(), biased.end());
  if (std::adjacent_find(biased.begin(), biased.end()) != biased.end()) {
    return invalid_field("logit_bias", "names a token twice");
  }
  return OkStatus();
}

Status validate(const SamplingParams& p, uint32_t vocab_size) {
  RETURN_IF_ERROR(validate(p));
  const auto outside = [vocab_size](std::string_view field, TokenId token) {
    return invalid_field(field, "the id " + std::to_string(token) + " is not in the vocabulary of " +
                                    std::to_string(vocab_size));
  };
  for (const TokenId token : p.stop_token_ids) {
    if (token >= vocab_size) return outside("stop_token_ids", token);
  }
  for (const TokenBias& entry : p.logit_bias) {
    if (entry.token >= vocab_size) return outside("logit_bias", entry.token);
  }
  return OkStatus();
}

}  // namespace conclave
