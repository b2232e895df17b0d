// The bodies of /v1/completions, /v1/chat/completions, /tokenize and /detokenize. A field that would change
// the answer and cannot be honoured is refused by name, never ignored; fields without effect here (user,
// metadata
// ...) are taken, and names that nobody knows are reported for the log.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "libs/base/status.h"
#include "router_service/gateway/admission.h"
#include "router_service/gateway/request.h"

namespace conclave::router {

// How the answer is written.
struct AnswerStyle {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;     // stream_options.include_usage
  bool continuous_usage = false;  // stream_options.continuous_usage_stats: in every chunk
  bool logprobs = false;
  bool prompt_logprobs = false;  // as a field of its own, vLLM's form
  bool echo = false;
  bool return_token_ids = false;  // an extension: token_ids beside the text
  bool tokens_as_ids = false;     // tokens in log-probabilities are "token_id:N"
  bool include_reasoning = true;  // false: reasoning is generated and counted, not shown
};

struct OpenAiRequest {
  gateway::GenerateRequest generate;
  // Completions may ask for several prompts at once; these come after the one in `generate`.
  std::vector<std::variant<gateway::TextPrompt, gateway::TokenPrompt>> more_prompts;
  AnswerStyle style;
  // Of the header x-conclave-resumable; then generate.resume_context is set where it can be.
  bool resumable = false;
  int64_t created = 0;  // as that context has them; 0: there is none
  std::string fingerprint;
  // Names of fields that nobody knows, cut short; at most kMaxUnknown.
  std::vector<std::string> unknown;
  static constexpr size_t kMaxUnknown = 16;
};

// INVALID_ARGUMENT names the field. Whether values fit the model is the gateway's business, and whether
// messages fit its template that of whoever renders them.
StatusOr<OpenAiRequest> parse_completion(std::string_view body, const gateway::AdmissionLimits& limits = {});
StatusOr<OpenAiRequest> parse_chat_completion(std::string_view body,
                                              const gateway::AdmissionLimits& limits = {});

struct TokenizeRequest {
  std::string model;  // empty: the served one
  std::variant<gateway::TextPrompt, gateway::ChatPrompt> prompt;
  bool return_token_strs = false;
  bool allow_special_tokens = false;  // of a text
};
StatusOr<TokenizeRequest> parse_tokenize(std::string_view body, const gateway::AdmissionLimits& limits = {});

struct DetokenizeRequest {
  std::string model;
  std::vector<int64_t> tokens;
};
StatusOr<DetokenizeRequest> parse_detokenize(std::string_view body);

}  // namespace conclave::router
