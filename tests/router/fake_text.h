// A text codec for tests: one token per byte (ids 0..255), 256 ends a sequence, 257 is an added token
// "<|x|>".
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "router_service/gateway/text_codec.h"

namespace conclave::testing {

inline constexpr TokenId kEos = 256;
inline constexpr uint32_t kFakeVocab = 258;
inline constexpr uint32_t kFakeRows = 264;  // rows 258..263 have no token

class FakeTokenText : public gateway::TokenText {
 public:
  void push(TokenId token, std::string& out) override {
    if (token > 255) {
      out += token == kEos ? "<eos>" : "<|x|>";
      return;
    }
    held_ += static_cast<char>(token);
    const auto lead = static_cast<unsigned char>(held_[0]);
    const size_t need = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (held_.size() < need) return;
    out += held_;
    held_.clear();
  }
  void flush(std::string& out) override {
    if (!held_.empty()) out += "\xef\xbf\xbd";
    held_.clear();
  }

 private:
  std::string held_;
};

inline std::vector<TokenId> byte_tokens(std::string_view text) {
  std::vector<TokenId> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

class FakeText : public gateway::TextCodec {
 public:
  StatusOr<std::vector<TokenId>> encode(std::string_view text) const override { return byte_tokens(text); }
  StatusOr<std::vector<TokenId>> encode_chat(const gateway::ChatPrompt& chat) const override {
    if (chat.document_json.find("refuse-me") != std::string::npos)
      return invalid_argument("the template refuses these messages");
    return byte_tokens("[chat]" + chat.document_json);
  }
  std::unique_ptr<gateway::TokenText> decoder() const override { return std::make_unique<FakeTokenText>(); }
  uint32_t vocab_limit() const override { return kFakeVocab; }
  uint32_t max_token_bytes() const override { return 1; }
};

inline ModelSpec fake_model(uint32_t max_positions = 4096) {
  ModelSpec model;
  model.name = "fake-m2";
  model.vocab_size = kFakeRows;
  model.max_positions = max_positions;
  model.stop_token_ids = {kEos};
  model.default_temperature = 0.7f;
  model.default_top_p = 0.95f;
  model.default_top_k = 40;
  return model;
}

}  // namespace conclave::testing
