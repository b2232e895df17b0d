// What the gateway needs of text: tokens from prompts, text from tokens. The adapter over libs/text is
// router_service/model_text.h; tests bring a small one of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/ids.h"
#include "libs/base/status.h"

namespace conclave::gateway {

// Text of one sequence, token by token; never half a character.
class TokenText {
 public:
  virtual ~TokenText() = default;
  // Appends what the tokens so far decide.
  virtual void push(TokenId token, std::string& out) = 0;
  // Ends the text: an unfinished character becomes U+FFFD.
  virtual void flush(std::string& out) = 0;
};

// A conversation as the JSON object that a chat template is rendered with: {"messages":[...],
// "add_generation_prompt":true}, checked by the protocol adapter.
struct ChatPrompt {
  std::string document_json;
  uint32_t messages = 0;
  uint32_t tools = 0;
};

// Any thread. encode and encode_chat may take milliseconds (a template runs in another process): call them
// only from threads that may block.
class TextCodec {
 public:
  virtual ~TextCodec() = default;
  // Added tokens written in the text become those tokens, as a completion prompt may hold a whole rendered
  // conversation.
  virtual StatusOr<std::vector<TokenId>> encode(std::string_view text) const = 0;
  // Renders the template with the generation prompt, and encodes. INVALID_ARGUMENT for messages that the
  // template refuses; FAILED_PRECONDITION when the model has no template.
  virtual StatusOr<std::vector<TokenId>> encode_chat(const ChatPrompt& chat) const = 0;
  virtual std::unique_ptr<TokenText> decoder() const = 0;
  // Ids at or above have no token and are never sampled.
  virtual uint32_t vocab_limit() const = 0;
  // A token's text has at most so many bytes; prompts that cannot fit are refused before they are tokenized.
  virtual uint32_t max_token_bytes() const = 0;
};

}  // namespace conclave::gateway
