// The gateway's TextCodec over a checkpoint's tokenizer and chat template.
#pragma once

#include <memory>
#include <string>

#include "libs/base/status.h"
#include "libs/text/chat_template.h"
#include "libs/text/tokenizer.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::router {

class ModelText : public gateway::TextCodec {
 public:
  // `chat` may be null: the model has no template, and chats are refused.
  ModelText(std::unique_ptr<text::Tokenizer> tokenizer, std::unique_ptr<text::ChatTemplate> chat);
  // Reads tokenizer.json and the template of a checkpoint directory, and starts the template's processes. A
  // directory without a template is fine; `no_template` then says why chats will be refused.
  static StatusOr<std::unique_ptr<ModelText>> load(const std::string& model_dir,
                                                   text::ChatTemplateOptions options,
                                                   std::string* no_template = nullptr);

  StatusOr<std::vector<TokenId>> encode(std::string_view text) const override;
  StatusOr<std::vector<TokenId>> encode_chat(const gateway::ChatPrompt& chat) const override;
  std::unique_ptr<gateway::TokenText> decoder() const override;
  uint32_t vocab_limit() const override { return static_cast<uint32_t>(tokenizer_->vocab_size()); }
  uint32_t max_token_bytes() const override { return max_token_bytes_; }
  const text::Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  const std::unique_ptr<text::Tokenizer> tokenizer_;
  const std::unique_ptr<text::ChatTemplate> chat_;
  uint32_t max_token_bytes_ = 1;
};

}  // namespace conclave::router
