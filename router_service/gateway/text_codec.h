// What the gateway needs of text: tokens from prompts, text from tokens. The adapter over libs/text is
// router_service/model_text.h; tests bring a small one of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/text/conversation/chat_prompt.h"
#include "libs/text/conversation/format.h"
#include "libs/text/token_decoder.h"

namespace conclave::gateway {

// A conversation as the client sent it. It is checked when it is rendered.
struct ChatPrompt {
  text::ChatRequest request;
  // Bytes of text in it, and where most of them are ("messages[2].content"): a conversation that cannot fit
  // is refused before it is rendered.
  uint64_t text_bytes = 0;
  std::string largest_field;
};

struct EncodedChat {
  std::vector<TokenId> tokens;
  bool starts_in_reasoning = false;  // the prompt ended in the opening tag
};

// Any thread. encode and encode_chat may take milliseconds (a template runs in another process): call them
// only from threads that may block.
class TextCodec {
 public:
  virtual ~TextCodec() = default;
  // With `special_tokens`, added tokens that the text spells out become those tokens, as in a prompt that
  // holds a whole rendered conversation; else they are text like the rest.
  virtual StatusOr<std::vector<TokenId>> encode(std::string_view text, bool special_tokens) const = 0;
  // Renders the template, and encodes. INVALID_ARGUMENT names the member at fault ("messages[1].role"), or
  // none when the template itself refuses the messages; FAILED_PRECONDITION when the model has no template;
  // DEADLINE_EXCEEDED past `deadline` or when rendering took too long.
  virtual StatusOr<EncodedChat> encode_chat(const ChatPrompt& chat, TimePoint deadline) const = 0;
  virtual std::unique_ptr<text::TokenDecoder> decoder(bool skip_special) const = 0;
  // The bytes of one token, possibly part of a character; empty when it has none.
  virtual std::string token_bytes(TokenId token) const = 0;
  // All of them as text.
  virtual std::string decode(const std::vector<TokenId>& tokens, bool skip_special) const = 0;
  // How the model writes reasoning and tool calls.
  virtual text::ConversationFormat format() const { return {}; }
  virtual bool has_chat_template() const { return true; }
  // Ids at or above have no token and are never sampled.
  virtual uint32_t vocab_limit() const = 0;
  // A token's text has at most so many bytes; prompts that cannot fit are refused before they are tokenized.
  virtual uint32_t max_token_bytes() const = 0;
};

}  // namespace conclave::gateway
