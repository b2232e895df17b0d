// The gateway's TextCodec over a checkpoint's tokenizer and chat template.
#pragma once

#include <memory>
#include <string>

#include "libs/base/status.h"
#include "libs/text/chat_template.h"
#include "libs/text/conversation/chat_prompt.h"
#include "libs/text/conversation/format.h"
#include "libs/text/tokenizer.h"
#include "router_service/first_time.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::router {

class ModelText : public gateway::TextCodec {
 public:
  // Reads tokenizer.json and the template of a checkpoint directory, and starts the template's processes. A
  // directory without a template, or with one that renders no user's text, is fine; `no_template` then says
  // why chats will be refused.
  static StatusOr<std::unique_ptr<ModelText>> load(const std::string& model_dir,
                                                   text::ChatTemplateOptions options,
                                                   std::string* no_template = nullptr);

  StatusOr<std::vector<TokenId>> encode(std::string_view text, bool special_tokens) const override;
  StatusOr<gateway::EncodedChat> encode_chat(const gateway::ChatPrompt& chat,
                                             TimePoint deadline) const override;
  std::unique_ptr<text::TokenDecoder> decoder(bool skip_special) const override;
  std::string token_bytes(TokenId token) const override {
    return std::string(tokenizer_->token_bytes(token));
  }
  std::string decode(const std::vector<TokenId>& tokens, bool skip_special) const override {
    return tokenizer_->decode(tokens, skip_special);
  }
  text::ConversationFormat format() const override { return format_; }
  bool has_chat_template() const override { return prompts_ != nullptr; }
  uint32_t vocab_limit() const override { return static_cast<uint32_t>(tokenizer_->vocab_size()); }
  uint32_t max_token_bytes() const override { return max_token_bytes_; }
  const text::Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  ModelText(std::unique_ptr<text::Tokenizer> tokenizer, std::unique_ptr<text::ChatTemplate> chat,
            text::ConversationFormat format);

  const std::unique_ptr<text::Tokenizer> tokenizer_;
  const std::unique_ptr<text::ChatTemplate> chat_;
  const text::ConversationFormat format_;
  std::unique_ptr<text::ChatPromptBuilder> prompts_;  // null: chats are refused
  mutable FirstTime warnings_;
  uint32_t max_token_bytes_ = 1;
};

}  // namespace conclave::router
