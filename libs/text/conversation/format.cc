#include "libs/text/conversation/format.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "libs/text/detokenizer.h"

namespace conclave::text {
namespace {

class Decoder final : public TokenDecoder {
 public:
  explicit Decoder(Detokenizer inner) : inner_(std::move(inner)) {}
  void push(TokenId token, std::string& out) override { out += inner_.push(token); }
  void flush(std::string& out) override { out += inner_.flush(); }

 private:
  Detokenizer inner_;
};

}  // namespace

ConversationFormat detect_format(const TemplateSource& source, const Tokenizer* tokenizer) {
  const auto names = [&](std::string_view tag) {
    const bool in_template =
        std::any_of(source.templates.begin(), source.templates.end(),
                    [&](const auto& entry) { return entry.second.find(tag) != std::string::npos; });
    return in_template || (tokenizer != nullptr && tokenizer->special_id(tag).has_value());
  };
  ConversationFormat out;
  if (names("<minimax:tool_call>")) {
    out.tools = ToolFormat::kMiniMaxM2;
  } else if (names("<tool_calls>")) {
    out.tools = ToolFormat::kMiniMaxM1;
  }
  // M1's template does not name the tags: the model writes them on its own.
  out.reasons = out.tools == ToolFormat::kMiniMaxM1 || names(out.think_close);
  return out;
}

std::vector<std::string> format_tags(const ConversationFormat& format) {
  std::vector<std::string> out;
  if (format.reasons) out = {format.think_open, format.think_close};
  if (format.tools == ToolFormat::kMiniMaxM2) {
    out.insert(out.end(), {"<minimax:tool_call>", "</minimax:tool_call>"});
  } else if (format.tools == ToolFormat::kMiniMaxM1) {
    out.insert(out.end(), {"<tool_calls>", "</tool_calls>"});
  }
  return out;
}

std::unique_ptr<TokenDecoder> make_token_decoder(const Tokenizer& tokenizer, const ConversationFormat& format,
                                                 bool skip_special) {
  std::vector<TokenId> kept;
  for (const std::string& tag : format_tags(format)) {
    if (const std::optional<TokenId> id = tokenizer.special_id(tag)) kept.push_back(*id);
  }
  return std::make_unique<Decoder>(Detokenizer(tokenizer, skip_special, std::move(kept)));
}

}  // namespace conclave::text
