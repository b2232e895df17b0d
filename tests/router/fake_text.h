// A text codec for tests: one token per byte (ids 0..255), 256 ends a sequence, 257 is an added token
// "<|x|>".
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "libs/model/model_spec.h"
#include "router_service/gateway/text_codec.h"

namespace conclave::testing {

inline constexpr TokenId kEos = 256;
inline constexpr uint32_t kFakeVocab = 258;
inline constexpr uint32_t kFakeRows = 264;  // rows 258..263 have no token

class FakeTokenText : public text::TokenDecoder {
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
  StatusOr<std::vector<TokenId>> encode(std::string_view text, bool special_tokens) const override {
    if (!special_tokens) return byte_tokens(text);
    std::vector<TokenId> tokens;
    while (!text.empty()) {
      const bool eos = text.starts_with("<eos>");
      tokens.push_back(eos ? kEos : static_cast<unsigned char>(text[0]));
      text.remove_prefix(eos ? 5 : 1);
    }
    return tokens;
  }
  // "[chat]" and the messages, tools and template variables; a conversation of the M2 format.
  StatusOr<gateway::EncodedChat> encode_chat(const gateway::ChatPrompt& chat,
                                             TimePoint deadline) const override {
    ++chats;
    if (stall.load()) {
      if (deadline < steady_now() + kSecond)
        std::this_thread::sleep_until(
            std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline)));
      return deadline_exceeded("the template took too long");
    }
    ASSIGN_OR_RETURN(const auto history,
                     text::normalize_history(chat.request.messages_json,
                                             text::TemplateTraits{true, true, true, true, true}, format()));
    if (history.messages_json.find("refuse-me") != std::string::npos)
      return invalid_argument("the template refuses these messages");
    gateway::EncodedChat out;
    out.tokens = byte_tokens("[chat]" + history.messages_json + chat.request.tools_json +
                             chat.request.template_kwargs_json);
    out.starts_in_reasoning = starts_in_reasoning;
    return out;
  }
  std::unique_ptr<text::TokenDecoder> decoder(bool) const override {
    return std::make_unique<FakeTokenText>();
  }
  std::string token_bytes(TokenId token) const override {
    return token < 256 ? std::string(1, static_cast<char>(token)) : token == kEos ? "<eos>" : "<|x|>";
  }
  std::string decode(const std::vector<TokenId>& tokens, bool) const override {
    std::string out;
    for (const TokenId token : tokens) out += token_bytes(token);
    return out;
  }
  text::ConversationFormat format() const override {
    text::ConversationFormat out;
    out.tools = text::ToolFormat::kMiniMaxM2;
    out.reasons = true;
    return out;
  }
  uint32_t vocab_limit() const override { return kFakeVocab; }
  uint32_t max_token_bytes() const override { return 1; }

  std::atomic<bool> stall{false};     // rendering takes too long
  bool starts_in_reasoning = false;   // prompts end in the opening tag
  mutable std::atomic<int> chats{0};  // rendered so far
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
