#include "router_service/model_text.h"

#include <algorithm>
#include <utility>

#include "libs/text/detokenizer.h"

namespace conclave::router {
namespace {

class Decoder : public gateway::TokenText {
 public:
  explicit Decoder(const text::Tokenizer& tokenizer) : inner_(tokenizer, /*skip_special=*/true) {}
  void push(TokenId token, std::string& out) override { out += inner_.push(token); }
  void flush(std::string& out) override { out += inner_.flush(); }

 private:
  text::Detokenizer inner_;
};

}  // namespace

ModelText::ModelText(std::unique_ptr<text::Tokenizer> tokenizer, std::unique_ptr<text::ChatTemplate> chat)
    : tokenizer_(std::move(tokenizer)), chat_(std::move(chat)) {
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
  auto source = text::read_template_source(model_dir, tokenizer.get());
  if (source.ok()) {
    ASSIGN_OR_RETURN(chat, text::ChatTemplate::start(std::move(source).value(), std::move(options)));
  } else if (source.status().code() != StatusCode::kNotFound) {
    return source.status();
  } else if (no_template != nullptr) {
    *no_template = message_of(source.status());
  }
  return std::make_unique<ModelText>(std::move(tokenizer), std::move(chat));
}

StatusOr<std::vector<TokenId>> ModelText::encode(std::string_view text) const {
  return tokenizer_->encode(text, text::SpecialTokens::kParse);
}

StatusOr<std::vector<TokenId>> ModelText::encode_chat(const gateway::ChatPrompt& chat) const {
  if (chat_ == nullptr)
    return failed_precondition("the model has no chat template; use /v1/completions with a rendered prompt");
  ASSIGN_OR_RETURN(const text::RenderedPrompt prompt, chat_->render(chat.document_json));
  return tokenizer_->encode(prompt.text, text::SpecialTokens::kParse, prompt.literal);
}

std::unique_ptr<gateway::TokenText> ModelText::decoder() const {
  return std::make_unique<Decoder>(*tokenizer_);
}

}  // namespace conclave::router
