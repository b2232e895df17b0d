// From a chat request to the tokens of its prompt.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libs/base/clock.h"
#include "libs/base/ids.h"
#include "libs/base/status.h"
#include "libs/text/chat_template.h"
#include "libs/text/conversation/format.h"
#include "libs/text/conversation/history.h"
#include "libs/text/tokenizer.h"

namespace conclave::text {

struct ChatRequest {
  std::string messages_json;         // the request's "messages", a JSON array
  std::string tools_json;            // the request's "tools"; empty: none
  std::string template_kwargs_json;  // "chat_template_kwargs", a JSON object; empty: none
  bool add_generation_prompt = true;
  // For trusted callers: control tokens that the request's strings spell out are tokens.
  bool allow_special_tokens = false;
};

struct ChatPromptTokens {
  std::vector<TokenId> ids;
  std::string text;  // the rendered prompt
  bool starts_in_reasoning =
      false;  // it ends in the opening think tag: ConversationOptions has the same member
  std::vector<std::string> warnings;
};

// Thread-safe. Role markers and special tokens in the text of a request (messages of any role, tools,
// template variables; names and keys as well as values) are text: no control token of the prompt comes from
// there, but for the think and call tags that an assistant's own turn spells out in full. Otherwise the ids
// are those of tokenizing the rendered prompt in one go, merges across the border of a user's text included.
class ChatPromptBuilder {
 public:
  // Probes the template, which takes a few renders. `chat` and `tokenizer` must outlive the builder.
  static StatusOr<std::unique_ptr<ChatPromptBuilder>> create(ChatTemplate& chat, const Tokenizer& tokenizer,
                                                             ConversationFormat format,
                                                             TimePoint deadline = kNever);

  // INVALID_ARGUMENT names the member of the request at fault; otherwise as ChatTemplate::render. Blocks for
  // milliseconds.
  StatusOr<ChatPromptTokens> build(const ChatRequest& request, TimePoint deadline = kNever) const;
  // The same without the tokens.
  StatusOr<RenderedPrompt> render(const ChatRequest& request, TimePoint deadline,
                                  std::vector<std::string>& warnings) const;

  const TemplateTraits& traits() const { return traits_; }
  const ConversationFormat& format() const { return format_; }

 private:
  ChatPromptBuilder(ChatTemplate& chat, const Tokenizer& tokenizer, ConversationFormat format,
                    TemplateTraits traits)
      : chat_(chat), tokenizer_(tokenizer), format_(std::move(format)), traits_(traits) {}

  ChatTemplate& chat_;
  const Tokenizer& tokenizer_;
  const ConversationFormat format_;
  const TemplateTraits traits_;
};

// Whether a prompt ends in the format's opening think tag, one that is a tag and not a user's text.
bool opens_reasoning(const RenderedPrompt& prompt, const ConversationFormat& format);

}  // namespace conclave::text
