#include "router_service/model_text.h"

#include <algorithm>
#include <utility>

#include "libs/telemetry/log.h"

namespace conclave::router {

ModelText::ModelText(std::unique_ptr<text::Tokenizer> tokenizer, std::unique_ptr<text::ChatTemplate> chat,
                     text::ConversationFormat format)
    : tokenizer_(std::move(tokenizer)), chat_(std::move(chat)), format_(std::move(format)) {
  for (TokenId id = 0; id < tokenizer_->vocab_size(); ++id)
    max_token_bytes_ = std::max(max_token_bytes_, static_cast<uint32_t>(tokenizer_->token_bytes(id).size()));
  // Tokens that swallow white space around them, and normalization, may cover more than their own bytes.
  max_token_bytes_ *= 4;
}

StatusOr<std::unique_ptr<ModelText>> ModelText::load(const std::string& model_dir,
                                                     text::ChatTemplateOptions options,
                                                     std::string* no_template) {
  ASSIGN_OR_RETURN(auto tokenizer, text::Tokenizer::load(model_dir + "/tokenizer.json"));
  std::unique_ptr<text::ChatTemplate> chat;
  text::ConversationFormat format;
  auto source = text::read_template_source(model_dir, tokenizer.get());
  if (source.ok()) {
    format = text::detect_format(*source, tokenizer.get());
    ASSIGN_OR_RETURN(chat, text::ChatTemplate::start(std::move(source).value(), std::move(options)));
  } else if (source.status().code() != StatusCode::kNotFound) {
    return source.status();
  } else if (no_template != nullptr) {
    *no_template = message_of(source.status());
  }
  std::unique_ptr<ModelText> out(new ModelText(std::move(tokenizer), std::move(chat), std::move(format)));
  if (out->chat_ == nullptr) return out;
  auto prompts = text::ChatPromptBuilder::create(*out->chat_, *out->tokenizer_, out->format_);
  if (prompts.ok()) {
    out->prompts_ = std::move(prompts).value();
  } else if (prompts.status().code() != StatusCode::kInvalidArgument) {
    return prompts.status();
  } else if (no_template != nullptr) {
    *no_template = message_of(prompts.status());
  }
  return out;
}

StatusOr<std::vector<TokenId>> ModelText::encode(std::string_view text, bool special_tokens) const {
  return tokenizer_->encode(text,
                            special_tokens ? text::SpecialTokens::kParse : text::SpecialTokens::kAsText);
}

StatusOr<gateway::EncodedChat> ModelText::encode_chat(const gateway::ChatPrompt& chat,
                                                      TimePoint deadline) const {
  if (prompts_ == nullptr)
    return failed_precondition("the model has no chat template; use /v1/completions with a rendered prompt");
  ASSIGN_OR_RETURN(text::ChatPromptTokens prompt, prompts_->build(chat.request, deadline));
  for (const std::string& warning : prompt.warnings)
    if (warnings_(warning))
      log_warn(LogModule::kModel, "part of a conversation is not in its prompt", {{"cause", warning}});
  return gateway::EncodedChat{std::move(prompt.ids), prompt.starts_in_reasoning};
}

std::unique_ptr<text::TokenDecoder> ModelText::decoder(bool skip_special) const {
  return text::make_token_decoder(*tokenizer_, format_, skip_special);
}

}  // namespace conclave::router
