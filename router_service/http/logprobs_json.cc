#include "router_service/http/logprobs_json.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "libs/text/utf8.h"

namespace conclave::router {
namespace json = boost::json;
namespace {

// JSON has no infinity; this is what vLLM writes for it.
constexpr float kLeastLogprob = -9999.0f;

json::value number(float logprob) {
  return std::isnan(logprob) ? kLeastLogprob : std::max(logprob, kLeastLogprob);
}

json::array bytes_json(const std::string& bytes) {
  json::array out;
  out.reserve(bytes.size());
  for (const char c : bytes) out.push_back(static_cast<unsigned char>(c));
  return out;
}

json::object chat_entry(const LogprobStyle& style, TokenId token, float logprob) {
  json::object out;
  out["token"] = token_text(style, token);
  out["logprob"] = number(logprob);
  out["bytes"] = bytes_json(style.text->token_bytes(token));
  return out;
}

}  // namespace

std::string token_text(const LogprobStyle& style, TokenId token) {
  if (style.tokens_as_ids) return "token_id:" + std::to_string(token);
  return text::replace_invalid_utf8(style.text->token_bytes(token));
}

json::object chat_logprobs(const LogprobStyle& style, const std::vector<gateway::TokenOutput>& tokens) {
  json::array content;
  content.reserve(tokens.size());
  for (const gateway::TokenOutput& token : tokens) {
    json::object entry = chat_entry(style, token.token, token.logprob);
    json::array top;
    for (size_t i = 0; i < token.top.size() && i < style.top; ++i)
      top.push_back(chat_entry(style, token.top[i].token, token.top[i].logprob));
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

void LegacyLogprobs::add_token(TokenId token, const float* logprob, const std::vector<TokenLogprob>& top) {
  const std::string text = token_text(style_, token);
  offsets_.push_back(offset_);
  // With "token_id:N" the offsets are still those of the text.
  const std::string shown = text::replace_invalid_utf8(style_.text->token_bytes(token));
  offset_ += static_cast<uint64_t>(
      std::count_if(shown.begin(), shown.end(), [](char c) { return (c & 0xc0) != 0x80; }));
  if (logprob == nullptr) {
    logprobs_.push_back(nullptr);
    top_.push_back(nullptr);
  } else {
    logprobs_.push_back(number(*logprob));
    json::object alternatives;
    for (size_t i = 0; i < top.size() && i < style_.top; ++i)
      alternatives.emplace(token_text(style_, top[i].token), number(top[i].logprob));
    alternatives.emplace(text, number(*logprob));  // the token itself is always among them
    top_.push_back(std::move(alternatives));
  }
  tokens_.push_back(json::string(text));
}

void LegacyLogprobs::add_prompt(const std::vector<TokenId>& prompt,
                                const std::vector<PromptLogprob>& logprobs) {
  static const std::vector<TokenLogprob> kNone;
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (i == 0 || i > logprobs.size())
      add_token(prompt[i], nullptr, kNone);
    else
      add_token(prompt[i], &logprobs[i - 1].logprob, logprobs[i - 1].top);
  }
}

void LegacyLogprobs::add(const std::vector<gateway::TokenOutput>& tokens) {
  for (const gateway::TokenOutput& token : tokens) add_token(token.token, &token.logprob, token.top);
}

json::object LegacyLogprobs::take() {
  json::object out;
  out["tokens"] = std::exchange(tokens_, {});
  out["token_logprobs"] = std::exchange(logprobs_, {});
  out["top_logprobs"] = std::exchange(top_, {});
  out["text_offset"] = std::exchange(offsets_, {});
  return out;
}

json::array prompt_logprobs_json(const LogprobStyle& style, const std::vector<TokenId>& prompt,
                                 const std::vector<PromptLogprob>& logprobs) {
  json::array out;
  if (!prompt.empty()) out.push_back(nullptr);
  for (size_t i = 1; i < prompt.size() && i <= logprobs.size(); ++i) {
    const PromptLogprob& at = logprobs[i - 1];
    json::object entry;
    const auto add = [&](TokenId token, float logprob, json::value rank) {
      const std::string key = std::to_string(token);
      if (json::value* known = entry.if_contains(key)) {
        known->as_object()["rank"] = std::move(rank);
        return;
      }
      entry[key] = json::object{{"logprob", number(logprob)},
                                {"rank", std::move(rank)},
                                {"decoded_token", json::string(token_text(style, token))}};
    };
    add(prompt[i], at.logprob, at.rank > 0 ? json::value(static_cast<uint64_t>(at.rank)) : json::value());
    for (size_t k = 0; k < at.top.size() && k < style.top; ++k)
      add(at.top[k].token, at.top[k].logprob, static_cast<uint64_t>(k + 1));
    out.push_back(std::move(entry));
  }
  return out;
}

}  // namespace conclave::router
