// A tokenizer, a template and the prompt builder over them, for tests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "libs/text/conversation/chat_prompt.h"
#include "libs/text/conversation/json_text.h"
#include "tests/text/golden_file.h"

namespace conclave::text {

struct Model {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat;
  std::unique_ptr<ChatPromptBuilder> builder;
};

inline Model make_model(std::unique_ptr<Tokenizer> tokenizer, TemplateSource source) {
  Model out;
  out.tokenizer = std::move(tokenizer);
  const ConversationFormat format = detect_format(source, out.tokenizer.get());
  ChatTemplateOptions options;
  options.processes = 1;
  auto chat = ChatTemplate::start(std::move(source), options);
  EXPECT_TRUE(chat.ok()) << chat.status();
  out.chat = std::move(*chat);
  auto builder = ChatPromptBuilder::create(*out.chat, *out.tokenizer, format);
  EXPECT_TRUE(builder.ok()) << builder.status();
  out.builder = std::move(*builder);
  return out;
}

inline std::unique_ptr<Tokenizer> small_tokenizer() {
  auto out = Tokenizer::load(data_dir() + "/small_tokenizer.json");
  EXPECT_TRUE(out.ok());
  return std::move(*out);
}

// What a checkpoint directory with this template and the tokenizer's tokens would give.
inline TemplateSource source_of(const std::string& text, const Tokenizer& tokenizer) {
  TemplateSource source;
  source.templates["default"] = text;
  for (const AddedToken& token : tokenizer.added_tokens()) {
    (token.special ? source.special_tokens : source.other_tokens).push_back(token.content);
  }
  return source;
}

// The added tokens among ids, spelt out.
inline std::vector<std::string> control(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  std::vector<std::string> out;
  for (const TokenId id : ids) {
    for (const AddedToken& token : tokenizer.added_tokens()) {
      if (token.id == id) out.push_back(token.content);
    }
  }
  return out;
}

inline ChatPromptTokens built(const Model& model, ChatRequest request) {
  auto out = model.builder->build(request);
  EXPECT_TRUE(out.ok()) << out.status() << " " << request.messages_json;
  if (!out.ok()) return {};
  EXPECT_EQ(model.tokenizer->decode(out->ids, false), out->text);
  return *std::move(out);
}

inline std::string message(const std::string& role, const std::string& content) {
  return "{\"role\": \"" + role + "\", \"content\": " + json_quoted(content) + "}";
}

}  // namespace conclave::text
