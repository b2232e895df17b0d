// Log-probabilities in the three forms that clients know. Private to the writer: it brings Boost.JSON in.
#pragma once

#include <boost/json.hpp>
#include <string>
#include <vector>

#include "router_service/gateway/choice.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::router {

struct LogprobStyle {
  const gateway::TextCodec* text = nullptr;
  uint32_t top = 0;            // alternatives shown for each token
  bool tokens_as_ids = false;  // "token_id:N" instead of the text
};

// A token's text as JSON can hold it: bytes that are no character on their own become U+FFFD.
std::string token_text(const LogprobStyle& style, TokenId token);

// Chats: {"content":[{"token","logprob","bytes","top_logprobs"}],"refusal":null}.
boost::json::object chat_logprobs(const LogprobStyle& style, const std::vector<gateway::TokenOutput>& tokens);

// Completions: tokens, token_logprobs, top_logprobs, text_offset. For one choice, token by token; offsets are
// counted in characters from the beginning of its text.
class LegacyLogprobs {
 public:
  explicit LegacyLogprobs(LogprobStyle style) : style_(style) {}
  // The prompt's own tokens, for echo; the first has no log-probability.
  void add_prompt(const std::vector<TokenId>& prompt, const std::vector<PromptLogprob>& logprobs);
  void add(const std::vector<gateway::TokenOutput>& tokens);
  // What was added since the last call.
  boost::json::object take();

 private:
  void add_token(TokenId token, const float* logprob, const std::vector<TokenLogprob>& top);

  LogprobStyle style_;
  uint64_t offset_ = 0;
  boost::json::array tokens_, logprobs_, top_, offsets_;
};

// vLLM's prompt_logprobs: null for the first token, then {"ID":{"logprob","rank","decoded_token"}}, the
// prompt's own token first. A rank is known only among the alternatives.
boost::json::array prompt_logprobs_json(const LogprobStyle& style, const std::vector<TokenId>& prompt,
                                        const std::vector<PromptLogprob>& logprobs);

}  // namespace conclave::router
